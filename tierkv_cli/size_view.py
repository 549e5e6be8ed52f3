"""How the worth of room is shown, of a trace or of a node: tables, words, a picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv.replay.sizing import Point, Sizing


def as_object(made: Sizing) -> dict[str, Any]:
    """For programs; docs/replay.md has the schema."""
    return {
        "host_bytes": made.host_bytes,
        "step_bytes": made.step_bytes,
        "points": [point_as_object(point) for point in made.points],
        "host": point_as_object(made.host),
        "nvme": point_as_object(made.nvme) if made.nvme is not None else None,
        "knee": point_as_object(made.knee),
        "realistic": point_as_object(made.realistic),
        "ceiling": point_as_object(made.ceiling),
    }


def point_as_object(point: Point) -> dict[str, Any]:
    return {
        "capacity_bytes": point.capacity_bytes,
        "hit_rate": point.hit_rate,
        "host_seconds_a_day": point.host_seconds,
        "host_next_seconds_a_day": point.host_next,
        "nvme_seconds_a_day": point.nvme_seconds,
        "nvme_next_seconds_a_day": point.nvme_next,
    }


def view(made: Sizing) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size

    below = human_size(made.host_bytes)
    yield f"prefill saved a day, of one engine's time (nvme below {below} of memory):"
    yield _table(made)
    yield ""
    yield from _words(made)


def _table(made: Sizing) -> RenderableType:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    step = f"+ {step_of(made.step_bytes)}"
    numbers = ("hits", "host memory", "of ceiling", step, "nvme", step)
    shown = table("capacity", *numbers, numbers=numbers)
    for point in made.points:
        shown.add_row(
            human_size(point.capacity_bytes),
            percent(point.hit_rate, 1),
            time_of(point.host_seconds),
            percent(point.host_seconds, made.ceiling.host_seconds),
            more_of(point.host_next),
            "-" if point.nvme_seconds is None else time_of(point.nvme_seconds),
            "-" if point.nvme_next is None else more_of(point.nvme_next),
        )
    return shown


def _words(made: Sizing) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.output import percent, table

    shown = table("", "room", "hits", "saves a day", "what it is", numbers=("room", "hits", "saves a day"))
    named = [
        ("knee", made.knee, "the curve bends here: more brings less than it did on average before"),
        ("realistic need", made.realistic, "saves 90 % of what can be saved"),
        ("ceiling", made.ceiling, "finds all that is ever used again"),
    ]
    for name, point, meaning in sorted(named, key=lambda one: one[1].capacity_bytes):
        hits = percent(point.hit_rate, 1)
        shown.add_row(name, human_size(point.capacity_bytes), hits, time_of(point.host_seconds), meaning)
    yield shown
    yield ""
    host, nvme, step = made.host, made.nvme, step_of(made.step_bytes)
    yield (
        f"host memory of {human_size(host.capacity_bytes)} saves {time_of(host.host_seconds)} a day, "
        f"and the next {step} {time_of(host.host_next)} more"
    )
    if nvme is not None and nvme.nvme_seconds is None:
        yield f"nvme of {human_size(nvme.capacity_bytes)} holds no more than host memory does, and adds nothing"
    elif nvme is not None and nvme.nvme_seconds is not None:
        added, following = nvme.nvme_seconds - host.host_seconds, nvme.nvme_next or 0.0
        yield (
            f"nvme of {human_size(nvme.capacity_bytes)} below it saves {time_of(added)} more, "
            f"and its next {step} {time_of(following)} more"
        )


def time_of(seconds: float) -> str:
    """Hours, or what is less: "214.2 h", "26 min", "3 s"."""
    if abs(seconds) >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if abs(seconds) >= 60 else f"{seconds:.0f} s"


def more_of(seconds: float) -> str:
    return f"{'' if seconds < 0 else '+'}{time_of(seconds)}"


def step_of(num_bytes: int) -> str:
    """As it would be said: "100 GB" and not "93.1 GiB"."""
    from tierkv.config.sizes import human_size

    gigabytes, rest = divmod(num_bytes, 10**9)
    return f"{gigabytes:,} GB" if not rest else human_size(num_bytes)


# ---- as a picture


def draw(axes: Any, made: Sizing, *, at_least_seconds: float = 0.0) -> None:
    """Saved hours a day over capacity, as host memory and as NVMe, with knee, realistic need and ceiling. There is room
    for so many seconds a day `at_least`."""
    from tierkv.config.sizes import human_size
    from tierkv_cli.plot import COLOURS, GREY, quiet

    points = [point for point in made.points if point.capacity_bytes]
    sizes = [point.capacity_bytes for point in points]
    axes.plot(
        sizes, [point.host_seconds / 3600 for point in points], marker="o", markersize=4, color=COLOURS[0],
        label="host memory",
    )  # fmt: skip
    below = [(p.capacity_bytes, p.nvme_seconds / 3600) for p in points if p.nvme_seconds is not None]
    if below:
        axes.plot(
            *zip(*below, strict=True), marker="o", markersize=4, color=COLOURS[1],
            label=f"nvme below {human_size(made.host_bytes)} of host memory",
        )  # fmt: skip
    marks = {"knee": made.knee, "90 %": made.realistic, "ceiling": made.ceiling}
    for number, (name, point) in enumerate(marks.items()):
        axes.axvline(point.capacity_bytes, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(
            f"{name}\n{human_size(point.capacity_bytes)}",
            (point.capacity_bytes, 0.04 + 0.13 * number),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            color=GREY,
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [human_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(made.ceiling.host_seconds, at_least_seconds) / 3600 or None)
    axes.set_xlabel("capacity")
    axes.set_title("hours of prefill saved a day", loc="left", fontsize=11)
    quiet(axes)
