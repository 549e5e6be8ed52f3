"""Evictions as lines: added up by model, tenant, reason or prefix, and one line of advice drawn from the figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from tierkv.core.eviction_report import EvictionLine
from tierkv.wire.messages import EvictionsReply, GroupLabel

BY = ("model", "tenant", "reason", "prefix")

LITTLE_REGRET = 0.02
MUCH_REGRET = 0.10
"""Tokens asked for again, of those that were dropped."""

DAY = 86_400.0
ENOUGH_SECONDS = 3_600.0
"""Of less, what it comes to in a day is said with a caution."""

PURGED = bytes(32)
NOT_WORTH_IT = frozenset({"worth_less", "write_budget"})
"""Reasons of blocks that were not taken, rather than evicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over evictions. `key` is what tells lines apart, `names` what people call them, by column. Dropped: nowhere
    any more; the others are still in another tier."""

    key: tuple[str, ...] = ()
    names: dict[str, str]
    evictions: int = 0
    num_bytes: int = 0
    tokens: int = 0
    dropped_bytes: int = 0
    dropped_tokens: int = 0
    hits: int = 0
    never_hit: int = 0
    idle_seconds: float = 0.0  # these two and the value: sums, over tokens and bytes
    age_seconds: float = 0.0
    value: float = 0.0
    last_at: float = 0.0
    regrets: int = 0
    regret_tokens: int = 0
    regret_seconds: float = 0.0

    def add(self, line: EvictionLine) -> Sums:
        is_dropped = line.target == "dropped"
        return self.join(
            Sums(
                names={},
                evictions=line.evictions,
                num_bytes=line.num_bytes,
                tokens=line.tokens,
                dropped_bytes=line.num_bytes * is_dropped,
                dropped_tokens=line.tokens * is_dropped,
                hits=line.hits,
                never_hit=line.never_hit,
                idle_seconds=line.idle_seconds,
                age_seconds=line.age_seconds,
                value=line.value,
                last_at=line.last_at,
                regrets=line.regrets,
                regret_tokens=line.regret_tokens,
                regret_seconds=line.regret_seconds,
            )
        )

    def join(self, other: Sums) -> Sums:
        """With what another one has summed, under this one's names."""
        summed = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return replace(self, last_at=max(self.last_at, other.last_at), **summed)

    @property
    def regret(self) -> float:
        """Tokens asked for again for each one that was dropped: above 1 when the same ones go again and again."""
        return self.regret_tokens / self.dropped_tokens if self.dropped_tokens else 0.0

    def as_object(self) -> dict[str, object]:
        return self.names | {
            "evictions": self.evictions,
            "bytes": self.num_bytes,
            "tokens": self.tokens,
            "dropped_bytes": self.dropped_bytes,
            "dropped_tokens": self.dropped_tokens,
            "hits": self.hits,
            "never_hit": self.never_hit,
            "mean_idle_seconds": _mean(self.idle_seconds, self.tokens),
            "mean_age_seconds": _mean(self.age_seconds, self.tokens),
            "mean_value": self.value / self.num_bytes if self.num_bytes else 0.0,
            "last_at": self.last_at,
            "regrets": self.regrets,
            "regret_tokens": self.regret_tokens,
            "regret_seconds": round(self.regret_seconds, 3),
            "regret": round(self.regret, 4),
        }


_SUMMED = tuple(one.name for one in fields(Sums) if one.name not in ("key", "names", "last_at"))


def _mean(total: float, weight: int) -> float:
    return round(total / weight, 3) if weight else 0.0


def add_up(lines: Iterable[EvictionLine], groups: Iterable[GroupLabel], by: str) -> list[Sums]:
    """The most regretted first, then the largest."""
    labels = {label.group: label for label in groups}
    found: dict[tuple[str, ...], Sums] = {}
    for line in lines:
        key, names = _names(line, labels, by)
        found[key] = found.get(key, Sums(key=key, names=names)).add(line)
    return sorted(found.values(), key=lambda one: (-one.regret_seconds, -one.dropped_bytes, -one.num_bytes, one.key))


@dataclass(frozen=True, slots=True)
class Shortened:
    """The `first` lines, and what the others sum to: `more` lines, and those that the journal's report has lumped
    together (`has_smaller`), which no line could name. `rest` is None where there are none."""

    first: list[Sums]
    more: int
    has_smaller: bool
    rest: Sums | None

    @property
    def label(self) -> str:
        return " and ".join([f"{self.more:,} more"] * (self.more > 0) + ["smaller ones"] * self.has_smaller)


def shorten(lines: list[Sums], limit: int) -> Shortened:
    """`lines` as `add_up` has ordered them."""
    named = [line for line in lines if line.names.get("key") != ""]
    lumped = [line for line in lines if line.names.get("key") == ""]
    rest: Sums | None = None
    for line in [*named[limit:], *lumped]:
        rest = (rest or Sums(names={})).join(line)
    return Shortened(named[:limit], len(named[limit:]), bool(lumped), rest)


