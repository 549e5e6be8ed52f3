"""Warm-ups and verifications: progress while somebody asks, an end when nobody does."""

from __future__ import annotations

import msgspec
import pytest

from tests.node.kit import ENGINE, GROUP, Kit
from tests.node.test_reading_and_writing import put_on_nvme_only
from tierkv.core.instructions import CancelScrub, Read, ReadDone, Scrub, ScrubProgress
from tierkv.node import jobs
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.wire.frames import encode
from tierkv.wire.messages import Acquire, ErrorCode, Match, Verify, VerifyReply, Warmup

JOB, OTHER = b"job-number-00001", b"job-number-00002"
LEASE = b"lease-number-001"


def scrubs(kit: Kit) -> list[Scrub | CancelScrub]:
    return [i for i in kit.instructions() if isinstance(i, Scrub | CancelScrub)]


def progress(
    op: int, checked: int, *, finished: bool = False, damaged: list[tuple[str, str]] | None = None
) -> ScrubProgress:
    return ScrubProgress(
        op=op,
        checked=checked,
        total=10,
        checked_bytes=checked * 4096,
        damaged=damaged or [],
        set_aside=[],
        finished=finished,
    )


def test_a_warmup_brings_back_what_was_used_and_reports_it(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.state._ledger.pool.limit_bytes *= 1  # nothing is evicted for a guess: make room as an engine would
    first = durable.ask(Warmup, job=JOB, budget_bytes=2**20)
    assert first.total_extents > 0
    for _ in range(first.total_extents):
        for read in [i for i in durable.instructions() if isinstance(i, Read)]:
            durable.report(ReadDone(op=read.op, valid=len(read.slots), seconds=0.01))
    last = durable.ask(Warmup, job=JOB)
    assert last.finished
    assert last.done_extents <= last.total_extents
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2


def test_a_warmup_keeps_to_what_was_asked_for(durable: Kit) -> None:
    put_on_nvme_only(durable, 2)
    everything = durable.ask(Warmup, job=JOB)
    assert everything.total_extents > 1
    durable.ask(Warmup, job=JOB, cancel=True)
    for other in ({"tenant": "nobody"}, {"fingerprint": "00"}):
        assert durable.ask(Warmup, job=OTHER, **other).total_extents == 0
        durable.ask(Warmup, job=OTHER, cancel=True)
    durable.now += 3_600.0
    assert durable.ask(Warmup, job=OTHER, since_seconds=3_000.0).total_extents == 0
    durable.ask(Warmup, job=OTHER, cancel=True)
    assert durable.ask(Warmup, job=OTHER, since_seconds=7_200.0).total_extents == everything.total_extents
    durable.ask(Warmup, job=OTHER, cancel=True)
    assert durable.ask(Warmup, job=OTHER, tenant="").total_extents == everything.total_extents


def test_a_warmup_says_that_it_gives_way(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.send(Acquire, grant=LEASE, group=GROUP, keys=keys, deadline_ms=10_000)
    assert durable.ask(Warmup, job=JOB).yielding
    (read,) = [i for i in durable.instructions() if isinstance(i, Read)]  # the lease's, and no other
    durable.report(ReadDone(op=read.op, valid=len(read.slots), seconds=0.01))
    durable.take_replies()  # to whoever waited
    assert not durable.ask(Warmup, job=JOB).yielding


def test_a_cancelled_or_unknown_warmup_is_over(durable: Kit) -> None:
    assert durable.ask(Warmup, job=JOB, cancel=True).finished
    put_on_nvme_only(durable, 2)
    durable.ask(Warmup, job=JOB)
    durable.ask(Warmup, job=JOB, cancel=True)
    assert durable.state.warmup_progress(JOB) is None


def test_a_warmup_that_nobody_asks_about_ends(durable: Kit) -> None:
    put_on_nvme_only(durable, 2)
    durable.ask(Warmup, job=JOB)
    assert durable.service.next_wakeup() is not None
    durable.tick(ABANDONED_SECONDS)
    assert durable.state.warmup_progress(JOB) is None


def test_warmups_are_bounded(durable: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_WARMUPS", 1)
    durable.ask(Warmup, job=JOB)
    assert durable.ask(Warmup, job=OTHER).code == ErrorCode.INVALID
    assert durable.ask(Warmup, job=JOB).finished


def test_a_verification_streams_what_it_finds_once(durable: Kit) -> None:
    durable.ask(Verify, job=JOB, repair=True)
    (scrub,) = scrubs(durable)
    assert isinstance(scrub, Scrub)
    assert scrub.repair is True
    found = progress(scrub.op, 4, damaged=[("models/a", "checksum")])
    durable.report(msgspec.structs.replace(found, set_aside=[(bytes(32), 0, bytes(32))]))
    reply = durable.ask(Verify, job=JOB, repair=True)
    assert (reply.checked_files, reply.total_files, reply.damaged_files, reply.set_aside_files) == (4, 10, 1, 1)
    assert [(entry.path, entry.reason) for entry in reply.damaged] == [("models/a", "checksum")]
    durable.report(progress(scrub.op, 10, finished=True))
    reply = durable.ask(Verify, job=JOB, repair=True)
    assert (reply.finished, reply.damaged, reply.damaged_files, reply.set_aside_files) == (True, (), 1, 1)


def test_many_damaged_files_are_told_in_parts_before_it_is_finished(
    durable: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_DAMAGED_PER_REPLY", 2)
    durable.ask(Verify, job=JOB)
    (scrub,) = scrubs(durable)
    durable.report(progress(scrub.op, 10, finished=True, damaged=[(f"f{i}", "checksum") for i in range(3)]))
    parts = [durable.ask(Verify, job=JOB) for _ in range(2)]
    assert [(len(part.damaged), part.finished) for part in parts] == [(2, False), (1, True)]


def test_one_verification_at_a_time(durable: Kit) -> None:
    durable.ask(Verify, job=JOB)
    assert durable.ask(Verify, job=OTHER).code == ErrorCode.INVALID
    (scrub,) = scrubs(durable)
    durable.report(progress(scrub.op, 10, finished=True))
    durable.ask(Verify, job=OTHER)
    (second,) = scrubs(durable)
    assert second.op != scrub.op


def test_a_worker_that_dies_while_verifying_leaves_the_work_to_the_next(durable: Kit) -> None:
    durable.ask(Verify, job=JOB)
    (first,) = scrubs(durable)
    durable.kill_worker()
    durable.start_worker()
    (second,) = scrubs(durable)
    durable.report(progress(first.op, 9), progress(second.op, 3))
    assert durable.ask(Verify, job=JOB).checked_files == 3


def test_a_verification_ends_when_cancelled_or_abandoned(durable: Kit) -> None:
    durable.ask(Verify, job=JOB)
    durable.instructions()
    assert durable.ask(Verify, job=JOB, cancel=True).finished
    assert [type(one) for one in scrubs(durable)] == [CancelScrub]
    assert durable.ask(Verify, job=JOB, cancel=True).finished
    durable.ask(Verify, job=OTHER)
    durable.instructions()
    durable.tick(ABANDONED_SECONDS)
    assert [type(one) for one in scrubs(durable)] == [CancelScrub]


def test_a_memory_only_node_has_nothing_to_verify() -> None:
    kit = Kit()
    assert kit.ask(Verify, job=JOB).finished


@pytest.mark.scenario(
    "B158", then="what was found is told again to who asks again under the same id, and once to others"
)
def test_a_request_that_is_sent_twice_is_told_the_same(durable: Kit) -> None:
    """The reply to the first went down with its connection."""

    def ask(request_id: int) -> VerifyReply:
        durable.service.handle(b"peer", encode(Verify(id=request_id, session=ENGINE, job=JOB)), durable.now)
        (reply,) = durable.take_replies()
        assert isinstance(reply, VerifyReply)
        return reply

    ask(900)
    (scrub,) = scrubs(durable)
    durable.report(progress(scrub.op, 4, damaged=[("models/a", "checksum")]))
    assert [entry.path for entry in ask(901).damaged] == ["models/a"]
    durable.report(progress(scrub.op, 5, damaged=[("models/b", "checksum")]))
    again = ask(901)
    assert ([entry.path for entry in again.damaged], again.checked_files) == (["models/a"], 5)
    assert [entry.path for entry in ask(902).damaged] == ["models/b"]
    assert ask(903).damaged == ()
