"""Coded groups on a CUDA device: how blocks get from an engine's pages into coded slots, and back.

    encode   pages -mover-> raw rows -kernel-> coded rows: the pool's slots, or staging -copy-> host slots
    decode   coded rows: the pool's slots, or host slots -copy-> staging; -kernel-> raw rows -mover-> pages

All of it runs on the stream "pages", one step behind the other, and so do all uses of the staging: it is free again
when the next rows come. Raw rows are what makes one kernel serve any layout of pages, and they begin as zeros when
blocks are decoded: so padding comes back as zeros, and a block that is not right never gets what another
one left there.

Verdicts are bytes on the device, zero at first, and copied to the host as the last step: who waits for the copy has
them. A host that never got any reads "not good".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from tierkv.core.codec import Fp8
from tierkv.device.backends import PoolMap
from tierkv.device.codec_source import CodecTable
from tierkv.device.coding import Parts
from tierkv.device.cuda_driver import Driver
from tierkv.device.cuda_streams import CudaPending, CudaStreams
from tierkv.device.layouts import PagedLayout, Piece
from tierkv.device.memory import HostMemory
from tierkv.device.runs import find_copies

ROWS_BYTES = 32 * 2**20
"""Of raw rows on the device, and of coded ones; one block's where that is more."""

_ALIGNMENT = 256
_NOT_GOOD = 1


class LaunchCodec(Protocol):
    """Launches the kernels of the codec."""

    def __call__(
        self, stream: int, element: str, table: CodecTable, address: int, verdicts: int, *, to_slots: bool
    ) -> None: ...


class Move(Protocol):
    """As cuda.Mover."""

    def __call__(
        self,
        stream: int,
        layout: PagedLayout,
        pages: Sequence[int],
        slots: tuple[int, int],
        offsets: Sequence[int],
        *,
        to_slots: bool,
    ) -> list[object]: ...


def staging_of(codec: Fp8) -> list[tuple[str, int]]:
    """Names and bytes of the memory that coding needs on the device, whatever it codes."""
    return [
        (name, max(ROWS_BYTES, _aligned(sum(size))))
        for name, size in (("raw", codec.raw_bytes), ("coded", codec.block_bytes))
    ]


class CudaCoding:
    """The Coding of this device."""

    def __init__(self, copy: CudaPending, verdicts: np.ndarray) -> None:
        self._copy = copy
        self._verdicts = verdicts

    @property
    def is_done(self) -> bool:
        return self._copy.is_done

    @property
    def seconds(self) -> float:
        return self._copy.seconds

    @property
    def good(self) -> np.ndarray:
        good: np.ndarray = self._verdicts == 0
        return good

    def wait(self, timeout_seconds: float) -> bool:
        return self._copy.wait(timeout_seconds)


