from __future__ import annotations

import threading
from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.workers.key_queue import FAIR_TURN, KeyOrder, KeyQueue, Operation, Urgency

SECONDS = 20.0


def void(_: object) -> None:
    """For a function whose result does not matter, where one without a result is wanted."""


def operation(key: str, urgency: Urgency = Urgency.READ) -> Operation:
    return Operation(key, urgency, lambda: None)


class Schedule:
    """Plays a KeyOrder by hand: which operations run is known at every step, so that every promise can be checked."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.order = KeyOrder(num_threads)
        self.added: list[Operation] = []
        self.running: list[Operation] = []
        self.finished: list[Operation] = []

    def add(self, new: Operation) -> None:
        self.order.add(new)
        self.added.append(new)

    def take(self) -> None:
        if len(self.running) == self.num_threads:
            return
        taken = self.order.take()
        if taken is None:
            assert not self._could_run()
            return
        assert taken in self._could_run()
        self.running.append(taken)

    def finish(self, index: int) -> None:
        if self.running:
            done = self.running.pop(index % len(self.running))
            self.order.finish(done)
            self.finished.append(done)

    def _could_run(self) -> list[Operation]:
        """By the promises alone: the oldest of its key, its key not running, and a thread left if it yields."""
        started = set(map(id, self.running + self.finished))
        busy = {running.key for running in self.running}
        yielding = sum(running.urgency.yields for running in self.running)
        oldest: dict[object, Operation] = {}
        for candidate in self.added:
            if id(candidate) not in started:
                oldest.setdefault(candidate.key, candidate)
        return [
            candidate
            for candidate in oldest.values()
            if candidate.key not in busy and not (candidate.urgency.yields and yielding >= max(1, self.num_threads - 1))
        ]


@given(
    num_threads=st.integers(min_value=1, max_value=4),
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.sampled_from(list(Urgency))),
            st.just("take"),
            st.integers(min_value=0, max_value=3),
        ),
        max_size=60,
    ),
)
def test_order_per_key_holds_and_nothing_is_lost(
    num_threads: int, steps: list[tuple[str, Urgency] | str | int]
) -> None:
    schedule = Schedule(num_threads)
    for step in steps:
        if isinstance(step, tuple):
            schedule.add(operation(*step))
        elif isinstance(step, str):
            schedule.take()
        else:
            schedule.finish(step)
        assert schedule.order.num_waiting == len(schedule.added) - len(schedule.running) - len(schedule.finished)
    while not schedule.order.is_idle:
        schedule.take()
        schedule.finish(0)
    assert sorted(map(id, schedule.finished)) == sorted(map(id, schedule.added))
    for key in "abc":
        of_key = [done for done in schedule.finished if done.key == key]
        assert of_key == [added for added in schedule.added if added.key == key]


def test_reads_go_before_writes_that_came_earlier() -> None:
    order = KeyOrder(num_threads=2)
    for name in "ab":
        order.add(operation(name, Urgency.WRITE))
    order.add(operation("c", Urgency.READ))
    assert [taken.key for taken in (order.take(), order.take()) if taken] == ["c", "a"]


def test_a_read_waits_for_the_write_of_its_own_key() -> None:
    order = KeyOrder(num_threads=2)
    write = operation("a", Urgency.WRITE)
    order.add(write)
    order.add(operation("a", Urgency.READ))
    assert order.take() is write
    assert order.take() is None
    order.finish(write)
    read = order.take()
    assert read is not None
    assert read.urgency == Urgency.READ


def test_writes_leave_one_thread_free() -> None:
    order = KeyOrder(num_threads=3)
    for name in "abc":
        order.add(operation(name, Urgency.WRITE))
    assert [order.take() is not None for _ in range(3)] == [True, True, False]
    order.add(operation("d", Urgency.READ))
    assert order.take() is not None


def test_a_single_thread_writes_too() -> None:
    order = KeyOrder(num_threads=1)
    order.add(operation("a", Urgency.WRITE))
    assert order.take() is not None


def test_a_write_gets_its_turn_among_reads_without_end() -> None:
    order = KeyOrder(num_threads=2)
    order.add(operation("write", Urgency.WRITE))
    for turn in range(FAIR_TURN):
        order.add(operation(f"read {turn}"))
        taken = order.take()
        assert taken is not None
        order.finish(taken)
        if taken.key == "write":
            return
    pytest.fail("the write has starved")


def test_threads_keep_the_order_of_each_key() -> None:
    seen: dict[str, list[int]] = defaultdict(list)
    queue = KeyQueue(num_threads=4)
    for number in range(400):
        key = f"key {number % 7}"
        urgency = list(Urgency)[number % len(Urgency)]
        assert queue.submit(Operation(key, urgency, partial(seen[key].append, number)), timeout_seconds=SECONDS)
    assert queue.wait_idle(SECONDS)
    assert queue.close(SECONDS)
    assert sum(map(len, seen.values())) == 400
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_different_keys_run_side_by_side() -> None:
    queue = KeyQueue(num_threads=3)
    together = threading.Barrier(3)
    for number in range(3):
        queue.submit(Operation(number, Urgency.READ, lambda: void(together.wait(SECONDS))), timeout_seconds=SECONDS)
    assert queue.wait_idle(SECONDS)
    assert not together.broken
    assert queue.close(SECONDS)


def test_a_full_queue_refuses_when_the_time_is_up_and_takes_on_again() -> None:
    may_go = threading.Event()
    queue = KeyQueue(num_threads=1, max_waiting=2)
    blocked = Operation("a", Urgency.READ, lambda: void(may_go.wait(SECONDS)))
    assert all(queue.submit(blocked if n == 0 else operation("a"), timeout_seconds=SECONDS) for n in range(3))
    assert not queue.submit(operation("b"), timeout_seconds=0.01)
    assert not queue.wait_idle(0.01)
    may_go.set()
    assert queue.submit(operation("b"), timeout_seconds=SECONDS)
    assert queue.wait_idle(SECONDS)
    assert queue.close(SECONDS)
    assert not queue.submit(operation("c"), timeout_seconds=SECONDS)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_told() -> None:
    dead: list[str] = []
    told = threading.Event()

    def on_death(name: str) -> None:
        dead.append(name)
        told.set()

    def raise_it() -> None:
        raise KeyError("a bug")

    queue = KeyQueue(num_threads=1, on_death=on_death)
    queue.submit(Operation("a", Urgency.READ, raise_it), timeout_seconds=SECONDS)
    assert told.wait(SECONDS)
    assert dead == ["io-0"]
    assert queue.close(SECONDS)
