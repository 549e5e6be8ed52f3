from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.test_ghosts import ghost_of
from tierkv.core.ghosts import Ghost
from tierkv.core.more_room import MARK_SECONDS, MAX_MARKS, MoreRoom
from tierkv.core.reasons import Reason

HOST = ("host",)


class Tier:
    """How much it has evicted, and what is made of that."""

    def __init__(self) -> None:
        self.evicted = 0
        self.room = MoreRoom(lambda _tier: self.evicted)

    def evict(self, num_bytes: int, now: float) -> Ghost:
        self.evicted += num_bytes
        self.room.mark(HOST, now)
        return replace(ghost_of(0, 1), evicted_at=now)


def test_what_was_evicted_since_is_what_was_missing() -> None:
    tier = Tier()
    tier.evict(5, 0.0)
    ghost = tier.evict(10, 100.0)
    tier.evict(100, 200.0)
    tier.evict(1_000, 300.0)
    assert tier.room.needed(ghost) == 1_100


def test_between_two_marks_evictions_are_taken_to_be_even() -> None:
    tier = Tier()
    tier.evict(0, 0.0)
    tier.evict(1_000, 100.0)
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=25.0)) == 750


@pytest.mark.parametrize("reason", [Reason.EXPIRED, Reason.OPERATOR, Reason.CHECKSUM, Reason.NVME_DEGRADED])
def test_room_is_no_help_for_what_went_for_another_reason(reason: Reason) -> None:
    tier = Tier()
    ghost = tier.evict(10, 100.0)
    assert tier.room.needed(ghost) == 0
    assert tier.room.needed(replace(ghost, reason=reason)) is None


def test_of_what_went_before_anybody_counted_nothing_is_said() -> None:
    tier = Tier()
    assert tier.room.needed(ghost_of(0, 1)) is None
    tier.evict(10, 100.0)
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=99.0)) is None
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=101.0, tier="nvme")) is None


def test_marks_are_bounded_and_the_latest_stay() -> None:
    tier = Tier()
    for number in range(2 * MAX_MARKS):
        ghost = tier.evict(1, number * MARK_SECONDS)
    assert tier.room.needed(ghost) == 0
    assert tier.room.needed(replace(ghost, evicted_at=ghost.evicted_at - 100 * MARK_SECONDS)) == 100
    assert tier.room.needed(replace(ghost, evicted_at=0.0)) is None
