"""A node under the restrictions of its systemd unit does all that a node does."""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, data_of, free_port, wait_until

UNIT = Path(__file__).parents[1] / "conf" / "tierkv.service"
CONFINED = (sys.executable, "-m", "e2e.confined", str(UNIT))

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None,
        reason="systemd-analyze and libseccomp, which turn a unit into restrictions, are not installed",
    ),
]


def run_confined(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CONFINED, sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.chroot('/')",
        "import os; os.setuid(12345)",
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
    ],
)
def test_the_restrictions_are_real(code: str) -> None:
    done = run_confined(code)
    assert done.returncode == 1
    assert "PermissionError" in done.stderr


def test_a_node_serves_writes_recovers_replaces_its_processes_and_stops(tmp_path: Path) -> None:
    port = free_port()
    with Node(tmp_path, metrics_port=str(port)) as node:
        node.start(wrapper=CONFINED)
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, 8)
            assert engine.load(1, 8).right == 8
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert b"tierkv_ready 1.0" in answer.read()
            node.kill("storage")
            node.wait_ready()
            engine.store_flushed(2, 8)
        node.kill("front")
        node.wait_ready()
        with StampedEngine(node.endpoint) as engine:
            wait_until(lambda: engine.load(1, 8).right == 8, "what is on disk is found by the new front")
        ended = node.stop()
        assert ended.exit_code == 0, ended.output
        assert list((data_of(node) / "starts").iterdir())
        node.start(wrapper=CONFINED)
        with StampedEngine(node.endpoint) as engine:
            assert engine.load(2, 8).right == 8
        assert node.stop().exit_code == 0
