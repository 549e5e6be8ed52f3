"""What a process grows by after it has settled."""

from __future__ import annotations

import os

import pytest

from tierkv.torture import memory
from tierkv.torture.memory import MemoryWatch


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory at one look after the other, each of them 10 s after the one before."""
    found: list[int] = []
    now = [0.0]

    def take(_pid: int) -> int:
        return found.pop(0)

    def later() -> float:
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(memory, "memory_bytes", take)
    monkeypatch.setattr(memory.time, "monotonic", later)
    return found


def test_what_a_process_takes_while_it_starts_does_not_count(sizes: list[int]) -> None:
    watch = MemoryWatch(most_growth_bytes=100)
    sizes += [5_000, 5_050, 5_100]
    assert [watch.look({"front": 1}) for _ in range(4)] == [[], [], [], []]


def test_growth_beyond_the_limit_is_said(sizes: list[int]) -> None:
    watch = MemoryWatch(most_growth_bytes=100)
    sizes += [5_000, 5_101]
    assert [watch.look({"front": 1}) for _ in range(2)] == [[], []]
    (problem,) = watch.look({"front": 1})
    assert problem == "front has grown from 5,000 to 5,101 bytes within 20 s"


def test_another_process_under_the_same_name_begins_afresh(sizes: list[int]) -> None:
    watch = MemoryWatch(most_growth_bytes=100)
    sizes += [5_000, 9_000]
    for pid in (1, 1, 2, 2):
        assert watch.look({"front": pid}) == []


def test_this_process_takes_memory_and_one_that_is_gone_none() -> None:
    assert (memory.memory_bytes(os.getpid()) or 0) > 2**20
    assert memory.memory_bytes(2**30) is None
