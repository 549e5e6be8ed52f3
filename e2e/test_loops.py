"""Each loop of each process meets an exception that nobody foresaw, one at a time: it runs again."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.dying_loops import VARIABLE
from e2e.harness import Node, StampedEngine, free_port, wait_until
from tierkv.client import connect_operator
from tierkv.core.loops import LOOPS

pytestmark = pytest.mark.timeout(300)

ELSEWHERE = {
    ("supervisor", "MainThread"): (
        "tests/node/test_supervisor.py",
        "test_an_exception_in_the_supervisors_loop_ends_the_node_with_all_its_processes",
    ),
    ("gateway", "MainThread"): (
        "tests/node/test_gateway_process.py",
        "test_it_is_heard_restarted_after_a_kill_and_ends_when_told",
    ),
    ("recorder", "MainThread"): (
        "tests/node/test_recording.py",
        "test_a_recorder_that_is_killed_is_followed_by_another_and_what_was_sent_meanwhile_is_not_lost",
    ),
    ("storage", "audit"): (
        "tests/workers/test_bookkeeper.py",
        "test_an_exception_while_something_is_counted_ends_the_worker",
    ),
    ("disk", "recovery"): (
        "tests/workers/test_disk.py",
        "test_an_exception_while_the_directory_is_recovered_ends_the_worker",
    ),
    ("device", "copies"): (
        "tests/workers/device/test_worker.py",
        "test_an_exception_in_a_thread_ends_the_worker",
    ),
    ("device", "device-pulse"): (
        "tests/workers/device/test_worker.py",
        "test_an_exception_in_a_thread_ends_the_worker",
    ),
    ("device", "pinning"): (
        "tests/workers/device/test_worker.py",
        "test_an_exception_in_a_thread_ends_the_worker",
    ),
}
"""Loops that are tried by another test, because it takes no whole node, or another one."""

HERE = [(loop.process, loop.thread) for loop in LOOPS if (loop.process, loop.thread) not in ELSEWHERE]


class Broken:
    """A node whose loops can be broken, and an engine that keeps all of them awake (a new one for each test)."""

    engine: StampedEngine

    def __init__(self, node: Node, order: Path, port: int) -> None:
        self.node, self.order, self.port = node, order, port
        self.number = 0
        self.prompt = 0

    def break_loop(self, process: str, thread: str) -> None:
        self.number += 1
        self.order.write_text(f"{process} {thread} {self.number}")

    def use(self) -> bool:
        """A store that is flushed, whatever happens meanwhile."""
        self.prompt += 1
        self.engine.store(self.prompt, 2)
        return self.engine.seal(self.prompt, 2, deadline_seconds=5.0).flushed_blocks == 2

    def scrub(self) -> None:
        with connect_operator(self.node.endpoint) as operator:
            for _ in operator.verify():
                return

    def purge(self) -> None:
        with connect_operator(self.node.endpoint) as operator:
            operator.purge(tenant="nobody")

    def scrape(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            return b"tierkv_ready" in page.read()


@pytest.fixture(scope="module")
def broken_node(
    tmp_path_factory: pytest.TempPathFactory, runtime_dir: Path, own_surroundings: None
) -> Iterator[Broken]:
    folder = tmp_path_factory.mktemp("loops")
    port = free_port()
    parts = ("worker=e2e.dying_loops", "front=e2e.dying_loops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder / "order"))
        with Node(folder, replaced=parts, metrics_port=str(port)) as node:
            node.start()
            yield Broken(node, folder / "order", port)


@pytest.fixture
def broken(broken_node: Broken) -> Iterator[Broken]:
    with StampedEngine(broken_node.node.endpoint) as broken_node.engine:
        yield broken_node


@pytest.mark.scenario("B153", then="the loop runs again, in a new process where its own has ended; the queue drains")
@pytest.mark.parametrize(("process", "thread"), HERE)
def test_a_loop_that_meets_an_exception_runs_again(broken: Broken, process: str, thread: str) -> None:
    node = broken.node
    node.wait_status(lambda status: status.state == "ready", "it is well before")
    wait_until(broken.use, "a store is flushed before")
    pid, seen = node.pid(process), len(node.log())
    broken.break_loop(process, thread)

    def is_over() -> bool:
        broken.use()
        if thread == "scrub":
            broken.scrub()
        if thread == "purge":
            broken.purge()
        if thread == "metrics":
            return "thread metrics; it is started again" in node.log()[seen:]
        return node.status() is not None and node.pid(process) != pid

    wait_until(is_over, f"{thread} of {process} has ended and been replaced")
    node.wait_status(lambda status: status.state == "ready", "it is well again")
    wait_until(broken.use, "the queue drains")
    assert broken.scrape()
    if thread not in ("MainThread", "metrics"):
        assert re.search(rf"thread {thread}(-[0-9]+)? died", node.log()[seen:])


def test_every_loop_has_its_test() -> None:
    for file, name in ELSEWHERE.values():
        assert name in (Path(__file__).parents[1] / file).read_text()
    assert {(loop.process, loop.thread) for loop in LOOPS} == {*HERE, *ELSEWHERE}
