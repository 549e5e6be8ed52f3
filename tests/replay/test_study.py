from __future__ import annotations

from multiprocessing import active_children

import pytest

from tests.replay.small import BLOCK_BYTES, trace_of
from tests.replay.test_driver import random_trace
from tierkv.errors import ConfigError
from tierkv.replay.capacity import Capacity
from tierkv.replay.driver import Setup
from tierkv.replay.study import Question, study

SETUP = Setup(policy="", host_bytes=0, extent_blocks=1)


def question(*capacities: str, nvme: str | None = None) -> Question:
    return Question(
        capacities=[Capacity.parse(text) for text in capacities],
        policies=("lru",),
        setup=SETUP,
        nvme=Capacity.parse(nvme) if nvme else None,
    )


def test_more_room_is_never_less_in_the_bounds_and_a_policy_lies_between_nothing_and_them() -> None:
    trace = random_trace(5)
    made = study(trace, question("5%", "20%", "60%"))
    optima = [point.optimum.hit_tokens for point in made.points if point.optimum]
    assert optima == sorted(optima)
    for point in made.points:
        assert point.optimum is not None
        assert 0 <= point.outcomes[0].hit_tokens <= point.optimum.hit_tokens <= made.infinite.hit_tokens


def test_processes_side_by_side_come_to_the_same() -> None:
    trace = random_trace(6)
    asked = question("10%", "30%", nvme="50%")
    told: list[tuple[int, int]] = []
    one = study(trace, asked)
    two = study(trace, asked, jobs=2, progress=lambda done, total: told.append((done, total)))
    assert one.points == two.points
    assert told == [(1, 2), (2, 2)]


def test_whoever_looks_no_further_leaves_no_process_behind() -> None:
    """As on Ctrl-C, while runs are under way and others wait."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(random_trace(7, prompts=3_000), question("5%", "10%", "20%", "30%", "40%"), jobs=2, progress=interrupt)
    assert active_children() == []


def test_the_optimum_may_use_both_tiers() -> None:
    made = study(trace_of("abcd", "efgh", "abcd"), question("50%", nvme=f"{8 * BLOCK_BYTES}"))
    assert made.points[0].optimum == made.infinite


def test_a_study_of_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        study(trace_of("a"), question())
