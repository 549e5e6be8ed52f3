"""Format of a `.kv` file: one declaration from which reader, writer and docs/format.md come.

    0       8         12             16           20     24                56
    | magic | version | header bytes | body bytes | zero | header checksum | body (MessagePack) | zeros | block 0 ...
    |<----------------------------- header: a multiple of 4 KiB ---------------------------------------->|

Version 1 holds blocks as they lie in the arena, version 2 some or all of them smaller, by a lossless codec. A file
that does not become smaller is of version 1, which nodes of before version 2 read as well.

The first 56 bytes and the meaning of the checksum (BLAKE3 of the whole header, the checksum's own bytes taken as
zero) are the same in every version. So a file of a newer version is told from a damaged one: its checksum is right.

Everything read here is hostile until it was checked: limits come before allocations, lengths must agree with each
other, and block keys are made again from parent, tokens and extras. `python -m tierkv.storage.format` prints the docs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from blake3 import blake3
from msgspec import Meta

from tierkv.core.identity import Layout
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, chain_keys, count_keys
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, UnknownFormat
from tierkv.storage import journal_segment
from tierkv.storage.codec_names import CHUNK_BYTES, PLAIN, WIDTHS

MAGIC = b"\x93TIERKV\n"  # not text, and changed by whatever converts line ends
FORMAT_VERSION = 2
PLAIN_VERSION = 1

ALIGN_BYTES = 4096
CHECKSUM_BYTES = 32
MAX_BLOCKS = 65_536
MAX_HEADER_BYTES = 64 * 2**20
MAX_BLOCK_BYTES = 2**34
MAX_EXTRA_BYTES = 4_096
MAX_EXTRAS = 256
MAX_POSITION = 2**48  # tokens before an extent
_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size

_PREFIX = struct.Struct("<8s4I32s")
PREFIX_BYTES = _PREFIX.size
_CHECKSUM_AT = PREFIX_BYTES - CHECKSUM_BYTES


def _described(meaning: str, unit: str, **limits: Any) -> Meta:
    return Meta(description=meaning, extra={"unit": unit}, **limits)


_Digest = Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)
_BlockIndex = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
_Extra = Annotated[bytes, Meta(max_length=MAX_EXTRA_BYTES)]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The MessagePack map of a header, field for field. `check` says what must hold between fields."""

    group: Annotated[bytes, _described("digest of the identity: the key of the group", "BLAKE3"), _Digest]
    fingerprint: Annotated[
        str, _described("fingerprint of the weights", "BLAKE3, hexadecimal", pattern=r"^[0-9a-f]{64}\Z")
    ]
    rank: Annotated[int, _described("whose shard the blocks are", "number", ge=0, le=65_535)]
    parent: Annotated[
        bytes,
        _described("key of the block before the first one; the group's key when there is none", "BLAKE3"),
        _Digest,
    ]
    first_token: Annotated[
        int,
        _described(
            "position of the first token in its prompt, a multiple of `block_tokens`", "tokens", ge=0, lt=MAX_POSITION
        ),
    ]
    block_tokens: Annotated[int, _described("tokens in a block", "tokens", ge=1, le=2**20)]
    keys: Annotated[
        bytes,
        _described("block keys in order, packed; the first one names the file", "32 bytes a block"),
        Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MAX_BLOCKS),
    ]
    tokens: Annotated[
        bytes,
        _described(
            "token ids in order, packed, each little-endian u32", "4 bytes a token", max_length=MAX_HEADER_BYTES
        ),
    ]
    extras: Annotated[
        dict[_BlockIndex, Annotated[list[_Extra], Meta(min_length=1, max_length=MAX_EXTRAS)]],
        _described("inputs of a block besides its tokens, by the block's index in this file", "bytes"),
    ]
    block_bytes: Annotated[
        int,
        _described(
            "a block's length; as it is in the arena, it is filled up with zeros to 4 KiB",
            "bytes",
            ge=1,
            le=MAX_BLOCK_BYTES,
        ),
    ]
    dtype: Annotated[str, _described("element type, as the identity's layout has it", "name", max_length=64)]
    layout: Annotated[
        str, _described("engine's layout id, axes and layer groups, in plain words", "text", max_length=4_096)
    ]
    codec: Annotated[
        str, _described("lossless codec of the stored blocks; empty: stored as they are", "name", max_length=64)
    ]
    checksums: Annotated[
        bytes,
        _described("BLAKE3 of each block as it is in the arena, zeros included, packed", "32 bytes a block"),
        Meta(max_length=CHECKSUM_BYTES * MAX_BLOCKS),
    ]
    created: Annotated[float, _described("when the extent was sealed", "seconds since 1970, UTC", ge=0)]
    lengths: Annotated[
        bytes,
        _described(
            "version 2: length of each stored block without the zeros behind it, packed; that of a block as it is in"
            " the arena, zeros included, where it is stored so",
            "u64 a block",
        ),
        Meta(max_length=LENGTH_BYTES * MAX_BLOCKS),
    ] = b""
    stored_checksums: Annotated[
        bytes,
        _described("version 2: BLAKE3 of each stored block, zeros included, packed", "32 bytes a block"),
        Meta(max_length=CHECKSUM_BYTES * MAX_BLOCKS),
    ] = b""

    @property
    def num_blocks(self) -> int:
        return count_keys(self.keys)

    @property
    def stored_block_bytes(self) -> int:
        """Of a block as it is in the arena."""
        return stored_bytes(self.block_bytes)

    def block_lengths(self) -> list[int]:
        """Of each stored block, without the zeros behind it."""
        if self.codec == PLAIN:
            return [self.stored_block_bytes] * self.num_blocks
        return [length for (length,) in _LENGTH.iter_unpack(self.lengths)]

    @property
    def payload_bytes(self) -> int:
        """Of all stored blocks, each filled up to 4 KiB."""
        if self.codec == PLAIN:
            return self.num_blocks * self.stored_block_bytes
        return sum(map(stored_bytes, self.block_lengths()))


