"""The picture of a cliff."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tierkv_cli.plot import quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tierkv.metrics.cliff import Cliff
    from tierkv_cli.cliff_live import Measured

COLORS = {"gpu": "#31688e", "host": "#35b779", "nvme": "#b5de2b", "disk": "#fde725"}
USUAL, AWAY, BACK = "#444444", "#d9d9d9", "#b2182b"


def draw_start(figure: Figure, cliff: Cliff) -> None:
    """Hit rate by tier and estimated time to first token of a start's first ten minutes, against what was usual."""
    from tierkv.metrics.cliff import figures

    start, usual = cliff.start, cliff.usual
    windows = start.windows
    found = [figures(window) for window in windows]
    ends = windows[-1].ends
    away = cliff.away_seconds or 0.0
    left = -max(0.12 * ends, away * 1.5)
    hits, times = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    known = [*found, *([usual] if usual is not None else [])]
    tiers = [tier for tier in COLORS if any(one.hit_tokens.get(tier) for one in known)]
    for window, one in zip(windows, found, strict=True):
        if not one.asked_tokens:
            continue
        bottom = 0.0
        for tier in tiers:
            share = 100 * one.hit_tokens.get(tier, 0) / one.asked_tokens
            hits.bar(window.begins, share, window.seconds, bottom, align="edge", color=COLORS[tier], linewidth=0)
            bottom += share
        if one.first_token_seconds is not None:
            times.hlines(one.first_token_seconds, window.begins, window.ends, color="#31688e", linewidth=2.5)
    if usual is not None and usual.asked_tokens and cliff.usual_from == "before":
        bottom = 0.0
        for tier in tiers:
            share = 100 * usual.hit_tokens.get(tier, 0) / usual.asked_tokens
            hits.bar(left, share, -away - left, bottom, align="edge", color=COLORS[tier], linewidth=0, alpha=0.45)
            bottom += share
    for tier in tiers:
        hits.bar(0, 0, 0, color=COLORS[tier], label=f"hits from {tier}")
    if usual is not None and usual.hit_rate is not None:
        where = "before the restart" if cliff.usual_from == "before" else "later"
        hits.axhline(100 * usual.hit_rate, color=USUAL, linestyle="--", linewidth=1.2, label=f"usual ({where})")
        hits.axhline(90 * usual.hit_rate, color=USUAL, linestyle=":", linewidth=1, label="90 % of it")
        if usual.first_token_seconds is not None:
            times.axhline(usual.first_token_seconds, color=USUAL, linestyle="--", linewidth=1.2, label="usual")
    for axes in (hits, times):
        if away:
            axes.axvspan(-away, 0, color=AWAY, label=f"away ({away:.1f} s)" if axes is hits else None)
        axes.axvline(0, color="black", linewidth=0.8)
        if cliff.back_seconds is not None:
            label = f"back after {cliff.back_seconds:.0f} s" if axes is hits else None
            axes.axvline(cliff.back_seconds, color=BACK, linewidth=1.2, label=label)
        axes.set_xlim(left, ends)
        quiet(axes)
    hits.set_ylim(0, 100)
    hits.set_ylabel("hits, % of tokens asked")
    hits.legend(loc="lower right", fontsize=8, framealpha=0.9)
    times.set_ylim(bottom=0)
    times.set_ylabel("time to first token,\nestimated, s")
    times.set_xlabel("seconds since the node was ready")
    hits.set_title(_title(cliff), fontsize=10)


def draw_measured(figure: Figure, measured: Measured) -> None:
    """Each request's time to first token, before the restart and after it."""
    from tierkv_cli.cliff import short_seconds

    axes = figure.subplots()
    first = measured.first_round
    offset = max((one.at for one in measured.before), default=0.0)
    for name, some, shift, color in (
        ("before", measured.before, -offset, COLORS["host"]),
        ("after, each prompt's first", first, 0.0, BACK),
        ("after, again", [one for one in measured.after if one not in first], 0.0, "#ef8a62"),
    ):
        if some:
            label = f"{name}: median {short_seconds(measured.median(some))}"
            axes.plot(
                [one.at + shift for one in some],
                [one.first_token_seconds for one in some],
                ".",
                color=color,
                label=label,
            )
    axes.axvline(0, color="black", linewidth=0.8)
    away = measured.away_seconds
    gap = f"the endpoint was away for {short_seconds(away)}, which is left out" if away else "restart at 0"
    axes.set_title(f"time to first token at {measured.url}, {measured.model}\n{gap}", fontsize=10)
    axes.set_xlabel("seconds before the restart and after it")
    axes.set_ylabel("time to first token, s")
    axes.set_ylim(bottom=0)
    quiet(axes)
    if measured.before or measured.after:
        axes.legend(fontsize=8, framealpha=0.9)


def _title(cliff: Cliff) -> str:
    from tierkv_cli.cliff import short_seconds, what

    start = cliff.start
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began))
    cost = "" if cliff.cost_seconds is None else f": {short_seconds(cliff.cost_seconds)} of prefill done again"
    kind = "" if start.kind == "engine" else f"{start.kind}, "
    return f"{kind}{what(start)}, {began}{cost}"
