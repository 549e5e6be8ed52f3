"""Damage that is done on purpose, and what it says of itself."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.samples import Sample, path_of
from tierkv.core.keys import split_keys
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import verify_file
from tierkv.storage.names import INDEX
from tierkv.torture.breaking import INDEX_FAULTS, break_index, extents_by_first_key, extents_bytes, flip_bits


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


@pytest.mark.parametrize("seed", range(12))
def test_a_flip_says_from_which_block_on_the_file_is_no_good(directory: DataDirectory, seed: int) -> None:
    sample = Sample(num_blocks=3)
    sample.write(directory)
    path = path_of(directory, sample.name)
    before = path.read_bytes()
    assert verify_file(directory, sample.name, pause=lambda _: None).reason is None
    flipped = flip_bits(path, random.Random(seed))
    after = path.read_bytes()
    (at,) = (at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
    header = len(before) - 3 * sample.slot_bytes
    assert flipped.first_bad == max(0, (at - header) // sample.slot_bytes)
    assert flipped.bad_key == split_keys(sample.keys)[flipped.first_bad]
    assert verify_file(directory, sample.name, pause=lambda _: None).reason is not None


def test_extents_are_found_by_what_names_them(directory: DataDirectory) -> None:
    samples = [Sample(seed=seed) for seed in (1, 50)]
    for sample in samples:
        sample.write(directory)
    found = extents_by_first_key(directory.path)
    assert found == {split_keys(sample.keys)[0]: [path_of(directory, sample.name)] for sample in samples}
    assert extents_bytes(directory.path) == sum(path.stat().st_size for (path,) in found.values())


def test_files_and_folders_may_go_while_they_are_measured(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(seed=1)
    sample.write(directory)
    path = path_of(directory, sample.name)
    walk = os.walk

    def walk_and_lose(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for found in walk(top):
            if path.parent.name in found[1]:
                path.unlink()
                path.parent.rmdir()
            yield found

    monkeypatch.setattr("tierkv.torture.breaking.os.walk", walk_and_lose)
    assert extents_bytes(directory.path) == 0
    sample.write(directory)
    monkeypatch.setattr("tierkv.torture.breaking.os.walk", walk)
    monkeypatch.setattr("tierkv.torture.breaking.extents_by_first_key", lambda _: {b"": [path, path.with_name("gone")]})
    assert extents_bytes(directory.path) == path.stat().st_size


@pytest.mark.parametrize("how", INDEX_FAULTS)
def test_an_index_is_not_what_it_was(tmp_path: Path, how: str) -> None:
    folder = tmp_path / INDEX
    folder.mkdir()
    (folder / "data.mdb").write_bytes(bytes(65_536))
    break_index(tmp_path, how, random.Random(1))
    assert not folder.exists() or (folder / "data.mdb").read_bytes() != bytes(65_536)
