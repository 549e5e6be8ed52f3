from __future__ import annotations

import msgspec

from tests.node.kit import GROUP, HEALTHY, IDENTITY, Kit
from tests.node.test_reading_and_writing import store
from tierkv.core.instructions import JournalHealth
from tierkv.core.reasons import Reason
from tierkv.metrics.table import METRICS
from tierkv.node.mover import SILENT_SECONDS
from tierkv.wire.messages import Match, Status, Usage


def test_a_quiet_node_is_ready_and_lists_all_its_processes(durable: Kit) -> None:
    status = durable.ask(Status)
    assert (status.state, status.problems) == ("ready", ())
    assert [(worker.name, worker.state) for worker in status.workers] == [
        ("supervisor", "running"),
        ("front", "running"),
        ("storage", "running"),
    ]
    assert [tier.tier for tier in status.tiers] == ["host", "nvme"]


def test_a_silent_worker_makes_it_degraded_and_so_does_a_dead_one(durable: Kit) -> None:
    durable.now += SILENT_SECONDS + 1
    status = durable.ask(Status)
    assert status.state == "degraded"
    assert "has said nothing for 6 s" in status.problems[0]
    assert status.workers[2].state == "silent"
    durable.mover.worker.problem = "killed by SIGBUS"
    durable.kill_worker()
    status = durable.ask(Status)
    assert "killed by SIGBUS" in status.problems[0]
    assert (status.workers[2].state, status.workers[2].problem) == ("restarting", "killed by SIGBUS")


def test_a_tier_that_can_not_be_written_is_degraded_and_comes_back(durable: Kit) -> None:
    durable.report(msgspec.structs.replace(HEALTHY, writable=False, reason=Reason.DISK_FULL, problem="0 bytes free"))
    status = durable.ask(Status)
    assert status.problems == ("nvme is not written to: disk_full 0 bytes free",)
    assert (status.tiers[1].state, status.tiers[1].reason) == ("degraded", "disk_full")
    durable.report(HEALTHY)
    assert durable.ask(Status).state == "ready"


def test_a_tier_that_is_meant_to_be_read_alone_is_ok(durable: Kit) -> None:
    durable.report(msgspec.structs.replace(HEALTHY, writable=False, reason=Reason.READ_ONLY))
    assert durable.ask(Status).tiers[1].state == "degraded"  # nobody has asked for it
    durable.node.read_only = True
    status = durable.ask(Status)
    assert (status.state, status.tiers[1].state, status.tiers[1].reason) == ("ready", "ok", "read_only")
    durable.report(msgspec.structs.replace(HEALTHY, writable=False, reason=Reason.IO_ERROR))
    assert durable.ask(Status).tiers[1].state == "degraded"


def test_memory_that_an_earlier_incarnation_holds_is_said(durable: Kit) -> None:
    durable.node.host_problem = "host memory: 5 bytes are still mapped"
    assert durable.ask(Status).problems == ("host memory: 5 bytes are still mapped",)


def test_usage_counts_what_a_group_holds_and_never_tells_a_salt(durable: Kit) -> None:
    store(durable, 2)
    durable.open(msgspec.structs.replace(IDENTITY, salt="secret tenant"))
    rows = {row.group: row for row in durable.ask(Usage).rows}
    assert (rows[GROUP].tokens, rows[GROUP].extents, rows[GROUP].host_bytes) == (4, 1, 2 * 4096)
    assert rows[GROUP].reachable
    (salted,) = [row for group, row in rows.items() if group != GROUP]
    assert len(salted.salt) == 8
    assert "secret" not in repr(salted)


def test_counters_are_flat_and_named_by_reason(durable: Kit) -> None:
    store(durable, 2)
    durable.ask(Match, group=GROUP, keys=b"")
    durable.ask(Match, group=b"?" * 32, keys=b"")
    counters = durable.ask(Status).counters
    assert counters["stored_tokens"] == 4
    assert counters["requests.Match"] == 2
    assert counters["errors.unknown_group"] == 1


def test_every_metric_can_be_read_from_a_snapshot(durable: Kit) -> None:
    store(durable, 2)
    durable.report(msgspec.structs.replace(HEALTHY, errors={"fsync EIO": 3}))
    snapshot = durable.survey.snapshot(durable.now)
    values = {metric.name: dict(metric.read(snapshot)) for metric in METRICS}
    assert values["stored_tokens_total"] == {(): 4}
    assert values["io_errors_total"] == {("fsync", "EIO"): 3}
    store(durable, 1, grant=b"z" * 16, start=100)
    assert dict(METRICS[0].read(snapshot)) == values["build_info"]
    assert snapshot.core.stored_tokens == 4, "a snapshot does not change any more"


def test_what_the_journal_lacks_is_a_note_and_no_problem(durable: Kit) -> None:
    lacks = ("segments are missing", "files of the journal were removed")
    durable.report(msgspec.structs.replace(HEALTHY, journal=JournalHealth(lacks=lacks, differences=2)))
    status = durable.ask(Status)
    assert status.state == "ready"
    first, second = status.warnings
    assert "files of the journal were removed (and 1 more)" in first
    assert "(2 open)" in second
    durable.report(msgspec.structs.replace(HEALTHY, journal=JournalHealth(problem="a file is in its place")))
    assert durable.ask(Status).warnings == ("evictions are not written down: a file is in its place",)
