"""Where an extent's file stands in a tier, as a table: what is not in it is a bug that carries its story.

All ranks of an extent move together, so that the state is the extent's; the operations behind it are one per rank. One
table serves NVMe and the disk tier. On a disk that other nodes use a file may be found at any time (recovered), go
without us (forgotten), be kept as another node used it, and a failed write leaves nothing that would have to be removed
(abandoned).

                 admit           issue            flushed
    ABSENT ---------------> QUEUED -------> WRITING -------> PRESENT
      ^  ^                    |  ^             |  |             |
      |  |       dropped      |  | worker died |  | failed      | evict, lost
      |  +--------------------+  +-------------+  v             v
      |                                         REMOVING <------+
      +-------------------------------------------+  removed

    on the disk tier besides   PRESENT -> ABSENT  forgotten   REMOVING -> PRESENT  kept   WRITING -> ABSENT  abandoned
"""

from __future__ import annotations

from enum import StrEnum

from tierkv.errors import BrokenInvariant


class FileState(StrEnum):
    ABSENT = "absent"
    QUEUED = "queued"
    WRITING = "writing"
    PRESENT = "present"
    REMOVING = "removing"


class FileEvent(StrEnum):
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
    FORGOTTEN = "forgotten"
    KEPT = "kept"
    ABANDONED = "abandoned"


TRANSITIONS: dict[tuple[FileState, FileEvent], FileState] = {
    (FileState.ABSENT, FileEvent.RECOVERED): FileState.PRESENT,
    (FileState.ABSENT, FileEvent.ADMIT): FileState.QUEUED,
    (FileState.QUEUED, FileEvent.DROP): FileState.ABSENT,
    (FileState.QUEUED, FileEvent.ISSUE): FileState.WRITING,
    (FileState.WRITING, FileEvent.WORKER_DIED): FileState.QUEUED,
    (FileState.WRITING, FileEvent.FLUSHED): FileState.PRESENT,
    (FileState.WRITING, FileEvent.FAILED): FileState.REMOVING,
    (FileState.PRESENT, FileEvent.EVICT): FileState.REMOVING,
    (FileState.PRESENT, FileEvent.LOST): FileState.REMOVING,
    (FileState.REMOVING, FileEvent.REMOVED): FileState.ABSENT,
    (FileState.PRESENT, FileEvent.FORGOTTEN): FileState.ABSENT,
    (FileState.REMOVING, FileEvent.KEPT): FileState.PRESENT,
    (FileState.WRITING, FileEvent.ABANDONED): FileState.ABSENT,
}


def next_state(state: FileState, event: FileEvent, story: object) -> FileState:
    """`story` is what a broken invariant tells of: it is made into words only then."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise BrokenInvariant(f"the copy is {state}, so {event} can't happen: {story}")
    return following
