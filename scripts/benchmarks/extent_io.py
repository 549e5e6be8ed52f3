"""Extents between arena and disk beside the same bytes moved raw, alternating in one run.

    python scripts/benchmarks/extent_io.py DIRECTORY [--block-bytes N] [--rounds N]

DIRECTORY is on the disk to measure; a data directory is made below it and removed again. Raw: one file of the same
size, O_DIRECT, in pieces of 2 MiB, with fdatasync after writing. Ours: header, checksums, fdatasync, rename; the flush
of the directories, which a node does once for many files, is shown for itself. Order within a round is random. Medians.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import Read, Write
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import WrittenFile, read_blocks, write_extent
from tierkv.storage.format import stored_bytes
from tierkv.storage.names import Parts

EXTENT_BYTES = 16 * 2**20
PIECE_BYTES = 2 * 2**20
BLOCK_TOKENS = 16


class Extents:
    """Extents of the same shape and different keys, in an arena of two extents: one written from, one read into."""

    def __init__(self, directory: DataDirectory, block_bytes: int) -> None:
        self.directory = directory
        self.slot_bytes = stored_bytes(block_bytes)
        self.num_blocks = max(1, EXTENT_BYTES // self.slot_bytes)
        self.num_bytes = self.num_blocks * self.slot_bytes
        self.arena = memoryview(mmap.mmap(-1, 2 * self.num_bytes))
        self.arena[: self.num_bytes] = os.urandom(self.num_bytes)
        layout = Layout(
            dtype="bfloat16", block_bytes=(block_bytes,), axes="layer,kv", block_tokens=BLOCK_TOKENS, engine="b"
        )
        self.identity = Identity(weights="ab" * 32, config="", layout=layout)
        self.group = self.identity.group_key()
        self.block_bytes = block_bytes

    def write(self, number: int) -> tuple[Parts, ...]:
        tokens = pack_tokens([number, *range(self.num_blocks * BLOCK_TOKENS - 1)])
        keys = chain_keys(self.group, tokens, BLOCK_TOKENS)
        slots = [index * self.slot_bytes for index in range(self.num_blocks)]
        write = Write(number, self.identity.weights, self.group, 0, keys[:32], self.group, 0, BLOCK_TOKENS,
                      self.block_bytes, keys, tokens, slots, 1.0, 1.0)  # fmt: skip
        written = write_extent(self.directory, self.arena, write, identity=self.identity)
        assert isinstance(written, WrittenFile), written
        return written.flush

    def flush(self, folders: tuple[Parts, ...]) -> None:
        for folder in folders:
            self.directory.flush(folder)

    def read(self, number: int) -> None:
        tokens = pack_tokens([number, *range(self.num_blocks * BLOCK_TOKENS - 1)])
        keys = chain_keys(self.group, tokens, BLOCK_TOKENS)
        slots = [self.num_bytes + index * self.slot_bytes for index in range(self.num_blocks)]
        read = Read(number, self.identity.weights, self.group, 0, keys[:32], self.group, 0, BLOCK_TOKENS,
                    self.block_bytes, keys, 0, slots)  # fmt: skip
        outcome = read_blocks(self.directory, self.arena, read, identity=self.identity)
        assert outcome.valid == self.num_blocks, outcome


def write_raw(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    for start in range(0, len(view), PIECE_BYTES):
        os.pwritev(fd, [view[start : start + PIECE_BYTES]], start)
    os.fdatasync(fd)
    os.close(fd)


def read_raw(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for start in range(0, len(view), PIECE_BYTES):
        os.preadv(fd, [view[start : start + PIECE_BYTES]], start)
    os.close(fd)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(extents: Extents, raw: Path, number: int, seconds: dict[str, list[float]]) -> None:
    source, target = extents.arena[: extents.num_bytes], extents.arena[extents.num_bytes :]
    folders: list[tuple[Parts, ...]] = []
    writes = [
        ("raw write", lambda: write_raw(raw, source)),
        ("write", lambda: folders.append(extents.write(number))),
    ]
    reads = [("raw read", lambda: read_raw(raw, target)), ("read", lambda: extents.read(number))]
    random.shuffle(writes)
    random.shuffle(reads)
    for name, work in [*writes, ("flush", lambda: extents.flush(folders[0])), *reads]:
        seconds[name].append(timed(work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.directory))
    seconds: dict[str, list[float]] = {"raw write": [], "write": [], "flush": [], "raw read": [], "read": []}
    try:
        with DataDirectory.open(root / "data") as directory:
            extents = Extents(directory, options.block_bytes)
            for number in range(options.rounds):
                one_round(extents, root / f"raw-{number}", number, seconds)
            print(f"{extents.num_blocks} blocks of {options.block_bytes} bytes, O_DIRECT: {directory.direct_io}")
    finally:
        shutil.rmtree(root)
    for name, found in seconds.items():
        median = statistics.median(found)
        print(f"{name:10} {median * 1e3:7.2f} ms  {extents.num_bytes / median / 1e9:5.2f} GB/s")
    for name in ("write", "read"):
        ratio = statistics.median(seconds[f"raw {name}"]) / statistics.median(seconds[name])
        print(f"{name}: {ratio:.2f} of raw")


if __name__ == "__main__":
    main()
