"""The disk tier beside NVMe, as the front has it: a worker and a channel of its own, and no say in whether the node
serves."""

from __future__ import annotations

import msgspec
import pytest

from tests.node.kit import GROUP, HEALTHY, RECOVERED, Kit
from tests.node.test_reading_and_writing import store
from tierkv.core.instructions import (
    CountFiles,
    FilesCounted,
    GroupCount,
    OnDisk,
    PurgeRecorded,
    PurgeSwept,
    Reckon,
    Reckoned,
    Remove,
    Stop,
    Stopped,
    SweepPurge,
    Swept,
    TierHealth,
    Zero,
    Zeroed,
)
from tierkv.core.reasons import Reason
from tierkv.node.control import Drained
from tierkv.node.draining import STOP_SECONDS, Draining
from tierkv.node.mover import SILENT_SECONDS
from tierkv.wire.messages import Audit, Match, Purge, Status, Usage

JOB = b"job-number-00001"
REMOVE = Remove(op=1, fingerprint="ab" * 32, group=GROUP, rank=0, key=b"k" * 32)
AWAY = TierHealth(
    writable=False,
    readable=False,
    overhead_bytes=0,
    free_bytes=0,
    reason=Reason.DISK_DEGRADED,
    problem="/disk is empty, and was not before: is it mounted?",
)

FULL = msgspec.structs.replace(HEALTHY, writable=False, reason=Reason.DISK_FULL)


def test_what_is_for_the_disk_worker_goes_to_it_and_to_nobody_else(two_tiers: Kit) -> None:
    two_tiers.core.do(two_tiers.now, lambda: [OnDisk(REMOVE)])
    assert (two_tiers.instructions(), two_tiers.disk_instructions()) == ([], [REMOVE])


def test_both_tiers_are_told_of_and_the_node_is_ready(two_tiers: Kit) -> None:
    status = two_tiers.ask(Status)
    assert (status.state, status.problems, status.disk_dir) == ("ready", (), "/disk")
    assert [tier.tier for tier in status.tiers] == ["host", "nvme", "disk"]
    assert [(one.name, one.state) for one in status.workers[2:]] == [("storage", "running"), ("disk", "running")]
    assert two_tiers.survey.snapshot(two_tiers.now).worker_restarts["disk"] == 0


def test_a_node_serves_while_its_disk_tier_is_still_looked_through(two_tiers: Kit) -> None:
    two_tiers.kill_disk_worker()
    two_tiers.start_disk_worker(recovers=False)
    assert two_tiers.ask(Status).state == "ready"
    assert two_tiers.ask(Match, group=GROUP, keys=store(two_tiers, 2)).blocks == 2
    assert two_tiers.ask(Status).workers[-1].state == "recovering"


def test_a_disk_tier_that_is_away_says_why_and_takes_nothing_else_along(two_tiers: Kit) -> None:
    two_tiers.disk_report(AWAY)
    two_tiers.disk.worker.problem = "exited with 2"
    two_tiers.kill_disk_worker()
    status = two_tiers.ask(Status)
    assert status.state == "degraded"
    assert status.problems == (f"the disk tier is away, and tried again: {AWAY.problem}",)
    disk = status.tiers[2]
    assert (disk.state, disk.reason, disk.problem, disk.capacity_bytes) == ("away", "", AWAY.problem, 2**22)
    assert two_tiers.ask(Match, group=GROUP, keys=store(two_tiers, 2)).blocks == 2
    two_tiers.start_disk_worker()
    assert two_tiers.ask(Status).state == "ready"


def test_a_disk_tier_that_is_tried_again_is_away_for_as_long_as_it_can_not_begin(two_tiers: Kit) -> None:
    two_tiers.kill_disk_worker()
    two_tiers.start_disk_worker(recovers=False)
    two_tiers.disk_report(AWAY)
    assert two_tiers.ask(Status).problems == (f"the disk tier is away, and tried again: {AWAY.problem}",)
    two_tiers.disk_report(RECOVERED, HEALTHY)
    assert two_tiers.ask(Status).state == "ready"


