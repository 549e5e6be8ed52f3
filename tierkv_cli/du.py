"""`tierkv du`: what takes how much room."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.storage.disk_usage import DiskUse
    from tierkv.wire.messages import NvmeWear, PinnedTier, PrefillRow, ShareRow, TierUsage, UsageReply, UsageRow

RAW = "raw"
BY = ("model", "adapter", "tenant", "group")


@click.command(short_help="Show what takes how much room.")
@click.option("--by", type=click.Choice(BY), default="model", show_default=True, help="What makes a line.")
@click.option("--disk", is_flag=True, help="Also measure the files on disk, each of them, as `du` does.")
@click.option("--scan", is_flag=True, help="Without a running node: count the files, instead of reading the journal.")
@json_option
@where_options
def command(*, where: Where, by: str, disk: bool, scan: bool, as_json: bool) -> int:
    """Show what takes how much room, in memory and on disk.

    "unreachable" is what belongs to identities that no connected engine has open: of a model that isn't served now, or
    that was changed since. It is not lost, and is found again when an engine with that identity comes back.
    A model may have blocks as they are and blocks in fp8: `--by group` tells them apart, and --json names the codecs.
    A tenant is shown by the first digits of its salt's digest.

    "prefill" is what computing is reckoned with, at the start of a prompt: measured from what engines tell, or the
    setting prefill_tokens_per_second until they have.

    The node tells what it has booked, and looks at no file for it. `--disk` looks: lengths of files, and what the disk
    gave for them, by what they are, in the data directory and in the disk directory, which other nodes may share. It
    has to be said on the node's machine, by who may read these.

    Without a running node the data directory tells, by the balances of its journal, which takes the same time however
    many files there are; the first line says as of when. `--scan` looks at each file instead, in the disk directory as
    well: that of the settings, or else the one that the node has used last. Exit code 4 where there
    is no journal to read. A node that runs is recounted by `tierkv audit`.
    """
    from tierkv_cli.output import console, plain, print_json
    from tierkv_cli.reach import operator

    with operator(where) as node:
        if not node.is_connected() and where.endpoint is None and where.settings().settings.data_dir is not None:
            return _offline(where, by, disk=disk, scan=scan, as_json=as_json)
        if scan:
            raise click.UsageError("--scan is for a data directory without a running node; see `tierkv audit`")
        usage = node.usage()
        pinned = node.pins().tiers
        shares = node.shares().rows
        status = node.status() if disk else None
    on_disk = measure_disk(status.data_dir) if status is not None else []
    on_share = measure_disk(status.disk_dir) if status is not None and status.disk_dir else []
    lines = aggregate(usage.rows, by)
    if as_json:
        print_json(
            {
                "by": by,
                "lines": [line.as_object() for line in lines],
                "total": total(lines).as_object(),
                "tiers": plain(usage.tiers),
                "pinned": plain(pinned),
                "wear": plain(usage.wear),
                "prefill": plain(usage.prefill),
                "shares": plain(shares),
                **({"disk": disk_as_object(on_disk)} if disk else {}),
                **({"disk_tier": disk_as_object(on_share)} if on_share else {}),
            }
        )
        return 0
    screen = console()
    for part in view(usage, lines, by, pinned):
        screen.print(part)
    if shares:
        screen.print("")
        screen.print(_share_table(shares))
    if disk:
        screen.print("")
        screen.print(_disk_table("on disk", on_disk))
    if on_share:
        screen.print("")
        screen.print(_disk_table("in the disk directory", on_share))
    return 0


def _offline(where: Where, by: str, *, disk: bool, scan: bool, as_json: bool) -> int:
    from tierkv.errors import DataDirectoryError
    from tierkv_cli import offline_du
    from tierkv_cli.output import console, print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import or_silent

    settings = where.settings().settings
    with or_silent(where), Meter("counting") as meter:
        found = offline_du.usage_offline(
            settings, scan=scan, measure=disk, progress=lambda done, total: meter.say("groups", done, total)
        )
    on_disk = measure_disk(str(settings.data_dir)) if disk else []
    on_share: list[DiskUse] = []
    if disk and found.disk_dir is not None:
        try:
            on_share = measure_disk(str(found.disk_dir))
        except DataDirectoryError as error:  # it may well be away while the data directory is not
            click.echo(f"tierkv: not measured: {error}", err=True)
    lines = aggregate(found.rows, by)
    if as_json:
        print_json(
            offline_du.as_object(found, lines, by)
            | ({"disk": disk_as_object(on_disk)} if disk else {})
            | ({"disk_tier": disk_as_object(on_share)} if on_share else {})
        )
        return 0
    screen = console()
    for part in offline_du.view(found, lines, by):
        screen.print(part)
    if disk:
        screen.print("")
        screen.print(_disk_table("on disk", on_disk))
    if on_share:
        screen.print("")
        screen.print(_disk_table("in the disk directory", on_share))
    for note in found.notes:
        click.echo(f"tierkv: {note}", err=True)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Sums over groups. `names` are what people call them, by column; `key` is what tells lines apart."""

    key: tuple[str, ...]
    names: dict[str, str]
    groups: int = 0
    extents: int = 0
    tokens: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    disk_bytes: int = 0
    gpu_bytes: int = 0
    unreachable_bytes: int = 0
    last_used: float = 0.0

    def as_object(self) -> dict[str, object]:
        sizes = ("host_bytes", "nvme_bytes", "disk_bytes", "gpu_bytes", "unreachable_bytes")
        return self.names | {name: getattr(self, name) for name in ("groups", "extents", "tokens", *sizes, "last_used")}

    @property
    def num_bytes(self) -> int:
        return self.gpu_bytes + self.host_bytes + self.nvme_bytes + self.disk_bytes


