"""What is counted as used is what is there, and never more than what was allowed."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from e2e.harness import Node, StampedEngine, files_below, wait_until
from tierkv.client import connect_operator
from tierkv.config import MiB
from tierkv.core.reasons import Reason
from tierkv.torture.stamped import BLOCK_BYTES, tokens_of
from tierkv.wire.messages import TierUsage

pytestmark = pytest.mark.timeout(240)

SMALL_EXTENTS = {"extent_bytes": "64KiB", "host_bytes": "2MiB", "slab_bytes": "512KiB"}
BLOCKS = 4  # one file of 64 KiB and its header


def nvme(node: Node) -> TierUsage:
    with connect_operator(node.endpoint) as operator:
        return next(tier for tier in operator.usage().tiers if tier.tier == "nvme")


def files(node: Node) -> list[Path]:
    assert node.data_dir is not None
    return files_below(node.data_dir / "models", ".kv")


def bytes_of(paths: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


def counters(node: Node) -> dict[str, float]:
    return node.wait_status(lambda _: True, "it answers").counters


@pytest.mark.scenario(
    "B081",
    then="usage is what is there soon after files were removed by hand, the drift is counted, all stores succeed",
)
def test_files_that_somebody_removed_stop_counting(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL_EXTENTS, "nvme_bytes": "8MiB", "reconcile_seconds": "1"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(100):
                engine.store_flushed(prompt, BLOCKS)
            removed = files(node)[:60]
            assert len(removed) == 60
            gone = bytes_of(removed)
            for path in removed:
                path.unlink()
            wait_until(lambda: nvme(node).used_bytes == bytes_of(files(node)), "usage is what is there")
            assert counters(node)["drift_bytes"] == gone
            for prompt in range(1_000, 1_050):
                engine.store_flushed(prompt, BLOCKS)
            assert all(engine.match(prompt, BLOCKS) == BLOCKS for prompt in range(1_000, 1_050))
            assert nvme(node).used_bytes == bytes_of(files(node))


@pytest.mark.scenario("B082", then="one file and its bytes, by however many it is stored; the rest are counted")
def test_the_same_prompt_stored_by_many_is_one_file(tmp_path: Path) -> None:
    with Node(tmp_path, **SMALL_EXTENTS) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for _ in range(100):
                engine.store(1, BLOCKS)

        def store_often() -> None:
            with StampedEngine(node.endpoint) as own:
                for _ in range(25):
                    own.store(1, BLOCKS)

        threads = [threading.Thread(target=store_often) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
        (path,) = files(node)
        assert nvme(node).used_bytes == path.stat().st_blocks * 512
        seen = counters(node)
        assert seen["stored_tokens"] == BLOCKS * 16
        assert seen["duplicate_blocks"] == (100 + 8 * 25 + 1 - 1) * BLOCKS


class Sampler(threading.Thread):
    """Looks every ten milliseconds at what all files in a directory take, whatever they are.

    Walking takes time, in which files come, go and are renamed. A file that two walks after each other have met was
    there at the moment between them, so what both have met took that room at one instant, or more than that.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.most_bytes = self.samples = 0
        self.ended = threading.Event()

    def run(self) -> None:
        before: dict[int, int] = {}
        while not self.ended.wait(0.01):
            now = self._walk()
            found = sum(min(size, now[inode]) for inode, size in before.items() if inode in now)
            self.most_bytes = max(self.most_bytes, found)
            self.samples += 1
            before = now

    def _walk(self) -> dict[int, int]:
        """Bytes by inode."""
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                with suppress(FileNotFoundError):
                    stat = os.stat(os.path.join(folder, name), follow_symlinks=False)
                    found[stat.st_ino] = stat.st_blocks * 512
        return found


