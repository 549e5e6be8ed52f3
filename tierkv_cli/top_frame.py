"""One frame of `tierkv top`: what there is to say, laid out for a width and a height.

Sections come in the order of their importance. Where there is too little height the last one loses its rows first, then
goes; where there is too little width a table loses its least important columns, and a line its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.text import Text

from tierkv.config.sizes import human_size
from tierkv_cli.output import ago, bar, count, duration, percent, printable

if TYPE_CHECKING:
    from tierkv.wire.messages import EvictionRow, HotPrefixRow, StatusReply, TierUsage, TopReply

WINDOW_SECONDS = 10.0
"""What goes on "now" is told over so long: a second has too few requests in it."""

ROWS = 20  # of a table, where there is no end to the height
LEFT_COLUMNS = 96
SIDE_BY_SIDE_COLUMNS = 168
"""From this width on the two tables stand beside one another."""

KEY_DIGITS = 16  # as many as name a prefix on other commands


@dataclass(frozen=True, slots=True)
class Sample:
    status: StatusReply
    top: TopReply

    @property
    def counters(self) -> Mapping[str, float]:
        return self.status.counters

    def hit_tokens(self) -> float:
        return sum(value for name, value in self.counters.items() if name.startswith("hit_tokens."))


@dataclass(slots=True)
class History:
    """The samples of the last WINDOW_SECONDS, and the one before: rates are differences."""

    samples: deque[Sample] = field(default_factory=deque)

    def add(self, sample: Sample) -> None:
        if self.samples and self.samples[-1].status.incarnation != sample.status.incarnation:
            self.samples.clear()  # a new front counts from 0
        self.samples.append(sample)
        while len(self.samples) > 2 and self.samples[1].top.now <= sample.top.now - WINDOW_SECONDS:
            self.samples.popleft()

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def seconds(self) -> float:
        """That rates are over; 0 while there is one sample only."""
        return max(0.0, self.samples[-1].top.now - self.samples[0].top.now)

    def grown(self, *names: str) -> float:
        first, last = self.samples[0].counters, self.samples[-1].counters
        return sum(last.get(name, 0) - first.get(name, 0) for name in names)

    def rate(self, *names: str) -> float | None:
        """A second; None while it is not known."""
        return self.grown(*names) / self.seconds if self.seconds else None

    def hit_share(self) -> tuple[float, float]:
        """Tokens hit and asked for lately."""
        return self.last.hit_tokens() - self.samples[0].hit_tokens(), self.grown("asked_tokens")


# ---- the frame


def frame(history: History, *, width: int, height: int | None, endpoint: str, note: str = "") -> list[Text]:
    """Lines of at most `width` columns; at most `height` of them (None: all). `note` is said first, as what matters
    most."""
    sample = history.last
    head = [*_note(note), *_head(sample, endpoint, width)]
    tiers = [Text(), *_tiers(sample.status.tiers, width)]
    rates = [Text(), *_rates(history, width)]
    lines = [*head, *tiers, *rates]
    room = None if height is None else height - len(lines)
    most = ROWS if height is None else height
    hot, gone, now = sample.top.hottest[:most], sample.top.evictions[:most], sample.top.now
    if height is not None and width >= SIDE_BY_SIDE_COLUMNS:
        right = width - LEFT_COLUMNS - 2
        lines += [Text(), *_beside(_hottest(hot, now, LEFT_COLUMNS), _evictions(gone, now, right))]
    else:
        for section in _share(room, _hottest(hot, now, width), _evictions(gone, now, width)):
            lines += section
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[:height]


def _share(room: int | None, hot: list[Text], gone: list[Text]) -> Iterator[list[Text]]:
    """A section is a title, heads and rows behind an empty line. The hottest get two thirds, and what the evictions
    leave."""
    sections = [[Text(), *section] for section in (hot, gone)]
    if room is None:
        yield from sections
        return
    whole = sum(map(len, sections))
    if whole <= room:
        yield from sections
        return
    second = min(len(sections[1]), max(room // 3, room - len(sections[0])))
    second = second if second >= _LEAST_SECTION else 0
    first = min(len(sections[0]), room - second)
    yield sections[0][:first] if first >= _LEAST_SECTION else []
    yield sections[1][:second]


def _beside(left: list[Text], right: list[Text]) -> Iterator[Text]:
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.pad_right(LEFT_COLUMNS + 2 - len(one))
        yield line.append_text(other)


_LEAST_SECTION = 4  # an empty line, title, heads, a row


def _note(note: str) -> Iterator[Text]:
    if note:
        yield Text(printable(note), style="bold red")


def _head(sample: Sample, endpoint: str, width: int) -> Iterator[Text]:
    status = sample.status
    color = {"ready": "green", "stopping": "yellow"}.get(status.state, "red")
    line = Text.assemble(
        ("tierkv", "bold"),
        f" {time.strftime('%H:%M:%S', time.localtime(sample.top.now))}  ",
        (status.state, color),
        f", up {duration(status.uptime_seconds)}; {count(status.sessions, 'session')}, "
        f"{count(status.leases, 'lease')}, {count(status.tickets, 'ticket')}",
    )
    if len(line) + 2 + len(endpoint) <= width:
        line.append(f"  {endpoint}")
    yield line
    if status.state == "recovering":
        yield Text(f"recovering: {status.recovery_stage}, {status.recovery_done:,} of {status.recovery_total:,}")
    for problem in status.problems:
        yield Text(f"! {problem}", style="yellow")


def _tiers(tiers: tuple[TierUsage, ...], width: int) -> Iterator[Text]:
    """ "host  [####+++......]  63.2 %  1.2 GiB + 0.1 GiB of 4.0 GiB": # used, + reserved."""
    wide = max(10, min(60, width - 60))
    for tier in tiers:
        taken = tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes
        used = bar(tier.used_bytes, tier.capacity_bytes, wide).count("#")
        all_of_it = bar(taken, tier.capacity_bytes, wide).count("#")
        drawn = "#" * used + "+" * (all_of_it - used) + "." * (wide - all_of_it)
        state = "" if tier.state == "ok" else f"  {tier.state}" + (f": {tier.reason}" if tier.reason else "")
        beside = f" + {human_size(taken - tier.used_bytes)}" if taken > tier.used_bytes else ""
        words = f"{human_size(tier.used_bytes)}{beside} of {human_size(tier.capacity_bytes)}"
        yield Text.assemble(
            f"{tier.tier:<5} [", (drawn, "cyan"), f"] {percent(taken, tier.capacity_bytes):>7}  {words}", (state, "red")
        )


