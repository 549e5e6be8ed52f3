"""Purges of real nodes: what is gone from disk, index and memory, who still holds some of it, and what a kill in the
middle changes about that: nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, environment, files_below, wait_until
from tierkv.client import connect_operator
from tierkv.client.session import Session, open_session
from tierkv.torture.barriers import FOLDER, Barriers
from tierkv.torture.stamped import BLOCK_BYTES, stamps

SALT = "a-tenant-that-wants-to-be-forgotten"
PROMPTS = (1, 2, 3)
BLOCKS = 12


def command(node: Node, *arguments: str, stdin: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv_cli.main", "purge", "--json", "--endpoint", str(node.endpoint), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    return process


def finish(process: subprocess.Popen[str], expected: int = 0) -> dict[str, Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        out, err = process.stdout.read(), process.stderr.read()
        code = process.wait(timeout=120)
    assert code == expected, f"{code}: {out} {err}"
    receipt: dict[str, Any] = json.loads(out)
    return receipt


def purge(node: Node, *arguments: str, expected: int = 0, stdin: str = "") -> dict[str, Any]:
    return finish(command(node, *arguments, stdin=stdin), expected)


def store_all(engine: StampedEngine) -> None:
    for prompt in PROMPTS:
        assert engine.store(prompt, BLOCKS) == BLOCKS
        assert engine.seal(prompt, BLOCKS).flushed_blocks == BLOCKS


def matched(engine: StampedEngine) -> list[int]:
    return [engine.match(prompt, BLOCKS) for prompt in PROMPTS]


def marks(engine: StampedEngine) -> list[bytes]:
    """The beginning of each of its blocks."""
    found = []
    for prompt in PROMPTS:
        raw = stamps(engine.keys(prompt, BLOCKS), BLOCK_BYTES).tobytes()
        found += [raw[start : start + 64] for start in range(0, len(raw), BLOCK_BYTES)]
    assert len(found) == len(PROMPTS) * BLOCKS
    return found


def files_with(node: Node, wanted: list[bytes]) -> list[Path]:
    assert node.data_dir is not None
    found = []
    for path in files_below(node.data_dir):
        with suppress(FileNotFoundError):  # removed meanwhile
            raw = path.read_bytes()
            found += [path for mark in wanted if mark in raw][:1]
    return found


@contextmanager
def whole_arena(node: Node) -> Iterator[Any]:
    """As any engine of the user has it mapped."""
    session = open_session(node.endpoint, client="a look", maps_arena=True, until=time.monotonic() + 20)
    assert isinstance(session, Session)

    def look(wanted: list[bytes]) -> list[bytes]:
        assert session.arena is not None
        raw = session.arena.readable.tobytes()
        return [mark for mark in wanted if mark in raw]

    try:
        yield look
    finally:
        session.end()
        wait_until(session.finish, "the arena is unmapped")


@pytest.mark.scenario(
    "B237",
    then="after the command has answered a tenant's prompts miss, and no file, index row or page of memory has its "
    "blocks or its salt; another tenant's are read back whole",
)
@pytest.mark.scenario(
    "B229", then="a tenant's data outlives the purge of another one, in memory, on disk, over a restart"
)
def test_nothing_of_a_purged_tenant_is_left_anywhere_and_another_tenants_is_whole(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine, StampedEngine(node.endpoint, salt="other") as other:
            for engine in (mine, other):
                store_all(engine)
            with whole_arena(node) as in_arena:
                assert len(in_arena(marks(mine))) == len(marks(mine))
                would = purge(node, "--tenant", SALT, "--dry-run")
                assert matched(mine) == [BLOCKS] * 3
                receipt = purge(node, "--tenant-stdin", "--yes", stdin=f"{SALT}\n")
                assert matched(mine) == [0, 0, 0]
                assert files_with(node, [*marks(mine), SALT.encode()]) == []
                assert in_arena(marks(mine)) == []
                assert len(in_arena(marks(other))) == len(marks(other))
            assert would["phase"] == "preview"
            assert would["blocks"] == receipt["blocks"] == 3 * BLOCKS
            assert (receipt["phase"], receipt["complete"], receipt["extents"]) == ("gone", True, would["extents"])
            assert receipt["removed_files"] == receipt["index_rows"] == receipt["extents"]
            assert 0 < receipt["asked"] <= receipt["unreachable"] <= receipt["gone"]
            assert matched(other) == [BLOCKS] * 3
            assert mine.store(1, BLOCKS) == BLOCKS  # at once
            assert not mine.load(1, BLOCKS).is_wrong
        node.stop()
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine, StampedEngine(node.endpoint, salt="other") as other:
            assert matched(mine)[1:] == [0, 0]
            loaded = [other.load(prompt, BLOCKS) for prompt in PROMPTS]
            assert [(one.right, one.is_wrong) for one in loaded] == [(BLOCKS, False)] * 3


def test_an_engine_that_reads_keeps_its_bytes_and_the_receipt_names_it_until_it_lets_go(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine:
            store_all(mine)
            lease = mine.group.acquire(keys=mine.keys(1, BLOCKS))
            receipt = purge(node, "--tenant", SALT, "--yes", "--wait", "0", expected=4)
            assert (receipt["phase"], receipt["leases"]) == ("unreachable", 1)
            assert receipt["held_bytes"] == BLOCKS * BLOCK_BYTES
            assert receipt["recorded"]
            assert files_with(node, [*marks(mine), SALT.encode()]) == []
            assert matched(mine) == [0, 0, 0]
            with whole_arena(node) as in_arena:
                assert len(in_arena(marks(mine))) == BLOCKS
                lease.release()
                final = purge(node, "--job", receipt["job"])
                assert (final["phase"], final["leases"], final["complete"]) == ("gone", 0, True)
                assert in_arena(marks(mine)) == []


def test_a_node_without_a_directory_wipes_its_memory_too(tmp_path: Path) -> None:
    with Node(tmp_path, memory_only=True) as node:
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine, StampedEngine(node.endpoint) as other:
            for engine in (mine, other):
                for prompt in PROMPTS:
                    engine.store(prompt, BLOCKS)
            with whole_arena(node) as in_arena:
                assert purge(node, "--tenant", SALT, "--yes")["phase"] == "gone"
                assert in_arena(marks(mine)) == []
                assert len(in_arena(marks(other))) == len(marks(other))
            assert (matched(mine), matched(other)) == ([0, 0, 0], [BLOCKS] * 3)


STAGES = {
    "storage": ("recorded", "files", "crossed out"),
    "front": ("files", "crossed out"),
    "supervisor": ("index", "flushed"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", STAGES)
def test_a_kill_in_the_middle_leaves_a_purge_that_is_gone_through_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    barriers = Barriers(tmp_path / "barriers")
    monkeypatch.setenv(FOLDER, str(tmp_path / "barriers"))
    with Node(tmp_path, replaced=("files=e2e.held_purges:HeldPurges",)) as node:
        node.start()
        with StampedEngine(node.endpoint, salt="other") as other:
            store_all(other)
        for stage in STAGES[victim]:
            with StampedEngine(node.endpoint, salt=SALT) as mine:
                store_all(mine)
                wanted = [*marks(mine), SALT.encode()]
            barriers.arm(stage)
            asking = command(node, "--tenant", SALT, "--yes")
            wait_until(lambda stage=stage: barriers.is_reached(stage), f"a purge has come to {stage}")
            node.kill(victim)
            barriers.clear()
            if victim == "supervisor":
                node.start()
            receipt = finish(asking)
            assert receipt["phase"] == "gone", f"{victim} at {stage}: {receipt}"
            assert files_with(node, wanted) == [], f"{victim} at {stage}"
            with StampedEngine(node.endpoint, salt=SALT) as mine, whole_arena(node) as in_arena:
                assert matched(mine) == [0, 0, 0], f"{victim} at {stage}"
                assert in_arena(wanted) == []
            assert node.data_dir is not None
            assert list((node.data_dir / "purges").iterdir()) == []
        with StampedEngine(node.endpoint, salt="other") as other:
            loaded = [other.load(prompt, BLOCKS) for prompt in PROMPTS]
            assert [(one.right, one.is_wrong) for one in loaded] == [(BLOCKS, False)] * 3


def test_a_purge_that_nobody_asks_about_any_more_goes_on_and_a_kill_right_after_it_changes_nothing(
    tmp_path: Path,
) -> None:
    with Node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine:
            store_all(mine)
            wanted = [*marks(mine), SALT.encode()]
        with connect_operator(node.endpoint) as operator:
            operator.purge(tenant=SALT, job=b"nobody asks 0001")
            wait_until(
                lambda: operator.purge(job=b"nobody asks 0001").phase != "removing", "it is unreachable by itself"
            )
        node.kill("supervisor")
        assert files_with(node, wanted) == []
        node.start()
        with StampedEngine(node.endpoint, salt=SALT) as mine:
            assert matched(mine) == [0, 0, 0]


def test_a_node_with_a_damaged_record_of_a_purge_does_not_start_and_says_what_to_do(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        node.stop()
        assert node.data_dir is not None
        record = node.data_dir / "purges" / ("ab" * 16)
        record.write_bytes(b"damaged")
        process = node.spawn()
        process.communicate(timeout=60)
        assert process.returncode == 2
        assert "ask for the purge again" in node.log()
        record.unlink()
        node.start()
        node.stop()
