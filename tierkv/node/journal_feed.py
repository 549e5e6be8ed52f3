"""What the front hands to the journal: notices become rows, rows go to the storage worker once a second.

Nobody waits for it. Where the worker does not keep up, rows are dropped and counted, and the balances of host memory
and of the disk tier are told anew when it does; that of the disk not before it is known what lies there. Without a data
directory the last rows are kept here, and nothing is written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

from tierkv.core.eviction_report import EvictionReport, summarize
from tierkv.core.grants import Evicted, Regretted
from tierkv.core.instructions import AnyInstruction, BalanceTier, JournalRows
from tierkv.core.journal import Account, Anonymizer, EvictionRow, Posting, RegretRow
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState
from tierkv.node.mover import Mover

PERIOD_SECONDS = 1.0
ROWS_OF_A_MESSAGE = 1_000
MAX_WAITING = 20_000
BALANCED = (Account.HOST, Account.DISK, Account.GPU)
MAX_KEPT = 20_000
"""Rows kept in memory where there is no data directory: 5 MB or so."""


class JournalFeed:
    def __init__(self, state: CacheState, mover: Mover, *, has_nvme: bool) -> None:
        self._state = state
        self._mover = mover
        self._has_nvme = has_nvme
        self._rows: list[Posting | EvictionRow | RegretRow] = []
        self._kept: deque[EvictionRow | RegretRow] = deque(maxlen=MAX_KEPT)
        self._due = 0.0
        self._unbalanced: dict[Account, Reason] = {}
        self.dropped: Counter[str] = Counter()

    def evicted(self, notice: Evicted, now: float) -> None:
        self._add(
            EvictionRow(
                now,
                notice.group,
                notice.key,
                notice.first_token,
                notice.tier,
                notice.to,
                notice.blocks,
                notice.tokens,
                notice.num_bytes,
                notice.created,
                notice.last_used,
                notice.hits,
                notice.value,
                notice.reason,
            )
        )

    def regretted(self, notice: Regretted, now: float) -> None:
        self._add(
            RegretRow(
                now,
                notice.group,
                notice.key,
                notice.tier,
                notice.blocks,
                notice.tokens,
                notice.seconds,
                notice.evicted_at,
                notice.reason,
            )
        )

    def _add(self, row: EvictionRow | RegretRow) -> None:
        if not self._has_nvme:
            self._kept.append(row)
        elif len(self._rows) < MAX_WAITING:
            self._rows.append(row)
        else:
            self.dropped[Reason.NO_ROOM] += 1

    # ---- to the worker

    def worker_started(self, now: float, reason: Reason) -> None:
        """What the last one was told and had not written is lost: this one is told how much host memory holds."""
        self.unbalance(reason)
        self.flush(now)

    def unbalance(self, reason: Reason) -> None:
        """Balances of memory and of the disk tier may be wrong: they are told with the next rows."""
        self._unbalanced = dict.fromkeys(BALANCED, reason)

    def next_due(self) -> float | None:
        is_waiting = self._has_nvme and (self._rows or self._state.has_postings or any(self._due_balances()))
        return self._due if is_waiting and self._mover.is_attached else None

    def _due_balances(self) -> Iterator[Account]:
        """What lies on disk is found out while the node already serves."""
        for account in self._unbalanced:
            if account is not Account.DISK or not self._state.is_disk_recovering:
                yield account

    def tick(self, now: float) -> None:
        due = self.next_due()
        if due is not None and due <= now:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Send what waits."""
        self._due = now + PERIOD_SECONDS
        if not (self._has_nvme and self._mover.is_attached):
            return
        if self._mover.is_choked:
            self.dropped[Reason.NO_ROOM] += len(self._rows)
            self._rows = []
            self._unbalanced = dict.fromkeys(BALANCED, Reason.NO_ROOM) | self._unbalanced
            return
        # Of what is unbalanced no movements are told: what they come to follows.
        postings = [one for one in self._state.take_postings(now) if self._account(one) not in self._unbalanced]
        rows = [*self._rows, *postings]
        self._rows = []
        for start in range(0, len(rows), ROWS_OF_A_MESSAGE):
            self._send(JournalRows(rows[start : start + ROWS_OF_A_MESSAGE]))
        for account in list(self._due_balances()):
            self._send(BalanceTier(self._balances(account), self._unbalanced.pop(account), account))

    def _balances(self, account: Account) -> list[tuple[bytes, int]]:
        if account is Account.DISK:
            return self._state.disk_balances()
        return self._state.gpu_balances() if account is Account.GPU else self._state.host_balances()

    @staticmethod
    def _account(posting: Posting) -> Account:
        """The tier that it is about: nothing moves between these two."""
        accounts = (posting.source, posting.target)
        return next((one for one in (Account.DISK, Account.GPU) if one in accounts), Account.HOST)

    def close(self, now: float) -> None:
        """Send what waits, and that all memory is given up."""
        self.flush(now)
        if self._has_nvme and self._mover.is_attached:
            self._send(BalanceTier([], Reason.SHUTDOWN))
            self._send(BalanceTier([], Reason.SHUTDOWN, Account.GPU))

    def _send(self, instruction: AnyInstruction) -> None:
        self._mover.send(instruction)

    def all_dropped(self, by_worker: Mapping[str, int]) -> dict[str, int]:
        """Rows that are not written, here or by the worker since its start, by reason."""
        return dict(self.dropped + Counter(by_worker))

    # ---- without a data directory

    def report(self, since: float, now: float, *, by_prefix: bool, began: float) -> EvictionReport:
        """From the rows that are kept here."""
        is_full = len(self._kept) == MAX_KEPT
        begins = self._kept[0].at if is_full else began
        begin = max(since, begins)
        found = summarize(self._kept, begin, now, by_prefix=by_prefix)
        return EvictionReport(begin, now, found.lines, found.buckets, in_memory=True)

    def forget(self, groups: frozenset[bytes], prefixes_of: frozenset[bytes]) -> None:
        """A purge: of whole groups, and of some of `prefixes_of`."""
        anonymizer = Anonymizer(groups, prefixes_of)
        kept = [anonymizer.apply(row) for row in self._kept]
        self._kept = deque((row for row in kept if isinstance(row, EvictionRow | RegretRow)), MAX_KEPT)
