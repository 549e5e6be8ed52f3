"""Options that several commands share, and which node they mean."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tierkv.config import Effective


class NumberRange(click.FloatRange):
    """A number within bounds, which "nan" is not: it compares with none of them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


if TYPE_CHECKING:
    FloatType = click.ParamType[float]
else:
    FloatType = click.ParamType  # which older releases of click can't be told a type


MAX_SPAN_DAYS = 36_500
MAX_SPAN_SECONDS = MAX_SPAN_DAYS * 86_400.0
"""A hundred years: less than any request of the protocol takes, and than the calendar of any system ends in."""


class SpanType(FloatType):
    """A span of time like "24h", as seconds: a hundred years at most."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from tierkv.config.spans import parse_span

        if isinstance(value, float):
            return value
        try:
            seconds = parse_span(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds > MAX_SPAN_SECONDS:
            self.fail(f"{value!r} is too long; {MAX_SPAN_DAYS:,} days is the most", param, ctx)
        return seconds


SPAN = SpanType()


@dataclass(frozen=True, slots=True)
class Where:
    """Which node, as the command line has it. None: not given."""

    endpoint: str | None
    data_dir: str | None
    socket_dir: str | None
    config: str | None

    def settings(self) -> Effective:
        """The settings that `tierkv serve` would have with the same options, file and environment."""
        from tierkv.config import find_file, load

        options = {"data_dir": self.data_dir, "socket_dir": self.socket_dir}
        return load(options, os.environ, find_file(Path(self.config) if self.config else None, os.environ))

    def socket_directory(self) -> Path:
        """The node's endpoint: --endpoint, what the other options say, TIERKV_ENDPOINT, what the settings say."""
        from tierkv.wire.socket_directory import find_socket_dir

        if self.endpoint is not None:
            return _absolute(self.endpoint)
        variable = os.environ.get("TIERKV_ENDPOINT")
        if variable and self.data_dir is None and self.socket_dir is None and self.config is None:
            return _absolute(variable)
        effective = self.settings()
        if effective.sources["socket_dir"] != "default":
            return effective.settings.socket_dir
        return find_socket_dir(effective.settings.data_dir, effective.settings.name)


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


_WHERE = (
    click.option("--endpoint", metavar="PATH", help="The node's socket directory. Also: TIERKV_ENDPOINT."),
    click.option("--data-dir", metavar="PATH", help="The node's data directory."),
    click.option("--socket-dir", metavar="PATH", help="The node's socket directory, as its settings name it."),
    click.option("--config", metavar="FILE", help="The node's settings. Also: TIERKV_CONFIG."),
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value; sizes in bytes.")

debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show where an error came from."
)  # tierkv_cli.main looks for it by itself: an error can come before options are read


def where_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `Where`; the command gets it as `where`."""

    @wraps(function)
    def with_where(
        *, endpoint: str | None, data_dir: str | None, socket_dir: str | None, config: str | None, **rest: Any
    ) -> Any:
        return function(where=Where(endpoint, data_dir, socket_dir, config), **rest)

    decorated: Callable[..., Any] = debug_option(with_where)
    for option in reversed(_WHERE):
        decorated = option(decorated)
    return decorated
