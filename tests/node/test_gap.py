"""What happens between the question how much is cached and the use of it: held at each step, with each thing happening
there that takes blocks away, for each rank of two.

A match is no promise. A lease is: what it covers is right, or the reader is told that there is less of it, and why. In
no case does it get anybody else's bytes. The tables say how many of two blocks each rank's holder may use (-: there
was no lease), and the reason where the lease is shorter than what was cached when it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.core.simulation import Prompt, stamps
from tests.node.outcomes import cells, print_table, read_table
from tests.node.stamped_node import LATER, Copy, StampedNode
from tierkv.wire.messages import AcquireReply, Release, ReportBad

RANKS = ("in rank 0", "in rank 1")
REVOKED = "revoked"


@dataclass
class Reader:
    """A scheduler and its two ranks: it asks, they copy, check and use."""

    node: StampedNode
    prompt: Prompt
    is_revocable: bool = False
    matched: int = 0
    grant: bytes = b""
    number: int = 0
    asked_of: StampedNode | None = None
    reply: AcquireReply | None = None
    copies: list[Copy] = field(default_factory=list)
    valid: list[int] = field(default_factory=list)

    def match(self) -> None:
        self.matched = self.node.cached(self.prompt)
        assert self.matched == 2

    def ask(self) -> None:
        self.asked_of = self.node
        self.grant = self.node.grant()
        self.number = self.node.acquire(self.prompt, self.grant, ranks=2, revocable=self.is_revocable)

    def wait(self) -> None:
        """For the answer; where the front has died meanwhile, ask the next one."""
        if self.asked_of is not self.node:
            self.ask()
        self.node.work()
        self.reply = self.node.answer(self.number)
        self.copies = [Copy(self.node, self.prompt, self.reply, rank) for rank in (0, 1)] if self.reply.blocks else []

    def begin_to_copy(self) -> None:
        for copy in self.copies:
            copy.go_on()

    def copy_the_rest(self) -> None:
        for copy in self.copies:
            copy.go_on(2)

    def check(self) -> None:
        self.valid = [copy.finish() for copy in self.copies]

    def use(self) -> None:
        for copy, valid in zip(self.copies, self.valid, strict=True):
            assert copy.seen[:valid] == stamps(self.prompt.keys, copy.rank)[:valid]
        if self.copies and self.copies[0].node is self.node:
            for rank in (0, 1):
                self.node.send(Release, b"holder-session-2", grant=self.grant, rank=rank)


# ---- what happens, to one rank where it is about files


def eviction(reader: Reader, rank: int) -> None:
    reader.node.fill_host(but=reader.prompt)


def unlinked(reader: Reader, rank: int) -> None:
    reader.node.disk.lose((reader.prompt.group, rank, reader.prompt.key(0)))


def unlinked_and_evicted(reader: Reader, rank: int) -> None:
    unlinked(reader, rank)
    eviction(reader, rank)


def damaged_and_evicted(reader: Reader, rank: int) -> None:
    reader.node.disk.damage((reader.prompt.group, rank, reader.prompt.key(0)), 1)
    eviction(reader, rank)


def revoked(reader: Reader, rank: int) -> None:
    """The lease has been held for too long, and its slots get new owners."""
    reader.node.kit.tick(31.0)
    eviction(reader, rank)


def reported_bad(reader: Reader, rank: int) -> None:
    prompt = reader.prompt
    reader.node.send(ReportBad, LATER, group=prompt.group, keys=prompt.keys, first_bad=1)
    eviction(reader, rank)


def restart(reader: Reader, rank: int) -> None:
    """Of the front. Its engines go on copying in the old arena, the new one fills with other blocks."""
    reader.node = reader.node.restart()
    reader.node.fill_host(but=reader.prompt)


# ---- between which steps


def before_ask(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    event()
    reader.ask()
    reader.wait()
    reader.begin_to_copy()
    reader.copy_the_rest()
    reader.check()
    reader.use()


def before_answer(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    reader.ask()
    event()
    reader.wait()
    reader.begin_to_copy()
    reader.copy_the_rest()
    reader.check()
    reader.use()


def before_copy(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    reader.ask()
    reader.wait()
    event()
    reader.begin_to_copy()
    reader.copy_the_rest()
    reader.check()
    reader.use()


def in_copy(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    reader.ask()
    reader.wait()
    reader.begin_to_copy()
    event()
    reader.copy_the_rest()
    reader.check()
    reader.use()


def before_check(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    reader.ask()
    reader.wait()
    reader.begin_to_copy()
    reader.copy_the_rest()
    event()
    reader.check()
    reader.use()


def before_use(reader: Reader, event: Callable[[], None]) -> None:
    reader.match()
    reader.ask()
    reader.wait()
    reader.begin_to_copy()
    reader.copy_the_rest()
    reader.check()
    event()
    reader.use()


GAPS: list[Callable[..., None]] = [
    before_ask,
    before_answer,
    before_copy,
    in_copy,
    before_check,
    before_use,
]
EVENTS: list[Callable[[Reader, int], None]] = [
    eviction,
    unlinked,
    unlinked_and_evicted,
    damaged_and_evicted,
    revoked,
    reported_bad,
    restart,
]
ON_NVME = read_table(
    """
                     | before_ask | before_answer | before_copy | in_copy | before_check | before_use
