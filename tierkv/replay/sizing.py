"""How much memory and NVMe are worth it, told from a trace."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.config.sizes import GiB
from tierkv.replay.reuse import Found, ReuseCurve, reuse_curve
from tierkv.replay.trace import Trace

REALISTIC_SHARE = 0.9
"""Of the seconds that can be saved. The last tenth takes several times the room of the rest, as a rule."""

SECONDS_A_DAY = 86_400.0
MOST_ROWS = 9


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

    trace: Trace
    host_bytes: int
    step_bytes: int
    points: tuple[Point, ...]
    host: Point
    nvme: Point | None
    knee: Point
    realistic: Point
    ceiling: Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens of prefill a second, bytes a second from NVMe."""

    prefill: float
    load: float


def size(trace: Trace, *, rates: Rates, host_bytes: int | None, nvme_bytes: int | None, step_bytes: int) -> Sizing:
    """`host_bytes` None: where the curve of host memory bends. `nvme_bytes` is what there is, or is thought of."""
    curve = reuse_curve(trace, rates.prefill)
    knee = curve.knee_bytes()
    host = host_bytes if host_bytes is not None else knee
    days = max(trace.seconds, 1.0) / SECONDS_A_DAY
    look = _Look(trace, curve, rates, host, step_bytes, days)
    return Sizing(
        trace=trace,
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
    trace: Trace
    curve: ReuseCurve
    rates: Rates
    host_bytes: int
    step_bytes: int
    days: float

    def at(self, capacity: int) -> Point:
        found = self.curve.at(capacity)
        more = capacity + self.step_bytes
        nvme, nvme_more = (self._nvme(one) if one > self.host_bytes else None for one in (capacity, more))
        return Point(
            capacity_bytes=capacity,
            hit_rate=found.tokens / self.trace.asked_tokens,
            host_seconds=found.seconds / self.days,
            host_next=(self.curve.at(more).seconds - found.seconds) / self.days,
            nvme_seconds=nvme,
            nvme_next=nvme_more - nvme if nvme is not None and nvme_more is not None else None,
        )

    def _nvme(self, capacity: int) -> float:
        """What is found in either tier, less the loading of what is not in memory."""
        found, in_host = self.curve.at(capacity), self.curve.at(self.host_bytes)
        return (found.seconds - self._load_seconds(found, in_host)) / self.days

    def _load_seconds(self, found: Found, in_host: Found) -> float:
        return (found.num_bytes - in_host.num_bytes) / self.rates.load


def _round_sizes(curve: ReuseCurve) -> list[int]:
    """Powers of two of GiB (of bytes, where everything is smaller), up to the first that finds everything."""
    top = 1
    while top < curve.ceiling_bytes:
        top *= 2
    sizes = [top >> shift for shift in range(MOST_ROWS)]
    return sorted(size for size in sizes if size >= min(GiB, top))
