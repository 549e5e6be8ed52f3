"""Reports of evictions and audits through the service: piece by piece, across the death of a worker, and never lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.kit import GROUP, HOST_BYTES, Kit
from tests.node.test_reading_and_writing import store
from tierkv.core.eviction_report import EvictionLine, EvictionReport
from tierkv.core.instructions import (
    AnyInstruction,
    CountFiles,
    Difference,
    FilesCounted,
    GroupCount,
    JournalRead,
    ReadJournal,
    Reckon,
    Reckoned,
)
from tierkv.node import journal_reports
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.wire.messages import Audit, Error, Evictions

JOB = b"j" * 16
FOUND = Difference(tier="nvme", what="files", booked_bytes=1, counted_bytes=2, found_at=1.0, number=1)


@pytest.fixture
def memory_only() -> Iterator[Kit]:
    kit = Kit()
    kit.open()
    yield kit
    kit.close()


def told(kit: Kit, kind: type[AnyInstruction]) -> AnyInstruction:  # type: ignore[valid-type]
    (found,) = [one for one in kit.instructions() if isinstance(one, kind)]
    return found


def report_of(op: int) -> JournalRead:
    line = EvictionLine(GROUP, b"", 0, "nvme", "dropped", "evicted", evictions=2, tokens=64)
    return JournalRead(op, EvictionReport(5.0, 6.0, (line,), damaged=1, not_written={"no_room": 2}))


def test_a_report_is_the_worker_s_and_names_the_groups(durable: Kit) -> None:
    assert not durable.ask(Evictions, job=JOB, seconds=60.0).finished
    order = told(durable, ReadJournal)
    assert isinstance(order, ReadJournal)
    assert (order.since, order.until) == (durable.now - 60.0, durable.now)
    assert not durable.ask(Evictions, job=JOB).finished
    assert durable.instructions() == []
    durable.report(report_of(order.op))
    reply = durable.ask(Evictions, job=JOB)
    assert (reply.finished, reply.since, reply.damaged, reply.not_written) == (True, 5.0, 1, {"no_room": 2})
    assert [label.group for label in reply.groups] == [GROUP]
    assert reply.lines[0].tokens == 64


def test_what_a_dead_worker_did_not_answer_the_next_one_is_asked(durable: Kit) -> None:
    durable.ask(Evictions, job=JOB)
    durable.instructions()
    durable.kill_worker()
    assert not durable.ask(Evictions, job=JOB).finished
    durable.start_worker()
    order = told(durable, ReadJournal)
    assert isinstance(order, ReadJournal)
    durable.report(JournalRead(order.op, None, "a disk that is no more"))
    assert durable.ask(Evictions, job=JOB).problem == "a disk that is no more"


def test_an_audit_counts_memory_then_files_then_tells_the_table(durable: Kit) -> None:
    store(durable, 2)
    reply = durable.ask(Audit, job=JOB)
    assert (reply.finished, reply.stage) == (False, "files")
    order = told(durable, CountFiles)
    assert isinstance(order, CountFiles)
    durable.report(FilesCounted(order.op, 1, 3, finished=False))
    reply = durable.ask(Audit, job=JOB)
    assert (reply.stage, reply.done, reply.total) == ("files", 1, 3)
    durable.report(FilesCounted(order.op, 3, 3, finished=True, groups=[GroupCount(GROUP, 1, 2, 0)], problem="one"))
    reckon = told(durable, Reckon)
    assert isinstance(reckon, Reckon)
    assert reckon.found == []
    durable.report(Reckoned(reckon.op, [FOUND]))
    reply = durable.ask(Audit, job=JOB)
    assert (reply.finished, reply.table, reply.problem) == (True, (FOUND,), "one")
    assert reply.host_bytes == 8192


def test_the_front_s_own_sums_are_the_third_side_of_an_audit(durable: Kit) -> None:
    store(durable, 2)
    (group,) = durable.state._ledger.groups.values()
    group.nvme_bytes = 500
    durable.ask(Audit, job=JOB)
    order = told(durable, CountFiles)
    assert isinstance(order, CountFiles)
    wrong = GroupCount(GROUP, 1, 700, 700)
    durable.report(FilesCounted(order.op, 1, 1, finished=True, groups=[wrong]))
    again = told(durable, CountFiles)
    assert isinstance(again, CountFiles), "what moves is counted half at times: once more"
    durable.report(FilesCounted(again.op, 1, 1, finished=True, groups=[wrong]))
    reckon = told(durable, Reckon)
    assert isinstance(reckon, Reckon)
    (found,) = reckon.found
    assert (found.tier, found.what, found.group) == ("nvme", "core", GROUP.hex())
    assert (found.booked_bytes, found.counted_bytes) == (500, 700)
    durable.report(Reckoned(reckon.op, [found]))
    assert durable.ask(Audit, job=JOB).table == (found,)
    group.nvme_bytes = 0


def test_what_moved_between_two_counts_is_no_difference(durable: Kit) -> None:
    store(durable, 2)
    (group,) = durable.state._ledger.groups.values()
    group.nvme_bytes = 500
    durable.ask(Audit, job=JOB)
    order = told(durable, CountFiles)
    assert isinstance(order, CountFiles)
    durable.report(FilesCounted(order.op, 1, 1, finished=True, groups=[GroupCount(GROUP, 1, 700, 700)]))
    again = told(durable, CountFiles)
    assert isinstance(again, CountFiles)
    durable.report(FilesCounted(again.op, 1, 1, finished=True, groups=[GroupCount(GROUP, 1, 500, 500)]))
    reckon = told(durable, Reckon)
    assert isinstance(reckon, Reckon)
    assert reckon.found == []
    group.nvme_bytes = 0


def test_a_difference_is_resolved_with_words_and_a_number(durable: Kit) -> None:
    for fields in ({"resolve": 3}, {"resolution": "why"}, {"resolve": 3, "resolution": "  "}):
        assert isinstance(durable.ask(Audit, job=JOB, **fields), Error)
    durable.ask(Audit, job=JOB, resolve=3, resolution="why")
    order = told(durable, Reckon)
    assert isinstance(order, Reckon)
    assert (order.resolve, order.resolution) == (3, "why")
    durable.report(Reckoned(order.op, [], known=False))
    assert not durable.ask(Audit, job=JOB, resolve=3, resolution="why").known


def test_without_a_data_directory_a_difference_is_kept_in_memory(memory_only: Kit) -> None:
    store(memory_only, 2)
    assert memory_only.ask(Audit, job=JOB).table == ()
    (group,) = memory_only.state._ledger.groups.values()
    group.host_slots += 1
    (row,) = memory_only.ask(Audit, job=b"2" * 16).table
    group.host_slots -= 1
    assert (row.number, row.is_open) == (1, True)
    assert memory_only.ask(Audit, job=b"3" * 16).table == (row,)
    (row,) = memory_only.ask(Audit, job=b"4" * 16, resolve=1, resolution="known").table
    assert not row.is_open
    for number in range(HOST_BYTES // 4096 + 4):
        store(memory_only, 1, grant=number.to_bytes(16, "big"), start=10_000 * (number + 1))
    reply = memory_only.ask(Evictions, job=JOB)
    assert (reply.finished, reply.in_memory) == (True, True)
    assert sum(line.evictions for line in reply.lines) >= 4


def test_jobs_are_bounded_and_those_nobody_asks_about_are_forgotten(durable: Kit) -> None:
    for number in range(journal_reports.MAX_JOBS):
        assert not durable.ask(Evictions, job=number.to_bytes(16, "big")).finished
    assert isinstance(durable.ask(Evictions, job=b"x" * 16), Error)
    durable.tick(ABANDONED_SECONDS)
    assert not durable.ask(Evictions, job=b"x" * 16).finished


def test_of_two_audits_at_once_the_second_says_so(durable: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.recount.EXTENTS_AT_A_TIME", 1)
    for number in range(4):
        store(durable, 1, grant=number.to_bytes(16, "big"), start=10_000 * (number + 1))
    assert durable.ask(Audit, job=JOB).stage == "memory"
    assert "another audit" in durable.ask(Audit, job=b"2" * 16).problem
