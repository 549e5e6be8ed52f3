"""Each state of a read x each event x both orders of event and completion, on the real service and core.

A scheduler process asks for two blocks, another process holds them and copies. `OUTCOMES` says for each cell how many
blocks the holder was told are valid, and how many of the prompt can be found and loaded when all is over; what is
found always carries its stamps, nothing else is left, and every request was answered once (see `StampedNode`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.core.simulation import Prompt
from tests.node.events import asker_dies, eviction, holder_dies, report_bad, told_twice, worker_dies
from tests.node.outcomes import cells, print_table, read_table
from tests.node.stamped_node import ASKER, HOLDER, LATER, Copy, StampedNode
from tierkv.wire.messages import AcquireReply, Release


@dataclass
class Story:
    node: StampedNode
    prompt: Prompt
    grant: bytes
    number: int
    copy: Copy | None = None
    copied: int | None = None
    has_holder: bool = True
    ends: int = 0

    @property
    def reply(self) -> AcquireReply | None:
        replies = self.node.answers.get(self.number)
        return replies[0] if replies and isinstance(replies[0], AcquireReply) else None

    def begin_copy(self) -> None:
        if self.copy is None and self.reply is not None and self.reply.blocks and self.has_holder:
            self.copy = Copy(self.node, self.prompt, self.reply)

    def complete(self) -> None:
        """What would come next comes: the worker reads and is heard, the holder copies and releases."""
        self.node.work()
        self.begin_copy()
        if self.copy is None or self.copied is not None or not self.has_holder:
            return
        self.copied = self.copy.finish()
        if self.copy.node is self.node:  # else its node is gone, and so is who would be told
            self.node.send(Release, HOLDER, grant=self.grant, rank=0)


# ---- states


def on_nvme(blocks: int = 2) -> tuple[StampedNode, Prompt]:
    node = StampedNode()
    prompt = node.prompt(*range(blocks * 2))
    node.store(prompt)
    node.seal(prompt)
    node.work()
    return node.restart(), prompt


def ask(node: StampedNode, prompt: Prompt) -> Story:
    grant = node.grant()
    return Story(node, prompt, grant, node.acquire(prompt, grant))


def queued() -> Story:
    """The worker has as many reads as it is given at a time."""
    node, prompt = on_nvme()
    others = [node.prompt(500 + number, 0, 1, 2) for number in range(2)]
    for other in others:
        node.store(other)
        node.seal(other)
    node.work()
    node = node.restart()
    for other in others:
        node.acquire(other, node.grant(), holder=LATER, seconds=4.0)
    story = ask(node, prompt)
    assert node.ops(prompt) == []
    assert story.reply is None
    return story


def reading() -> Story:
    story = ask(*on_nvme())
    assert len(story.node.ops(story.prompt)) == 1
    story.node.worker.scribble()
    return story


def read_done() -> Story:
    story = reading()
    story.node.run(*story.node.ops(story.prompt))
    assert story.reply is None
    return story


def granted() -> Story:
    story = read_done()
    story.node.hear()
    assert story.reply is not None
    return story


def in_memory() -> Story:
    node, prompt = on_nvme()
    story = ask(node, prompt)
    story.complete()
    story = ask(node, prompt)
    assert story.reply is not None
    return story


def copying() -> Story:
    story = granted()
    story.begin_copy()
    assert story.copy is not None
    story.copy.go_on()
    return story


def released() -> Story:
    story = copying()
    story.complete()
    assert story.copied == 2
    return story


def missed() -> Story:
    node = StampedNode()
    story = ask(node, node.prompt(1, 2, 3, 4))
    assert story.reply is not None
    assert story.reply.blocks == 0
    return story


# ---- events


def end(story: Story) -> None:
    """The request is given up. Whoever copies is waited for, as a release is the promise that no copy runs."""
    if story.copy is not None:
        story.complete()
    story.node.send(Release, ASKER, grant=story.grant)


def end_twice(story: Story) -> None:
    end(story)
    story.node.send(Release, HOLDER, grant=story.grant, rank=0)
    story.node.send(Release, ASKER, grant=story.grant)


def end_while_copying(story: Story) -> None:
    """A broken promise: the scheduler gives up while a worker copies, and the slots get new owners."""
    story.node.send(Release, ASKER, grant=story.grant)
    story.node.fill_host(but=story.prompt)


def front_dies(story: Story) -> None:
    story.begin_copy()
    story.node = story.node.restart()


def reply_is_lost(story: Story) -> None:
    first = story.node.answers.get(story.number)
    again = story.node.acquire(story.prompt, story.grant)
    if first is not None and story.copied is None:
        was, now = first[0], story.node.answer(again)
        assert isinstance(was, AcquireReply)
        assert (was.blocks, was.parts) == (now.blocks, now.parts)


def deadline(story: Story) -> None:
    story.node.kit.tick(6.0)
    story.node.collect()
    assert story.reply is not None


def shutdown(story: Story) -> None:
    story.begin_copy()
    story.node.kit.service.begin_shutdown(story.node.kit.now)


def holder_detaches(story: Story) -> None:
    """End of file on its socket: it asks nothing more, and may still copy."""
    story.node.kit.service.close_session(HOLDER)


STATES: list[Callable[[], Story]] = [
    queued,
    reading,
    read_done,
    granted,
    in_memory,
    copying,
    released,
    missed,
]
EVENTS: list[Callable[[Story], None]] = [
    end,
    end_twice,
    end_while_copying,
    holder_dies,
    asker_dies,
    front_dies,
    worker_dies,
    told_twice,
    reply_is_lost,
    deadline,
    eviction,
    shutdown,
    report_bad,
    holder_detaches,
]


OUTCOMES = read_table("""
                 | queued | reading | read_done | granted | in_memory | copying | released | missed
