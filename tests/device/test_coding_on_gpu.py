"""Coded groups on a real GPU: the bytes of the numpy reference, in a pool and in host memory, in every layout."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.device.coded_pages import KINDS, SLOT, CodedPages
from tests.device.test_on_gpu import DONE_SECONDS, GPU, backend, host, pool, torch
from tierkv.device import cuda_coding
from tierkv.device.coding import Parts
from tierkv.device.cuda import CudaBackend
from tierkv.device.cuda_pool import CudaPool
from tierkv.device.layouts import PagedLayout, Piece
from tierkv.device.memory import HostMemory

__all__ = ["backend", "host", "pool", "torch"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


class OnGpu:
    """The memory of an engine's pages, and where it lies on the GPU: the layouts are those of the host, moved there."""

    def __init__(self, pages: CodedPages, torch: Any) -> None:
        self.pages, self._torch = pages, torch
        self._spans: list[list[tuple[int, int]]] = []
        for layout in pages.layouts:
            self._spans.append([self._span(piece, layout.num_pages) for piece in layout.pieces])
        self.upload()

    @staticmethod
    def _span(piece: Piece, num_pages: int) -> tuple[int, int]:
        return piece.address, (num_pages - 1) * piece.page_stride + piece.num_bytes

    def upload(self) -> None:
        """One tensor for each piece: pieces that share memory are apart there, which no kernel can tell."""
        self.held: list[list[Any]] = []
        self.layouts: list[PagedLayout] = []
        for layout, spans in zip(self.pages.layouts, self._spans, strict=True):
            tensors = [
                self._torch.frombuffer(bytearray(ctypes.string_at(*span)), dtype=self._torch.uint8).to(f"cuda:{GPU}")
                for span in spans
            ]
            self.held.append(tensors)
            moved = zip(layout.pieces, tensors, strict=True)
            self.layouts.append(
                replace(layout, pieces=tuple(replace(piece, address=there.data_ptr()) for piece, there in moved))
            )
        self._torch.cuda.synchronize()

    def download(self, chosen: Sequence[int]) -> np.ndarray:
        """As raw rows."""
        rows = np.zeros((len(chosen), self.pages.raw_bytes), np.uint8)
        at = 0
        for layout, tensors in zip(self.pages.layouts, self.held, strict=True):
            for piece, tensor in zip(layout.pieces, tensors, strict=True):
                there = tensor.cpu().numpy()
                for row, page in enumerate(chosen):
                    begin = page * piece.page_stride
                    to = at + piece.offset
                    rows[row, to : to + piece.num_bytes] = there[begin : begin + piece.num_bytes]
            at += layout.block_bytes
        return rows

    def parts(self, pages: Sequence[int]) -> Parts:
        return [(layout, pages) for layout in self.layouts]


@pytest.mark.parametrize("in_host", [False, True], ids=["pool", "arena"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_codes_and_decodes_every_layout_as_a_host_does_and_judges_each_block(
    backend: CudaBackend,
    torch: Any,
    pool: CudaPool,
    host: HostMemory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    in_host: bool,
) -> None:
    pytest.importorskip("cupy")
    pages = CodedPages(kind)
    assert backend.codes(pages.codec)
    monkeypatch.setattr(cuda_coding, "ROWS_BYTES", 2 * pages.raw_bytes + 512)  # so that staging is used again
    rows, chosen, places = pages.rows(5), [4, 0, 5, 1, 3], [5 * SLOT, 0, 2 * SLOT, 3 * SLOT, 7 * SLOT]
    pages.put(rows, chosen)
    engine = OnGpu(pages, torch)
    slots = host if in_host else pool

    def look() -> np.ndarray:
        """The slots, by way of host memory."""
        if not in_host:
            assert backend.download(pool, [0], host, [0], 8 * SLOT).wait(DONE_SECONDS)
        return host.bytes[: 8 * SLOT].reshape(8, SLOT)

    asked = backend.encode(pages.codec, engine.parts(chosen), slots, places)
    assert asked.wait(DONE_SECONDS)
    assert asked.good.tolist() == [True] * 5
    found = look()[[place // SLOT for place in places], : pages.coded_bytes]
    assert found.tobytes() == pages.coded(rows).tobytes()

    pages.put(np.full_like(rows, 0x77), chosen)
    engine.upload()
    back = backend.decode(pages.codec, slots, places, engine.parts([1, 3, 0, 4, 5]))
    assert back.wait(DONE_SECONDS)
    assert back.good.tolist() == [True] * 5
    assert engine.download([1, 3, 0, 4, 5]).tobytes() == pages.as_read(rows).tobytes()

    look()[0, :4] = 0  # the scale of the second block
    if not in_host:
        assert backend.upload(host, [0], pool, [0], 8 * SLOT).wait(DONE_SECONDS)
    damaged = backend.decode(pages.codec, slots, places, engine.parts(chosen))
    assert damaged.wait(DONE_SECONDS)
    assert damaged.good.tolist() == [True, False, True, True, True]
    rows.view(np.float16)[3, 5] = np.inf
    pages.put(rows, chosen)
    engine.upload()
    refused = backend.encode(pages.codec, engine.parts(chosen), slots, places)
    assert refused.wait(DONE_SECONDS)
    assert refused.good.tolist() == [True, True, True, False, True]
