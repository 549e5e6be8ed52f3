"""Each state of a write x each event x both orders of event and completion, on the real service and core.

One process reserves two blocks on behalf of another one, which writes and commits them; then they are sealed and
written to disk. `OUTCOMES` says for each cell how many blocks were visible after all in memory or on disk, and how many
after a restart; what is found always carries its stamps, nothing else is left, and every request was answered once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.core.simulation import Prompt, stamps
from tests.node.events import asker_dies, eviction, holder_dies, report_bad, told_twice, worker_dies
from tests.node.outcomes import cells, print_table, read_table
from tests.node.stamped_node import ASKER, HOLDER, StampedNode
from tierkv.node import key_check
from tierkv.wire.messages import Abort, Commit, ReserveReply

SECOND_RANK = 1


@dataclass
class Story:
    """Of one rank's ticket: `rank`'s part of `prompt` from block `first` on."""

    node: StampedNode
    prompt: Prompt
    first: int = 0
    grant: bytes = b""
    number: int = 0
    slots: list[int] = field(default_factory=list)
    written: int = 0
    commits: list[int] = field(default_factory=list)
    has_holder: bool = True
    home: StampedNode | None = None  # where the ticket was granted

    def __post_init__(self) -> None:
        self.home = self.node
        self.grant = self.node.grant()
        self.number = self.node.reserve(self.prompt, self.grant, first=self.first)
        self.slots = self.node.slots(self.number)

    def write(self, blocks: int) -> None:
        """The holder copies into its slots, whatever has become of the front meanwhile."""
        assert self.home is not None
        wanted = stamps(self.prompt.keys, 0)[self.first :][self.written : self.written + blocks]
        self.home.arena.write(self.slots[self.written : self.written + blocks], wanted)
        self.written += len(wanted)

    def commit(self) -> None:
        self.commits.append(self.node.send(Commit, HOLDER, grant=self.grant))

    def complete(self) -> None:
        """What would come next comes: the holder writes and commits, what is missing is stored by others, it is sealed
        and written to disk."""
        node = self.node
        if self.has_holder and not self.commits:
            self.write(2)
            if self.home is node:
                self.commit()
        while node.kit.service.num_checks:
            node.check_keys()
        if self.home is node:
            for rank in range(self.prompt.spec.identity.parallel.shards):
                if rank == SECOND_RANK or self.first:
                    node.store(self.prompt, rank=rank)
        node.kit.tick(11.0)
        node.work()


# ---- states


def reserved(ranks: int = 1, first: int = 0) -> Story:
    node = StampedNode(ranks=ranks)
    return Story(node, node.prompt(1, 2, 3, 4), first)


def writing() -> Story:
    story = reserved()
    story.write(1)
    return story


def checking() -> Story:
    """The commit waits until the keys have been compared with the tokens."""
    story = writing()
    story.write(1)
    story.commit()
    assert story.commits[0] not in story.node.answers
    return story


def committed(ranks: int = 1, first: int = 0) -> Story:
    story = reserved(ranks, first)
    story.write(2)
    while story.node.kit.service.num_checks:
        story.node.check_keys()
    story.commit()
    story.node.answer(story.commits[0])
    return story


def staged() -> Story:
    """The block before it is not there yet."""
    story = committed(first=1)
    assert story.node.cached(story.prompt) == 0
    return story


def one_rank() -> Story:
    """The other rank has not committed its part."""
    story = committed(ranks=2)
    assert story.node.cached(story.prompt) == 0
    return story


def growing() -> Story:
    story = committed()
    assert story.node.cached(story.prompt) == 2
    return story


def queued() -> Story:
    """Sealed, while the worker has as many writes as it is given at a time."""
    story = growing()
    for number in range(2):
        other = story.node.prompt(500 + number, 0)
        story.node.store(other)
        story.node.seal(other)
    assert story.node.seal(story.prompt) == 0
    assert story.node.ops(story.prompt) == []
    return story


def file() -> Story:
    story = growing()
    assert story.node.seal(story.prompt) == 0
    assert len(story.node.ops(story.prompt)) == 1
    return story


def done() -> Story:
    """Its file is there, and nobody has heard of it."""
    story = file()
    story.node.run(*story.node.ops(story.prompt))
    return story


def flushed() -> Story:
    story = done()
    story.node.hear()
    assert story.node.seal(story.prompt) == 2
    return story


# ---- events


def end(story: Story) -> None:
    """Of a ticket that is open: no copy runs any more, and none comes. Of one that was committed: too late."""
    if not story.commits:
        story.has_holder = False
    story.node.send(Abort, HOLDER, grant=story.grant)


def end_twice(story: Story) -> None:
    end(story)
    story.node.send(Abort, ASKER, grant=story.grant)


def commit_twice(story: Story) -> None:
    """The reply got lost; a commit of what has ended meanwhile is told so."""
    if story.commits:
        story.commit()
        if story.commits[0] in story.node.answers:
            first, second = (story.node.answer(number) for number in story.commits[:2])
            assert repr(first).replace(f"id={first.id}", "") == repr(second).replace(f"id={second.id}", "")


def late_commit(story: Story) -> None:
    """The abort of a request overtakes the commit of the same ticket."""
    end(story)
    story.commit()


def reply_is_lost(story: Story) -> None:
    was: ReserveReply = story.node.answer(story.number)
    again = story.node.answer(story.node.reserve(story.prompt, story.grant, first=story.first))
    if not story.commits:
        assert (was.states, was.offsets, was.generations) == (again.states, again.offsets, again.generations)
    else:
        assert again.offsets in (b"", was.offsets)


def front_dies(story: Story) -> None:
    story.node = story.node.restart()


def deadline(story: Story) -> None:
    """Nothing takes a ticket away for being slow. What was committed and waits for others goes stale."""
    for _ in range(4):
        story.node.kit.tick(30.0)


def shutdown(story: Story) -> None:
    story.node.kit.service.begin_shutdown(story.node.kit.now)


def holder_detaches(story: Story) -> None:
    """End of file on its socket: it asks nothing more, so its ticket is never committed; and may still write."""
    story.node.kit.service.close_session(HOLDER)


STATES: list[Callable[[], Story]] = [
    reserved,
    writing,
    checking,
    staged,
    one_rank,
    growing,
    queued,
    file,
    done,
    flushed,
]
EVENTS: list[Callable[[Story], None]] = [
    end,
    end_twice,
    commit_twice,
    late_commit,
    reply_is_lost,
    holder_dies,
    asker_dies,
    front_dies,
    worker_dies,
    told_twice,
    deadline,
    eviction,
    shutdown,
    report_bad,
    holder_detaches,
]
OUTCOMES = read_table("""
                 | reserved | writing | checking | staged | one_rank | growing | queued | file | done | flushed
