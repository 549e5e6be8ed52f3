"""The table of an extent's copy in a tier of files: each row, and that nothing else can happen."""

from __future__ import annotations

from itertools import product

import pytest

from tierkv.core.residency import TRANSITIONS, FileEvent, FileState, next_state
from tierkv.errors import BrokenInvariant

# What is allowed, written down a second time, by what it means.
STORIES = [
    ("found on disk at start", [FileEvent.RECOVERED], FileState.PRESENT),
    ("written", [FileEvent.ADMIT, FileEvent.ISSUE, FileEvent.FLUSHED], FileState.PRESENT),
    ("given up before it was written", [FileEvent.ADMIT, FileEvent.DROP], FileState.ABSENT),
    (
        "written again, since the worker died before it told",
        [FileEvent.ADMIT, FileEvent.ISSUE, FileEvent.WORKER_DIED, FileEvent.ISSUE, FileEvent.FLUSHED],
        FileState.PRESENT,
    ),
    (
        "the worker died and the extent is no longer wanted",
        [FileEvent.ADMIT, FileEvent.ISSUE, FileEvent.WORKER_DIED, FileEvent.DROP],
        FileState.ABSENT,
    ),
    (
        "a failed write may have left a file, so it is removed",
        [FileEvent.ADMIT, FileEvent.ISSUE, FileEvent.FAILED, FileEvent.REMOVED],
        FileState.ABSENT,
    ),
    ("evicted", [FileEvent.RECOVERED, FileEvent.EVICT, FileEvent.REMOVED], FileState.ABSENT),
    ("found damaged", [FileEvent.RECOVERED, FileEvent.LOST, FileEvent.REMOVED], FileState.ABSENT),
    ("removed by another node", [FileEvent.RECOVERED, FileEvent.FORGOTTEN], FileState.ABSENT),
    ("kept, as another node used it", [FileEvent.RECOVERED, FileEvent.EVICT, FileEvent.KEPT], FileState.PRESENT),
    (
        "not copied to the disk tier after all",
        [FileEvent.ADMIT, FileEvent.ISSUE, FileEvent.ABANDONED],
        FileState.ABSENT,
    ),
]


@pytest.mark.parametrize(("events", "end"), [story[1:] for story in STORIES], ids=[story[0] for story in STORIES])
def test_a_copy_can_be(events: list[FileEvent], end: FileState) -> None:
    state = FileState.ABSENT
    for event in events:
        state = next_state(state, event, "a test")
    assert state is end


def test_the_stories_use_every_row_and_every_event() -> None:
    used = set()
    for _, events, _ in STORIES:
        state = FileState.ABSENT
        for event in events:
            used.add((state, event))
            state = next_state(state, event, "a test")
    assert used == set(TRANSITIONS)
    assert {event for _, event in used} == set(FileEvent)


@pytest.mark.parametrize(("state", "event"), sorted(set(product(FileState, FileEvent)) - set(TRANSITIONS)))
def test_what_is_not_in_the_table_is_a_bug_that_carries_its_story(state: FileState, event: FileEvent) -> None:
    with pytest.raises(BrokenInvariant, match=f"{state}.*{event}.*extent so and so"):
        next_state(state, event, "extent so and so")


def test_from_every_state_a_copy_can_go_away_again() -> None:
    for state in FileState:
        reachable, frontier = {state}, [state]
        while frontier:
            at = frontier.pop()
            following = {end for (start, _), end in TRANSITIONS.items() if start is at} - reachable
            reachable |= following
            frontier += following
        assert FileState.ABSENT in reachable
