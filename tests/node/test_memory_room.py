from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.node.memory_room import MemoryRoom, memory_room, require_memory

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\nHugePages_Total: 0\n")
    return tmp_path


def make_v2_group(root: Path, path: str, limit: str, usage: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive_file}\n")


def test_without_control_groups_the_machine_decides(root: Path) -> None:
    assert memory_room(root) == MemoryRoom(32 * GIB, "this machine")


def test_the_tightest_group_above_us_decides(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user/job\n")
    make_v2_group(root, "user", str(10 * GIB), 4 * GIB)
    make_v2_group(root, "user/job", "max", 3 * GIB)
    assert memory_room(root) == MemoryRoom(6 * GIB, "this control group")


def test_page_cache_that_the_kernel_would_give_back_counts_as_room(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job\n")
    make_v2_group(root, "job", str(10 * GIB), 9 * GIB, inactive_file=5 * GIB)
    assert memory_room(root).num_bytes == 6 * GIB


def test_version_1_groups_count_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:cpu,cpuacct:/job\n4:memory:/job\n")
    folder = root / "sys/fs/cgroup/memory/job"
    write(folder / "memory.limit_in_bytes", f"{8 * GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{GIB}\n")
    write(folder / "memory.stat", "total_inactive_file 0\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_room(root) == MemoryRoom(7 * GIB, "this control group")


def test_this_machine_says_something_sensible() -> None:
    assert memory_room().num_bytes > 0


def test_a_start_waits_for_memory_that_is_being_let_go_of() -> None:
    rooms = iter([MemoryRoom(1, "x"), MemoryRoom(1, "x"), MemoryRoom(GIB, "x")])
    pauses: list[float] = []
    require_memory(GIB, 5.0, room=lambda: next(rooms), pause=pauses.append)
    assert len(pauses) == 2


@pytest.mark.scenario("B142", then="memory that is not there is refused at start, with the bytes needed and available")
def test_what_is_missing_is_said_in_numbers() -> None:
    with pytest.raises(ConfigError, match="host_bytes: 2048 MiB are needed and 1024 MiB are available on x"):
        require_memory(2 * GIB, 0.0, room=lambda: MemoryRoom(GIB, "x"))
