"""`tierkv serve`: run a node. Its options are the fields of the settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tierkv.config import Effective, find_file, load, option_name
from tierkv.config.words import SettingWords, describe
from tierkv_cli.options import debug_option

_METAVARS = {"size": "SIZE", "seconds": "SECONDS", "days": "DAYS", "extents": "N", "threads": "N", "file": "FILE"}


def _setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each setting. Values go to the settings as they are typed: there is one parser, and one error."""
    for words in reversed(describe()):
        function = _option(words)(function)
    return function


def _option(words: SettingWords) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = words.default.strip('"') or "empty"
    text = f"{words.meaning} [default: {default}]"
    if words.example in ("true", "false"):
        name = option_name(words.name)
        return click.option(f"{name}/{name.replace('--', '--no-')}", words.name, default=None, help=text)
    metavar = _METAVARS.get(words.unit) or words.name.rsplit("_")[-1].replace("dir", "path").upper()
    return click.option(option_name(words.name), words.name, default=None, metavar=metavar, help=text)


@click.command(short_help="Run a node until it is told to stop.")
@click.option("--config", metavar="FILE", help="File of settings (TOML). Also: TIERKV_CONFIG.")
@debug_option
@_setting_options
def command(*, config: str | None, **options: Any) -> int:
    """Run a node until it is told to stop (SIGTERM or Ctrl-C), then write what isn't on disk yet.

    The last line says what was written and what was dropped since; exit code 4 when something was dropped.

    Each setting can be given as an option, as a TIERKV_ variable, or in a file; the option wins, then the variable.
    `tierkv config` shows what is in force. Sizes are written like 512MiB, 4GiB or 10GB.
    """
    from tierkv.node.supervisor import run

    effective = load(options, os.environ, find_file(Path(config) if config else None, os.environ))
    for line in opening_lines(effective):
        click.echo(line, err=True)
    return run(effective.settings)


def opening_lines(effective: Effective) -> list[str]:
    """What an operator should see without asking: where the node is, and what it takes."""
    from tierkv.config import human_size

    settings, sources = effective.settings, effective.sources
    where = str(settings.data_dir) if settings.data_dir else "none: memory only, nothing is written to disk"
    lines = [
        f"tierkv: data directory {where}",
        f"tierkv: endpoint {settings.socket_dir}",
        f"tierkv: host memory {human_size(settings.host_bytes)} ({_from(sources['host_bytes'])})",
    ]
    if settings.gpu_devices:
        lines.append(f"tierkv: {human_size(settings.gpu_bytes or 0)} on each of gpu_devices {settings.gpu_devices}")
    if settings.inline_users:
        lines.append(f"tierkv: endpoint {settings.inline_dir} for {settings.inline_users}, who are not trusted")
    if settings.record is not None:
        lines.append(f"tierkv: what engines ask is recorded in {settings.record}: keys of blocks, no tokens")
    if settings.metrics_port is not None:
        lines.append(f"tierkv: metrics at http://{settings.metrics_host}:{settings.metrics_port}/metrics")
    return lines


def _from(source: str) -> str:
    return "by default, a quarter of what there is" if source == "default" else f"from {source}"
