"""A node's own record of its starts, over stops and kills, as `tierkv cliff` tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import EngineProcess, Node, StampedEngine, data_of, environment, wait_until

pytestmark = pytest.mark.timeout(180)


def cliff(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tierkv_cli.main", "cliff", "--json", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["starts"]


def of_node(node: Node) -> Any:
    return cliff("--endpoint", str(node.endpoint))


def test_each_start_is_on_record_with_how_the_life_before_it_ended(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        (first,) = of_node(node)
        assert (first["kind"], first["last_end"], first["is_ready"]) == ("node", "first", True)
        assert node.stop().exit_code == 0

        node.start()
        assert [one["last_end"] for one in of_node(node)] == ["first", "clean"]
        node.kill("front")
        node.wait_ready()
        last = of_node(node)[-1]
        assert (last["kind"], last["last_end"], last["problem"]) == ("front", "killed", "front killed by SIGKILL")

        node.kill("supervisor")
        node.start()
        found = of_node(node)
        assert [(one["kind"], one["last_end"]) for one in found] == [
            ("node", "first"),
            ("node", "clean"),
            ("front", "killed"),
            ("node", "killed"),
        ]
        assert node.stop().exit_code == 0
        offline = cliff("--data-dir", str(data_of(node)))
        assert [one["number"] for one in offline] == [one["number"] for one in found]


def test_a_record_has_what_was_asked_and_found_in_the_first_seconds(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
        assert node.stop().exit_code == 0
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert engine.load(1, 8).right == 8
            assert engine.load(2, 8).right == 0
        assert node.stop().exit_code == 0, "its end closes the window"
        last = cliff("--data-dir", str(data_of(node)))[-1]["first"]
        assert (last["asked_tokens"], last["hit_tokens"]) == (256, {"host": 0, "nvme": 128})
        assert last["hit_rate"] == 0.5
        assert last["acquires"] == 2
        assert 0 < last["missed_prefill_seconds"] < last["asked_prefill_seconds"]


def test_an_engine_that_was_killed_and_comes_back_is_a_start_of_its_own(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with EngineProcess(node.endpoint) as engine:
            engine.ask("store", prompt=1, blocks=8)
        wait_until(lambda: (status := node.status()) and status.sessions <= 1, "the node has seen its end")
        with EngineProcess(node.endpoint) as engine:
            engine.ask("load", prompt=1, blocks=8)
            own, other = of_node(node)
        assert (own["kind"], other["kind"]) == ("node", "engine")
        assert len(other["group"]) == 12


def test_a_node_without_a_data_directory_tells_of_this_life_only(tmp_path: Path) -> None:
    with Node(tmp_path, memory_only=True) as node:
        node.start()
        (only,) = of_node(node)
        assert (only["last_end"], only["is_ready"]) == ("first", True)
        assert node.stop().exit_code == 0
