"""How far long work has come, on stderr: a bar on a terminal, now and then a line where there is none."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from tierkv.config.sizes import human_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_SECONDS = 5.0
PACE_SECONDS = 15.0


class Pace:
    """How fast something gets on, over the last PACE_SECONDS, and how long the rest takes at that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque()
        self._total = 0.0

    def note(self, done: float, total: float) -> None:
        now = self._clock()
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # it began anew
        self._seen.append((now, done))
        self._total = total
        while len(self._seen) > 2 and self._seen[1][0] <= now - PACE_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """0 while nobody can tell."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        (began, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - began)

    @property
    def seconds_left(self) -> float | None:
        """None while nobody can tell."""
        left = max(0.0, self._total - self._seen[-1][1]) if self._seen else 0.0
        return left / self.per_second if self.per_second else None


class Meter:
    """Shows how much of something is done. A context manager; where there is no terminal, work of a few seconds says
    nothing. `as_json`: for a script, a line of JSON now and then instead, on stderr."""

    def __init__(self, title: str, things: str = "", *, as_json: bool = False) -> None:
        self._title = title
        self._things = things
        self._as_json = as_json
        self._on_terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._line_due = time.monotonic() + LINE_EVERY_SECONDS

    def show(self, done: int, total: int, num_bytes: int) -> None:
        self._show(done, total, f"{done:,} of {total:,} {self._things}, {human_size(num_bytes)}")

    def show_bytes(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """For work that is measured in bytes; `name` is what is being worked on."""
        self._show(done_bytes, total_bytes, f"{human_size(done_bytes)} of {human_size(total_bytes)}, {name}")

    def tell(self, done: int, total: int, words: str, fields: dict[str, object]) -> None:
        """For work that has words of its own, and `fields` for whoever reads JSON."""
        if self._as_json:
            self._print_line(json.dumps(fields), title="")
        else:
            self._show(done, total, words, shows_time=False)

    def note(self, words: str) -> None:
        """Something that happened meanwhile, told at once and kept in sight."""
        if self._as_json:
            click.echo(json.dumps({"note": words}), err=True)
            return
        if self._bar is not None:
            self._bar.console.print(f"{self._title}: {words}")
        else:
            click.echo(f"{self._title}: {words}", err=True)

    def say(self, stage: str, done: int, total: int) -> None:
        """For work of which only a stage is known."""
        self._show(done, total, f"{stage}, {done:,} of {total:,}")

    def _show(self, done: int, total: int, words: str, *, shows_time: bool = True) -> None:
        if self._as_json:
            return
        if not self._on_terminal:
            self._print_line(words, title=f"{self._title}: ")
            return
        if self._bar is None or self._task is None:
            self._bar = _bar(shows_time=shows_time)
            self._task = self._bar.add_task(self._title, total=total, words=words)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=max(total, 1), words=words)

    def _print_line(self, words: str, *, title: str) -> None:
        now = time.monotonic()
        if now < self._line_due:
            return
        self._line_due = now + LINE_EVERY_SECONDS
        click.echo(title + words, err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(*, shows_time: bool) -> Progress:
    """`shows_time`: the time left, which words may say better."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tierkv_cli.output import console

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        *([TimeRemainingColumn()] if shows_time else []),
        console=console(stderr=True),
        transient=True,
    )
