"""The command line, from the exec to the end of its process, beside an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from benchmarks.measure import Plan, Work, alternate, timed
from benchmarks.node import COMMAND, running_node
from benchmarks.report import Figure, of_seconds

QUESTION = "how long does one wait for a command?"

HELP_SECONDS = 0.3


def measure(plan: Plan) -> Iterator[Figure]:
    with running_node(name="cli", host_bytes=64 * 2**20) as node:
        commands = {
            "tierkv --help": [str(COMMAND), "--help"],
            "tierkv status": [str(COMMAND), "status", f"--endpoint={node.endpoint}"],
            "python -c pass": [sys.executable, "-c", "pass"],
        }
        seconds = alternate(
            plan.rounds(30, 5),
            {name: _runner(command) for name, command in commands.items()},
        )
    idle = seconds["python -c pass"]
    for name, most in (("tierkv --help", HELP_SECONDS), ("tierkv status", None)):
        yield of_seconds(name, seconds[name], unit="s", beside="python -c pass", limit=idle, most=most)


def _runner(command: list[str]) -> Work:
    return timed(lambda _number: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=30))