_PLAIN_FIELDS = Header.__struct_fields__.index("lengths")  # so many come first, and are all of version 1


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed part of a header that looks like one of ours; only the checksum proves it."""

    version: int
    header_bytes: int
    body_bytes: int
    reserved: int
    checksum: bytes


def stored_bytes(block_bytes: int) -> int:
    """What a block takes in the file, and its slot in the arena: `block_bytes` rounded up to 4 KiB."""
    return -(-block_bytes // ALIGN_BYTES) * ALIGN_BYTES


def file_bytes(num_blocks: int, block_bytes: int, header_bytes: int) -> int:
    return header_bytes + num_blocks * stored_bytes(block_bytes)


def pack_lengths(lengths: Iterable[int]) -> bytes:
    """As `Header.lengths` holds them."""
    return b"".join(map(_LENGTH.pack, lengths))


def describe_layout(layout: Layout) -> str:
    """The text of the header's `layout`: everything of a layout that equal byte counts don't prove."""
    groups = "+".join(map(str, layout.block_bytes))
    return f"engine={layout.engine} axes={layout.axes} groups={groups} codec={layout.codec}"


def encode_header(header: Header) -> bytes:
    """The header's bytes, a multiple of 4 KiB. Raises DamagedFile for one that the reader would not take."""
    prove_keys(READERS[_version_of(header)](_encode_body(header)))
    return pack_header(header)


def pack_header(header: Header) -> bytes:
    """`encode_header` without the check: for one that was checked and has got its checksums since."""
    return frame_header(_encode_body(header), _version_of(header))


def _encode_body(header: Header) -> bytes:
    """Version 1 has no fields of version 2: to the byte what it was before there was one."""
    if header.codec != PLAIN or header.lengths or header.stored_checksums:
        return msgspec.msgpack.encode(header)
    return msgspec.msgpack.encode({name: getattr(header, name) for name in Header.__struct_fields__[:_PLAIN_FIELDS]})


def _version_of(header: Header) -> int:
    return PLAIN_VERSION if header.codec == PLAIN else FORMAT_VERSION


def frame_header(body: bytes, version: int) -> bytes:
    """Prefix, checksum and zeros around a body."""
    header_bytes = stored_bytes(PREFIX_BYTES + len(body))
    raw = bytearray(header_bytes)
    _PREFIX.pack_into(raw, 0, MAGIC, version, header_bytes, len(body), 0, bytes(CHECKSUM_BYTES))
    raw[PREFIX_BYTES : PREFIX_BYTES + len(body)] = body
    raw[_CHECKSUM_AT:PREFIX_BYTES] = blake3(raw).digest()
    return bytes(raw)


