from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.storage.released import FOLDER, fixture, make, released_samples
from tests.storage.samples import Sample
from tests.storage.test_recovery import keys_of, start
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import FORMAT_VERSION, READERS


def files_below(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@pytest.mark.scenario(
    "B106",
    then="a data directory of each released format opens and all of its extents are hits, stores work at once, and"
    " nothing is asked of anybody",
)
@pytest.mark.scenario("B114", then="a data directory of an older format that is still read is used as it is")
@pytest.mark.parametrize("version", sorted(READERS))
def test_a_data_directory_of_every_format_that_is_read_opens_and_hits(tmp_path: Path, version: int) -> None:
    shutil.copytree(fixture(version), tmp_path / "data")
    samples = released_samples()
    with DataDirectory.open(tmp_path / "data") as directory:
        told = start(directory)
        assert set(told.rows) == keys_of(samples)
        assert set(told.groups) == {sample.group for sample in samples}
        recovered = told.recovered
        assert (recovered.quarantined, recovered.foreign, recovered.unknown_format, recovered.unreadable) == (
            0,
            0,
            0,
            0,
        )
        for sample in samples:
            assert sample.read(directory).valid == sample.num_blocks
            assert [sample.read_back(index) for index in range(sample.num_blocks)] == sample.blocks
        another = Sample(seed=9_000)
        another.write(directory)
        assert another.read(directory).valid == 3


@pytest.mark.scenario("B106", then="what is written differs in no byte from the fixture of the current format")
def test_today_every_file_is_written_as_in_the_fixture_of_its_format(tmp_path: Path) -> None:
    """Fails? Then the format has changed: it needs another version, a reader for this one, and a fixture of its own."""
    make(tmp_path / "data")
    assert files_below(tmp_path / "data") == files_below(fixture(FORMAT_VERSION))


def test_every_format_that_is_read_has_its_fixture() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"format-{version}" for version in sorted(READERS)]
