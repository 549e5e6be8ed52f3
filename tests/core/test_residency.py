"""The table of an extent's copy on NVMe: each row, and that nothing else can happen."""

from __future__ import annotations

from itertools import product

import pytest

from tierkv.core.residency import TRANSITIONS, NvmeEvent, NvmeState, next_state
from tierkv.errors import BrokenInvariant

# What is allowed, written down a second time, by what it means.
STORIES = [
    ("found on disk at start", [NvmeEvent.RECOVERED], NvmeState.PRESENT),
    ("written", [NvmeEvent.ADMIT, NvmeEvent.ISSUE, NvmeEvent.FLUSHED], NvmeState.PRESENT),
    ("given up before it was written", [NvmeEvent.ADMIT, NvmeEvent.DROP], NvmeState.ABSENT),
    (
        "written again, since the worker died before it told",
        [NvmeEvent.ADMIT, NvmeEvent.ISSUE, NvmeEvent.WORKER_DIED, NvmeEvent.ISSUE, NvmeEvent.FLUSHED],
        NvmeState.PRESENT,
    ),
    (
        "the worker died and the extent is no longer wanted",
        [NvmeEvent.ADMIT, NvmeEvent.ISSUE, NvmeEvent.WORKER_DIED, NvmeEvent.DROP],
        NvmeState.ABSENT,
    ),
    (
        "a failed write may have left a file, so it is removed",
        [NvmeEvent.ADMIT, NvmeEvent.ISSUE, NvmeEvent.FAILED, NvmeEvent.REMOVED],
        NvmeState.ABSENT,
    ),
    ("evicted", [NvmeEvent.RECOVERED, NvmeEvent.EVICT, NvmeEvent.REMOVED], NvmeState.ABSENT),
    ("found damaged", [NvmeEvent.RECOVERED, NvmeEvent.LOST, NvmeEvent.REMOVED], NvmeState.ABSENT),
]


@pytest.mark.parametrize(("events", "end"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES])
def test_a_copy_can_be(events: list[NvmeEvent], end: NvmeState) -> None:
    state = NvmeState.ABSENT
    for event in events:
        state = next_state(state, event, "a test")
    assert state is end


def test_the_stories_use_every_row_and_every_event() -> None:
    used = set()
    for _, events, _ in STORIES:
        state = NvmeState.ABSENT
        for event in events:
            used.add((state, event))
            state = next_state(state, event, "a test")
    assert used == set(TRANSITIONS)
    assert {event for _, event in used} == set(NvmeEvent)


@pytest.mark.parametrize(("state", "event"), sorted(set(product(NvmeState, NvmeEvent)) - set(TRANSITIONS)))
def test_what_is_not_in_the_table_is_a_bug_that_carries_its_story(state: NvmeState, event: NvmeEvent) -> None:
    with pytest.raises(BrokenInvariant, match=f"{state}.*{event}.*extent so and so"):
        next_state(state, event, "extent so and so")


def test_from_every_state_a_copy_can_go_away_again() -> None:
    for state in NvmeState:
        reachable, frontier = {state}, [state]
        while frontier:
            at = frontier.pop()
            following = {end for (start, _), end in TRANSITIONS.items() if start is at} - reachable
            reachable |= following
            frontier += following
        assert NvmeState.ABSENT in reachable