end              | -/2 2/2 | -/2 2/2 | -/2 2/2   | 2/2     | 2/2       | 2/2     | 2/2      | -/0
end_twice        | -/2 2/2 | -/2 2/2 | -/2 2/2   | 2/2     | 2/2       | 2/2     | 2/2      | -/0
end_while_copying | -/2 2/2 | -/2 2/2 | -/2 2/2   | 0/2 2/2 | 0/2 2/2   | 0/2 2/2 | 2/2      | -/0
holder_dies      | -/2 2/2 | -/2 2/2 | -/2 2/2   | -/2 2/2 | -/2 2/2   | -/2 2/2 | 2/2      | -/0
asker_dies       | -/2 2/2 | -/2 2/2 | -/2 2/2   | 2/2     | 2/2       | 2/2     | 2/2      | -/0
front_dies       | -/2 2/2 | -/2 2/2 | -/2 2/2   | 2/2     | 2/2       | 2/2     | 2/2      | -/0
worker_dies      | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
told_twice       | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
reply_is_lost    | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
deadline         | -/2 2/2 | -/2 2/2 | -/2 2/2   | 2/2     | 2/2       | 2/2     | 2/2      | -/0
eviction         | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
shutdown         | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
report_bad       | -/0 2/1 | -/0 2/1 | -/0 2/1   | 2/1     | 2/1       | 2/1     | 2/1      | -/0
holder_detaches  | 2/2    | 2/2     | 2/2       | 2/2     | 2/2       | 2/2     | 2/2      | -/0
""")
"""Blocks that the holder was told are valid (-: it never got a slot) / blocks that can be loaded when all is over."""


def play(state: Callable[[], Story], event: Callable[[Story], None], completes_first: bool) -> str:
    story = state()
    if completes_first:
        story.complete()
    event(story)
    story.complete()
    if story.reply is not None and story.reply.blocks < story.reply.cached_blocks:
        assert story.reply.reason, "a shorter lease says why"
    cached = story.node.after_all(story.prompt)
    if cached < 0:
        story.node = story.node.restart()
        cached = story.node.after_all(story.prompt)
    story.node.close()
    return f"{'-' if story.copied is None else story.copied}/{cached}"


@pytest.mark.scenario(
    "B072",
    then="giving up is possible in every state of a load, twice is once, and other requests are answered and leave "
    "nothing behind",
)
@pytest.mark.scenario(
    "B069",
    then="in every state of a load, whatever ends it, no read is counted as under way when all is over",
)
@pytest.mark.parametrize(("state", "event", "completes_first", "outcome"), cells(STATES, EVENTS, OUTCOMES))
def test_whatever_happens_to_a_read_its_bytes_are_right_and_nothing_of_it_is_left(
    state: Callable[[], Story], event: Callable[[Story], None], completes_first: bool, outcome: str
) -> None:
    assert play(state, event, completes_first) == outcome


if __name__ == "__main__":
    print_table(STATES, EVENTS, play)
