"""Names below the data directory: made from digests only, so that no name from outside ever becomes a path.

models/<fingerprint>/<group>/<rank>/<first 2 hex of the key>/<key>.kv
       64 hex        64 hex  0..65535                        64 hex
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.core.identity import GROUP_KEY_BYTES
from tierkv.core.keys import KEY_BYTES

MODELS, TEMP, QUARANTINE, INDEX, DIGESTS = "models", "tmp", "quarantine", "index", "digests"
PURGES, PINS, JOURNAL, STARTS, VERDICTS = "purges", "pins", "journal", "starts", "verdicts"
DISK_INDEX, DISK_PURGES = "disk-index", "disk-purges"  # a node's own, about the disk directory
EXTENT_SUFFIX = ".kv"
MAX_RANK = 65_535

Parts = tuple[str, ...]  # a path below the data directory, one component each

_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANK = re.compile(r"0|[1-9][0-9]{0,4}")


class NamesExtent(Protocol):
    """What Write, Read, Remove, SetAside and TouchRow have in common."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def group(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def key(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ExtentName:
    """The extent of one rank, and where its file lies. Raises ValueError for what can't be one."""

    fingerprint: str
    group: bytes
    rank: int
    key: bytes

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.fingerprint):
            raise ValueError(f"a fingerprint is 64 hexadecimal digits, not {self.fingerprint!r}")
        if len(self.group) != GROUP_KEY_BYTES or len(self.key) != KEY_BYTES:
            raise ValueError("group and key are digests of 32 bytes")
        if not 0 <= self.rank <= MAX_RANK:
            raise ValueError(f"rank {self.rank} is not in 0 .. {MAX_RANK}")

    @classmethod
    def of(cls, named: NamesExtent) -> ExtentName:
        return cls(named.fingerprint, named.group, named.rank, named.key)

    @classmethod
    def parse(cls, parts: Sequence[str]) -> ExtentName | None:
        """The extent that these parts name, None when they aren't a name that tierkv makes."""
        if len(parts) != 6:
            return None
        models, fingerprint, group, rank, shelf, file = parts
        key = file.removesuffix(EXTENT_SUFFIX)
        if models != MODELS or not file.endswith(EXTENT_SUFFIX) or not key.startswith(shelf) or len(shelf) != 2:
            return None
        if not all(map(_DIGEST.fullmatch, (fingerprint, group, key))) or not _RANK.fullmatch(rank):
            return None
        if int(rank) > MAX_RANK:
            return None
        return cls(fingerprint, bytes.fromhex(group), int(rank), bytes.fromhex(key))

    @property
    def folder(self) -> Parts:
        return (*namespace_parts(self.fingerprint, self.group, self.rank), self.key[:1].hex())

    @property
    def file(self) -> str:
        return self.key.hex() + EXTENT_SUFFIX

    @property
    def parts(self) -> Parts:
        return (*self.folder, self.file)

    def __str__(self) -> str:
        return "/".join(self.parts)


def model_parts(fingerprint: str) -> Parts:
    if not _DIGEST.fullmatch(fingerprint):
        raise ValueError(f"a fingerprint is 64 hexadecimal digits, not {fingerprint!r}")
    return (MODELS, fingerprint)


def group_parts(fingerprint: str, group: bytes) -> Parts:
    if len(group) != GROUP_KEY_BYTES:
        raise ValueError("a group is a digest of 32 bytes")
    return (*model_parts(fingerprint), group.hex())


def namespace_parts(fingerprint: str, group: bytes, rank: int) -> Parts:
    return (*group_parts(fingerprint, group), str(rank))
