"""The table of metrics, and docs/metrics.md that is made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tierkv.core.pins import PinnedTier
from tierkv.core.usage import PrefillUse, TierBytes
from tierkv.metrics.snapshot import Latency, Snapshot
from tierkv.wire.messages import DeviceStatus

PREFIX = "tierkv_"

Kind = Literal["counter", "gauge", "histogram"]
Values = Mapping[tuple[str, ...], float | Latency]
"""Values of one metric by the values of its labels, in their order; a histogram's are Latency objects."""


@dataclass(frozen=True, slots=True)
class Declared:
    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    read: Callable[[Snapshot], Values]


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: {(): read(snapshot)}


def _by(read: Callable[[Snapshot], Mapping[str, int]]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: {(label,): value for label, value in read(snapshot).items()}


def _by_pair(read: Callable[[Snapshot], Mapping[tuple[str, str], int]]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: dict(read(snapshot).items())


def _by_tier(read: Callable[[TierBytes], int]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: {(tier.tier,): read(tier) for tier in snapshot.tiers}


def _by_pinned(read: Callable[[PinnedTier], int]) -> Callable[[Snapshot], Values]:
    return lambda snapshot: {(tier.tier,): read(tier) for tier in snapshot.pinned}


def _by_model(read: Callable[[PrefillUse], float]) -> Callable[[Snapshot], Values]:
    """Of a model that is served in several layouts the one that is known best."""
    return lambda snapshot: {
        (one.model_name, one.fingerprint[:12]): read(one)
        for one in sorted(snapshot.prefill, key=lambda one: one.samples)
    }


def _by_device(read: Callable[[DeviceStatus], float]) -> Callable[[Snapshot], Values]:
    """By the place in gpu_devices, as `tierkv status` calls it."""
    return lambda snapshot: {(f"gpu{device.device}",): read(device) for device in snapshot.devices}


def _missed(snapshot: Snapshot) -> float:
    return snapshot.core.asked_tokens - sum(snapshot.core.hit_tokens.values())


METRICS: tuple[Declared, ...] = (
    # ---- the node
    Declared("build_info", "gauge", "", ("version",), "Always 1.", lambda s: {(s.version,): 1}),
    Declared("incarnation", "gauge", "", (), "How many fronts this node has had.", _one(lambda s: s.incarnation)),
    Declared("uptime_seconds", "gauge", "seconds", (), "Age of this front.", _one(lambda s: s.uptime_seconds)),
    Declared("ready", "gauge", "", (), "1 when requests are served, 0 while recovering.", _one(lambda s: s.ready)),
    Declared(
        "healthy", "gauge", "", (), "1 when nothing is wrong, as /healthz says it.",
        _one(lambda s: s.state == "ready" and not s.problems),
    ),
    Declared(
        "process_up", "gauge", "", ("worker",), "1 while the process runs and gives signs of life.",
        lambda s: {(name,): state in ("running", "recovering") for name, state in s.processes.items()},
    ),
    Declared(
        "found_at_start", "gauge", "files", ("kind",),
        "What the last start met on disk and did not take: set_aside, foreign, unknown_format, unreadable.",
        _by(lambda s: s.found),
    ),
    Declared(
        "failed_operations_total", "counter", "", ("tier",), "File operations that failed, of any kind.",
        lambda s: {(tier,): errors for tier, (errors, _) in s.tier_errors.items()},
    ),
    Declared(
        "tier_writable", "gauge", "", ("tier",), "1 while the tier takes new data.",
        _by_tier(lambda t: t.is_writable),
    ),
    Declared(
        "tier_closed", "gauge", "", ("tier", "reason"), "1, with the reason, while the tier takes no new data.",
        lambda s: {(tier.tier, tier.reason): 1 for tier in s.tiers if tier.reason},
    ),
    Declared(
        "recovery_seconds", "gauge", "seconds", (), "What the last start took to know the files on disk.",
        _one(lambda s: s.recovery_seconds),
    ),
    Declared(
        "worker_restarts_total", "counter", "", ("worker",), "Processes of the node that died and were started again.",
        _by(lambda s: s.worker_restarts),
    ),
    Declared(
        "worker_deaths_total", "counter", "", (), "Times the storage worker died under this front.",
        _one(lambda s: s.core.worker_deaths),
    ),
    Declared(
        "queue_depth", "gauge", "", ("queue",),
        "What waits: reads, writes and demotions of extents, leases and seals to answer.",
        _by(lambda s: s.queues),
    ),
    Declared(
        "request_seconds", "histogram", "seconds", ("operation",),
        "From the arrival of a request at the front to its answer, waiting included.",
        lambda s: {(operation,): latency for operation, latency in s.latencies.items()},
    ),
    Declared(
        "request_errors_total", "counter", "", ("code",), "Requests answered with an error.",
        _by(lambda s: s.request_errors),
    ),
    Declared(
        "dropped_replies_total", "counter", "", (), "Replies thrown away because the client did not take them.",
        _one(lambda s: s.dropped_replies),
    ),
    Declared(
        "slow_sessions_total", "counter", "", (), "Sessions ended because their client did not read its replies.",
        _one(lambda s: s.slow_sessions),
    ),
    # ---- what is recorded for replays
    Declared(
        "recorded_requests_total", "counter", "", (), "Lookups and stores that the recording has, where there is one.",
        lambda s: {(): s.recording.written_requests} if s.recording is not None else {},
    ),
    Declared(
        "unrecorded_requests_total", "counter", "", ("reason",), "Those that are missing there.",
        lambda s: {(reason,): n for reason, n in s.recording.missing_requests.items()} if s.recording else {},
    ),
    Declared(
        "recording_bytes", "gauge", "bytes", (), "The recording on disk, both files.",
        lambda s: {(): s.recording.file_bytes} if s.recording is not None else {},
    ),
    # ---- loading
    Declared(
        "asked_tokens_total", "counter", "tokens", (), "Tokens of whole blocks that engines asked to load.",
        _one(lambda s: s.core.asked_tokens),
    ),
    Declared(
        "hit_tokens_total", "counter", "tokens", ("tier",), "Of these, tokens granted, by the tier they were in.",
        _by(lambda s: {"host": 0, "nvme": 0} | dict(s.core.hit_tokens)),
    ),
    Declared(
        "missed_tokens_total", "counter", "tokens", (), "Of these, tokens not granted: asked = hit + missed.",
        _one(_missed),
    ),
    Declared(
        "asked_prefill_seconds_total", "counter", "seconds", (),
        "What computing all tokens asked for would cost an engine, by its rate and their positions.",
        _one(lambda s: s.core.asked_prefill_seconds),
    ),
    Declared(
        "missed_prefill_seconds_total", "counter", "seconds", (),
        "Of these, for tokens not granted. What is left was saved.",
        _one(lambda s: s.core.missed_prefill_seconds),
    ),
    Declared(
        "prefill_tokens_per_second", "gauge", "tokens/second", ("model", "fingerprint"),
        "What an engine computes at the start of a prompt: measured, or prefill_tokens_per_second until it is.",
        _by_model(lambda one: one.tokens_per_second),
    ),
    Declared(
        "prefill_samples", "gauge", "", ("model", "fingerprint"),
        "Stretches of prompts that this is measured from; 0: it is the setting.", _by_model(lambda one: one.samples),
    ),
    Declared("granted_leases_total", "counter", "", (), "Leases granted.", _one(lambda s: s.core.leases)),
    Declared(
        "shortened_leases_total", "counter", "", ("reason",), "Leases on less than was cached.",
        _by(lambda s: s.core.shortened_leases),
    ),
    Declared(
        "regretted_tokens_total", "counter", "tokens", ("reason",),
        "Tokens asked for that were cached once, by why they no longer are: they are computed again.",
        _by(lambda s: s.core.regretted_tokens),
    ),
    Declared(
        "regretted_seconds_total", "counter", "seconds", (), "Prefill that computing these again takes.",
        _one(lambda s: s.core.regretted_seconds),
    ),
    Declared(
        "revoked_leases_total", "counter", "", (), "Revocable leases taken back.", _one(lambda s: s.core.revoked_leases)
    ),
    Declared(
        "promoted_blocks_total", "counter", "blocks", (), "Blocks brought from files to host memory.",
        _one(lambda s: s.core.promoted_blocks),
    ),
    Declared(
        "failed_reads_total", "counter", "", ("reason",), "Promotions that brought fewer blocks than asked.",
        _by(lambda s: s.core.failed_reads),
    ),
    Declared(
        "damaged_extents_total", "counter", "extents", ("reason",), "Extents found damaged, each answered as a miss.",
        _by(lambda s: s.core.damaged_extents),
    ),
    # ---- storing
    Declared("granted_tickets_total", "counter", "", (), "Tickets granted.", _one(lambda s: s.core.tickets)),
    Declared(
        "aborted_tickets_total", "counter", "", ("reason",), "Tickets that ended without a commit.",
        _by(lambda s: s.core.aborted_tickets),
    ),
    Declared(
        "refused_blocks_total", "counter", "blocks", ("reason",), "Blocks offered for storing that got no room.",
        _by(lambda s: s.core.refused_blocks),
    ),
    Declared(
        "duplicate_blocks_total", "counter", "blocks", (),
        "Blocks offered for storing that were there already or on their way.", _one(lambda s: s.core.duplicate_blocks),
    ),
    Declared(
        "stored_tokens_total", "counter", "tokens", (), "Tokens of blocks that became visible.",
        _one(lambda s: s.core.stored_tokens),
    ),
    Declared(
        "stale_blocks_total", "counter", "blocks", (),
        "Committed blocks dropped because predecessor or other ranks did not come.",
        _one(lambda s: s.core.stale_staged_blocks),
    ),
    Declared(
        "flushed_extents_total", "counter", "extents", (), "Extents on disk for good.",
        _one(lambda s: s.core.flushed_extents),
    ),
    Declared(
        "dropped_writes_total", "counter", "extents", ("reason",), "Extents that will not be written to NVMe.",
        _by(lambda s: s.core.dropped_writes),
    ),
    # ---- purging
    Declared("purges_total", "counter", "", (), "Purges that operators asked for.", _one(lambda s: s.core.purges)),
    Declared(
        "purged_blocks_total", "counter", "blocks", (), "Blocks made unreachable by them.",
        _one(lambda s: s.core.purged_blocks),
    ),
    Declared(
        "wiped_bytes_total", "counter", "bytes", (), "Host memory zeroed because of them.",
        _one(lambda s: s.core.wiped_bytes),
    ),
    # ---- pins
    Declared("pins", "gauge", "", (), "Prefixes that are pinned.", _one(lambda s: s.pins)),
    Declared(
        "pinned_bytes", "gauge", "bytes", ("tier",), "What stays in the tier because of them.",
        _by_pinned(lambda t: t.held_bytes),
    ),
    Declared(
        "pinned_cap_bytes", "gauge", "bytes", ("tier",), "What they may keep of it at most (pinned_share).",
        _by_pinned(lambda t: t.cap_bytes),
    ),
    # ---- shares
    Declared(
        "share_used_bytes", "gauge", "bytes", ("share", "tier"), "What it uses of the tier, where shares are set.",
        lambda s: {(one.name, one.tier): one.used_bytes for one in s.shares},
    ),
    Declared(
        "share_own_bytes", "gauge", "bytes", ("share", "tier"), "What is its; what it uses beyond that is borrowed.",
        lambda s: {(one.name, one.tier): one.own_bytes for one in s.shares},
    ),
    # ---- tiers
    Declared(
        "capacity_bytes", "gauge", "bytes", ("tier",), "What it may hold; used + reserved + overhead is never more.",
        _by_tier(lambda t: t.capacity_bytes),
    ),
    Declared("used_bytes", "gauge", "bytes", ("tier",), "KV blocks in the tier.", _by_tier(lambda t: t.used_bytes)),
    Declared(
        "reserved_bytes", "gauge", "bytes", ("tier",), "Room promised to tickets, and to writes under way.",
        _by_tier(lambda t: t.reserved_bytes),
    ),
    Declared(
        "overhead_bytes", "gauge", "bytes", ("tier",), "Index, quarantine, small files, and room for their growth.",
        _by_tier(lambda t: t.overhead_bytes),
    ),
    Declared(
        "drift_bytes_total", "counter", "bytes", (),
        "Of files that others removed, found by holding the index against the disk.",
        _one(lambda s: s.core.drift_bytes),
    ),
    Declared(
        "evicted_bytes_total", "counter", "bytes", ("tier", "reason"), "Bytes that left a tier.",
        _by_pair(lambda s: s.core.evicted_bytes),
    ),
    Declared(
        "evicted_blocks_total", "counter", "blocks", ("tier", "reason"), "Blocks that left a tier.",
        _by_pair(lambda s: s.core.evicted_blocks),
    ),
    Declared(
        "dropped_unwritten_bytes_total", "counter", "bytes", ("reason",),
        "Bytes that left host memory and were nowhere else.", _by(lambda s: s.core.dropped_unwritten_bytes),
    ),
    Declared("dirty_extents", "gauge", "extents", (), "Extents not on disk yet.", _one(lambda s: s.dirty_extents)),
    Declared("dirty_bytes", "gauge", "bytes", (), "Bytes that a crash would lose.", _one(lambda s: s.dirty_bytes)),
    Declared("index_bytes", "gauge", "bytes", (), "The indexes, in data_dir.", _one(lambda s: s.index_bytes)),
    Declared("journal_bytes", "gauge", "bytes", (), "The journal on disk.", _one(lambda s: s.journal.num_bytes)),
    Declared(
        "journal_dropped_rows_total", "counter", "", ("reason",),
        "Rows that the journal did not take: reports lack these evictions.", _by(lambda s: s.journal_dropped),
    ),
    Declared(
        "journal_damaged_rows", "gauge", "", (), "Rows that the last start could not read and skipped.",
        _one(lambda s: s.journal.damaged),
    ),
    Declared(
        "audit_differences", "gauge", "", (), "Open differences between what is booked and what is there.",
        _one(lambda s: s.journal.differences),
    ),
    Declared("quarantined_bytes", "gauge", "bytes", (), "Damaged files kept.", _one(lambda s: s.quarantined_bytes)),
    Declared("quarantined_files", "gauge", "files", (), "Damaged files kept.", _one(lambda s: s.quarantined_files)),
    Declared(
        "nvme_read_bytes_total", "counter", "bytes", (), "Read from data_dir for promotions.",
        _one(lambda s: s.core.nvme_read_bytes),
    ),
    Declared(
        "nvme_read_seconds_total", "counter", "seconds", (), "Time of these reads, checksums included, summed.",
        _one(lambda s: s.core.nvme_read_seconds),
    ),
    Declared(
        "nvme_written_bytes_total", "counter", "bytes", (), "Written to data_dir and flushed.",
        _one(lambda s: s.core.nvme_written_bytes),
    ),
    Declared(
        "nvme_write_seconds_total", "counter", "seconds", (), "Time of these writes, flush included, summed.",
        _one(lambda s: s.core.nvme_write_seconds),
    ),
    Declared(
        "disk_read_bytes_total", "counter", "bytes", (), "Read from disk_dir for promotions.",
        _one(lambda s: s.core.disk_read_bytes),
    ),
    Declared(
        "disk_read_seconds_total", "counter", "seconds", (), "Time of these reads, checksums included, summed.",
        _one(lambda s: s.core.disk_read_seconds),
    ),
    Declared(
        "disk_written_bytes_total", "counter", "bytes", (), "Copied from NVMe to disk_dir and flushed.",
        _one(lambda s: s.core.disk_written_bytes),
    ),
    Declared(
        "disk_write_seconds_total", "counter", "seconds", (), "Time of these copies, flush included, summed.",
        _one(lambda s: s.core.disk_write_seconds),
    ),
    Declared(
        "demoted_extents_total", "counter", "extents", (), "Extents that left NVMe for the disk tier.",
        _one(lambda s: s.core.demoted_extents),
    ),
    Declared(
        "dropped_demotions_total", "counter", "extents", ("reason",),
        "Extents that left NVMe and were not copied to the disk tier, where there is one.",
        _by(lambda s: s.core.dropped_demotions),
    ),
    Declared(
        "disk_worker_deaths_total", "counter", "", (), "Times the worker of the disk tier died under this front.",
        _one(lambda s: s.core.disk_worker_deaths),
    ),
    # ---- gpu_devices
    Declared(
        "landed_blocks_total", "counter", "blocks", (), "Blocks stored on a GPU and copied from there to host memory.",
        _one(lambda s: s.core.landed_blocks),
    ),
    Declared(
        "dropped_landings_total", "counter", "blocks", ("reason",),
        "Blocks stored on a GPU that were gone before they were copied.", _by(lambda s: s.core.dropped_landings),
    ),
    Declared(
        "uploaded_blocks_total", "counter", "blocks", (), "Blocks copied from host memory to a GPU, for their value.",
        _one(lambda s: s.core.uploaded_blocks),
    ),
    Declared(
        "fetched_blocks_total", "counter", "blocks", (),
        "Blocks copied from a GPU to host memory, as they were wanted there or had to leave the GPU.",
        _one(lambda s: s.core.fetched_blocks),
    ),
    Declared(
        "lost_blocks_total", "counter", "blocks", ("reason",), "Blocks that only a GPU had, and that are gone.",
        _by(lambda s: s.core.lost_blocks),
    ),
    Declared(
        "failed_copies_total", "counter", "", ("reason",), "Copies between a GPU and host memory that failed.",
        _by(lambda s: s.core.failed_copies),
    ),
    Declared(
        "gpu_worker_deaths_total", "counter", "", (), "Times the worker of a GPU with a pool died under this front.",
        _one(lambda s: s.core.device_worker_deaths),
    ),
    Declared(
        "gpu_pool_bytes", "gauge", "bytes", ("gpu",), "What the pool there really has; 0 while there is none.",
        _by_device(lambda one: one.capacity_bytes),
    ),
    Declared(
        "gpu_asked_bytes", "gauge", "bytes", ("gpu",), "What it was to have: gpu_bytes.",
        _by_device(lambda one: one.asked_bytes),
    ),
    Declared(
        "gpu_used_bytes", "gauge", "bytes", ("gpu",), "Of the pool, what holds blocks or is being filled.",
        _by_device(lambda one: one.used_bytes + one.reserved_bytes),
    ),
    Declared(
        "gpu_pinned", "gauge", "", ("gpu",), "1 when host memory is pinned for copies to and from it.",
        _by_device(lambda one: one.is_pinned),
    ),
    Declared(
        "gpu_mapped_sessions", "gauge", "sessions", ("gpu",), "Engine processes that have mapped the pool.",
        _by_device(lambda one: one.mapped_sessions),
    ),
    Declared(
        "gpu_queued_copies", "gauge", "", ("gpu",),
        "Copies between the pool and host memory that wait or are under way.",
        _by_device(lambda one: one.queued_copies),
    ),
    Declared(
        "gpu_upload_bytes_per_second", "gauge", "bytes/second", ("gpu",),
        "Rate of the last large copies into the pool; 0 before there was one.",
        _by_device(lambda one: one.upload_bytes_per_second),
    ),
    Declared(
        "gpu_download_bytes_per_second", "gauge", "bytes/second", ("gpu",),
        "Rate of the last large copies out of the pool; 0 before there was one.",
        _by_device(lambda one: one.download_bytes_per_second),
    ),
    Declared(
        "nvme_written_today_bytes", "gauge", "bytes", (),
        "Of these, since midnight UTC, or since this front began if that is later.",
        lambda s: {(): s.wear.today_bytes} if s.wear is not None else {},
    ),
    Declared(
        "nvme_write_budget_bytes", "gauge", "bytes", (), "nvme_write_bytes_per_day, where there is a limit.",
        lambda s: {(): s.wear.day_bytes} if s.wear is not None and s.wear.day_bytes else {},
    ),
    Declared(
        "nvme_waiting_extents", "gauge", "extents", (), "Extents that wait until the budget lets them be written.",
        lambda s: {(): s.wear.waiting_extents} if s.wear is not None else {},
    ),
    Declared(
        "io_errors_total", "counter", "", ("operation", "errno"), "Failed file operations.",
        _by_pair(lambda s: s.io_errors),
    ),
    # ---- what is known and held
    Declared("extents", "gauge", "extents", (), "Extents known.", _one(lambda s: s.extents)),
    Declared("groups", "gauge", "groups", (), "Identities known.", _one(lambda s: s.groups)),
    Declared("sessions", "gauge", "sessions", (), "Engine processes connected.", _one(lambda s: s.sessions)),
    Declared("leases", "gauge", "leases", (), "Leases held.", _one(lambda s: s.leases)),
    Declared("tickets", "gauge", "tickets", (), "Tickets held.", _one(lambda s: s.tickets)),
)  # fmt: skip


def declared_name(name: str) -> str:
    """The full name of a metric that is in the table. KeyError for one that is not."""
    if name not in {one.name for one in METRICS}:
        raise KeyError(f"no metric {name!r} is declared")
    return PREFIX + name


_PAGE_HEAD = """\
# Metrics

Served for Prometheus at `http://<metrics_host>:<metrics_port>/metrics`, only when `metrics_port` is set. Counters
(names in `_total`) only grow while one front lives and start at 0 in the next. Labels are from closed lists: `tier` is
`gpu`, `host`, `nvme` or `disk`, `gpu` is `gpu0` and so on in the order of `gpu_devices`, a `reason` is one of
`tierkv/core/reasons.py`, a `code` one of the error codes in protocol.md, an `operation` of `request_seconds` the name
of a request there, a `worker` is `supervisor`, `front`, `storage`, `disk`, `gateway`, `recorder`, or `gpu0` and so on.
A `share` has the name that the settings give it, or is the `rest`.

Made from `tierkv/metrics/table.py` by `python -m tierkv.metrics`.

The hit rate is `rate(tierkv_hit_tokens_total) / rate(tierkv_asked_tokens_total)`.

| metric | kind | unit | labels | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| `{PREFIX}{one.name}` | {one.kind} | {one.unit} | {', '.join(one.labels)} | {one.meaning} |\n"
        for one in METRICS
    ]
    return _PAGE_HEAD + "".join(rows)
