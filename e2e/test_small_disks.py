"""Real file systems that run full, out of inodes, or can't be written: small ones, mounted for the test.

Skipped where the tests may not mount: then the same causes are made by e2e/test_degraded.py in the calls themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, data_of, files_below, wait_until
from tierkv.client import connect_operator
from tierkv.config import MiB
from tierkv.torture.stamped import BLOCK_BYTES

pytestmark = pytest.mark.timeout(240)

MIB_BLOCKS = MiB // BLOCK_BYTES


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def node_on(disk: Path, folder: Path, **options: str | None) -> Node:
    """Its log and sockets lie elsewhere."""
    node = Node(folder, **{"extent_bytes": "1MiB", "host_bytes": "8MiB", **options})
    node.data_dir = disk / "data"
    return node


class Sampler:
    """Watches a file system all the time, from a thread: the least that was ever free, the most that was used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.least_free_bytes = self.least_free_inodes = 2**62
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            found = os.statvfs(self.path)
            self.least_free_bytes = min(self.least_free_bytes, found.f_bavail * found.f_frsize)
            self.least_free_inodes = min(self.least_free_inodes, found.f_favail)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def fill_up(path: Path, num_bytes: int) -> None:
    """Data of others."""
    with path.open("wb") as file:
        for _ in range(num_bytes // MiB):
            file.write(b"x" * MiB)


def store_flushed(engine: StampedEngine, prompt: int, blocks: int) -> bool:
    engine.store(prompt, blocks)
    return engine.seal(prompt, blocks).flushed_blocks == blocks


def io_errors(node: Node) -> dict[str, int]:
    status = node.wait_status(lambda _: True, "it answers")
    return {tier.last_error: tier.errors for tier in status.tiers if tier.errors}


@pytest.mark.scenario(
    "B123",
    then="eviction by what the disk really has: loads hit all the time, stores go on, and more is used when it can be",
)
def test_a_disk_that_others_fill_is_evicted_into_and_used_again_when_they_go(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64m") as disk:
        fill_up(disk / "of others", 50 * MiB)
        with node_on(disk, tmp_path, nvme_bytes="1GiB", nvme_reserve_bytes="4MiB") as node, Sampler(disk) as seen:
            node.start()
            with StampedEngine(node.endpoint) as engine:
                for prompt in range(60):
                    # What index and journal have grown by is known with the next look at the disk: until then it may
                    # be in the reserve already, and the store waits.
                    wait_until(lambda at=prompt: store_flushed(engine, at, MIB_BLOCKS), "it is flushed")
                    loaded = engine.load(max(0, prompt - 2), MIB_BLOCKS)
                    assert loaded.right == MIB_BLOCKS
                room = node.wait_status(lambda _: True, "it answers").tiers[1].capacity_bytes
                assert room < 14 * MiB
                (disk / "of others").unlink()
                node.wait_status(lambda status: status.tiers[1].capacity_bytes > 50 * MiB, "the room is back")
                for prompt in range(100, 130):
                    wait_until(lambda at=prompt: store_flushed(engine, at, MIB_BLOCKS), "it is flushed")
                assert sum(engine.match(prompt, MIB_BLOCKS) == MIB_BLOCKS for prompt in range(100, 130)) == 30
            assert seen.least_free_bytes >= 3 * MiB  # of the reserve of 4, what a temp file's rounding takes
            assert io_errors(node) == {}, "the disk itself never had to refuse"


@pytest.mark.scenario(
    "B088",
    then="what the disk has is the capacity, told with both numbers; the reserve stays free; others' data shrink it",
)
def test_a_cap_that_the_disk_does_not_have_is_told_and_what_it_has_is_kept_to(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=200m") as disk:
        fill_up(disk / "of others", 120 * MiB)
        options = {"nvme_bytes": "150MiB", "nvme_reserve_bytes": "20MiB"}
        with node_on(disk, tmp_path, **options) as node, Sampler(disk) as seen:
            node.start()
            status = node.wait_status(lambda s: bool(s.warnings), "the cap is told")
            assert 55 * MiB < status.tiers[1].capacity_bytes < 61 * MiB
            (warning,) = status.warnings
            assert re.search(r"asks for 150.* MiB, the disk has room for \d\d\.\d MiB", warning)
            with StampedEngine(node.endpoint) as engine:
                for prompt in range(90):
                    wait_until(lambda at=prompt: store_flushed(engine, at, MIB_BLOCKS), "it is flushed")
                assert seen.least_free_bytes >= 19 * MiB
                fill_up(disk / "more of others", 15 * MiB)
                node.wait_status(lambda s: s.tiers[1].capacity_bytes < 46 * MiB, "the tier has shrunk")
                wait_until(lambda: os.statvfs(disk).f_bavail * 4096 >= 19 * MiB, "the reserve is free again")
                assert engine.load(89, MIB_BLOCKS).right == MIB_BLOCKS


@pytest.mark.scenario(
    "B093", then="by default the file system never fills, the node never meets ENOSPC, and new entries hit"
)
def test_the_defaults_never_fill_a_file_system(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "size=64m") as disk,
        node_on(disk, tmp_path, nvme_bytes=None) as node,
        Sampler(disk) as seen,
    ):
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(200):
                assert engine.store(prompt, MIB_BLOCKS) == MIB_BLOCKS
                engine.seal(prompt, MIB_BLOCKS, flushed=prompt % 8 == 0)
                if prompt % 10 == 9:
                    assert engine.load(prompt, MIB_BLOCKS).right == MIB_BLOCKS
        reserve = 64 * MiB // 20
        assert seen.least_free_bytes >= reserve - 256 * 1024
        assert io_errors(node) == {}


@pytest.mark.scenario(
    "B124", then="files make room for files before inodes run out; empty folders go; what is told says inodes"
)
def test_a_file_system_short_of_inodes(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "size=256m,nr_inodes=400") as disk,
        node_on(disk, tmp_path, extent_bytes="16KiB") as node,
        Sampler(disk) as seen,
    ):
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(900):
                assert engine.store(prompt, 1) == 1
                engine.seal(prompt, 1, flushed=prompt % 50 == 49)
            wait_until(lambda: store_flushed(engine, 900, 1), "it is flushed")
            wait_until(lambda: engine.match(900, 1) == 1, "the last one is there")
            assert seen.least_free_inodes >= 8
            assert io_errors(node) == {}
            assert 100 < len(files_below(node.data_dir / "models", ".kv")) < 400
            wait_until(lambda: not empty_folders(data_of(node) / "models"), "empty folders take inodes as well")
            for number in range(os.statvfs(disk).f_favail - 4):  # others take nearly all of them
                (disk / f"of others {number}").touch()
            wait_until(lambda: os.statvfs(disk).f_favail >= 8, "files have gone for them")
            assert engine.load(900, 1).right == 1
            for path in files_below(node.data_dir / "models", ".kv"):
                path.unlink(missing_ok=True)  # so that nothing can be evicted
            taken = 0
            while os.statvfs(disk).f_favail > 2:
                (disk / f"more of others {taken}").touch()
                taken += 1
            status = node.wait_status(lambda s: s.tiers[1].reason == "no_inodes", "it is named")
            assert any("inodes are free" in problem for problem in status.problems)
            for path in disk.glob("more of others*"):
                path.unlink()
            node.wait_status(lambda s: s.state == "ready", "it is well again")
            wait_until(lambda: store_flushed(engine, 901, 1), "stores go on")


@pytest.mark.scenario(
    "B126", then="refused without read_only, by path and cause; with it, files hit and stores stay in memory"
)
def test_a_directory_on_a_disk_that_can_not_be_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64m") as disk:
        with node_on(disk, tmp_path, extent_bytes="128KiB") as node:
            node.start()
            with StampedEngine(node.endpoint) as engine:
                for prompt in range(50):
                    engine.store_flushed(prompt, 4)
            assert node.stop().exit_code == 0
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            refused = node.spawn(log=tmp_path / "refused.log")
            assert refused.wait(60) == 2
            refused.communicate()
            said = (tmp_path / "refused.log").read_text()
            assert str(node.data_dir) in said
            assert "Read-only file system" in said
        with node_on(disk, tmp_path, extent_bytes="128KiB", read_only="") as node:
            node.start()
            status = node.wait_status(lambda _: True, "it answers")
            assert (status.tiers[1].state, status.tiers[1].reason, status.state) == ("ok", "read_only", "ready")
            with StampedEngine(node.endpoint) as engine:
                for prompt in range(50):
                    loaded = engine.load(prompt, 4)
                    assert (loaded.right, loaded.nvme_blocks) == (4, 4)
                assert engine.store(1_000, 4) == 4
                assert engine.seal(1_000, 4).reason == "read_only"
                assert engine.load(1_000, 4).right == 4
            with connect_operator(node.endpoint) as operator:
                *_, last = operator.verify()
                assert (last.checked_files, last.damaged_files) == (50, 0)
            assert node.stop().exit_code == 0
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

CHANGING = "unlink,unlinkat,rename,renameat,renameat2,mkdir,mkdirat,rmdir,utimensat,truncate,ftruncate,fchmod,fchmodat"
OPENING = "open,openat,creat"


@needs_strace
@pytest.mark.scenario("B126", then="with read_only no system call changes anything below the directory")
def test_a_node_that_reads_only_changes_nothing(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(10):
                engine.store_flushed(prompt, 4)
        node.stop()
        assert node.data_dir is not None
        damaged = next((node.data_dir / "models").rglob("*.kv"))
        raw = bytearray(damaged.read_bytes())
        raw[-1] ^= 1
        damaged.write_bytes(raw)
        before = tree(node.data_dir)
    trace = tmp_path / "trace"
    with Node(tmp_path, read_only="", nvme_bytes="1MiB") as node:
        node.start(wrapper=("strace", "-f", "-y", "-o", str(trace), "-e", f"trace={OPENING},{CHANGING}"))
        with StampedEngine(node.endpoint) as engine:
            right = [engine.load(prompt, 4).right for prompt in range(10)]
            assert sorted(set(right)) in ([0, 4], [3, 4])  # one file is damaged, and not moved away
            engine.store(99, 4)
            engine.seal(99, 4)
        node.stop()
        assert node.data_dir is not None
        assert tree(node.data_dir) == before
        below = [line for line in trace.read_text().splitlines() if str(node.data_dir) in line]
        assert any(".kv" in line for line in below), "the trace sees what is opened"
        writing = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
        changing = [line for line in below if writing.search(line) or not re.search(r"\b(open|openat)\(", line)]
        assert [line for line in changing if "resumed" not in line] == []


def empty_folders(root: Path) -> list[str]:
    return [inside for inside, folders, names in os.walk(root) if not folders and not names]


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns, path.lstat().st_ctime_ns)
        for path in sorted(root.rglob("*"))
    }
