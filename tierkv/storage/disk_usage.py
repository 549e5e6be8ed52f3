"""What a data directory takes on its disk, as the file system counts it: the same sums as `du`, by what the files are.

extents      .kv files under names of ours          descriptions   model.json, identity.json, FORMAT, LOCK, records
index        LMDB                                   digests        of weight files
quarantine   damaged files set aside                journal        what moved, and what recounts found
folders      the directories themselves
temporary    being written, or left by a dead writer
foreign      everything else; tierkv does not touch it
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tierkv.storage.names import (
    DIGESTS,
    DISK_INDEX,
    DISK_PURGES,
    INDEX,
    JOURNAL,
    MODELS,
    PINS,
    PURGES,
    QUARANTINE,
    STARTS,
    TEMP,
    VERDICTS,
    ExtentName,
    Parts,
)
from tierkv.storage.namespace import IDENTITY_FILE, MODEL_FILE
from tierkv.storage.stamp import FORMAT, LOCK

KINDS = ("extents", "index", "quarantine", "temporary", "digests", "journal", "descriptions", "folders", "foreign")

BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own

_OF_A_FOLDER = {
    INDEX: "index",
    DISK_INDEX: "index",
    DISK_PURGES: "descriptions",
    QUARANTINE: "quarantine",
    TEMP: "temporary",
    DIGESTS: "digests",
    JOURNAL: "journal",
    PURGES: "descriptions",
    PINS: "descriptions",
    STARTS: "descriptions",
    VERDICTS: "descriptions",
}


@dataclass(slots=True, kw_only=True)
class DiskUse:
    """`apparent_bytes` are lengths of files, `allocated_bytes` what the disk gave for them: less where they have holes
    or share an inode, more where blocks are larger than what is in them."""

    kind: str
    files: int = 0
    apparent_bytes: int = 0
    allocated_bytes: int = 0


def measure(root: Path) -> list[DiskUse]:
    """One row for each of KINDS. An inode counts once, under the first name that is met; links are not followed; what
    vanishes meanwhile is not counted. Raises OSError when `root` can't be listed."""
    uses = {kind: DiskUse(kind=kind) for kind in KINDS}
    seen: set[tuple[int, int]] = set()
    _count(uses["folders"], os.stat(root, follow_symlinks=False))
    _measure_folder(str(root), (), uses, seen)
    return list(uses.values())


def _measure_folder(path: str, parts: Parts, uses: dict[str, DiskUse], seen: set[tuple[int, int]]) -> None:
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                name = (*parts, entry.name)
                if stat.S_ISDIR(status.st_mode):
                    _count(uses["folders"], status)
                    _measure_folder(entry.path, name, uses, seen)
                    continue
            except FileNotFoundError:
                continue  # removed or renamed since it was listed
            if status.st_nlink > 1:
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
            _count(uses[_kind_of(name, status)], status)


def _count(use: DiskUse, status: os.stat_result) -> None:
    use.files += 1
    use.apparent_bytes += status.st_size
    use.allocated_bytes += status.st_blocks * BLOCK_BYTES


def _kind_of(parts: Parts, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "foreign"
    if len(parts) == 1:
        return "descriptions" if parts[0] in (FORMAT, LOCK) else "foreign"
    if parts[0] != MODELS:
        return _OF_A_FOLDER.get(parts[0], "foreign") if len(parts) == 2 else "foreign"
    if ExtentName.parse(parts) is not None:
        return "extents"
    is_description = (len(parts), parts[-1]) in ((3, MODEL_FILE), (4, IDENTITY_FILE))
    return "descriptions" if is_description else "foreign"
