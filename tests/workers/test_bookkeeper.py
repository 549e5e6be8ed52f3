"""A worker keeps the journal: rows of the front, files that come and go, reports and counts; through its own deaths."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage.samples import Sample
from tests.workers.desk import SECONDS, Desk, remove_order
from tests.workers.test_purger import other_tenants, record, sweep
from tierkv.core.instructions import (
    BalanceTier,
    CountFiles,
    Difference,
    FilesCounted,
    JournalRead,
    JournalRows,
    ReadJournal,
    Reckon,
    Reckoned,
    RemoveDone,
    SetAside,
    TierHealth,
)
from tierkv.core.journal import NOBODY, Account, EvictionRow, Posting, RegretRow
from tierkv.core.reasons import Reason
from tierkv.storage.journal_segment import Scan
from tierkv.workers import bookkeeper

GROUP = b"g" * 32


def evicted(at: float, group: bytes = GROUP) -> EvictionRow:
    return EvictionRow(at, group, b"k" * 32, 16, "nvme", "dropped", 1, 16, 4096, 0.0, at - 5.0, 2, 0.0, "evicted")


def read(desk: Desk, op: int = 70, since: float = 0.0) -> JournalRead:
    desk.send(ReadJournal(op, since, time.time() + 10, by_prefix=False))
    found = desk.answer(op)
    assert isinstance(found, JournalRead)
    return found


def count(desk: Desk, op: int) -> FilesCounted:
    desk.send(CountFiles(op))
    found = desk.wait(lambda report: isinstance(report, FilesCounted) and report.op == op and report.finished)
    assert isinstance(found, FilesCounted)
    return found


def balance(desk: Desk, account: Account, group: bytes) -> int:
    journal = desk.worker._books.journal
    assert journal is not None
    return journal.balances.of(account, group)


def test_files_are_booked_as_they_come_and_go_and_a_count_agrees(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        kept, gone, aside = Sample(seed=1), Sample(seed=2), Sample(seed=3)
        size = desk.store(kept, 1).file_bytes
        desk.store(gone, 2)
        desk.store(aside, 3)
        desk.send(remove_order(gone, 4))
        assert isinstance(desk.answer(4), RemoveDone)
        name = aside.name
        desk.send(SetAside(5, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
        assert isinstance(desk.answer(5), RemoveDone)
        assert balance(desk, Account.NVME, kept.group) == size
        assert balance(desk, Account.QUARANTINE, kept.group) == size
        assert balance(desk, Account.DROPPED, kept.group) == size
        found = count(desk, 6)
        ((group, files, counted, booked),) = [(g.group, g.files, g.counted_bytes, g.booked_bytes) for g in found.groups]
        assert (group, files, counted, booked) == (kept.group, 1, size, size)
        assert (found.table, found.problem) == ([], "")
        desk.stop()
    with Desk(tmp_path / "data") as desk:
        assert count(desk, 1).table == []


def set_aside(desk: Desk, sample: Sample, op: int) -> None:
    desk.store(sample, op)
    name = sample.name
    desk.send(SetAside(op + 1, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
    assert isinstance(desk.answer(op + 1), RemoveDone)


def postings(desk: Desk, source: Account) -> list[tuple[str, str, int]]:
    journal = desk.worker._books.journal
    assert journal is not None
    rows = [row for row in journal.rows(0.0, Scan()) if isinstance(row, Posting) and row.source == source]
    return [(row.target, row.reason, row.num_bytes) for row in rows]


def test_what_leaves_quarantine_is_booked_with_the_reason(tmp_path: Path) -> None:
    with Desk(tmp_path / "one") as desk:
        size = desk.store(Sample(seed=1), 1).file_bytes
    with Desk(tmp_path / "data", quarantine_bytes=2 * size + 100) as desk:
        for number in range(3):
            set_aside(desk, Sample(seed=number), 10 * number + 1)
        assert postings(desk, Account.QUARANTINE) == [("dropped", "no_room", size)]
        group = Sample(seed=1).group
        assert balance(desk, Account.QUARANTINE, group) == 2 * size
        next((tmp_path / "data" / "quarantine").iterdir()).unlink()
        desk.stop()
    with Desk(tmp_path / "data", quarantine_bytes=2 * size + 100) as desk:  # somebody has removed one meanwhile
        assert postings(desk, Account.QUARANTINE)[1:] == [("dropped", "not_found", size)]
        assert balance(desk, Account.QUARANTINE, group) == size
        desk.worker._tier.quarantine.prune(time.time() + 8 * 86_400)
        assert postings(desk, Account.QUARANTINE)[2:] == [("dropped", "expired", size)]
        assert balance(desk, Account.QUARANTINE, group) == 0


def test_what_others_did_while_no_node_ran_is_an_open_difference(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        samples = [Sample(seed=1), Sample(seed=2)]
        size = sum(desk.store(sample, op).file_bytes for op, sample in enumerate(samples, 1)) // 2
        assert count(desk, 9).table == []
        desk.stop()
    (tmp_path / "data" / str(samples[0].name)).unlink()
    with Desk(tmp_path / "data") as desk:
        health = desk.health(lambda health: health.journal.differences == 1)
        assert health.journal.num_bytes > 0
        (told,) = count(desk, 1).table
        assert (told.found_by, told.booked_bytes, told.counted_bytes) == ("start", 2 * size, size)
        desk.send(Reckon(2, [], 1.0, resolve=told.number, resolution="it was me"))
        reckoned = desk.answer(2)
        assert isinstance(reckoned, Reckoned)
        assert [row.is_open for row in reckoned.table] == [False]
        desk.send(
            Reckon(3, [Difference(tier="host", what="slots", booked_bytes=1, counted_bytes=2, found_at=1.0)], 1.0)
        )
        assert [row.tier for row in desk.answer(3).table] == ["nvme", "host"]  # type: ignore[union-attr]
        desk.send(Reckon(4, [], 1.0, resolve=77, resolution="nothing"))
        reckoned = desk.answer(4)
        assert isinstance(reckoned, Reckoned)
        assert not reckoned.known


def test_rows_of_the_front_are_reported_on_after_a_death_as_well(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        began = time.time()
        desk.send(JournalRows([evicted(began + n) for n in range(3)]))
        desk.send(JournalRows([RegretRow(began + 4, GROUP, b"k" * 32, "nvme", 1, 16, 0.25, began, "evicted")]))
        report = read(desk).report
        assert report is not None
        (line,) = report.lines
        assert (line.evictions, line.tokens, line.num_bytes, line.hits) == (3, 48, 3 * 4096, 6)
        assert (line.regrets, line.regret_tokens, line.regret_seconds) == (1, 16, 0.25)
        assert line.idle_seconds == 48 * 5.0
        assert sum(bucket.dropped_tokens for bucket in report.buckets) == 48
        assert (report.damaged, report.not_written) == (0, {})
    with Desk(tmp_path / "data") as desk:  # the first one was not stopped in order
        report = read(desk, since=began + 1.5).report
        assert report is not None
        assert [(line.evictions, line.regrets) for line in report.lines] == [(1, 1)]


def test_host_memory_is_balanced_when_rows_were_lost(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.send(JournalRows([Posting(1.0, GROUP, Account.COMPUTED, Account.HOST, 100)]))
        desk.send(BalanceTier([(GROUP, 70), (b"o" * 32, 5)], Reason.WORKER_DIED))
        read(desk)
        assert (balance(desk, Account.HOST, GROUP), balance(desk, Account.DROPPED, GROUP)) == (70, 30)
        assert balance(desk, Account.FOUND, b"o" * 32) == -5
        desk.send(BalanceTier([], Reason.SHUTDOWN))
        read(desk, op=71)
        assert balance(desk, Account.HOST, GROUP) == 0


def test_each_tier_is_balanced_by_itself(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.send(JournalRows([Posting(1.0, GROUP, Account.COMPUTED, Account.HOST, 100)]))
        desk.send(JournalRows([Posting(1.0, GROUP, Account.COPIED, Account.DISK, 100)]))
        desk.send(BalanceTier([(GROUP, 130)], Reason.NODE_AWAY, Account.DISK))
        read(desk)
        assert (balance(desk, Account.HOST, GROUP), balance(desk, Account.DISK, GROUP)) == (100, 130)
        assert balance(desk, Account.FOUND, GROUP) == -30


def test_rows_that_find_no_room_are_dropped_and_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bookkeeper, "MAX_WAITING", 5)
    with Desk(tmp_path / "data") as desk:
        desk.send(JournalRows([evicted(time.time())] * 6))
        health = desk.health(lambda health: bool(health.journal.dropped))
        assert health.journal.dropped == {"no_room": 6}
        desk.send(JournalRows([evicted(time.time())] * 5))
        report = read(desk).report
        assert report is not None
        assert sum(line.evictions for line in report.lines) == 5
        assert report.not_written == {"no_room": 6}


def test_the_journal_counts_as_overhead(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        before = desk.health(lambda health: True)
        desk.send(JournalRows([evicted(time.time())] * 2_000))
        read(desk)
        after = desk.health(lambda health: health.journal.num_bytes > 300_000)
        assert after.overhead_bytes - before.overhead_bytes >= 300_000


def test_a_purge_makes_the_journal_forget_and_books_what_it_removed(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        mine, other = Sample(), other_tenants()
        size = desk.store(mine, 1).file_bytes
        desk.store(other, 2)
        desk.send(JournalRows([evicted(time.time(), mine.group), evicted(time.time(), other.group)]))
        record(desk, mine)
        assert sweep(desk).reason is None
        everything = b"".join(path.read_bytes() for path in (tmp_path / "data" / "journal").iterdir())
        assert mine.group not in everything
        assert other.group in everything
        assert balance(desk, Account.PURGED, NOBODY) == size
        report = read(desk).report
        assert report is not None
        assert {line.group for line in report.lines} == {NOBODY, other.group}
        assert count(desk, 9).table == []


def test_a_directory_that_is_only_read_is_reported_on_and_left_alone(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.send(JournalRows([evicted(time.time())]))
        read(desk)
        desk.stop()
    before = {path: path.read_bytes() for path in (tmp_path / "data" / "journal").iterdir()}
    with Desk(tmp_path / "data", read_only=True) as desk:
        desk.recovered()
        report = read(desk).report
        assert report is not None
        assert [line.evictions for line in report.lines] == [1]
        assert any(isinstance(report, TierHealth) for report in desk.reports)
    assert {path: path.read_bytes() for path in (tmp_path / "data" / "journal").iterdir()} == before


def test_an_exception_while_something_is_counted_ends_the_worker(tmp_path: Path, monkeypatch) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.recovered()
        monkeypatch.setattr(desk.worker._bookkeeper, "_summed", lambda order: 1 / 0)
        desk.send(ReadJournal(1, 0.0, 1.0, by_prefix=False))
        deadline = time.monotonic() + SECONDS
        while not desk.dead_threads:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [name.startswith("audit-") for name in desk.dead_threads] == [True]
        desk.dead_threads.clear()  # seen


def test_a_journal_that_is_removed_under_a_worker_is_noticed_told_and_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    with Desk(tmp_path / "data") as desk:
        desk.send(JournalRows([evicted(time.time())] * 5))
        report = read(desk).report
        assert report is not None
        assert report.lacks == ()
        shutil.rmtree(folder)
        health = desk.health(lambda health: bool(health.journal.lacks and health.journal.dropped))
        assert "were removed or replaced while the node ran" in health.journal.lacks[0]
        assert health.journal.dropped["not_found"] >= 5
        assert health.journal.problem == ""
        assert len(list(folder.glob("*.log"))) == 1
        report = read(desk, op=71, since=time.time() - 86_400.0).report
        assert report is not None
        assert report.lacks == health.journal.lacks
        assert report.not_written["not_found"] >= 5
        assert report.until - report.since < SECONDS + 60.0
        desk.send(JournalRows([evicted(time.time())]))
        report = read(desk, op=72).report
        assert report is not None
        assert sum(line.evictions for line in report.lines) == 1


def test_what_stands_in_the_place_of_the_journal_is_told_until_it_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    with Desk(tmp_path / "data") as desk:
        read(desk)
        folder.rename(tmp_path / "away")
        folder.write_bytes(b"not yours")
        health = desk.health(lambda health: bool(health.journal.problem))
        assert "can't be written where it was" in health.journal.problem
        report = read(desk, op=71).report
        assert report is not None
        assert health.journal.problem in report.lacks
        assert report.since >= report.until
        folder.unlink()
        desk.health(lambda health: not health.journal.problem)
        assert len(list(folder.glob("*.log"))) == 1


def test_what_a_start_finds_missing_from_the_journal_is_told(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "data" / "journal"
    with Desk(tmp_path / "data") as desk:
        read(desk)
    (last,) = folder.glob("*.log")
    last.rename(folder / f"{7:016d}.log")
    shutil.copy(folder / f"{7:016d}.log", folder / f"{9:016d}.log")
    with Desk(tmp_path / "data") as desk:
        health = desk.health(lambda health: bool(health.journal.lacks))
    assert health.journal.lacks == (f"segments are missing from the journal: 1, before {9:016d}.log",)
    assert "segments are missing" in caplog.text


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, function: str, thread: str) -> Iterator[None]:
    """A function of `os` that does not come back in one thread of the worker."""
    answered, real = threading.Event(), getattr(os, function)

    def hang(*arguments: object, **named: object) -> object:
        if threading.current_thread().name == thread:
            assert answered.wait(SECONDS)
        return real(*arguments, **named)

    monkeypatch.setattr(os, function, hang)
    try:
        yield
    finally:
        answered.set()


@pytest.mark.parametrize(
    ("function", "thread", "doing"), [("write", "journal", "journal"), ("fstatvfs", "health", "look")]
)
def test_health_is_told_on_and_on_while_a_call_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, thread: str, doing: str
) -> None:
    monkeypatch.setattr(bookkeeper, "MAX_WAITING", 5)
    with Desk(tmp_path / "data", stuck_seconds=0.05) as desk:
        desk.health(lambda health: health.writable)
        with hanging(monkeypatch, function, thread):
            desk.send(JournalRows([evicted(time.time())]))
            for _ in range(3):
                stuck = desk.health(lambda health: health.reason == Reason.IO_STUCK)
                assert f"{doing} of thread {thread}" in stuck.problem
            desk.send(JournalRows([evicted(time.time())] * 6))
            if thread != "health":  # which looks at the journal
                desk.health(lambda health: bool(health.journal.dropped))
        desk.health(lambda health: health.writable)
