"""What is exported is what was counted, and the table is the only place that knows."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tierkv.core.counters import Counters
from tierkv.core.instructions import JournalHealth
from tierkv.core.pins import PinnedTier
from tierkv.core.usage import PrefillUse, TierBytes, Wear
from tierkv.errors import ConfigError
from tierkv.metrics import LATENCY_BOUNDS, Latency, Snapshot, copy_counters
from tierkv.metrics.endpoint import MetricsEndpoint, registry
from tierkv.metrics.table import METRICS, PREFIX, page

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


def samples(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples as a scraper reads them, by name and labels."""
    return parsed(generate_latest(registry(lambda: snapshot)).decode())


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.scenario("B240", then="what is exported of 100 scripted requests: 16,000 asked, 8,800 hit, by tier")
def test_tokens_asked_for_are_those_hit_by_tier_and_those_missed():
    # 100 requests of 160 tokens: 40 hit whole in host memory, 30 hit 80 tokens on NVMe, 30 nothing
    counts = Counters(asked_tokens=16_000, hit_tokens=Counter(host=6_400, nvme=2_400))
    seen = samples(Snapshot(version="1", core=counts))
    assert seen["tierkv_asked_tokens_total", ()] == 16_000
    assert seen["tierkv_hit_tokens_total", (("tier", "host"),)] == 6_400
    assert seen["tierkv_hit_tokens_total", (("tier", "nvme"),)] == 2_400
    assert seen["tierkv_missed_tokens_total", ()] == 7_200


def test_both_tiers_have_a_hit_counter_before_the_first_hit():
    seen = samples(Snapshot(version="1"))
    assert seen["tierkv_hit_tokens_total", (("tier", "host"),)] == 0
    assert seen["tierkv_hit_tokens_total", (("tier", "nvme"),)] == 0


def test_labels_come_from_what_was_counted():
    tier = TierBytes(tier="nvme", capacity_bytes=100, used_bytes=60, reserved_bytes=5, overhead_bytes=7)
    seen = samples(
        Snapshot(
            version="1.2",
            tiers=(tier,),
            core=Counters(evicted_bytes=Counter({("host", "no_room"): 42}), dropped_writes=Counter({"disk_full": 2})),
            io_errors={("write", "ENOSPC"): 3},
            queues={"nvme_write": 9},
        )
    )
    assert seen["tierkv_build_info", (("version", "1.2"),)] == 1
    assert seen["tierkv_capacity_bytes", (("tier", "nvme"),)] == 100
    assert seen["tierkv_overhead_bytes", (("tier", "nvme"),)] == 7
    assert seen["tierkv_evicted_bytes_total", (("reason", "no_room"), ("tier", "host"))] == 42
    assert seen["tierkv_io_errors_total", (("errno", "ENOSPC"), ("operation", "write"))] == 3
    assert seen["tierkv_dropped_writes_total", (("reason", "disk_full"),)] == 2
    assert seen["tierkv_queue_depth", (("queue", "nvme_write"),)] == 9


def test_a_model_s_prefill_rate_is_the_one_that_is_known_best():
    def use(layout: str, rate: float, samples: int) -> PrefillUse:
        return PrefillUse(
            fingerprint="ab" * 32,
            model_name="llama",
            dtype="bf16",
            layout=layout,
            tokens_per_second=rate,
            samples=samples,
        )

    seen = samples(Snapshot(version="1", prefill=(use("cuda", 9_000.0, 64), use("cpu", 12_000.0, 0))))
    labels = (("fingerprint", "abababababab"), ("model", "llama"))
    assert seen["tierkv_prefill_tokens_per_second", labels] == 9_000.0
    assert seen["tierkv_prefill_samples", labels] == 64


def test_pins_are_shown_with_what_they_hold_and_may_hold():
    pinned = (PinnedTier(tier="host", cap_bytes=30, held_bytes=10, booked_bytes=20),)
    seen = samples(Snapshot(version="1", pins=2, pinned=pinned))
    assert seen["tierkv_pins", ()] == 2
    assert seen["tierkv_pinned_bytes", (("tier", "host"),)] == 10
    assert seen["tierkv_pinned_cap_bytes", (("tier", "host"),)] == 30


