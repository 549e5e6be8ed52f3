from __future__ import annotations

from tierkv.workers.roll import Roll


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_thread_is_at_shows_with_its_time_until_it_is_over() -> None:
    clock = Clock()
    roll = Roll(clock)
    post = roll.post("io-0")
    with post.at("read"):
        clock.now += 30.0
        (busy,) = roll.busy_for(20.0)
        assert str(busy) == "read of thread io-0 has been running for 30 s"
        assert roll.busy_for(30.0) == []
    assert roll.busy_for(0.0) == []


def test_what_takes_longest_comes_first_and_who_waits_for_work_is_at_nothing() -> None:
    clock = Clock()
    roll = Roll(clock)
    first, second = roll.post("io-0"), roll.post("flusher")
    roll.post("io-1")
    with first.at("write"):
        clock.now += 5.0
        with second.at("flush"):
            clock.now += 5.0
            assert [busy.thread for busy in roll.busy_for(1.0)] == ["io-0", "flusher"]


def test_an_operation_that_raises_has_ended_as_well() -> None:
    roll = Roll(Clock())
    post = roll.post("io-0")
    try:
        with post.at("read"):
            raise ValueError
    except ValueError:
        pass
    assert post.busy() is None
