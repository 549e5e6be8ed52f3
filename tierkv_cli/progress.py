"""How far long work has come, on stderr: a bar on a terminal, now and then a line where there is none."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from tierkv.config.sizes import human_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_SECONDS = 5.0


class Meter:
    """Shows how much of something is done. A context manager; where there is no terminal, work of a few seconds says
    nothing."""

    def __init__(self, title: str, things: str = "") -> None:
        self._title = title
        self._things = things
        self._on_terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._line_due = time.monotonic() + LINE_EVERY_SECONDS

    def show(self, done: int, total: int, num_bytes: int) -> None:
        self._show(done, total, f"{done:,} of {total:,} {self._things}, {human_size(num_bytes)}")

    def show_bytes(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """For work that is measured in bytes; `name` is what is being worked on."""
        self._show(done_bytes, total_bytes, f"{human_size(done_bytes)} of {human_size(total_bytes)}, {name}")

    def say(self, stage: str, done: int, total: int) -> None:
        """For work of which only a stage is known."""
        self._show(done, total, f"{stage}, {done:,} of {total:,}")

    def _show(self, done: int, total: int, words: str) -> None:
        if not self._on_terminal:
            self._print_line(words)
            return
        if self._bar is None or self._task is None:
            self._bar = _bar()
            self._task = self._bar.add_task(self._title, total=total, words=words)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=max(total, 1), words=words)

    def _print_line(self, words: str) -> None:
        now = time.monotonic()
        if now < self._line_due:
            return
        self._line_due = now + LINE_EVERY_SECONDS
        click.echo(f"{self._title}: {words}", err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tierkv_cli.output import console

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    )
