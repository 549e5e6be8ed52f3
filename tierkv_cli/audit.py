"""`tierkv audit`: hold what is there against what is booked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.core.instructions import Difference
    from tierkv.wire.messages import AuditReply

INCOMPLETE = 4


@click.command(short_help="Hold what is there against what is booked.")
@click.option("--resolve", metavar="ID", type=click.IntRange(min=1), help="Close the difference with this number.")
@click.option("--as", "resolution", metavar="TEXT", help="With --resolve: what it was, for whoever reads it later.")
@click.option("--all", "shows_all", is_flag=True, help="Also list differences that are resolved.")
@json_option
@where_options
def command(*, where: Where, resolve: int | None, resolution: str | None, shows_all: bool, as_json: bool) -> int:
    """Recount every tier, the files of each group and the slots of host memory, and hold that against the balances of
    the journal. The node does it while it serves; without a running node its data directory is counted here, locked.

    What differs is written to a table (journal/differences.json) and stays open until somebody resolves it:
    `tierkv audit --resolve ID --as TEXT`. A difference is booked at once, so it is told once: nothing of the cache is
    lost or wrong by it. Files that others removed, put there or changed make differences, and so would a bug of tierkv;
    kill -9 and power loss make none (what they may explain is resolved from the start, and says so). A node recounts at
    each start by itself.

    Of the disk tier the directory is counted against what the node knows of it. Other nodes may share it, so what
    differs there is told as found, and is no difference.

    Exit code 4 when a difference is open, or when not all could be looked at; 0 when all agrees.
    """
    from tierkv_cli.output import console, print_json

    if (resolve is None) != (not (resolution or "").strip()):
        raise click.UsageError("say --resolve ID and --as TEXT together", click.get_current_context(silent=True))
    if not (resolution or "").isprintable():
        raise click.UsageError("--as takes one line of text", click.get_current_context(silent=True))
    try:
        reply = run(where, resolve or 0, (resolution or "").strip())
    except KeyboardInterrupt:
        click.echo("tierkv: interrupted before its end; nothing is lost by that", err=True)
        return INCOMPLETE
    if not reply.known:
        click.echo(f"tierkv: {_not_known(reply, resolve)}", err=True)
        return INCOMPLETE
    is_open = [row for row in reply.table if row.is_open]
    if as_json:
        print_json(as_object(reply))
    else:
        screen = console()
        for part in view(reply, shows_all=shows_all, was_counted=resolve is None):
            screen.print(part)
    if reply.problem:
        click.echo(f"tierkv: not all could be looked at: {reply.problem}", err=True)
    return INCOMPLETE if is_open or reply.problem else 0


def _not_known(reply: AuditReply, number: int | None) -> str:
    from tierkv_cli.output import at, printable

    for row in reply.table:
        if row.number == number:
            return f"difference {number} was resolved {at(row.resolved_at)}: {printable(row.resolution)}"
    return f"there is no difference {number}"


def run(where: Where, resolve: int, resolution: str) -> AuditReply:
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, or_silent, wait_ready

    with Meter("audit") as meter, operator(where) as node:
        if node.is_connected() or where.endpoint is not None:
            wait_ready(node, meter)
            return _last(node.audit(resolve=resolve, resolution=resolution), meter)

        from tierkv_cli.offline_journal import audit_offline

        with or_silent(where):
            return _last(audit_offline(where.settings().settings, resolve=resolve, resolution=resolution), meter)


def _last(steps: Iterator[AuditReply], meter: object) -> AuditReply:
    from tierkv_cli.progress import Meter

    assert isinstance(meter, Meter)
    for step in steps:
        if step.finished:
            return step
        meter.say(step.stage, step.done, step.total)
    raise AssertionError("an audit ends with a step that is finished")


def as_object(reply: AuditReply) -> dict[str, object]:
    from tierkv_cli.output import plain

    return {
        "groups": plain(reply.groups),
        "files": sum(group.files for group in reply.groups),
        "nvme_bytes": sum(group.counted_bytes for group in reply.groups),
        "host_bytes": reply.host_bytes,
        "disk_groups": plain(reply.disk_groups),
        "disk_bytes": sum(group.counted_bytes for group in reply.disk_groups),
        "disk_known_bytes": sum(group.booked_bytes for group in reply.disk_groups),
        "open": sum(row.is_open for row in reply.table),
        "differences": [plain(row) | {"state": "open" if row.is_open else "resolved"} for row in reply.table],
        "problem": reply.problem,
    }


# ---- for people


def view(reply: AuditReply, *, shows_all: bool, was_counted: bool) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import at, count, printable, table

    if was_counted:
        files = sum(group.files for group in reply.groups)
        on_disk = human_size(sum(group.counted_bytes for group in reply.groups))
        yield (
            f"counted {count(files, 'file')} of {count(len(reply.groups), 'group')}, {on_disk}; "
            f"host memory {human_size(reply.host_bytes)}"
        )
        if reply.disk_groups:
            yield disk_words(reply)
    shown = [row for row in reply.table if row.is_open or shows_all]
    if shown:
        numbers = ("id", "booked", "counted", "difference")
        heads = ("id", "state", "found", "tier", "what", "booked", "counted", "difference", "resolution")
        rows = table(*heads, numbers=numbers)
        for row in shown:
            rows.add_row(
                str(row.number),
                "open" if row.is_open else "resolved",
                f"{at(row.found_at)} ({row.found_by})",
                row.tier,
                _what(row),
                human_size(row.booked_bytes),
                human_size(row.counted_bytes),
                _signed(row.counted_bytes - row.booked_bytes),
                printable(row.resolution),
            )
        yield rows
    is_open = sum(row.is_open for row in reply.table)
    if is_open:
        yield f"{count(is_open, 'difference')} open; say what it was: tierkv audit --resolve ID --as TEXT"
    else:
        yield "no difference is open"


def disk_words(reply: AuditReply) -> str:
    """Others may share the directory: what they have put there or removed is found, and no difference."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import count

    files = sum(group.files for group in reply.disk_groups)
    there = sum(group.counted_bytes for group in reply.disk_groups)
    more = sum(max(0, group.counted_bytes - group.booked_bytes) for group in reply.disk_groups)
    gone = sum(max(0, group.booked_bytes - group.counted_bytes) for group in reply.disk_groups)
    said = f"disk tier: counted {count(files, 'file')}, {human_size(there)}"
    if more:
        said += f"; found {human_size(more)} that others have put there since this node last looked"
    if gone:
        said += f"; {human_size(gone)} that this node knows of, others have removed"
    return said if more or gone else f"{said}, as this node knows it"


def _what(row: Difference) -> str:
    from tierkv_cli.output import printable

    if row.path:
        return f"{row.what}: {printable(row.path)}"
    return f"{row.what} of group {row.group[:12]}" if row.group else row.what


def _signed(num_bytes: int) -> str:
    from tierkv.config.sizes import human_size

    return ("+" if num_bytes > 0 else "-") + human_size(abs(num_bytes))
