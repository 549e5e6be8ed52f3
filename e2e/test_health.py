"""Health that does not lie: what is dead, hung or taken away is named within seconds, and mends itself where it can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.harness import Node, StampedEngine, free_port, wait_until

pytestmark = pytest.mark.timeout(180)


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body); status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def wait_health(port: int, path: str, is_it: Callable[[int, dict[str, Any]], bool], what: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        status, body = ask(port, path)
        return {"status": status, **body} if is_it(status, body) else None

    return wait_until(look, what)


def test_a_hung_front_is_replaced_and_engines_go_on(tmp_path: Path) -> None:
    with Node(tmp_path, hang_seconds="3") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            front = node.pid("front")
            os.kill(front, signal.SIGSTOP)
            wait_until(lambda: not psutil.pid_exists(front), "the hung front is gone")
            node.wait_status(lambda status: status.state == "ready", "it is ready again")
            wait_until(lambda: engine.match(1, 8) == 8, "what was flushed is found again")
            loaded = engine.load(1, 8)
            assert (loaded.valid, loaded.right) == (8, 8)
        assert "has given no sign of life" in node.log()
        assert node.stop().exit_code == 0


def test_a_hung_storage_worker_is_named_and_then_replaced(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, hang_seconds="8", metrics_port=str(port)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            worker = node.pid("storage")
            os.kill(worker, signal.SIGSTOP)
            body = wait_health(port, "/healthz", lambda status, _: status == 503, "health says that it is silent")
            assert body["processes"]["storage"] == "silent"
            assert any("storage worker" in problem for problem in body["problems"])
            assert ask(port, "/livez")[0] == 200  # it mends itself: nobody is to restart the node for it
            wait_until(lambda: not psutil.pid_exists(worker), "the hung worker is gone")
            wait_health(port, "/healthz", lambda status, _: status == 200, "health is well again")
            engine.store_flushed(2, 8)
            assert engine.load(1, 8).right == 8


def test_who_was_stopped_together_with_the_supervisor_is_not_killed_for_it(tmp_path: Path) -> None:
    """As a suspended machine: everybody stands still for longer than the deadline."""
    with Node(tmp_path, hang_seconds="3") as node:
        node.start()
        pids = {name: node.pid(name) for name in ("supervisor", "front", "storage")}
        for name in ("supervisor", "front", "storage"):
            os.kill(pids[name], signal.SIGSTOP)
        time.sleep(5.0)  # the length of the suspension, not a wait for something
        for name in ("storage", "front", "supervisor"):
            os.kill(pids[name], signal.SIGCONT)
        node.wait_status(lambda status: status.state == "ready", "it goes on")
        assert {name: node.pid(name) for name in pids} == pids
        assert "sign of life" not in node.log()


def test_a_supervisor_that_is_silent_is_named_and_the_node_does_not_count_as_live(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, hang_seconds="4", metrics_port=str(port)) as node:
        node.start()
        assert ask(port, "/livez")[0] == 200
        with node.paused("supervisor"):
            body = wait_health(port, "/livez", lambda status, _: status == 503, "the silence shows")
            assert any("supervisor" in problem for problem in body["problems"])
        wait_health(port, "/healthz", lambda status, _: status == 200, "it is well again")


@pytest.mark.scenario("B129", then="emptied in place it is made anew with its lock; lookups miss, stores go on")
def test_a_data_directory_that_was_emptied_is_made_anew_and_the_node_goes_on(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, metrics_port=str(port)) as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            for path in node.data_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            wait_until(lambda: "taken anew" in node.log(), "it is taken anew")
            wait_until(lambda: engine.store(2, 8) == 8, "stores go on")
            engine.store_flushed(3, 8)
            assert engine.match(1, 8) == 0  # gone with its file
            status = node.wait_status(lambda status: status.state == "ready", "it is ready")
            nvme = next(tier for tier in status.tiers if tier.tier == "nvme")
            assert (nvme.state, nvme.reason) == ("ok", "")
            assert engine.load(3, 8).right == 8
        assert (node.data_dir / "LOCK").exists()
        other = node.spawn(log=tmp_path / "other.log")  # the directory is held, by its new lock
        assert other.wait(60) == 3
        other.communicate()
        assert node.stop().exit_code == 0


@pytest.mark.scenario("B129", then="removed, the tier is off as data_dir_gone and not for want of space")
def test_a_data_directory_that_was_removed_is_waited_for_under_its_own_reason(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            shutil.rmtree(node.data_dir)
            gone = node.wait_status(lambda status: status.state == "degraded", "the loss shows")
            (problem,) = [problem for problem in gone.problems if "data_dir_gone" in problem]
            assert "was removed" in problem
            assert gone.tiers[1].reason == "data_dir_gone"  # and not one of room
            assert engine.store(2, 8) == 8  # memory goes on
            assert engine.load(2, 8).right == 8
            assert engine.load(1, 8).is_wrong is False
            assert not node.data_dir.exists()  # what was moved away may come back, and finds its place free
            node.data_dir.mkdir(mode=0o700)
            node.wait_status(lambda status: status.state == "ready", "it has taken the new one")
            engine.store_flushed(4, 8)
            assert engine.match(1, 8) == 0


def test_a_data_directory_that_was_moved_away_and_comes_back_has_lost_nothing(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            node.data_dir.rename(tmp_path / "elsewhere")
            node.wait_status(lambda status: status.state == "degraded", "the loss shows")
            incarnation = node.wait_status(lambda _: True, "it answers").incarnation
            (tmp_path / "elsewhere").rename(node.data_dir)
            back = node.wait_status(lambda status: status.state == "ready", "it is back")
            assert back.incarnation == incarnation  # nothing had to begin anew
            assert engine.load(1, 8).right == 8
            engine.store_flushed(2, 8)


def test_health_pages_say_what_they_mean(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, metrics_port=str(port)) as node:
        node.start()
        for path in ("/livez", "/readyz", "/healthz"):
            status, body = ask(port, path)
            assert status == 200
            assert body["state"] == "ready"
            assert body["problems"] == []
            assert body["processes"] == {"supervisor": "running", "front": "running", "storage": "running"}
            assert body["tiers"]["nvme"] == {"state": "ok", "reason": "", "errors": 0, "last_error": ""}
