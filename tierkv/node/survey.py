"""What the node says about itself: Status, Usage, and the snapshot that metrics are read from. All from sums that are
kept anyway: nothing is scanned."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from blake3 import blake3

import tierkv
from tierkv.core.counters import Counters
from tierkv.core.instructions import JournalHealth, TierHealth
from tierkv.core.reasons import Reason
from tierkv.core.usage import GroupUsage, TierBytes
from tierkv.metrics import Snapshot
from tierkv.metrics.snapshot import copy_counters
from tierkv.node.control import GatewayHeard, RecorderHeard, WorkerName
from tierkv.node.core_calls import CoreCalls
from tierkv.node.device_survey import DeviceSurvey
from tierkv.node.mover import SILENT_SECONDS, WorkerState
from tierkv.node.outbox import Outbox
from tierkv.node.tier_worker import DeviceWorker
from tierkv.wire.messages import NvmeWear, PrefillRow, StatusReply, TierUsage, UsageReply, UsageRow, WorkerStatus

GATEWAY = "gateway"
RECORDER = "recorder"
GATEWAY_SILENT_SECONDS = 5.0
RECORDER_SILENT_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class NodeState:
    """What a survey needs to know beside the core; the front keeps it up to date."""

    incarnation: int
    data_dir: str
    has_nvme: bool
    disk_dir: str = ""
    read_only: bool = False
    supervisor_pid: int
    front_restarts: int
    started: float  # monotonic
    began: float = 0.0  # node time
    is_stopping: bool = False
    host_problem: str = ""
    metrics_problem: str = ""
    data_dir_problem: str = ""
    supervisor_heard: float = 0.0
    has_gateway: bool = False
    gateway_heard: GatewayHeard | None = None
    gateway_heard_at: float = 0.0
    recorder_heard: RecorderHeard | None = None

    def describe_gateway(self, now: float) -> str:
        heard = self.gateway_heard
        if heard is None:
            return "starting"
        if not heard.is_running:
            return "dead"
        return "silent" if now - self.gateway_heard_at > GATEWAY_SILENT_SECONDS else "running"

    ping_seconds: float = 0.0  # how often the supervisor asks; 0: it does not
    shortages: dict[str, str] = field(default_factory=dict)  # of room, by worker


class Survey:
    def __init__(self, core: CoreCalls, outbox: Outbox, node: NodeState, devices: Sequence[DeviceWorker] = ()) -> None:
        self._core = core
        self._devices = DeviceSurvey(devices, core.state.limits.device_bytes[0] if devices else 0)
        self._state = core.state
        self._worker = core.mover.worker
        self._disk = core.disk.worker
        self._outbox = outbox
        self._node = node
        self._began = node.began

    def status(self, request_id: int, now: float) -> StatusReply:
        worker, problems = self._worker, tuple(self._problems(now))
        return StatusReply(
            id=request_id,
            state=self._describe(problems),
            problems=problems,
            version=tierkv.__version__,
            incarnation=self._node.incarnation,
            uptime_seconds=time.monotonic() - self._node.started,
            data_dir=self._node.data_dir,
            disk_dir=self._node.disk_dir,
            recovery_stage=worker.stage if self._state.is_recovering else "",
            recovery_done=worker.done,
            recovery_total=worker.total,
            sessions=self._state.num_sessions,
            leases=self._state.num_leases,
            tickets=self._state.num_tickets,
            extents=self._state.num_extents,
            dirty_extents=self._state.dirty().extents,
            counters=self._counters(),
            tiers=self._tiers(),
            workers=tuple(self._workers(now)),
            warnings=tuple(self._warnings(now)),
            found=self._found(),
            recording=self._core.recording.status(),
            devices=self._devices.statuses(self._state.device_tiers(), now),
        )

    def usage(self, request_id: int, now: float) -> UsageReply:
        wear = self._state.wear(now)
        return UsageReply(
            id=request_id,
            rows=tuple(_usage_row(row) for row in self._state.usage()),
            tiers=self._tiers(),
            wear=NvmeWear(**asdict(wear)) if wear is not None else None,
            prefill=tuple(PrefillRow(**asdict(row)) for row in self._state.prefill_rates()),
        )

    def snapshot(self, now: float) -> Snapshot:
        problems = tuple(self._problems(now))
        state, worker, health = self._state, self._worker, self._worker.health
        dirty = state.dirty()
        return Snapshot(
            version=tierkv.__version__,
            state=self._describe(problems),
            problems=problems,
            processes={worker.name: worker.state for worker in self._workers(now)},
            tier_errors={tier.tier: (tier.errors, tier.last_error) for tier in self._tiers()},
            found=self._found(),
            incarnation=self._node.front_restarts + 1,
            uptime_seconds=time.monotonic() - self._node.started,
            ready=not state.is_recovering,
            recovery_seconds=worker.recovered.seconds if worker.recovered else 0.0,
            core=copy_counters(state.counts),
            tiers=tuple(state.tiers()),
            pinned=tuple(state.pinned_tiers()),
            pins=state.num_pins,
            shares=tuple(state.shares()),
            prefill=tuple(state.prefill_rates()),
            index_bytes=self._index_bytes,
            journal=health.journal if health else JournalHealth(),
            journal_dropped=self._core.journal.all_dropped(health.journal.dropped if health else {}),
            quarantined_bytes=sum(one.quarantined_bytes for one in self._healths()),
            quarantined_files=sum(one.quarantined_files for one in self._healths()),
            dirty_extents=dirty.extents,
            dirty_bytes=dirty.num_bytes,
            wear=state.wear(now),
            extents=state.num_extents,
            groups=len(state.usage()),
            sessions=state.num_sessions,
            leases=state.num_leases,
            tickets=state.num_tickets,
            queues=self._core.queues(),
            latencies={name: latency.copy() for name, latency in self._outbox.latencies.items()},
            worker_restarts=self._restarts(),
            io_errors=dict(_io_errors(Counter(worker.errors) + Counter(self._disk.errors))),
            request_errors=dict(self._outbox.errors),
            dropped_replies=self._outbox.dropped,
            slow_sessions=self._outbox.slow_sessions,
            recording=self._core.recording.status(),
            devices=self._devices.statuses(self._state.device_tiers(), now),
        )

    def _restarts(self) -> dict[str, int]:
        restarts = {"front": self._node.front_restarts, WorkerName.STORAGE.value: self._worker.restarts}
        if self._node.disk_dir:
            restarts[WorkerName.DISK.value] = self._disk.restarts
        restarts |= self._devices.restarts()
        if self._node.has_gateway:
            restarts[GATEWAY] = self._node.gateway_heard.restarts if self._node.gateway_heard else 0
        if self._core.recording.is_on:
            restarts[RECORDER] = self._node.recorder_heard.restarts if self._node.recorder_heard else 0
        return restarts

    def _recorder(self, now: float) -> WorkerStatus:
        sign, said = self._node.recorder_heard, self._core.recording
        heard = max(0.0, now - said.heard) if said.heard is not None else now - self._began
        state = "running"
        if sign is None or (said.heard is None and heard <= RECORDER_SILENT_SECONDS):
            state = "starting"
        elif not sign.is_running:
            state = "dead"
        elif heard > RECORDER_SILENT_SECONDS:
            state = "silent"
        pid, restarts, problem = (sign.pid, sign.restarts, sign.problem) if sign is not None else (0, 0, "")
        return WorkerStatus(RECORDER, pid, state, restarts, heard, problem)

    # ---- parts

    def _describe(self, problems: tuple[str, ...]) -> str:
        if self._node.is_stopping:
            return "stopping"
        if self._state.is_recovering:
            return "recovering"
        return "degraded" if problems else "ready"

    def _problems(self, now: float) -> Iterator[str]:
        health = self._worker.health
        if self._node.host_problem:
            yield self._node.host_problem
        if self._node.metrics_problem:
            yield self._node.metrics_problem
        if self._node.data_dir_problem:
            yield self._node.data_dir_problem
        if self._node.has_gateway and (gateway := self._node.describe_gateway(now)) != "running":
            yield f"the gateway for tenants that are not trusted is {gateway}"
        if self._is_supervisor_silent(now):
            yield f"the supervisor has said nothing for {now - self._node.supervisor_heard:.0f} s"
        yield from self._devices.problems(now)
        if not self._node.has_nvme:
            return
        if not self._worker.is_up:
            yield f"the storage worker {self._worker.problem or 'is not running'}; it is being started again"
        yield from _tier_problems("nvme", WorkerName.STORAGE, self._worker, now, read_only=self._node.read_only)
        if health is not None and health.index_problem:
            yield f"the index is not written, so the next start takes longer: {health.index_problem}"
        if not self._node.disk_dir:
            return
        if self._is_disk_away:
            yield f"the disk tier is away, and tried again: {self._disk.why_away()}"
        else:
            yield from _tier_problems("disk", WorkerName.DISK, self._disk, now, read_only=self._node.read_only)

    @property
    def _is_disk_away(self) -> bool:
        health = self._disk.health
        can_begin = self._disk.is_recovered or health is None or health.readable
        return not self._disk.is_up or not can_begin  # each try is a new process, which is up until it gives up

    def _is_supervisor_silent(self, now: float) -> bool:
        """It asks for a sign of life now and then; three times without that is no accident."""
        every = self._node.ping_seconds
        return every > 0 and now - max(self._node.supervisor_heard, self._began) > 3 * every + SILENT_SECONDS

    def _warnings(self, now: float) -> Iterator[str]:
        """What an operator may want to change; nothing is wrong with the node."""
        yield from (shortage for shortage in self._node.shortages.values() if shortage)
        yield from self._devices.warnings()
        if self._worker.health is not None and self._worker.health.direct_problem:
            yield f"files are transferred without O_DIRECT: {self._worker.health.direct_problem}"
        journal = self._worker.health.journal if self._worker.health is not None else JournalHealth()
        if journal.problem:
            yield f"evictions are not written down: {journal.problem}"
        if journal.lacks:
            others = f" (and {len(journal.lacks) - 1} more)" if len(journal.lacks) > 1 else ""
            yield f"`tierkv evictions` tells too little: {journal.lacks[-1]}{others}"
        if journal.differences:
            yield f"what is on disk and what was booked differ ({journal.differences} open); see `tierkv audit`"
        if (found := self._worker.found) is not None and found.unreadable_pins:
            yield f"{found.unreadable_pins} records of pins can't be read; the log names them: pin these anew"
        yield from self._about_recording(now)
        if self._node.read_only:
            where = "the data directory or the disk directory" if self._node.disk_dir else "the data directory"
            yield f"read_only is set: files are read, nothing is written to {where}"

    def _about_recording(self, now: float) -> Iterator[str]:
        recording = self._core.recording
        if not recording.is_on:
            return
        if recording.problem:
            yield f"what engines ask is not recorded: {recording.problem}"
        elif (state := self._recorder(now).state) not in ("running", "starting"):
            yield f"what engines ask is not recorded: the recorder is {state}"
        if missing := recording.missing.total():
            yield f"{missing:,} requests are missing in the recording; `tierkv replay` names the places"

    def _found(self) -> dict[str, int]:
        """What the last start found that it did not take, in the data directory and the disk directory together."""
        counts: Counter[str] = Counter()
        for recovered in (self._worker.found, self._disk.found):
            if recovered is not None:
                counts["set_aside"] += recovered.quarantined
                counts["foreign"] += recovered.foreign
                counts["unknown_format"] += recovered.unknown_format
                counts["unreadable"] += recovered.unreadable
        return {name: count for name, count in counts.items() if count}

    def _workers(self, now: float) -> Iterator[WorkerStatus]:
        node, worker = self._node, self._worker
        state = "silent" if self._is_supervisor_silent(now) else "running"
        yield WorkerStatus("supervisor", node.supervisor_pid, state, 0, max(0.0, now - node.supervisor_heard))
        yield WorkerStatus("front", os.getpid(), "running", node.front_restarts, 0.0)
        if node.has_gateway:
            sign = node.gateway_heard or GatewayHeard(pid=0, restarts=0, is_running=False, problem="")
            heard = max(0.0, now - node.gateway_heard_at)
            yield WorkerStatus(GATEWAY, sign.pid, node.describe_gateway(now), sign.restarts, heard, sign.problem)
        if node.has_nvme:
            yield _status_of(WorkerName.STORAGE, worker, now)
        if node.disk_dir:
            yield _status_of(WorkerName.DISK, self._disk, now)
        yield from self._devices.processes(now)
        if self._core.recording.is_on:
            yield self._recorder(now)

    def _healths(self) -> list[TierHealth]:
        return [worker.health for worker in (self._worker, self._disk) if worker.health is not None]

    @property
    def _index_bytes(self) -> int:
        """Of both tiers of files: either index lies in the data directory, and is part of NVMe's overhead."""
        return sum(one.index_bytes for one in self._healths())

    def _tiers(self) -> tuple[TierUsage, ...]:
        return tuple(self._tier(tier) for tier in self._state.tiers())

    def _tier(self, tier: TierBytes) -> TierUsage:
        health = {"nvme": self._worker.health, "disk": self._disk.health}.get(tier.tier)
        reads, writes = self._speeds(tier.tier)
        away = self._why_away(tier.tier)
        is_meant = self._node.read_only and tier.reason is Reason.READ_ONLY
        state = "away" if away else "ok" if tier.is_writable or is_meant else "degraded"
        return TierUsage(
            tier=tier.tier,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            reserved_bytes=tier.reserved_bytes,
            overhead_bytes=tier.overhead_bytes,
            index_bytes=self._index_bytes if tier.tier == "nvme" else 0,
            quarantined_bytes=health.quarantined_bytes if health else 0,
            quarantined_files=health.quarantined_files if health else 0,
            state=state,
            reason=(tier.reason or "") if state == "degraded" or is_meant else "",
            problem=away or (health.problem if health else ""),
            errors=sum(health.errors.values()) if health else 0,
            last_error=health.last_error if health else "",
            read_bytes_per_second=reads,
            write_bytes_per_second=writes,
        )

    def _why_away(self, tier: str) -> str:
        """Empty for a tier that is there."""
        if tier == "disk" and self._is_disk_away:
            return self._disk.why_away()
        return self._devices.why_away() if tier == "gpu" else ""

    def _speeds(self, tier: str) -> tuple[int, int]:
        """Of reading and of writing, one operation by itself, since this front began. 0: nothing to tell from."""
        counts = self._state.counts
        match tier:
            case "nvme":
                sums = (counts.nvme_read_bytes, counts.nvme_read_seconds)
                written = (counts.nvme_written_bytes, counts.nvme_write_seconds)
            case "disk":
                sums = (counts.disk_read_bytes, counts.disk_read_seconds)
                written = (counts.disk_written_bytes, counts.disk_write_seconds)
            case _:
                return 0, 0
        return _rate(*sums), _rate(*written)

    def _counters(self) -> dict[str, float]:
        counters = dict(_flatten(self._state.counts))
        counters |= {f"errors.{code}": count for code, count in self._outbox.errors.items()}
        counters |= {f"requests.{name}": sum(seen.counts) for name, seen in self._outbox.latencies.items()}
        counters["dropped_replies"] = self._outbox.dropped
        counters["slow_sessions"] = self._outbox.slow_sessions
        counters["skipped_touches"] = self._worker.skipped_touches
        return counters


