"""How much memory and NVMe are worth it, told from what each use needs: of a trace, or of what a node has sampled."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.config.sizes import GiB
from tierkv.replay.reuse import ReuseCurve, reuse_curve
from tierkv.replay.trace import Trace

REALISTIC_SHARE = 0.9
"""Of the seconds that can be saved. The last tenth takes several times the room of the rest, as a rule."""

SECONDS_A_DAY = 86_400.0
MOST_ROWS = 9
FEW_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One capacity, as host memory, and as NVMe below `Sizing.host_bytes`. Seconds of prefill saved in a day, what NVMe
    saves less the time to load it; `next` is what `Sizing.step_bytes` more would add. As NVMe None: no more than host
    memory holds."""

    capacity_bytes: int
    hit_rate: float
    host_seconds: float
    host_next: float
    nvme_seconds: float | None
    nvme_next: float | None


@dataclass(frozen=True, slots=True)
class Sizing:
    """`host_bytes` is the host memory that NVMe is looked at below."""

    host_bytes: int
    step_bytes: int
    points: tuple[Point, ...]
    host: Point
    nvme: Point | None
    knee: Point
    realistic: Point
    ceiling: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked for within `seconds`: `asked_tokens`, of which each capacity of host memory finds what `curve`
    says. In files a block takes `file_factor` times as much."""

    curve: ReuseCurve
    asked_tokens: int
    seconds: float
    file_factor: float = 1.0

    @property
    def days(self) -> float:
        return max(self.seconds, 1.0) / SECONDS_A_DAY

    @staticmethod
    def of(trace: Trace, prefill_rate: float) -> Demand:
        return Demand(curve=reuse_curve(trace, prefill_rate), asked_tokens=trace.asked_tokens, seconds=trace.seconds)


def size(
    demand: Demand, *, load_rate: float, host_bytes: int | None, nvme_bytes: int | None, step_bytes: int
) -> Sizing:
    """`host_bytes` None: where the curve of host memory bends. `nvme_bytes` is what there is, or is thought of; read
    with `load_rate` bytes a second."""
    curve = demand.curve
    knee = curve.knee_bytes()
    host = host_bytes if host_bytes is not None else knee
    look = _Look(demand, load_rate, host, step_bytes)
    return Sizing(
        host_bytes=host,
        step_bytes=step_bytes,
        points=tuple(look.at(capacity) for capacity in _round_sizes(curve)),
        host=look.at(host),
        nvme=look.at(nvme_bytes) if nvme_bytes is not None else None,
        knee=look.at(knee),
        realistic=look.at(curve.need_for(REALISTIC_SHARE)),
        ceiling=look.at(curve.ceiling_bytes),
    )


@dataclass(frozen=True, slots=True)
class _Look:
    demand: Demand
    load_rate: float
    host_bytes: int
    step_bytes: int

    def at(self, capacity: int) -> Point:
        demand, curve = self.demand, self.demand.curve
        found, more = curve.at(capacity), curve.at(capacity + self.step_bytes)
        nvme, nvme_more = self._nvme(capacity), self._nvme(capacity + self.step_bytes)
        return Point(
            capacity_bytes=capacity,
            hit_rate=found.tokens / demand.asked_tokens if demand.asked_tokens else 0.0,
            host_seconds=found.seconds / demand.days,
            host_next=(more.seconds - found.seconds) / demand.days,
            nvme_seconds=nvme,
            nvme_next=nvme_more - nvme if nvme is not None and nvme_more is not None else None,
        )

    def _nvme(self, capacity: int) -> float | None:
        """What is found in either tier, less the loading of what is not in memory."""
        demand = self.demand
        in_files = int(capacity / demand.file_factor)
        if in_files <= self.host_bytes:
            return None
        found, in_host = demand.curve.at(in_files), demand.curve.at(self.host_bytes)
        load_seconds = (found.num_bytes - in_host.num_bytes) * demand.file_factor / self.load_rate
        return (found.seconds - load_seconds) / demand.days


def _round_sizes(curve: ReuseCurve) -> list[int]:
    """Powers of two of GiB, up to the first that finds everything; of less, where these are few."""
    if not curve.ceiling_bytes:
        return []
    top = 1
    while top < curve.ceiling_bytes:
        top *= 2
    sizes = sorted({top >> shift for shift in range(MOST_ROWS)} - {0})
    large = [size for size in sizes if size >= GiB]
    return large if len(large) >= FEW_ROWS else sizes
