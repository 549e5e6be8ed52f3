"""The picture of evictions."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from tierkv_cli.plot import COLOURS, GREY, quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tierkv.wire.messages import EvictionsReply

DAY = 86_400.0
MANY = 1_000_000


def draw_evictions(figure: Figure, report: EvictionsReply) -> None:
    """Tokens that left, above; below, what of it was asked for again. Over time, in the node's own zone."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    starts = [datetime.fromtimestamp(bucket.start) for bucket in report.buckets]
    days = (report.until - report.since) / DAY / max(1, len(report.buckets))
    largest = max((bucket.dropped_tokens + bucket.moved_tokens for bucket in report.buckets), default=0)
    scale, unit = (MANY, "million tokens") if largest >= MANY else (1_000, "thousand tokens")
    dropped = [bucket.dropped_tokens / scale for bucket in report.buckets]
    moved = [bucket.moved_tokens / scale for bucket in report.buckets]
    again = [bucket.regret_tokens / scale for bucket in report.buckets]
    seconds = [bucket.regret_seconds for bucket in report.buckets]
    upper.bar(starts, dropped, days, align="edge", color=COLOURS[1], label="dropped: in no tier any more")
    upper.bar(starts, moved, days, bottom=dropped, align="edge", color="#c9d7de", label="left a tier, still in another")
    upper.set_ylabel(unit)
    upper.set_title("Evicted", loc="left", fontsize=11)
    lower.bar(starts, seconds, days, align="edge", color=COLOURS[0], label="prefill lost, seconds (left)")
    lower.set_ylabel("seconds")
    lower.set_title("Asked for again", loc="left", fontsize=11)
    tokens = lower.twinx()
    tokens.plot([*starts], again, color=GREY, linewidth=1.4, drawstyle="steps-post", label=f"{unit} (right)")
    tokens.set_ylabel(unit, color=GREY)
    tokens.set_ylim(bottom=0)
    tokens.spines["top"].set_visible(False)
    for axes in (upper, lower):
        quiet(axes)
        axes.set_ylim(bottom=0)
    upper.legend(frameon=False, fontsize=9, loc="upper left")
    handles = [*lower.get_legend_handles_labels()[0], *tokens.get_legend_handles_labels()[0]]
    lower.legend(handles=handles, frameon=False, fontsize=9, loc="upper left")
    figure.autofmt_xdate(rotation=0, ha="center")
