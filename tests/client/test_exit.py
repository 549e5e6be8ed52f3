"""A program that uses a client ends when it wants to, whatever it left open and whether a node is there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.fake_node import FakeNode

PROGRAM = """
import os, signal, sys, threading
from tests.client.conftest import TOKENS, make_identity
from tierkv.client import connect

client = connect(sys.argv[1], timeout_seconds=0.2)
group = client.open(make_identity())
group.match(TOKENS)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(1_000):
    group.match(TOKENS)
"""

ENDINGS = {
    "returns": ("", 0),
    "closes": ("client.close()", 0),
    "raises": ("raise SystemExit(7)", 7),
    "fails": ("1 / 0", 1),
    "interrupted": ("os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(60)", -signal.SIGINT),
}


@pytest.mark.scenario(
    "B161",
    then="a thousand calls to a dead node and a client left open keep no program from ending, with its own exit code",
)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("node_state", ["there", "gone"])
def test_a_program_ends_promptly_with_its_own_exit_code(node: FakeNode, ending: str, node_state: str) -> None:
    code, expected = ENDINGS[ending]
    program = subprocess.Popen(
        [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM + code, str(node.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    if node_state == "gone":
        node.go()
    _out, err = program.communicate("go\n", timeout=50)  # a thousand times its timeout would be minutes
    assert program.returncode == expected, err
    assert "Traceback" not in err or ending in ("fails", "interrupted")
    assert "ResourceWarning" not in err or ending != "closes"
