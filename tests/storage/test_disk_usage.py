from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.storage.samples import Sample, path_of
from tierkv.core.instructions import OpenNamespace
from tierkv.storage.directory import DataDirectory
from tierkv.storage.disk_usage import DiskUse, measure
from tierkv.storage.namespace import write_namespace


def of_kind(root: Path) -> dict[str, DiskUse]:
    return {use.kind: use for use in measure(root)}


def du(root: Path, *how: str) -> int:
    done = subprocess.run(["du", "-s", "--block-size=1", *how, str(root)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


@pytest.mark.scenario(
    "B243", then="allocated bytes are du's, with files of one byte to a megabyte, holes, and one inode under two names"
)
def test_the_sums_are_those_of_du(directory: DataDirectory) -> None:
    for number, size in enumerate((1, 1_000, 4_096, 70_000, 1_000_000)):
        sample = Sample(seed=100 * number + 1, num_blocks=1, block_bytes=size)
        write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity))
        sample.write(directory)
    (directory.path / "quarantine" / "1-checksum-x.kv").write_bytes(b"x" * 5_000)
    (directory.path / "tmp" / "left").write_bytes(b"x" * 9_000)
    (directory.path / "index" / "data.mdb").write_bytes(b"x" * 100_000)
    with (directory.path / "holes").open("wb") as file:
        file.truncate(50_000_000)
    os.link(path_of(directory, sample.name), directory.path / "models" / "second name")
    uses = of_kind(directory.path)
    assert sum(use.allocated_bytes for use in uses.values()) == du(directory.path)
    assert sum(use.apparent_bytes for use in uses.values()) == du(directory.path, "--apparent-size")
    known = ("index", "quarantine", "temporary", "digests", "descriptions")
    assert [uses[kind].files for kind in known] == [1, 1, 1, 0, 7]  # FORMAT, one model, five groups
    assert uses["extents"].files + uses["foreign"].files == 6, "an inode with two names, and the file with holes"
    assert uses["foreign"].apparent_bytes >= 50_000_000
    assert uses["foreign"].allocated_bytes < 2_000_000


def test_what_vanishes_meanwhile_is_not_counted(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory.path / "tmp" / "gone").write_bytes(b"x")
    real = os.scandir

    class Racing:
        def __init__(self, path: str) -> None:
            self.entries = list(real(path))

        def __enter__(self) -> list[os.DirEntry[str]]:
            for entry in self.entries:
                if entry.name == "gone":
                    os.unlink(entry.path)
            return self.entries

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Racing)
    assert of_kind(directory.path)["temporary"].files == 0


def test_links_are_not_followed(directory: DataDirectory, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100_000)
    (directory.path / "models" / "link").symlink_to(tmp_path / "large")
    (directory.path / "models" / "folder").symlink_to(tmp_path)
    foreign = of_kind(directory.path)["foreign"]
    assert (foreign.files, foreign.apparent_bytes < 10_000) == (2, True)
