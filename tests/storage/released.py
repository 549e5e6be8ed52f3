"""Data directories as each format version made them, for the tests that open them: `fixtures/format-<version>/`.

`python -m tests.storage.released` makes the one of the current version where it is missing. What is there is never
written over: whoever changes what is written needs another version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.storage.samples import Sample
from tierkv.core.instructions import ManifestEntry, OpenNamespace
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import FORMAT_VERSION
from tierkv.storage.namespace import write_namespace

FOLDER = Path(__file__).parent / "fixtures"
STORE_ID = "5e" * 16


def released_samples() -> list[Sample]:
    """What lies in each of them: two groups, extents of a whole and of half a block more than a page."""
    return [
        Sample(num_blocks=2, seed=1_000),
        Sample(num_blocks=1, seed=2_000, extras={0: [b"image"]}),
        Sample(num_blocks=2, seed=3_000, block_bytes=1000),
    ]


def fixture(version: int) -> Path:
    return FOLDER / f"format-{version}"


def make(path: Path) -> None:
    """What today's code writes, without what differs from one run to another."""
    with DataDirectory.open(path) as directory:
        for sample in released_samples():
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
        make(fixture(FORMAT_VERSION))
        print(f"{fixture(FORMAT_VERSION)} written")
