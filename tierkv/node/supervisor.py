"""The supervisor: `tierkv serve`. Owns the locks, the memory, the session socket and the signals; starts, watches and
restarts the other processes.

    lock the data directory -> check it -> socket directory -> memory -> incarnation -> loop -> orderly end

    front dies      its worker is killed and waited for, then a new incarnation; the old arena's memory counts as taken
                    until every session of it is proven to have ended
    front hangs     no answer to a Ping for `hang_seconds`: killed, and then as above
    worker dies     waitpid, tell the front, start another; one that died before it had recovered loses its index
    signal          TERM, INT or HUP: stop accepting, drain within the budget, say what was lost; again: at once

The loop waits in one place and does nothing that takes longer than some ten milliseconds.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tierkv.config import Settings
from tierkv.core.codec_gate import JudgedModel
from tierkv.core.starts import LastEnd
from tierkv.errors import ConfigError, DataDirectoryNewer, IncompleteError, TierkvError, WireError
from tierkv.node.admission import Admission
from tierkv.node.arena import are_huge_pages_possible
from tierkv.node.children import Backoff, Child
from tierkv.node.clock import NodeClock
from tierkv.node.control import (
    AnyControlMessage,
    ControlFull,
    ControlMessage,
    DirectoryGone,
    Drained,
    Ping,
    Pong,
    Ready,
    RecorderHeard,
    ReplaceWorker,
    SessionClosed,
    SessionEnded,
    Shutdown,
    WorkerDied,
    WorkerName,
    WorkerRecovered,
    ZeroMemory,
)
from tierkv.node.device_pools import DevicePools
from tierkv.node.disk_check import require_disk_directory
from tierkv.node.gateway_process import GatewayProcess
from tierkv.node.held_directory import HeldDirectory
from tierkv.node.host_share import HostShare
from tierkv.node.incarnation import Incarnation
from tierkv.node.lock import lock_socket_directory
from tierkv.node.memory_room import require_memory
from tierkv.node.recorder_process import RecorderProcess
from tierkv.node.session_socket import SessionSocket
from tierkv.node.sessions import Asked, AskedDevice, Ended, Event, HungUp, Sessions
from tierkv.node.socket_folder import (
    claim_inline_folder,
    claim_socket_folder,
    listen_for_sessions,
    remove_inline_sockets,
    remove_sockets,
)
from tierkv.node.start_checks import (
    raise_descriptor_limit,
    require_metrics_address,
    require_purge_records,
    require_recording,
    require_verdict,
)
from tierkv.node.stop_signals import caught_signals, stop_signals_in
from tierkv.node.watchdog import Verdict, Watchdog
from tierkv.node.worker_command import WorkerResources, start_disk_worker, start_storage_worker
from tierkv.node.worker_watch import WorkerWatch
from tierkv.storage.boot import boot_id

GIVE_UP_AFTER = 5
"""Fronts that died in a row before any was ever ready: starting once more would not help."""

RETAKE_SECONDS = 1.0
PATIENCE_AT_START = 10.0
"""Times `hang_seconds` that a front gets until it knows what is on disk: to take in millions of extents is one step."""

DISK_LAST_DELAY_SECONDS = 30.0
"""So long at most a disk tier that can't be used is left alone: its file system may be mounted late."""

MEMORY_ALONE = {
    "data_dir": None,
    "nvme_bytes": None,
    "disk_dir": None,
    "disk_bytes": None,
    "read_only": False,
    "codec": "raw",
}

END_SECONDS = 5.0
"""What the children get, beyond the draining budget, before they are killed."""

log = logging.getLogger(__name__)


