"""Metrics: declared in one table (table), read from a snapshot (snapshot), served when a port is given (endpoint).

    front     keeps plain counts; now and then makes a Snapshot of them
    METRICS   says how each metric is read from a snapshot; endpoint and docs/metrics.md are made from it

Counts only ever grow within one incarnation of the front, and are 0 in a new one. Nothing here knows where a count
comes from, and nothing is exported that is not in the table. The endpoint is a module of its own, imported by name,
because it alone needs the Prometheus library.
"""

from tierkv.metrics.snapshot import LATENCY_BOUNDS, Latency, Snapshot, copy_counters

__all__ = ["Snapshot", "copy_counters", "Latency", "LATENCY_BOUNDS"]
