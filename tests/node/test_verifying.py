"""Verifications: progress while somebody asks, an end when nobody does, over both tiers of files."""

from __future__ import annotations

import msgspec
import pytest

from tests.node.kit import ENGINE, Kit
from tierkv.core.instructions import CancelScrub, Scrub, ScrubProgress, TierHealth
from tierkv.node import verifying
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.wire.frames import encode
from tierkv.wire.messages import ErrorCode, Verify, VerifyReply

JOB, OTHER = b"job-number-00001", b"job-number-00002"


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
    monkeypatch.setattr(verifying, "MAX_DAMAGED_PER_REPLY", 2)
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


# ---- with a disk tier


def disk_scrubs(kit: Kit) -> list[Scrub | CancelScrub]:
    return [i for i in kit.disk_instructions() if isinstance(i, Scrub | CancelScrub)]


def test_both_tiers_are_verified_together_and_each_damaged_file_says_where_it_is(two_tiers: Kit) -> None:
    two_tiers.ask(Verify, job=JOB)
    (nvme,), (disk,) = scrubs(two_tiers), disk_scrubs(two_tiers)
    two_tiers.report(progress(nvme.op, 10, finished=True, damaged=[("models/a", "checksum")]))
    two_tiers.disk_report(progress(disk.op, 4, damaged=[("models/a", "checksum")]))
    reply = two_tiers.ask(Verify, job=JOB)
    assert (reply.checked_files, reply.total_files, reply.damaged_files, reply.finished) == (14, 20, 2, False)
    assert [(entry.tier, entry.path) for entry in reply.damaged] == [("nvme", "models/a"), ("disk", "models/a")]
    two_tiers.disk_report(progress(disk.op, 10, finished=True))
    reply = two_tiers.ask(Verify, job=JOB)
    assert (reply.finished, reply.problem) == (True, "")


def test_a_disk_tier_that_is_away_is_not_waited_for_and_named(two_tiers: Kit) -> None:
    gone = TierHealth(writable=False, readable=False, overhead_bytes=0, free_bytes=0, problem="/disk is not mounted")
    two_tiers.disk_report(gone)
    two_tiers.kill_disk_worker()
    two_tiers.ask(Verify, job=JOB)
    (nvme,) = scrubs(two_tiers)
    two_tiers.report(progress(nvme.op, 10, finished=True))
    reply = two_tiers.ask(Verify, job=JOB)
    assert reply.finished
    assert "/disk is not mounted" in reply.problem


def test_a_disk_worker_that_dies_in_between_ends_its_part_and_no_other(two_tiers: Kit) -> None:
    two_tiers.ask(Verify, job=JOB)
    (nvme,), (disk,) = scrubs(two_tiers), disk_scrubs(two_tiers)
    two_tiers.disk_report(progress(disk.op, 4))
    two_tiers.kill_disk_worker()
    assert not two_tiers.ask(Verify, job=JOB).finished
    two_tiers.start_disk_worker()
    assert disk_scrubs(two_tiers) == []
    two_tiers.report(progress(nvme.op, 10, finished=True))
    reply = two_tiers.ask(Verify, job=JOB)
    assert (reply.finished, reply.checked_files) == (True, 14)
    assert "has died" in reply.problem


def test_a_cancelled_verification_ends_in_both_tiers(two_tiers: Kit) -> None:
    two_tiers.ask(Verify, job=JOB)
    assert (len(scrubs(two_tiers)), len(disk_scrubs(two_tiers))) == (1, 1)
    two_tiers.ask(Verify, job=JOB, cancel=True)
    assert [type(one) for one in (*scrubs(two_tiers), *disk_scrubs(two_tiers))] == [CancelScrub, CancelScrub]
