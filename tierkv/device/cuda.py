"""A CUDA device: its context, streams and pools, and what is asked of them.

    pages      gather, scatter, encode and decode: kernels, and the staging of what goes on to host memory
    upload     host -> pool, and zeros
    download   pool -> host

The context is the primary one, retained: in an engine's process torch has it already. It is made current around each
call and popped again, so that a thread of the engine finds its own as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from tierkv.core.codec import BlockCodec, Fp8
from tierkv.device import cuda_driver as cuda
from tierkv.device.backends import Backend, Pending, Pinning, PoolMap
from tierkv.device.checks import check_alike, check_pages, check_ranges, check_slots
from tierkv.device.codec_source import CodecTable, is_aligned
from tierkv.device.coding import Parts, check_coding
from tierkv.device.cuda_coding import CudaCoder, CudaCoding, staging_of
from tierkv.device.cuda_driver import CudaError, Driver
from tierkv.device.cuda_pool import CudaPool, CudaPools
from tierkv.device.cuda_streams import CudaPending, CudaStreams
from tierkv.device.kernel_source import Table
from tierkv.device.layouts import PagedLayout, Piece
from tierkv.device.memory import HostMemory
from tierkv.device.probe import find_gpu
from tierkv.device.runs import find_copies
from tierkv.errors import DeviceError, DeviceLost
from tierkv.wire.pools import PoolKind

log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 2**20
"""On the device, from the first time on that pages go to or come from host memory."""

_STAGING_ALIGNMENT = 256


class Mover(Protocol):
    """Launches what moves blocks between pages and slots on the device."""

    def __call__(
        self,
        stream: int,
        layout: PagedLayout,
        pages: Sequence[int],
        slots: tuple[int, int],
        offsets: Sequence[int],
        *,
        to_slots: bool,
    ) -> list[object]:
        """`slots`: address and bytes. Returns what has to be kept alive until it is done."""
        ...


class CudaBackend:
    def __init__(self, driver: Driver, index: int) -> None:
        gpu = find_gpu(driver, index)
        self._driver = driver
        self._gpu = gpu
        self.name = gpu.name
        self.uuid = gpu.uuid
        self.cuda_version = driver.version
        self.numa_node = gpu.numa_node
        self._context = driver.read_pointer("cuDevicePrimaryCtxRetain", gpu.ordinal)
        with contextlib.ExitStack() as undo:
            undo.callback(driver.result, "cuDevicePrimaryCtxRelease_v2", gpu.ordinal)
            self._streams = CudaStreams(driver, self._context, ("pages", "upload", "download"))
            undo.pop_all()
        self._pools = CudaPools(driver, gpu, self._context, self._streams.settle)
        self._registered: list[HostMemory] = []
        self._registering = threading.Lock()
        self._buffers: dict[str, tuple[int, int]] = {}  # name -> address, bytes; used by the stream "pages" alone
        self._mover: Mover | None = None
        self._reached: tuple[Piece, ...] = ()  # of the layout whose memory was looked at last
        self._preparing = threading.Lock()
        self._codes: dict[tuple[str, int, int], bool] = {}  # element and bytes of a block -> kernels, and memory
        self._coder = CudaCoder(
            driver, self._streams, buffer=self._buffer, on_device=self._on_device, launch=self._launch_codec
        )

    # ---------------------------------------------------------------- memory

    def make_pool(self, num_bytes: int) -> CudaPool:
        return self._pools.make(num_bytes)

    def open_pool(self, kind: PoolKind, num_bytes: int, *, fd: int = -1, handle: bytes = b"") -> CudaPool:
        return self._pools.open(kind, num_bytes, fd=fd, handle=handle)

    def register_host(self, memory: HostMemory) -> Pinning:
        flags = cuda.HOST_REGISTER_PORTABLE | cuda.HOST_REGISTER_DEVICE_MAP
        with self._driver.current(self._context):
            result = self._driver.result("cuMemHostRegister_v2", memory.address, memory.num_bytes, flags)
        if result == cuda.HOST_MEMORY_ALREADY_REGISTERED:  # by this process, for another GPU: it counts for all
            return Pinning(True)
        if result != 0:
            return Pinning(False, _why_not_pinned(memory.num_bytes, self._driver.error("cuMemHostRegister", result)))
        with self._registering:
            self._registered.append(memory)
        return Pinning(True)

    def unregister_host(self, memory: HostMemory) -> None:
        with self._registering:
            if memory not in self._registered:
                return
            self._registered.remove(memory)
        with self._driver.current(self._context):
            self._driver.call("cuMemHostUnregister", memory.address)

    # ---------------------------------------------------------------- order

    def mark(self, stream: int) -> object:
        return _Mark(self._streams, self._streams.record(stream))

    def wait_for(self, event: object) -> None:
        handle = _event_handle(event)
        if handle:
            self._streams.wait_for(handle)

    # ---------------------------------------------------------------- copies

    def gather(
        self, layout: PagedLayout, pages: Sequence[int], slots: PoolMap | HostMemory, offsets: Sequence[int]
    ) -> Pending:
        return self._move("gather", layout, pages, slots, offsets, to_slots=True)

    def scatter(
        self, slots: PoolMap | HostMemory, offsets: Sequence[int], layout: PagedLayout, pages: Sequence[int]
    ) -> Pending:
        return self._move("scatter", layout, pages, slots, offsets, to_slots=False)

    def codes(self, codec: BlockCodec) -> bool:
        if not isinstance(codec, Fp8) or not is_aligned(codec):
            return False
        kind = codec.shape.element, sum(codec.raw_bytes), sum(codec.block_bytes)
        with self._preparing:
            if kind not in self._codes:
                try:
                    with self._driver.current(self._context):
                        has_kernels = has_codec(self._gpu.index, codec.shape.element)
                    self._codes[kind] = has_kernels and self._has_room(codec)
                except DeviceError:  # a device that is lost: what copies finds out, and is answered for that
                    return False
            return self._codes[kind]

    def encode(
        self, codec: BlockCodec, parts: Parts, slots: PoolMap | HostMemory, offsets: Sequence[int]
    ) -> CudaCoding:
        check_coding("encode", codec, parts, slots, offsets, needs_pages=True)
        return self._coder.encode(_fp8(codec), self._mover_for(parts), parts, slots, offsets)

    def decode(
        self, codec: BlockCodec, slots: PoolMap | HostMemory, offsets: Sequence[int], parts: Parts
    ) -> CudaCoding:
        check_coding("decode", codec, parts, slots, offsets, needs_pages=False)
        return self._coder.decode(_fp8(codec), self._mover_for(parts), slots, offsets, parts)

    def upload(
        self,
        host: HostMemory,
        host_offsets: Sequence[int],
        pool: PoolMap,
        offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        return self._copy("upload", "cuMemcpyHtoDAsync_v2", host, host_offsets, pool, offsets, block_bytes)

    def download(
        self,
        pool: PoolMap,
        offsets: Sequence[int],
        host: HostMemory,
        host_offsets: Sequence[int],
        block_bytes: int,
    ) -> Pending:
        return self._copy("download", "cuMemcpyDtoHAsync_v2", pool, offsets, host, host_offsets, block_bytes)

    def zero(self, pool: PoolMap, ranges: Sequence[tuple[int, int]]) -> Pending:
        check_ranges(pool, ranges)
        with self._streams.submitting("upload", [pool]) as made:
            for offset, num_bytes in ranges:
                if num_bytes:
                    stream = self._streams.stream("upload")
                    self._driver.call("cuMemsetD8Async", pool.address + offset, 0, num_bytes, stream)
        return made[0]

    def close(self) -> None:
        with self._driver.current(self._context):
            self._streams.settle()
            for address, _num_bytes in self._buffers.values():
                self._driver.call("cuMemFree_v2", address)
        self._buffers = {}
        for memory in list(self._registered):
            self.unregister_host(memory)
        self._streams.close()
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._gpu.ordinal)

    # ---------------------------------------------------------------- how

    def _copy(
        self,
        name: str,
        call: str,
        source: PoolMap | HostMemory,
        sources: Sequence[int],
        target: PoolMap | HostMemory,
        targets: Sequence[int],
        block_bytes: int,
    ) -> CudaPending:
        """Whole slots, on the stream of that name."""
        check_alike(sources, targets)
        check_slots(name, source, sources, block_bytes)
        check_slots(name, target, targets, block_bytes)
        with self._streams.submitting(name, [source, target]) as made:
            stream = self._streams.stream(name)
            for begin, to, size in find_copies(sources, targets, block_bytes, whole_slots=True):
                self._driver.call(call, target.address + to, source.address + begin, size, stream)
        return made[0]

    def _move(
        self,
        what: str,
        layout: PagedLayout,
        pages: Sequence[int],
        slots: PoolMap | HostMemory,
        offsets: Sequence[int],
        *,
        to_slots: bool,
    ) -> CudaPending:
        check_alike(pages, offsets)
        check_pages(layout, pages)
        check_slots(what, slots, offsets, layout.block_bytes)
        mover = self._mover_for([(layout, pages)])
        stream = self._streams.stream("pages")
        keeps: list[object] = [layout, slots]
        with self._streams.submitting("pages", keeps) as made:
            if not len(pages):
                pass  # there is nothing to launch
            elif not isinstance(slots, HostMemory):
                place = (slots.address, slots.num_bytes)
                keeps += mover(stream, layout, pages, place, offsets, to_slots=to_slots)
            else:
                for begin, end, staging, staged in self._stages(layout.block_bytes, len(pages)):
                    some, there = pages[begin:end], offsets[begin:end]
                    if to_slots:
                        keeps += mover(stream, layout, some, staging, staged, to_slots=True)
                        for source, to, size in find_copies(staged, there, layout.block_bytes, whole_slots=False):
                            place = (slots.address + to, staging[0] + source)
                            self._driver.call("cuMemcpyDtoHAsync_v2", *place, size, stream)
                    else:
                        for source, to, size in find_copies(there, staged, layout.block_bytes, whole_slots=False):
                            place = (staging[0] + to, slots.address + source)
                            self._driver.call("cuMemcpyHtoDAsync_v2", *place, size, stream)
                        keeps += mover(stream, layout, some, staging, staged, to_slots=False)
        return made[0]

    def _mover_for(self, parts: Parts) -> Mover:
        for layout, _pages in parts:
            self._require_here(layout)
        return self._mover or self._choose_mover()

    def _choose_mover(self) -> Mover:
        """With the context current. What runs by the runtime's device index goes back to the device that the thread
        had before, and where that was none the runtime would make a context on the first GPU, which takes memory."""
        with self._driver.current(self._context):
            self._mover = choose_mover(self._gpu.index, self._on_device)
        return self._mover

    def _require_here(self, layout: PagedLayout) -> None:
        """A kernel that touches memory of another GPU, or of the host, would take the engine's whole context along."""
        if layout.pieces is self._reached:
            return
        with self._driver.current(self._context):
            for piece in layout.pieces:
                ordinal = ctypes.c_int(-1)
                result = self._driver.result(
                    "cuPointerGetAttribute", ctypes.byref(ordinal), cuda.DEVICE_ORDINAL, piece.address
                )
                if result != 0 or ordinal.value != self._gpu.ordinal:
                    where = "no GPU's memory" if result != 0 else f"memory of GPU {ordinal.value}"
                    raise DeviceError("failed", f"pages at {piece.address:#x} are {where}, and not of {self.name}")
        self._reached = layout.pieces  # without what keeps the memory alive

    def _stages(self, block_bytes: int, num_blocks: int) -> Iterator[tuple[int, int, tuple[int, int], list[int]]]:
        """[begin, end) of the blocks, the staging memory, and where each of them stands in it. One after the other on
        one stream, so that the memory is free again when the next ones come."""
        step = -(-block_bytes // _STAGING_ALIGNMENT) * _STAGING_ALIGNMENT
        at_once = max(1, STAGING_BYTES // step)
        staging = self._buffer("staging", max(STAGING_BYTES, step))
        for begin in range(0, num_blocks, at_once):
            end = min(num_blocks, begin + at_once)
            yield begin, end, staging, [place * step for place in range(end - begin)]

    def _on_device(self, stream: int, table: np.ndarray) -> int:
        """The address of a copy of `table` on the device, until the next one on the same stream."""
        address, _ = self._buffer("table", table.nbytes)
        self._driver.call("cuMemcpyHtoDAsync_v2", address, table.ctypes.data, table.nbytes, stream)
        return address

    def _launch_codec(
        self, stream: int, element: str, table: CodecTable, address: int, verdicts: int, *, to_slots: bool
    ) -> None:
        from tierkv.device import cupy_codec  # noqa: PLC0415 - only where a GPU is used

        cupy_codec.launch(self._gpu.index, stream, element, table, address, verdicts, to_slots=to_slots)

    def _has_room(self, codec: Fp8) -> bool:
        """Takes the memory of coding, for good. An engine may have left none: that is to be known while the host can
        still do it, for a copy that fails costs its blocks and the pool."""
        with self._streams.alone():
            before = set(self._buffers)
            try:
                for name, num_bytes in staging_of(codec):
                    self._buffer(name, num_bytes)
            except DeviceLost:
                raise
            except DeviceError as error:
                for name in set(self._buffers) - before:
                    self._drop_buffer(name)
                log.warning("blocks of coded groups are coded by the processor, which is slower: %s", error.problem)
                return False
        return True

    def _buffer(self, name: str, num_bytes: int) -> tuple[int, int]:
        """Memory of the stream "pages", at least so large."""
        found = self._buffers.get(name)
        if found is not None and found[1] >= num_bytes:
            return found
        if found is not None:
            self._drop_buffer(name)
        size = 1 << max(16, (num_bytes - 1).bit_length())
        made = self._buffers[name] = (self._driver.read_address("cuMemAlloc_v2", size), size)
        return made

    def _drop_buffer(self, name: str) -> None:
        self._driver.call("cuStreamSynchronize", self._streams.stream("pages"))
        address, _num_bytes = self._buffers.pop(name)
        self._driver.call("cuMemFree_v2", address)


class _Mark:
    """An event of ours. Destroyed with this: what waits for it has been told by then."""

    def __init__(self, streams: CudaStreams, event: int) -> None:
        self._streams = streams
        self.cuda_event = event

    def __del__(self) -> None:
        with contextlib.suppress(DeviceError):  # a context that is gone has taken its events along
            self._streams.destroy(self.cuda_event)


def open_cuda_backend(index: int) -> Backend:
    return CudaBackend(Driver(), index)


def choose_mover(index: int, on_device: OnDevice) -> Mover:
    """By cupy's kernel, or by torch where there is no cupy that works. Raises DeviceError where there is neither."""
    try:
        from tierkv.device import cupy_mover  # noqa: PLC0415 - only where a GPU is used

        cupy_mover.prepare(index)
    except (ImportError, DeviceError) as no_cupy:
        try:
            from tierkv.device import torch_mover  # noqa: PLC0415 - as above
        except ImportError as no_torch:
            raise DeviceError(
                "failed", f"pages are moved by cupy or torch, and neither is here ({no_cupy}; {no_torch})"
            ) from no_torch
        log.warning("pages are moved by torch, which is slower: %s", str(no_cupy))

        def by_torch(
            stream: int,
            layout: PagedLayout,
            pages: Sequence[int],
            slots: tuple[int, int],
            offsets: Sequence[int],
            *,
            to_slots: bool,
        ) -> list[object]:
            torch_mover.move(index, stream, layout, pages, torch_mover.Slots(*slots), offsets, to_slots=to_slots)
            return []

        return by_torch

    def by_cupy(
        stream: int,
        layout: PagedLayout,
        pages: Sequence[int],
        slots: tuple[int, int],
        offsets: Sequence[int],
        *,
        to_slots: bool,
    ) -> list[object]:
        table = Table(layout, pages, np.asarray(offsets, np.uint64) + np.uint64(slots[0]))
        cupy_mover.launch(index, stream, table, on_device(stream, table.bytes), to_slots=to_slots)
        return [table.bytes]

    return by_cupy


def has_codec(index: int, element: str) -> bool:
    """Whether the kernels of the codec run there: they are cupy's alone."""
    try:
        from tierkv.device import cupy_codec  # noqa: PLC0415 - only where a GPU is used

        cupy_codec.prepare(index, element)
    except (ImportError, DeviceError) as no_cupy:
        log.warning("blocks of coded groups are coded by the processor, which is slower: %s", str(no_cupy))
        return False
    return True


def _fp8(codec: BlockCodec) -> Fp8:
    if not isinstance(codec, Fp8):
        raise DeviceError("failed", f"there are no kernels for the codec {codec.name}")
    return codec


class OnDevice(Protocol):
    def __call__(self, stream: int, table: np.ndarray) -> int: ...


def _event_handle(event: object) -> int:
    """0 where there is nothing to wait for: None, or a torch event that was never recorded."""
    if event is None:
        return 0
    if isinstance(event, int):
        return event
    handle = getattr(event, "cuda_event", None)
    if handle is None:
        raise ValueError(f"{event!r} is no event")
    return int(handle)


def _why_not_pinned(num_bytes: int, error: CudaError) -> str:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < num_bytes:
        return (
            f"the limit of locked memory is {soft} bytes and {num_bytes} are to be pinned: raise it (systemd: "
            f"LimitMEMLOCK=infinity; a shell: ulimit -l unlimited; docker: --ulimit memlock=-1); {error}"
        )
    return str(error)
