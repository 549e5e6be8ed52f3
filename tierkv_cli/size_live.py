"""The worth of room as a live node tells it: twice, an estimate and what its policy did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv_cli.size import LOAD_RATE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.replay.sizing import Demand, Sizing
    from tierkv.wire.messages import SizeReply

FEW_USES = 1_000
"""Of sampled blocks: with fewer the estimate is rough."""

SHORT_SECONDS = 3_600.0
AGREE = 0.01
"""The node and the estimate agree when their hit rates differ by no more."""

MORE_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDid:
    """A tier and those above it: the share of tokens that the node found in them, and the estimate for as much room."""

    tier: str
    capacity_bytes: int
    hit_rate: float
    estimate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What so much more of a tier would have kept of what was evicted and asked for again: share of all tokens asked
    for, seconds a day."""

    tier: str
    more_bytes: int
    hit_rate: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """`realistic_bytes`: of the last tier, with which the policy in force saves 90 % of the ceiling; None where nothing
    tells. Seconds are those of a day."""

    reply: SizeReply
    sizing: Sizing
    load_rate: float
    tiers: tuple[TierDid, ...]
    saved_seconds: float
    estimated_seconds: float
    regretted_seconds: float
    more: tuple[More, ...]
    realistic_bytes: int | None

    @property
    def is_silent(self) -> bool:
        return not self.reply.requests


def look(
    reply: SizeReply, *, host_bytes: int | None, nvme_bytes: int | None, step_bytes: int, load_rate: float | None
) -> Live:
    """Sizes that are None are those that the node has."""
    from tierkv.replay.reuse import Found, ReuseCurve
    from tierkv.replay.sizing import Demand, size

    tokens = accumulate(gain.tokens for gain in reply.gains)
    seconds = accumulate(gain.seconds for gain in reply.gains)
    num_bytes = accumulate(gain.num_bytes for gain in reply.gains)
    found = [Found(int(a), b, int(c)) for a, b, c in zip(tokens, seconds, num_bytes, strict=True)]
    demand = Demand(
        curve=ReuseCurve([gain.need_bytes for gain in reply.gains], found),
        asked_tokens=reply.asked_tokens,
        seconds=reply.until - reply.since,
        file_factor=reply.file_factor,
    )
    has = {tier.tier: tier.capacity_bytes for tier in reply.tiers}
    load = load_rate or reply.load_bytes_per_second or LOAD_RATE
    sizing = size(
        demand,
        load_rate=load,
        host_bytes=host_bytes or has["host"],
        nvme_bytes=nvme_bytes or has.get("nvme"),
        step_bytes=step_bytes,
    )
    room = _rooms(reply)[-1]
    saved, more = reply.saved_seconds / demand.days, tuple(_more(reply, demand.days))
    return Live(
        reply=reply,
        sizing=sizing,
        load_rate=load,
        tiers=tuple(_tiers(reply, demand)),
        saved_seconds=saved,
        estimated_seconds=demand.curve.at(room).seconds / demand.days,
        regretted_seconds=reply.regretted_seconds / demand.days,
        more=more,
        realistic_bytes=_realistic(reply, sizing, saved, more),
    )


def _rooms(reply: SizeReply) -> list[int]:
    """Of each tier with those above it, as bytes of host memory. Host memory has what GPUs have, as a rule; NVMe what
    memory has, and the disk what NVMe has let go of."""
    rooms: list[int] = []
    files = 0
    for tier in reply.tiers:
        if tier.tier in ("gpu", "host"):
            rooms.append(max([tier.capacity_bytes, *rooms]))
        else:
            files += tier.capacity_bytes
            rooms.append(max(rooms[-1], int(files / reply.file_factor)))
    return rooms


def _tiers(reply: SizeReply, demand: Demand) -> Iterator[TierDid]:
    asked = max(1, reply.asked_tokens)
    hits = 0
    for tier, room in zip(reply.tiers, _rooms(reply), strict=True):
        hits += tier.hit_tokens
        yield TierDid(
            tier=tier.tier,
            capacity_bytes=tier.capacity_bytes,
            hit_rate=hits / asked,
            estimate=demand.curve.at(room).tokens / asked,
        )


def _more(reply: SizeReply, days: float) -> Iterator[More]:
    for tier in reply.tiers:
        tokens, seconds = 0, 0.0
        for gain in reply.more_gains:
            if gain.tier == tier.tier:
                tokens, seconds = tokens + gain.tokens, seconds + gain.seconds
                yield More(
                    tier=tier.tier,
                    more_bytes=gain.more_bytes,
                    hit_rate=tokens / max(1, reply.asked_tokens),
                    seconds=seconds / days,
                )


