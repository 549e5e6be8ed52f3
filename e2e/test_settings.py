"""What settings do to a running node, where nothing smaller than a node shows it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, files_below, wait_until

pytestmark = pytest.mark.timeout(180)

BLOCKS = 10


def extents(node: Node) -> int:
    assert node.data_dir is not None
    return len(files_below(node.data_dir / "models", ".kv"))


@pytest.mark.scenario("B238", then="sockets, slabs, extents, sealing and the log are what each setting says")
def test_sizes_names_and_levels_do_what_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual, unusual = tmp_path / "usual", tmp_path / "unusual"
    for folder in (usual, unusual):
        folder.mkdir()
    with (
        Node(usual, seal_after_seconds="600") as one,
        Node(unusual, extent_bytes="64KiB", slab_bytes="64KiB", seal_after_seconds="0.1", log_level="warning") as other,
    ):
        for node in (one, other):
            node.start()
            assert sorted(path.parent for path in node.sockets()) == [node.endpoint] * 2
            with StampedEngine(node.endpoint) as engine:
                assert engine.store(1, BLOCKS) == BLOCKS
        wait_until(lambda: extents(other) == 3, "four, four and two blocks are sealed and written by themselves")
        wait_until(lambda: extents(one) == 1, "a full extent of eight blocks is written; the other two blocks wait")
        assert " INFO " in one.log()
        assert " INFO " not in other.log()
        with StampedEngine(one.endpoint, block_bytes=2**17) as engine:
            assert engine.store(2, 2) == 2
        caplog.set_level(logging.WARNING, "tierkv.client")
        with StampedEngine(other.endpoint, block_bytes=2**17) as engine:
            assert engine.store(2, 2) == 0
        assert "raise slab_bytes" in caplog.text
