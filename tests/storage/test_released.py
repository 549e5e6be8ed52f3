from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from tests.storage.released import FOLDER, fixture, make, released_samples
from tests.storage.samples import Sample
from tests.storage.test_recovery import keys_of, start
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import FORMAT_VERSION, PLAIN_VERSION, READERS, Header, decode_header, decode_prefix


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
    samples = released_samples(version)
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
    make(tmp_path / "data", PLAIN_VERSION)
    assert files_below(tmp_path / "data") == files_below(fixture(PLAIN_VERSION))


@pytest.mark.scenario(
    "B106", then="what is made smaller has the same headers and blocks, whatever the codec's library made of them"
)
def test_today_smaller_files_are_written_as_in_the_fixture_but_for_what_the_codec_makes_of_a_block(
    tmp_path: Path,
) -> None:
    make(tmp_path / "data", FORMAT_VERSION)
    written, released = files_below(tmp_path / "data"), files_below(fixture(FORMAT_VERSION))
    assert set(written) == set(released)
    versions = set()
    for path, raw in written.items():
        if not path.endswith(".kv"):
            assert raw == released[path]
            continue
        ours, theirs = (decode_header(one) for one in (raw, released[path]))
        assert settled(ours) == settled(theirs)
        assert ours.payload_bytes <= theirs.payload_bytes + ours.num_blocks * 4096
        versions.add(decode_prefix(raw).version)
    assert versions == {PLAIN_VERSION, FORMAT_VERSION}


def settled(header: Header) -> Header:
    """Without what another release of the library may do otherwise."""
    return msgspec.structs.replace(header, lengths=b"", stored_checksums=b"")


def test_every_format_that_is_read_has_its_fixture() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == [f"format-{version}" for version in sorted(READERS)]
