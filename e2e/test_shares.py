"""Shares of real nodes: one tenant floods, and the other one keeps what is its."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine
from e2e.test_cli import tierkv
from tierkv.torture.stamped import BLOCK_BYTES

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL
MINE = range(1, 5)


def test_a_tenant_keeps_its_share_of_both_tiers_while_another_one_floods_them(tmp_path: Path) -> None:
    options = {"host_bytes": "2MiB", "nvme_bytes": "4MiB", "nvme_reserve_bytes": "0"}
    with Node(tmp_path, shares="tenant:acme=40%", **options) as node:
        node.start()
        with StampedEngine(node.endpoint, salt="acme") as mine, StampedEngine(node.endpoint, salt="other") as other:
            for prompt in MINE:
                mine.store_flushed(prompt, BLOCKS)
            for prompt in range(100, 180):
                other.store(prompt, BLOCKS)
                other.seal(prompt, BLOCKS)
            loaded = [mine.load(prompt, BLOCKS) for prompt in MINE]
            assert [(one.right, one.nvme_blocks) for one in loaded] == [(BLOCKS, 0)] * len(MINE)
            done = tierkv("du", "--json", "--endpoint", str(node.endpoint))
            assert done.returncode == 0, done.stderr
            rows = {(row["name"], row["tier"]): row for row in json.loads(done.stdout)["shares"]}
            acme = rows["tenant:acme", "host"]
            assert acme["used_bytes"] == len(MINE) * BLOCKS * BLOCK_BYTES
            assert acme["own_bytes"] == int(0.4 * 2 * 2**20)
            assert rows["rest", "nvme"]["used_bytes"] > rows["rest", "nvme"]["own_bytes"] - 2**19, (
                "the others have theirs"
            )
        node.kill("supervisor")
        node.start()
        with StampedEngine(node.endpoint, salt="acme") as mine, StampedEngine(node.endpoint, salt="other") as other:
            for prompt in range(200, 260):
                other.store(prompt, BLOCKS)
                other.seal(prompt, BLOCKS)
            assert [mine.load(prompt, BLOCKS).right for prompt in MINE] == [BLOCKS] * len(MINE)
