"""The kernel, compiled and launched by cupy. Imported only where a GPU is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from tierkv.device.kernel_source import CHUNK_BYTES, NAME, OPTIONS, SOURCE, THREADS, Table
from tierkv.errors import DeviceError

_kernel = cupy.RawKernel(SOURCE, NAME, options=OPTIONS)


def prepare(index: int) -> None:
    """Compile for that GPU. Raises DeviceError where that can't be had: no NVRTC, or one that doesn't know the GPU."""
    with named_errors(), cupy.cuda.Device(index):
        _kernel.compile()


def launch(index: int, stream: int, table: Table, address: int, *, to_slots: bool) -> None:
    """Ask `stream` of GPU `index` to move what `table`, whose bytes are at `address` on the device, says."""
    arguments = (
        np.uint64(address),
        np.uint32(table.num_pieces),
        np.uint64(address + table.pages_begin),
        np.uint64(address + table.slots_begin),
        np.uint32(table.num_chunks),
        np.uint32(CHUNK_BYTES),
        np.int32(to_slots),
    )
    with named_errors(), cupy.cuda.Device(index), as_current(stream, index):
        _kernel((table.num_thread_blocks,), (THREADS,), arguments)


class _Stream:
    """A stream of ours, as cupy takes it from version 14 on."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def as_current(handle: int, index: int) -> Any:
    """A context in which cupy's work goes to that stream."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Stream(handle))
    return cupy.cuda.ExternalStream(handle, index)


@contextmanager
def named_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, cupy.cuda.compiler.CompileException) as error:  # the bases of all that cupy raises
        raise DeviceError("failed", f"cupy: {error}") from error
