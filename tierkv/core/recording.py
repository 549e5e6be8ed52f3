"""A recording: what engines asked of a node and stored in it, as `tierkv replay` reads it. Keys only, and shortened; no
tokens, and of a salt the first digits of its digest.

One JSON object a line. Each file begins with `Begun`, and tells of a group before anything else of it. Block keys are a
chain: one that was written before in the same file stands for all in front of it, so that a prompt is written as the
last block that is known, and those behind it.

    front -> recorder    packets of these, with the keys of all blocks; Forget, Mark
    recorder -> front    Forgotten, Recorded
"""

from __future__ import annotations

import msgspec

from tierkv.core.keys import KEY_BYTES

FORMAT = 1
SHORT_KEY_BYTES = 8
"""Of a key, the first bytes. Among a hundred million blocks two are alike with a chance of one in four thousand."""


class Line(msgspec.Struct, frozen=True, tag_field="line", tag=str.lower, kw_only=True):
    pass


class Begun(Line, frozen=True, kw_only=True):
    format: int
    time: float


class Group(Line, frozen=True, kw_only=True):
    """`group` is the digest, `block_bytes` those of all ranks, `salt` digits of the salt's digest, empty for none."""

    group: bytes
    name: str
    fingerprint: str
    salt: str
    block_tokens: int
    block_bytes: int


class Asked(Line, frozen=True, kw_only=True):
    """`blocks` were asked for, and the first `hit` of them leased. `keys` are short and packed, those behind the block
    `after`; empty: from the first."""

    time: float
    group: bytes
    blocks: int
    hit: int
    after: bytes = b""
    keys: bytes


class Stored(Line, frozen=True, kw_only=True):
    """`stored` of the prompt's `blocks` were written, the others were there."""

    time: float
    group: bytes
    blocks: int
    stored: int
    after: bytes = b""
    keys: bytes


class Missing(Line, frozen=True, kw_only=True):
    """Here `requests` are missing that came from `since` on: `reason` is of the closed list. no_room: the recorder did
    not keep up; worker_died: it died, and what it had not written went with it; not_found: somebody removed the file
    with them; else, why the file could not be written."""

    since: float
    requests: int
    reason: str


class Forget(Line, frozen=True, kw_only=True):
    """A purge: no line is to be left of groups that are named, that have one of these fingerprints or salts, or that
    hold a block with one of these short keys."""

    job: bytes
    groups: tuple[bytes, ...] = ()
    fingerprints: tuple[str, ...] = ()
    salts: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()


class Forgotten(Line, frozen=True, kw_only=True):
    """So many lines were removed, durably. With a `problem` they were not: it is to be asked for again."""

    job: bytes
    lines: int
    problem: str = ""


class Mark(Line, frozen=True, kw_only=True):
    """Say what came of all that was sent before this."""

    number: int


class Recorded(Line, frozen=True, kw_only=True):
    """A sign of life of the recorder `pid`, and what is new since the one before: of `taken` requests, `written` are in
    the file; `missing`, by reason, are not, or no more. `untold` of all that are missing the file does not say yet.
    `file_bytes` of both files. `problem`: why it can't write now. `mark`: the number of the last Mark that it has
    read."""

    pid: int
    file_bytes: int
    taken: int = 0
    written: int = 0
    missing: dict[str, int] = {}
    untold: dict[str, int] = {}
    problem: str = ""
    mark: int = 0


AnyLine = Begun | Group | Asked | Stored | Missing
AnyPacket = Group | Asked | Stored | Missing | Forget | Mark
AnyAnswer = Forgotten | Recorded


def shorten(keys: bytes) -> bytes:
    """Packed keys, each cut to SHORT_KEY_BYTES."""
    words = memoryview(keys).cast("Q")
    return words[:: KEY_BYTES // SHORT_KEY_BYTES].tobytes()


def split_short(keys: bytes) -> list[bytes]:
    return [keys[at : at + SHORT_KEY_BYTES] for at in range(0, len(keys), SHORT_KEY_BYTES)]
