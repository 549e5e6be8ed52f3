"""Keys are compared whole. Here keys are made that agree in all but their last two bytes: whoever compares
less than all of a key takes one prompt's blocks for another's."""

from __future__ import annotations

from pathlib import Path

import blake3
import pytest

from tests.core.simulation import Bench, Prompt
from tests.storage.samples import Sample, path_of
from tierkv.core import keys as core_keys
from tierkv.core.grants import Lease
from tierkv.core.instructions import OpenNamespace, Rows
from tierkv.core.keys import KEY_BYTES
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.namespace import write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import recover

PROMPTS = 60


class CutDigest:
    """8 bits of the real digest, over and over, and two bytes that tell apart what collides in them."""

    def __init__(self, content: bytes) -> None:
        real = blake3.blake3(content).digest()
        self._digest = real[:1] * (KEY_BYTES - 2) + real[1:3]

    def digest(self) -> bytes:
        return self._digest


@pytest.fixture(autouse=True)
def cut_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_keys, "blake3", CutDigest)


def count_collisions(keys: list[bytes]) -> int:
    assert len(set(keys)) == len(keys)
    return len(keys) - len({key[:-2] for key in keys})


@pytest.mark.scenario(
    "B202",
    then="of keys alike in all but two bytes each loads its own, and none never stored matches, from disk too",
)
def test_each_prompt_finds_its_own_blocks_and_what_was_never_stored_finds_none() -> None:
    bench = Bench(host_slots=64, extent_blocks=2)
    stored = [bench.prompt(number, 7) for number in range(PROMPTS)]
    never = [bench.prompt(PROMPTS + number, 7) for number in range(PROMPTS)]
    assert count_collisions([prompt.key(0) for prompt in [*stored, *never]]) > 10
    for prompt in stored:
        bench.store_durably(prompt)
    for _ in ("in memory and on disk", "from disk"):
        for prompt in stored:
            assert bench.match(prompt)[0] == 2
            load(bench, prompt)
        assert [bench.match(prompt)[0] for prompt in never] == [0] * PROMPTS
        bench.start()


def load(bench: Bench, prompt: Prompt) -> None:
    """The bench compares every block with the stamp of its own key."""
    lease: Lease = bench.load(prompt)
    assert lease.blocks == 2
    bench.release(lease)


def test_names_headers_and_index_rows_tell_them_apart(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as directory:
        samples = [Sample(seed=10 * number, num_blocks=1, block_bytes=512) for number in range(60)]
        assert count_collisions([sample.name.key for sample in samples]) > 0
        for sample in samples:
            write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity))
            sample.write(directory)
        for sample in samples:
            assert sample.read(directory).valid == 1
            assert sample.read_back(0) == sample.blocks[0]
        for _ in ("from headers", "from the index"):
            reports: list[object] = []
            with (
                directory.folder(("index",)) as index_fd,
                Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
            ):
                quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
                recover(directory, catalog, quarantine, emit=reports.append, now=1_800_000_000.0)
            found = {row.key for report in reports if isinstance(report, Rows) for row in report.rows}
            assert found == {sample.name.key for sample in samples}
        one, other = by_collision(samples)
        path_of(directory, one.name).write_bytes(path_of(directory, other.name).read_bytes())
        assert one.read(directory).valid == 0


def by_collision(samples: list[Sample]) -> tuple[Sample, Sample]:
    seen: dict[bytes, Sample] = {}
    for sample in samples:
        twin = seen.setdefault(sample.name.key[:-2], sample)
        if twin is not sample:
            return twin, sample
    raise AssertionError("no two keys nearly agree")
