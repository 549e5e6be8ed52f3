"""One row of the index: its name, and what it says.

    name    fingerprint 32 | group 32 | rank u16 | extent key 32        98 bytes, big-endian, so one folder is one range
    value   CRC-32 of name and body, u32 little-endian | body: MessagePack [ExtentRow, inode, changed_ns]

`inode` and `changed_ns` (the status-change time) are the stamp of the file that the row was learned from. LMDB proves
nothing about what it gives back. Without a checksum a byte that has changed in the index would be believed against the
file, whose blocks would then not be found, or whose header would be taken for a wrong one.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass

import msgspec

from tierkv.core.instructions import ExtentRow
from tierkv.core.keys import KEY_BYTES
from tierkv.storage.names import ExtentName, Parts, namespace_parts

_PREFIX = struct.Struct(">32s32sH")
_CHECKSUM = struct.Struct("<I")

NAMESPACE_BYTES = _PREFIX.size
NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES


@dataclass(frozen=True, slots=True, order=True)
class Namespace:
    """One shard's share: a folder of extents."""

    fingerprint: str
    group: bytes
    rank: int

    def pack(self) -> bytes:
        """The first 66 bytes of the names of its rows. Raises ValueError for a fingerprint that isn't one."""
        return _PREFIX.pack(bytes.fromhex(self.fingerprint), self.group, self.rank)

    def row_name(self, key: bytes) -> bytes:
        return self.pack() + key

    @property
    def parts(self) -> Parts:
        return namespace_parts(self.fingerprint, self.group, self.rank)

    def extent(self, key: bytes) -> ExtentName:
        return ExtentName(self.fingerprint, self.group, self.rank, key)

    @classmethod
    def of(cls, extent: ExtentName) -> Namespace:
        return cls(extent.fingerprint, extent.group, extent.rank)

    @classmethod
    def unpack(cls, row_name: bytes) -> Namespace:
        fingerprint, group, rank = _PREFIX.unpack_from(row_name)
        return cls(fingerprint.hex(), group, rank)


class IndexedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the index knows of one file, and the stamp of the file it was learned from."""

    row: ExtentRow
    inode: int
    changed_ns: int

    def describes(self, status: os.stat_result) -> bool:
        return (self.inode, self.changed_ns, self.row.file_bytes) == (
            status.st_ino,
            status.st_ctime_ns,
            status.st_size,
        )


def encode_row(name: bytes, indexed: IndexedFile) -> bytearray:
    value = bytearray(_CHECKSUM.size)
    _encode_into(indexed, value, _CHECKSUM.size)
    _CHECKSUM.pack_into(value, 0, _checksum(name, value))
    return value


def decode_row(name: bytes, value: bytes | bytearray | memoryview) -> IndexedFile | None:
    """None for what was not written as the row of that name."""
    if len(value) < _CHECKSUM.size or _CHECKSUM.unpack_from(value)[0] != _checksum(name, value):
        return None
    try:
        return _decode(memoryview(value)[_CHECKSUM.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _checksum(name: bytes, value: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(memoryview(value)[_CHECKSUM.size :], zlib.crc32(name))


_encode_into = msgspec.msgpack.Encoder().encode_into
_decode = msgspec.msgpack.Decoder(IndexedFile).decode