def aggregate(rows: Iterable[UsageRow], by: str) -> list[Line]:
    """One line for each model, adapter, tenant or group; the largest first."""
    lines: dict[tuple[str, ...], Line] = {}
    for row in rows:
        added = _line(row, by)
        before = lines.get(added.key)
        lines[added.key] = added if before is None else _sum(before, added)
    return sorted(lines.values(), key=lambda line: (-line.num_bytes, line.key))


def total(lines: Iterable[Line]) -> Line:
    found = Line(key=(), names={})
    for line in lines:
        found = _sum(found, line)
    return found


def _line(row: UsageRow, by: str) -> Line:
    key, names = _keys(row, by)
    num_bytes = row.gpu_bytes + row.host_bytes + row.nvme_bytes + row.disk_bytes
    return Line(
        key=key,
        names=names,
        groups=1,
        extents=row.extents,
        tokens=row.tokens,
        host_bytes=row.host_bytes,
        nvme_bytes=row.nvme_bytes,
        disk_bytes=row.disk_bytes,
        gpu_bytes=row.gpu_bytes,
        unreachable_bytes=0 if row.reachable else num_bytes,
        last_used=row.last_used,
    )


def _keys(row: UsageRow, by: str) -> tuple[tuple[str, ...], dict[str, str]]:
    model = {"model": row.model_name, "fingerprint": row.fingerprint, "codec": row.codec}
    adapter = {"adapter": row.adapter_name, "adapter_fingerprint": row.adapter}
    if by == "model":
        return (row.fingerprint,), model
    if by == "adapter":
        return (row.fingerprint, row.adapter), model | adapter
    if by == "tenant":
        return (row.salt,), {"tenant": row.salt}
    about = {
        "group": row.group.hex(),
        "dtype": row.dtype,
        "layout": row.layout,
        "block_tokens": str(row.block_tokens),
        "block_bytes": str(row.block_bytes),
        "ranks": str(row.ranks),
    }
    return (row.group.hex(),), model | adapter | {"tenant": row.salt} | about


def _sum(one: Line, other: Line) -> Line:
    return Line(
        key=one.key,
        names={column: _both(name, other.names.get(column, "")) for column, name in one.names.items()},
        groups=one.groups + other.groups,
        extents=one.extents + other.extents,
        tokens=one.tokens + other.tokens,
        host_bytes=one.host_bytes + other.host_bytes,
        nvme_bytes=one.nvme_bytes + other.nvme_bytes,
        disk_bytes=one.disk_bytes + other.disk_bytes,
        gpu_bytes=one.gpu_bytes + other.gpu_bytes,
        unreachable_bytes=one.unreachable_bytes + other.unreachable_bytes,
        last_used=max(one.last_used, other.last_used),
    )