def _realistic(reply: SizeReply, sizing: Sizing, saved: float, more: tuple[More, ...]) -> int | None:
    from tierkv.replay.sizing import REALISTIC_SHARE

    last, wanted = reply.tiers[-1], REALISTIC_SHARE * sizing.ceiling.host_seconds
    if not wanted:
        return None
    if saved >= wanted:  # with as much as it has; and all that was asked for is all that it could hold of that
        return min(last.capacity_bytes, int(reply.seen_bytes * max(1.0, reply.file_factor)))
    enough = (one for one in more if one.tier == last.tier and saved + one.seconds >= wanted)
    return next((last.capacity_bytes + one.more_bytes for one in enough), None)


# ---- as JSON; docs/replay.md has the schema


def as_object(made: Live) -> dict[str, Any]:
    from tierkv_cli.size_view import as_object as sizing_as_object

    reply = made.reply
    return {
        "since": reply.since,
        "until": reply.until,
        "requests": reply.requests,
        "asked_tokens": reply.asked_tokens,
        "first_tokens": reply.first_tokens,
        "sample": {
            "began": reply.sample_began,
            "blocks": reply.samples,
            "rate": reply.rate,
            "uses": reply.sampled_uses,
            "seen_bytes": reply.seen_bytes,
            "file_factor": reply.file_factor,
        },
        "prefill_tokens_per_second": reply.prefill_tokens_per_second,
        "load_bytes_per_second": made.load_rate,
        **sizing_as_object(made.sizing),
        "did": {
            "policy": reply.policy,
            "tiers": [
                {
                    "tier": tier.tier,
                    "capacity_bytes": tier.capacity_bytes,
                    "hit_rate": tier.hit_rate,
                    "estimated_hit_rate": tier.estimate,
                }
                for tier in made.tiers
            ],
            "saved_seconds_a_day": made.saved_seconds,
            "estimated_seconds_a_day": made.estimated_seconds,
            "regretted_tokens": reply.regretted_tokens,
            "regretted_seconds_a_day": made.regretted_seconds,
            "realistic_bytes": made.realistic_bytes,
            "more": [
                {
                    "tier": one.tier,
                    "more_bytes": one.more_bytes,
                    "hit_rate": one.hit_rate,
                    "seconds_a_day": one.seconds,
                }
                for one in made.more
            ],
        },
    }


# ---- for people


def view(made: Live) -> Iterator[RenderableType]:
    from tierkv_cli.size_view import view as view_sizing

    yield from _about(made)
    if made.is_silent:
        return
    if not made.sizing.ceiling.capacity_bytes:
        yield ""
        yield "nothing of it was asked for a second time: no capacity would have saved anything yet"
        return
    yield ""
    yield "1. Estimate of each capacity, as if what was used longest ago went first:"
    yield from view_sizing(made.sizing)
    yield ""
    yield f"2. What this node did (policy: {made.reply.policy}), beside the estimate for as much room:"
    yield _did_table(made)
    yield _comparison(made)
    yield ""
    yield from _more_words(made)
    notes = list(_notes(made))
    if notes:
        yield ""
        yield from notes


def _about(made: Live) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import at, count, duration, percent

    reply = made.reply
    if made.is_silent:
        yield f"nothing was asked of this node since {at(reply.since)}: it can't say anything yet"
        return
    yield (
        f"{count(reply.requests, 'request')} from {at(reply.since)} to {at(reply.until)} "
        f"({duration(reply.until - reply.since)}), {reply.asked_tokens:,} tokens, "
        f"{percent(reply.first_tokens, reply.asked_tokens)} of them asked for the first time"
    )
    part = "all of them" if reply.rate >= 1 else f"one in {1 / reply.rate:,.0f}"
    yield (
        f"(known since {at(reply.sample_began)}, for none of this survives a restart; told from "
        f"{count(reply.samples, 'block')}, {part}, used {reply.sampled_uses:,} times; all take "
        f"{human_size(reply.seen_bytes)})"
    )


def _did_table(made: Live) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table
    from tierkv_cli.size_view import time_of

    shown = table("found in", "room", "node", "estimate", numbers=("room", "node", "estimate"))
    for number, tier in enumerate(made.tiers):
        name = {"gpu": "GPUs", "host": "host memory"}.get(tier.tier, f"with {tier.tier}")
        room = human_size(tier.capacity_bytes)
        shown.add_row(name, room, percent(tier.hit_rate, 1), percent(tier.estimate, 1))
        if number == len(made.tiers) - 1:
            saved = time_of(made.saved_seconds), time_of(made.estimated_seconds)
            shown.add_row("prefill saved a day", "", *saved)
    return shown


