"""`tierkv top`: watch what goes on."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from tierkv_cli.options import NumberRange, Where, where_options

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tierkv.client.blocking import Operator
    from tierkv_cli.top_frame import History, Sample

MOST_ROWS = 60
KEY_SECONDS = 0.2
"""How long a key or a change of the window's size may wait."""


@click.command(short_help="Watch what goes on.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=NumberRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Between two frames.",
)
@click.option("--once", is_flag=True, help="One frame as plain text; rates are over one interval, 1 s at most.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a frame, each on a line.")
@where_options
def command(*, where: Where, interval: float, once: bool, as_json: bool) -> int:
    """Watch what goes on: what fills the tiers, how many of the tokens asked for are hit, how fast is loaded and
    stored, what waits, which prefixes save the most, and what was evicted last.

    "now" is the last ten seconds. A prefix is named by a block key, as `tierkv purge --prefix` takes it; "0 to 1,024"
    are the tokens of the prompts that begin with it, and what it saved is counted from when it became one of the
    hottest. Prefill saved is what computing those tokens would have taken the engine (see du).

    q or Ctrl-C ends it. A node that goes away meanwhile is waited for. Where the output is no terminal, frames follow
    one another as plain text.
    """
    from tierkv_cli.reach import operator

    with operator(where) as node, suppress(KeyboardInterrupt):  # which is how one ends watching
        history = _begin(node, min(interval, 1.0) if once else 0.0)
        if as_json:
            _print_json(node, history, interval, once=once)
        elif once or not sys.stdout.isatty():
            _print_frames(node, history, interval, once=once)
        else:
            _watch(node, history, interval)
    return 0


def _begin(node: Operator, wait_seconds: float) -> History:
    """A first sample, and a second one for the rates when there is to be one frame only. Raises NodeUnreachable."""
    from tierkv_cli.top_frame import History

    history = History()
    history.add(_sample(node))
    if wait_seconds:
        time.sleep(wait_seconds)
        history.add(_sample(node))
    return history


def _sample(node: Operator) -> Sample:
    from tierkv_cli.top_frame import Sample

    return Sample(node.status(), node.top(most=MOST_ROWS))


def _next(node: Operator, history: History) -> str:
    """Take another sample; in words, why there is none. What was seen last stays."""
    from tierkv.errors import IncompleteError, NodeUnreachable, WireError

    try:
        history.add(_sample(node))
    except (NodeUnreachable, IncompleteError, WireError) as error:
        since = time.time() - history.last.top.now
        return f"asking again, what follows is {since:.0f} s old: {error}"
    return ""


def _notes(node: Operator, history: History, interval: float) -> Iterator[str]:
    """Each time there is something new to show: what is to be said about it."""
    note = ""
    while True:
        yield note
        time.sleep(interval)
        note = _next(node, history)


# ---- plain text and JSON


def _print_frames(node: Operator, history: History, interval: float, *, once: bool) -> None:
    from tierkv_cli.output import console
    from tierkv_cli.top_frame import frame

    screen = console()
    for note in _notes(node, history, interval):
        for line in frame(history, width=screen.width, height=None, endpoint=node.endpoint, note=note):
            screen.print(line)
        if once:
            return
        screen.print("")
        sys.stdout.flush()


def _print_json(node: Operator, history: History, interval: float, *, once: bool) -> None:
    for note in _notes(node, history, interval):
        click.echo(json.dumps(as_object(history, note)))
        if once:
            return
        sys.stdout.flush()


def as_object(history: History, note: str) -> dict[str, Any]:
    """A frame for programs. Rates are a second, over `seconds`; null while they are not known."""
    from tierkv_cli.output import plain
    from tierkv_cli.top_frame import share

    status, top = history.last.status, history.last.top
    named = {
        "asked_tokens": "asked_tokens",
        "gpu_tokens": "hit_tokens.gpu",
        "host_tokens": "hit_tokens.host",
        "nvme_tokens": "hit_tokens.nvme",
        "disk_tokens": "hit_tokens.disk",
        "stored_tokens": "stored_tokens",
        "loads": "requests.Acquire",
        "stores": "requests.Commit",
        "nvme_read_bytes": "nvme_read_bytes",
        "nvme_written_bytes": "nvme_written_bytes",
        "disk_read_bytes": "disk_read_bytes",
        "disk_written_bytes": "disk_written_bytes",
    }
    kept = ("state", "problems", "version", "incarnation", "uptime_seconds", "sessions", "leases", "tickets", "extents")
    return {
        "now": top.now,
        "note": note,
        **{name: plain(getattr(status, name)) for name in (*kept, "dirty_extents", "tiers")},
        "queues": top.queues,
        "hit_rate": {
            "now": share(*history.hit_share()),
            "since_start": share(history.last.hit_tokens(), history.last.counters.get("asked_tokens", 0)),
        },
        "seconds": history.seconds,
        "rates": {name: history.rate(counter) for name, counter in named.items()},
        "hottest": plain(top.hottest),
        "evictions": plain(top.evictions),
        "prefill_tokens_per_second": top.prefill_tokens_per_second,
    }


# ---- on a terminal


def _watch(node: Operator, history: History, interval: float) -> None:
    from rich.console import Group
    from rich.live import Live

    from tierkv_cli.output import console
    from tierkv_cli.top_frame import frame

    screen = console()
    note = ""

    def render() -> RenderableType:
        width, height = screen.size
        return Group(*frame(history, width=width, height=height, endpoint=node.endpoint, note=note))

    with _ended_by_signals(), _keys() as key, Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(), refresh=True)
            if _wait(screen, key, interval, lambda: live.update(render(), refresh=True)) == "q":
                return
            note = _next(node, history)


def _wait(screen: Console, key: Callable[[float], str], seconds: float, redraw: Callable[[], None]) -> str:
    """Until the time is up, or q: then "q". A window that has another size is drawn anew at once."""
    until, size = time.monotonic() + seconds, screen.size
    while (left := until - time.monotonic()) > 0:
        if key(min(left, KEY_SECONDS)) in ("q", "Q"):
            return "q"
        if screen.size != size:
            size = screen.size
            redraw()
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Keys as they are pressed, unseen; the terminal is as before at the end, however that comes. Where the input is no
    terminal no key is ever pressed."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def key(seconds: float) -> str:
        ready, _, _ = select.select([number], [], [], seconds)
        return os.read(number, 1).decode(errors="replace") if ready else ""

    try:
        yield key
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Who is told to end leaves the terminal as it was."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
