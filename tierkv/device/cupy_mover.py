"""The kernel, compiled and launched by cupy. Imported only where a GPU is used."""

from __future__ import annotations

import cupy
import numpy as np

from tierkv.device.kernel_source import CHUNK_BYTES, NAME, OPTIONS, SOURCE, THREADS, Table
from tierkv.errors import DeviceError

_kernel = cupy.RawKernel(SOURCE, NAME, options=OPTIONS)


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
    try:
        with cupy.cuda.Device(index), cupy.cuda.ExternalStream(stream, index):
            _kernel((table.num_thread_blocks,), (THREADS,), arguments)
    except (RuntimeError, cupy.cuda.compiler.CompileException) as error:  # the base of all that cupy's drivers raise
        raise DeviceError("failed", f"the kernel does not run: {error}") from error
