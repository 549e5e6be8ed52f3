"""What the connector did, as vLLM's statistics tell it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from tierkv.integrations.connector.scheduler import SchedulerCounts
from tierkv.integrations.connector.worker import WorkerCounts
from tierkv.integrations.vllm.connector import TierkvConnector
from tierkv.integrations.vllm.stats import (
    COUNTERS,
    LABELLED,
    PREFIX,
    Differences,
    TierkvPromMetrics,
    TierkvStats,
    counted_events,
    numbers_of_scheduler,
    numbers_of_worker,
)


def test_every_count_has_a_metric_and_every_metric_a_count() -> None:
    scheduler = numbers_of_scheduler(SchedulerCounts(), {}, {})
    worker = numbers_of_worker(WorkerCounts(), {})
    assert scheduler.keys() | worker.keys() == COUNTERS.keys() | LABELLED.keys()
    counted = {one.name for counts in (SchedulerCounts, WorkerCounts) for one in fields(counts)}
    assert counted - {"seconds"} <= COUNTERS.keys() | LABELLED.keys()


def test_what_is_zero_is_not_told() -> None:
    assert TierkvStats.of(numbers_of_worker(WorkerCounts(), {})).is_empty()
    stats = TierkvStats.of(numbers_of_worker(WorkerCounts(loads=2, reasons=Counter(no_room=1)), {}))
    assert stats.data == {"loads": 2, "reasons": {"no_room": 1}}


def test_ranks_and_steps_add_up() -> None:
    one = TierkvStats(data={"loads": 1, "reasons": {"no_room": 1, "pending": 2}})
    other = TierkvStats(data={"loads": 2, "stored_blocks": 3, "reasons": {"no_room": 4}, "faults": {"loading": 1}})
    assert one.aggregate(other) is one
    assert one.data == {
        "loads": 3,
        "stored_blocks": 3,
        "reasons": {"no_room": 5, "pending": 2},
        "faults": {"loading": 1},
    }


def test_adding_up_leaves_what_was_added_as_it_was() -> None:
    one, other = TierkvStats(data={}), TierkvStats(data={"reasons": {"no_room": 4}})
    one.aggregate(other).aggregate(other)
    assert one.data == {"reasons": {"no_room": 8}}
    assert other.data == {"reasons": {"no_room": 4}}


def test_the_log_line_has_plain_numbers() -> None:
    stats = TierkvStats(data={"load_seconds": 0.123456, "loads": 3, "reasons": {"no_room": 1}})
    assert stats.reduce() == {"load_seconds": 0.1235, "loads": 3, "reasons.no_room": 1}
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


def test_counts_that_grow_are_told_as_what_was_added() -> None:
    differences = Differences()
    assert differences.take({"loads": 3, "reasons": {"no_room": 1}}) == {"loads": 3, "reasons": {"no_room": 1}}
    assert differences.take({"loads": 3, "reasons": {"no_room": 1}}) == {"loads": 0, "reasons": {}}
    later = {"loads": 5, "reasons": {"no_room": 1, "pending": 2}}
    assert differences.take(later) == {"loads": 2, "reasons": {"pending": 2}}


def test_vllm_s_own_log_takes_them(caplog: pytest.LogCaptureFixture, vllm_config: Any) -> None:
    """It makes them anew from their data, by the class that it asks the connector for."""
    again = TierkvConnector.build_kv_connector_stats({"loads": 2, "reasons": {"no_room": 1}})
    assert isinstance(again, TierkvStats)
    assert again.reduce() == {"loads": 2, "reasons.no_room": 1}
    empty = TierkvConnector.build_kv_connector_stats()
    assert empty.is_empty()
    logging = KVConnectorLogging(vllm_config.kv_transfer_config)
    logging.observe({"loads": 2})
    logging.observe({"loads": 3})
    assert logging.transfer_stats_accumulator.reduce() == {"loads": 5}


def prometheus(vllm_config: Any, registry: prometheus_client.CollectorRegistry) -> TierkvPromMetrics:
    types = {
        prometheus_client.Counter: partial(prometheus_client.Counter, registry=registry),
        prometheus_client.Gauge: prometheus_client.Gauge,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    metrics = TierkvConnector.build_prom_metrics(
        vllm_config, types, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
    )
    assert isinstance(metrics, TierkvPromMetrics)
    return metrics


def test_prometheus_has_every_metric_with_vllm_s_labels(vllm_config: Any) -> None:
    registry = prometheus_client.CollectorRegistry()
    metrics = prometheus(vllm_config, registry)
    metrics.observe({"loads": 2, "misses": {"deadline": 3}, "what an older release told": 1})
    metrics.observe({"loads": 5, "misses": {"deadline": 1, "no_room": 1}}, engine_idx=1)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"{PREFIX}{name}_total", {"model_name": "tiny", **labels})

    assert value("loads", engine="0") == 2
    assert value("loads", engine="1") == 5
    assert value("misses", engine="0", reason="deadline") == 3
    assert value("misses", engine="1", reason="deadline") == 1
    assert value("misses", engine="0", reason="no_room") is None
    assert {family.name for family in registry.collect()} == {PREFIX + name for name in [*COUNTERS, *LABELLED]}


def test_counted_events_change_with_every_count_but_the_time_alone() -> None:
    counts = SchedulerCounts()
    seen = {counted_events(counts, {}, {})}
    counts.seconds += 1.0
    assert counted_events(counts, {}, {}) in seen
    names = [one.name for one in fields(counts) if one.name not in ("seconds", "misses", "uncoded")]
    for name in names:
        setattr(counts, name, getattr(counts, name) + 1)
        seen.add(counted_events(counts, {}, {}))
    counts.uncoded["no_verdict"] += 1
    seen.add(counted_events(counts, {}, {}))
    counts.misses["deadline"] += 1
    seen |= {counted_events(counts, {}, {}), counted_events(counts, {"pooling": 1}, {})}
    seen.add(counted_events(counts, {"pooling": 1}, {"asking the node": 1}))
    assert len(seen) == len(names) + 5