def _both(name: str, other: str) -> str:
    """One fingerprint may have been called by several names."""
    known = name.split(", ") if name else []
    return name if not other or other in known else ", ".join([*known, other])


# ---- the files


def measure_disk(data_dir: str) -> list[DiskUse]:
    """Raises DataDirectoryError where there is nothing to measure, or it can't be."""
    from pathlib import Path

    from tierkv.errors import DataDirectoryError
    from tierkv.storage.disk_usage import measure

    if not data_dir:
        raise DataDirectoryError("this node keeps everything in memory: it has no data directory to measure")
    try:
        return measure(Path(data_dir))
    except OSError as error:
        raise DataDirectoryError(f"{error.filename} can't be looked at from here: {error.strerror}") from error


def disk_as_object(uses: list[DiskUse]) -> dict[str, dict[str, int]]:
    """By kind, and their sums as "total"."""
    numbers = ("files", "apparent_bytes", "allocated_bytes")
    rows = {use.kind: {name: getattr(use, name) for name in numbers} for use in uses}
    return rows | {"total": {name: sum(row[name] for row in rows.values()) for name in numbers}}


# ---- for people


def view(
    usage: UsageReply, lines: list[Line], by: str, pinned: tuple[PinnedTier, ...] = ()
) -> Iterator[RenderableType]:
    if lines:
        yield _lines_table(lines, by, {tier.tier for tier in usage.tiers})
    else:
        yield "nothing is cached yet"
    yield ""
    yield _tier_table(usage.tiers, {tier.tier: tier.held_bytes for tier in pinned})
    if usage.wear is not None:
        yield ""
        yield wear_line(usage.wear)
    if usage.prefill:
        yield ""
        yield from prefill_lines(usage.prefill)


def prefill_lines(rows: tuple[PrefillRow, ...]) -> Iterator[str]:
    """What computing is reckoned with: first the models whose engines have told, then the rest of them in one line."""
    measured = [row for row in rows if row.samples]
    for row in measured:
        name = row.model_name or _short(row.fingerprint)
        layout = f" ({row.dtype}, {row.layout})" if _is_served_in_several(row, rows) else ""
        yield f"prefill of {name}{layout}: {row.tokens_per_second:,.0f} tokens/s, measured ({row.samples} samples)"
    for rate in sorted({row.tokens_per_second for row in rows if not row.samples}):
        of_others = " of other models" if measured else ""
        yield f"prefill{of_others}: {rate:,.0f} tokens/s, the setting, until their engines have told"


def _is_served_in_several(row: PrefillRow, rows: tuple[PrefillRow, ...]) -> bool:
    return sum(row.fingerprint == other.fingerprint for other in rows) > 1


def wear_line(wear: NvmeWear) -> str:
    """What is written to the drive, against what it may have and for what it was good."""
    from tierkv.config.sizes import human_size

    today = f"written to nvme: {human_size(wear.today_bytes)} today (UTC)"
    if wear.day_bytes:
        today += f" of {human_size(wear.day_bytes)}, {wear.today_bytes / wear.day_bytes:.0%}"
    if wear.waiting_extents:
        today += f"; {wear.waiting_extents:,} extents wait for the budget"
    since = f"since the start {human_size(wear.written_bytes)}"
    if wear.reused_tokens:
        each = round(wear.written_bytes / wear.reused_tokens)
        return f"{today}; {since}, {human_size(each)} for each of {wear.reused_tokens:,} tokens reused"
    return f"{today}; {since}, nothing reused yet"


def _lines_table(lines: list[Line], by: str, tiers: Container[str]) -> RenderableType:
    from tierkv_cli.output import ago, table

    heads = HEADS[by]
    columns = _columns(tiers)
    numbers = ("extents", "tokens", *columns, "unreachable", "last used")
    shown = table(*heads, *numbers, numbers=numbers)
    for line in lines:
        shown.add_row(*labels(line, by), *_numbers(line, columns), ago(line.last_used))
    if len(lines) > 1:
        shown.add_section()
        summed = total(lines)
        sums = _numbers(summed, columns)
        shown.add_row("total", *[""] * (len(heads) - 1), *sums, ago(summed.last_used))
    return shown


