"""Pictures: matplotlib, which only those install who want some."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d1603d", "#6a994e", "#7d5ba6", "#b08900", "#444444")
GREY = "#8a8a8a"
KINDS = (".png", ".svg", ".pdf")

plot_option = click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="Also draw it; needs matplotlib."
)


def check_picture(path: Path) -> None:
    """Say before the work begins what would keep its picture from being drawn. Raises ConfigError."""
    if path.suffix.lower() not in KINDS:
        raise ConfigError("plot", f"{path} is of no kind that is drawn here: name a file that ends in .png")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("plot", f"{path} can't be written: {path.parent} is no directory that may be written to")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            "plot", "a picture needs matplotlib; install it, or all of the extra: pip install 'tierkv-cache[bench]'"
        ) from error


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, written to `path` when the block ends. Raises ConfigError where it can't be."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError("plot", f"{path} can't be written: {error.strerror}") from error


def quiet(axes: Any) -> None:
    """Lines that are to be read, and little else."""
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
