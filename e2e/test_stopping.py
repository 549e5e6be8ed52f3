"""What is on disk after a stop whose budget suffices, and after one whose budget does not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from e2e.harness import Node, wait_until
from tierkv.torture.stamped import BLOCK_BYTES, StampedEngine

pytestmark = pytest.mark.timeout(180)

CHAIN = 111
"""Blocks of one prompt, each an extent of its own, of which at most eight are being written at a time."""


@pytest.mark.scenario(
    "B117",
    then="a drain whose budget suffices writes all 111 blocks of a chain and exits 0; one that is cut short ends within"
    " its budget and the worker's two seconds, exits 4, its last line accounts for all 111, and what is on disk is a"
    " prefix of the chain",
)
@pytest.mark.parametrize(("budget", "write_seconds", "exit_code"), [(60, 0.01, 0), (1, 0.2, 4)])
def test_a_drain_accounts_for_all_that_was_dirty_and_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, write_seconds: float, exit_code: int
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("SLOW_DISK_GO", str(go))
    monkeypatch.setenv("SLOW_DISK_SECONDS", str(write_seconds))
    options = {"extent_bytes": str(BLOCK_BYTES), "inflight_writes": "8", "drain_seconds": str(budget)}
    with Node(tmp_path, replaced=("files=e2e.slow_disk:SlowDisk",), **options) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert engine.store(1, CHAIN) == CHAIN
            node.signal("supervisor", signal.SIGTERM)
            wait_until(lambda: engine.client.status().state == "stopping", "it is stopping")
            go.touch()
        ended = node.wait_ended()
        assert ended.exit_code == exit_code, ended.output
        assert ended.extents is not None
        flushed, dropped = ended.extents
        assert flushed + dropped == CHAIN
        assert (dropped == 0) == (exit_code == 0)
        assert ended.flushed is not None
        assert ended.dropped == dropped * BLOCK_BYTES
        assert ended.seconds < budget + 20
        written = sum(1 for _ in (tmp_path / "data").glob("models/*/*/*/*/*.kv"))
        assert flushed <= written < CHAIN + (exit_code == 0)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            loaded = engine.load(1, CHAIN)
        assert not loaded.is_wrong
        assert loaded.right == written, "what is on disk has a hole"
