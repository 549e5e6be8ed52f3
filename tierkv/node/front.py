"""The front process: decides. One thread, one poll loop; no file I/O, and of the arena only the generations.

    ROUTER socket    requests of engines            -> service -> core -> replies; peers at its door are let in
    control socket   the supervisor's messages      -> sessions, workers, limits, shutdown
    channels         the workers' reports           -> core
    recorder         what engines ask, where that is recorded: sent when there is room, and never waited for
    timers           what the core is due to do

Each round takes a bounded part from each, so that none starves the others. It ends when the supervisor is gone, when it
was told to (0), or when its state can't be trusted any more (3): then the supervisor starts a new one.

Run as `python -m tierkv.node.front CONTROL_FD SUPERVISOR_PID`.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import MutableSequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import zmq

from tierkv.core.codec_gate import CodecGate
from tierkv.core.instructions import (
    AnyReport,
    KeepStart,
    Recovered,
    StartsFound,
    TierHealth,
    Zero,
    Zeroed,
)
from tierkv.core.reasons import Reason
from tierkv.core.starts import Window
from tierkv.core.state import CacheState, Limits
from tierkv.errors import TierkvError, WireError
from tierkv.node.arena import PAGE_BYTES, seal_against_writers
from tierkv.node.clock import NodeClock
from tierkv.node.control import (
    AnyControlMessage,
    Begin,
    CodecVerdicts,
    Control,
    DeviceMapped,
    DirectoryGone,
    FrontSettings,
    GatewayHeard,
    HostLimit,
    MemoryZeroed,
    Ping,
    Pong,
    Ready,
    RecorderHeard,
    ReplaceWorker,
    SessionClosed,
    SessionEnded,
    SessionOpened,
    Shutdown,
    WorkerDied,
    WorkerName,
    WorkerRecovered,
    WorkerStarted,
    ZeroMemory,
)
from tierkv.node.core_calls import CoreCalls, CoreFailed
from tierkv.node.draining import Draining
from tierkv.node.front_devices import FrontDevices
from tierkv.node.front_metrics import FrontMetrics
from tierkv.node.front_sessions import FrontSession, SessionTable
from tierkv.node.mover import Mover
from tierkv.node.outbox import Outbox
from tierkv.node.recording import Recording
from tierkv.node.router import Router
from tierkv.node.service import NodeFacts, Service
from tierkv.node.start_recorder import StartRecorder, taken
from tierkv.node.survey import NodeState, Survey
from tierkv.node.tier_room import TierRoom
from tierkv.node.tier_worker import DeviceWorker, TierWorker, WorkerLink
from tierkv.wire.messages import StartsReply
from tierkv.workers.lifeline import end_with_parent

REQUESTS_PER_ROUND = 64
BEGIN_SECONDS = 30.0
IDLE_SECONDS = 0.001
"""Without anything to read for so long, work that nobody waits for is done. At once would be too early: it would take
the processor from the thread that sends the reply."""

SOCKET_CHECK_SECONDS = 20.0

EXIT_CORE_FAILED = 3
EXIT_SUPERVISOR_GONE = 71

_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
"""As plain numbers: arithmetic with enumerations takes a microsecond each time, several times a request."""

log = logging.getLogger(__name__)


def limits_of(settings: FrontSettings, nvme_bytes: int, disk_bytes: int) -> Limits:
    """`nvme_bytes` is the room that there is, where the node has a data directory; `disk_bytes` alike."""
    return Limits(
        host_bytes=settings.host_bytes,
        slab_bytes=settings.slab_bytes,
        extent_bytes=settings.extent_bytes,
        nvme_bytes=nvme_bytes if settings.data_dir else 0,
        disk_bytes=disk_bytes if settings.disk_dir else 0,
        disk_inflight=settings.disk_inflight,
        seal_after_seconds=settings.seal_after_seconds,
        session_bytes=settings.session_bytes,
        inflight_writes=settings.inflight_writes,
        inflight_reads=settings.inflight_reads,
        page_bytes=PAGE_BYTES,
        touch_seconds=settings.touch_seconds,
        prefill_tokens_per_second=settings.prefill_tokens_per_second,
        policy=settings.eviction_policy,
        nvme_write_bytes_per_day=settings.nvme_write_bytes_per_day,
        pinned_share=settings.pinned_share,
        auto_pin_share=settings.auto_pin_share,
        ttl=settings.ttl,
        shares=settings.shares,
        device_bytes=(settings.gpu_bytes,) * len(settings.gpu_devices),
    )


class Front:
    """Owns the ROUTER socket, the channels to the workers, the control socket and the mapping of the generations."""

    def __init__(self, control: Control, begin: Begin, generations_fd: int, recorder_fd: int | None = None) -> None:
        settings = begin.settings
        self._control = control
        self._settings = settings
        self._clock = NodeClock(begin.wall_zero, begin.monotonic_zero)
        self._has_nvme = bool(settings.data_dir)
        self._generations = _map_generations(generations_fd)
        self._storage, self._disk = _workers(settings)
        self._device_workers = tuple(
            DeviceWorker(device, name, settings.hang_seconds) for device, name in enumerate(settings.gpu_devices)
        )
        self._workers: tuple[WorkerLink, ...] = (self._storage, self._disk, *self._device_workers)
        limits = limits_of(settings, self._storage.room.num_bytes, self._disk.room.num_bytes)
        state = CacheState(limits, self._generations)
        self._router = Router(Path(settings.socket_dir))
        self._outbox = Outbox(self._router.send, self._now)
        zero = None if self._has_nvme else self._have_zeroed
        self._recording = Recording(
            socket.socket(fileno=recorder_fd) if recorder_fd is not None else None, settings.record, self._now()
        )
        self._core = CoreCalls(
            state,
            self._storage.mover,
            self._outbox,
            partial(self._replace_worker, self._storage),
            zero,
            self._recording,
            self._disk.mover,
            partial(self._replace_worker, self._disk),
            {worker.mover: partial(self._replace_worker, worker) for worker in self._device_workers},
        )
        self._node = NodeState(
            incarnation=begin.incarnation,
            data_dir=settings.data_dir,
            has_nvme=self._has_nvme,
            disk_dir=settings.disk_dir,
            read_only=settings.read_only,
            supervisor_pid=begin.supervisor_pid,
            front_restarts=begin.front_restarts,
            data_dir_problem=begin.data_dir_problem,
            started=time.monotonic(),
            has_gateway=settings.has_gateway,
            began=self._now(),
            ping_seconds=self._storage.watchdog.step_seconds if settings.hang_seconds else 0.0,
        )
        self._survey = Survey(self._core, self._outbox, self._node, self._device_workers)
        self._codec_gate = CodecGate(settings.codec)
        self._starts = StartRecorder(
            number=begin.incarnation,
            began=begin.wall_zero if begin.last_end is None else begin.incarnation / 1_000,
            rate=settings.prefill_tokens_per_second,
            keep=lambda start: self._core.instruct(KeepStart(start), self._now()),
            boot=begin.boot,
            last_end=begin.last_end,
            problem=begin.end_problem,
        )
        self._service = Service(
            self._core,
            SessionTable(self._take_control),
            self._outbox,
            NodeFacts(
                incarnation=begin.incarnation,
                data_dir=settings.data_dir,
                host_bytes=settings.host_bytes,
                slab_bytes=settings.slab_bytes,
                has_nvme=self._has_nvme,
                disk_dir=settings.disk_dir,
                is_read_only=settings.read_only,
                began=self._now(),
            ),
            status=self._survey.status,
            usage=self._survey.usage,
            starts=lambda request_id: StartsReply(id=request_id, starts=self._starts.all(self._now(), self._so_far())),
            opened=self._note_opened,
            codec_gate=self._codec_gate,
        )
        self._devices = FrontDevices(self._device_workers, self._service, self._tell_of_pool)
        self._is_directory_gone = False
        self._draining: Draining | None = None
        self._metrics = FrontMetrics(settings.metrics_host, settings.metrics_port)
        self._poller = zmq.Poller()
        self._polled: dict[Any, int] = {}
        self._wakeup: float | None = None
        self._is_idle = False  # nothing could be read in the last round
        self._next_socket_check = time.monotonic() + SOCKET_CHECK_SECONDS
        self._is_finished = False
        self._service.host_limit(begin.host_limit_bytes, self._now(), earlier_bytes=begin.earlier_bytes)
        if self._has_nvme:
            _begin_bulk_loading()
        else:
            self._starts.ready(self._now(), self._so_far())

    # ---- the loop

    def run(self) -> int:
        """Until the end; the exit code."""
        self._control.send(Ready())
        while not self._is_finished:
            ready = self._wait()
            if self._control.fileno() in ready:
                self._take_control()
            if self._control.ended:
                return EXIT_SUPERVISOR_GONE
            for worker in self._workers:
                if worker.mover.is_attached and worker.mover.fileno() in ready:
                    self._take_reports(worker)
            if self._router.door in ready:
                self._router.admit()
            if self._recording.is_on and self._recording.fileno() in ready:
                self._recording.receive(self._now())
            self._take_requests()
            self._do_what_is_due()
            self._is_idle = not ready
            if self._is_idle or self._service.is_hurried:
                self._service.do_idle_work(self._now())
            if self._metrics.wanted(ready):
                self._metrics.serve(partial(self._survey.snapshot, self._now()))
            self._drain()
            for worker in self._workers:
                worker.mover.flush()
            self._control.flush()
        return 0

    def _wait(self) -> dict[Any, int]:
        """Until something can be read or is due; what can be read or written."""
        wanted = self._interest()
        for what in self._polled.keys() - wanted.keys():
            self._poller.unregister(what)
        for what, events in wanted.items():
            if self._polled.get(what) != events:
                self._poller.register(what, events)
        self._polled = wanted
        return dict(self._poller.poll(self._timeout_milliseconds()))

    def _interest(self) -> dict[Any, int]:
        wanted: dict[Any, int] = {
            self._control.fileno(): _events(self._control.wants_write),
            self._router.door: _POLLIN,
        }
        if not self._service.is_behind:
            wanted[self._router.socket] = _POLLIN
        for worker in self._workers:
            if worker.mover.is_attached:
                wanted[worker.mover.fileno()] = _events(worker.mover.wants_write)
        wanted |= dict.fromkeys(self._metrics.filenos(), _POLLIN)
        if self._recording.is_on:
            wanted[self._recording.fileno()] = _POLLIN
        return wanted

    def _timeout_milliseconds(self) -> int:
        if self._service.is_hurried or (self._is_idle and self._service.has_idle_work):
            return 0
        now = self._now()
        times = [self._next_socket_check - time.monotonic()]
        looks = [worker.next_look() for worker in self._workers]
        times += [look - time.monotonic() for look in looks if look is not None]
        self._wakeup = self._service.next_wakeup()
        if self._wakeup is not None:
            times.append(self._wakeup - now)
        times.append(self._starts.next_due - now)
        if self._draining is not None:
            times.append(self._draining.next_wakeup() - now)
        if self._service.has_idle_work:
            times.append(IDLE_SECONDS)
        return max(0, math.ceil(min(times) * 1000))

    def _take_requests(self) -> None:
        for _ in range(REQUESTS_PER_ROUND):
            if self._service.is_behind or (found := self._router.receive()) is None:
                return
            peer, frame = found
            self._service.handle(peer, frame, self._now())

    def _do_what_is_due(self) -> None:
        """What was due when the wait began. What this round has made due comes next round: it costs no wait."""
        if self._wakeup is not None and self._wakeup <= (now := self._now()):
            self._service.tick(now)
        if self._starts.next_due <= (now := self._now()):
            self._starts.look(now, self._so_far())
        if self._next_socket_check <= time.monotonic():
            self._next_socket_check = time.monotonic() + SOCKET_CHECK_SECONDS
            self._router.rebind_if_deleted()
            if self._node.metrics_problem:
                self.start_metrics()
        for worker in self._workers:
            if problem := worker.why_hung():
                self._replace_worker(worker, problem)

    def _drain(self) -> None:
        if self._draining is None or (drained := self._draining.step(self._now())) is None:
            return
        self._service.answer_everybody(self._now())
        self._control.send(drained)
        self._is_finished = True

    # ---- the supervisor

    def _take_control(self) -> None:
        while (found := self._control.receive()) is not None:
            message, descriptors = found
            self._node.supervisor_heard = self._now()
            self._on_control(message, descriptors)

    def _on_control(self, message: AnyControlMessage, descriptors: list[int]) -> None:
        now = self._now()
        match message:
            case SessionOpened():
                self._service.open_session(
                    FrontSession(message.token, message.client, message.maps_arena, message.pid), now
                )
            case SessionClosed():
                self._service.close_session(message.token)
            case SessionEnded():
                self._devices.session_ended(message.token)
                self._service.end_session(message.token, now)
            case DeviceMapped():
                self._devices.mapped(message.token, message.device)
            case WorkerStarted():
                self._find(message).started(message, socket.socket(fileno=descriptors[0]), now)
                if message.worker is not WorkerName.DEVICE:  # what that one has it will tell
                    self._service.worker_started(now, message.worker)
            case WorkerDied():
                worker = self._find(message)
                for report in worker.died(message, now):
                    self._on_report(worker, report, now)
                self._note_dead(worker, now)
            case HostLimit():
                self._node.host_problem = message.problem
                self._service.host_limit(message.num_bytes, now, earlier_bytes=message.earlier_bytes)
            case MemoryZeroed():
                self._service.on_report(Zeroed(message.op), now)
            case GatewayHeard():
                self._node.gateway_heard = message
                self._node.gateway_heard_at = now
            case RecorderHeard():
                self._node.recorder_heard = message
            case CodecVerdicts():
                self._codec_gate.learn(message.judged)
            case Ping():
                self._control.send(Pong())
            case Shutdown():
                self._shut_down(message.budget_seconds, now)
            case _:
                raise TierkvError(f"a front is not told {type(message).__name__}")

    def _shut_down(self, budget_seconds: float, now: float) -> None:
        self._node.is_stopping = True
        if self._draining is None:
            self._starts.end(now, self._so_far())
            self._draining = Draining(self._core, self._service, budget_seconds, now)
        else:
            self._draining.shorten(budget_seconds, now)

    # ---- the workers

    def _find(self, message: WorkerStarted | WorkerDied) -> WorkerLink:
        if message.worker is WorkerName.DEVICE:
            return self._device_workers[message.device]
        return self._storage if message.worker is WorkerName.STORAGE else self._disk

    def _note_dead(self, worker: WorkerLink, now: float) -> None:
        if isinstance(worker, DeviceWorker):
            self._devices.died(worker, now)
        else:
            self._service.worker_died(now, worker.mover.name)

    def _take_reports(self, worker: WorkerLink) -> None:
        now = self._now()
        try:
            reports = worker.receive(now)
        except WireError as error:
            self._replace_worker(worker, str(error))
            return
        for report in reports:
            self._on_report(worker, report, now)

    def _so_far(self) -> Window:
        return taken(self._core.state.counts, self._outbox.latencies.get("Acquire"))

    def _note_opened(self, group: bytes, pid: int, is_used: bool) -> None:
        self._starts.opened(group, pid, is_used=is_used, now=self._now(), so_far=self._so_far())

    def _on_report(self, worker: WorkerLink, report: AnyReport, now: float) -> None:
        if isinstance(worker, DeviceWorker):
            self._devices.on_report(worker, report, now)
        elif isinstance(worker, TierWorker):
            self._on_tier_report(worker, report, now)

    def _tell_of_pool(self, worker: DeviceWorker) -> None:
        pid = worker.mover.worker.pid
        self._control.send(WorkerRecovered(worker=WorkerName.DEVICE, device=worker.device, pid=pid))

    def _on_tier_report(self, worker: TierWorker, report: AnyReport, now: float) -> None:
        name = worker.mover.name
        worker.room.note(report)
        if isinstance(report, Recovered):
            self._set_room(worker, worker.room.at_recovery(), now)
        if isinstance(report, StartsFound):
            self._starts.found(report.starts)
            return
        self._service.on_report(report, now, name)
        if isinstance(report, Recovered):  # said once it is so: the supervisor tells everybody that the node is ready
            if not self._core.state.is_recovering:  # of NVMe, which has the most of it
                _end_bulk_loading()
            if worker is self._storage:
                self._starts.ready(now, self._so_far())
            self._control.send(WorkerRecovered(worker=name, pid=worker.mover.worker.pid))
        if isinstance(report, TierHealth):
            if worker is self._storage:
                self._tell_of_directory(report)
            self._look_at_room(worker, now)

    def _look_at_room(self, worker: TierWorker, now: float) -> None:
        state = self._core.state
        tier = "nvme" if worker is self._storage else "disk"
        if not (state.is_recovering if worker is self._storage else state.is_disk_recovering):
            removing = state.removing_bytes if worker is self._storage else state.disk_removing_bytes
            used = next(one.used_bytes for one in state.tiers() if one.tier == tier)
            self._set_room(worker, worker.room.at_health(used, removing), now)

    def _tell_of_directory(self, health: TierHealth) -> None:
        """The supervisor, who has the lock, may take the directory anew when that can be done."""
        is_gone = health.reason == Reason.DATA_DIR_GONE
        if is_gone != self._is_directory_gone:
            self._is_directory_gone = is_gone
            self._control.send(DirectoryGone(problem=health.problem if is_gone else ""))

    def _set_room(self, worker: TierWorker, num_bytes: int | None, now: float) -> None:
        if num_bytes is not None:
            self._service.tier_limit(num_bytes, now, worker.mover.name)
            self._node.shortages[worker.mover.name] = worker.room.shortage
            if worker.room.is_news(num_bytes):
                log.warning("%s", worker.room.shortage)

    def _replace_worker(self, worker: WorkerLink, problem: str) -> None:
        log.error("the %s worker can't be spoken to any more: %s", worker.mover.label, problem)
        self._control.send(ReplaceWorker(pid=worker.mover.worker.pid, problem=problem))

    def _have_zeroed(self, zero: Zero) -> None:
        self._control.send(ZeroMemory(op=zero.op, ranges=zero.ranges))

    # ---- the rest

    def start_metrics(self) -> None:
        self._node.metrics_problem = self._metrics.start(partial(self._survey.snapshot, self._now()))

    def close(self) -> None:
        self._metrics.close()
        self._router.close()
        for worker in self._workers:
            worker.mover.detach()
        self._recording.close()

    def _now(self) -> float:
        return self._clock.now()


def _workers(settings: FrontSettings) -> tuple[TierWorker, TierWorker]:
    """Of NVMe and of the disk tier, whether there are such or not."""
    nvme = TierRoom(settings.nvme_bytes, settings.nvme_reserve_bytes, read_only=settings.read_only)
    disk = TierRoom(settings.disk_bytes, settings.disk_reserve_bytes, read_only=settings.read_only, tier="disk")
    return (
        TierWorker(Mover(WorkerName.STORAGE), nvme, settings.hang_seconds),
        TierWorker(Mover(WorkerName.DISK), disk, settings.hang_seconds),
    )


def _events(wants_write: bool) -> int:
    return _POLLIN | _POLLOUT if wants_write else _POLLIN


def _begin_bulk_loading() -> None:
    """Recovery makes a dozen objects for each extent, and no garbage: the collector would walk all of them, over and
    over, for as long as the rows come, and take longer than everything else together."""
    gc.disable()


def _end_bulk_loading() -> None:
    """From here on the collector works as usual, and leaves alone what recovery has made."""
    gc.freeze()
    gc.enable()


def _map_generations(fd: int) -> MutableSequence[int]:
    """Writable here and, from now on, nowhere else."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    seal_against_writers(fd)
    os.close(fd)
    return cast("MutableSequence[int]", memoryview(mapping).cast("Q"))


def main(arguments: list[str]) -> int:
    control_fd, supervisor_pid = int(arguments[0]), int(arguments[1])
    end_with_parent(supervisor_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor, which says when to stop
    control = Control(socket.socket(fileno=control_fd))
    found = control.wait(BEGIN_SECONDS)
    if found is None or not isinstance(found[0], Begin):
        return EXIT_SUPERVISOR_GONE
    begin, (generations_fd, *recorder_fd) = found[0], found[1]
    logging.basicConfig(
        level=begin.settings.log_level.upper(), format="%(asctime)s %(levelname)s front: %(name)s: %(message)s"
    )
    front = Front(control, begin, generations_fd, *recorder_fd)
    try:
        front.start_metrics()
        return front.run()
    except CoreFailed:
        log.critical("the cache's state can't be trusted any more; this front ends", exc_info=True)
        return EXIT_CORE_FAILED
    finally:
        front.close()
        control.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
