"""What the front hands to the journal: every movement once, no more than is kept up with, and nobody waits."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.node.kit import BLOCK_BYTES, GROUP, HEALTHY, HOST_BYTES, RECOVERED, Kit
from tests.node.test_reading_and_writing import flush, store
from tierkv.core.instructions import BalanceTier, JournalRows
from tierkv.core.journal import Account, Balances, EvictionRow, Posting, RegretRow
from tierkv.core.reasons import Reason
from tierkv.node import journal_feed
from tierkv.node.draining import Draining
from tierkv.wire.messages import Acquire, Seal

SLOTS = HOST_BYTES // BLOCK_BYTES


def rows(kit: Kit) -> list[Posting | EvictionRow | RegretRow]:
    kit.instructions()
    return [row for told in kit.booked if isinstance(told, JournalRows) for row in told.rows]


def balance(kit: Kit) -> int:
    """What the rows say that host memory holds."""
    balances = Balances()
    for row in rows(kit):
        balances.fold(row)
    return balances.of(Account.HOST, GROUP)


def told_balance(kit: Kit, account: Account = Account.HOST) -> BalanceTier | None:
    """The last that the journal was told of the tier."""
    kit.instructions()
    told = [one for one in kit.booked if isinstance(one, BalanceTier) and one.account == account]
    return told[-1] if told else None


def fill(kit: Kit, times: int = 2) -> None:
    """Store more than host memory holds, each on disk before the next."""
    for number in range(times * SLOTS // 2):
        kit.now += 1.0
        keys = store(kit, 2, grant=number.to_bytes(16, "big"), start=10_000 * (number + 1))
        kit.ask(Seal, group=GROUP, keys=keys)
        flush(kit)


def test_rows_of_host_memory_come_to_what_is_in_it(durable: Kit) -> None:
    fill(durable)
    durable.tick(journal_feed.PERIOD_SECONDS)
    (usage,) = durable.state.usage()
    assert balance(durable) == usage.host_bytes > 0
    sums: Counter[tuple[str, str]] = Counter()
    for row in rows(durable):
        if isinstance(row, Posting):
            sums[row.source, row.target] += row.num_bytes
    assert sums[Account.COMPUTED, Account.HOST] == 2 * SLOTS * BLOCK_BYTES
    evictions = [row for row in rows(durable) if isinstance(row, EvictionRow)]
    assert sum(row.num_bytes for row in evictions) == sums[Account.HOST, Account.COPIED]
    assert {(row.source, row.target, row.reason) for row in evictions} == {("host", "nvme", "evicted")}
    assert all(row.created <= row.last_used <= row.at and row.tokens for row in evictions)


def test_rows_go_once_a_second_and_not_with_each_request(durable: Kit) -> None:
    durable.tick(journal_feed.PERIOD_SECONDS)
    before = len(rows(durable))
    store(durable, 2)
    assert len(rows(durable)) == before
    assert durable.service.next_wakeup() is not None
    durable.tick(journal_feed.PERIOD_SECONDS)
    assert len(rows(durable)) > before


def test_a_worker_that_reads_nothing_costs_rows_and_nobody_s_time(
    durable: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.node.mover.MAX_BUFFERED_FOR_TOUCH", -1)
    fill(durable)
    durable.tick(journal_feed.PERIOD_SECONDS)
    feed = durable.core.journal
    assert feed.dropped[Reason.NO_ROOM] > 0
    monkeypatch.undo()
    durable.booked.clear()
    store(durable, 1, grant=b"x" * 16, start=5)
    durable.tick(journal_feed.PERIOD_SECONDS)
    durable.instructions()
    (usage,) = durable.state.usage()
    assert told_balance(durable) == BalanceTier([(GROUP, usage.host_bytes)], Reason.NO_ROOM)
    assert not any(isinstance(row, Posting) for row in rows(durable))


def test_the_next_worker_is_told_what_host_memory_holds(durable: Kit) -> None:
    store(durable, 2)
    durable.kill_worker()
    durable.start_worker()
    durable.instructions()
    assert told_balance(durable) == BalanceTier([(GROUP, 2 * BLOCK_BYTES)], Reason.WORKER_DIED)


def test_an_end_in_order_books_that_memory_is_given_up(durable: Kit) -> None:
    store(durable, 2)
    draining = Draining(durable.core, durable.service, 0.0, durable.now)
    draining.step(durable.now)
    durable.instructions()
    assert told_balance(durable) == BalanceTier([], Reason.SHUTDOWN)


def test_without_a_data_directory_the_last_rows_are_kept_and_tell_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    kit.open()
    began = kit.now
    for number in range(2 * SLOTS):
        kit.now += 1.0
        store(kit, 1, grant=number.to_bytes(16, "big"), start=10_000 * (number + 1))
    report = kit.core.journal.report(0.0, kit.now, by_prefix=False, began=began)
    (line,) = report.lines
    assert (report.since, report.in_memory) == (began, True)
    assert (line.source, line.target, line.num_bytes) == ("host", "dropped", line.evictions * BLOCK_BYTES)
    assert line.evictions >= SLOTS
    kit.core.journal.forget(frozenset([GROUP]), frozenset())
    report = kit.core.journal.report(0.0, kit.now, by_prefix=True, began=began)
    assert {(line.group, line.key) for line in report.lines} == {(bytes(32), b"")}


def test_what_is_asked_for_again_is_a_regret() -> None:
    kit = Kit()
    kit.open()
    keys = store(kit, 2)
    for number in range(1, 2 * SLOTS):
        kit.now += 1.0
        store(kit, 1, grant=number.to_bytes(16, "big"), start=10_000 * (number + 1))
    kit.ask(Acquire, grant=b"a" * 16, group=GROUP, keys=keys)
    report = kit.core.journal.report(0.0, kit.now, by_prefix=False, began=0.0)
    assert sum(line.regrets for line in report.lines) == 1


def test_what_the_disk_tier_holds_is_told_when_it_is_known() -> None:
    kit = Kit(nvme_bytes=2**20, disk_bytes=2**22)
    kit.start_worker()
    kit.start_disk_worker(recovers=False)
    kit.tick(journal_feed.PERIOD_SECONDS)
    assert told_balance(kit) == BalanceTier([], Reason.NODE_AWAY)
    assert told_balance(kit, Account.DISK) is None
    kit.disk_report(RECOVERED, HEALTHY)
    assert kit.service.next_wakeup() is not None
    kit.tick(journal_feed.PERIOD_SECONDS)
    assert told_balance(kit, Account.DISK) == BalanceTier([], Reason.NODE_AWAY, Account.DISK)
    kit.close()


def test_without_a_disk_tier_what_was_booked_of_an_earlier_one_is_let_go(durable: Kit) -> None:
    assert told_balance(durable, Account.DISK) == BalanceTier([], Reason.NODE_AWAY, Account.DISK)
