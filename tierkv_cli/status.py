"""`tierkv status`: how the node is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.wire.messages import DeviceStatus, RecordingStatus, StatusReply, TierUsage, WorkerStatus


@click.command(short_help="Show how the node is.")
@json_option
@where_options
def command(*, where: Where, as_json: bool) -> None:
    """Show how the node is: ready or not, what fills its tiers, its processes, and what is wrong.

    Answered at any time, also while the node is still finding out what is on disk.
    """
    from tierkv_cli.output import console, plain, print_json
    from tierkv_cli.reach import operator

    with operator(where) as node:
        status = node.status()
        endpoint = node.endpoint
    if as_json:
        print_json({"endpoint": endpoint} | plain(status))
        return
    screen = console()
    for part in view(status, endpoint):
        screen.print(part)


def view(status: StatusReply, endpoint: str) -> Iterator[RenderableType]:
    from rich.text import Text

    from tierkv_cli.output import duration, warn

    color = {"ready": "green", "stopping": "yellow"}.get(status.state, "red")
    yield Text.assemble(
        f"tierkv {status.version} is ",
        (status.state, color),
        f", up {duration(status.uptime_seconds)}",
    )
    yield f"data directory  {status.data_dir or 'none: memory only'}"
    if status.disk_dir:
        yield f"disk directory  {status.disk_dir}"
    yield f"endpoint        {endpoint}"
    if status.state == "recovering":
        yield f"recovery        {_recovery(status)}"
    yield from (warn(problem) for problem in status.problems)
    yield from (f"note: {warning}" for warning in status.warnings)
    yield ""
    yield _tiers(status.tiers)
    yield from _speeds(status.tiers)
    if status.devices:
        yield ""
        yield _devices(status.devices)
    yield ""
    yield _held(status)
    yield from _counts(status.counters)
    yield from _found(status.found)
    yield from _tier_errors(status.tiers)
    if status.recording is not None:
        yield _recording(status.recording, status.uptime_seconds)
    yield ""
    yield _workers(status.workers)


def _recovery(status: StatusReply) -> str:
    from tierkv_cli.output import bar

    done, total = status.recovery_done, status.recovery_total
    return f"{status.recovery_stage} [{bar(done, total)}] {done:,} of {total:,}"


def _tiers(tiers: tuple[TierUsage, ...]) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import bar, percent, table

    shown = table(
        "tier", "", "full", "used", "reserved", "overhead", "capacity", "state",
        numbers=("full", "used", "reserved", "overhead", "capacity"),
    )  # fmt: skip
    for tier in tiers:
        taken = tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes
        shown.add_row(
            tier.tier,
            f"[{bar(taken, tier.capacity_bytes)}]",
            percent(taken, tier.capacity_bytes),
            human_size(tier.used_bytes),
            human_size(tier.reserved_bytes),
            human_size(tier.overhead_bytes),
            human_size(tier.capacity_bytes),
            tier.state + (f" ({tier.reason})" if tier.reason else ""),
        )
    return shown


def _speeds(tiers: tuple[TierUsage, ...]) -> Iterator[str]:
    """Where there is a choice between two tiers of files."""
    from tierkv.config.sizes import human_size

    parts = []
    for tier in tiers:
        rates = (("read", tier.read_bytes_per_second), ("written", tier.write_bytes_per_second))
        known = [f"{human_size(rate)}/s {word}" for word, rate in rates if rate]
        if known:
            parts.append(f"{tier.tier} {', '.join(known)}")
    if parts and any(tier.tier == "disk" for tier in tiers):
        yield f"measured, one extent by itself: {'; '.join(parts)}"


def _devices(devices: tuple[DeviceStatus, ...]) -> RenderableType:
    """One line for each of gpu_devices. Rates are of the last large copies between its pool and host memory."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import table

    shown = table(
        "gpu", "device", "state", "used", "pool", "of", "engines", "to it", "from it", "memory", "NUMA", "restarts",
        numbers=("used", "pool", "of", "engines", "to it", "from it", "restarts"),
    )  # fmt: skip
    for one in devices:
        rates = (one.upload_bytes_per_second, one.download_bytes_per_second)
        shown.add_row(
            f"gpu{one.device}",
            ", ".join(word for word in (one.name, one.device_name, one.kind) if word),
            one.state,
            human_size(one.used_bytes + one.reserved_bytes),
            human_size(one.capacity_bytes),
            human_size(one.asked_bytes),
            str(one.mapped_sessions),
            *(f"{human_size(rate)}/s" if rate else "-" for rate in rates),
            "-" if one.kind in ("", "memfd") else "pinned" if one.is_pinned else "not pinned",
            "-" if one.device_numa < 0 else f"{one.device_numa}, memory {one.arena_numa}",
            str(one.restarts),
        )
    return shown


