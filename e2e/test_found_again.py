"""What was stored is found again: after any end of the node, from the tier below, whatever order conversations came in,
under load, and in the order in which it was used."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from e2e.harness import Node, StampedEngine, data_of, wait_until
from tierkv.torture.stamped import BLOCK_BYTES, BLOCK_TOKENS, stamps, tokens_of
from tierkv.wire.messages import TierUsage

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL


def files_of(node: Node) -> dict[str, str]:
    """Every extent file, and the digest of what is in it."""
    models = data_of(node) / "models"
    return {
        path.relative_to(models).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in models.rglob("*.kv")
    }


def nvme_of(engine: StampedEngine) -> TierUsage:
    return next(tier for tier in engine.client.usage().tiers if tier.tier == "nvme")


# ---- after each end of the node


def stop(node: Node) -> None:
    assert node.stop().exit_code == 0


def kill(node: Node) -> None:
    node.kill("supervisor")


def stop_and_lose_the_index(node: Node) -> None:
    stop(node)
    shutil.rmtree(data_of(node) / "index")


def kill_and_lose_the_index(node: Node) -> None:
    kill(node)
    shutil.rmtree(data_of(node) / "index")


ENDS: dict[str, Callable[[Node], None]] = {
    "stopped": stop,
    "killed": kill,
    "stopped, its index lost": stop_and_lose_the_index,
    "killed, its index lost": kill_and_lose_the_index,
}


@pytest.mark.scenario("B097", then="100 blocks are hits and du is as before, after SIGTERM, SIGKILL, without the index")
@pytest.mark.parametrize("how", ENDS)
def test_a_hundred_blocks_are_found_after_any_end(node: Node, how: str) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(5):
            engine.store_flushed(prompt, 20)
        before = nvme_of(engine).used_bytes
    ENDS[how](node)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        assert nvme_of(engine).used_bytes == before
        for prompt in range(5):
            loaded = engine.load(prompt, 20)
            assert (loaded.right, loaded.nvme_blocks) == (20, 20), loaded


@pytest.mark.scenario("B103", then="a hit in memory, on NVMe when memory gave it up, then in memory; the reply says so")
def test_what_memory_gave_up_is_found_on_disk_and_is_in_memory_again_once_loaded(tmp_path: Path) -> None:
    with Node(tmp_path, host_bytes="2MiB", slab_bytes="512KiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:

            def found() -> tuple[int, int]:
                match = engine.group.match(keys=engine.keys(1, BLOCKS))
                return match.blocks, match.host_blocks

            engine.store_flushed(1, BLOCKS)
            assert found() == (BLOCKS, BLOCKS)
            for prompt in range(2, 22):
                engine.store_flushed(prompt, BLOCKS)
            assert found() == (BLOCKS, 0)
            loaded = engine.load(1, BLOCKS)
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, BLOCKS)
            assert found() == (BLOCKS, BLOCKS)
            assert engine.load(1, BLOCKS).nvme_blocks == 0


@pytest.mark.scenario("B102", then="20 prompts are hits once memory is empty, and their bytes are read")
def test_what_is_written_is_read(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(20):
            engine.store_flushed(prompt, 4)
    stop(node)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        assert [engine.load(prompt, 4).right for prompt in range(20)] == [4] * 20
    status = node.status()
    assert status is not None
    assert status.counters["nvme_read_bytes"] == 20 * 4 * BLOCK_BYTES
    assert "none ever read" not in node.log()


@pytest.mark.scenario("B099", then="three starts that fail leave every file as it was, and a good one finds all")
def test_starts_that_fail_half_way_change_no_file(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(5):
                engine.store_flushed(prompt, BLOCKS)
        stop(node)
        before = files_of(node)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            in_use = str(listener.getsockname()[1])
            for wrong in ({"metrics_port": in_use}, {"host_bytes": "900TiB"}, {"front": "e2e.no_such_module"}):
                replaced = tuple(f"{name}={value}" for name, value in wrong.items() if name == "front")
                options = {name: value for name, value in wrong.items() if name != "front"}
                with Node(tmp_path, replaced=replaced, **options) as failing:
                    failing.start(wait_ready=False)
                    assert failing.wait_ended().exit_code != 0, wrong
                assert files_of(node) == before, wrong
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert [engine.load(prompt, BLOCKS).right for prompt in range(5)] == [BLOCKS] * 5
        assert files_of(node) == before


def store_tokens(engine: StampedEngine, tokens: np.ndarray) -> None:
    keys = bytes(engine.group.keys(tokens))
    with engine.group.reserve(tokens) as ticket:
        ticket.copy_from(stamps(keys)[: len(tokens) // BLOCK_TOKENS])
        assert not ticket.commit().reason


@pytest.mark.scenario("B100", then="64 tokens of each are hits from NVMe after a restart, in any order, of ten too")
@pytest.mark.parametrize("order", [(1, 2), (2, 1), tuple(range(10))])
def test_conversations_that_took_turns_are_all_found_after_a_stop(node: Node, order: tuple[int, ...]) -> None:
    """They grow a token at a time past a block's end, and none is sealed when the node is told to stop."""
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for length in (16, 40, 64, 70):
            for conversation in order:
                store_tokens(engine, tokens_of(conversation, 5)[:length])
    stop(node)
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for conversation in reversed(order):
            longer = tokens_of(conversation, 5)
            keys = bytes(engine.group.keys(longer))
            with engine.group.acquire(keys=keys) as lease:
                rows = np.zeros((lease.blocks, BLOCK_BYTES), np.uint8)
                assert lease.copy_into(rows) == 4
                assert lease.nvme_blocks == 4
                assert np.array_equal(rows, stamps(keys)[:4])