def _rates(history: History, width: int) -> Iterator[Text]:
    sample = history.last
    counters, queues = sample.counters, sample.top.queues
    hit, asked = history.hit_share()
    all_hit, all_asked = sample.hit_tokens(), counters.get("asked_tokens", 0)
    yield Text.assemble(
        "hit rate  ",
        (f"{percent(hit, asked):>7}", "bold"),
        f" of tokens now, {percent(all_hit, all_asked)} since the start ({short(all_hit)} of {short(all_asked)})",
    )
    yield Text(
        f"tokens/s  asked {_rate(history.rate('asked_tokens'))}, from memory {_rate(history.rate('hit_tokens.host'))}, "
        f"from NVMe {_rate(history.rate('hit_tokens.nvme'))}, stored {_rate(history.rate('stored_tokens'))}"
    )
    yield Text(
        f"per s     {_rate(history.rate('requests.Acquire'))} loads, {_rate(history.rate('requests.Commit'))} stores, "
        f"NVMe read {_bytes(history.rate('nvme_read_bytes'))}, written {_bytes(history.rate('nvme_written_bytes'))}"
    )
    if any(tier.tier == "disk" for tier in sample.status.tiers):
        yield Text(
            f"disk      {_rate(history.rate('hit_tokens.disk'))} tokens per s from it, "
            f"read {_bytes(history.rate('disk_read_bytes'))}, written {_bytes(history.rate('disk_written_bytes'))}"
        )
    if devices := sample.status.devices:
        copies = sum(device.queued_copies for device in devices)
        there = sum(device.state == "ok" for device in devices)
        yield Text(
            f"gpu       {_rate(history.rate('hit_tokens.gpu'))} tokens per s from it, {there} of "
            f"{count(len(devices), 'pool')} there, copies under way {copies:,}"
        )
    waiting = ", ".join(f"{name} {number:,}" for name, number in queues.items())
    yield Text(f"waiting   {waiting}; {count(sample.status.dirty_extents, 'extent')} not on disk yet")