def _comparison(made: Live) -> str:
    """About the tier where they differ most."""
    reply = made.reply
    tier = max(made.tiers, key=lambda tier: abs(tier.hit_rate - tier.estimate))
    difference = tier.hit_rate - tier.estimate
    if abs(difference) <= AGREE:
        return "Both agree: what the estimate says of other capacities holds for this node."
    where = {"gpu": "On GPUs", "host": "In host memory"}.get(tier.tier, f"With {tier.tier}")
    found = f"{where} the node finds {100 * abs(difference):.1f} points"
    if difference < 0:
        return (
            f"{found} less than the estimate: what it refused, purged, let expire or could not load in time is missing "
            "(`tierkv evictions --by reason`)."
        )
    if (tier.hit_rate - AGREE) * reply.asked_tokens > reply.asked_tokens - reply.first_tokens:
        return (
            f"{found} more than the estimate, even for a cache without end: blocks that it had before this was known "
            "count as new there."
        )
    return f"{found} more than the estimate: its policy makes more of the room than that order would."


def _more_words(made: Live) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table
    from tierkv_cli.size_view import more_of, step_of, time_of

    reply, step = made.reply, made.sizing.step_bytes
    if not made.more:
        yield "Nothing that it evicted for want of room was asked for again: more room would have kept nothing more."
    else:
        lost = time_of(made.regretted_seconds)
        yield f"Evicted and asked for again: {reply.regretted_tokens:,} tokens, which is {lost} of prefill a day."
        yield "Of that more room would have kept, by the same policy:"
    for tier in dict.fromkeys(one.tier for one in made.more):
        known = [one for one in made.more if one.tier == tier]
        shown = table(f"more {tier}", "finds", "saves a day", numbers=("finds", "saves a day"))
        for number in range(MORE_ROWS):
            more = step << number
            kept = [one for one in known if one.more_bytes <= more]
            found = kept[-1] if kept else None
            shown.add_row(
                f"+ {step_of(more)}",
                f"+{percent(found.hit_rate if found else 0, 1)}",
                more_of(found.seconds if found else 0),
            )
            if len(kept) == len(known):
                break
        yield shown
    if made.realistic_bytes is not None:
        need = human_size(made.realistic_bytes)
        yield f"Realistic need by this policy (90 % of the ceiling): {need} of {reply.tiers[-1].tier}."
    elif made.more:
        yield "Realistic need by this policy (90 % of the ceiling): more than what was evicted tells."


def _notes(made: Live) -> Iterator[str]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import at, duration
    from tierkv_cli.size_view import step_of

    reply, sizing = made.reply, made.sizing
    asked_about = max(point.capacity_bytes for point in (sizing.host, sizing.nvme) if point is not None)
    if asked_about + sizing.step_bytes > reply.seen_bytes * max(1.0, reply.file_factor):
        yield (
            f"! All that was asked for since {at(reply.sample_began)} takes {human_size(reply.seen_bytes)}: more room "
            f"than that, also as the next {step_of(sizing.step_bytes)}, would have found no more of it; what will come "
            "back later is not known yet."
        )
    if reply.sampled_uses < FEW_USES:
        yield f"! The estimate is rough: it is from {reply.sampled_uses:,} uses of sampled blocks."
    if reply.until - reply.since < SHORT_SECONDS:
        yield f"! Figures of a day are scaled up from {duration(reply.until - reply.since)}."
    if not reply.load_bytes_per_second and any(tier.tier not in ("gpu", "host") for tier in reply.tiers):
        yield f"! Nothing was read from NVMe yet: loading is reckoned with {human_size(int(made.load_rate))} a second."


# ---- as a picture


def draw_live(made: Live, path: Path) -> None:
    """The estimate, and what the node did and would have done with more room."""
    from tierkv_cli.output import at
    from tierkv_cli.plot import COLOURS, GREY, picture
    from tierkv_cli.size_view import draw

    reply, last = made.reply, made.reply.tiers[-1]
    more = [one for one in made.more if one.tier == last.tier]
    sizes = [last.capacity_bytes, *(last.capacity_bytes + one.more_bytes for one in more)]
    seconds = [made.saved_seconds, *(made.saved_seconds + one.seconds for one in more)]
    with picture(path, 9, 4.8) as figure:
        axes = figure.subplots()
        if made.sizing.ceiling.capacity_bytes:
            draw(axes, made.sizing, at_least_seconds=max(seconds))
            hours = [one / 3600 for one in seconds]
            label = f"this node ({reply.policy}), and with more {last.tier}"
            if last.tier != "host":
                label += "; loading not counted"
            axes.plot(sizes, hours, marker="D", markevery=[0], markersize=7, color=COLOURS[2], label=label)
            axes.legend(frameon=False, loc="upper left")
        else:
            axes.text(0.5, 0.5, "nothing was asked for a second time yet", ha="center", color=GREY)
            axes.axis("off")
        figure.suptitle(f"{reply.requests:,} requests, {at(reply.since)} to {at(reply.until)}", fontsize=12)
