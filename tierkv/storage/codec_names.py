"""How blocks may be stored, by name: what a setting says, and what a header says. The work is in plane_codec.py."""

from __future__ import annotations

from enum import StrEnum

from tierkv.core.identity import Layout

__all__ = ["FileCodec", "PLAIN", "WIDTHS", "CHUNK_BYTES", "codec_name"]

PLAIN = ""
"""In a header: blocks as they lie in the arena."""

WIDTHS = {"zstd": 1, "planes2+zstd": 2, "planes4+zstd": 4, "planes8+zstd": 8}
"""In a header: bytes of an element, so many planes."""

CHUNK_BYTES = 2**18
"""Of a block, that are split into planes together."""

_ELEMENTS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_NAMES = {width: name for name, width in WIDTHS.items()}


class FileCodec(StrEnum):
    """How the files of a tier are written, as settings have it; files of either kind are read."""

    RAW = "raw"
    ZSTD = "zstd"


def codec_name(layout: Layout, block_bytes: int) -> str:
    """Of the codec for blocks of a group. Elements that are not known, and what a lossy codec has made of any, are
    taken for one byte each: such blocks are compressed as they lie."""
    width = _ELEMENTS.get(layout.dtype, 1) if not layout.codec else 1
    return _NAMES[1 if block_bytes % width else width]
