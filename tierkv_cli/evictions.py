"""`tierkv evictions`: what was thrown away, and whether that was right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import SPAN, Where, json_option, where_options
from tierkv_cli.plot import check_picture, plot_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.wire.messages import EvictionsReply
    from tierkv_cli.eviction_view import Shortened, Sums

BY = ("model", "tenant", "reason", "prefix")
SHOWN = 40
"""Lines of a table, where nobody says how many; --json has all then."""

INCOMPLETE = 4

GIB_DAYS = 2**30 * 86_400.0
"""What a value, in seconds per byte and second, is shown by."""


@click.command(short_help="Show what was evicted, and what of it was asked for again.")
@click.option("--since", metavar="SPAN", type=SPAN, default="24h", show_default=True, help="How far to look back.")
@click.option("--by", type=click.Choice(BY), default="model", show_default=True, help="What makes a line.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1),
    help="How many lines: those that are regretted most, then those with most bytes. The others are added up. "
    f"[default: {SHOWN}, with --json all]",
)
@plot_option
@json_option
@where_options
def command(*, where: Where, since: float, by: str, limit: int | None, plot: Path | None, as_json: bool) -> int:
    """Show what was evicted, how old it was and how often hit, and what that cost: the regret.

    Regret is what was evicted (or refused for want of room) and then asked for again: tokens that engines had to
    compute once more, and seconds of prefill at the engine's rate (see du). "dropped" left the last tier that had it
    (with so many "tokens"); the rest is still in another one, and is only slower to get. A block that is evicted and
    regretted again and again counts each time. The last line says what the figures mean for capacity.

    With --by prefix "block" has the first digits of a block's key, as `tierkv pin --prefix` and `tierkv purge --prefix`
    take them while it is cached; --json has all digits.

    "idle" and "age" are means over tokens: since the last use, and since it was stored. "value" is what the eviction
    order thought it was worth when it went: seconds of prefill saved a day by a GiB of it.

    All from the node's journal, which reaches as far back as journal_bytes and journal_days let it; without a running
    node it is read from the data directory. A node without one tells of the last rows that it keeps in memory. What was
    purged has no name any more. Exit code 4 when the journal can't be read.
    """
    from tierkv_cli.eviction_view import add_up, advice, shorten
    from tierkv_cli.output import console, print_json

    if plot is not None:
        check_picture(plot)
    report = read(where, since, by)
    if report.problem:
        click.echo(f"tierkv: there is no report: {report.problem}", err=True)
        return INCOMPLETE
    all_lines = add_up(report.lines, report.groups, by)
    lines = shorten(all_lines, limit or (len(all_lines) if as_json else SHOWN))
    if plot is not None:
        from tierkv_cli.eviction_plot import draw_evictions
        from tierkv_cli.plot import picture

        with picture(plot, 9.0, 5.4) as figure:
            draw_evictions(figure, report)
    if as_json:
        print_json(as_object(report, lines, by))
        return 0
    screen = console()
    for part in view(report, lines, by, screen.width):
        screen.print(part)
    click.echo(advice(report))
    for note in notes(report):
        click.echo(f"tierkv: {note}", err=True)
    return 0


def read(where: Where, seconds: float, by: str) -> EvictionsReply:
    """From the node, or from its data directory when there is none. A node that was named by its endpoint alone must be
    there."""
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, or_silent, wait_ready

    with operator(where) as node:
        if node.is_connected() or where.endpoint is not None:
            with Meter("evictions") as meter:
                wait_ready(node, meter)
            *_, report = node.evictions(seconds=seconds, by_prefix=by == "prefix")
            return report

        from tierkv_cli.offline_journal import evictions_offline

        with or_silent(where):
            return evictions_offline(where.settings().settings, seconds, by_prefix=by == "prefix")


def as_object(report: EvictionsReply, lines: Shortened, by: str) -> dict[str, object]:
    from tierkv_cli.eviction_view import advice, total
    from tierkv_cli.output import plain

    return {
        "by": by,
        "since": report.since,
        "until": report.until,
        "lines": [line.as_object() for line in lines.first],
        "more": {"lines": lines.more, "has_smaller": lines.has_smaller} | lines.rest.as_object()
        if lines.rest
        else None,
        "total": total(report.lines).as_object(),
        "buckets": plain(report.buckets),
        "in_memory": report.in_memory,
        "damaged_rows": report.damaged,
        "not_written_rows": report.not_written,
        "lacks": list(report.lacks),
        "advice": advice(report),
    }


def _more(lines: Shortened) -> dict[str, object] | None:
    if lines.rest is None:
        return None
    return {"lines": lines.more, "has_smaller": lines.has_smaller} | lines.rest.as_object()


# ---- for people


def view(report: EvictionsReply, lines: Shortened, by: str, width: int) -> Iterator[RenderableType]:
    """`width`: of the screen. Where it is narrow, columns that say the least are left out."""
    from tierkv_cli.eviction_view import total
    from tierkv_cli.output import at, duration, table

    yield f"{at(report.since)} to {at(report.until)} ({duration(report.until - report.since)})"
    yield ""
    if not lines.first and lines.rest is None:
        return
    heads = _HEADS[by]
    rows = [(*_labels(line, by), *_numbers(line)) for line in lines.first]
    if lines.rest is not None:
        rows.append((lines.label, *[""] * (len(heads) - 1), *_numbers(lines.rest)))
    if len(rows) > 1:
        rows.append(("total", *[""] * (len(heads) - 1), *_numbers(total(report.lines))))
    columns = (*heads, *_NUMBERS)
    kept = _that_fit(columns, rows, width)
    shown = table(*(columns[index] for index in kept), numbers=_NUMBERS)
    for number, row in enumerate(rows):
        if number == len(lines.first):
            shown.add_section()
        shown.add_row(*(row[index] for index in kept))
    yield shown
    left_out = [name for index, name in enumerate(columns) if index not in kept]
    if lines.more:
        yield f"{lines.more:,} more lines are added up; --limit shows them"
    if left_out:
        yield f"left out for want of width: {', '.join(left_out)}"
    yield ""


def _that_fit(columns: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[int]:
    widths = [max(len(name), *(len(row[index]) for row in rows)) + 3 for index, name in enumerate(columns)]
    kept = list(range(len(columns)))
    for name in _LEFT_OUT_FIRST:
        if sum(widths[index] for index in kept) <= width + 3:
            break
        kept.remove(columns.index(name))
    return kept


_NUMBERS = ("evicted", "dropped", "tokens", "idle", "age", "hits", "value", "again", "regret", "lost")
_LEFT_OUT_FIRST = ("value", "age", "hits", "again", "tokens", "evicted")

_HEADS = {
    "model": ("model",),
    "tenant": ("tenant",),
    "reason": ("reason", "from", "to"),
    "prefix": ("model", "block", "at"),
}


def _labels(line: Sums, by: str) -> tuple[str, ...]:
    names = line.names
    if by == "reason":
        return names["reason"], names["from"], names["to"]
    if by == "tenant":
        return (names["tenant"] or "(no salt)",)
    if by == "prefix":
        return names["model"], names["key"][:16], f"{int(names['first_token'] or 0):,}"
    return (names["model"],)


def _numbers(line: Sums) -> tuple[str, ...]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import duration

    def mean(total: float) -> str:
        return duration(total / line.tokens) if line.tokens else "-"

    value = line.value / line.num_bytes * GIB_DAYS if line.num_bytes else 0.0
    return (
        human_size(line.num_bytes),
        human_size(line.dropped_bytes) if line.dropped_bytes else "-",
        f"{line.dropped_tokens:,}",
        mean(line.idle_seconds),
        mean(line.age_seconds),
        f"{line.hits / line.evictions:.1f}" if line.evictions else "-",
        f"{value:,.1f}" if value else "-",
        f"{line.regret_tokens:,}",
        ("over 100 %" if line.regret > 1 else f"{100 * line.regret:.1f} %") if line.dropped_tokens else "-",
        f"{line.regret_seconds:,.1f} s",
    )


def notes(report: EvictionsReply) -> Iterator[str]:
    from tierkv_cli.output import at

    if report.in_memory:
        yield f"this node has no data directory; it keeps the last evictions in memory, since {at(report.since)}"
    if report.damaged:
        yield f"{report.damaged:,} damaged rows of the journal were skipped"
    for words in report.lacks:
        yield f"the sums are too low: {words}"
    if report.not_written:
        reasons = ", ".join(f"{rows:,} for {reason}" for reason, rows in sorted(report.not_written.items()))
        yield f"rows are missing, which could not be written: {reasons}"
