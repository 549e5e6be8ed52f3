"""How things look: consoles, tables, bars, times, JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 240  # columns where there is no terminal: nothing is cut off before grep has seen it


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for tierkv_cli.main, which knows the exit code


def console(*, stderr: bool = False) -> Console:
    """Nothing is taken for markup: names of models may have brackets in them."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Columns named in `numbers` are set right and never broken; where it is narrow, the others are."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        is_number = column in numbers
        made.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return made


def bar(part: int, whole: int, width: int = 20) -> str:
    filled = 0 if whole <= 0 else min(width, round(width * part / whole))
    return "#" * filled + "." * (width - filled)


def percent(part: float, whole: float) -> str:
    return "-" if not whole else f"{100 * part / whole:.1f} %"


def count(number: int, thing: str) -> str:
    """ "1 lease", "2 leases"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """The two largest units: "3 h 12 m", "41 s"."""
    whole = max(0, int(seconds))
    parts = [
        (whole // 86_400, "d"),
        (whole % 86_400 // 3_600, "h"),
        (whole % 3_600 // 60, "m"),
        (whole % 60, "s"),
    ]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2])


def ago(moment: float, now: float | None = None) -> str:
    """A time of the node, which is a wall-clock time; 0 is never."""
    if not moment:
        return "never"
    return f"{duration((time.time() if now is None else now) - moment)} ago"


def at(moment: float) -> str:
    """The same on the wall: "2026-03-01 17:05:09"; 0 is never."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else "never"


def warn(text: str) -> Text:
    return Text(f"! {text}", style="yellow")


def print_json(value: object) -> None:
    click.echo(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """JSON's own types: messages become objects without their `type`, bytes hex digits."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name != "id"}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def printable(text: str) -> str:
    """What others chose (names of models, of requests), with nothing in it that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text)