@pytest.mark.scenario("B104", then="missing folders are made, private ones, and the tier is in use")
def test_a_data_directory_that_does_not_exist_yet_is_made_with_its_parents(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.data_dir = tmp_path / "not" / "yet" / "there"
        previous = os.umask(0)
        try:
            node.start()
        finally:
            os.umask(previous)
        made = (node.data_dir, node.data_dir.parent, node.data_dir.parent.parent)
        assert [path.stat().st_mode & 0o777 for path in made] == [0o700, 0o700, 0o700]
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)


@pytest.mark.scenario("B104", then="where it can't be made the node ends with 2 and names the path")
def test_a_data_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        (tmp_path / "a file").touch()
        node.data_dir = tmp_path / "a file" / "data"
        node.start(wait_ready=False)
        assert node.wait_ended().exit_code == 2
        assert str(node.data_dir) in node.log().splitlines()[-1]


# ---- under load


@pytest.mark.scenario("B267", then="1,000 lookups beside 4 writers find all of it each time, and none is undecided")
def test_a_resident_prompt_is_never_missed_while_others_write(node: Node) -> None:
    node.start()
    seen: set[tuple[int, int, str]] = set()
    stopping = threading.Event()

    def write(first: int) -> None:
        with StampedEngine(node.endpoint) as writer:
            prompt = first
            while not stopping.is_set():
                writer.store(prompt, BLOCKS)
                prompt += 4

    writers = [threading.Thread(target=write, args=(1 + number,)) for number in range(4)]
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(0, BLOCKS)
        keys = engine.keys(0, BLOCKS)
        with engine.group.acquire(keys=keys) as lease:  # what keeps it resident
            for writer in writers:
                writer.start()
            try:
                for _ in range(1_000):
                    match = engine.group.match(keys=keys)
                    seen.add((match.blocks, match.host_blocks, match.reason or ""))
            finally:
                stopping.set()
                for writer in writers:
                    writer.join()
            rows = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            assert lease.copy_into(rows) == BLOCKS
            assert np.array_equal(rows, stamps(keys))
    assert seen == {(BLOCKS, BLOCKS, "")}