def test_a_purge_says_that_it_waits_for_a_disk_tier_that_is_away(two_tiers: Kit) -> None:
    store(two_tiers, 2)
    two_tiers.kill_disk_worker()
    two_tiers.ask(Purge, job=JOB, tenant="")
    two_tiers.report(PurgeRecorded(JOB))
    zeros = [Zeroed(one.op) for one in two_tiers.instructions() if isinstance(one, Zero)]
    two_tiers.report(*zeros, PurgeSwept(JOB, Swept()))
    waiting = two_tiers.ask(Purge, job=JOB)
    assert (waiting.phase, waiting.reason) == ("removing", Reason.DISK_DEGRADED)
    two_tiers.start_disk_worker()
    assert two_tiers.ask(Purge, job=JOB).reason == ""
    two_tiers.disk_report(PurgeSwept(JOB, Swept()))
    assert two_tiers.ask(Purge, job=JOB).phase == "gone"


def test_a_disk_worker_that_dies_is_a_problem_with_its_cause(two_tiers: Kit) -> None:
    two_tiers.disk.worker.problem = "killed by SIGKILL"
    two_tiers.kill_disk_worker()
    (problem,) = two_tiers.ask(Status).problems
    assert "its worker killed by SIGKILL" in problem


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (
            msgspec.structs.replace(HEALTHY, writable=False, reason=Reason.DISK_FULL),
            "disk is not written to: disk_full",
        ),
        (msgspec.structs.replace(HEALTHY, readable=False), "disk is not read from: a read has not come back"),
    ],
)
def test_what_is_wrong_with_the_disk_tier_is_told_as_of_nvme(two_tiers: Kit, health: TierHealth, words: str) -> None:
    two_tiers.disk_report(health)
    assert two_tiers.ask(Status).problems == (words,)


def test_what_the_start_of_either_tier_did_not_take_is_counted(two_tiers: Kit) -> None:
    two_tiers.report(msgspec.structs.replace(RECOVERED, foreign=1))
    two_tiers.disk_report(msgspec.structs.replace(RECOVERED, quarantined=3, foreign=2, unknown_format=4, unreadable=5))
    found = {"set_aside": 3, "foreign": 3, "unknown_format": 4, "unreadable": 5}
    assert two_tiers.ask(Status).found == found
    assert two_tiers.survey.snapshot(two_tiers.now).found == found


def test_the_index_of_the_disk_tier_is_overhead_of_the_directory_in_which_it_lies(two_tiers: Kit) -> None:
    two_tiers.report(msgspec.structs.replace(HEALTHY, overhead_bytes=70_000, index_bytes=20_000))
    two_tiers.disk_report(msgspec.structs.replace(HEALTHY, overhead_bytes=500, index_bytes=40_000))
    nvme, disk = two_tiers.ask(Usage).tiers[1:]
    assert [(tier.overhead_bytes, tier.index_bytes) for tier in (nvme, disk)] == [(70_000, 60_000), (500, 0)]
    assert two_tiers.survey.snapshot(two_tiers.now).index_bytes == 60_000


def test_a_silent_disk_worker_is_named(two_tiers: Kit) -> None:
    two_tiers.now += SILENT_SECONDS + 1
    two_tiers.report(HEALTHY)
    assert two_tiers.ask(Status).problems == ("the disk worker has said nothing for 6 s",)


def test_failed_operations_of_both_workers_are_counted(two_tiers: Kit) -> None:
    two_tiers.report(msgspec.structs.replace(HEALTHY, errors={"fsync EIO": 3}))
    two_tiers.disk_report(msgspec.structs.replace(HEALTHY, errors={"fsync EIO": 2, "open ESTALE": 1}))
    assert two_tiers.survey.snapshot(two_tiers.now).io_errors == {("fsync", "EIO"): 5, ("open", "ESTALE"): 1}


def test_both_workers_are_told_to_stop_and_waited_for(two_tiers: Kit) -> None:
    draining = Draining(two_tiers.core, two_tiers.service, 10.0, two_tiers.now)
    assert draining.step(two_tiers.now) is None
    assert [type(one) for one in two_tiers.instructions()][-1] is Stop
    assert [type(one) for one in two_tiers.disk_instructions()][-1] is Stop
    two_tiers.report(Stopped())
    assert draining.step(two_tiers.now) is None
    two_tiers.disk_report(Stopped())
    assert draining.step(two_tiers.now) == Drained(
        flushed_extents=0, flushed_bytes=0, dropped_extents=0, dropped_bytes=0
    )


