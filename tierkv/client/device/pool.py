"""A node's pool on a GPU, mapped into this process: once for each of its epochs, and for each session.

Which memory a granted address lies in must never be guessed: a pool that died leaves its memory where it was, and its
successor has other memory under the same addresses. So

- the mapping in use is dropped *before* the node is asked for the next one. What is granted under a later epoch can
  only have been granted after that question, and finds no mapping, or the right one;
- what was granted under an earlier epoch carries generations from before they were all bumped, so that nothing that is
  read in its place is ever proven;
- a ticket is written only into the mapping that was in use when it was asked for *and* when the answer came.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolKind
from tierkv.wire.session import DeviceGrant, DeviceRefused, MapDevice

if TYPE_CHECKING:
    from tierkv.client.device.exchange import PoolOffered
    from tierkv.client.session import Session
    from tierkv.device.backends import Backend, PoolMap
    from tierkv.device.memory import HostMemory

OfHolders = Literal["holders"]
HOLDERS: Final = "holders"
"""Of a lease that others hold: in the pools that they have mapped, each its own."""

RETRY_SECONDS, RETRY_MAX_SECONDS = 0.5, 30.0
"""Between two questions for a pool that the node has not, doubling from the first to the second."""
MAP_SECONDS = 1.0
"""So long a call waits for the answer at most. A supervisor that is well gives it within a millisecond."""

_log = logging.getLogger("tierkv.client")


class MappedPool:
    """One epoch of a pool, under one session. Unmapped when it is retired and nobody holds it any more."""

    def __init__(self, owner: DevicePool, session: Session, grant: DeviceGrant, memory: PoolMap) -> None:
        self.owner = owner
        self.session = session
        self.device = grant.device
        self.epoch = grant.epoch
        self.base = grant.base
        self.num_bytes = grant.num_bytes
        self.memory = memory
        self.backend = owner.backend
        self._pinned = session.pin(owner.backend) if owner.backend.cuda_version else None
        self._lock = threading.Lock()
        self._holders = 0
        self._retired = self._failed = False
        self._is_mapped = True

    @property
    def is_usable(self) -> bool:
        """Whether what lies in it may still be right, and what is granted in it be used."""
        return not (self._failed or self.session.over or self.session.pools.has_ended(self.device, self.epoch))

    @property
    def arena(self) -> HostMemory | None:
        """The session's, where the device copies from it and to it by itself; for who holds this."""
        return None if self._pinned is None else self._pinned.memory

    @property
    def is_retired(self) -> bool:
        return self._retired

    def hold(self) -> bool:
        """Keep it mapped until `let_go`. False when it is on its way out."""
        with self._lock:
            if self._retired:
                return False
            self._holders += 1
            return True

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            self._unmap()

    def retire(self) -> None:
        """Nobody begins to use it any more."""
        with self._lock:
            self._retired = True
            self._unmap()

    def fail(self, problem: str) -> None:
        """A copy has failed: nothing that lies in it is believed any more."""
        self._failed = True
        self.owner.copy_failed(problem)

    def _unmap(self) -> None:
        if self._retired and not self._holders and self._is_mapped:
            self._is_mapped = False
            try:
                self.memory.close()  # all copies have completed, for who copies holds it
            except DeviceError as error:  # a device that was lost: the engine hears of that from its own work
                _log.warning("a pool on %s could not be unmapped: %s", self.owner.name, error.problem)
            if self._pinned is not None:
                self._pinned.let_go()


