"""`tierkv size`: how much memory and NVMe requests are worth, told by a node or from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tierkv_cli.options import SPAN, Where, json_option, where_options
from tierkv_cli.plot import plot_option
from tierkv_cli.trace_options import prefill_rate_option, size_option, token_bytes_option

LOAD_RATE = 12.8e9

_OF_A_TRACE = ("token_bytes", "prefill_rate")
_OF_A_NODE = ("since", "endpoint", "data_dir", "socket_dir", "config")


@click.command(short_help="Say how much memory and NVMe requests are worth.")
@click.argument(
    "trace", metavar="[TRACE]", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--since", metavar="SPAN", type=SPAN, default="24h", help="How far a node looks back. [default: 24h]")
@click.option(
    "--host",
    metavar="SIZE",
    callback=size_option,
    help="Host memory that there is, or is thought of; NVMe is looked at below it. "
    "[default: what the node has; of a trace where its curve bends]",
)
@click.option(
    "--nvme",
    metavar="SIZE",
    callback=size_option,
    help="NVMe that there is, or is thought of. [default: what the node has]",
)
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
    help="How fast blocks come back from NVMe. [default: what the node has measured, else 12.8GB]",
)
@plot_option
@json_option
@where_options
def command(*, where: Where, trace: Path | None, as_json: bool, plot: Path | None, **asked: Any) -> None:
    """Say what each capacity of host memory and NVMe would find of what is asked, and save in a day.

    Without TRACE the node is asked, and answers twice for its last hours: with an estimate from a sample of all blocks
    of what each capacity would find if what was used longest ago went first; and with what its policy did with the
    room that it has, and would have kept with more: what was evicted and asked for again. It knows of no time before
    its front's start.

    TRACE is a recording (`tierkv serve --record`) or any other trace that `tierkv replay` reads. One pass tells, for
    each hit, how much room it needs; so all capacities are known at once, as plain LRU would use them. `tierkv replay`
    says what the node's own policy makes of one of them.

    "ceiling" is the least room that finds all there is to find, "realistic need" saves 90 % of that, "knee" is where
    the curve bends. Saved time is prefill, scaled to a day; of NVMe, less the time to load.
    """
    from tierkv_cli.plot import check_picture

    _refuse(_OF_A_TRACE if trace is None else _OF_A_NODE, "a trace" if trace is None else "a node")
    if plot is not None:
        check_picture(plot)
    if trace is None:
        _of_a_node(where, as_json, plot, **asked)
    else:
        _of_a_trace(trace, as_json, plot, **asked)


def _refuse(names: tuple[str, ...], what: str) -> None:
    """Options that would not be heeded. Raises UsageError."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is for the sizing of {what}", context)


def _of_a_node(where: Where, as_json: bool, plot: Path | None, **asked: Any) -> None:
    from tierkv_cli.output import console, print_json
    from tierkv_cli.progress import Meter
    from tierkv_cli.reach import operator, wait_ready
    from tierkv_cli.size_live import as_object, draw_live, look, view

    with operator(where) as node:
        with Meter("size") as meter:
            wait_ready(node, meter)
        reply = node.size(seconds=asked["since"])
    made = look(
        reply, host_bytes=asked["host"], nvme_bytes=asked["nvme"], step_bytes=asked["step"],
        load_rate=asked["load_rate"],
    )  # fmt: skip
    if plot is not None:
        draw_live(made, plot)
    if as_json:
        print_json(as_object(made))
        return
    screen = console()
    for part in view(made):
        screen.print(part)


def _of_a_trace(trace: Path, as_json: bool, plot: Path | None, **asked: Any) -> None:
    from tierkv.replay.formats import read_trace
    from tierkv.replay.reading import ReadOptions
    from tierkv.replay.sizing import Demand, size
    from tierkv_cli.output import console, print_json
    from tierkv_cli.plot import picture
    from tierkv_cli.replay import about, trace_as_object
    from tierkv_cli.size_view import as_object, draw, view

    read = read_trace(trace, ReadOptions(token_bytes=asked["token_bytes"]))
    made = size(
        Demand.of(read, asked["prefill_rate"]),
        load_rate=float(asked["load_rate"] or LOAD_RATE),
        host_bytes=asked["host"],
        nvme_bytes=asked["nvme"],
        step_bytes=asked["step"],
    )
    if plot is not None:
        with picture(plot, 9, 4.8) as figure:
            axes = figure.subplots()
            draw(axes, made)
            axes.legend(frameon=False, loc="upper left")
            figure.suptitle(f"{read.name}: {read.num_requests:,} requests", fontsize=12)
    if as_json:
        print_json({"trace": trace_as_object(read), **as_object(made)})
        return
    screen = console()
    screen.print(about(read))
    screen.print("")
    if not made.ceiling.capacity_bytes:
        screen.print("nothing in it is used a second time: no capacity would save anything")
        return
    for part in view(made):
        screen.print(part)
