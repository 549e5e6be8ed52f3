"""What is measured: the counts of a node at one instant."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields

from tierkv.core.counters import Counters
from tierkv.core.instructions import JournalHealth
from tierkv.core.pins import PinnedTier
from tierkv.core.usage import PrefillUse, ShareUse, TierBytes, Wear
from tierkv.wire.messages import DeviceStatus, RecordingStatus

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


def copy_counters(counters: Counters) -> Counters:
    """The core's counts as they are now, for a snapshot that another thread reads."""
    return Counters(**{one.name: copy(getattr(counters, one.name)) for one in fields(Counters)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that is exported, at one instant. Whoever makes one never changes it (or what it holds) afterwards:
    it is read in the endpoint's thread. So `core` is a copy (`copy_counters`), and so are `latencies`.

    `state` and `problems` as `status` tells them, `processes` the state of each, `tier_errors` how many file operations
    failed and the last of them, in words, by tier; `found` what the last start did not take, by kind.
    `wear` is None without an NVMe tier, `recording` where nothing is recorded.
    `io_errors` is by (operation, errno name), `request_errors` by code, `queues`, `latencies` and `worker_restarts` by
    name.
    """

    version: str
    incarnation: int = 0
    uptime_seconds: float = 0.0
    ready: bool = False
    state: str = "recovering"
    problems: tuple[str, ...] = ()
    processes: Mapping[str, str] = field(default_factory=dict)
    tier_errors: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    found: Mapping[str, int] = field(default_factory=dict)
    recovery_seconds: float = 0.0
    core: Counters = field(default_factory=Counters)
    tiers: tuple[TierBytes, ...] = ()
    pinned: tuple[PinnedTier, ...] = ()
    shares: tuple[ShareUse, ...] = ()
    prefill: tuple[PrefillUse, ...] = ()
    pins: int = 0
    index_bytes: int = 0
    journal: JournalHealth = field(default_factory=JournalHealth)
    journal_dropped: Mapping[str, int] = field(default_factory=dict)
    quarantined_bytes: int = 0
    quarantined_files: int = 0
    dirty_extents: int = 0
    dirty_bytes: int = 0
    wear: Wear | None = None
    extents: int = 0
    groups: int = 0
    sessions: int = 0
    leases: int = 0
    tickets: int = 0
    queues: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    worker_restarts: Mapping[str, int] = field(default_factory=dict)
    io_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    request_errors: Mapping[str, int] = field(default_factory=dict)
    dropped_replies: int = 0
    slow_sessions: int = 0
    recording: RecordingStatus | None = None
    devices: tuple[DeviceStatus, ...] = ()
