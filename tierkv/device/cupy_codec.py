"""The kernels of fp8, compiled and launched by cupy. Imported only where a GPU is used."""

from __future__ import annotations

from functools import cache

import cupy
import numpy as np

from tierkv.device.codec_source import DECODE_NAME, ENCODE_NAME, OPTIONS, THREADS, CodecTable, source
from tierkv.device.cupy_mover import as_current, named_errors


@cache
def _module(index: int, element: str) -> cupy.RawModule:
    return cupy.RawModule(code=source(element), options=OPTIONS)


def prepare(index: int, element: str) -> None:
    """Compile both for that GPU. Raises DeviceError where that can't be had."""
    with named_errors(), cupy.cuda.Device(index):
        _module(index, element).compile()


def launch(
    index: int, stream: int, element: str, table: CodecTable, address: int, verdicts: int, *, to_slots: bool
) -> None:
    """Ask `stream` of GPU `index` to code the blocks of `table`, whose bytes are at `address` on the device, into their
    slots, or to decode them into their pages. `verdicts`: device address of a byte a block, zero before. Raises
    DeviceError. Called with the GPU's context current."""
    arguments = (
        np.uint64(address),
        np.uint32(table.num_runs),
        np.uint64(address + table.pages_begin),
        np.uint64(address + table.slots_begin),
        np.uint64(verdicts),
    )
    with named_errors(), cupy.cuda.Device(index), as_current(stream, index):
        kernel = _module(index, element).get_function(ENCODE_NAME if to_slots else DECODE_NAME)
        kernel((table.num_thread_blocks,), (THREADS,), arguments)