class DevicePool:
    """A node's pool on the GPU `name` ("cuda:0", counted as CUDA does in this process, or a GPU's uuid; "cpu": a pool
    in host memory), as far as there is one: mapped when it is first used, and again after its process was restarted.
    Without one, and while the node has none, every block goes by way of host memory; `problem` says why.

    Made by `Client.map_device`, and closed with the client."""

    def __init__(
        self,
        name: str,
        *,
        open_backend: Callable[[str], Backend] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.problem = "it was not asked for yet"
        self.reason = ""
        self._open_backend = open_backend or open_device
        self._clock = clock
        self._backend: Backend | None = None
        self._lock = threading.Lock()  # around a whole question
        self._current: MappedPool | None = None
        self._closed = False
        self._asked_under: Session | None = None
        self._retry_at = 0.0
        self._pause = RETRY_SECONDS
        self._told: set[str] = set()

    @property
    def is_mapped(self) -> bool:
        current = self._current
        return current is not None and current.is_usable

    @property
    def epoch(self) -> int | None:
        """Of the pool in use; another one after its process was restarted."""
        current = self._current
        return current.epoch if current is not None and current.is_usable else None

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "a device that was never opened"
        return self._backend

    def mapped_under(self, session: Session) -> MappedPool | None:
        """What an address that is granted to this session now would lie in."""
        current = self._current
        usable = current is not None and current.session is session and current.is_usable and not current.is_retired
        return current if usable else None

    def is_due(self, session: Session) -> bool:
        """Whether the node is to be asked: there is nothing mapped, and the last refusal is long enough ago. A new
        session is asked at once."""
        if self._closed or self.mapped_under(session) is not None:
            return False
        return self._asked_under is not session or self._has_ended() or self._clock() >= self._retry_at

    def map_under(self, session: Session, until: float) -> None:
        """Ask for the pool and map it, if that is due. Waits for the answer until then (monotonic); raises nothing."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            return
        try:
            if self.is_due(session):
                self._map(session, until)
        finally:
            self._lock.release()

    def drop(self, session: Session | None = None) -> None:
        """What is mapped (under this session): unmapped as soon as nobody holds it."""
        current = self._current
        if current is not None and (session is None or current.session is session):
            self._current = None
            current.retire()

    def close(self) -> None:
        self._closed = True
        self.problem, self.reason = "the client is closed", "closed"
        self.drop()

    # ---- one question

    def _map(self, session: Session, until: float) -> None:
        self._asked_under = session
        self.drop()  # before the node is asked: see above
        if self._backend is None:
            try:
                self._backend = self._open_backend(self.name)
            except DeviceError as error:
                self._refuse(error.reason, error.problem)
                return
        wish = MapDevice(uuid=self._backend.uuid, cuda_version=self._backend.cuda_version)
        answer = session.map_device(wish, until)
        if isinstance(answer, DeviceRefused):
            self._refuse(answer.code, answer.problem)
            return
        try:
            self._adopt(session, self._open(self._backend, answer, session), answer.grant)
        except DeviceError as error:
            self._refuse(error.reason, error.problem)

    def _open(self, backend: Backend, offered: PoolOffered, session: Session) -> PoolMap:
        grant = offered.grant
        try:
            _check(grant, backend, session)
            fd = -1 if offered.descriptor is None else offered.descriptor
            return backend.open_pool(PoolKind(grant.kind), grant.num_bytes, fd=fd, handle=grant.handle)
        finally:
            if offered.descriptor is not None:
                os.close(offered.descriptor)

    def _adopt(self, session: Session, memory: PoolMap, grant: DeviceGrant) -> None:
        mapped = MappedPool(self, session, grant, memory)
        self.problem = self.reason = ""
        self._pause, self._retry_at = RETRY_SECONDS, 0.0
        self._current = mapped
        session.pools.when_ended(grant.device, grant.epoch, lambda: self._end(mapped))
        if not mapped.is_usable or self._closed:
            self.drop()

    def copy_failed(self, problem: str) -> None:
        """Said by what copies. It is mapped anew, if that can be, when the pause after a refusal is over."""
        self._refuse("failed", problem)

    def _end(self, mapped: MappedPool) -> None:
        """Its process is gone. In the thread that read so."""
        if self._current is mapped:
            self._current = None
            self.problem, self.reason = "the process that had the pool is gone", "pool_ended"
            self._retry_at, self._pause = 0.0, RETRY_SECONDS
        mapped.retire()

    def _has_ended(self) -> bool:
        return self.reason == "pool_ended"

    def _refuse(self, reason: str, problem: str) -> None:
        self.reason, self.problem = reason, problem
        self._retry_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, RETRY_MAX_SECONDS)
        if problem not in self._told:
            self._told.add(problem)
            _log.warning("no pool on %s, so blocks go by way of host memory: %s", self.name, problem)


def _check(grant: DeviceGrant, backend: Backend, session: Session) -> None:
    """What a node says is checked before it is used as an address."""
    arena = session.arena
    if arena is None or grant.uuid != backend.uuid:
        raise DeviceError("failed", f"asked for the pool on {backend.uuid}, the node sent one on {grant.uuid}")
    if grant.kind not in {kind.value for kind in PoolKind}:
        raise DeviceError("failed", f"a pool of kind {grant.kind!r}, which this release does not know")
    end = grant.base + grant.num_bytes
    room = len(arena.generations) * arena.page_bytes
    if grant.base % arena.page_bytes or grant.base < arena.arena_bytes or not grant.base < end <= room:
        raise DeviceError("failed", f"a pool at addresses {grant.base} to {end}, which have no generations")


def open_device(name: str) -> Backend:
    """What copies on the device of that name; a node may have several pools in host memory, "cpu:1" and so on. Raises
    DeviceError."""
    from tierkv.device.cpu import CpuBackend  # noqa: PLC0415 - only a device's user needs it

    if name.startswith(("GPU-", "MIG-")):
        return _gpu(_index_of(name))
    kind, colon, index = name.partition(":")
    if index.isdecimal() or not colon:
        if kind == "cpu":
            memory = CpuBackend()
            memory.uuid = name
            return memory
        if kind == "cuda":
            return _gpu(int(index or 0))
    raise DeviceError("no_such_device", f"{name!r} names no device; there are cpu, cuda:0, cuda:1 and so on")


_gpus: dict[tuple[int, int], Backend] = {}
_opening = threading.Lock()


def _gpu(index: int) -> Backend:
    """Opened once a process, for all clients that come and go in it: its streams and its memory on the GPU stay until
    the process ends."""
    from tierkv.device.backends import cuda_backend  # noqa: PLC0415 - loads the driver

    key = os.getpid(), index  # what a forked child has inherited is of no use to it
    with _opening:
        if key not in _gpus:
            _gpus[key] = cuda_backend(index)
        return _gpus[key]


def _index_of(uuid: str) -> int:
    """As CUDA counts in this process. A part of a GPU (MIG) has a uuid of its own, which the driver tells as any other
    and nvidia-smi with another first word."""
    from tierkv.device.cuda_driver import Driver  # noqa: PLC0415 - loads the driver
    from tierkv.device.probe import find_gpus  # noqa: PLC0415

    there = {gpu.uuid: gpu.index for gpu in find_gpus(Driver())}
    wanted = "GPU-" + uuid.partition("-")[2]
    if wanted not in there:
        raise DeviceError("no_such_device", f"{uuid} is not here; there is {', '.join(there) or 'no GPU'}")
    return there[wanted]