def _held(status: StatusReply) -> str:
    from tierkv_cli.output import count

    dirty = f", {status.dirty_extents:,} of them not on disk yet" if status.dirty_extents else ""
    return (
        f"{count(status.extents, 'extent')}{dirty}; {count(status.sessions, 'session')} (this command is one) with "
        f"{count(status.leases, 'lease')} and {count(status.tickets, 'ticket')}"
    )


def _counts(counters: dict[str, float]) -> Iterator[str]:
    from tierkv_cli.output import percent

    asked = counters.get("asked_tokens", 0)
    hits = _labelled(counters, "hit_tokens")
    hit = sum(hits.values())
    yield (
        f"tokens asked for {asked:,.0f}, hit {hit:,.0f} ({percent(hit, asked)})"
        f"{_by_label(hits)}, stored {counters.get('stored_tokens', 0):,.0f}"
    )
    for name, words in (
        ("damaged_extents", "damaged extents found"),
        ("dropped_writes", "extents not written to nvme"),
        ("dropped_demotions", "extents that left nvme and did not go to disk"),
        ("refused_blocks", "blocks not stored"),
        ("errors", "requests answered with an error"),
    ):
        found = {label: count for label, count in _labelled(counters, name).items() if count}
        if found:
            yield f"{words} {sum(found.values()):,.0f}{_by_label(found)}"


def _found(found: dict[str, int]) -> Iterator[str]:
    """What the start has met and not taken. Nothing of it is an error of the node that runs now."""
    words = {
        "set_aside": "damaged and set aside in quarantine/",
        "foreign": "not tierkv's, left alone",
        "unknown_format": "of an unknown format, left alone",
        "unreadable": "unreadable, skipped; tried again at the next start",
    }
    if found:
        yield "found at the start: " + "; ".join(f"{count:,} {words.get(kind, kind)}" for kind, count in found.items())


def _tier_errors(tiers: tuple[TierUsage, ...]) -> Iterator[str]:
    for tier in tiers:
        if tier.errors:
            yield f"{tier.tier}: {tier.errors:,} file operations failed; the last one: {tier.last_error}"


def _recording(recording: RecordingStatus, uptime_seconds: float) -> str:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import duration

    missing = {reason: float(count) for reason, count in recording.missing_requests.items() if count}
    said = f"{sum(missing.values()):,.0f} missing{_by_label(missing)}" if missing else "none missing"
    return (
        f"recording to {recording.file} ({human_size(recording.file_bytes)}): in {duration(uptime_seconds)} "
        f"{recording.written_requests:,} requests written, {said}"
    )


def _labelled(counters: dict[str, float], name: str) -> dict[str, float]:
    prefix = name + "."
    return {key.removeprefix(prefix): value for key, value in counters.items() if key.startswith(prefix)}


def _by_label(counts: dict[str, float]) -> str:
    return "" if not counts else ": " + ", ".join(f"{label} {count:,.0f}" for label, count in counts.items())


def _workers(workers: tuple[WorkerStatus, ...]) -> RenderableType:
    from tierkv_cli.output import duration, table

    shown = table("process", "pid", "state", "restarts", "last heard", "problem", numbers=("pid", "restarts"))
    for worker in workers:
        heard = f"{duration(worker.last_heard_seconds)} ago"
        shown.add_row(worker.name, str(worker.pid), worker.state, str(worker.restarts), heard, worker.problem)
    return shown
