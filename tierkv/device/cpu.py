"""Host memory in the place of a device: the same calls, copies made by this process.

How a copy is carried out is a value: `at_once`, by whoever asks for it; tests hand in one that completes late and out
of order (late.py), so that what relies on an order that nobody promised, or lets go too early, is found without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tierkv.core.codec import BlockCodec
from tierkv.device import coding, reference
from tierkv.device.backends import CPU_UUID, Pending, Pinning, PoolMap
from tierkv.device.checks import check_alike, check_pages, check_ranges, check_slots
from tierkv.device.coding import Parts, check_coding
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory, MemfdPool
from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolKind

Job = Callable[[], None]
Carry = Callable[[Job], Pending]


class Done:
    """A copy that was made at once."""

    is_done = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self, timeout_seconds: float) -> bool:
        return True


def at_once(job: Job) -> Done:
    begin = time.perf_counter()
    job()
    return Done(time.perf_counter() - begin)


class CpuCoding:
    def __init__(self, copy: Pending, good: np.ndarray) -> None:
        self._copy = copy
        self.good = good

    @property
    def is_done(self) -> bool:
        return self._copy.is_done

    @property
    def seconds(self) -> float:
        return self._copy.seconds

    def wait(self, timeout_seconds: float) -> bool:
        return self._copy.wait(timeout_seconds)


class CpuBackend:
    name = "host memory"
    cuda_version = 0
    numa_node = -1

    def __init__(self, carry: Carry = at_once, *, uuid: str = CPU_UUID) -> None:
        self._carry = carry
        self.uuid = uuid

    def make_pool(self, num_bytes: int) -> MemfdPool:
        return MemfdPool.make(num_bytes)

    def open_pool(self, kind: PoolKind, num_bytes: int, *, fd: int = -1, handle: bytes = b"") -> MemfdPool:
        if kind != PoolKind.MEMFD:
            raise DeviceError("failed", f"a pool of kind {kind} is not in host memory")
        return MemfdPool.open(fd, num_bytes)

    def register_host(self, memory: HostMemory) -> Pinning:
        return Pinning(False, "there is no GPU that would need it")

    def unregister_host(self, memory: HostMemory) -> None:
        """It never was."""

    def wait_for(self, event: object) -> None:
        """What this process has computed in host memory is there."""

    def mark(self, stream: int) -> None:
        return None

    def gather(
        self, layout: PagedLayout, pages: Sequence[int], slots: PoolMap | HostMemory, offsets: Sequence[int]
    ) -> Pending:
        memory = _bytes_of(slots)
        check_alike(pages, offsets)
        check_pages(layout, pages)
        check_slots("gather", slots, offsets, layout.block_bytes)
        return self._carry(lambda: reference.gather(layout, pages, memory, offsets))

    def scatter(
        self, slots: PoolMap | HostMemory, offsets: Sequence[int], layout: PagedLayout, pages: Sequence[int]
    ) -> Pending:
        memory = _bytes_of(slots)
        check_alike(pages, offsets)
        check_pages(layout, pages)
        check_slots("scatter", slots, offsets, layout.block_bytes)
        return self._carry(lambda: reference.scatter(memory, offsets, layout, pages))

    def codes(self, codec: BlockCodec) -> bool:
        return True

    def encode(self, codec: BlockCodec, parts: Parts, slots: PoolMap | HostMemory, offsets: Sequence[int]) -> CpuCoding:
        memory = _bytes_of(slots)
        check_coding("encode", codec, parts, slots, offsets, needs_pages=True)
        good = np.zeros(len(offsets), np.bool_)
        return CpuCoding(self._carry(lambda: coding.encode(codec, parts, memory, offsets, good)), good)

    def decode(self, codec: BlockCodec, slots: PoolMap | HostMemory, offsets: Sequence[int], parts: Parts) -> CpuCoding:
        memory = _bytes_of(slots)
        check_coding("decode", codec, parts, slots, offsets, needs_pages=False)
        good = np.zeros(len(offsets), np.bool_)
        return CpuCoding(self._carry(lambda: coding.decode(codec, memory, offsets, parts, good)), good)

    def upload(
        self,
        host: HostMemory,
        host_offsets: Sequence[int],
        pool: PoolMap,
        offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        return self._copy("upload", host, host_offsets, pool, offsets, block_bytes)

    def download(
        self,
        pool: PoolMap,
        offsets: Sequence[int],
        host: HostMemory,
        host_offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        return self._copy("download", pool, offsets, host, host_offsets, block_bytes)

    def zero(self, pool: PoolMap, ranges: Sequence[tuple[int, int]]) -> Pending:
        memory = _bytes_of(pool)
        check_ranges(pool, ranges)

        def job() -> None:
            for offset, num_bytes in ranges:
                memory[offset : offset + num_bytes] = 0

        return self._carry(job)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _copy(
        self,
        what: str,
        source: PoolMap | HostMemory,
        sources: Sequence[int],
        target: PoolMap | HostMemory,
        targets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        read, written = _bytes_of(source), _bytes_of(target)
        check_alike(sources, targets)
        check_slots(what, source, sources, block_bytes)
        check_slots(what, target, targets, block_bytes)

        def job() -> None:
            for begin, to in zip(sources, targets, strict=True):
                written[to : to + block_bytes] = read[begin : begin + block_bytes]

        return self._carry(job)


def _bytes_of(memory: PoolMap | HostMemory) -> np.ndarray:
    if not isinstance(memory, HostMemory):
        raise DeviceError("failed", f"a pool of kind {memory.kind} is not in host memory")
    return memory.bytes
