"""Each errno at each system call of a real node's storage worker, once and for a while, under stores and loads.

In every cell: the processes live, nothing is wrong, what fails is counted by call and errno, what was flushed before is
right, and when the fault has ended stores are flushed again without anybody's doing.
"""

from __future__ import annotations

import errno
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, free_port, wait_until
from e2e.sick_disk import ALWAYS, VARIABLE, SickDisk
from tests.faults.system_calls import ALL_ERRNOS

pytestmark = pytest.mark.timeout(300)

OPERATIONS = {
    "open": "open",
    "pwritev": "pwritev",
    "preadv": "preadv",
    "fdatasync": "fdatasync",
    "fsync": "fsync",
    "rename": "rename",
    "unlink": "unlink",
    "fstatvfs": "statvfs",
    "mkdir": "mkdir",
    "scandir": "listdir",
    "write": "write",
}
"""Function of `os` -> the name that it is counted by."""

TURNS = 24
BLOCKS = 2
PREFILLED = 80  # prompts of 32 KiB: more than fits in memory, so that some are on disk only


class Cells:
    """A node with a sick disk, an engine, and what is known to be on disk."""

    def __init__(self, node: Node, engine: StampedEngine, disk: SickDisk, port: int) -> None:
        self.node, self.engine, self.disk, self.port = node, engine, disk, port
        self.flushed: list[int] = []
        self.next_prompt = 1
        self.turn = 0
        for _ in range(PREFILLED):
            self.store_flushed()
        self.pids = {name: node.pid(name) for name in ("supervisor", "front", "storage")}

    def new_prompt(self) -> int:
        self.next_prompt += 1
        return self.next_prompt

    def store_flushed(self) -> None:
        """As an engine would: not flushed now, it is asked for again."""
        prompt = self.new_prompt()

        def is_flushed() -> bool:
            self.engine.store(prompt, BLOCKS)
            return self.engine.seal(prompt, BLOCKS).flushed_blocks == BLOCKS

        wait_until(is_flushed, "a store is flushed")
        self.flushed.append(prompt)

    def work(self) -> None:
        """Stores and loads in turns. No load is ever wrong, whatever it brings."""
        for _ in range(TURNS // 2):
            self.turn += 1
            prompt = self.new_prompt()
            self.engine.store(prompt, BLOCKS)
            if self.turn % 3 == 0:
                self.engine.seal(prompt, BLOCKS)
            loaded = self.engine.load(self.flushed[self.turn * 7 % len(self.flushed)], BLOCKS)
            assert not loaded.is_wrong

    def counted(self) -> dict[tuple[str, str], float]:
        """Failures by (call, errno), from the metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            text = page.read().decode()
        pattern = r'tierkv_io_errors_total\{errno="(\w+)",operation="(\w+)"\} ([0-9.e+]+)'
        return {(operation, name): float(value) for name, operation, value in re.findall(pattern, text)}

    def check(self, operation: str, number: int, times: int) -> int:
        """One cell; how many calls failed."""
        name = errno.errorcode[number]
        cell = f"{name} of {operation}, {'once' if times == 1 else 'always'}"
        before = self.counted().get((OPERATIONS[operation], name), 0.0)
        self.disk.fail(operation, number, times=times)
        self.work()
        failed = self.disk.failed
        is_said = failed and number != errno.ENOENT and not (number == errno.EINTR and times == 1)
        if is_said:
            self.node.wait_status(
                lambda _: self.counted().get((OPERATIONS[operation], name), 0.0) > before, f"{cell}: it is counted"
            )
        self.disk.heal()
        self.node.wait_status(lambda status: status.state == "ready", f"{cell}: it is well again")
        self.store_flushed()
        assert {who: self.node.pid(who) for who in self.pids} == self.pids, f"{cell}: a process was replaced"
        self.look_at_all(cell, may_be_lost=number == errno.ENOENT)
        return failed

    def look_at_all(self, cell: str, *, may_be_lost: bool) -> None:
        """A tenth of what was flushed before, each time another; all of it where some may be lost."""
        for prompt in list(self.flushed if may_be_lost else self.flushed[self.turn % 10 :: 10]):
            loaded = self.engine.load(prompt, BLOCKS)
            assert not loaded.is_wrong, cell
            if loaded.right < BLOCKS:
                assert may_be_lost, f"{cell}: prompt {prompt} was lost: {loaded}"
                self.flushed.remove(prompt)


@pytest.fixture
def sick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SickDisk]:
    disk = SickDisk(tmp_path / "sick")
    monkeypatch.setenv(VARIABLE, str(disk.path))
    yield disk
    disk.close()


@pytest.mark.scenario(
    "B127",
    then="processes live, EINTR is repeated, each error is counted by call and errno, loads are right, stores go on",
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_error_of_a_call_is_survived(operation: str, tmp_path: Path, sick: SickDisk) -> None:
    port = free_port()
    options = {"host_bytes": "2MiB", "slab_bytes": "512KiB", "extent_bytes": "64KiB", "metrics_port": str(port)}
    with Node(tmp_path, replaced=("worker=e2e.sick_disk",), **options) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            cells = Cells(node, engine, sick, port)
            failed = [cells.check(operation, number, times) for number in ALL_ERRNOS for times in (1, ALWAYS)]
            if operation not in ("unlink", "mkdir"):  # of which a worker that works has few
                assert sum(failed) > len(failed)
        assert node.stop().exit_code == 0
