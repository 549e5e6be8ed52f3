"""The real worker held in the middle of a read or a write, while the request, its process or its blocks go away.

What the worker finishes late goes into slots that are still its own, into a file that is removed again, or nowhere; and
whoever comes next gets the right bytes or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.system_calls import hold
from tests.node.kit import ENGINE
from tests.node.whole_node import WholeNode
from tierkv.wire.messages import Acquire, Release

A = list(range(100, 108))  # four blocks of two tokens, one extent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[WholeNode]:
    with WholeNode(tmp_path / "data") as node:
        yield node


# ---- what happens meanwhile


def nothing(node: WholeNode, grant: bytes) -> None:
    """So that what the others show is theirs."""


def given_up(node: WholeNode, grant: bytes) -> None:
    node.ask(Release, grant=grant)


def process_dies(node: WholeNode, grant: bytes) -> None:
    node.kit.service.end_session(ENGINE, node.kit.now)
    node.kit.join(ENGINE)
    node.kit.open(node.identity)


def deadline(node: WholeNode, grant: bytes) -> None:
    node.kit.tick(11.0)


def others_need_room(node: WholeNode, grant: bytes) -> None:
    for number in range(4):
        node.kit.now += 1.0
        node.store([5_000 + 100 * number + at for at in range(8)])


def reported_bad(node: WholeNode, grant: bytes) -> None:
    node.report_bad(A, 1)


def unlinked(node: WholeNode, grant: bytes) -> None:
    node.file(A).unlink()


def given_up_and_room_needed(node: WholeNode, grant: bytes) -> None:
    given_up(node, grant)
    others_need_room(node, grant)


Event = Callable[[WholeNode, bytes], None]

READ_EVENTS: dict[Event, int] = {
    nothing: 4,
    given_up: 4,
    process_dies: 4,
    deadline: 4,
    others_need_room: 4,
    given_up_and_room_needed: 4,
    reported_bad: 0,  # the file is one; its good blocks were nowhere else yet
    unlinked: 4,  # the file is open and goes on to be read; the blocks stay in memory
}
"""And how many blocks can be loaded afterwards."""


@pytest.mark.scenario(
    "B072", then="a load can be given up in the middle of its read: the read ends in slots of its own"
)
@pytest.mark.parametrize(("event", "blocks"), READ_EVENTS.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_read_that_ends_late_harms_nobody(node: WholeNode, event: Event, blocks: int) -> None:
    node.store_flushed(A)
    node.restart()
    grant = b"grant-of-a-read!"
    with hold("preadv") as barrier:
        asked = node.kit.send(Acquire, grant=grant, group=node.group, keys=node.keys(A), deadline_ms=10_000)
        assert node.kit.replies == []
        node.kit.mover.flush()
        barrier.wait_reached()
        event(node, grant)
        node.kit.mover.flush()
    node.pump(lambda: not node.kit.state.num_reads_waiting, "the read has ended")
    node.ask(Release, grant=grant)  # once more, or for the first time
    replies = [reply for reply in node.late if reply.id == asked]
    assert len(replies) == (event is not process_dies)  # nobody is there to be told
    assert node.load(A).blocks == blocks
    node.settle()
    assert node.store(A) == list(range(blocks, 4))
    assert node.load(A).blocks == 4


WRITE_EVENTS: dict[Event, int] = {
    nothing: 4,
    process_dies: 4,
    others_need_room: 4,
    reported_bad: 1,
}
"""And how many blocks can be loaded afterwards, and after a restart."""


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync", "rename"])
@pytest.mark.parametrize(("event", "blocks"), WRITE_EVENTS.items(), ids=lambda one: getattr(one, "__name__", one))
def test_a_write_that_ends_late_stores_what_was_committed_or_nothing(
    node: WholeNode, operation: str, event: Event, blocks: int
) -> None:
    with hold(operation) as barrier:
        node.store(A)
        node.seal(A)
        node.kit.mover.flush()
        barrier.wait_reached()
        event(node, b"")
        assert node.match(A) == blocks
        assert node.load(A).blocks == blocks
        node.kit.mover.flush()
    node.settle()
    assert node.load(A).blocks == blocks
    node.restart()
    assert node.load(A).blocks == blocks
    assert node.store(A) == list(range(blocks, 4))
    assert node.load(A).blocks == 4
