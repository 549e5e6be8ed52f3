"""Whoever waits is answered by the deadline and nothing spins meanwhile; whoever is silent is not dead."""

from __future__ import annotations

import pytest

from tests.node.kit import BLOCK_BYTES, ENGINE, GROUP, HEALTHY, HOST_BYTES, Kit, prompt
from tierkv.core.instructions import AnyInstruction, Remove, RemoveDone, Write, WriteDone
from tierkv.wire.messages import (
    Acquire,
    Commit,
    Done,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    Match,
    Release,
    Reserve,
    Seal,
    SealWait,
    Status,
)

YEAR = 365 * 86_400.0
SLOTS = HOST_BYTES // BLOCK_BYTES


def reserve(kit: Kit, number: int, blocks: int = 4) -> bytes:
    """The codes of the blocks."""
    keys, tokens = prompt(blocks, start=1_000 * number)
    states: bytes = kit.ask(
        Reserve, grant=number.to_bytes(16, "big"), group=GROUP, keys=keys, first=0, tokens=tokens
    ).states
    return states


def fill_with_what_must_be_written(kit: Kit) -> list[Write]:
    """Host memory is full of sealed extents, whose writes do not come back."""
    for number in range(1, SLOTS // 4 + 1):
        assert reserve(kit, number) == bytes(4)
        kit.ask(Commit, grant=number.to_bytes(16, "big"))
        kit.ask(Seal, group=GROUP, keys=prompt(4, start=1_000 * number)[0])
    return [instruction for instruction in kit.instructions() if isinstance(instruction, Write)]


def is_asleep(kit: Kit) -> bool:
    """The front's loop has nothing to do before something comes in, or time has passed: what nobody waits for is done
    in a few rounds, and then no more."""
    for _ in range(3):
        if kit.service.has_idle_work:
            kit.service.do_idle_work(kit.now)
    due = kit.service.next_wakeup()
    return not kit.service.has_idle_work and not kit.service.is_hurried and (due is None or due > kit.now)


@pytest.mark.scenario(
    "B145",
    then="a store that finds memory full of stuck writes is told no_room at once, nothing spins, later ones work",
)
def test_memory_full_of_stuck_writes_is_no_room_and_not_a_wait(durable: Kit) -> None:
    writes = fill_with_what_must_be_written(durable)
    assert writes
    for number in range(100, 110):
        keys, tokens = prompt(4, start=1_000 * number)
        answer = durable.ask(
            Reserve, grant=number.to_bytes(16, "big"), group=GROUP, keys=keys, first=0, tokens=tokens, deadline_ms=5_000
        )
        assert (set(answer.states), answer.reason) == ({3}, "no_room")
        assert is_asleep(durable)
    done = 0
    while writes:
        for write in writes:
            durable.report(WriteDone(op=write.op, file_bytes=20_480, seconds=9.0))
            done += 1
        writes = [instruction for instruction in durable.instructions() if isinstance(instruction, Write)]
    assert done == SLOTS // 4
    assert reserve(durable, 200) == bytes(4)


@pytest.mark.scenario("B147", then="a completion makes room when it comes, without anybody asking for room meanwhile")
def test_a_completion_is_taken_in_when_it_comes_and_not_when_room_is_wanted(durable: Kit) -> None:
    (first, *_) = fill_with_what_must_be_written(durable)
    assert durable.service.next_wakeup() is None or is_asleep(durable)
    durable.report(WriteDone(op=first.op, file_bytes=20_480, seconds=0.1))
    assert reserve(durable, 200) == bytes(4), "with the completion of one write, and no other event"


@pytest.mark.scenario(
    "B150", then="thousands of stores against a slow writer each get an answer in time, and it all ends"
)
def test_stores_without_end_against_a_slow_writer_are_all_answered(durable: Kit) -> None:
    """The order of locks can't be wrong: the front has no lock. What could is a wait, and there is none."""
    waiting: list[AnyInstruction] = []
    answers: dict[str, int] = {}
    for number in range(1, 2_000):
        kind = "granted" if reserve(durable, number, blocks=1) == b"\0" else "no_room"
        answers[kind] = answers.get(kind, 0) + 1
        durable.ask(Commit, grant=number.to_bytes(16, "big"))
        keys, _ = prompt(1, start=1_000 * number)
        durable.ask(Seal, group=GROUP, keys=keys)
        waiting += durable.instructions()
        if number % 3 == 0 and waiting:
            waiting = durable_works(durable, waiting)
    request = durable.send(Seal, group=GROUP, keys=prompt(1, start=1_000)[0], wait=SealWait.FLUSHED, deadline_ms=50)
    durable.tick(0.5)
    assert [reply.id for reply in durable.take_replies()] == [request]
    assert set(answers) == {"granted", "no_room"}
    durable.service.begin_shutdown(durable.now)
    for _ in range(3_000):
        if not (waiting := waiting + durable.instructions()):
            break
        waiting = durable_works(durable, waiting)
    assert waiting == []
    durable.state.check()


def durable_works(kit: Kit, waiting: list[AnyInstruction]) -> list[AnyInstruction]:
    """One instruction, the oldest."""
    head, *rest = waiting
    if isinstance(head, Write):
        kit.report(WriteDone(op=head.op, file_bytes=8_192, seconds=0.1))
    elif isinstance(head, Remove):
        kit.report(RemoveDone(op=head.op))
    return rest


# ---- who is silent


@pytest.mark.scenario(
    "B136", then="an engine gives no signs of life that a long copy could keep back: its end is proven, never guessed"
)
@pytest.mark.scenario("B131", then="an engine that says nothing for a year is served at once, under its old session")
@pytest.mark.scenario("B133", then="however long an engine is busy elsewhere, nothing is taken from it")
def test_a_silent_session_is_a_live_one(durable: Kit) -> None:
    keys, tokens = prompt(2)
    durable.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens)
    durable.ask(Commit, grant=b"t" * 16)
    durable.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys)
    more, of_more = prompt(1, start=50)
    durable.ask(Reserve, grant=b"u" * 16, group=GROUP, keys=more, first=0, tokens=of_more)
    for _ in range(5):
        durable.tick(YEAR / 5)
    durable.report(HEALTHY)
    told = durable.ask(Status)
    assert (told.leases, told.tickets) == (1, 1)
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2
    assert isinstance(durable.ask(Release, grant=b"l" * 16), Done)
    assert durable.ask(Commit, grant=b"u" * 16).visible == 1


@pytest.mark.scenario("B131", then="a session that was ended is told so, and a new one is served")
def test_a_session_that_was_ended_is_told_so(durable: Kit) -> None:
    durable.service.end_session(ENGINE, durable.now)
    refused = durable.ask(Match, group=GROUP, keys=prompt(1)[0])
    assert isinstance(refused, Error)
    assert refused.code == ErrorCode.SESSION_GONE
    durable.join(b"engine-session-2")
    assert isinstance(durable.ask(Hello, session=b"engine-session-2", protocol=1), HelloReply)


@pytest.mark.scenario("B133", then="while a node scans its files it answers Hello and Status at once")
def test_a_recovering_node_answers_who_asks_whether_it_is_there(durable: Kit) -> None:
    kit = Kit(nvme_bytes=2**20)
    kit.start_worker(recovers=False)
    assert isinstance(kit.ask(Hello, protocol=1), HelloReply)
    assert kit.ask(Status).state == "recovering"
    kit.close()
