"""Operations on the files of an extent: what is under way for each rank, and how it ended for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.core.extent import Extent
from tierkv.core.reasons import Reason


@dataclass(slots=True, eq=False)
class WriteOp:
    """One rank's file is being written."""

    extent: Extent
    rank: int


@dataclass(slots=True, eq=False)
class RemoveOp:
    """One rank's file is being removed."""

    extent: Extent
    rank: int
    reason: Reason | None
    aside: Reason | None = None  # the file is kept in quarantine, for this reason
    unless_used_since: float = math.inf


@dataclass(slots=True)
class Outcome:
    """Of a write, until the last rank's has ended."""

    by_rank: dict[int, int] = field(default_factory=dict)  # bytes of the files that are there
    reason: Reason | None = None  # of a rank that failed


@dataclass(frozen=True, slots=True)
class Ended:
    """A write of all ranks, in files of so many bytes; with a `reason` it has failed, and there may be other files."""

    extent: Extent
    by_rank: Mapping[int, int]
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A removal of all ranks. Files of the `kept` ranks are still there: another node used them, last at that time."""

    extent: Extent
    kept: Mapping[int, float]
    is_kept: bool  # all ranks' are
    num_bytes: int