def _rate(num_bytes: int, seconds: float) -> int:
    return round(num_bytes / seconds) if seconds > 0 else 0


def _status_of(name: WorkerName, worker: WorkerState, now: float) -> WorkerStatus:
    heard = max(0.0, now - worker.heard)
    return WorkerStatus(name, worker.pid, worker.describe(now), worker.restarts, heard, worker.problem)


def _tier_problems(tier: str, name: WorkerName, worker: WorkerState, now: float, *, read_only: bool) -> Iterator[str]:
    health = worker.health
    if worker.is_silent(now):
        yield f"the {name} worker has said nothing for {now - worker.heard:.0f} s"
    if health is not None and not health.writable and not read_only:
        yield f"{tier} is not written to: {health.reason or 'unknown'} {health.problem}".rstrip()
    if health is not None and not health.readable:
        yield f"{tier} is not read from: a read has not come back"
    elif health is not None and health.read_problem:
        yield f"{tier} can't be read: {health.read_problem}"


def _flatten(counts: Counters) -> Iterator[tuple[str, float]]:
    """`name`, or `name.label` and `name.label.label` for what is counted by reason or tier."""
    for one in fields(counts):
        value: Any = getattr(counts, one.name)
        if isinstance(value, Counter):
            for label, count in value.items():
                labels = label if isinstance(label, tuple) else (label,)
                yield ".".join([one.name, *map(str, labels)]), count
        else:
            yield one.name, value


def _io_errors(errors: dict[str, int]) -> Iterator[tuple[tuple[str, str], int]]:
    for name, count in errors.items():
        operation, _, errno_name = name.partition(" ")
        yield (operation, errno_name), count


def _usage_row(row: GroupUsage) -> UsageRow:
    identity = row.spec.identity
    return UsageRow(
        fingerprint=identity.weights,
        group=row.spec.group,
        model_name=row.spec.model_name,
        adapter=identity.adapter,
        adapter_name=row.spec.adapter_name,
        salt=blake3(identity.salt.encode()).hexdigest()[:8] if identity.salt else "",
        dtype=identity.layout.dtype,
        layout=identity.layout.engine,
        codec=identity.layout.codec,
        block_tokens=identity.layout.block_tokens,
        block_bytes=identity.layout.total_block_bytes,
        ranks=row.ranks,
        extents=row.extents,
        tokens=row.tokens,
        host_bytes=row.host_bytes,
        nvme_bytes=row.nvme_bytes,
        disk_bytes=row.disk_bytes,
        gpu_bytes=row.gpu_bytes,
        last_used=row.last_used,
        persistent=row.persistent,
        reachable=row.reachable,
    )
