"""A whole node on two threads of this process: the real front, and the session socket's real server. No storage worker,
so host memory is its only tier.

A test can look into the core (`look`), keep requests of one kind back (`keep_back`), freeze the front, take slots back
(`revoke`), say that a process has ended (`end_session`), and restart or kill all of it.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from tests.integrations.connector.living_pool import LivingPool
from tierkv.core.addresses import pool_bases
from tierkv.node.arena import PAGE_BYTES, SharedMemory, make_arena, make_generations, open_read_only
from tierkv.node.control import (
    AnyControlMessage,
    Begin,
    Control,
    ControlMessage,
    DeviceMapped,
    FrontSettings,
    Ping,
    Ready,
    SessionClosed,
    SessionEnded,
    SessionOpened,
    WorkerDied,
    WorkerName,
    WorkerStarted,
    control_pair,
)
from tierkv.node.front import Front
from tierkv.node.sessions import Asked, AskedDevice, Ended, HungUp, Memory, Sessions
from tierkv.node.socket_folder import listen_for_sessions, node_endpoint
from tierkv.wire.frames import decode_request
from tierkv.wire.messages import Request

T = TypeVar("T")

PATIENCE_SECONDS = 60.0


class _WatchedFront(Front):
    """Does between two requests what a test wants done, and keeps back what a test wants kept back."""

    def __init__(self, control: Control, begin: Begin, generations_fd: int) -> None:
        super().__init__(control, begin, generations_fd)
        self.commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.kept_kinds: tuple[type[Request], ...] = ()
        self.seen: Counter[str] = Counter()
        self._kept: list[tuple[bytes, bytes]] = []
        self._handle = self._service.handle
        self._service.handle = self._take  # type: ignore[method-assign]

    def _take(self, peer: bytes, frame: bytes, now: float) -> None:
        request = decode_request(frame)
        self.seen[type(request).__name__] += 1
        if isinstance(request, self.kept_kinds):
            self._kept.append((peer, frame))
        else:
            self._handle(peer, frame, now)

    def let_go(self) -> None:
        self.kept_kinds = ()
        kept, self._kept = self._kept, []
        for peer, frame in kept:
            self._handle(peer, frame, self._now())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _on_control(self, message: AnyControlMessage, descriptors: list[int]) -> None:
        if isinstance(message, Ping):
            while not self.commands.empty():
                self.commands.get()()
        else:
            super()._on_control(message, descriptors)


class _Incarnation:
    """Memory, and a front on a thread of its own."""

    def __init__(self, number: int, directory: Path, host_bytes: int, slab_bytes: int, pool_bytes: int) -> None:
        self.number = number
        self.arena: SharedMemory = make_arena(host_bytes)
        devices = (pool_bytes,) if pool_bytes else ()
        self.pool_base, address_bytes = (*pool_bases(host_bytes, slab_bytes, devices), 0)[:2]
        self._generations = make_generations(address_bytes or host_bytes)
        self._read_only_fd = open_read_only(self._generations.fd)
        self._endpoint = node_endpoint(directory)
        self._lock = threading.Lock()
        self._control, theirs = control_pair()
        settings = FrontSettings(
            data_dir="",
            socket_dir=str(directory),
            host_bytes=host_bytes,
            read_only=False,
            nvme_bytes=None,
            nvme_reserve_bytes=0,
            slab_bytes=slab_bytes,
            extent_bytes=slab_bytes // 2,
            seal_after_seconds=10.0,
            session_bytes=8 * host_bytes,  # what many leases share counts for each
            inflight_writes=2,
            inflight_reads=2,
            touch_seconds=60.0,
            prefill_tokens_per_second=12_000.0,
            eviction_policy="density",
            nvme_write_bytes_per_day=0,
            hang_seconds=0.0,
            metrics_port=None,
            metrics_host="127.0.0.1",
            log_level="warning",
            gpu_devices=("cpu",) if pool_bytes else (),
            gpu_bytes=pool_bytes,
        )
        begin = Begin(
            settings=settings,
            incarnation=number,
            supervisor_pid=os.getpid(),
            front_restarts=number - 1,
            host_limit_bytes=host_bytes,
            wall_zero=time.time(),
            monotonic_zero=time.monotonic(),
        )
        self._front_control = Control(theirs)
        self.front = _WatchedFront(self._front_control, begin, os.dup(self._generations.fd))
        self._thread = threading.Thread(target=self.front.run, name="front")
        self._thread.start()
        found = self._control.wait(PATIENCE_SECONDS)
        assert found is not None
        assert isinstance(found[0], Ready)

    def tell(self, message: ControlMessage, descriptors: tuple[int, ...] = ()) -> None:
        with self._lock:
            self._control.send(message, descriptors)
            self._control.flush()

    def call(self, command: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as problem:  # noqa: BLE001 - it is the caller's, not the front's
                done.set_exception(problem)

        self.front.commands.put(run)
        self.tell(Ping())
        return done.result(PATIENCE_SECONDS)

    @property
    def memory(self) -> Memory:
        return Memory(
            incarnation=self.number,
            endpoint=self._endpoint,
            data_dir="",
            arena_fd=self.arena.fd,
            arena_bytes=self.arena.num_bytes,
            generations_fd=self._read_only_fd,
            page_bytes=PAGE_BYTES,
        )

    def close(self) -> None:
        with self._lock:
            self._control.close()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self.front.close()
        self._front_control.close()
        self.arena.close()
        self._generations.close()
        os.close(self._read_only_fd)


class LivingNode:
    """Up when the constructor returns. Serves this process's clients in `directory`."""

    def __init__(
        self,
        directory: Path,
        *,
        host_bytes: int = 64 * PAGE_BYTES,
        slab_bytes: int = 16 * PAGE_BYTES,
        pool_bytes: int = 0,
    ) -> None:
        """With `pool_bytes` it has a pool of the device "cpu"."""
        self.directory = directory
        self._slab_bytes = slab_bytes
        self._host_bytes = host_bytes
        self._numbers = 0
        self._incarnation: _Incarnation | None = None
        self._supervisor: _SessionThread | None = None
        self._pool_bytes = pool_bytes
        self._pool: LivingPool | None = None
        self._epochs = 0
        self.come()

    def come(self) -> None:
        """Start, with nothing in memory."""
        assert self._incarnation is None
        self._begin()
        self._supervisor = _SessionThread(self.directory, lambda: self._now_living, lambda: self._pool)

    def go(self) -> None:
        """As after a kill -9 of all its processes: clients see the end of their sockets."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        self._end_pool()
        if self._incarnation is not None:
            self._incarnation.close()
            self._incarnation = None

    def restart_front(self) -> None:
        """A new front with a new arena, under the same supervisor."""
        assert self._supervisor is not None
        before = self._now_living.number
        self._end_pool()
        self._now_living.close()
        self._begin()
        self._supervisor.tell_ended(before)

    def _begin(self) -> None:
        self._numbers += 1
        self._incarnation = _Incarnation(
            self._numbers, self.directory, self._host_bytes, self._slab_bytes, self._pool_bytes
        )
        if self._pool_bytes:
            self._start_pool()

    def kill_pool(self) -> None:
        """kill -9 of the device's worker, at whatever it is, and another one in its place."""
        self._end_pool()
        self._start_pool()

    def _start_pool(self) -> None:
        living = self._now_living
        self._epochs += 1
        pool = LivingPool(
            living.arena.fd, self._host_bytes, self._pool_bytes, epoch=self._epochs, base=living.pool_base
        )
        with pool.front_end:
            started = WorkerStarted(
                worker=WorkerName.DEVICE, device=0, pid=self._epochs, restarts=self._epochs - 1, sends_rows=False
            )
            living.tell(started, (pool.front_end.fileno(),))
        wait_for(lambda: self.look(lambda state: state.device_tiers()[0].capacity_bytes) > 0, "the core knows the pool")
        self._pool = pool

    def _end_pool(self) -> None:
        with self._supervisor.paused() if self._supervisor is not None else nullcontext() as sessions:
            pool, self._pool = self._pool, None
            if pool is None:
                return
            pool.kill()
            died = WorkerDied(worker=WorkerName.DEVICE, device=0, pid=pool.epoch, problem="killed")
            self._now_living.tell(died)
            if sessions is not None:
                sessions.tell_pool_ended(0, pool.epoch)

    close = go

    # ---- what a test asks for

    def look(self, question: Callable[[Any], T]) -> T:
        """`question` is asked about the core, in the front's thread."""
        front = self._now_living.front
        return self._now_living.call(lambda: question(front._core.state))

    @property
    def num_leases(self) -> int:
        return self.look(lambda state: int(state.num_leases))

    @property
    def num_tickets(self) -> int:
        return self.look(lambda state: int(state.num_tickets))

    @property
    def used_blocks(self) -> int:
        """Blocks that are visible."""
        return int(self.look(lambda state: sum(extent.host_blocks for extent in state._ledger.tree)))

    def leased_offsets(self) -> list[int]:
        """Of all slots that a lease is on."""

        def offsets(state: Any) -> list[int]:
            answers = [lease.answer for lease in state._ledger.leases.values() if lease.answer is not None]
            return sorted({offset for answer in answers for part in answer.parts for offset in part.offsets})

        return self.look(offsets)

    def count_requests(self, kind: type[Request]) -> int:
        front = self._now_living.front
        return self._now_living.call(lambda: front.seen[kind.__name__])

    def wait_until_nothing_is_held(self) -> None:
        """Releases wait for no answer, so they may still be under way."""
        wait_for(lambda: (self.num_leases, self.num_tickets) == (0, 0), "no lease and no ticket is left")

    @contextmanager
    def keep_back(self, *kinds: type[Request]) -> Iterator[None]:
        """Requests of these kinds are not looked at before the end of the block."""
        front = self._now_living.front

        def keep() -> None:
            front.kept_kinds = kinds

        self._now_living.call(keep)
        try:
            yield
        finally:
            if self._incarnation is not None and self._incarnation.front is front:
                self._now_living.call(front.let_go)

    def wait_for_kept(self, count: int = 1) -> None:
        front = self._now_living.front
        wait_for(lambda: front.num_kept >= count, f"{count} requests were kept back")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The front doesn't move until the end of the block: sockets stay open, and nothing is answered."""
        living, thaw, is_frozen = self._now_living, threading.Event(), threading.Event()

        def freeze() -> None:
            is_frozen.set()
            assert thaw.wait(2 * PATIENCE_SECONDS)

        living.front.commands.put(freeze)
        living.tell(Ping())
        assert is_frozen.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            thaw.set()
            living.call(lambda: None)

    def revoke(self, offset: int) -> None:
        """As if the slot at this offset were to be overwritten."""
        generations = self._now_living.front._generations

        def bump() -> None:
            generations[offset // PAGE_BYTES] += 1

        self._now_living.call(bump)

    def end_session(self, token: bytes) -> None:
        """As if the process of this session had ended."""
        self._now_living.tell(SessionEnded(token=token))
        self._now_living.call(lambda: None)

    @property
    def _now_living(self) -> _Incarnation:
        assert self._incarnation is not None, "the node is not running"
        return self._incarnation


class _SessionThread:
    """What of a supervisor a client meets."""

    def __init__(
        self, directory: Path, living: Callable[[], _Incarnation], pool: Callable[[], LivingPool | None]
    ) -> None:
        self._living = living
        self._pool = pool
        self._sessions = Sessions(listen_for_sessions(directory))
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="supervisor")
        self._thread.start()

    def tell_ended(self, incarnation: int) -> None:
        with self._lock:
            self._sessions.tell_ended(incarnation)

    @contextmanager
    def paused(self) -> Iterator[Sessions]:
        """Nobody is granted anything meanwhile."""
        with self._lock:
            yield self._sessions

    def close(self) -> None:
        self._is_over = True
        self._wake.send(b"x")
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._sessions.close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(self._sessions.fileno(), select.POLLIN)
        while not self._is_over:
            poll.poll()
            with self._lock:
                self._take_events()

    def _take_events(self) -> None:
        for event in self._sessions.poll():
            living = self._living()
            match event:
                case Asked(knock, hello):
                    token = self._sessions.new_token()
                    living.tell(
                        SessionOpened(token=token, pid=knock.pid, client=hello.client, maps_arena=hello.maps_arena)
                    )
                    self._sessions.grant(knock, token, living.memory)
                case AskedDevice(session, _asked):
                    pool = self._pool()
                    if pool is None or session.incarnation != living.number:
                        self._sessions.refuse_pool(session, "pool_down", "it is away")
                    else:
                        living.tell(DeviceMapped(token=session.token, device=0))
                        self._sessions.grant_pool(session, pool.grant, pool.memory.fd)
                case HungUp(session) if session.incarnation == living.number:
                    living.tell(SessionClosed(token=session.token))
                case Ended(session) if session.incarnation == living.number:
                    living.tell(SessionEnded(token=session.token))


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain: {what}"
        time.sleep(0.001)  # between two looks at a condition that has a deadline
