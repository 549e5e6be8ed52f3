from __future__ import annotations

import pytest

from tierkv.node.watchdog import Verdict, Watchdog


def run(watchdog: Watchdog, seconds: float, *, now: float, answers: bool) -> tuple[list[Verdict], float]:
    """What comes of looking whenever it is due, for so long."""
    verdicts = []
    end = now + seconds
    while (due := watchdog.next_due()) is not None and due <= end:
        now = due
        if (verdict := watchdog.look(now)) is not None:
            verdicts.append(verdict)
        if answers:
            watchdog.heard()
    return verdicts, now


def test_who_answers_is_asked_again_and_again() -> None:
    watchdog = Watchdog(30.0)
    watchdog.begin(0.0)
    verdicts, _ = run(watchdog, 3_600.0, now=0.0, answers=True)
    assert set(verdicts) == {Verdict.ASK}
    assert len(verdicts) == 3_600 / 5


def test_who_does_not_answer_is_hung_after_the_deadline_and_not_much_later() -> None:
    watchdog = Watchdog(30.0)
    watchdog.begin(0.0)
    verdicts, now = run(watchdog, 3_600.0, now=0.0, answers=False)
    assert verdicts[-1] is Verdict.HUNG
    assert 30.0 < now <= 41.0
    assert watchdog.next_due() is None


def test_a_beginning_may_take_longer() -> None:
    watchdog = Watchdog(30.0)
    watchdog.begin(0.0, patience=10.0)
    verdicts, now = run(watchdog, 3_600.0, now=0.0, answers=False)
    assert verdicts[-1] is Verdict.HUNG
    assert 300.0 < now <= 311.0
    watchdog.begin(now)
    _, later = run(watchdog, 3_600.0, now=now, answers=False)
    assert later - now <= 41.0


def test_a_suspension_of_hours_is_one_step_of_silence() -> None:
    watchdog = Watchdog(30.0)
    watchdog.begin(0.0)
    assert watchdog.look(5.0) is Verdict.ASK
    watchdog.heard()
    assert watchdog.look(7_205.0) is Verdict.ASK
    watchdog.heard()
    assert watchdog.silence_seconds == 0.0
    verdicts, _ = run(watchdog, 60.0, now=7_205.0, answers=True)
    assert set(verdicts) == {Verdict.ASK}


def test_who_was_stopped_together_with_its_ward_gives_it_time_to_come_back() -> None:
    watchdog = Watchdog(30.0)
    watchdog.begin(0.0)
    for now in (3_600.0, 7_200.0):  # two looks, an hour apart, and no answer yet
        assert watchdog.look(now) is Verdict.ASK
    assert watchdog.silence_seconds == 10.0  # one step, of the time after it was asked


def test_nobody_is_given_up_before_being_asked_three_times() -> None:
    watchdog = Watchdog(0.1)
    watchdog.begin(0.0)
    verdicts, _ = run(watchdog, 60.0, now=0.0, answers=False)
    assert verdicts == [Verdict.ASK, Verdict.ASK, Verdict.ASK, Verdict.HUNG]


def test_without_a_deadline_nobody_is_watched() -> None:
    watchdog = Watchdog(0.0)
    watchdog.begin(0.0)
    assert watchdog.next_due() is None
    assert watchdog.look(1e9) is None


@pytest.mark.parametrize("deadline", [0.5, 1.0, 3.0])
def test_no_look_comes_sooner_than_a_second_after_the_one_before(deadline: float) -> None:
    assert Watchdog(deadline).step_seconds == 1.0