def decode_prefix(raw: bytes | memoryview) -> Prefix:
    """The fixed part, from at least its 56 bytes. Raises DamagedFile; says nothing about the version yet, because
    only `decode_header` can tell a newer version from a damaged one."""
    if len(raw) < PREFIX_BYTES:
        raise DamagedFile(Reason.SHORT_FILE, f"{len(raw)} bytes are no header")
    magic, version, header_bytes, body_bytes, reserved, checksum = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise DamagedFile(Reason.BAD_HEADER, "it does not begin like a .kv file")
    if header_bytes % ALIGN_BYTES or not ALIGN_BYTES <= header_bytes <= MAX_HEADER_BYTES:
        raise DamagedFile(Reason.BAD_HEADER, f"a header of {header_bytes} bytes can't be")
    return Prefix(version, header_bytes, body_bytes, reserved, checksum)


def decode_header(raw: bytes | memoryview) -> Header:
    """The header in `raw`, which holds all of it and may hold more. Raises DamagedFile, and UnknownFormat where the
    header is intact and of a version, or with a codec, that this program does not know."""
    header = decode_intact(raw)
    prove_keys(header)
    return header


def decode_intact(raw: bytes | memoryview) -> Header:
    """Like `decode_header`, but the block keys are taken as their writer proved them: for a walk, which would spend a
    third of its time on them. Whoever reads blocks proves them again."""
    prefix = decode_prefix(raw)
    if len(raw) < prefix.header_bytes:
        raise DamagedFile(Reason.SHORT_FILE, f"{len(raw)} of {prefix.header_bytes} bytes of header")
    whole = bytes(raw[: prefix.header_bytes])
    if _checksum(whole) != prefix.checksum:
        raise DamagedFile(Reason.BAD_HEADER, "the header's checksum is wrong")
    read = READERS.get(prefix.version)
    if read is None:
        known = ", ".join(map(str, sorted(READERS)))
        raise UnknownFormat(f"format version {prefix.version}; this program reads {known}")
    end = PREFIX_BYTES + prefix.body_bytes
    rest = prefix.header_bytes - end
    if prefix.reserved or rest < 0 or whole[end:] != bytes(rest):
        raise DamagedFile(Reason.BAD_HEADER, "the header's lengths do not fit")
    return read(whole[PREFIX_BYTES:end])


def _checksum(header: bytes) -> bytes:
    digest = blake3(header[:_CHECKSUM_AT])
    digest.update(bytes(CHECKSUM_BYTES))
    digest.update(memoryview(header)[PREFIX_BYTES:])
    return digest.digest()


def _read_version_1(body: bytes) -> Header:
    header = _decode_body(body)
    if header.codec != PLAIN:
        raise UnknownFormat(f"codec {header.codec!r}")
    if header.lengths or header.stored_checksums:
        raise DamagedFile(Reason.BAD_HEADER, "lengths of blocks that are stored as they are")
    check(header)
    return header


def _read_version_2(body: bytes) -> Header:
    header = _decode_body(body)
    if header.codec not in WIDTHS:
        raise UnknownFormat(f"codec {header.codec!r}")
    check(header)
    _check_stored(header)
    return header


def _decode_body(body: bytes) -> Header:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(Reason.BAD_HEADER, str(error)) from error


_decoder = msgspec.msgpack.Decoder(Header)

# The current version and the one before: what `decode_header` takes, each giving today's Header.
READERS: dict[int, Callable[[bytes], Header]] = {1: _read_version_1, 2: _read_version_2}