def _rate(rate: float | None) -> str:
    return "-" if rate is None else short(rate)


def _bytes(rate: float | None) -> str:
    return "-" if rate is None else f"{human_size(int(rate))}"


# ---- tables


@dataclass(frozen=True, slots=True)
class Column:
    """The higher `rank`, the sooner it goes."""

    title: str
    rank: int = 0
    is_number: bool = True
    most: int = 40  # columns of the screen


def _hottest(rows: tuple[HotPrefixRow, ...], now: float, width: int) -> list[Text]:
    columns = (
        Column("prefix", 3, is_number=False),
        Column("model", 4, is_number=False, most=28),
        Column("tokens"),
        Column("hits", 2),
        Column("saved"),
        Column("prefill saved", 1),
        Column("last used", 5),
    )
    cells = [
        (
            row.key.hex()[:KEY_DIGITS],
            printable(row.model_name) or row.group.hex()[:12],
            f"{row.first_token:,} to {row.tokens:,}",
            short(row.hits),
            short(row.saved_tokens),
            seconds(row.saved_seconds),
            ago(row.last_used, now),
        )
        for row in rows
    ]
    return [Text("Hottest prefixes", style="bold"), *table_lines(columns, cells, width, "none was hit twice yet")]


def _evictions(rows: tuple[EvictionRow, ...], now: float, width: int) -> list[Text]:
    columns = (
        Column("evicted", is_number=False),
        Column("from", is_number=False),
        Column("to", 2, is_number=False),
        Column("reason", 3, is_number=False),
        Column("tokens"),
        Column("size", 1),
        Column("model", 4, is_number=False, most=28),
    )
    cells = [
        (
            ago(row.at, now),
            row.tier,
            row.to,
            row.reason,
            short(row.tokens),
            human_size(row.num_bytes),
            printable(row.model_name) or row.group.hex()[:12],
        )
        for row in rows
    ]
    return [Text("Last evictions", style="bold"), *table_lines(columns, cells, width, "none yet")]


def table_lines(columns: tuple[Column, ...], rows: Sequence[tuple[str, ...]], width: int, empty: str) -> list[Text]:
    """Heads and rows, two spaces between columns; without rows, `empty`."""
    if not rows:
        return [Text(empty)]
    widths = [
        min(column.most, max(len(column.title), *(len(row[at]) for row in rows))) for at, column in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    while len(kept) > 1 and sum(widths[at] for at in kept) + 2 * (len(kept) - 1) > width:
        kept.remove(max(kept, key=lambda at: columns[at].rank))
    lines = [Text(_line(columns, widths, kept, [column.title for column in columns]), style="dim")]
    return lines + [Text(_line(columns, widths, kept, row)) for row in rows]


def _line(columns: tuple[Column, ...], widths: list[int], kept: list[int], cells: Sequence[str]) -> str:
    parts = []
    for at in kept:
        cell = cells[at] if len(cells[at]) <= widths[at] else cells[at][: widths[at] - 1] + "…"
        parts.append(cell.rjust(widths[at]) if columns[at].is_number else cell.ljust(widths[at]))
    return "  ".join(parts).rstrip()


# ---- numbers


def short(number: float) -> str:
    """At most five digits: "12,345", "1.2 M"."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor * (100 if unit == "k" else 1):
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def seconds(span: float) -> str:
    """ "0.25 s" and, from a minute on, the two largest units."""
    if span >= 60:
        return duration(span)
    return f"{span:.1f} s" if span >= 1 or not span else f"{span * 1000:.0f} ms"