@pytest.mark.scenario(
    "B263", then="with a disk that doesn't answer stores end in memory, and what it can't take is refused"
)
def test_a_store_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    with Node(tmp_path, host_bytes="4MiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            with node.paused("storage"):
                stored = [engine.store(prompt, BLOCKS) for prompt in range(40)]  # 5 MiB
                status = node.status()
                assert status is not None
                assert status.dirty_extents >= 25
                assert status.counters["refused_blocks.no_room"] > 0
                assert all(blocks in (0, BLOCKS) or prompt >= 30 for prompt, blocks in enumerate(stored))
                assert stored[:30] == [BLOCKS] * 30
            wait_until(lambda: (s := node.status()) is not None and s.dirty_extents == 0, "the backlog is written")
            engine.store_flushed(100, BLOCKS)


@pytest.mark.scenario("B268", then="while files are read the node says how far it is, and a stop waits not for that")
def test_a_long_start_says_how_far_it_is_and_can_be_stopped(tmp_path: Path) -> None:
    with Node(tmp_path, nvme_bytes="1GiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
        stop(node)
        with Node(tmp_path, replaced=("worker=e2e.slow_start",)) as slow:
            slow.start(wait_ready=False)
            status = wait_until(slow.status, "it answers")
            assert status.state == "recovering"
            told = slow.wait_status(lambda s: s.recovery_stage == "reading headers" and s.recovery_done > 0, "progress")
            assert told.recovery_done < told.recovery_total
            with StampedEngine(slow.endpoint) as engine:
                assert engine.group.match(keys=engine.keys(1, BLOCKS)).reason == "not_ready"
            ended = slow.stop()
            assert ended.exit_code == 0
            assert ended.seconds < 60.0, "the look through the files would have taken half a day"
        node.start()
        with StampedEngine(node.endpoint) as engine:
            assert engine.load(1, BLOCKS).right == BLOCKS


# ---- who goes first


@pytest.mark.scenario("B213", then="what was loaded survives though all files have the same time, or one to come")
@pytest.mark.parametrize("touched", [1_000_000_000, 4_000_000_000])
def test_what_was_used_stays_whatever_the_times_of_the_files(tmp_path: Path, touched: int) -> None:
    used = range(0, 20, 2)
    with Node(tmp_path, touch_seconds="0.1") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(20):
                engine.store_flushed(prompt, BLOCKS)
        stop(node)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in used:
                assert engine.load(prompt, BLOCKS).right == BLOCKS
        stop(node)
        for path in data_of(node).rglob("*.kv"):
            os.utime(path, (touched, touched))
    with Node(tmp_path, nvme_bytes=str(12 * (BLOCKS * BLOCK_BYTES + 4096) + 2**20)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            left = [prompt for prompt in range(20) if engine.match(prompt, BLOCKS)]
            assert len(left) < 20
            assert set(used) <= set(left)
            assert all(engine.load(prompt, BLOCKS).right == BLOCKS for prompt in left)


@pytest.mark.scenario("B214", then="stores that want room at once evict what they need, and at most one more's share")
def test_many_who_need_room_at_once_evict_no_more_than_they_need(tmp_path: Path) -> None:
    slots = 2 * 2**20 // BLOCK_BYTES
    with Node(tmp_path, memory_only=True, host_bytes="2MiB", slab_bytes="512KiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(slots // BLOCKS):
                engine.store(prompt, BLOCKS)
            before = sum(engine.match(prompt, BLOCKS) for prompt in range(slots // BLOCKS))

            def store(first: int) -> None:
                with StampedEngine(node.endpoint) as other:
                    for prompt in range(first, first + 2):
                        assert other.store(prompt, BLOCKS) == BLOCKS

            threads = [threading.Thread(target=store, args=(100 + 2 * number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            status = node.status()
            assert status is not None
            evicted = sum(count for name, count in status.counters.items() if name.startswith("evicted_blocks.host"))
            assert 8 * BLOCKS - (slots - before) <= evicted <= 8 * BLOCKS - (slots - before) + BLOCKS


@pytest.mark.scenario("B215", then="10, 100 and 1,000 blocks are hits three times, and no file changes or goes")
def test_loading_removes_and_shortens_nothing_however_large(node: Node) -> None:
    prompts = {1: 10, 2: 100, 3: 1_000}
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt, blocks in prompts.items():
            engine.store_flushed(prompt, blocks)
    before = files_of(node)
    for _ in range(3):
        stop(node)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt, blocks in prompts.items():
                assert engine.load(prompt, blocks, deadline_seconds=20.0).right == blocks
        status = node.status()
        assert status is not None
        assert not [name for name in status.counters if name.startswith("evicted_blocks.nvme")]
    stop(node)
    assert files_of(node) == before
