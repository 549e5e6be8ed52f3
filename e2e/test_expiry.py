"""Retention by real nodes, with clocks that are moved: what nobody uses for its time leaves memory and disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import harness
from e2e.harness import Node, StampedEngine, data_of, files_below, wait_until
from tests.faults.clock import DAY, Skew

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8
HOUR = 3_600.0


@pytest.fixture
def skew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Skew]:
    skew = Skew(tmp_path / "skew")
    real_environment = harness.environment
    monkeypatch.setattr("tierkv.torture.node.environment", lambda: skew.environment(real_environment()))
    yield skew
    skew.close()


def files(node: Node) -> int:
    return len(files_below(data_of(node) / "models", ".kv"))


def sleep_for(node: Node, skew: Skew, hours: int) -> None:
    """As a machine that was suspended, an hour at a time."""
    for _ in range(hours):
        skew.jump(HOUR)
        node.wait_status(lambda told: told.workers[2].last_heard_seconds < 2, "the worker is heard again")


def test_what_a_tenant_has_not_used_for_its_time_is_gone_from_every_tier_also_over_a_restart(
    tmp_path: Path, skew: Skew
) -> None:
    with Node(tmp_path, ttl="acme=2h, default=30d", touch_seconds="0.1") as node:
        node.start()
        with StampedEngine(node.endpoint, salt="acme") as mine, StampedEngine(node.endpoint, salt="other") as other:
            for engine in (mine, other):
                engine.store_flushed(1, BLOCKS)
                engine.store_flushed(2, BLOCKS)
            sleep_for(node, skew, 1)
            assert mine.load(1, BLOCKS).right == BLOCKS
            sleep_for(node, skew, 1)
            wait_until(lambda: mine.match(2, BLOCKS) == 0, "what was not used for two hours is gone")
            assert mine.load(1, BLOCKS).right == BLOCKS, "what was used an hour ago is not"
            wait_until(lambda: files(node) == 3, "its file is gone as well")
            assert other.load(1, BLOCKS).right == BLOCKS
        assert node.stop().exit_code == 0
        skew.jump(20 * DAY)
        node.start()
        with StampedEngine(node.endpoint, salt="acme") as mine, StampedEngine(node.endpoint, salt="other") as other:
            wait_until(lambda: mine.match(1, BLOCKS) == 0, "what was over while the node was down is gone")
            assert other.match(1, BLOCKS) == BLOCKS
        node.kill("supervisor")
        skew.jump(11 * DAY)
        node.start()
        wait_until(lambda: files(node) == 0, "the others' time is over too")
        told = node.status()
        assert told is not None
        assert told.counters["evicted_blocks.nvme.expired"] == 2 * BLOCKS
