"""Why a block is not in the tree, as far as the books know: a few look-ups by its key, which change nothing."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.core.ledger import Ledger


class Absence(StrEnum):
    PENDING = "pending"  # a ticket is writing it
    STAGED = "staged"  # committed: a predecessor or other ranks are missing
    REFUSED = "refused"  # an engine had it and was given no room for it
    PURGED = "purged"  # unknown, and some of its namespace was purged
    UNREACHABLE = "unreachable"  # it is there, and a block before it is not
    UNKNOWN = "unknown"  # never stored, or so long ago that nothing is remembered of it


def find_absence(ledger: Ledger, group: bytes, key: bytes) -> Absence:
    """Of a block that is not in the tree."""
    if any(key in of_rank for of_rank in ledger.writing.values()):
        return Absence.PENDING
    if key in ledger.staged:
        return Absence.STAGED
    if ledger.refusals.find(group, key) is not None:
        return Absence.REFUSED
    return Absence.UNKNOWN
