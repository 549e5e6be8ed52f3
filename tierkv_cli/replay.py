"""`tierkv replay`: what a cache of a given size and policy would have made of a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv_cli.options import debug_option, json_option
from tierkv_cli.plot import plot_option
from tierkv_cli.trace_options import prefill_rate_option, size_option, token_bytes_option, trace_argument

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.core.value.tuning import Tuning
    from tierkv.replay.driver import Outcome
    from tierkv.replay.optimum import Bound
    from tierkv.replay.study import Point, Question, Study
    from tierkv.replay.trace import Trace

MAX_TOLD_GAPS = 3
CAPACITIES = ("1%", "3%", "10%", "30%")


def _capacity_option(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """For an option that may be said several times, a tuple of capacities; else one, or None."""
    from tierkv.replay.capacity import Capacity

    try:
        if isinstance(value, tuple):
            return tuple(dict.fromkeys(map(Capacity.parse, value)))
        return None if value is None else Capacity.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _tuning_option(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> Tuning:
    from tierkv.core.value.tuning import AS_MEASURED

    tuning = AS_MEASURED
    try:
        for assignment in value:
            tuning = tuning.with_text(assignment)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return tuning


@click.command(short_help="Replay a trace against policies and capacities.")
@trace_argument
@click.option(
    "--capacity",
    "capacities",
    metavar="SIZE|SHARE",
    callback=_capacity_option,
    multiple=True,
    default=CAPACITIES,
    help="Host memory, like 40GiB, or a share of the trace's distinct blocks, like 3%. May be said several times. "
    "[default: 1%, 3%, 10%, 30%]",
)
@click.option(
    "--nvme", metavar="SIZE|SHARE", callback=_capacity_option, help="Capacity of an NVMe tier below it. [default: none]"
)
@click.option(
    "--policy",
    "policies",
    metavar="NAME",
    multiple=True,
    help="density (what a node has by default), lru, arc, gdsf or literal. May be said several times. [default: all]",
)
@click.option(
    "--extent-blocks", metavar="N", type=click.IntRange(1), help="Blocks of an extent. [default: 16 MiB, at least 1]"
)
@token_bytes_option
@prefill_rate_option
@click.option(
    "--load-rate",
    metavar="SIZE/S",
    callback=size_option,
    default="12.8GB",
    show_default=True,
    help="How fast blocks come back from NVMe: what saved seconds are charged for.",
)
@click.option(
    "--write-rate",
    metavar="SIZE/S",
    callback=size_option,
    help="How fast NVMe takes what is written. [default: at once]",
)
@click.option(
    "--write-budget",
    metavar="SIZE",
    callback=size_option,
    help="What NVMe may be written in a day. [default: no limit]",
)
@click.option(
    "--sessions",
    metavar="N",
    type=click.IntRange(1),
    default=150,
    show_default=True,
    help="How many sessions are laid over each other, of a trace of separate sessions.",
)
@click.option("--seed", metavar="N", type=int, default=3, show_default=True, help="Which ones, and when they begin.")
@click.option(
    "--set",
    "tuning",
    metavar="NAME=VALUE",
    callback=_tuning_option,
    multiple=True,
    help="For a study: a number that density is tuned by (docs/replay.md lists them). May be said several times.",
)
@click.option("--jobs", metavar="N", type=click.IntRange(1), help="Runs at the same time. [default: one a processor]")
@plot_option
@json_option
@debug_option
def command(*, trace: Path, as_json: bool, plot: Path | None, jobs: int | None, **asked: Any) -> None:
    """Run TRACE through the real core and show what each policy would have made of it at each capacity.

    The core that decides in a node decides here: the same lookups, evictions and writes, with imagined bytes. TRACE is
    a file of Mooncake's format, of recorded agent sessions, or one that `tierkv serve --record` wrote; ending in .xz it
    is unpacked. docs/replay.md says how each is read.

    "optimum" knows the future: no policy can have more hits with as many bytes. "infinite" never forgets. Saved seconds
    are seconds of prefill that hits spared, less the time to load them from NVMe.
    """
    from tierkv.replay.formats import read_trace
    from tierkv.replay.reading import ReadOptions
    from tierkv.replay.study import study
    from tierkv_cli.output import console, print_json
    from tierkv_cli.plot import check_picture
    from tierkv_cli.progress import Meter

    question = _question(asked)
    if plot is not None:
        check_picture(plot)
    options = ReadOptions(token_bytes=asked["token_bytes"], sessions=asked["sessions"], seed=asked["seed"])
    found = read_trace(trace, options)
    with Meter("replaying") as meter:
        made = study(
            found,
            question,
            jobs=jobs or len(os.sched_getaffinity(0)),
            progress=lambda done, total: meter.say("runs", done, total),
        )
    if plot is not None:
        draw(made, plot)
    if as_json:
        print_json(as_object(made))
        return
    screen = console()
    for part in view(made):
        screen.print(part)


def _question(asked: dict[str, Any]) -> Question:
    from tierkv.replay.driver import Setup
    from tierkv.replay.study import POLICIES, Question

    unknown = [name for name in asked["policies"] if name not in POLICIES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(POLICIES)}", param_hint="--policy")
    setup = Setup(
        policy="",
        host_bytes=0,
        extent_blocks=asked["extent_blocks"],
        prefill_rate=asked["prefill_rate"],
        load_bytes_per_second=float(asked["load_rate"]),
        write_bytes_per_second=float(asked["write_rate"]) if asked["write_rate"] else None,
        write_bytes_per_day=asked["write_budget"] or 0,
        tuning=asked["tuning"],
    )
    return Question(
        capacities=asked["capacities"],
        policies=tuple(dict.fromkeys(asked["policies"])) or POLICIES,
        nvme=asked["nvme"],
        setup=setup,
    )


# ---- as JSON; docs/replay.md has the schema


def as_object(made: Study) -> dict[str, Any]:
    setup = made.question.setup
    return {
        "trace": trace_as_object(made.trace) | {"prefill_seconds": made.prefill_seconds},
        "setup": {
            "extent_blocks": setup.extent_blocks,
            "prefill_tokens_per_second": setup.prefill_rate,
            "load_bytes_per_second": setup.load_bytes_per_second,
            "write_bytes_per_second": setup.write_bytes_per_second,
            "write_bytes_per_day": setup.write_bytes_per_day,
            "density": asdict(setup.tuning),
        },
        "infinite": _bound_as_object(made, made.infinite),
        "capacities": [_point_as_object(made, point) for point in made.points],
    }


def trace_as_object(trace: Trace) -> dict[str, Any]:
    return {
        "name": trace.name,
        "about": trace.about,
        "requests": trace.num_requests,
        "seconds": trace.seconds,
        "asked_tokens": trace.asked_tokens,
        "distinct_blocks": trace.num_blocks,
        "distinct_bytes": trace.num_bytes,
        "missing": [{"since": gap.since, "requests": gap.requests, "reason": gap.reason} for gap in trace.gaps],
    }


def _point_as_object(made: Study, point: Point) -> dict[str, Any]:
    return {
        "capacity": point.capacity.text,
        "host_bytes": point.host_bytes,
        "nvme_bytes": point.nvme_bytes,
        "optimum": _bound_as_object(made, point.optimum) if point.optimum else None,
        "policies": [_outcome_as_object(outcome) for outcome in point.outcomes],
    }


def _bound_as_object(made: Study, bound: Bound) -> dict[str, Any]:
    return {
        "hit_tokens": bound.hit_tokens,
        "hit_rate": bound.hit_tokens / made.trace.asked_tokens,
        "saved_seconds": bound.saved_seconds,
        "saved_share": bound.saved_seconds / made.prefill_seconds,
    }


def _outcome_as_object(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.setup.policy,
        "hit_tokens": outcome.hit_tokens,
        "host_hit_tokens": outcome.host_hit_tokens,
        "nvme_hit_tokens": outcome.nvme_hit_tokens,
        "hit_rate": outcome.hit_tokens / outcome.asked_tokens,
        "saved_seconds": outcome.saved_seconds,
        "saved_share": outcome.saved_seconds / outcome.prefill_seconds,
        "load_seconds": outcome.load_seconds,
        "stored_bytes": outcome.stored_bytes,
        "written_bytes": outcome.written_bytes,
        "read_bytes": outcome.read_bytes,
        "evicted_blocks": dict(outcome.evicted_blocks),
        "refused_blocks": dict(outcome.refused_blocks),
        "dropped_writes": dict(outcome.dropped_writes),
    }


# ---- for people


def view(made: Study) -> Iterator[RenderableType]:
    yield about(made.trace)
    yield ""
    yield _table(made)


def about(trace: Trace) -> str:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import duration

    return (
        f"{trace.name}: {trace.num_requests:,} requests in {duration(trace.seconds)}, {trace.asked_tokens:,} prompt "
        f"tokens; all {trace.num_blocks:,} distinct blocks take {human_size(trace.num_bytes)}\n({trace.about})"
        f"{_gaps(trace)}"
    )


def _gaps(trace: Trace) -> str:
    """What the figures lack, the largest gaps first."""
    from tierkv_cli.output import at, count

    if not trace.gaps:
        return ""
    total = sum(gap.requests for gap in trace.gaps)
    largest = sorted(trace.gaps, key=lambda gap: -gap.requests)
    told = [
        f"{gap.requests:,} from {at(gap.since)} on ({gap.reason.replace('_', ' ')})" for gap in largest[:MAX_TOLD_GAPS]
    ]
    more = [count(len(largest) - MAX_TOLD_GAPS, "smaller gap")] if len(largest) > MAX_TOLD_GAPS else []
    return f"\nnote: {total:,} requests are missing in it, and what follows is without them: {'; '.join(told + more)}"


def _table(made: Study) -> RenderableType:
    from tierkv_cli.output import table

    has_nvme = made.question.nvme is not None
    nvme, written = (("from nvme",), ("to nvme",)) if has_nvme else ((), ())
    numbers = ("hits", *nvme, "of optimum", "prefill saved", "seconds", "stored", *written, "evicted", "refused")
    shown = table("host memory", "policy", *numbers, numbers=numbers)
    for point in made.points:
        for number, outcome in enumerate(point.outcomes):
            shown.add_row("" if number else _capacity(point), *_row(point, outcome, has_nvme=has_nvme))
        if point.optimum is not None:
            shown.add_row("", "optimum", *_bound_row(made, point.optimum, has_nvme=has_nvme))
        shown.add_section()
    shown.add_row("infinite", "", *_bound_row(made, made.infinite, has_nvme=has_nvme))
    return shown


def _capacity(point: Point) -> str:
    from tierkv.config.sizes import human_size

    size = human_size(point.host_bytes)
    return f"{point.capacity.text} = {size}" if point.capacity.share is not None else size


def _row(point: Point, outcome: Outcome, *, has_nvme: bool) -> list[str]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent

    refused = sum(outcome.refused_blocks.values()) + sum(outcome.dropped_writes.values())
    row = [
        outcome.setup.policy,
        percent(outcome.hit_tokens, outcome.asked_tokens),
        percent(outcome.hit_tokens, point.optimum.hit_tokens) if point.optimum else "-",
        percent(outcome.saved_seconds, outcome.prefill_seconds),
        f"{outcome.saved_seconds:,.0f}",
        human_size(outcome.stored_bytes),
        f"{sum(outcome.evicted_blocks.values()):,}",
        f"{refused:,}",
    ]
    if has_nvme:
        row.insert(2, percent(outcome.nvme_hit_tokens, outcome.asked_tokens))
        row.insert(7, human_size(outcome.written_bytes))
    return row


def _bound_row(made: Study, bound: Bound, *, has_nvme: bool) -> list[str]:
    from tierkv_cli.output import percent

    hits = percent(bound.hit_tokens, made.trace.asked_tokens)
    saved = percent(bound.saved_seconds, made.prefill_seconds)
    return [hits, *["-"] * has_nvme, "-", saved, f"{bound.saved_seconds:,.0f}", "-", *["-"] * has_nvme, "-", "-"]


# ---- as a picture


def draw(made: Study, path: Path) -> None:
    """Hits and saved prefill over capacity, a line a policy."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.plot import COLOURS, GREY, picture, quiet

    points = sorted(made.points, key=lambda point: point.host_bytes)
    sizes = [point.host_bytes for point in points]
    whole_tokens, whole_seconds = made.trace.asked_tokens, made.prefill_seconds
    with picture(path, 11, 4.6) as figure:
        for axes, title in zip(figure.subplots(1, 2), ("prompt tokens found", "prefill seconds saved"), strict=True):
            is_hits = title == "prompt tokens found"
            whole = whole_tokens if is_hits else whole_seconds

            def height(made: Outcome | Bound, is_hits: bool = is_hits, whole: float = whole) -> float:
                return 100 * (made.hit_tokens if is_hits else made.saved_seconds) / whole

            axes.axhline(height(made.infinite), color=GREY, linestyle="--", linewidth=1, label="infinite")
            bounds = [(point.host_bytes, point.optimum) for point in points if point.optimum is not None]
            if bounds:
                heights = [height(bound) for _, bound in bounds]
                axes.plot([size for size, _ in bounds], heights, ":", marker=".", color="black", label="optimum")
            for number, policy in enumerate(made.question.policies):
                heights = [height(point.outcomes[number]) for point in points]
                axes.plot(sizes, heights, marker="o", markersize=4, color=COLOURS[number % len(COLOURS)], label=policy)
            axes.set_xscale("log")
            axes.set_xticks(sizes, [_tick(point) for point in points])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.set_title(title + ", %", loc="left", fontsize=11)
            axes.set_xlabel("host memory")
            quiet(axes)
        axes.legend(frameon=False, loc="lower right")
        below = f", nvme {human_size(points[0].nvme_bytes)}" if made.question.nvme else ""
        figure.suptitle(f"{made.trace.name}: {made.trace.num_requests:,} requests{below}", fontsize=12)


def _tick(point: Point) -> str:
    from tierkv.config.sizes import human_size

    size = human_size(point.host_bytes)
    return f"{size}\n{point.capacity.text}" if point.capacity.share is not None else size
