"""What the journal says about evictions: sums over a span of time, by group, reason and prefix, and how they went on.

Regret is what was evicted (or refused) and then asked for again: tokens that had to be computed once more, and the
seconds of prefill that took.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from tierkv.core.journal import Account, AnyRow, EvictionRow, RegretRow

MAX_PREFIXES = 1_000
"""Lines of single prefixes: those that took the most bytes, and those that were regretted most; of each so many."""

NUM_BUCKETS = 60


class EvictionLine(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Evictions of one kind, and the regret about them. Without a `key`: of all prefixes, or of those without a line of
    their own. `idle_seconds` and `age_seconds` are summed over tokens: since the last use, and since it was stored; so
    is `value` over bytes."""

    group: bytes
    key: bytes
    first_token: int
    source: str
    target: str
    reason: str
    evictions: int = 0
    blocks: int = 0
    tokens: int = 0
    num_bytes: int = 0
    hits: int = 0
    never_hit: int = 0
    idle_seconds: float = 0.0
    age_seconds: float = 0.0
    value: float = 0.0
    last_at: float = 0.0
    regrets: int = 0
    regret_tokens: int = 0
    regret_seconds: float = 0.0


class Bucket(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of the span of time, from `start` on. Dropped: nowhere any more; moved: still in another tier. What was
    dropped, and the seconds of regret, also by reason: why it had gone."""

    start: float
    dropped_tokens: int = 0
    dropped_bytes: int = 0
    moved_tokens: int = 0
    moved_bytes: int = 0
    regret_tokens: int = 0
    regret_seconds: float = 0.0
    dropped_bytes_by: dict[str, int] = {}
    regret_seconds_by: dict[str, float] = {}


class EvictionReport(msgspec.Struct, frozen=True, array_like=True):
    """`since` is when what is reported begins: later than was asked for, where the journal begins later. `damaged` rows
    could not be read; `not_written` rows of this node's life were dropped, by reason. `lacks` says, in
    words, what else the journal has lost."""

    since: float
    until: float
    lines: tuple[EvictionLine, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    damaged: int = 0
    not_written: dict[str, int] = {}
    in_memory: bool = False
    lacks: tuple[str, ...] = ()


class _Sum:
    __slots__ = ("age", "blocks", "evictions", "hits", "idle", "last_at", "never_hit", "num_bytes", "regret_seconds",
                 "regret_tokens", "regrets", "tokens", "value")  # fmt: skip

    def __init__(self) -> None:
        self.evictions = self.blocks = self.tokens = self.num_bytes = self.hits = self.never_hit = 0
        self.idle = self.age = self.value = self.last_at = self.regret_seconds = 0.0
        self.regrets = self.regret_tokens = 0

    def evicted(self, row: EvictionRow) -> None:
        self.evictions += 1
        self.blocks += row.blocks
        self.tokens += row.tokens
        self.num_bytes += row.num_bytes
        self.hits += row.hits
        self.never_hit += row.hits == 0
        self.idle += max(0.0, row.at - row.last_used) * row.tokens
        self.age += max(0.0, row.at - row.created) * row.tokens
        self.value += row.value * row.num_bytes
        self.last_at = max(self.last_at, row.at)

    def regretted(self, row: RegretRow) -> None:
        self.regrets += 1
        self.regret_tokens += row.tokens
        self.regret_seconds += row.seconds

    def add(self, other: _Sum) -> None:
        for name in self.__slots__:
            if name != "last_at":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_at = max(self.last_at, other.last_at)


class _Bucket:
    __slots__ = ("dropped_by", "dropped_tokens", "moved_bytes", "moved_tokens", "regret_by", "regret_tokens")

    def __init__(self) -> None:
        self.dropped_tokens = self.moved_tokens = self.moved_bytes = self.regret_tokens = 0
        self.dropped_by: Counter[str] = Counter()
        self.regret_by: defaultdict[str, float] = defaultdict(float)

    def evicted(self, row: EvictionRow, *, is_dropped: bool) -> None:
        if is_dropped:
            self.dropped_tokens += row.tokens
            self.dropped_by[row.reason] += row.num_bytes
        else:
            self.moved_tokens += row.tokens
            self.moved_bytes += row.num_bytes

    def regretted(self, row: RegretRow) -> None:
        self.regret_tokens += row.tokens
        self.regret_by[row.reason] += row.seconds

    def at(self, start: float) -> Bucket:
        return Bucket(
            start,
            self.dropped_tokens,
            self.dropped_by.total(),
            self.moved_tokens,
            self.moved_bytes,
            self.regret_tokens,
            sum(self.regret_by.values()),
            dict(self.dropped_by),
            dict(self.regret_by),
        )


_Kind = tuple[bytes, str, str, str]  # group, source, target, reason
_Prefix = tuple[bytes, int]  # key, first token

_ALL: _Prefix = (b"", 0)


def summarize(rows: Iterable[AnyRow], since: float, until: float, *, by_prefix: bool = False) -> EvictionReport:
    """`rows` in any order; those outside of [since, until] do not count."""
    sums: dict[_Kind, dict[_Prefix, _Sum]] = {}
    width = max(until - since, 1e-9) / NUM_BUCKETS
    buckets = [_Bucket() for _ in range(NUM_BUCKETS)]
    for row in rows:
        if not (isinstance(row, EvictionRow | RegretRow) and since <= row.at <= until):
            continue
        bucket = buckets[min(NUM_BUCKETS - 1, int((row.at - since) / width))]
        prefix = (row.key, row.first_token if isinstance(row, EvictionRow) else 0) if by_prefix else _ALL
        if isinstance(row, EvictionRow):
            is_dropped = row.target == Account.DROPPED
            kind = row.group, row.source, row.target, row.reason
            _sum_of(sums, kind, prefix).evicted(row)
            bucket.evicted(row, is_dropped=is_dropped)
        else:
            kind = row.group, row.source, str(Account.DROPPED), row.reason
            _sum_of(sums, kind, prefix).regretted(row)
            bucket.regretted(row)
    return EvictionReport(
        since=since,
        until=until,
        lines=tuple(_lines(sums)),
        buckets=tuple(one.at(since + index * width) for index, one in enumerate(buckets)),
    )


def _sum_of(sums: dict[_Kind, dict[_Prefix, _Sum]], kind: _Kind, prefix: _Prefix) -> _Sum:
    """A regret knows the block by its key alone."""
    of_kind = sums.setdefault(kind, {})
    found = of_kind.get(prefix)
    if found is None:
        found = of_kind[prefix] = _Sum()
    return found


def _lines(sums: dict[_Kind, dict[_Prefix, _Sum]]) -> Iterable[EvictionLine]:
    kept = _worth_a_line(sums)
    for kind, of_kind in sums.items():
        rest = _Sum()
        joined = _join(of_kind)
        for prefix, one in joined.items():
            if prefix[0] and (kind, prefix[0]) in kept:
                yield _line(kind, prefix, one)
            else:
                rest.add(one)
        if rest.evictions or rest.regrets:
            yield _line(kind, _ALL, rest)


def _join(of_kind: dict[_Prefix, _Sum]) -> dict[_Prefix, _Sum]:
    """What a regret names without saying where it begins is put to the eviction of the same key."""
    where = {key: (key, first) for key, first in of_kind if first}
    joined: dict[_Prefix, _Sum] = {}
    for (key, first), one in of_kind.items():
        prefix = where.get(key, (key, first))
        if prefix in joined:
            joined[prefix].add(one)
        else:
            joined[prefix] = one
    return joined


def _worth_a_line(sums: dict[_Kind, dict[_Prefix, _Sum]]) -> set[tuple[_Kind, bytes]]:
    found = [(kind, key, one) for kind, of_kind in sums.items() for (key, _), one in of_kind.items() if key]
    kept: set[tuple[_Kind, bytes]] = set()
    for entries in (
        sorted(found, key=lambda entry: entry[2].num_bytes, reverse=True),
        sorted(found, key=lambda entry: entry[2].regret_seconds, reverse=True),
    ):
        kept.update((kind, key) for kind, key, _ in entries[:MAX_PREFIXES])
    return kept


def _line(kind: _Kind, prefix: _Prefix, one: _Sum) -> EvictionLine:
    group, source, target, reason = kind
    return EvictionLine(
        group=group,
        key=prefix[0],
        first_token=prefix[1],
        source=source,
        target=target,
        reason=reason,
        evictions=one.evictions,
        blocks=one.blocks,
        tokens=one.tokens,
        num_bytes=one.num_bytes,
        hits=one.hits,
        never_hit=one.never_hit,
        idle_seconds=one.idle,
        age_seconds=one.age,
        value=one.value,
        last_at=one.last_at,
        regrets=one.regrets,
        regret_tokens=one.regret_tokens,
        regret_seconds=one.regret_seconds,
    )