def _say(line: str) -> None:
    """For whoever reads it. That nobody does, as the terminal or the pipe is closed or the disk behind it full, is no
    reason to end, nor to end otherwise than well."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("nobody can be told %r: %s", line, error.strerror)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # or what is left in the buffer is tried again at exit
        os.close(nowhere)


def run(settings: Settings, *, say: Callable[[str], None] = _say) -> int:
    """Serve until a signal; the exit code, which is 4 when something dirty was dropped at the end. Call it from the
    main thread, which handles the signals.

    `say` gets one line when the node is ready and one at its end. Raises ConfigError, DataDirectoryError and
    DataDirectoryInUse before anything has been started.
    """
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s supervisor: %(message)s")
    with ExitStack() as owned:
        held: HeldDirectory | None = None
        data_dir_problem = ""
        judged: list[JudgedModel] = []
        if settings.data_dir is not None and settings.disk_dir is not None:
            require_disk_directory(settings.data_dir, settings.disk_dir)
        if settings.data_dir is not None:
            try:
                taken = HeldDirectory.take(settings.data_dir, settings.lock_wait_seconds, read_only=settings.read_only)
                held = owned.enter_context(taken)
                require_purge_records(settings.data_dir)
                judged = require_verdict(settings)
                _tell_of_verdicts(judged)
            except DataDirectoryNewer as error:  # after a way back: what memory can do is done without it
                data_dir_problem = f"no nvme tier: {error}"
                log.error("%s; serving from memory alone", error)
                settings = settings.model_copy(update=MEMORY_ALONE)
        require_metrics_address(settings)
        recording = require_recording(settings)
        if recording is not None:
            owned.enter_context(recording)
        claim_socket_folder(settings.socket_dir)
        owned.enter_context(lock_socket_directory(settings.socket_dir))
        if settings.inline_users:
            claim_inline_folder(settings.inline_dir)
            owned.enter_context(lock_socket_directory(settings.inline_dir))
            owned.callback(remove_inline_sockets, settings.inline_dir)
        require_memory(settings.host_bytes, settings.lock_wait_seconds)
        raise_descriptor_limit()
        if settings.huge_pages and not are_huge_pages_possible():
            log.info("no huge pages: this kernel gives none to shared memory (transparent_hugepage/shmem_enabled)")
        listener = listen_for_sessions(settings.socket_dir)
        owned.callback(remove_sockets, settings.socket_dir)
        sessions = Sessions(listener)
        owned.callback(sessions.close)
        signals = owned.enter_context(caught_signals())
        recorder = RecorderProcess(settings, recording.fd if recording is not None else -1)
        supervisor = Supervisor(
            settings, held, sessions, signals, say, recorder, data_dir_problem=data_dir_problem, judged=judged
        )
        try:
            return supervisor.serve()
        finally:
            supervisor.kill_all()


def _tell_of_verdicts(judged: Sequence[JudgedModel]) -> None:
    for model in judged:
        which = f"model {model.weights[:8]}" + (f" with adapter {model.adapter[:8]}" if model.adapter else "")
        if model.problem:
            log.warning("%s stays raw: %s", which, model.problem)
        else:
            log.info("%s is stored with %s", which, model.codec)


class Supervisor:
    """`held` is the data directory; None for a node without, and `data_dir_problem` says why where it was to have one.
    `signals` gives a byte for each."""

    def __init__(
        self,
        settings: Settings,
        held: HeldDirectory | None,
        sessions: Sessions,
        signals: socket.socket,
        say: Callable[[str], None],
        recorder: RecorderProcess,
        *,
        data_dir_problem: str = "",
        judged: Sequence[JudgedModel] = (),
    ) -> None:
        self._settings = settings
        self._judged = judged
        self._data_dir_problem = data_dir_problem
        self._held = held
        self._retake_due: float | None = None
        self._retake_problem = ""
        self._sessions = sessions
        self._signals = signals
        self._say = say
        self._clock = NodeClock.start()
        self._incarnation: Incarnation | None = None
        self._storage = WorkerWatch(WorkerName.STORAGE, self._launch_storage, Backoff())
        self._disk = WorkerWatch(WorkerName.DISK, self._launch_disk, Backoff(DISK_LAST_DELAY_SECONDS))
        self._pools = DevicePools(settings, sessions)
        self._workers = [self._storage] if settings.data_dir is not None else []
        self._workers += [self._disk] if settings.disk_dir is not None else []
        self._workers += self._pools.watches
        self._host_share = HostShare(settings.host_bytes)
        self._admission = Admission(sessions)
        self._gateway = GatewayProcess(settings)
        self._recorder = recorder
        self._told_of_recorder: tuple[int, RecorderHeard] | None = None  # which incarnation, and what
        self._front_backoff = Backoff()
        self._front_due: float | None = 0.0
        self._growth_due: float | None = None
        self._session_socket = SessionSocket(settings.socket_dir, sessions, time.monotonic())
        self._boot = boot_id()
        self._last_end: LastEnd | None = None
        self._end_problem = ""
        self._was_ready = False
        self._was_announced = False
        self._watchdog = Watchdog(settings.hang_seconds)
        self._end_due: float | None = None
        self._is_forced = False
        self._drained: Drained | None = None
        self._poll = select.poll()
        self._polled: dict[int, int] = {}

    # ---- the loop

    def serve(self) -> int:
        """Until the end; the exit code."""
        while not self._is_over():
            ready = self._wait()
            if self._signals.fileno() in ready:
                self._on_signals()
            self._pools.hear()
            self._take_control()
            self._reap()
            self._hear_gateway()
            self._recorder.look()
            self._tell_of_recorder()
            for event in self._sessions.poll():
                self._on_session(event)
            self._do_what_is_due()
            if self._incarnation is not None:
                self._incarnation.control.flush()
        self._gateway.end()
        self._recorder.end()
        return self._sum_up()

    @property
    def _is_stopping(self) -> bool:
        return self._end_due is not None

    def _is_over(self) -> bool:
        if not self._is_stopping or self._incarnation is not None or self._storage.has_leftover:
            return False
        if self._is_forced:
            return True
        return not any(worker.has_leftover for worker in self._workers)  # a file server or a driver may keep one

    def _wait(self) -> set[int]:
        wanted = {self._signals.fileno(): select.POLLIN, self._sessions.fileno(): select.POLLIN}
        if (incarnation := self._incarnation) is not None:
            writes = select.POLLOUT if incarnation.control.wants_write else 0
            if not incarnation.control.ended:
                wanted[incarnation.control.fileno()] = select.POLLIN | writes
            wanted[incarnation.front.pidfd] = select.POLLIN
        ends = [fd for worker in self._workers for fd in worker.pidfds()] + self._pools.filenos()
        wanted |= dict.fromkeys(ends + self._gateway.filenos() + self._recorder.filenos(), select.POLLIN)
        for fd in self._polled.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, events in wanted.items():
            self._poll.register(fd, events)
        self._polled = wanted
        return {fd for fd, _ in self._poll.poll(self._timeout_milliseconds())}

    def _timeout_milliseconds(self) -> float:
        times = (
            None if self._storage.has_leftover else self._front_due,
            *(worker.next_due() for worker in self._workers),
            self._growth_due,
            self._gateway.due,
            self._recorder.due,
            self._retake_due,
            self._session_socket.due,
            self._watchdog.next_due(),
            self._end_due,
            self._sessions.next_deadline(),
        )
        if self._incarnation is not None and self._incarnation.wiper.has_work:
            return 0.0
        due = min(time for time in times if time is not None)
        return max(0.0, (due - time.monotonic()) * 1000 + 1)  # a millisecond late rather than a round early

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._front_due is not None and self._front_due <= now and not self._storage.has_leftover:
            self._front_due = None
            self._begin_incarnation(now)
        if self._incarnation is not None:
            for worker in self._workers:
                worker.start_if_due(self._incarnation, now)
        self._gateway.start_if_due(now)
        self._recorder.start_if_due(now)
        if self._incarnation is not None and self._incarnation.wiper.has_work:
            self._incarnation.zero_some()
        if self._growth_due is not None and self._growth_due <= now:
            self._growth_due = self._host_share.grow(self._incarnation, now) if self._incarnation else None
        if self._session_socket.due <= now:
            self._session_socket.look(now, is_wanted=not self._is_stopping)
        if self._retake_due is not None and self._retake_due <= now:
            self._retake_due = self._retake(now)
        self._watch_front(now)
        if self._end_due is not None and self._end_due <= now:
            self._end_by_force(now)
        self._sessions.expire()

    # ---- incarnations

    def _begin_incarnation(self, now: float) -> None:
        if self._is_stopping:
            return
        self._front_backoff.started(now)
        try:
            self._incarnation = Incarnation(
                self._settings,
                self._clock,
                front_restarts=self._front_backoff.restarts,
                data_dir_problem=self._data_dir_problem,
                earlier_bytes=self._host_share.held_bytes,
                recorder=self._recorder.front_end(),
                last_end=self._last_end,
                end_problem=self._end_problem,
                boot=self._boot,
                judged=self._judged,
            )
        except ConfigError as error:
            log.error("no new front: %s", error)
            self._front_due = self._front_backoff.died(now)
            return
        log.info("front %d, incarnation %d", self._incarnation.front.pid, self._incarnation.number)
        self._growth_due = now
        self._watchdog.begin(now, patience=PATIENCE_AT_START)
        for worker in self._workers:
            worker.begin(now)

    def _watch_front(self, now: float) -> None:
        """A front whose loop does not turn is worse than none: engines wait for it. Kill it; `_reap` does the rest."""
        verdict, incarnation = self._watchdog.look(now), self._incarnation
        if verdict is None or incarnation is None:
            return
        if verdict is Verdict.ASK:
            self._tell(incarnation, Ping())
        else:
            seconds = self._watchdog.silence_seconds
            log.error(
                "front %d has given no sign of life for %.0f s (hang_seconds); ending it",
                incarnation.front.pid,
                seconds,
            )
            incarnation.front.kill()

    def _retake(self, now: float) -> float | None:
        """The data directory was taken away. When there is one again that can be held, begin anew with it: what front
        and worker know is of another. Else, when to try next."""
        incarnation = self._incarnation
        if self._held is None or incarnation is None or self._is_stopping:
            return None
        problem = self._held.retake()
        if problem:
            if problem != self._retake_problem:
                log.warning("without a data directory for now: %s", problem)
            self._retake_problem = problem
            return now + RETAKE_SECONDS
        log.warning("%s is taken anew; a new incarnation begins with it", self._held.path)
        self._retake_problem = ""
        incarnation.front.kill()
        return None

    def _front_died(self, how: str, now: float) -> None:
        """All of its incarnation goes. The next one begins when the death of its storage worker is proven: it is to
        find the files as they will stay."""
        incarnation = self._incarnation
        assert incarnation is not None
        if not (self._is_stopping and self._drained is not None):
            log.error("front %d %s", incarnation.front.pid, how)
        self._last_end = LastEnd.KILLED if incarnation.front.was_killed else LastEnd.CRASHED
        self._end_problem = f"front {how}"
        self._incarnation = None
        for worker in self._workers:
            worker.incarnation_ended()
        self._growth_due = self._retake_due = None
        self._watchdog.end()
        incarnation.close()
        self._sessions.tell_ended(incarnation.number)
        if self._sessions.count(incarnation.number):
            self._host_share.hold(incarnation.number, incarnation.populated_bytes)
        if self._is_stopping:
            return
        if not self._was_ready and self._front_backoff.in_a_row + 1 >= GIVE_UP_AFTER:
            raise TierkvError(f"the front does not start: it {how}, {GIVE_UP_AFTER} times in a row; see the log")
        self._front_due = self._front_backoff.died(now)

    def _reap(self) -> None:
        now = time.monotonic()
        incarnation = self._incarnation
        if incarnation is not None and (how := incarnation.front.reap()) is not None:
            self._take_control()  # its last words
            self._front_died(how, now)  # first: its workers end with it, and have not died by themselves
        for worker in self._workers:
            died = worker.reap(now, is_stopping=self._is_stopping)
            if died is not None and self._incarnation is not None:
                self._tell(
                    self._incarnation,
                    WorkerDied(
                        worker=worker.name,
                        device=worker.device,
                        pid=died.pid,
                        problem=died.how,
                        pause_seconds=died.pause_seconds,
                    ),
                )

    def _hear_gateway(self) -> None:
        heard = self._gateway.look()
        if heard is not None and self._incarnation is not None:
            self._tell(self._incarnation, heard)

    def _tell_of_recorder(self) -> None:
        heard, incarnation = self._recorder.heard(), self._incarnation
        if heard is not None and incarnation is not None and self._told_of_recorder != (incarnation.number, heard):
            self._told_of_recorder = incarnation.number, heard
            self._tell(incarnation, heard)

    def _kill_children(self) -> None:
        if self._incarnation is not None:
            self._incarnation.front.kill()
        for worker in self._workers:
            worker.kill()

    def _end_by_force(self, now: float) -> None:
        """The first time: kill what is left. Again: what even that does not end waits for a disk that does not answer.
        It keeps the lock, and ends by itself when it can."""
        if self._is_forced:
            raise IncompleteError("a process of the node can't be killed: its disk does not answer")
        log.error("the node did not end in time; killing what is left of it")
        self._is_forced = True
        self._end_due = now + END_SECONDS
        self._kill_children()

    def kill_all(self) -> None:
        """Whatever the reason we end: no child that can be killed outlives us."""
        self._kill_children()
        self._gateway.kill()
        self._recorder.kill()
        if self._incarnation is not None:
            self._incarnation.front.wait()
            self._incarnation.close()
            self._incarnation = None
        for worker in self._workers:
            worker.wait()

    # ---- workers

    def _launch_storage(self, resources: WorkerResources, *, sends_rows: bool, discard_index: bool) -> Child:
        assert self._held is not None, "without a data directory there is none"
        return start_storage_worker(
            self._settings,
            resources,
            self._clock,
            self._held.lock_fd,
            sends_rows=sends_rows,
            discard_index=discard_index,
        )

    def _launch_disk(self, resources: WorkerResources, *, sends_rows: bool, discard_index: bool) -> Child:
        return start_disk_worker(
            self._settings, resources, self._clock, sends_rows=sends_rows, discard_index=discard_index
        )

    def _recovered(self, incarnation: Incarnation, message: WorkerRecovered) -> None:
        for worker in self._workers:
            if (worker.name, worker.device) == (message.worker, message.device):
                worker.recovered(message.pid)
        if message.worker == WorkerName.STORAGE:
            self._watchdog.begin(time.monotonic())
            self._announce(incarnation)

    # ---- control messages

    def _take_control(self) -> None:
        """What can't be understood costs the front that said it its life, and nobody else anything."""
        incarnation = self._incarnation
        try:
            while incarnation is not None and (found := incarnation.control.receive()) is not None:
                message, descriptors = found
                for fd in descriptors:  # a front has none to give
                    os.close(fd)
                self._on_control(incarnation, message)
        except WireError as error:
            assert incarnation is not None
            log.error("front %d can't be understood; ending it: %s", incarnation.front.pid, error)
            incarnation.control.ended = True
            incarnation.front.kill()

    def _on_control(self, incarnation: Incarnation, message: AnyControlMessage) -> None:
        match message:
            case Ready():
                incarnation.is_ready = self._was_ready = True
                if self._settings.data_dir is None:
                    self._watchdog.begin(time.monotonic())
                self._admission.front_is_ready(incarnation)
                self._announce(incarnation)
            case Pong():
                self._watchdog.heard()
            case WorkerRecovered():
                self._recovered(incarnation, message)
            case DirectoryGone():
                self._retake_due = time.monotonic() if message.problem else None
            case ReplaceWorker():
                for worker in self._workers:
                    worker.replace(message.pid, message.problem)
            case ZeroMemory():
                incarnation.wiper.add(message.op, message.ranges)
            case Drained():
                self._drained = message
            case _:
                raise WireError("malformed", f"a supervisor is not told {type(message).__name__}")

    def _announce(self, incarnation: Incarnation) -> None:
        is_recovered = self._storage.is_recovered or self._settings.data_dir is None
        if incarnation.is_ready and is_recovered and not self._was_announced:
            self._was_announced = True
            self._say(f"ready: {self._settings.socket_dir}")

    def _tell(self, incarnation: Incarnation, message: ControlMessage) -> None:
        try:
            incarnation.control.send(message)
        except ControlFull:
            log.error("front %d has stopped reading; ending it", incarnation.front.pid)
            incarnation.front.kill()

    # ---- sessions

    def _on_session(self, event: Event) -> None:
        match event:
            case Asked():
                self._admission.ask(event.knock, self._incarnation)
            case AskedDevice():
                self._pools.ask(event, self._incarnation)
            case HungUp():
                self._tell_of_session(event.session.incarnation, SessionClosed(token=event.session.token))
            case Ended():
                self._tell_of_session(event.session.incarnation, SessionEnded(token=event.session.token))
                self._let_go(event.session.incarnation)

    def _tell_of_session(self, number: int, message: ControlMessage) -> None:
        if self._incarnation is not None and self._incarnation.number == number:
            self._tell(self._incarnation, message)

    def _let_go(self, number: int) -> None:
        """A session has ended: perhaps the last one of an arena that nobody decides about any more."""
        if not self._sessions.count(number) and self._host_share.let_go(number):
            log.info("the arena of incarnation %d is free", number)
            self._growth_due = time.monotonic()

    # ---- signals

    def _on_signals(self) -> None:
        for name in stop_signals_in(self._signals.recv(64)):
            self._stop(name)

    def _stop(self, name: str) -> None:
        """The first time: drain within the budget. Again: at once."""
        budget = 0.0 if self._is_stopping else self._settings.drain_seconds
        log.info("%s: stopping within %g s", name, budget)
        self._end_due = time.monotonic() + budget + END_SECONDS
        self._front_due = None
        self._gateway.start_no_more()
        self._sessions.stop_accepting()
        if self._incarnation is not None:
            self._tell(self._incarnation, Shutdown(budget_seconds=budget))

    def _sum_up(self) -> int:
        if self._drained is None:
            self._say("stopped: flushed=unknown dropped=unknown (the front did not live to say)")
            return IncompleteError.exit_code
        drained = self._drained
        self._say(
            f"stopped: flushed={drained.flushed_bytes} dropped={drained.dropped_bytes} "
            f"(bytes, of {drained.flushed_extents} and {drained.dropped_extents} extents)"
        )
        return IncompleteError.exit_code if drained.dropped_extents else 0


def main(arguments: list[str]) -> int:
    """For tests and debugging: `python -m tierkv.node.supervisor name=value ...`; operators use `tierkv serve`."""
    given = dict(argument.split("=", 1) for argument in arguments)
    try:
        return run(Settings(**given))  # type: ignore[arg-type]
    except TierkvError as error:
        print(f"tierkv: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