class CudaCoder:
    """What is asked has been checked. `buffer(name, bytes)` is memory of the stream "pages", as (address, bytes);
    `on_device` puts a table there."""

    def __init__(
        self,
        driver: Driver,
        streams: CudaStreams,
        *,
        buffer: Callable[[str, int], tuple[int, int]],
        on_device: Callable[[int, np.ndarray], int],
        launch: LaunchCodec,
    ) -> None:
        self._driver = driver
        self._streams = streams
        self._buffer = buffer
        self._on_device = on_device
        self._launch = launch

    def encode(
        self, codec: Fp8, move: Move, parts: Parts, slots: PoolMap | HostMemory, offsets: Sequence[int]
    ) -> CudaCoding:
        return self._code(codec, move, parts, slots, offsets, to_slots=True)

    def decode(
        self, codec: Fp8, move: Move, slots: PoolMap | HostMemory, offsets: Sequence[int], parts: Parts
    ) -> CudaCoding:
        return self._code(codec, move, parts, slots, offsets, to_slots=False)

    def _code(
        self,
        codec: Fp8,
        move: Move,
        parts: Parts,
        slots: PoolMap | HostMemory,
        offsets: Sequence[int],
        *,
        to_slots: bool,
    ) -> CudaCoding:
        stream, count = self._streams.stream("pages"), len(offsets)
        verdicts = np.full(count, _NOT_GOOD, np.uint8)
        keeps: list[object] = [codec, [layout for layout, _pages in parts], slots, verdicts]
        with self._streams.submitting("pages", keeps) as made:
            if count:
                there = self._buffer("verdicts", count)[0]
                self._driver.call("cuMemsetD8Async", there, 0, count, stream)
                for begin, end, rows in self._rows(codec, count):
                    some = [(layout, pages[begin:end]) for layout, pages in parts]
                    place = offsets[begin:end]
                    if to_slots:
                        keeps += _move_rows(move, stream, some, rows, to_slots=True)
                        keeps += self._to_slots(codec, stream, rows, slots, place, there + begin)
                    else:
                        keeps += self._from_slots(codec, stream, rows, slots, place, there + begin)
                        keeps += _move_rows(move, stream, some, rows, to_slots=False)
                self._driver.call("cuMemcpyDtoHAsync_v2", verdicts.ctypes.data, there, count, stream)
        return CudaCoding(made[0], verdicts)

    def _rows(self, codec: Fp8, count: int) -> Iterator[tuple[int, int, _Rows]]:
        step = _aligned(codec.shape.total_raw_bytes)
        at_once = max(1, ROWS_BYTES // step)
        memory = self._buffer("raw", max(ROWS_BYTES, step))
        for begin in range(0, count, at_once):
            end = min(count, begin + at_once)
            yield begin, end, _Rows(memory, step, end - begin)

    def _to_slots(
        self,
        codec: Fp8,
        stream: int,
        rows: _Rows,
        slots: PoolMap | HostMemory,
        offsets: Sequence[int],
        verdicts: int,
    ) -> list[object]:
        if not isinstance(slots, HostMemory):
            return self._run(codec, stream, rows, slots.address, offsets, verdicts, to_slots=True)
        coded_bytes = sum(codec.block_bytes)
        coded = self._coded_rows(coded_bytes, rows.count)
        keeps = self._run(codec, stream, rows, coded.address, coded.begins(), verdicts, to_slots=True)
        for source, to, size in find_copies(coded.begins(), offsets, coded_bytes, whole_slots=False):
            place = (slots.address + to, coded.address + source)
            self._driver.call("cuMemcpyDtoHAsync_v2", *place, size, stream)
        return keeps

    def _from_slots(
        self,
        codec: Fp8,
        stream: int,
        rows: _Rows,
        slots: PoolMap | HostMemory,
        offsets: Sequence[int],
        verdicts: int,
    ) -> list[object]:
        self._driver.call("cuMemsetD8Async", rows.address, 0, rows.count * rows.step, stream)
        if not isinstance(slots, HostMemory):
            return self._run(codec, stream, rows, slots.address, offsets, verdicts, to_slots=False)
        coded_bytes = sum(codec.block_bytes)
        coded = self._coded_rows(coded_bytes, rows.count)
        for source, to, size in find_copies(offsets, coded.begins(), coded_bytes, whole_slots=False):
            place = (coded.address + to, slots.address + source)
            self._driver.call("cuMemcpyHtoDAsync_v2", *place, size, stream)
        return self._run(codec, stream, rows, coded.address, coded.begins(), verdicts, to_slots=False)

    def _run(
        self,
        codec: Fp8,
        stream: int,
        rows: _Rows,
        address: int,
        offsets: Sequence[int],
        verdicts: int,
        *,
        to_slots: bool,
    ) -> list[object]:
        """The kernel, between raw rows and coded blocks on the device at `address` + `offsets`."""
        places = np.asarray(offsets, np.uint64) + np.uint64(address)
        table = CodecTable(codec, rows.layout(codec), range(rows.count), places, has_zeros=True)
        there = self._on_device(stream, table.bytes)
        self._launch(stream, codec.shape.element, table, there, verdicts, to_slots=to_slots)
        return [table.bytes]

    def _coded_rows(self, coded_bytes: int, count: int) -> _Rows:
        step = _aligned(coded_bytes)
        return _Rows(self._buffer("coded", max(ROWS_BYTES, count * step)), step, count)


class _Rows:
    """`count` rows in staging, `step` bytes apart."""

    def __init__(self, memory: tuple[int, int], step: int, count: int) -> None:
        self.memory = memory
        self.address = memory[0]
        self.step = step
        self.count = count

    def begins(self, at: int = 0) -> list[int]:
        return [row * self.step + at for row in range(self.count)]

    def layout(self, codec: Fp8) -> PagedLayout:
        """Raw blocks as pages: one to each row."""
        raw_bytes = codec.shape.total_raw_bytes
        return PagedLayout((Piece(self.address, self.step, raw_bytes, 0),), raw_bytes, self.count)


def _move_rows(move: Move, stream: int, parts: Parts, rows: _Rows, *, to_slots: bool) -> list[object]:
    """Between pages and raw rows: those that have a page."""
    keeps: list[object] = []
    at = 0
    for layout, pages in parts:
        kept = [(page, begin) for page, begin in zip(pages, rows.begins(at), strict=True) if page >= 0]
        if kept:
            chosen, begins = [page for page, _ in kept], [begin for _, begin in kept]
            keeps += move(stream, layout, chosen, rows.memory, begins, to_slots=to_slots)
        at += layout.block_bytes
    return keeps


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
