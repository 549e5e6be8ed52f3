"""Steps of an engine, and what of their time is told as a prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tierkv.core.prefill_rates import PrefillSample
from tierkv.integrations.connector.prefill_clock import LEAST_TOKENS, MOST_STEPS, Chunk, PrefillClock


class Told:
    """The group of a prompt."""

    def __init__(self) -> None:
        self.samples: list[PrefillSample] = []

    def report_prefill(self, *, tokens: int, first_token: int, seconds: float) -> None:
        self.samples.append(PrefillSample(tokens, first_token, seconds))


@pytest.fixture
def group() -> Any:
    return Told()


class Steps:
    """A clock of steps, and the time on it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._clock = PrefillClock(lambda: self.now)

    def begin(self, chunks: Sequence[Chunk], tokens: int, *, now: float) -> None:
        self.now = now
        self._clock.begin(chunks, tokens)

    def end(self, now: float) -> None:
        self.now = now
        self._clock.end()


@pytest.fixture
def clock() -> Steps:
    return Steps()


def test_a_step_that_computes_one_prompt_is_its_time(clock: Steps, group: Any) -> None:
    clock.begin([Chunk(group, 4_096, 2_048)], 2_048, now=10.0)
    clock.end(10.5)
    assert group.samples == [PrefillSample(2_048, 4_096, pytest.approx(0.5))]


def test_answers_in_the_step_take_their_part_of_it(clock: Steps, group: Any) -> None:
    """Of 2,048 tokens 48 are answers'."""
    clock.begin([Chunk(group, 0, 2_000)], 2_048, now=10.0)
    clock.end(11.024)
    assert group.samples == [PrefillSample(2_000, 0, pytest.approx(1.0))]


def test_several_prompts_are_told_alike_whatever_their_positions(clock: Steps, group: Any) -> None:
    chunks = [Chunk(group, 0, 500), Chunk(group, 40_000, 1_000), Chunk(group, 3_000, 500)]
    clock.begin(chunks, 2_000, now=10.0)
    clock.end(12.0)
    assert sum(sample.seconds for sample in group.samples) == pytest.approx(2.0)
    first, *others = [sample.rate for sample in group.samples]
    assert others == pytest.approx([first] * 2), "one engine has one rate"
    assert group.samples[1].seconds > 3.5 * group.samples[0].seconds


def test_prompts_without_the_cache_take_their_time_and_are_not_told_of(clock: Steps, group: Any) -> None:
    clock.begin([Chunk(group, 0, 1_000), Chunk(None, 0, 1_000)], 2_000, now=10.0)
    clock.end(11.0)
    assert group.samples == [PrefillSample(1_000, 0, pytest.approx(0.5))]


@pytest.mark.parametrize(
    ("chunks", "tokens"), [((LEAST_TOKENS - 1,), LEAST_TOKENS - 1), ((1_000,), 1_400), ((), 500), ((), 0)]
)
def test_a_step_with_few_tokens_of_prompts_or_many_answers_tells_nothing(
    clock: Steps, group: Any, chunks: tuple[int, ...], tokens: int
) -> None:
    clock.begin([Chunk(group, 0, count) for count in chunks], tokens, now=10.0)
    clock.end(11.0)
    assert group.samples == []


def test_an_engine_that_waits_for_work_loses_no_rate(clock: Steps, group: Any) -> None:
    for second in (10.0, 500.0, 9_000.0):
        clock.begin([Chunk(group, 0, 2_048)], 2_048, now=second)
        clock.end(second + 0.5)
    assert [sample.seconds for sample in group.samples] == pytest.approx([0.5] * 3)


def test_an_engine_that_plans_ahead_is_timed_from_one_end_to_the_next(clock: Steps, group: Any) -> None:
    """The second step is begun while the first is still computed."""
    clock.begin([Chunk(group, 0, 1_000)], 1_000, now=10.0)
    clock.begin([Chunk(group, 1_000, 1_000)], 1_000, now=10.01)
    clock.end(10.5)
    clock.begin([], 1, now=10.51)
    clock.end(11.0)
    clock.end(11.02)
    assert [(sample.first_token, sample.seconds) for sample in group.samples] == [
        (0, pytest.approx(0.5)),
        (1_000, pytest.approx(0.5)),
    ]


def test_a_prompt_that_was_planned_while_answers_were_computed_is_timed_from_their_end(
    clock: Steps, group: Any
) -> None:
    clock.begin([], 8, now=10.0)
    clock.begin([Chunk(group, 0, 1_000)], 1_000, now=10.01)
    clock.end(10.25)
    clock.end(10.5)
    assert group.samples == [PrefillSample(1_000, 0, pytest.approx(0.25))]


def test_an_end_without_a_begin_and_steps_without_an_end_are_forgotten(clock: Steps, group: Any) -> None:
    clock.end(9.0)
    for number in range(MOST_STEPS):
        clock.begin([Chunk(group, 0, 1_000)], 1_000, now=10.0 + number)
    clock.begin([Chunk(group, 5_000, 1_000)], 1_000, now=100.0)
    clock.end(100.25)
    assert group.samples == [PrefillSample(1_000, 5_000, pytest.approx(0.25))]
