"""One block, made smaller without loss: byte planes, each compressed with zstd, and back.

    block    | chunk of 256 KiB | chunk | ... | what is left |
    chunk    e0 e0' | e1 e1' | e2 e2' | ...        elements of two bytes, say
    planes   e0 e1 e2 ... | e0' e1' e2' ...        all first bytes, then all second ones
    stored   u32 length of each piece, in order | piece | piece | ...

A piece is one plane of one chunk: a zstd frame, or the plane as it is where that is not longer. Sign and exponent of
floating-point numbers, which are much alike, come to stand beside one another, and the rest, which is as good as
random, costs no time. Chunks are small, so that the planes stay in the processor's cache and no frame can ask for more
memory than one of them.

What is decoded is hostile: every length is known beforehand, from the header, and a frame that says otherwise is
damage. Nothing is written but to the block itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zstandard

from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile
from tierkv.storage.codec_names import CHUNK_BYTES, WIDTHS

__all__ = ["PlaneCodec"]

_LENGTH = np.dtype("<u4")
_HASH_LOG, _MIN_MATCH, _WINDOW_LOG = 6, 7, 18


@dataclass(frozen=True, slots=True)
class PlaneCodec:
    """`width`: bytes of an element, so many planes."""

    width: int

    @classmethod
    def of(cls, name: str) -> Self:
        """The one that a checked header names."""
        return cls(WIDTHS[name])

    def encode(self, block: memoryview, most_bytes: int) -> bytes | None:
        """What is to be stored of a whole number of elements; None where that has more than `most_bytes`."""
        raw = np.frombuffer(block, np.uint8)
        compress = self.compressor().compress
        pieces: list[bytes] = []
        for start, stop in _chunks(len(raw)):
            planes = raw[start:stop].reshape(-1, self.width).T
            for plane in np.ascontiguousarray(planes):
                frame = compress(plane.data)
                pieces.append(frame if len(frame) < len(plane) else plane.tobytes())
        lengths = np.array([len(piece) for piece in pieces], _LENGTH)
        if lengths.nbytes + int(lengths.sum()) > most_bytes:
            return None
        return b"".join((lengths.tobytes(), *pieces))

    def decode(self, stored: memoryview, block: memoryview) -> None:
        """Fill `block`, whose length is the block's, from what `encode` made, without the zeros behind it. Raises
        DamagedFile; then `block` holds anything, and nothing beside it was written."""
        target = np.frombuffer(block, np.uint8)
        lengths = self._lengths(stored, len(target))
        decompress = _contexts.decompressor().decompress
        at = lengths.nbytes
        left = iter(lengths.tolist())
        for start, stop in _chunks(len(target)):
            elements = target[start:stop].reshape(-1, self.width)
            for index in range(self.width):
                piece = stored[at : at + (length := next(left))]
                at += length
                plane = piece if length == len(elements) else _decompress(decompress, piece, len(elements))
                elements[:, index] = np.frombuffer(plane, np.uint8)

    def compressor(self) -> zstandard.ZstdCompressor:
        """This thread's."""
        return _contexts.compressor()

    def _lengths(self, stored: memoryview, block_bytes: int) -> np.ndarray:
        """Of the pieces, which fill what is stored to its last byte."""
        pieces = self.width * -(-block_bytes // CHUNK_BYTES)
        if block_bytes % self.width or len(stored) < pieces * _LENGTH.itemsize:
            raise DamagedFile(Reason.CHECKSUM, f"{len(stored)} bytes can't be a block of {block_bytes}")
        lengths = np.frombuffer(stored, _LENGTH, pieces)
        if lengths.nbytes + int(lengths.sum(dtype=np.uint64)) != len(stored):
            raise DamagedFile(Reason.CHECKSUM, "the lengths of its pieces do not fit")
        return lengths


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, num_bytes, CHUNK_BYTES))


def _decompress(decompress: Any, frame: memoryview, num_bytes: int) -> bytes:
    """The frame must say how long its content is before anything is allocated for it."""
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise DamagedFile(Reason.CHECKSUM, "a piece says that it is longer or shorter than its plane")
        plane: bytes = decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedFile(Reason.CHECKSUM, f"a piece is no zstd frame: {error}") from error
    if len(plane) != num_bytes:
        raise DamagedFile(Reason.CHECKSUM, "a piece is longer or shorter than its plane")
    return plane


class _Contexts(threading.local):
    """One compressor and one decompressor a thread: they are not to be shared, and cost more to make than to use."""

    def __init__(self) -> None:
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def compressor(self) -> zstandard.ZstdCompressor:
        """KV does not repeat itself, so looking for matches finds chance ones, which cost time and spoil what the
        entropy coder makes of the rest. With a table of 64 entries there are hardly any: that is both smaller and
        twice as fast as level 1, and level 3 is worse still (docs/operations.md)."""
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters(
                    strategy=zstandard.STRATEGY_FAST,
                    window_log=_WINDOW_LOG,
                    hash_log=_HASH_LOG,
                    min_match=_MIN_MATCH,
                    write_content_size=True,
                    write_checksum=False,  # what is stored has its BLAKE3
                    write_dict_id=False,
                )
            )
        return self._compressor

    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
        return self._decompressor


_contexts = _Contexts()
