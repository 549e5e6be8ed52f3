"""Waiting for a condition: never by time alone, never without an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

from tierkv.torture.interruption import raise_if_interrupted

POLL_SECONDS = 0.02

T = TypeVar("T")


class NeverCame(AssertionError):
    """What was waited for has not come in time."""


def wait_until(condition: Callable[[], T | Literal[False] | None], what: str, timeout_seconds: float = 60.0) -> T:
    """The first true value of `condition`; NeverCame with `what` when none comes in time."""
    deadline = time.monotonic() + timeout_seconds
    raise_if_interrupted()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NeverCame(f"waited {timeout_seconds:g} s until {what}; last seen: {value!r}")
        time.sleep(POLL_SECONDS)  # between two looks at a condition that has a deadline
        raise_if_interrupted()
    return value
