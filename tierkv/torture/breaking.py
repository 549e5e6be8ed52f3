"""Damage to files of a data directory, on purpose: bits flipped in extents, an index that is lost or torn."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tierkv.core.keys import split_keys
from tierkv.storage.format import PREFIX_BYTES, decode_header, decode_prefix, stored_bytes
from tierkv.storage.names import EXTENT_SUFFIX, INDEX, MODELS, TEMP

INDEX_FAULTS = ("deleted", "truncated", "scribbled", "flipped", "garbage")


@dataclass(frozen=True)
class Flipped:
    """Bits of a file were flipped: from which of the extent's blocks on it is no good, and that block's key."""

    path: Path
    first_bad: int
    bad_key: bytes


def extents_by_first_key(data_dir: Path) -> dict[bytes, list[Path]]:
    """The files of each extent, one a rank. Folders may go meanwhile: the node removes empty ones."""
    found: dict[bytes, list[Path]] = {}
    for folder, _, names in os.walk(data_dir / MODELS):
        for path in (Path(folder, name) for name in names if name.endswith(EXTENT_SUFFIX)):
            found.setdefault(bytes.fromhex(path.stem), []).append(path)
    return found


def extents_bytes(data_dir: Path) -> int:
    """Of the files that are there; what goes meanwhile counts as gone."""
    return sum(_length(path) for paths in extents_by_first_key(data_dir).values() for path in paths)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def temp_files(data_dir: Path) -> list[str]:
    return sorted(path.name for path in (data_dir / TEMP).iterdir())


def flip_bits(path: Path, rng: random.Random) -> Flipped:
    """A few bits next to one another, anywhere in the file."""
    raw = path.read_bytes()
    prefix = decode_prefix(raw[:PREFIX_BYTES])
    header = decode_header(raw[: prefix.header_bytes])
    keys = split_keys(header.keys)
    at = rng.randrange(len(raw)) if rng.random() < 0.8 else rng.randrange(prefix.header_bytes)
    ends = itertools.accumulate(map(stored_bytes, header.block_lengths()), initial=prefix.header_bytes)
    bad = max(0, bisect.bisect_right(list(ends), at) - 1)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([raw[at] ^ rng.choice([1, 2, 4, 64, 128, 3, 255])]))
        file.flush()
        os.fsync(file.fileno())
    return Flipped(path, bad, keys[bad])


def break_index(data_dir: Path, how: str, rng: random.Random) -> None:
    """While no node runs on it."""
    folder = data_dir / INDEX
    if how == "deleted":
        shutil.rmtree(folder)
        return
    for path in [path for path in folder.iterdir() if path.is_file()]:
        size = path.stat().st_size
        match how:
            case "truncated":
                os.truncate(path, rng.randrange(size + 1) // 4096 * 4096)
            case "scribbled":
                _overwrite(path, rng.randrange(max(1, size)), rng.randbytes(20_000))
            case "flipped":
                for _ in range(8):
                    at = rng.randrange(max(1, size))
                    _overwrite(path, at, bytes([rng.randrange(256)]))
            case "garbage":
                path.write_bytes(rng.randbytes(size))


def _overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