def check(header: Header) -> None:
    """What must hold between the fields, in either version. Raises DamagedFile."""
    blocks = header.num_blocks
    if len(header.keys) % KEY_BYTES:
        raise DamagedFile(Reason.BAD_HEADER, "packed keys are not whole")
    if len(header.checksums) != blocks * CHECKSUM_BYTES:
        raise DamagedFile(Reason.BAD_HEADER, f"{len(header.checksums)} bytes of checksums for {blocks} blocks")
    if len(header.tokens) != blocks * header.block_tokens * TOKEN_BYTES:
        raise DamagedFile(Reason.BAD_HEADER, f"{len(header.tokens)} bytes of tokens for {blocks} blocks")
    if header.first_token % header.block_tokens:
        raise DamagedFile(Reason.BAD_HEADER, f"token {header.first_token} does not begin a block")
    if (header.first_token == 0) != (header.parent == header.group):
        raise DamagedFile(Reason.BAD_HEADER, "only the first block of a prompt follows the group's key")
    if any(index >= blocks for index in header.extras):
        raise DamagedFile(Reason.BAD_HEADER, "extras of a block that is not here")
    if not math.isfinite(header.created):
        raise DamagedFile(Reason.BAD_HEADER, "no time of creation")


def _check_stored(header: Header) -> None:
    """No block is stored in more than it has, and one that is stored as it is has one checksum."""
    blocks = header.num_blocks
    if len(header.lengths) != blocks * LENGTH_BYTES or len(header.stored_checksums) != blocks * CHECKSUM_BYTES:
        raise DamagedFile(Reason.BAD_HEADER, f"lengths or checksums of stored blocks are not those of {blocks}")
    plain = header.stored_block_bytes
    for index, length in enumerate(header.block_lengths()):
        if length == plain:
            start = index * CHECKSUM_BYTES
            same = slice(start, start + CHECKSUM_BYTES)
            if header.checksums[same] != header.stored_checksums[same]:
                raise DamagedFile(Reason.BAD_HEADER, f"two checksums of block {index}, which is stored as it is")
        elif not 1 <= length <= plain - ALIGN_BYTES:
            raise DamagedFile(Reason.BAD_HEADER, f"block {index} of {header.block_bytes} bytes is stored in {length}")


def prove_keys(header: Header) -> None:
    """Make the block keys again. Raises DamagedFile when the header has others."""
    if chain_keys(header.parent, header.tokens, header.block_tokens, extras=header.extras) != header.keys:
        raise DamagedFile(Reason.KEY_MISMATCH, "block keys are not those of parent, tokens and extras")


# ---- documentation


@dataclass(frozen=True, slots=True)
class Field:
    """One row of docs/format.md."""

    name: str
    type: str
    unit: str
    meaning: str


PREFIX_FIELDS = (
    Field("magic", "8 bytes", "", f"`{MAGIC.hex(' ')}`"),
    Field("version", "u32", "", "format version; the current one is " + str(FORMAT_VERSION)),
    Field("header bytes", "u32", "bytes", "length of the whole header, zeros included: a multiple of 4096"),
    Field("body bytes", "u32", "bytes", "length of the MessagePack map"),
    Field("reserved", "u32", "", "zero"),
    Field("header checksum", "32 bytes", "BLAKE3", "of the whole header, these 32 bytes taken as zero"),
)

_TYPE_NAMES = {int: "int", str: "str", bytes: "bin", float: "float 64", dict: "map of int to array of bin"}


def _fields_of(struct_type: type[msgspec.Struct]) -> tuple[Field, ...]:
    hints = get_type_hints(struct_type, include_extras=True)
    fields = []
    for name in struct_type.__struct_fields__:
        plain, *metas = get_args(hints[name])
        meta = next(meta for meta in metas if meta.description)
        type_name = _TYPE_NAMES[get_origin(plain) or plain]
        fields.append(Field(name, type_name, meta.extra["unit"], meta.description))
    return tuple(fields)


FIELDS = _fields_of(Header)


