"""Files of format 1 as they were written when the format was fixed, beside what they must hold.

`python -m tests.storage.golden_files` writes those that are missing. An existing one is never written over: a writer
whose files differ from these writes another format, and needs another version.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.storage.samples import Sample, path_of
from tierkv.storage.directory import DataDirectory

FOLDER = Path(__file__).parent / "golden"


def golden_samples() -> dict[str, Sample]:
    return {
        "format-1-aligned.kv": Sample(num_blocks=2, block_bytes=4096, seed=11),
        "format-1-unaligned-extras.kv": Sample(
            num_blocks=2, block_bytes=1000, first_token=8, extras={0: [b"image", b""], 1: [bytes(range(256))]}, seed=12
        ),
        "format-1-long-header.kv": Sample(num_blocks=2, block_bytes=64, extras={1: [bytes(4000)]}, seed=13),
    }


def write_sample(sample: Sample) -> bytes:
    """The bytes that today's writer makes of a sample."""
    with tempfile.TemporaryDirectory() as path, DataDirectory.open(path) as directory:
        sample.write(directory)
        return path_of(directory, sample.name).read_bytes()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, sample in golden_samples().items():
        path = FOLDER / name
        if path.exists():
            print(f"{path} is there")
            continue
        path.write_bytes(write_sample(sample))
        print(f"{path} written")


if __name__ == "__main__":
    main()
