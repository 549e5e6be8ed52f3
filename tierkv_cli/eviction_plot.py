"""The picture of evictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tierkv_cli.plot import COLOURS, GREY, quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tierkv.core.eviction_report import Bucket
    from tierkv.wire.messages import EvictionsReply

DAY = 86_400.0
MOVED = "#c9d7de"
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw_evictions(figure: Figure, report: EvictionsReply) -> None:
    """Bytes that left, above, by reason; below, the prefill that was lost because they were asked for again, by why
    they had gone. Over time, in the node's own zone. A reason has one colour in both."""
    import matplotlib.dates

    from tierkv_cli.output import duration

    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scale, unit = _unit(max((one.dropped_bytes + one.moved_bytes for one in report.buckets), default=0))
    colours = _colours(report)
    bars = _Bars(report, colours)
    base = bars.stack(upper, lambda one: one.dropped_bytes_by, 1 / scale)
    moved = [one.moved_bytes / scale for one in report.buckets]
    if any(moved):
        label = "left a tier, still in another"
        upper.bar(bars.starts, moved, bars.days, bottom=base, align="edge", color=MOVED, label=label)
    bars.stack(lower, lambda one: one.regret_seconds_by, 1.0)
    each = duration((report.until - report.since) / max(1, len(report.buckets)))
    upper.set_ylabel(f"{unit} in {each}")
    upper.set_title("Evicted", loc="left", fontsize=11)
    lower.set_ylabel(f"seconds in {each}")
    lower.set_title("Prefill that was lost, as it was asked for again", loc="left", fontsize=11)
    for axes, nothing in ((upper, "nothing was evicted"), (lower, "nothing of it was asked for again")):
        quiet(axes)
        if axes.containers:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yticks([])
            axes.set_ylabel("")
            axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", va="center", color=GREY)
    upper.set_xlim(datetime.fromtimestamp(report.since), datetime.fromtimestamp(report.until))
    dates: Any = matplotlib.dates  # without types
    locator = dates.AutoDateLocator()
    lower.xaxis.set_major_locator(locator)
    lower.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    _legend(figure, [upper, lower])


def _legend(figure: Figure, axes: list[Any]) -> None:
    """One for both, above them, where it hides nothing."""
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            handles=list(handles.values()),
            labels=list(handles),
            loc="outside upper left",
            frameon=False,
            fontsize=9,
            ncols=len(handles),
        )


class _Bars:
    def __init__(self, report: EvictionsReply, colours: Mapping[str, str]) -> None:
        self._report = report
        self._colours = colours
        self.starts: Any = [datetime.fromtimestamp(one.start) for one in report.buckets]
        self.days = (report.until - report.since) / DAY / max(1, len(report.buckets))

    def stack(self, axes: Any, of: Callable[[Bucket], Mapping[str, float]], factor: float) -> list[float]:
        """One upon another, the reason with most of it lowest; how high they are."""
        base = [0.0] * len(self._report.buckets)
        for reason, colour in self._colours.items():
            heights = [of(one).get(reason, 0.0) * factor for one in self._report.buckets]
            if any(heights):
                label = reason.replace("_", " ")
                axes.bar(self.starts, heights, self.days, bottom=base, align="edge", color=colour, label=label)
                base = [low + height for low, height in zip(base, heights, strict=True)]
        return base


def _colours(report: EvictionsReply) -> dict[str, str]:
    """Those with most bytes first, then by what they cost; what comes after the last colour is grey."""
    dropped, lost = Counter[str](), Counter[str]()
    for one in report.buckets:
        dropped.update(one.dropped_bytes_by)
        for reason, seconds in one.regret_seconds_by.items():
            lost[reason] += seconds  # type: ignore[assignment]  # a Counter of seconds
    ordered = sorted({*dropped, *lost}, key=lambda reason: (-dropped[reason], -lost[reason], reason))
    return {reason: COLOURS[min(number, len(COLOURS) - 1)] for number, reason in enumerate(ordered)}


def _unit(largest: int) -> tuple[int, str]:
    return next(((size, name) for size, name in UNITS if largest >= size), (1, "bytes"))
