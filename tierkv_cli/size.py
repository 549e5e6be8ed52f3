"""`tierkv size`: how much memory and NVMe recorded requests are worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv_cli.options import debug_option, json_option
from tierkv_cli.plot import plot_option
from tierkv_cli.replay import trace_as_object
from tierkv_cli.trace_options import prefill_rate_option, size_option, token_bytes_option, trace_argument

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.replay.sizing import Point, Sizing


@click.command(short_help="Say how much memory and NVMe requests are worth.")
@trace_argument
@click.option(
    "--host",
    metavar="SIZE",
    callback=size_option,
    help="Host memory that there is, or is thought of; NVMe is looked at below it. [default: where its curve bends]",
)
@click.option("--nvme", metavar="SIZE", callback=size_option, help="NVMe that there is, or is thought of.")
@click.option(
    "--step",
    metavar="SIZE",
    callback=size_option,
    default="100GB",
    show_default=True,
    help="How much more is asked about.",
)
@token_bytes_option
@prefill_rate_option
@click.option(
    "--load-rate",
    metavar="SIZE/S",
    callback=size_option,
    default="12.8GB",
    show_default=True,
    help="How fast blocks come back from NVMe.",
)
@plot_option
@json_option
@debug_option
def command(*, trace: Path, as_json: bool, plot: Path | None, **asked: Any) -> None:
    """Say what each capacity of host memory and NVMe would find of the requests in TRACE, and save in a day.

    TRACE is a recording (`tierkv serve --record`) or any other trace that `tierkv replay` reads. One pass tells, for
    each hit, how much room it needs; so all capacities are known at once, as plain LRU would use them. `tierkv replay`
    says what the node's own policy makes of one of them.

    "ceiling" is the least room that finds all there is to find, "realistic need" saves 90 % of that, "knee" is where
    the curve bends. Saved time is prefill, scaled to a day; of NVMe, less the time to load.
    """
    from tierkv.replay.formats import read_trace
    from tierkv.replay.reading import ReadOptions
    from tierkv.replay.sizing import Rates, size
    from tierkv_cli.output import console, print_json
    from tierkv_cli.plot import check_picture

    if plot is not None:
        check_picture(plot)
    made = size(
        read_trace(trace, ReadOptions(token_bytes=asked["token_bytes"])),
        rates=Rates(prefill=asked["prefill_rate"], load=float(asked["load_rate"])),
        host_bytes=asked["host"],
        nvme_bytes=asked["nvme"],
        step_bytes=asked["step"],
    )
    if plot is not None:
        draw(made, plot)
    if as_json:
        print_json(as_object(made))
        return
    screen = console()
    for part in view(made):
        screen.print(part)


# ---- as JSON; docs/replay.md has the schema


def as_object(made: Sizing) -> dict[str, Any]:
    return {
        "trace": trace_as_object(made.trace),
        "host_bytes": made.host_bytes,
        "step_bytes": made.step_bytes,
        "points": [_point(point) for point in made.points],
        "host": _point(made.host),
        "nvme": _point(made.nvme) if made.nvme is not None else None,
        "knee": _point(made.knee),
        "realistic": _point(made.realistic),
        "ceiling": _point(made.ceiling),
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "capacity_bytes": point.capacity_bytes,
        "hit_rate": point.hit_rate,
        "host_seconds_a_day": point.host_seconds,
        "host_next_seconds_a_day": point.host_next,
        "nvme_seconds_a_day": point.nvme_seconds,
        "nvme_next_seconds_a_day": point.nvme_next,
    }


# ---- for people


def view(made: Sizing) -> Iterator[RenderableType]:
    from tierkv_cli.replay import about

    yield about(made.trace)
    yield ""
    if not made.ceiling.capacity_bytes:
        yield "nothing in it is used a second time: no capacity would save anything"
        return
    yield "prefill saved in a day, of one engine's time:"
    yield _table(made)
    yield ""
    yield from _words(made)


def _table(made: Sizing) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    step = _step(made)
    below = f"nvme below {human_size(made.host_bytes)}"
    numbers = ("hits", "host memory", "of ceiling", f"next {step}", below, f"its next {step}")
    shown = table("capacity", *numbers, numbers=numbers)
    for point in made.points:
        shown.add_row(
            human_size(point.capacity_bytes),
            percent(point.hit_rate, 1),
            _time(point.host_seconds),
            percent(point.host_seconds, made.ceiling.host_seconds),
            _more(point.host_next),
            "-" if point.nvme_seconds is None else _time(point.nvme_seconds),
            "-" if point.nvme_next is None else _more(point.nvme_next),
        )
    return shown


def _words(made: Sizing) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    shown = table("", "room", "hits", "saves a day", "what it is", numbers=("room", "hits", "saves a day"))
    named = [
        ("knee", made.knee, "the curve bends here: more brings less than it did on average before"),
        ("realistic need", made.realistic, "saves 90 % of what can be saved"),
        ("ceiling", made.ceiling, "finds all that is ever used again"),
    ]
    for name, point, meaning in sorted(named, key=lambda one: one[1].capacity_bytes):
        hits = percent(point.hit_rate, 1)
        shown.add_row(name, human_size(point.capacity_bytes), hits, _time(point.host_seconds), meaning)
    yield shown
    yield ""
    host, nvme, step = made.host, made.nvme, _step(made)
    yield (
        f"host memory of {human_size(host.capacity_bytes)} saves {_time(host.host_seconds)} a day, "
        f"and the next {step} {_time(host.host_next)} more"
    )
    if nvme is not None and nvme.nvme_seconds is None:
        yield f"nvme of {human_size(nvme.capacity_bytes)} holds no more than host memory does, and adds nothing"
    elif nvme is not None and nvme.nvme_seconds is not None:
        added, following = nvme.nvme_seconds - host.host_seconds, nvme.nvme_next or 0.0
        yield (
            f"nvme of {human_size(nvme.capacity_bytes)} below it saves {_time(added)} more, "
            f"and its next {step} {_time(following)} more"
        )


def _time(seconds: float) -> str:
    """Hours, or what is less: "214.2 h", "26 min", "3 s"."""
    if abs(seconds) >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if abs(seconds) >= 60 else f"{seconds:.0f} s"


def _more(seconds: float) -> str:
    return f"{'' if seconds < 0 else '+'}{_time(seconds)}"


def _step(made: Sizing) -> str:
    """As it would be said: "100 GB" and not "93.1 GiB"."""
    from tierkv.config.sizes import human_size

    gigabytes, rest = divmod(made.step_bytes, 10**9)
    return f"{gigabytes:,} GB" if not rest else human_size(made.step_bytes)


# ---- as a picture


def draw(made: Sizing, path: Path) -> None:
    """Saved hours a day over capacity, as host memory and as NVMe, with knee, realistic need and ceiling."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.plot import COLOURS, GREY, picture, quiet

    points = [point for point in made.points if point.capacity_bytes]
    with picture(path, 9, 4.8) as figure:
        axes = figure.subplots()
        sizes = [point.capacity_bytes for point in points]
        axes.plot(
            sizes, [point.host_seconds / 3600 for point in points], marker="o", markersize=4, color=COLOURS[0],
            label="host memory",
        )  # fmt: skip
        below = [(p.capacity_bytes, p.nvme_seconds / 3600) for p in points if p.nvme_seconds is not None]
        if below:
            axes.plot(
                *zip(*below, strict=True), marker="o", markersize=4, color=COLOURS[1],
                label=f"nvme below {human_size(made.host_bytes)} of host memory",
            )  # fmt: skip
        marks = {"knee": made.knee, "90 %": made.realistic, "ceiling": made.ceiling}
        for number, (name, point) in enumerate(marks.items()):
            axes.axvline(point.capacity_bytes, color=GREY, linestyle=":", linewidth=1)
            axes.annotate(
                f"{name}\n{human_size(point.capacity_bytes)}",
                (point.capacity_bytes, 0.04 + 0.13 * number),
                xycoords=axes.get_xaxis_transform(),
                xytext=(4, 0),
                textcoords="offset points",
                color=GREY,
                fontsize=8,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [human_size(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("capacity")
        axes.set_title("hours of prefill saved a day", loc="left", fontsize=11)
        axes.legend(frameon=False, loc="upper left")
        quiet(axes)
        figure.suptitle(f"{made.trace.name}: {made.trace.num_requests:,} requests", fontsize=12)