end              | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
end_twice        | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
commit_twice     | 2/2      | 2/2     | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
late_commit      | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
reply_is_lost    | 2/2      | 2/2     | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
holder_dies      | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
asker_dies       | 2/2      | 2/2     | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
front_dies       | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 0/0 2/2 | 0/0 2/2  | 0/0 2/2 | 0/0 2/2 | 0/0 2/2 | 2/2  | 2/2
worker_dies      | 2/2      | 2/2     | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
told_twice       | 2/2      | 2/2     | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
deadline         | 2/2      | 2/2     | 2/2      | 2/2    | 0/0 2/2  | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
eviction         | 2/2      | 2/2     | 2/2      | 2/2    | 0/0 2/2  | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
shutdown         | x/2      | x/2     | x/2      | x/0 x/2 | x/0 x/2  | x/2     | x/2    | x/2  | x/2  | x/2
report_bad       | 2/2 1/1  | 2/2 1/1 | 2/2 1/1  | 2/2    | 2/2 1/1  | 1/1     | 1/1    | 1/1  | 1/1  | 1/1
holder_detaches  | 0/0 2/2  | 0/0 2/2 | 2/2      | 2/2    | 2/2      | 2/2     | 2/2    | 2/2  | 2/2  | 2/2
""")
"""Blocks that can be loaded in the end / after one more restart."""


def play(state: Callable[[], Story], event: Callable[[Story], None], completes_first: bool) -> str:
    story = state()
    if completes_first:
        story.complete()
    event(story)
    story.complete()
    cached = story.node.after_all(story.prompt)
    story.node = story.node.restart()
    again = story.node.after_all(story.prompt)
    story.node.close()
    return f"{'x' if cached < 0 else cached}/{again}"


@pytest.fixture(autouse=True)
def slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block a slice, so that a commit can be met while its keys are being checked."""
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)


@pytest.mark.scenario(
    "B072",
    then="giving up is possible in every state of a store, twice is once; what was committed before stays, and "
    "nothing else is left",
)
@pytest.mark.parametrize(("state", "event", "completes_first", "outcome"), cells(STATES, EVENTS, OUTCOMES))
def test_whatever_happens_to_a_write_its_bytes_are_right_and_nothing_of_it_is_left(
    state: Callable[[], Story], event: Callable[[Story], None], completes_first: bool, outcome: str
) -> None:
    assert play(state, event, completes_first) == outcome


if __name__ == "__main__":
    key_check.SLICE_BLOCKS = 1
    print_table(STATES, EVENTS, play)
