"""What moves bytes between an engine's pages, pools and host memory, whatever the device.

    gather    pages of an engine -> slots         scatter    slots -> pages of an engine
    encode    pages -> coded slots                decode     coded slots -> pages (coding.py)
    upload    host slots -> the pool's            download   the pool's slots -> host
    zero      ranges of a pool

`slots` of the first four are a pool's or host memory's: a backend stages what it can't reach directly. Every one
returns a Pending at once: the bytes are there when it is done, and nothing that it reads or writes may be given away
before. Copies run on streams of the backend's own, never on the default stream; `wait_for` puts what is asked for
later behind what an engine has asked its own stream for. Copies that are in flight at the same time are in no order
among themselves.

    cpu_backend()          host memory stands in for a device: machines without a GPU, and tests
    cuda_backend(index)    a GPU of this process, by the driver's index; raises DeviceError where there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from tierkv.core.codec import BlockCodec
from tierkv.device.coding import Parts
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory
from tierkv.wire.pools import PoolKind

CPU_UUID = "cpu"


class Pending(Protocol):
    """A copy that was asked for."""

    @property
    def is_done(self) -> bool:
        """Whether it has completed, seen from the host. Never waits. Raises DeviceError where it has failed."""
        ...

    def wait(self, timeout_seconds: float) -> bool:
        """True once it has completed, False when it has not in time: then it may still be writing. Raises DeviceError
        where it has failed: what it was to write may hold anything."""
        ...

    @property
    def seconds(self) -> float:
        """From its begin on the device to its end; 0.0 while it isn't done."""
        ...


class Coding(Pending, Protocol):
    """A copy that codes or decodes."""

    @property
    def good(self) -> np.ndarray:
        """bool, one a block, once it is done: whether the block could be coded, or is right. What is not was not
        written as it should be: its slot or its pages may hold anything."""
        ...


class PoolMap(Protocol):
    """A pool that is mapped into this process, its own or another's."""

    @property
    def kind(self) -> PoolKind: ...

    @property
    def address(self) -> int:
        """On the device."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def close(self) -> bool:
        """Unmap it, once all copies that touch it have completed; True when it is gone, False while something still
        uses it: ask again later. The memory lives on for as long as another process has it mapped."""
        ...


@runtime_checkable
class OwnPool(PoolMap, Protocol):
    """A pool that this process has made, with what another one needs to map it."""

    @property
    def fd(self) -> int:
        """The descriptor that leads to it, -1 for none. Open until the pool is closed."""
        ...

    @property
    def handle(self) -> bytes:
        """The handle of the kind ipc, else empty."""
        ...

    @property
    def problem(self) -> str:
        """Why it is smaller than it was to be, for people; "" when it isn't."""
        ...


@dataclass(frozen=True, slots=True)
class Pinning:
    """Whether host memory is locked and known to the driver, or why not. Pinned memory is copied at full speed, and
    beside other work; other memory is copied all the same."""

    is_pinned: bool
    why_not: str = ""


class Backend(Protocol):
    """One device. Any thread may call; what is submitted is in flight at once."""

    @property
    def name(self) -> str:
        """The vendor's name of the device."""
        ...

    @property
    def uuid(self) -> str:
        """How other processes find the same device: "cpu", or "GPU-..."."""
        ...

    @property
    def cuda_version(self) -> int:
        """Of the driver, as 12080 for 12.8; 0 for none."""
        ...

    @property
    def numa_node(self) -> int:
        """-1 where the machine names none."""
        ...

    def make_pool(self, num_bytes: int) -> OwnPool:
        """A pool of `num_bytes`, or of fewer where not so many are free (`problem` says so). Raises DeviceError
        where none can be had, or where no machine of this size could have it."""
        ...

    def open_pool(self, kind: PoolKind, num_bytes: int, *, fd: int = -1, handle: bytes = b"") -> PoolMap:
        """Map a pool of another process on this device. `fd` stays the caller's, and may be closed afterwards. Raises
        DeviceError where it can't be mapped, with what to do about it."""
        ...

    def register_host(self, memory: HostMemory) -> Pinning:
        """Lock host memory and make it known to the driver, once; it stays so until `close`. No error where that
        can't be had."""
        ...

    def unregister_host(self, memory: HostMemory) -> None:
        """Before it is unmapped, and once no copy touches it. Nothing where it was not registered here."""
        ...

    def wait_for(self, event: object) -> None:
        """Everything that is asked for from now on runs behind `event`: a torch event or the driver's handle of one,
        recorded on the engine's stream; or what `mark` has returned. None: nothing to wait for."""
        ...

    def mark(self, stream: int) -> object:
        """What was asked of `stream` (the driver's handle, as `torch.cuda.Stream.cuda_stream`) up to now."""
        ...

    def gather(
        self, layout: PagedLayout, pages: Sequence[int], slots: PoolMap | HostMemory, offsets: Sequence[int]
    ) -> Pending:
        """Block i, from the engine's page pages[i], to offsets[i] of `slots`. Raises ValueError, before anything is
        touched, for a page or an offset that is not in its memory; so do the others."""
        ...

    def scatter(
        self, slots: PoolMap | HostMemory, offsets: Sequence[int], layout: PagedLayout, pages: Sequence[int]
    ) -> Pending:
        """Block i, from offsets[i] of `slots`, to the engine's page pages[i]."""
        ...

    def codes(self, codec: BlockCodec) -> bool:
        """Whether `encode` and `decode` can be had for it here. May load, compile and allocate what they need,
        once. Raises nothing."""
        ...

    def encode(self, codec: BlockCodec, parts: Parts, slots: PoolMap | HostMemory, offsets: Sequence[int]) -> Coding:
        """Block i of a coded group, from its page in each of `parts`, to offsets[i] of `slots`."""
        ...

    def decode(self, codec: BlockCodec, slots: PoolMap | HostMemory, offsets: Sequence[int], parts: Parts) -> Coding:
        """Block i of a coded group, from offsets[i] of `slots`, to its pages; where it has none, for the verdict."""
        ...

    def upload(
        self,
        host: HostMemory,
        host_offsets: Sequence[int],
        pool: PoolMap,
        offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        """Whole blocks: what is between a block and the end of its slot, at a multiple of 4096 bytes, may be copied
        along. So with `download`."""
        ...

    def download(
        self,
        pool: PoolMap,
        offsets: Sequence[int],
        host: HostMemory,
        host_offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending: ...

    def zero(self, pool: PoolMap, ranges: Sequence[tuple[int, int]]) -> Pending:
        """Overwrite (offset, bytes) with zeros."""
        ...

    def close(self) -> None:
        """Let go of streams and registrations. Pools are closed before; no copy is in flight."""
        ...


def cpu_backend() -> Backend:
    from tierkv.device.cpu import CpuBackend  # noqa: PLC0415 - it needs what is declared here

    return CpuBackend()


def cuda_backend(index: int) -> Backend:
    """The GPU that the CUDA driver counts as `index` in this process, so after CUDA_VISIBLE_DEVICES: one process's
    index says nothing in another, a uuid does. Raises DeviceError."""
    from tierkv.device.cuda import open_cuda_backend  # noqa: PLC0415 - loads the driver

    return open_cuda_backend(index)
