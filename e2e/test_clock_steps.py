"""The wall clock is set back and forth by days under a running node, and all of its processes sleep for an hour."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import harness
from e2e.harness import Node, StampedEngine, wait_until
from tests.faults.clock import DAY, Skew

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL
GROWING = 4


@pytest.fixture
def skew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Skew]:
    skew = Skew(tmp_path / "skew")
    real_environment = harness.environment
    monkeypatch.setattr("tierkv.torture.node.environment", lambda: skew.environment(real_environment()))
    yield skew
    skew.close()


def lives_on(node: Node, engine: StampedEngine, prompt: int) -> None:
    """Every timer has its turn: what grows is sealed and flushed without being asked for, the worker gives signs of
    life, the node is well, and what is loaded is right."""
    assert engine.store(prompt, GROWING) == GROWING
    dirty = node.wait_status(lambda told: told.dirty_extents == 0, f"prompt {prompt} is sealed when idle and written")
    assert (dirty.state, dirty.problems) == ("ready", ())
    assert dirty.uptime_seconds >= 0
    assert dirty.workers[2].last_heard_seconds < 10
    assert engine.load(prompt, GROWING).right == GROWING
    assert engine.load(1, BLOCKS).right == BLOCKS


@pytest.mark.scenario(
    "B248", then="however the wall clock is stepped, every timer has its turn and nothing is thrown away"
)
def test_a_wall_clock_that_is_set_back_and_forth_does_not_matter(tmp_path: Path, skew: Skew) -> None:
    with Node(tmp_path, touch_seconds="1") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            before = {name: node.cpu_seconds(name) for name in ("supervisor", "front", "storage")}
            began = time.monotonic()
            for number, seconds in enumerate((-DAY, 3 * DAY, -400 * DAY, 4_000 * DAY, -3_602 * DAY - 3_600), start=2):
                skew.step(seconds)
                lives_on(node, engine, number)
                # While front and worker wait for their next turn.
                skew.step(-DAY)
                node.wait_status(lambda told: told.workers[2].last_heard_seconds < 2, "it is heard again")
            told = node.status()
            assert told is not None
            assert told.uptime_seconds < time.monotonic() - began + 60, "of the time that passed, not of the steps"
            assert [worker.restarts for worker in told.workers] == [0, 0, 0]
            took = time.monotonic() - began
            for name, seconds in before.items():
                assert node.cpu_seconds(name) - seconds < 0.5 * took + 1, f"{name} spins"
        assert node.stop().exit_code == 0
        assert "Traceback" not in node.log()
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert all(engine.load(prompt, GROWING).right == GROWING for prompt in range(2, 7))


@pytest.mark.scenario(
    "B248", then="after an hour in which all processes slept each timer runs once, and nothing is given up"
)
def test_an_hour_of_sleep_is_caught_up_with_once(tmp_path: Path, skew: Skew) -> None:
    with Node(tmp_path, touch_seconds="1") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            with engine.group.acquire(keys=engine.keys(1, BLOCKS)) as lease:
                before = node.status()
                assert before is not None
                for _ in range(3):
                    skew.jump(3_600.0)
                    node.wait_status(lambda told: told.workers[2].last_heard_seconds < 2, "the worker is heard again")
                    after = node.status()
                    assert after is not None
                    assert (after.incarnation, after.leases) == (before.incarnation, 1), "no living process is given up"
                    assert lease.count_valid() == BLOCKS
            lives_on(node, engine, 2)
            after = node.status()
            assert after is not None
            assert [worker.restarts for worker in after.workers] == [0, 0, 0]
        assert node.stop().exit_code == 0
        assert "Traceback" not in node.log()


@pytest.mark.scenario(
    "B247",
    then="after a restart what was written in the future counts as used now, and what is used after that stays longer",
)
def test_what_comes_from_the_future_is_no_dearer_than_what_was_just_used(tmp_path: Path, skew: Skew) -> None:
    with Node(tmp_path, nvme_bytes="4MiB", nvme_reserve_bytes="0", host_bytes="2MiB") as node:
        skew.step(4 * 365 * DAY)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(1, 13):
                engine.store_flushed(prompt, BLOCKS)
            future = [prompt for prompt in range(1, 13) if engine.match(prompt, BLOCKS) == BLOCKS]
        assert node.stop().exit_code == 0
        skew.step(-4 * 365 * DAY)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert [prompt for prompt in future if engine.match(prompt, BLOCKS) == BLOCKS] == future
            now = time.time()
            rows = engine.client.usage().rows
            assert all(row.last_used <= now + 60 for row in rows), "no use lies in the future"
            for prompt in range(100, 125):
                engine.store_flushed(prompt, BLOCKS)
                assert engine.load(100, BLOCKS).right == BLOCKS, "what is used again and again stays"
            wait_until(lambda: sum(engine.match(prompt, BLOCKS) for prompt in future) < len(future) * BLOCKS, "some go")
            assert engine.load(100, BLOCKS).right == BLOCKS
