"""`tierkv serve --record`: what a real engine asks of a real node is written down, outlives the front, is replayed, and
is gone after a purge."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, environment, wait_until
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.replay.trace import Verb
from tierkv.wire.messages import StatusReply, WorkerStatus

BLOCKS = 6


def tierkv(*arguments: str) -> Any:
    command = [sys.executable, "-m", "tierkv_cli.main", *arguments, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=120)
    return json.loads(done.stdout)


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["line"] for line in path.read_text().splitlines() if line] if path.exists() else []


@pytest.mark.parametrize("memory_only", [False, True])
def test_what_engines_ask_is_recorded_replayed_and_purged(tmp_path: Path, memory_only: bool) -> None:
    path = tmp_path / "requests.jsonl"
    with Node(tmp_path, memory_only=memory_only, record=str(path)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine, StampedEngine(node.endpoint, salt="somebody else") as other:
            engine.store(1, BLOCKS)
            assert engine.load(1, BLOCKS).blocks == BLOCKS
            other.store(2, BLOCKS)
            wait_until(lambda: kinds(path).count("stored") == 2, "both are written down")
            trace = read_trace(path, ReadOptions())
            assert len(trace.groups) == 2
            hits = [len(step.blocks) for step in trace.steps if step.verb is Verb.ASK]
            assert BLOCKS in hits
            assert tierkv("replay", str(path), "--capacity", "100%")["capacities"][0]["policies"][0]["hit_tokens"] > 0

            os.kill(node.pid("front"), signal.SIGKILL)
            wait_until(lambda: engine.store(3, BLOCKS) == BLOCKS, "a new front takes what is stored")
            wait_until(lambda: kinds(path).count("stored") >= 3, "and it is written down as well")

            receipt = tierkv("purge", "--tenant", "somebody else", "--yes", "--endpoint", str(node.endpoint))
            assert receipt["phase"] == "gone"
            assert len(read_trace(path, ReadOptions()).groups) == 1
        node.stop()


def test_a_recording_that_breaks_is_told_and_says_itself_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with Node(tmp_path, record=str(path)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store(1, BLOCKS)
            node.wait_status(lambda status: written(status) >= 1, "it is written down, and told")
            assert node.status().warnings == ()
            path.unlink()
            engine.store(2, BLOCKS)
            node.wait_status(lambda status: "not_found" in missing(status), "a file that was removed is missed")
            wait_until(lambda: engine.store(3, BLOCKS) == BLOCKS and path.exists(), "another one is begun")

            os.kill(node.pid("recorder"), signal.SIGKILL)
            node.wait_status(lambda status: recorder(status).problem == "killed by SIGKILL", "its death is told")
            status = node.wait_status(lambda status: recorder(status).state == "running", "another one writes")
            assert recorder(status).restarts == 1
            before = written(status)
            engine.store(4, BLOCKS)
            assert engine.load(4, BLOCKS).blocks == BLOCKS
            status = node.wait_status(lambda status: written(status) >= before + 2, "what comes is written down")
            assert status.state == "ready", "the cache is not concerned"
            assert any("are missing in the recording" in warning for warning in status.warnings)
        node.stop()
    trace = read_trace(path, ReadOptions())
    assert next(gap.reason for gap in trace.gaps) == "not_found"
    assert sum(gap.requests for gap in trace.gaps) == sum(missing(status).values())
    assert tierkv("replay", str(path), "--capacity", "100%")["trace"]["missing"]


def written(status: StatusReply) -> int:
    return status.recording.written_requests if status.recording is not None else 0


def missing(status: StatusReply) -> dict[str, int]:
    return status.recording.missing_requests if status.recording is not None else {}


def recorder(status: StatusReply) -> WorkerStatus:
    return next(worker for worker in status.workers if worker.name == "recorder")
