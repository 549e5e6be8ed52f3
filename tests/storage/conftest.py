from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierkv.storage.directory import DataDirectory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(params=["disk", "memory", "overlay"])
def any_file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory, once where the tests run, once on tmpfs, and once on an overlay where we may mount one."""
    if request.param == "disk":
        yield tmp_path
        return
    if request.param == "overlay":
        with overlay(tmp_path) as merged:
            yield merged
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs to write to")
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tkv"))
    yield path
    shutil.rmtree(path)


@contextmanager
def overlay(folder: Path) -> Iterator[Path]:
    """A mounted overlay; what is in `folder`/lower before is its lower layer. Skips the test where mounting is not
    allowed."""
    for name in ("lower", "upper", "work", "merged"):
        (folder / name).mkdir(exist_ok=True)
    options = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(folder / "merged")]
    may_mount = os.geteuid() == 0 and shutil.which("mount") is not None
    if not may_mount or subprocess.run(command, check=False, capture_output=True, timeout=20).returncode:
        pytest.skip("no overlay can be mounted here")
    try:
        yield folder / "merged"
    finally:
        subprocess.run(["umount", str(folder / "merged")], check=True, timeout=20)
