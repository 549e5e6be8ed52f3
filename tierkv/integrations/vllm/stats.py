"""What the connector did, in vLLM's own statistics: its log line, and its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tierkv.integrations.connector.scheduler import SchedulerCounts
from tierkv.integrations.connector.worker import WorkerCounts

PREFIX = "vllm:tierkv_"
LABELLED = {
    "misses": (
        "reason",
        "Requests that got less from the cache than it had, or nothing for want of a node, by reason.",
    ),
    "reasons": ("reason", "Loads and stores that were refused or cut short, by reason."),
    "bypassed": ("reason", "Requests that went without the cache, by reason."),
    "uncoded": ("reason", "Requests whose blocks are kept as they are though the node has a codec, by reason."),
    "faults": ("doing", "Faults of the cache that were caught, so that the engine went on without it."),
}
COUNTERS = {
    "requests": "Requests that could use the cache.",
    "asked": "Requests that the node was asked about.",
    "hit_requests": "Requests for which blocks were loaded.",
    "host_tokens": "Tokens loaded from the node's host memory.",
    "nvme_tokens": "Tokens loaded that lay on NVMe when the request came.",
    "failed_loads": "Loads that failed and were computed instead.",
    "late_stores": "Stores given up because the engine needed its pages first; offered again.",
    "scheduler_seconds": "Time that the connector took of the engine's scheduler.",
    "loads": "Loads.",
    "loaded_blocks": "Blocks loaded.",
    "loaded_bytes": "Bytes loaded.",
    "load_seconds": "Time spent with loading, beside the engine's computing unless it was idle.",
    "device_loaded_blocks": "Blocks of them that lay in the pool of the engine's GPU.",
    "failed_blocks": "Blocks that could not be loaded.",
    "stored_blocks": "Blocks stored that the node did not have.",
    "stored_bytes": "Bytes stored.",
    "device_stored_blocks": "Blocks of them that went into the pool of the engine's GPU.",
    "store_seconds": "Time spent with storing, beside the engine's computing.",
    "waited_seconds": "Time that steps of the engine waited for the end of copies.",
}


class TierkvStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: numbers by the names of COUNTERS, and for those of LABELLED numbers by label; all of one interval."""

    data: dict[str, Any]

    @classmethod
    def of(cls, numbers: dict[str, Any]) -> TierkvStats:
        """Without what is zero."""
        return cls(data={name: value for name, value in numbers.items() if value})

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TierkvStats:
        for name, value in other.data.items():
            if isinstance(value, dict):
                mine = self.data.setdefault(name, {})
                for label, number in value.items():
                    mine[label] = mine.get(label, 0) + number
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, dict):
                numbers.update({f"{name}.{label}": number for label, number in value.items()})
            else:
                numbers[name] = round(value, 4)
        return numbers

    def is_empty(self) -> bool:
        return not self.data


class Differences:
    """Of counts that only grow: what was added since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def take(self, numbers: dict[str, Any]) -> dict[str, Any]:
        before, self._before = self._before, numbers
        return {name: _less(value, before.get(name)) for name, value in numbers.items()}


def _less(value: Any, before: Any) -> Any:
    if isinstance(value, dict):
        known = before or {}
        added = {label: number - known.get(label, 0) for label, number in value.items()}
        return {label: number for label, number in added.items() if number}
    return value - (before or 0)


_EVENTS = attrgetter(*(one.name for one in fields(SchedulerCounts) if one.name in COUNTERS))


def counted_events(counts: SchedulerCounts, bypassed: dict[str, int], faults: dict[str, int]) -> tuple[int, ...]:
    """Another one whenever something was counted, time aside: what every step can be asked for."""
    return (
        *_EVENTS(counts),
        sum(counts.misses.values()),
        sum(counts.uncoded.values()),
        sum(bypassed.values()),
        sum(faults.values()),
    )


def numbers_of_scheduler(counts: SchedulerCounts, bypassed: dict[str, int], faults: dict[str, int]) -> dict[str, Any]:
    numbers = {name.name: getattr(counts, name.name) for name in fields(counts) if name.name in COUNTERS}
    return {
        **numbers,
        "scheduler_seconds": counts.seconds,
        "misses": dict(counts.misses),
        "uncoded": dict(counts.uncoded),
        "bypassed": dict(bypassed),
        "faults": dict(faults),
    }


def numbers_of_worker(counts: WorkerCounts, faults: dict[str, int]) -> dict[str, Any]:
    numbers = {name.name: getattr(counts, name.name) for name in fields(counts) if name.name in COUNTERS}
    return {**numbers, "reasons": dict(counts.reasons), "faults": faults}


class TierkvPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:tierkv_...`, with the labels of vLLM's own metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._labelled = {
            name: self._counter_cls(name=PREFIX + name, documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in LABELLED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*labels).inc(value)
            elif name in self._labelled:
                for label, number in value.items():
                    self._labelled[name].labels(*labels, label).inc(number)