eviction             | 22         | 22            | 22          | 22      | 22           | 22
unlinked             | -:not_found | -:not_found   | 22          | 22      | 22           | 22
unlinked_and_evicted | -:not_found | -:not_found   | 22          | 22      | 22           | 22
damaged_and_evicted  | 11:checksum | 11:checksum   | 22          | 22      | 22           | 22
revoked              | 22         | -:deadline    | 00          | 00      | 00           | 22
reported_bad         | -          | -:reported_bad | 22          | 22      | 22           | 22
restart              | 22         | 22            | 22          | 22      | 22           | 22
""",
    RANKS,
)
IN_MEMORY = read_table(
    """
                     | before_ask | before_answer | before_copy | in_copy | before_check | before_use
eviction             | 22         | 22            | 22          | 22      | 22           | 22
unlinked             | 22         | 22            | 22          | 22      | 22           | 22
unlinked_and_evicted | -:not_found | 22            | 22          | 22      | 22           | 22
damaged_and_evicted  | 11:checksum | 22            | 22          | 22      | 22           | 22
revoked              | 22         | 00            | 00          | 00      | 00           | 22
reported_bad         | -          | 22            | 22          | 22      | 22           | 22
restart              | 22         | 22            | 22          | 22      | 22           | 22
""",
    RANKS,
)


def on_nvme() -> Reader:
    reader = in_memory()
    reader.node = reader.node.restart()
    return reader


def in_memory() -> Reader:
    node = StampedNode(ranks=2)
    prompt = node.prompt(1, 2, 3, 4)
    for rank in (0, 1):
        node.store(prompt, rank=rank)
    node.seal(prompt)
    node.work()
    assert node.seal(prompt) == 2
    return Reader(node, prompt)


def play(reader: Reader, gap: Callable[..., None], event: Callable[[Reader, int], None], rank: int) -> str:
    reader.is_revocable = event is revoked
    gap(reader, lambda: event(reader, rank))
    assert reader.reply is not None
    reason = reader.reply.reason
    assert bool(reason) == (reader.reply.blocks < reader.reply.cached_blocks), "a lease that is shorter says why"
    reader.node.after_all(reader.prompt)
    reader.node.close()
    assert len(set(reader.valid)) <= 1 or event is revoked, "ranks that disagree"
    return ("".join(map(str, reader.valid)) or "-") + (f":{reason}" if reason else "")


@pytest.mark.scenario(
    "B061",
    then="both ranks get the same number of blocks within the deadline, whichever of them a loss meets",
)
@pytest.mark.parametrize(("gap", "event", "is_second_rank", "outcome"), cells(GAPS, EVENTS, ON_NVME, RANKS))
def test_whatever_comes_between_match_and_use_of_blocks_on_nvme_nobody_gets_foreign_bytes(
    gap: Callable[..., None], event: Callable[[Reader, int], None], is_second_rank: bool, outcome: str
) -> None:
    assert play(on_nvme(), gap, event, int(is_second_rank)) == outcome


@pytest.mark.parametrize(("gap", "event", "is_second_rank", "outcome"), cells(GAPS, EVENTS, IN_MEMORY, RANKS))
def test_whatever_comes_between_match_and_use_of_blocks_in_memory_nobody_gets_foreign_bytes(
    gap: Callable[..., None], event: Callable[[Reader, int], None], is_second_rank: bool, outcome: str
) -> None:
    assert play(in_memory(), gap, event, int(is_second_rank)) == outcome


if __name__ == "__main__":
    for prepare in (on_nvme, in_memory):
        print_table(GAPS, EVENTS, lambda gap, event, is_second: play(prepare(), gap, event, int(is_second)))  # noqa: B023
