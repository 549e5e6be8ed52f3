from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.storage.directory import DataDirectory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(params=["disk", "memory"])
def any_file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory, once where the tests run and once on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs to write to")
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tkv"))
    yield path
    shutil.rmtree(path)
