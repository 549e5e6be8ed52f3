"""Where an extent's file stands, as a table: what is not in it is a bug that carries its story.

All ranks of an extent move together, so that the state is the extent's; the operations behind it are one per rank.

                 admit           issue            flushed
    ABSENT ---------------> QUEUED -------> WRITING -------> PRESENT
      ^  ^                    |  ^             |  |             |
      |  |       dropped      |  | worker died |  | failed      | evict, lost
      |  +--------------------+  +-------------+  v             v
      |                                         REMOVING <------+
      +-------------------------------------------+  removed
"""

from __future__ import annotations

from enum import StrEnum

from tierkv.errors import BrokenInvariant


class NvmeState(StrEnum):
    ABSENT = "absent"
    QUEUED = "queued"
    WRITING = "writing"
    PRESENT = "present"
    REMOVING = "removing"


class NvmeEvent(StrEnum):
    RECOVERED = "recovered"
    ADMIT = "admit"
    DROP = "drop"
    ISSUE = "issue"
    WORKER_DIED = "worker_died"
    FLUSHED = "flushed"
    FAILED = "failed"
    EVICT = "evict"
    LOST = "lost"
    REMOVED = "removed"


TRANSITIONS: dict[tuple[NvmeState, NvmeEvent], NvmeState] = {
    (NvmeState.ABSENT, NvmeEvent.RECOVERED): NvmeState.PRESENT,
    (NvmeState.ABSENT, NvmeEvent.ADMIT): NvmeState.QUEUED,
    (NvmeState.QUEUED, NvmeEvent.DROP): NvmeState.ABSENT,
    (NvmeState.QUEUED, NvmeEvent.ISSUE): NvmeState.WRITING,
    (NvmeState.WRITING, NvmeEvent.WORKER_DIED): NvmeState.QUEUED,
    (NvmeState.WRITING, NvmeEvent.FLUSHED): NvmeState.PRESENT,
    (NvmeState.WRITING, NvmeEvent.FAILED): NvmeState.REMOVING,
    (NvmeState.PRESENT, NvmeEvent.EVICT): NvmeState.REMOVING,
    (NvmeState.PRESENT, NvmeEvent.LOST): NvmeState.REMOVING,
    (NvmeState.REMOVING, NvmeEvent.REMOVED): NvmeState.ABSENT,
}


def next_state(state: NvmeState, event: NvmeEvent, story: object) -> NvmeState:
    """`story` is what a broken invariant tells of: it is made into words only then."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise BrokenInvariant(f"nvme copy is {state}, so {event} can't happen: {story}")
    return following