def total(lines: Iterable[EvictionLine]) -> Sums:
    found = Sums(names={})
    for line in lines:
        found = found.add(line)
    return found


def _names(line: EvictionLine, labels: Mapping[bytes, GroupLabel], by: str) -> tuple[tuple[str, ...], dict[str, str]]:
    label = labels.get(line.group)
    model = _model(line, label)
    if by == "reason":
        return (line.reason, line.source, line.target), {
            "reason": line.reason,
            "from": line.source,
            "to": line.target,
        }
    if by == "tenant":
        tenant = label.salt if label is not None else _unknown(line)
        return (tenant,), {"tenant": tenant}
    fingerprint = label.fingerprint if label is not None else ""
    if by == "model":
        return (fingerprint or model,), {"model": model, "fingerprint": fingerprint}
    return (line.group.hex(), line.key.hex()), {
        "model": model,
        "group": line.group.hex(),
        "key": line.key.hex(),
        "first_token": str(line.first_token) if line.key else "",
    }


def _model(line: EvictionLine, label: GroupLabel | None) -> str:
    if label is None:
        return _unknown(line)
    return label.model_name or label.fingerprint[:12] or "(no name)"


def _unknown(line: EvictionLine) -> str:
    return "(purged)" if line.group == PURGED else f"(group {line.group.hex()[:12]})"


# ---- advice


def advice(report: EvictionsReply) -> str:
    """One line: what the figures of this span say about capacity."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import at, duration

    seen = total(report.lines)
    seconds = max(report.until - report.since, 1.0)
    if not seen.evictions and not seen.regrets and (report.lacks or report.damaged or report.not_written):
        since = at(report.since)
        return f"No eviction is in the journal, which tells since {since} and lacks rows: there may have been some."
    if not seen.evictions and not seen.regrets:
        return f"Nothing was evicted in {duration(seconds)}: there is room for all that was stored."
    if not seen.dropped_tokens and not seen.regrets:
        return "All that was evicted is still in another tier: nothing has to be computed again for it."
    again = _asked_again(seen)
    if not seen.dropped_tokens:
        return f"{again}. Whether that is much can't be told from this span; --since looks further back."
    if seen.regret < LITTLE_REGRET:
        most = seen.regret_seconds / seconds * DAY
        return f"Fine: {again}. More capacity would bring next to nothing (at most {most:,.1f} s of prefill a day)."
    left = seen.regret_seconds
    for reasons, words in _NO_CAPACITY_HELPS:
        regretted = sum(line.regret_seconds for line in report.lines if line.reason in reasons)
        left -= regretted
        if regretted > seen.regret_seconds / 2:
            a_day = regretted / seconds * DAY
            return f"{again}, most of them {words} would save up to {a_day:,.1f} s of prefill a day."
    a_day = left / seconds * DAY
    span = f", reckoned from {duration(seconds)} only" if seconds < ENOUGH_SECONDS else ""
    first = "Too small" if seen.regret >= MUCH_REGRET else "A little tight"
    dropped_a_day = human_size(int(seen.dropped_bytes / seconds * DAY))
    return (
        f"{first}: {again}. More capacity would save up to {a_day:,.1f} s of prefill a day "
        f"({dropped_a_day} are dropped a day{span})."
    )


_NO_CAPACITY_HELPS = (
    (NOT_WORTH_IT, "never taken by the tier: a larger write budget"),
    (frozenset({"expired"}), "as they had expired: a longer time in `ttl`"),
    (frozenset({"operator"}), "evicted by an operator's word: leaving them"),
    (
        frozenset({"disk_behind", "disk_degraded"}),
        "not taken by the disk tier, which was too slow or away: one that takes them",
    ),
    (frozenset({"device_down"}), "lost with the process that had a GPU's pool: one that stays up (see its log)"),
)
"""Why something is gone that more room would not have kept; and what would have, of which more than half of the regret
makes the advice."""


def _asked_again(seen: Sums) -> str:
    if not seen.dropped_tokens:
        return f"{seen.regret_tokens:,} tokens that were dropped before were asked for again"
    if seen.regret > 1:  # the same ones again and again, or dropped before this span began
        return (
            f"{seen.regret_tokens:,} tokens were asked for again after they had been dropped, and "
            f"{seen.dropped_tokens:,} were dropped in this span (some several times, or before it)"
        )
    percent = 100 * seen.regret
    share = f"less than 0.1 % ({seen.regret_tokens:,})" if 0 < percent < 0.05 else f"{percent:.1f} %"
    return f"{share} of the tokens that were dropped were asked for again"
