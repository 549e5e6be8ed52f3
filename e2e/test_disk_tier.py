"""The tier below NVMe, with whole nodes: what NVMe has no room for is found on disk, whoever dies, and its absence, its
faults and other nodes in the same directory cost misses at most."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, files_below, wait_until
from e2e.sick_disk import VARIABLE, SickDisk
from e2e.test_cli import answer, extent_files, flip_a_byte, tierkv
from tierkv.torture.stamped import BLOCK_BYTES, BLOCK_TOKENS
from tierkv.wire.messages import StatusReply, TierUsage

pytestmark = pytest.mark.timeout(240)

BLOCKS = 4
MORE = 8
PROMPTS = 120
"""Of one extent each: 7.5 MiB, of which NVMe holds half, and host memory a quarter."""

SMALL = {
    "host_bytes": "2MiB",
    "slab_bytes": "512KiB",
    "extent_bytes": "64KiB",
    "nvme_bytes": "4MiB",
    "journal_bytes": "64KiB",
    "disk_bytes": "64MiB",
    "disk_reserve_bytes": "1MiB",
    "disk_rescan_seconds": "1",
    "eviction_policy": "lru",
    "prefill_tokens_per_second": "10",  # an engine so slow that a disk is always quicker
}


def disk_node(
    folder: Path, disk_dir: Path | None = None, replaced: tuple[str, ...] = (), **options: str | None
) -> Node:
    folder.mkdir(exist_ok=True)
    disk = {"disk_dir": str(disk_dir or folder / "disk")}
    return Node(folder, replaced=replaced, **{**SMALL, **disk, **options})


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with disk_node(tmp_path / "one") as node:
        yield node


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SickDisk]:
    made = SickDisk(tmp_path / "sick")
    monkeypatch.setenv(VARIABLE, str(made.path))
    yield made
    made.close()


def disk_files(disk_dir: Path) -> list[Path]:
    return files_below(disk_dir / "models", ".kv")


def fill(engine: StampedEngine, first: int = 1, count: int = PROMPTS) -> list[int]:
    prompts = list(range(first, first + count))
    for prompt in prompts:
        engine.store_flushed(prompt, BLOCKS)
    return prompts


def counter(node: Node, name: str) -> float:
    status = node.status()
    return 0.0 if status is None else status.counters.get(name, 0.0)


def wait_demoted(node: Node, least: int = 1) -> None:
    """So many extents are in the disk tier, and none is on its way there."""
    node.wait_status(
        lambda status: status.counters.get("demoted_extents", 0) >= least and tier(status, "disk").reserved_bytes == 0,
        f"{least} extents are in the disk tier",
    )


def tier(status: StatusReply, name: str) -> TierUsage:
    return next(one for one in status.tiers if one.tier == name)


def missing(engine: StampedEngine, prompts: list[int]) -> list[int]:
    return [prompt for prompt in prompts if engine.match(prompt, BLOCKS) < BLOCKS]


def dropped(node: Node) -> float:
    """Extents that left NVMe and found no way to disk, under this front: nobody waits for a disk."""
    status = node.status()
    assert status is not None
    return sum(count for name, count in status.counters.items() if name.startswith("dropped_demotions."))


def load_right(engine: StampedEngine, prompts: list[int]) -> int:
    """What is there is right, and what is not is a miss; how many blocks came from disk. To load so much at once makes
    NVMe let go of more than a disk may take, so some may leave both meanwhile."""
    from_disk = 0
    for prompt in prompts:
        loaded = engine.load(prompt, BLOCKS, deadline_seconds=20.0)
        assert not loaded.is_wrong, f"prompt {prompt}: {loaded}"
        from_disk += loaded.disk_blocks
    return from_disk


# ---- found again


def test_what_left_nvme_is_found_on_disk_with_the_right_bytes_also_after_a_restart(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        prompts = fill(engine)
        wait_demoted(node, PROMPTS // 3)
        assert len(missing(engine, prompts)) <= dropped(node)
        assert engine.load(prompts[0], BLOCKS, deadline_seconds=20.0).disk_blocks == BLOCKS
        assert load_right(engine, prompts) >= BLOCKS * PROMPTS // 4
    status = node.wait_status(lambda status: status.state == "ready", "nothing is wrong with it")
    assert status.counters["hit_tokens.disk"] >= BLOCK_TOKENS * BLOCKS * PROMPTS // 4
    disk = tier(status, "disk")
    assert disk.used_bytes > 0
    assert disk.used_bytes + disk.reserved_bytes + disk.overhead_bytes <= disk.capacity_bytes
    assert node.stop().exit_code == 0
    node.start()
    status = node.wait_status(lambda status: tier(status, "disk").used_bytes > 0, "it knows what is on disk")
    assert tier(status, "disk").used_bytes == sum(path.stat().st_size for path in disk_files(node.folder / "disk"))
    with StampedEngine(node.endpoint) as engine:
        assert load_right(engine, prompts) > 0


def test_what_is_pinned_and_was_on_disk_alone_outlives_a_kill(tmp_path: Path) -> None:
    with disk_node(tmp_path / "one", disk_bytes="6MiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine)
            wait_demoted(node, PROMPTS // 3)
            names = {path.name for path in disk_files(node.folder / "disk")} - {
                path.name for path in extent_files(node)
            }
            keys = next(
                keys for keys in (engine.keys(prompt, BLOCKS) for prompt in prompts) if f"{keys[:32].hex()}.kv" in names
            )
            answer(node, "pin", "--prefix", keys[-32:].hex())
            node.wait_status(
                lambda status: any(path.stem == keys[:32].hex() for path in extent_files(node)), "it is on NVMe again"
            )
            fill(engine, 1_000, 2 * PROMPTS)
            node.kill("supervisor")
        node.start()
        (row,) = answer(node, "pins")["pins"]
        assert (row["phase"], row["cached_blocks"], row["nvme_blocks"]) == ("holds", BLOCKS, BLOCKS)


def test_the_disk_tier_keeps_to_its_capacity(tmp_path: Path) -> None:
    with disk_node(tmp_path / "one", disk_bytes="3MiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine)
            status = node.wait_status(
                lambda status: any(name.startswith("evicted_bytes.disk.") for name in status.counters),
                "some had to leave the disk tier",
            )
            disk = tier(status, "disk")
            assert disk.used_bytes + disk.reserved_bytes + disk.overhead_bytes <= disk.capacity_bytes == 3 * 2**20
            load_right(engine, prompts)
        size = sum(path.stat().st_size for path in disk_files(tmp_path / "one" / "disk"))
        assert size <= 3 * 2**20


# ---- whoever dies


@pytest.mark.parametrize("victim", ["disk", "storage", "front", "supervisor"])
def test_a_process_that_is_killed_in_the_middle_of_demotions_costs_nothing_that_was_demoted(
    node: Node, victim: str
) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        flushed = fill(engine)
        wait_demoted(node, PROMPTS // 4)
        lost = dropped(node)
        fill(engine, 1_000, MORE)
        node.kill(victim)
    if victim == "supervisor":
        node.start()
    node.wait_ready()
    node.wait_status(
        lambda status: any(one.name == "disk" and one.state == "running" for one in status.workers),
        "the disk tier is back",
    )
    node.wait_status(lambda status: tier(status, "disk").used_bytes > 0, "it knows what is on disk")
    with StampedEngine(node.endpoint) as engine:
        assert len(missing(engine, flushed)) <= lost + dropped(node) + MORE
        fill(engine, 2_000, MORE)
        assert load_right(engine, flushed) > 0


# ---- two nodes, one directory


def test_what_one_node_has_put_there_another_one_finds(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with disk_node(tmp_path / "one", shared) as one, disk_node(tmp_path / "two", shared) as two:
        one.start()
        two.start()
        with StampedEngine(one.endpoint) as here, StampedEngine(two.endpoint) as there:
            prompts = fill(here)
            wait_demoted(one, PROMPTS // 3)
            assert wait_until(lambda: there.match(prompts[0], BLOCKS) == BLOCKS, "the other node has looked again")
            assert there.load(prompts[0], BLOCKS, deadline_seconds=20.0).disk_blocks == BLOCKS
            load_right(there, prompts)  # and writes them to its own NVMe, which has to let go of them again
            fill(there, 3_000)
            wait_demoted(two)
            load_right(here, prompts)
            load_right(there, prompts)
        for node in (one, two):
            assert node.stop().exit_code == 0


def test_evictions_of_one_node_are_misses_of_the_other_and_nothing_worse(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with disk_node(tmp_path / "one", shared) as one, disk_node(tmp_path / "two", shared) as two:
        one.start()
        two.start()
        with StampedEngine(one.endpoint) as here, StampedEngine(two.endpoint) as there:
            prompts = fill(here)
            wait_demoted(one, PROMPTS // 3)
            wait_until(lambda: there.match(prompts[0], BLOCKS) == BLOCKS, "the other node has looked again")
            done = tierkv("evict", "--tier", "disk", "--to", "0", "--yes", "--endpoint", str(one.endpoint))
            assert done.returncode == 0, done.stderr
            wait_until(lambda: not disk_files(shared), "its files are gone")
            load_right(there, prompts)
            wait_until(lambda: there.match(prompts[0], BLOCKS) == 0, "the other node has noticed")
            status = two.wait_status(lambda status: status.state == "ready", "nothing is wrong with the other node")
            assert not any(count for name, count in status.counters.items() if name.startswith("damaged_extents"))


# ---- what can happen to the directory


def test_a_node_starts_without_a_directory_that_can_not_be_used_and_takes_it_when_it_can(tmp_path: Path) -> None:
    disk_dir = tmp_path / "disk"
    disk_dir.write_text("in the way")
    with disk_node(tmp_path / "one", disk_dir) as node:
        node.start()
        status = node.wait_status(
            lambda status: any("the disk tier is away" in problem for problem in status.problems), "it says so"
        )
        assert status.state == "degraded"
        with StampedEngine(node.endpoint) as engine:
            assert engine.store(1, BLOCKS) == BLOCKS
            disk_dir.unlink()
            node.wait_status(lambda status: status.state == "ready", "the tier is there now")
            prompts = fill(engine)
            wait_demoted(node, PROMPTS // 4)
            assert load_right(engine, prompts) > 0


def test_a_data_directory_as_disk_directory_is_refused_at_the_start(tmp_path: Path) -> None:
    with Node(tmp_path) as other:
        other.start()
        other.stop()
    with disk_node(tmp_path / "one", tmp_path / "data") as node:
        process = node.spawn()
        process.communicate(timeout=60)
        assert process.returncode == 2
        assert "disk_dir" in node.log()


def test_a_directory_that_is_taken_away_costs_what_is_in_it_and_nothing_else(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        prompts = fill(engine)
        wait_demoted(node, PROMPTS // 3)
        shutil.rmtree(node.folder / "disk")
        load_right(engine, prompts)
        new = fill(engine, 1_000, 20)
        assert missing(engine, new[-4:]) == []
        load_right(engine, new)
        status = node.wait_status(lambda status: status.state == "degraded", "it says so")
        assert tier(status, "nvme").state == "ok"


@pytest.mark.parametrize(("operation", "number"), [("fdatasync", errno.EIO), ("fdatasync", errno.EDQUOT)])
def test_a_disk_that_takes_nothing_more_is_read_and_nvme_goes_on(
    tmp_path: Path, faults: SickDisk, operation: str, number: int
) -> None:
    with disk_node(tmp_path / "one", replaced=("disk_worker=e2e.sick_disk",)) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine)
            wait_demoted(node, PROMPTS // 3)
            faults.fail(operation, number)
            new = fill(engine, 1_000, 80)
            status = node.wait_status(lambda status: tier(status, "disk").state == "degraded", "it shows")
            assert tier(status, "nvme").state == "ok"
            assert engine.load(prompts[0], BLOCKS, deadline_seconds=20.0).right == BLOCKS
            assert missing(engine, new[-8:]) == []
            faults.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")


def test_a_disk_that_hangs_holds_up_neither_nvme_nor_memory(tmp_path: Path, faults: SickDisk) -> None:
    with disk_node(tmp_path / "one", replaced=("disk_worker=e2e.sick_disk",), stuck_seconds="1") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine)
            wait_demoted(node, PROMPTS // 3)
            faults.hang("preadv")
            assert not engine.load(prompts[0], BLOCKS, deadline_seconds=1.0).is_wrong
            node.wait_status(lambda status: any("disk" in one for one in status.problems), "it shows")
            new = fill(engine, 1_000, 40)
            assert (missing(engine, new[-8:]), load_right(engine, new[-8:])) == ([], 0)
            faults.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")
            load_right(engine, prompts[:4])


def test_a_damaged_file_is_a_miss_and_is_set_aside(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        prompts = fill(engine)
        wait_demoted(node, PROMPTS // 3)
        files = disk_files(node.folder / "disk")
        for path in files:
            flip_a_byte(path)
        load_right(engine, prompts)
        status = node.wait_status(lambda status: tier(status, "disk").quarantined_files > 0, "some are set aside")
        assert status.counters["damaged_extents.checksum"] > 0


# ---- operators


def test_a_purge_removes_from_disk_and_nothing_of_it_comes_back_with_a_restart(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint, salt="secret") as engine, StampedEngine(node.endpoint) as other:
        theirs = fill(engine)
        wait_demoted(node, PROMPTS // 3)
        kept = fill(other, 5_000, 4)
        done = tierkv("purge", "--tenant", "secret", "--yes", "--json", "--endpoint", str(node.endpoint))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["phase"] == "gone"
        assert engine.match(theirs[0], BLOCKS) == 0
    node.stop()
    node.start()
    with StampedEngine(node.endpoint, salt="secret") as engine, StampedEngine(node.endpoint) as other:
        assert all(engine.match(prompt, BLOCKS) == 0 for prompt in theirs)
        assert missing(other, kept) == []
        load_right(other, kept)
    for path in files_below(node.folder / "disk"):
        with suppress(FileNotFoundError):  # removed meanwhile
            assert b"secret" not in path.read_bytes(), path


def test_a_warmup_brings_what_lies_on_disk(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        fill(engine)
        wait_demoted(node, PROMPTS // 3)
    assert tierkv("evict", "--tier", "nvme", "--to", "0", "--yes", "--endpoint", str(node.endpoint)).returncode in (
        0,
        4,
    )
    node.stop()
    node.start()
    node.wait_status(lambda status: tier(status, "disk").used_bytes > 0, "it knows what is on disk")
    done = tierkv("warmup", "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["disk_bytes"] >= BLOCK_BYTES


def test_an_operator_sees_what_is_on_disk_and_can_verify_and_count_it(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        fill(engine)
        wait_demoted(node, PROMPTS // 3)

    def look() -> tuple[dict[Path, int], Any, Any, Any] | None:
        """None while demotions still go on."""
        before = sizes(node)
        seen = before, answer(node, "du"), answer(node, "verify"), answer(node, "audit")
        return seen if sizes(node) == before else None

    files, usage, verified, counted = wait_until(look, "nothing moves while it is looked at")
    on_disk = sum(size for path, size in files.items() if path.is_relative_to(node.folder / "disk"))
    assert usage["total"]["disk_bytes"] == on_disk
    assert verified["checked_files"] == len(files)
    assert verified["problem"] == ""
    assert counted["disk_bytes"] == counted["disk_known_bytes"] == on_disk
    assert counted["open"] == 0


def sizes(node: Node) -> dict[Path, int]:
    """Of the files of both tiers."""
    found: dict[Path, int] = {}
    for path in [*disk_files(node.folder / "disk"), *extent_files(node)]:
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_size
    return found


def test_a_node_that_reads_only_finds_what_is_there_and_changes_nothing(tmp_path: Path) -> None:
    with disk_node(tmp_path / "one") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine)
            wait_demoted(node, PROMPTS // 3)
        node.stop()
    disk_dir = tmp_path / "one" / "disk"
    before = {path: path.stat().st_mtime_ns for path in disk_dir.rglob("*")}
    with disk_node(tmp_path / "one", read_only="") as node:
        node.start()
        node.wait_status(lambda status: tier(status, "disk").used_bytes > 0, "it knows what is on disk")
        with StampedEngine(node.endpoint) as engine:
            assert load_right(engine, prompts) > 0
        node.stop()
    assert {path: path.stat().st_mtime_ns for path in disk_dir.rglob("*")} == before