HEADS = {
    "model": ("model", "fingerprint"),
    "adapter": ("model", "adapter"),
    "tenant": ("tenant",),
    "group": ("group", "what"),
}


def labels(line: Line, by: str) -> tuple[str, ...]:
    names = line.names
    model = names.get("model") or _short(names.get("fingerprint", ""))
    adapter = names.get("adapter") or _short(names.get("adapter_fingerprint", ""))
    if by == "model":
        return (names["model"] or "(no name)", _short(names["fingerprint"]))
    if by == "adapter":
        return (model, adapter)
    if by == "tenant":
        return (names["tenant"] or "(no salt)",)
    return (_short(names["group"]), _what(names, model, adapter))


def _what(names: dict[str, str], model: str, adapter: str) -> str:
    """A group in words: "llama, adapter legal, tenant 0011aabb, bfloat16, 4 x 5.0 MiB for 16 tokens"."""
    from tierkv.config.sizes import human_size

    ranks = f"{names['ranks']} x " if names["ranks"] != "1" else ""
    parts = [
        model,
        f"adapter {adapter}" if names["adapter_fingerprint"] else "",
        f"tenant {names['tenant']}" if names["tenant"] else "",
        names["dtype"],
        names["codec"] if names["codec"] != RAW else "",
        names["layout"],
        f"{ranks}{human_size(int(names['block_bytes']))} for {names['block_tokens']} tokens",
    ]
    return ", ".join(part for part in parts if part)


def _short(digest: str) -> str:
    return digest[:12] or "-"


def _columns(tiers: Container[str]) -> dict[str, str]:
    """What a tier's column is called, and where a line has it: host memory and NVMe always, others where there are."""
    columns = {"gpu": "gpu_bytes", "memory": "host_bytes", "nvme": "nvme_bytes", "disk": "disk_bytes"}
    return {name: field for name, field in columns.items() if name in ("memory", "nvme") or name in tiers}


def _numbers(line: Line, columns: dict[str, str]) -> tuple[str, ...]:
    from tierkv.config.sizes import human_size

    return (
        f"{line.extents:,}",
        f"{line.tokens:,}",
        *(human_size(getattr(line, field)) for field in columns.values()),
        human_size(line.unreachable_bytes) if line.unreachable_bytes else "-",
    )


def _disk_table(head: str, uses: list[DiskUse]) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import table

    numbers = ("files", "apparent", "allocated")
    shown = table(head, *numbers, numbers=numbers)
    for kind, row in disk_as_object(uses).items():
        if kind == "total":
            shown.add_section()
        if row["files"]:
            sizes = human_size(row["apparent_bytes"]), human_size(row["allocated_bytes"])
            shown.add_row(kind, f"{row['files']:,}", *sizes)
    return shown


def _share_table(rows: tuple[ShareRow, ...]) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    numbers = ("used", "its own", "used of that", "borrowed")
    shown = table("share", "tier", *numbers, numbers=numbers)
    for row in rows:
        borrowed = row.used_bytes - row.own_bytes
        shown.add_row(
            row.name,
            row.tier,
            human_size(row.used_bytes),
            human_size(row.own_bytes),
            percent(row.used_bytes, row.own_bytes),
            human_size(borrowed) if borrowed > 0 else "-",
        )
    return shown


def _tier_table(tiers: tuple[TierUsage, ...], pinned: dict[str, int]) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import table

    sizes = ("used", "of it pinned", "reserved", "overhead", "of it index", "of it quarantine", "free", "capacity")
    shown = table("tier", *sizes, numbers=sizes)
    for tier in tiers:
        taken = tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes
        files = f" ({tier.quarantined_files:,} files)" if tier.quarantined_files else ""
        shown.add_row(
            tier.tier,
            human_size(tier.used_bytes),
            human_size(pinned[tier.tier]) if pinned.get(tier.tier) else "-",
            human_size(tier.reserved_bytes),
            human_size(tier.overhead_bytes),
            human_size(tier.index_bytes) if tier.index_bytes else "-",
            (human_size(tier.quarantined_bytes) if tier.quarantined_bytes else "-") + files,
            human_size(max(0, tier.capacity_bytes - taken)),
            human_size(tier.capacity_bytes),
        )
    return shown
