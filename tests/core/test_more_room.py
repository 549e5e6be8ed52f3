from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.core.test_ghosts import ghost_of
from tierkv.core.ghosts import Ghost
from tierkv.core.more_room import FRESH_SECONDS, MAX_STRETCHES, STRETCH_SECONDS, MoreRoom
from tierkv.core.reasons import Reason

LATE = 1e9


class Tier:
    """What went from it, a byte a block."""

    def __init__(self) -> None:
        self.room = MoreRoom(lambda ghost: ghost.blocks)

    def lose(self, blocks: int, at: float) -> Ghost:
        ghost = replace(ghost_of(0, 1), blocks=blocks, evicted_at=at)
        self.room.changed(ghost, 1)
        return ghost


def test_what_went_later_and_is_still_gone_had_to_fit_as_well() -> None:
    tier = Tier()
    tier.lose(5, 0.0)
    ghost = tier.lose(10, 100.0)
    back = tier.lose(100, 200.0)
    tier.lose(1_000, 300.0)
    assert tier.room.needed(ghost, LATE) == 1_110
    tier.room.changed(back, -1)
    assert tier.room.needed(ghost, LATE + FRESH_SECONDS) == 1_010


def test_within_one_stretch_what_goes_is_taken_to_go_evenly() -> None:
    tier = Tier()
    tier.lose(400, 0.0)
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=STRETCH_SECONDS / 4), LATE) == 300


@pytest.mark.parametrize("reason", [Reason.EXPIRED, Reason.OPERATOR, Reason.CHECKSUM, Reason.NVME_DEGRADED])
def test_room_is_no_help_for_what_went_for_another_reason_nor_does_that_take_any(reason: Reason) -> None:
    tier = Tier()
    ghost = tier.lose(10, 100.0)
    other = replace(ghost, reason=reason, evicted_at=200.0)
    tier.room.changed(other, 1)
    assert tier.room.needed(ghost, LATE) == 10
    assert tier.room.needed(other, LATE) is None


def test_of_what_nothing_is_known_nothing_is_said() -> None:
    tier = Tier()
    assert tier.room.needed(ghost_of(0, 1), LATE) is None
    tier.lose(10, 100.0)
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=99.0), LATE) is None
    assert tier.room.needed(replace(ghost_of(0, 1), evicted_at=101.0, tier="nvme"), LATE) is None


def test_stretches_are_bounded_and_a_day_of_them_stays() -> None:
    tier = Tier()
    ghosts = [tier.lose(1, number * STRETCH_SECONDS) for number in range(3 * MAX_STRETCHES)]
    assert tier.room.needed(ghosts[-1], LATE) == 1
    assert tier.room.needed(ghosts[-8_640], LATE) == 8_640
    assert tier.room.needed(ghosts[0], LATE) is None
    tier.room.changed(ghosts[0], -1)  # so long ago that nobody counts it
    assert tier.room.needed(ghosts[-8_640], LATE) == 8_640
    tier.lose(7, 1e12)
    assert tier.room.needed(ghosts[-1], LATE) is None


def test_it_is_what_a_list_of_ghosts_says() -> None:
    draw, tier, ghosts = random.Random(3), Tier(), []
    now = 0.0
    for _ in range(2_000):
        now += STRETCH_SECONDS * draw.choice((1, 1, 7))
        ghosts.append(tier.lose(draw.randrange(1, 9), now))
        if draw.random() < 0.6:
            tier.room.changed(ghosts.pop(draw.randrange(len(ghosts))), -1)
        if ghosts:
            asked = draw.choice(ghosts)
            newer = sum(ghost.blocks for ghost in ghosts if ghost.evicted_at >= asked.evicted_at)
            assert tier.room.needed(asked, now) == newer
