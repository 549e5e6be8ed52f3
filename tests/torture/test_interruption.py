"""A signal is raised where it may be, and only once; the second one at once."""

from __future__ import annotations

import os
import queue
import signal

import pytest

from tierkv.torture.interruption import in_slices, noted_signals, raise_if_interrupted
from tierkv.torture.waits import wait_until


def _signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_raised_by_the_next_wait_and_what_cleans_up_may_wait() -> None:
    with noted_signals():
        _signal()
        with pytest.raises(KeyboardInterrupt):
            wait_until(lambda: True, "it is so")
        assert wait_until(lambda: True, "it is so")


def test_a_second_signal_is_raised_at_once() -> None:
    with noted_signals():
        _signal()
        with pytest.raises(KeyboardInterrupt):
            _signal()


def test_a_wait_in_slices_is_interrupted_within_one() -> None:
    def wait(_: float) -> None:
        _signal()
        raise queue.Empty

    with noted_signals(), pytest.raises(KeyboardInterrupt):
        in_slices(wait, 1_000.0, queue.Empty)


def test_a_wait_in_slices_ends_with_its_own_error() -> None:
    asked: list[float] = []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        raise queue.Empty

    with pytest.raises(queue.Empty):
        in_slices(wait, 0.5, queue.Empty)
    assert sum(asked) == pytest.approx(0.5)


def test_without_a_signal_nothing_is_raised() -> None:
    with noted_signals():
        raise_if_interrupted()
