"""A service with the real core, a clock of ours, and, where a test wants it, the test as its storage worker."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tierkv.core.addresses import pool_bases
from tierkv.core.codec_gate import CodecGate
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.instructions import AnyInstruction, AnyReport, BalanceTier, JournalRows, Recovered, TierHealth
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits
from tierkv.node.control import WorkerDied, WorkerName, WorkerStarted
from tierkv.node.core_calls import CoreCalls
from tierkv.node.front_devices import FrontDevices
from tierkv.node.front_sessions import FrontSession, SessionTable
from tierkv.node.mover import Mover
from tierkv.node.outbox import Outbox
from tierkv.node.service import NodeFacts, Service
from tierkv.node.survey import NodeState, Survey
from tierkv.node.tier_worker import DeviceWorker
from tierkv.wire.frames import decode_reply, encode
from tierkv.wire.messages import OpenGroup, Reply, Request
from tierkv.workers.channel import BlockingChannel, worker_end

ENGINE = b"engine-session-1"
TOOL = b"tool-session-001"
BLOCK_TOKENS = 2
BLOCK_BYTES = 4096
SLAB_BYTES = 4 * BLOCK_BYTES
HOST_BYTES = 16 * BLOCK_BYTES

IDENTITY = Identity(
    weights="ab" * 32,
    config="config",
    layout=Layout(dtype="bf16", block_bytes=(BLOCK_BYTES,), axes="layer,token", block_tokens=BLOCK_TOKENS, engine="t"),
)
TWO_RANKS = msgspec.structs.replace(IDENTITY, parallel=Parallel(tensor=2, shards=2))
GROUP = IDENTITY.group_key()

RECOVERED = Recovered(
    seconds=0.1,
    extents=0,
    index_rows=0,
    headers_read=0,
    quarantined=0,
    foreign=0,
    unknown_format=0,
    temp_removed=0,
    index_rebuilt=False,
)
HEALTHY = TierHealth(writable=True, overhead_bytes=0, free_bytes=2**40)


def prompt(num_blocks: int, *, start: int = 0) -> tuple[bytes, bytes]:
    """(packed keys, packed tokens)"""
    tokens = pack_tokens(list(range(start, start + num_blocks * BLOCK_TOKENS)))
    return chain_keys(GROUP, tokens, BLOCK_TOKENS), tokens


@dataclass
class Kit:
    nvme_bytes: int = 0
    disk_bytes: int = 0
    session_bytes: int = HOST_BYTES
    device_bytes: tuple[int, ...] = ()
    now: float = 1_000.0
    takes_replies: bool = True
    codec_gate: CodecGate | None = None
    replies: list[tuple[bytes, Reply]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    booked: list[JournalRows | BalanceTier] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(
            host_bytes=HOST_BYTES,
            slab_bytes=SLAB_BYTES,
            extent_bytes=4 * BLOCK_BYTES,
            nvme_bytes=self.nvme_bytes,
            disk_bytes=self.disk_bytes,
            seal_after_seconds=10.0,
            session_bytes=self.session_bytes,
            inflight_writes=2,
            inflight_reads=2,
            device_bytes=self.device_bytes,
        )
        self.bases = pool_bases(HOST_BYTES, SLAB_BYTES, self.device_bytes)
        self.state = CacheState(limits, [0] * (self.bases[-1] // 4096))
        self.device_workers = [
            DeviceWorker(device, "cpu" if not device else f"cpu:{device}", 0.0)
            for device in range(len(self.device_bytes))
        ]
        self.mover = Mover()
        self.outbox = Outbox(self._transmit, lambda: self.now)
        self.disk = Mover(WorkerName.DISK)
        self.core = CoreCalls(
            self.state,
            self.mover,
            self.outbox,
            self.replaced.append,
            disk=self.disk,
            replace_disk_worker=self.replaced.append,
            devices={worker.mover: self.replaced.append for worker in self.device_workers},
        )
        self.announced: list[FrontSession] = []
        self.sessions = SessionTable(self._catch_up)
        self.node = NodeState(
            incarnation=7,
            data_dir="/data" if self.nvme_bytes else "",
            has_nvme=bool(self.nvme_bytes),
            disk_dir="/disk" if self.disk_bytes else "",
            supervisor_pid=1,
            front_restarts=0,
            started=0.0,
        )
        self.survey = Survey(self.core, self.outbox, self.node, self.device_workers)
        self.service = Service(
            self.core,
            self.sessions,
            self.outbox,
            NodeFacts(
                incarnation=7,
                data_dir=self.node.data_dir,
                host_bytes=HOST_BYTES,
                slab_bytes=SLAB_BYTES,
                has_nvme=self.node.has_nvme,
                disk_dir=self.node.disk_dir,
            ),
            status=self.survey.status,
            usage=self.survey.usage,
            codec_gate=self.codec_gate,
        )
        self.worker: BlockingChannel[AnyReport, AnyInstruction] | None = None
        self.disk_worker: BlockingChannel[AnyReport, AnyInstruction] | None = None
        self.opened: list[int] = []
        self.devices = FrontDevices(self.device_workers, self.service, lambda worker: self.opened.append(worker.device))
        self.device_ends: dict[int, BlockingChannel[AnyReport, AnyInstruction]] = {}
        self._last_id = 0
        self.join(ENGINE)

    def _transmit(self, peer: bytes, frame: bytes) -> bool:
        if self.takes_replies:
            reply = decode_reply(frame)
            assert isinstance(reply, Reply)
            self.replies.append((peer, reply))
        return self.takes_replies

    def _catch_up(self) -> None:
        announced, self.announced = self.announced, []
        for session in announced:
            self.service.open_session(session, self.now)

    def close(self) -> None:
        self.mover.detach()
        self.disk.detach()
        for device in self.device_workers:
            device.mover.detach()
        for worker in (self.worker, self.disk_worker, *self.device_ends.values()):
            if worker is not None:
                worker.close()

    # ---- as an engine

    def join(self, token: bytes, *, maps_arena: bool = True) -> None:
        self.service.open_session(FrontSession(token, "test", maps_arena), self.now)

    def send(self, kind: type[Request], *, peer: bytes = b"peer", session: bytes = ENGINE, **fields: Any) -> int:
        """The request's id."""
        self._last_id += 1
        request = kind(id=self._last_id, session=session, **fields)
        self.service.handle(peer, encode(request), self.now)
        return request.id

    def ask(self, kind: type[Request], **fields: Any) -> Any:
        """The reply, which must be there at once."""
        request_id = self.send(kind, **fields)
        (reply,) = self.take_replies()
        assert reply.id == request_id
        return reply

    def take_replies(self) -> list[Any]:
        taken = [reply for _, reply in self.replies]
        self.replies.clear()
        return taken

    def open(self, identity: Identity = IDENTITY, *, session: bytes = ENGINE) -> Any:
        return self.ask(OpenGroup, session=session, identity=identity, block_bytes=identity.layout.total_block_bytes)

    # ---- as a storage worker

    def start_worker(self, *, recovers: bool = True) -> None:
        ours, theirs = socket.socketpair()
        if self.worker is not None:
            self.worker.close()
        self.worker = worker_end(theirs)
        self.mover.attach(ours, pid=99, restarts=0, now=self.now)
        self.service.worker_started(self.now)
        if recovers:
            self.report(RECOVERED, HEALTHY)

    def instructions(self) -> list[AnyInstruction]:
        """What the worker was told since, the journal aside: see `booked`."""
        assert self.worker is not None
        self.mover.flush()
        told = self.worker.receive(0.0)
        self.booked += [one for one in told if isinstance(one, JournalRows | BalanceTier)]
        return [one for one in told if not isinstance(one, JournalRows | BalanceTier)]

    def report(self, *reports: AnyReport) -> None:
        assert self.worker is not None
        self.worker.send(reports, timeout_seconds=1.0)
        for report in self.mover.receive(self.now):
            self.service.on_report(report, self.now)

    def kill_worker(self) -> None:
        self.mover.detach()
        self.service.worker_died(self.now)

    # ---- as the worker of the disk tier

    def start_disk_worker(self, *, recovers: bool = True) -> None:
        ours, theirs = socket.socketpair()
        if self.disk_worker is not None:
            self.disk_worker.close()
        self.disk_worker = worker_end(theirs)
        self.disk.attach(ours, pid=98, restarts=0, now=self.now)
        self.service.worker_started(self.now, WorkerName.DISK)
        if recovers:
            self.disk_report(RECOVERED, HEALTHY)

    def disk_instructions(self) -> list[AnyInstruction]:
        assert self.disk_worker is not None
        self.disk.flush()
        return list(self.disk_worker.receive(0.0))

    def disk_report(self, *reports: AnyReport) -> None:
        assert self.disk_worker is not None
        self.disk_worker.send(reports, timeout_seconds=1.0)
        for report in self.disk.receive(self.now):
            self.service.on_report(report, self.now, WorkerName.DISK)

    def kill_disk_worker(self) -> None:
        self.disk.detach()
        self.service.worker_died(self.now, WorkerName.DISK)

    # ---- as the worker of a device

    def start_device(self, device: int = 0, *reports: AnyReport) -> None:
        ours, theirs = socket.socketpair()
        if device in self.device_ends:
            self.device_ends[device].close()
        self.device_ends[device] = worker_end(theirs)
        started = WorkerStarted(worker=WorkerName.DEVICE, device=device, pid=90 + device, restarts=0, sends_rows=False)
        self.device_workers[device].started(started, ours, self.now)
        self.device_report(device, *reports)

    def device_instructions(self, device: int = 0) -> list[AnyInstruction]:
        self.device_workers[device].mover.flush()
        return list(self.device_ends[device].receive(0.0))

    def device_report(self, device: int, *reports: AnyReport) -> None:
        self.device_ends[device].send(reports, timeout_seconds=1.0)
        worker = self.device_workers[device]
        for report in worker.receive(self.now):
            self.devices.on_report(worker, report, self.now)

    def kill_device(self, device: int = 0, problem: str = "killed by SIGKILL", *, pause_seconds: float = 0.0) -> None:
        worker = self.device_workers[device]
        died = WorkerDied(
            worker=WorkerName.DEVICE, device=device, pid=90 + device, problem=problem, pause_seconds=pause_seconds
        )
        for report in worker.died(died, self.now):
            self.devices.on_report(worker, report, self.now)
        self.devices.died(worker, self.now)

    # ---- time

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.service.tick(self.now)
