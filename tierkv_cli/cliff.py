"""`tierkv cliff`: what a restart costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv_cli.options import Where, json_option, where_options
from tierkv_cli.plot import check_picture, plot_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from tierkv.core.starts import Start
    from tierkv.metrics.cliff import Cliff, Figures


@click.command(short_help="Show what each restart has cost.")
@click.option(
    "--last", metavar="N", default=10, show_default=True, type=click.IntRange(1, 1_000), help="So many starts."
)
@click.option("--engines", is_flag=True, help="Show starts of engines too: the last N of them.")
@plot_option
@click.option("--start", "number", metavar="NUMBER", type=int, help="Only this start, as --json numbers them.")
@click.option(
    "--engine", metavar="URL", help="Measure it: an engine's OpenAI-compatible endpoint, like http://127.0.0.1:8000."
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, exists=True, allow_dash=True),
    metavar="FILE",
    help='With --engine: what to ask, one a line: text, a JSON string, {"prompt": ...} or {"messages": ...}.',
)
@click.option("--model", metavar="NAME", help="With --engine: the model to ask. [default: the first it has]")
@click.option(
    "--api-key-env", metavar="NAME", help="With --engine: the environment variable that holds the engine's API key."
)
@click.option(
    "--seconds", metavar="SECONDS", default=60.0, show_default=True, type=click.FloatRange(1.0, 3_600.0),
    help="With --engine: how long to measure before, and again after the restart.",
)  # fmt: skip
@click.option(
    "--wait", "wait_seconds", metavar="SECONDS", default=1_800.0, show_default=True,
    type=click.FloatRange(1.0, 86_400.0), help="With --engine: how long the restart may be waited for.",
)  # fmt: skip
@json_option
@where_options
def command(
    *,
    where: Where,
    last: int,
    engines: bool,
    plot: Path | None,
    number: int | None,
    engine: str | None,
    prompts: str | None,
    model: str | None,
    api_key_env: str | None,
    seconds: float,
    wait_seconds: float,
    as_json: bool,
) -> int | None:
    """Show what each restart has cost: the hit rate and the time to first token of the first minute against what was
    usual, the prefill that engines had to do again, and how long it took until all was as before.

    The node writes this down itself at each start, and keeps it in the data directory; without a running node it is
    read from there. A time to first token is an estimate here: what `acquire` took, and what computing the missed
    tokens takes at the engine's rate (see du). An engine that came back while the node went on is a start too, shown
    with --engines, and always with --json; its figures are of all that was asked of the node then.

    With --engine it is measured instead: prompts are sent to an engine's OpenAI-compatible endpoint, one after the
    other, and the time until the first token is taken. Then restart the engine, or the node; the command waits for
    that and measures again. Exit code 4 when that did not come to its end.
    """
    if plot is not None:
        check_picture(plot)
    if engine is not None:
        from tierkv_cli.cliff_live import measure_engine

        return measure_engine(
            where,
            url=engine,
            prompts=prompts,
            model=model,
            api_key_env=api_key_env,
            seconds=seconds,
            wait_seconds=wait_seconds,
            plot=plot,
            as_json=as_json,
        )
    ctx = click.get_current_context()
    for option, value in (("--prompts", prompts), ("--model", model), ("--api-key-env", api_key_env)):
        if value is not None:
            raise click.UsageError(f"{option} has an effect with --engine only", ctx)
    _show(where, last=last, engines=engines, number=number, plot=plot, as_json=as_json)
    return None


def _show(where: Where, *, last: int, engines: bool, number: int | None, plot: Path | None, as_json: bool) -> None:
    from tierkv.metrics.cliff import cliff_of
    from tierkv_cli.output import console, print_json

    starts, source = read_records(where)
    cliffs = [cliff_of(start) for start in starts]
    if number is not None:
        cliffs = [cliff for cliff in cliffs if cliff.start.number == number]
        if not cliffs:
            ctx = click.get_current_context()
            raise click.UsageError(f"there is no record of a start {number}; see --json for those there are", ctx)
    shown = last_of_each(cliffs, last)
    if as_json:
        print_json({"source": source, "starts": [as_object(cliff) for cliff in shown]})
    else:
        screen = console()
        with_engines = engines or number is not None
        for part in view([one for one in shown if with_engines or not _is_engine(one)], source, cliffs):
            screen.print(part)
    if plot is not None:
        from tierkv_cli.cliff_plot import draw_start
        from tierkv_cli.plot import picture

        drawn = worth_drawing(shown)
        if drawn is None:
            click.echo("tierkv: nothing to draw: nobody has asked this node for anything after a start yet", err=True)
            return
        with picture(plot, 9, 6) as figure:
            draw_start(figure, drawn)
        if not as_json:
            click.echo(f"drawn: {plot}")


def read_records(where: Where) -> tuple[Sequence[Start], str]:
    """From the node, or where there is none from its data directory; and which of them it was."""
    from tierkv.errors import NodeSilent, NodeUnreachable
    from tierkv_cli.reach import operator

    try:
        with operator(where) as node:
            return node.starts().starts, f"the node at {node.endpoint}"
    except NodeSilent:
        raise
    except NodeUnreachable:
        data_dir = None if where.endpoint is not None else where.settings().settings.data_dir
        if data_dir is None:
            raise
    from tierkv.storage.directory import DataDirectory
    from tierkv.storage.start_records import read_starts

    with DataDirectory.open(data_dir, read_only=True) as directory:
        return read_starts(directory), f"{data_dir} (no node is running)"


def last_of_each(cliffs: Sequence[Cliff], last: int) -> list[Cliff]:
    """The last starts of the node, and as many of engines: a script that runs again and again pushes none out."""
    own = [cliff for cliff in cliffs if not _is_engine(cliff)][-last:]
    engines = [cliff for cliff in cliffs if _is_engine(cliff)][-last:]
    return [cliff for cliff in cliffs if cliff in own or cliff in engines]


def _is_engine(cliff: Cliff) -> bool:
    return cliff.start.kind == "engine"


def worth_drawing(cliffs: Sequence[Cliff]) -> Cliff | None:
    """The last of the node's own starts after which something was asked; an engine's where there is no other."""
    asked = [cliff for cliff in cliffs if any(window.asked_tokens for window in cliff.start.windows)]
    own = [cliff for cliff in asked if cliff.start.kind != "engine"]
    found = own or asked
    return found[-1] if found else None


# ---- for programs


def as_object(cliff: Cliff) -> dict[str, object]:
    from tierkv.metrics.cliff import figures

    start = cliff.start
    return {
        "number": start.number,
        "kind": str(start.kind),
        "group": start.group,
        "began": start.began,
        "last_end": str(start.last_end),
        "problem": start.problem,
        "last_heard": start.last_heard,
        "is_ready": start.is_ready,
        "ready_seconds": start.ready_seconds if start.is_ready else None,
        "prefill_tokens_per_second": start.rate,
        "first": _figures(cliff.first),
        "usual": None if cliff.usual is None else _figures(cliff.usual),
        "usual_from": cliff.usual_from,
        "lost_prefill_seconds": cliff.lost_prefill_seconds,
        "away_prefill_seconds": cliff.away_prefill_seconds,
        "cost_seconds": cliff.cost_seconds,
        "back_seconds": cliff.back_seconds,
        "watched_seconds": cliff.watched_seconds,
        "windows": [{"begins": window.begins} | _figures(figures(window)) for window in (*start.windows, *start.late)],
    }


def _figures(found: Figures) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


# ---- for people


def view(cliffs: Sequence[Cliff], source: str, known: Sequence[Cliff]) -> Iterator[RenderableType]:
    """`cliffs` are those of `known` that are shown."""
    hidden = sum(map(_is_engine, known)) - sum(map(_is_engine, cliffs))
    engines = f"{hidden} more starts of engines; --engines shows the last" if hidden else ""
    if not cliffs:
        yield f"no start is on record at {source}" + (f" but {engines}" if engines else "")
        return
    from tierkv_cli.output import table

    numbers = ("ready", "hits, usual", "ttft, usual", "lost", "back")
    shown = table("start", "what", *numbers, numbers=("start", *numbers))
    for cliff in cliffs:
        shown.add_row(*_row(cliff))
    yield shown
    yield ""
    yield "hits, ttft: of the tokens asked for in the first minute, and what is usual; time to"
    yield "first token estimated. lost: prefill done again. back: at 90 % of the usual hits."
    if any(map(_is_own_usual, cliffs)):
        yield "*: what was usual before is not known; this is what it became."
    yield ""
    yield from _in_words(cliffs[-1])
    all_told = len(known) if any(map(_is_engine, cliffs)) else len(known) - hidden
    yield f"from {source}" + (f"; the last {len(cliffs)} of {all_told} starts" if len(cliffs) < all_told else "")
    if engines:
        yield engines


def _row(cliff: Cliff) -> tuple[str, ...]:
    start, first, usual = cliff.start, cliff.first, cliff.usual
    own = "*" if _is_own_usual(cliff) else ""
    return (
        time.strftime("%m-%d %H:%M", time.localtime(start.began)),
        what(start),
        "-" if start.kind == "engine" else _brief(start.ready_seconds) if start.is_ready else "never",
        _pair(_percent(first), _percent(usual), " %", own),
        _times(first.first_token_seconds, usual.first_token_seconds if usual else None),
        _brief(cliff.cost_seconds),
        _back(cliff),
    )


def what(start: Start) -> str:
    """Which start this was: in as few words as say it."""
    if start.kind == "engine":
        return f"engine {start.group[:6]}"
    ended = _ENDS.get(start.last_end, "start")
    return f"front {ended}" if start.kind == "front" else ended


_ENDS = {
    "first": "first start",
    "clean": "stopped",
    "killed": "killed",
    "crashed": "crashed",
    "machine": "machine reset",
}


def _is_own_usual(cliff: Cliff) -> bool:
    return cliff.usual_from == "after"


def _percent(found: Figures | None) -> str:
    return "-" if found is None or found.hit_rate is None else f"{100 * found.hit_rate:.0f}"


def _times(one: float | None, other: float | None) -> str:
    """Both in the unit of the longer."""
    unit, scale = (" ms", 1_000.0) if max(one or 0.0, other or 0.0) < 1 else (" s", 1.0)
    return _pair(_figure(one, scale), _figure(other, scale), unit)


def _figure(seconds: float | None, scale: float) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * scale:.0f}" if seconds * scale >= 10 else f"{seconds * scale:.1f}"


def _pair(one: str, other: str, unit: str, mark: str = "") -> str:
    return f"{one}/{other}{unit}{mark}" if (one, other) != ("-", "-") else "-"


def _in_words(cliff: Cliff) -> Iterator[str]:
    """The last start in one sentence."""
    from tierkv.core.starts import FIRST_SECONDS
    from tierkv_cli.output import duration

    first, usual = cliff.first, cliff.usual
    if not first.asked_tokens:
        is_over = cliff.watched_seconds >= FIRST_SECONDS
        yield "after the last start nobody has asked for anything in its first minute" + (
            "" if is_over else f", of which {duration(cliff.watched_seconds)} are on record"
        )
    elif usual is None:
        yield (
            f"the last start: {_rate(first)} of the tokens asked for were hits; what is usual is not known before the "
            "first minute is over"
        )
    else:
        where = "before it" if cliff.usual_from == "before" else "later"
        back = (
            f"back at 90 % of that after {duration(cliff.back_seconds)}"
            if cliff.back_seconds is not None
            else f"not back at 90 % of that after {duration(cliff.watched_seconds)}"
        )
        yield (
            f"the last start: {_rate(first)} of the tokens asked for were hits, {_rate(usual)} {where}; {back}; "
            f"{short_seconds(cliff.cost_seconds)} of prefill done again"
            + (
                f", {short_seconds(cliff.away_prefill_seconds)} of it while the node was away"
                if cliff.away_prefill_seconds
                else ""
            )
        )


def _rate(found: Figures | None) -> str:
    return "-" if found is None or found.hit_rate is None else f"{100 * found.hit_rate:.1f} %"


def _back(cliff: Cliff) -> str:
    if cliff.back_seconds is not None:
        return _brief(cliff.back_seconds)
    if cliff.usual is None or not cliff.first.asked_tokens:
        return "-"
    return f"> {_brief(cliff.watched_seconds)}"


def _brief(seconds: float | None) -> str:
    """For a narrow column: one unit."""
    if seconds is None or seconds < 120:
        return short_seconds(seconds)
    return f"{seconds / 60:.0f} m" if seconds < 7_200 else f"{seconds / 3_600:.1f} h"


def short_seconds(seconds: float | None) -> str:
    """In the unit that fits: "830 us", "41 ms", "4.5 s", "3 m 20 s"."""
    from tierkv_cli.output import duration

    if seconds is None:
        return "-"
    if seconds >= 100:
        return duration(seconds)
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 0.001:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e6:.0f} us" if seconds else "0 s"
