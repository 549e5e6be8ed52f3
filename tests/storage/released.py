"""Data directories as each format version made them, for the tests that open them: `fixtures/format-<version>/`.

`python -m tests.storage.released` makes the one of the current version where it is missing. What is there is never
written over: whoever changes what is written needs another version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.storage.samples import Sample, noise
from tierkv.core.instructions import ManifestEntry, OpenNamespace
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import FORMAT_VERSION, PLAIN_VERSION
from tierkv.storage.namespace import write_namespace

FOLDER = Path(__file__).parent / "fixtures"
STORE_ID = "5e" * 16


def released_samples(version: int) -> list[Sample]:
    """What lies in each of them: two groups, extents of a whole and of half a block more than a page. In that of
    version 2 most become smaller, one doesn't, and one has blocks of either kind."""
    if version == FORMAT_VERSION:
        mixed = Sample(num_blocks=3, seed=4_000, block_bytes=16_384, like_kv=True)
        mixed.put(1, noise("mixed", 16_384))
        return [
            Sample(num_blocks=2, seed=1_000, block_bytes=16_384, like_kv=True),
            Sample(num_blocks=1, seed=2_000, block_bytes=16_384, like_kv=True, extras={0: [b"image"]}),
            Sample(num_blocks=1, seed=2_500, block_bytes=16_384),
            Sample(num_blocks=2, seed=3_000, block_bytes=10_001, like_kv=True),
            mixed,
        ]
    return [
        Sample(num_blocks=2, seed=1_000),
        Sample(num_blocks=1, seed=2_000, extras={0: [b"image"]}),
        Sample(num_blocks=2, seed=3_000, block_bytes=1000),
    ]


def fixture(version: int) -> Path:
    return FOLDER / f"format-{version}"


def make(path: Path, version: int) -> None:
    """What today's code writes, without what differs from one run to another."""
    codec = FileCodec.RAW if version == PLAIN_VERSION else FileCodec.ZSTD
    with DataDirectory.open(path, codec=codec) as directory:
        for sample in released_samples(version):
            manifest = (ManifestEntry("model.safetensors", 123, "cd" * 32),)
            opened = OpenNamespace(group=sample.group, identity=sample.identity, model_name="small", manifest=manifest)
            write_namespace(directory, opened)
            sample.write(directory)
        store_id = directory.store_id
    stamp = path / "FORMAT"
    stamp.write_text(stamp.read_text().replace(store_id, STORE_ID))
    for name in ("digests", "index", "quarantine", "tmp"):
        shutil.rmtree(path / name)  # empty, and made again by whoever opens it


if __name__ == "__main__":
    if not fixture(FORMAT_VERSION).exists():
        make(fixture(FORMAT_VERSION), FORMAT_VERSION)
        print(f"{fixture(FORMAT_VERSION)} written")
