"""A segment of the journal: one file of rows, each with a checksum of its own.

    | magic 8 | version u32 | row | row | ...          row: | marker 4 | length u32 | checksum 16 | MessagePack |

The first row of a segment is a checkpoint, so that no older segment is needed for what follows. A row whose checksum is
wrong is skipped, and reading goes on at the next marker from which a right row begins: one that is found within
another's bytes has not its checksum right. What lies behind the last right row of the last segment is what a crash
left."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from blake3 import blake3

from tierkv.core.journal import Account, AnyRow, Begun, Checkpoint, Ended, EvictionRow, Posting, RegretRow
from tierkv.errors import UnknownFormat

MAGIC = b"\x93TKVJRN\n"
JOURNAL_VERSION = 1
MARKER = b"\xfaRow"
CHECKSUM_BYTES = 16
MAX_ROW_BYTES = 32 * 2**20
"""More than a checkpoint of every group that a node knows has."""

HEAD = MAGIC + struct.pack("<I", JOURNAL_VERSION)
_ROW = struct.Struct(f"<4sI{CHECKSUM_BYTES}s")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRow] = msgspec.msgpack.Decoder(AnyRow)


def encode_row(row: AnyRow) -> bytes:
    body = _encoder.encode(row)
    return _ROW.pack(MARKER, len(body), _checksum(body)) + body


def encode_segment(rows: Iterable[AnyRow]) -> bytes:
    return HEAD + b"".join(map(encode_row, rows))


@dataclass(slots=True)
class Scan:
    """What reading a segment has met besides rows: how many stretches of bytes were no rows (each is a row or more that
    was damaged), and where the last right row ends."""

    damaged: int = 0
    end: int = 0
    is_torn: bool = False  # the bytes behind `end` are no row
    any_row: bool = False
    problems: list[str] = field(default_factory=list)  # of whole segments, in words; told by who reads several
    _gap: bool = field(default=False, repr=False)


def read_rows(raw: bytes, scan: Scan) -> Iterator[AnyRow]:
    """The rows of a segment that are right, in order. Raises UnknownFormat for one of another version."""
    at = 0
    if raw.startswith(MAGIC):
        version = int.from_bytes(raw[len(MAGIC) : len(HEAD)].ljust(4, b"\0"), "little")
        if len(raw) >= len(HEAD) and version != JOURNAL_VERSION:
            raise UnknownFormat(f"a segment of the journal is of version {version}")
        at = min(len(HEAD), len(raw))
    elif raw:
        scan._gap = True  # its head is damaged; rows may not be
    scan.end = at
    while at < len(raw):
        row, end = _row_at(raw, at)
        if row is not None:
            scan.damaged += scan._gap
            scan._gap = False
            scan.end = at = end
            scan.any_row = True
            yield row
            continue
        scan._gap = True
        found = raw.find(MARKER, at + 1)
        at = len(raw) if found < 0 else found
    scan.is_torn = scan.end < len(raw)


def _row_at(raw: bytes, at: int) -> tuple[AnyRow | None, int]:
    if len(raw) - at < _ROW.size:
        return None, at
    marker, length, checksum = _ROW.unpack_from(raw, at)
    end = at + _ROW.size + length
    if marker != MARKER or length > MAX_ROW_BYTES or end > len(raw):
        return None, at
    body = raw[at + _ROW.size : end]
    if _checksum(body) != checksum:
        return None, at
    try:
        return _decoder.decode(body), end
    except msgspec.DecodeError:  # written so, by a version that has rows of other kinds
        return None, at


def _checksum(body: bytes) -> bytes:
    return blake3(body).digest(length=CHECKSUM_BYTES)


# ---- documentation


_ROWS: tuple[tuple[type[msgspec.Struct], str], ...] = (
    (Posting, "bytes went from one account to another; with a file it ends what was begun about that"),
    (Begun, "a file is about to be written or removed"),
    (Ended, "nothing came of it"),
    (EvictionRow, "blocks left a tier"),
    (RegretRow, "evicted blocks were asked for again"),
    (Checkpoint, "all balances, and what was begun"),
)


def document() -> str:
    """The part of docs/format.md about the journal."""
    rows = "\n".join(
        f"| `{kind.__struct_config__.tag}` | {', '.join(f'`{name}`' for name in kind.__struct_fields__)} | {meaning} |"
        for kind, meaning in _ROWS
    )
    accounts = ", ".join(f"`{account}`" for account in Account)
    return f"""## The journal

`journal/<16 digits>.log` are its segments, in order; the last one grows. A segment is `{MAGIC.hex(" ")}`,
the version (u32, {JOURNAL_VERSION}), and rows one behind the other:

| field | type | meaning |
|---|---|---|
| `marker` | 4 bytes | `{MARKER.hex(" ")}` |
| `length` | u32 | bytes of the body, at most {MAX_ROW_BYTES:,} |
| `checksum` | {CHECKSUM_BYTES} bytes | the first of BLAKE3 of the body |
| body | MessagePack | an array: kind of row, when (seconds since 1970), then its fields in order; more may follow |

| kind | fields | meaning |
|---|---|---|
{rows}

The first row of a segment is a checkpoint, so that older ones are not needed for what follows. Accounts are of a group:
{accounts}. `host` and `nvme` are what
the tier holds, in bytes of slots and of files. A posting takes from one what it gives to the other, so all balances
together are zero. What lies behind the last right row of the last segment is cut off at a start; a row elsewhere whose
checksum is wrong is skipped, and reading goes on at the next marker with a right row.

`journal/differences.json` is the table that `tierkv audit` shows: what recounts found.
"""