def document() -> str:
    """docs/format.md, whole."""
    codecs = "\n".join(f"- `{name}`: {_elements(width)}" for name, width in WIDTHS.items())
    return f"""# Format of a .kv file

Generated by `python -m tierkv.storage.format`; do not edit. Version {FORMAT_VERSION}.

A `.kv` file holds one extent of one rank: consecutive blocks of KV cache and all that is needed to prove and use them.
Its path is `models/<fingerprint>/<group>/<rank>/<first 2 hex of the key>/<key>.kv`, the key being that of its first
block. Numbers are little-endian. Everything is aligned to 4096 bytes:

```
| prefix | body (MessagePack map) | zeros | block 0 | zeros | block 1 | zeros | ...
|<----------- header ------------------>|<- 4096 n ------>|
0                            header bytes
```

The file ends with its last block: its size is `header bytes + blocks x (block_bytes rounded up to 4096)` in version 1,
whose blocks are stored as they are. In version 2 they are stored by a lossless codec, each for itself, and the size is
`header bytes` and what is in `lengths`, each rounded up to 4096. A file that would not be smaller is of version 1.

## Prefix

The same in every version, so that a file of another version is told from a damaged one.

{_table(PREFIX_FIELDS)}

## Body

A MessagePack map with exactly these fields, the last two in version 2 alone.

{_table(FIELDS)}

Between fields this must hold, or the file is damaged:

- `keys`, `tokens` and `checksums` are of the same number of blocks, at least one and at most {MAX_BLOCKS:,};
- `first_token` is 0 exactly when `parent` is `group`;
- `keys` are what parent, tokens and extras give:
  `key[i] = BLAKE3(key[i-1] | u32 block_tokens | token ids | u32 number of extras | for each: u32 length, bytes)`,
  where `key[-1]` is `parent`;
- `extras` has entries only for blocks of this file that have any, at most {MAX_EXTRAS} of at most
  {MAX_EXTRA_BYTES:,} bytes each;
- in version 1, `codec` is empty; in version 2, `lengths` and `stored_checksums` are of as many blocks, a length is that
  of a block as it is or less by 4096 at least, and a block that is stored as it is has the same checksum twice.

Bytes of the header behind the body are zero; a header is at most {MAX_HEADER_BYTES:,} bytes long.

## Codecs

{codecs}

Of an element of n bytes all first bytes of a chunk make a plane, all second ones the next, and so on; chunks are of
{CHUNK_BYTES:,} bytes, the last one of what is left, and there is no padding in them. A stored block is

```
| u32 length of each piece | piece | piece | ...
```

with a piece for each plane of each chunk, in order: one zstd frame that says how long its content is, or, where the
length is the plane's own, the plane as it is. The codec is that of the file; blocks that would not become smaller by
4096 bytes are stored as they are. `stored_checksums` prove what is to be decoded, and `checksums` what has been.

## Reading

A reader compares group, fingerprint, rank, parent, position and keys with what it looks for, and the file's size with
what the header promises, and verifies each block against its checksums before the block is used. It takes the versions
{", ".join(map(str, sorted(READERS)))}. A file whose header is intact and of another version, or whose codec is not
known, is left alone. Every other deviation is damage: the file goes to `quarantine/`.

## The directories

A data directory is one node's: `FORMAT`, `LOCK`, `models/`, `tmp/`, `quarantine/`, and what the node keeps for itself
(`index/`, `digests/`, `purges/`, `pins/`, `journal/`, `starts/`). A directory of the disk tier has `FORMAT`, `models/`,
`tmp/` and `quarantine/` alone. Files, names, `identity.json` and `model.json` are the same in both. `FORMAT` says which
of the two it is: `"kind": "data"` (or nothing) or `"kind": "disk"`.

Nodes may share a disk directory, so there is no lock in it, and:

- `FORMAT` is made by the node that is first: the others find it there;
- a temp file is named `<node>-<pid>-<token>-<number>.tmp` and is locked while it is open. A node removes its own, and
  those of others when they are an hour old and nobody holds them;
- a file is named by its first block. One that begins with the blocks that a node wants to put there is left as it is;
  one that ends earlier is replaced; one that goes on otherwise stays, and the node does without. So a reader that finds
  other blocks than it looks for has met another node's file, which is right: it is not moved to `quarantine/`;
- when a file was used last is its mtime, which each node that uses it sets, at most every ten minutes. A node that
  evicts looks at it first, takes the file to `tmp/`, looks again, and puts it back if somebody has used it since.

What a node knows about a disk directory is kept in its own data directory: `disk-index/` (rows as in `index/`, and
which directory it was), and `disk-purges/` (purges that the disk directory is still to be swept for).

{journal_segment.document()}"""


def _elements(width: int) -> str:
    return f"elements of {width} bytes" if width > 1 else "bytes as they lie: one plane, which is the chunk itself"


def _table(fields: tuple[Field, ...]) -> str:
    rows = [f"| `{field.name}` | {field.type} | {field.unit} | {field.meaning} |" for field in fields]
    return "\n".join(["| field | type | unit | meaning |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(document(), end="")
