"""What is measured: the counts of a node at one instant."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

LATENCY_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, in seconds; one more bucket holds what is slower."""


class Latency:
    """Counts durations by bucket. Belongs to one thread; `copy` may be read by others."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS) + 1)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.total_seconds += seconds

    def copy(self) -> Latency:
        twin = Latency()
        twin.counts, twin.total_seconds = list(self.counts), self.total_seconds
        return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSnapshot:
    """`used + reserved + overhead <= capacity` at every instant, in bytes."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    overhead_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that is exported, at one instant. Whoever makes one never changes it (or its dictionaries) afterwards:
    it is read in the endpoint's thread.

    `hit_tokens` is by tier, `dropped_writes` and `damaged_blocks` by reason, `evicted_bytes` by (tier, reason),
    `io_errors` by (operation, errno name), `request_errors` by code, `queues` and `latencies` by name.
    """

    version: str
    incarnation: int = 0
    uptime_seconds: float = 0.0
    ready: bool = False
    asked_tokens: int = 0
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    stored_tokens: int = 0
    duplicate_tokens: int = 0
    evicted_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    dropped_writes: Mapping[str, int] = field(default_factory=dict)
    damaged_blocks: Mapping[str, int] = field(default_factory=dict)
    tiers: tuple[TierSnapshot, ...] = ()
    index_bytes: int = 0
    quarantined_bytes: int = 0
    quarantined_files: int = 0
    dirty_extents: int = 0
    dirty_bytes: int = 0
    extents: int = 0
    groups: int = 0
    sessions: int = 0
    leases: int = 0
    tickets: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    recovery_seconds: float = 0.0
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    nvme_read_bytes: int = 0
    nvme_read_seconds: float = 0.0
    nvme_written_bytes: int = 0
    nvme_write_seconds: float = 0.0
    worker_restarts: Mapping[str, int] = field(default_factory=dict)
    io_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    request_errors: Mapping[str, int] = field(default_factory=dict)
    dropped_replies: int = 0
