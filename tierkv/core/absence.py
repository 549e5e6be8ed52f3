"""Why a block is not in the tree, as far as the books know: a few look-ups by its key, which change nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from tierkv.core.explanation import Left
from tierkv.core.ghosts import Ghost
from tierkv.core.reasons import Reason

if TYPE_CHECKING:
    from tierkv.core.ledger import Ledger


class Absence(StrEnum):
    PENDING = "pending"  # a ticket is writing it
    STAGED = "staged"  # committed: a predecessor or other ranks are missing
    EVICTED = "evicted"  # it left the last tier that had it: evicted, lost, reported bad
    REFUSED = "refused"  # an engine had it and was given no room for it, or it was not worth what would have to go
    PURGED = "purged"  # unknown, and some of its namespace was purged
    UNREACHABLE = "unreachable"  # it is there, and a block before it is not
    UNKNOWN = "unknown"  # never stored, or so long ago that nothing is remembered of it


def find_absence(ledger: Ledger, group: bytes, key: bytes) -> Absence:
    """Of a block that is not in the tree."""
    for of_rank in ledger.writing.values():
        if key in of_rank:
            return Absence.PENDING
    if key in ledger.staged:
        return Absence.STAGED
    ghost, refusal = ledger.ghosts.find(group, key), ledger.refusals.find(group, key)
    if refusal is not None and (ghost is None or ghost.evicted_at <= refusal.at):
        return Absence.REFUSED
    return absence_of(ghost) if ghost is not None else Absence.UNKNOWN


def absence_of(ghost: Ghost) -> Absence:
    """Ghosts tell of what was evicted, and of what was never taken in."""
    return Absence.REFUSED if ghost.reason is Reason.WORTH_LESS else Absence.EVICTED


def find_left(ledger: Ledger, group: bytes, key: bytes) -> Left | None:
    """What is remembered of blocks that are gone or were not taken in, of which the one with this key is the first."""
    ghost = ledger.ghosts.find(group, key)
    if ghost is None:
        return None
    return Left(
        tier=ghost.tier,
        reason=ghost.reason,
        at=ghost.evicted_at,
        tokens=ghost.tokens,
        hits=ghost.hits,
        last_used=ghost.last_cached_use,
    )
