from __future__ import annotations

import os
from pathlib import Path

from tests.config.machines import machine
from tierkv.config import GiB, Machine, cgroup_limit


def cgroup_files(root: Path, membership: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert cgroup_limit(tmp_path) is None


def test_version_2_takes_the_smallest_limit_on_the_way_to_the_root(tmp_path):
    files = {"a/b/memory.max": "max\n", "a/memory.max": f"{2 * GiB}\n", "memory.max": f"{8 * GiB}\n"}
    assert cgroup_limit(cgroup_files(tmp_path, "0::/a/b\n", files)) == 2 * GiB


def test_version_2_in_a_container_that_sees_only_its_own_root(tmp_path):
    assert cgroup_limit(cgroup_files(tmp_path, "0::/\n", {"memory.max": f"{2 * GiB}\n"})) == 2 * GiB


def test_a_path_of_the_host_that_is_not_visible_falls_back_to_the_mount(tmp_path):
    root = cgroup_files(tmp_path, "0::/system.slice/docker-1\n", {"memory.max": f"{3 * GiB}\n"})
    assert cgroup_limit(root) == 3 * GiB


def test_version_1_has_its_own_mount_and_a_number_for_unlimited(tmp_path):
    membership = "9:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/x/memory.limit_in_bytes": f"{GiB}\n",
        "cpu/x/memory.limit_in_bytes": "1\n",
    }
    assert cgroup_limit(cgroup_files(tmp_path, membership, files)) == GiB


def test_no_limit_anywhere(tmp_path):
    assert cgroup_limit(cgroup_files(tmp_path, "0::/a\n", {"a/memory.max": "max\n"})) is None


def test_the_smaller_of_memory_and_control_group_is_the_limit_and_named():
    assert machine().limit_bytes == 32 * GiB
    assert "machine" in machine().limit_name
    assert machine(cgroup_bytes=2 * GiB).limit_bytes == 2 * GiB
    assert "control group" in machine(cgroup_bytes=2 * GiB).limit_name
    assert machine(cgroup_bytes=64 * GiB).limit_bytes == 32 * GiB


def test_a_directory_that_is_not_there_yet_is_on_its_parents_file_system(tmp_path):
    here = Machine.here()
    found = os.statvfs(tmp_path)
    assert here.file_system_bytes(tmp_path / "not" / "yet") == found.f_blocks * found.f_frsize
    assert here.memory_bytes > 0