def test_a_budget_of_writes_is_exported_where_there_is_one():
    wear = Wear(today_bytes=70, day_bytes=100, written_bytes=900, reused_tokens=5, waiting_extents=2)
    seen = samples(Snapshot(version="1", wear=wear))
    assert seen["tierkv_nvme_written_today_bytes", ()] == 70
    assert seen["tierkv_nvme_write_budget_bytes", ()] == 100
    assert seen["tierkv_nvme_waiting_extents", ()] == 2
    unlimited = samples(Snapshot(version="1", wear=replace(wear, day_bytes=0)))
    assert ("tierkv_nvme_write_budget_bytes", ()) not in unlimited
    assert ("tierkv_nvme_written_today_bytes", ()) not in samples(Snapshot(version="1"))


def test_a_histogram_counts_every_duration_once():
    latency = Latency()
    for seconds in (0.0001, 0.0002, 0.3, 99.0):
        latency.observe(seconds)
    seen = samples(Snapshot(version="1", latencies={"match": latency}))
    assert seen["tierkv_request_seconds_count", (("operation", "match"),)] == 4
    assert seen["tierkv_request_seconds_sum", (("operation", "match"),)] == pytest.approx(99.3003)
    assert seen["tierkv_request_seconds_bucket", (("le", "0.0001"), ("operation", "match"))] == 1
    assert seen["tierkv_request_seconds_bucket", (("le", "0.5"), ("operation", "match"))] == 3
    assert seen["tierkv_request_seconds_bucket", (("le", "+Inf"), ("operation", "match"))] == 4


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_a_bucket_holds_what_is_not_above_its_bound(durations):
    latency = Latency()
    for seconds in durations:
        latency.observe(seconds)
    below = 0
    for bound, count in zip(LATENCY_BOUNDS, latency.counts, strict=False):
        below += count
        assert below == sum(seconds <= bound for seconds in durations)
    assert sum(latency.counts) == len(durations)


def test_a_copied_latency_does_not_follow_the_original():
    latency = Latency()
    twin = latency.copy()
    latency.observe(1.0)
    assert sum(twin.counts) == 0
    assert twin.total_seconds == 0


def test_reading_twice_changes_nothing():
    snapshot = Snapshot(version="1", core=Counters(asked_tokens=5))
    assert samples(snapshot) == samples(snapshot)


def test_every_field_of_a_snapshot_is_exported_and_every_metric_reads_one():
    reads = {name for metric in METRICS for name in _names_read(metric.read)}
    assert {one.name for one in (*fields(Snapshot), *fields(Counters))} <= reads


def test_copied_counts_do_not_follow_the_originals():
    counters = Counters(asked_tokens=1, hit_tokens=Counter(host=1))
    twin = copy_counters(counters)
    counters.asked_tokens += 1
    counters.hit_tokens["host"] += 1
    assert twin == Counters(asked_tokens=1, hit_tokens=Counter(host=1))


def _names_read(function) -> set[str]:
    """Attribute names that a lambda and the ones it closes over refer to."""
    names = set(function.__code__.co_names)
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents):
            names |= _names_read(cell.cell_contents)
    return names


def test_names_follow_the_conventions_of_prometheus():
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_registry_is_our_own_and_holds_nothing_else():
    collected = {family.name for family in registry(lambda: Snapshot(version="1")).collect()}
    assert collected == {PREFIX + metric.name.removesuffix("_total") for metric in METRICS}


def test_a_port_in_use_is_an_error_that_names_the_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"metrics_port: can't listen on 127.0.0.1 port {port}") as caught:
            MetricsEndpoint("127.0.0.1", port, lambda: Snapshot(version="1"))
    assert caught.value.field == "metrics_port"


def test_the_endpoint_serves_what_read_gives_at_each_scrape_and_is_gone_after_close():
    asked = iter((5, 8))
    with MetricsEndpoint("127.0.0.1", 0, lambda: Snapshot(version="1", sessions=next(asked))) as endpoint:
        port = endpoint.port
        for expected in (5, 8):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert parsed(answer.read().decode())["tierkv_sessions", ()] == expected
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


def test_the_page_is_what_the_table_says():
    assert DOCS.read_text() == page()


def test_the_journal_is_shown_with_what_it_lacks():
    health = JournalHealth(num_bytes=4096, damaged=2, differences=1)
    core = Counters(regretted_seconds=1.5)
    seen = samples(Snapshot(version="1", journal=health, journal_dropped={"no_room": 5}, core=core))
    assert seen["tierkv_journal_bytes", ()] == 4096
    assert seen["tierkv_journal_damaged_rows", ()] == 2
    assert seen["tierkv_audit_differences", ()] == 1
    assert seen["tierkv_journal_dropped_rows_total", (("reason", "no_room"),)] == 5
    assert seen["tierkv_regretted_seconds_total", ()] == 1.5