@pytest.mark.scenario(
    "B085", then="at every sample all files together, temp files, quarantine and index too, take no more than the cap"
)
def test_the_cap_holds_at_every_instant_under_many_writers_and_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_DISK_GO", "/")
    monkeypatch.setenv("SLOW_DISK_SECONDS", "0.05")
    cap = 12 * MiB
    options = {"nvme_bytes": str(cap), "host_bytes": "24MiB", "extent_bytes": "1MiB"}
    with Node(tmp_path, replaced=("files=e2e.slow_disk:SlowDisk",), **options) as node:
        node.start()
        assert node.data_dir is not None
        sampler = Sampler(node.data_dir)
        sampler.start()

        def work(number: int) -> None:
            with StampedEngine(node.endpoint) as engine:
                for turn in range(4):
                    blocks = 64 * (1 + (number + turn) % 2)  # 1 to 2 MiB
                    engine.store(number * 100 + turn, blocks)
                    engine.seal(number * 100 + turn, blocks, flushed=turn % 2 == 1, deadline_seconds=5.0)

        try:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 33)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sampler.ended.set()
            sampler.join()
        assert sampler.samples > 20
        assert cap // 2 < sampler.most_bytes <= cap
        tier = nvme(node)
        assert tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes <= tier.capacity_bytes <= cap


@pytest.mark.scenario("B087", then="files that no engine can reach any more make room for those of the model in use")
def test_what_an_earlier_model_left_goes_first(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL_EXTENTS, "nvme_bytes": "6MiB"}) as node:
        node.start()
        with StampedEngine(node.endpoint, salt="old weights") as old:
            for prompt in range(60):  # four of six MiB
                old.store_flushed(prompt, BLOCKS)
        with connect_operator(node.endpoint) as operator:
            wait_until(lambda: not any(row.reachable for row in operator.usage().rows), "nobody can reach it")
            (row,) = operator.usage().rows
            assert row.nvme_bytes == bytes_of(files(node))
        with StampedEngine(node.endpoint, salt="new weights") as new:
            for prompt in range(60):
                new.store_flushed(prompt, BLOCKS)
            assert all(new.match(prompt, BLOCKS) == BLOCKS for prompt in range(60))
            tier = nvme(node)
            assert tier.used_bytes + tier.overhead_bytes <= tier.capacity_bytes <= 6 * MiB


@pytest.mark.scenario(
    "B089",
    then="damaged files leave the usage and count in a column of their own, against the cap, until they are removed",
)
def test_damaged_files_move_from_one_column_to_another(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL_EXTENTS, "quarantine_days": "0"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(10):
                engine.store_flushed(prompt, BLOCKS)
        node.stop()
    with Node(tmp_path, **SMALL_EXTENTS) as node:
        for path in files(node)[:4]:
            raw = bytearray(path.read_bytes())
            raw[-BLOCKS * BLOCK_BYTES] ^= 1  # in the first block, so that nothing of it can be saved
            path.write_bytes(raw)
        node.start()
        with StampedEngine(node.endpoint) as engine:
            loaded = [engine.load(prompt, BLOCKS) for prompt in range(10)]
            assert not any(one.is_wrong for one in loaded)
            assert sum(one.right == BLOCKS for one in loaded) == 6
        wait_until(lambda: nvme(node).quarantined_files == 4, "they are counted aside")
        tier = nvme(node)
        assert tier.used_bytes == bytes_of(files(node))
        assert len(files(node)) == 6
        assert tier.quarantined_bytes == 4 * files(node)[0].stat().st_blocks * 512
        assert tier.overhead_bytes > tier.quarantined_bytes
        node.stop()
    with Node(tmp_path, **{**SMALL_EXTENTS, "quarantine_bytes": "0"}) as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            path = files(node)[0]
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
            for prompt in range(10):
                engine.load(prompt, BLOCKS)
        wait_until(lambda: nvme(node).quarantined_files == 0, "none are kept")
        assert nvme(node).quarantined_bytes == 0
        assert list((node.data_dir / "quarantine").iterdir()) == []


@pytest.mark.scenario(
    "B090", then="a session gets what it may hold, the rest is refused by name; others stay, memory too"
)
def test_a_prompt_larger_than_every_tier_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    with Node(tmp_path, **{**SMALL_EXTENTS, "nvme_bytes": "4MiB"}) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            front = psutil.Process(node.pid("front"))
            before = front.memory_info().rss
            with engine.group.reserve(tokens_of(2, 64 * MiB // BLOCK_BYTES)) as ticket:
                assert len(ticket.granted) * BLOCK_BYTES <= 1 * MiB
                assert ticket.reason is Reason.SESSION_CAP
            assert front.memory_info().rss - before < 12 * MiB
            assert engine.load(1, BLOCKS).right == BLOCKS
            engine.store_flushed(3, BLOCKS)
