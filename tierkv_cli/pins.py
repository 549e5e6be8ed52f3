"""`tierkv pins`: what is pinned, by whom, until when, and what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.wire.messages import PinnedTier, PinRow

ID_DIGITS = 8
WIDE = 100
"""Columns of a terminal that has room for all that is told of a pin."""


@click.command(short_help="List what is pinned.")
@json_option
@where_options
def command(*, where: Where, as_json: bool) -> None:
    """List what is pinned: by whom, on which tier, until when, and what it holds.

    "holds": all of it is cached, and stays. "partly": what is cached of it stays. "waiting": nothing of it is cached
    yet. "short": some of what is cached does not stay, for pins hold as much of a tier as they may (pinned_share).
    "purged": some of it was purged; it holds nothing any more. "cached" is how much of it can be found at all,
    "memory", "nvme" and "disk" how much is in memory and in files of each tier now. A file in the disk tier stays as
    long as there is none on NVMe.

    Below: what all pins hold of each tier, what they would hold were all of it cached, and what they may. A file counts
    whole, so that more may be held than is pinned of it.
    """
    from tierkv_cli.output import console, count, plain, print_json, warn
    from tierkv_cli.reach import operator

    with operator(where) as node:
        found = node.pins()
    if as_json:
        print_json({"pins": plain(found.rows), "tiers": plain(found.tiers), "unreadable": found.unreadable})
        return
    screen = console()
    screen.print(_rows_table(found.rows, screen.width) if found.rows else "nothing is pinned")
    screen.print("")
    screen.print(_tier_table(found.tiers))
    for row in found.rows:
        if row.reason and not row.recorded:
            screen.print(warn(f"{row.pin.hex()[:ID_DIGITS]} is not on disk, and ends with the node: {row.reason}"))
    if found.unreadable:
        records = count(found.unreadable, "record")
        screen.print(warn(f"{records} of pins in the data directory can't be read; the node's log names them"))


def _rows_table(rows: tuple[PinRow, ...], width: int) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import table

    now = time.time()
    columns: dict[str, Callable[[PinRow], str]] = {
        "id": lambda row: row.pin.hex()[:ID_DIGITS],
        "owner": lambda row: row.owner or "-",
        "model": _model,
        "tokens": lambda row: f"{row.tokens:,}",
        "size": lambda row: human_size(row.booked_bytes) if row.booked_bytes else "-",
        "cached": lambda row: f"{100 * row.cached_blocks // row.blocks} %",
        "memory": lambda row: f"{100 * row.host_blocks // row.blocks} %",
        "nvme": lambda row: f"{100 * row.nvme_blocks // row.blocks} %",
        "disk": lambda row: f"{100 * row.disk_blocks // row.blocks} %",
        "tier": lambda row: row.tier,
        "state": lambda row: row.phase,
        "ends in": lambda row: _ends_in(row.until, now),
    }
    if not any(row.disk_blocks for row in rows):
        del columns["disk"]
    if width < WIDE:
        columns = {name: read for name, read in columns.items() if name not in ("size", "memory", "nvme", "disk")}
    shown = table(*columns, numbers=tuple(name for name in columns if name not in ("owner", "model")))  # never broken
    for row in rows:
        shown.add_row(*(read(row) for read in columns.values()))
    return shown


def _ends_in(until: float, now: float) -> str:
    from tierkv_cli.output import duration

    return duration(until - now) if until else "-"


def _model(row: PinRow) -> str:
    name = row.model_name or row.fingerprint[:12] or "-"
    return f"{name}, tenant {row.salt}" if row.salt else name


def _tier_table(tiers: tuple[PinnedTier, ...]) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    numbers = ("held by pins", "when all is cached", "at most", "of that")
    shown = table("tier", *numbers, numbers=numbers)
    for tier in tiers:
        shown.add_row(
            tier.tier,
            human_size(tier.held_bytes),
            human_size(tier.booked_bytes),
            human_size(tier.cap_bytes),
            percent(tier.held_bytes, tier.cap_bytes),
        )
    return shown