def test_a_disk_worker_that_hangs_is_not_waited_for_long_and_one_that_recovers_not_at_all(two_tiers: Kit) -> None:
    draining = Draining(two_tiers.core, two_tiers.service, 10.0, two_tiers.now)
    draining.step(two_tiers.now)
    two_tiers.report(Stopped())
    two_tiers.now += STOP_SECONDS
    assert draining.step(two_tiers.now) is not None
    two_tiers.kill_disk_worker()
    two_tiers.start_disk_worker(recovers=False)
    again = Draining(two_tiers.core, two_tiers.service, 10.0, two_tiers.now)
    assert again.step(two_tiers.now) is not None


def test_du_tells_what_a_group_has_on_disk(two_tiers: Kit) -> None:
    store(two_tiers, 2)
    (row,) = two_tiers.ask(Usage).rows
    assert row.disk_bytes == 0


def test_a_purge_is_over_when_both_tiers_are_swept_and_says_what_was_where(two_tiers: Kit) -> None:
    store(two_tiers, 2)
    two_tiers.ask(Purge, job=JOB, tenant="")
    two_tiers.report(PurgeRecorded(JOB))
    told = two_tiers.instructions()
    assert SweepPurge(JOB) in told
    assert SweepPurge(JOB) in two_tiers.disk_instructions()
    two_tiers.report(*[Zeroed(one.op) for one in told if isinstance(one, Zero)])
    two_tiers.report(PurgeSwept(JOB, Swept(files=1, file_bytes=4096)))
    assert two_tiers.ask(Purge, job=JOB).phase == "removing"
    two_tiers.disk_report(PurgeSwept(JOB, Swept(files=2, file_bytes=8192)))
    last = two_tiers.ask(Purge, job=JOB)
    assert (last.phase, last.removed_files, last.removed_bytes) == ("gone", 3, 12_288)
    assert (last.removed_disk_files, last.removed_disk_bytes) == (2, 8_192)


# ---- audits


def count_nvme(kit: Kit) -> None:
    """The storage worker's part of an audit, without a difference."""
    (order,) = [one for one in kit.instructions() if isinstance(one, CountFiles)]
    kit.report(FilesCounted(order.op, 0, 0, finished=True))
    (reckon,) = [one for one in kit.instructions() if isinstance(one, Reckon)]
    kit.report(Reckoned(reckon.op, []))


def test_an_audit_tells_what_others_did_in_the_disk_directory_and_makes_no_difference_of_it(two_tiers: Kit) -> None:
    two_tiers.ask(Audit, job=JOB)
    count_nvme(two_tiers)
    reply = two_tiers.ask(Audit, job=JOB)
    assert (reply.finished, reply.stage) == (False, "disk")
    (order,) = [one for one in two_tiers.disk_instructions() if isinstance(one, CountFiles)]
    two_tiers.disk_report(FilesCounted(order.op + 1, 9, 9, finished=True), FilesCounted(order.op, 1, 3, finished=False))
    assert (two_tiers.ask(Audit, job=JOB).done, two_tiers.ask(Audit, job=JOB).total) == (1, 3)
    there = [GroupCount(GROUP, 2, 8_192, 0)]
    two_tiers.disk_report(FilesCounted(order.op, 3, 3, finished=True, groups=there))
    reply = two_tiers.ask(Audit, job=JOB)
    assert (reply.finished, reply.table, reply.problem) == (True, (), "")
    assert reply.disk_groups == (GroupCount(GROUP, 2, 8_192, 0),)


def test_an_audit_does_not_wait_for_a_disk_tier_that_is_away_or_dies(two_tiers: Kit) -> None:
    two_tiers.ask(Audit, job=JOB)
    two_tiers.kill_disk_worker()
    count_nvme(two_tiers)
    reply = two_tiers.ask(Audit, job=JOB)
    assert reply.finished
    assert "has died" in reply.problem
    two_tiers.ask(Audit, job=JOB)
    count_nvme(two_tiers)
    assert "the disk tier is not counted: its worker is not running" in two_tiers.ask(Audit, job=JOB).problem
