"""What takes how much room, without a node: from the journal's balances, or from the files themselves.

The balances are a fold over a checkpoint and the rows behind it: reading them takes as long for ten files as for a
million. Counting the files takes a look at each, also in the disk directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from tierkv.config import Settings
from tierkv.core.journal import NOBODY, Account
from tierkv.errors import DataDirectoryError, IncompleteError, StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal import Journal
from tierkv.storage.namespace import read_identity, read_model
from tierkv.storage.recount import files_of
from tierkv.storage.walk import GroupFolder, Strays, find_groups
from tierkv.wire.messages import UsageRow
from tierkv_cli.offline import find_disk, open_disk
from tierkv_cli.offline_journal import locked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv_cli.du import Line

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineUse:
    """`source`: journal, the sums as they were at `as_of`, seconds since 1970; or scan, files counted then, and
    `files` says how many. `notes`: why the figures may be off, in words. `disk_dir` where it was looked for."""

    rows: tuple[UsageRow, ...]
    source: str
    as_of: float
    files: int | None
    notes: tuple[str, ...]
    disk_dir: Path | None = None


def usage_offline(
    settings: Settings, *, scan: bool, measure: bool = False, progress: Progress = lambda done, total: None
) -> OfflineUse:
    """`measure`: the disk directory is wanted as well, whatever tells the sums. Raises DataDirectoryInUse when a node
    has the lock after all, DataDirectoryError when there is nothing, IncompleteError when there is no journal to tell
    it."""
    with locked(settings, read_only=True) as directory:
        disk_dir, problems = None, []
        if scan or measure:
            try:
                disk_dir = find_disk(settings, directory)
            except DataDirectoryError as error:
                problems.append(f"not looked at: the disk tier: {error}")
        found = _counted(directory, settings, disk_dir, progress) if scan else _booked(directory, settings)
        return replace(found, disk_dir=disk_dir, notes=(*found.notes, *problems))


def _counted(directory: DataDirectory, settings: Settings, disk_dir: Path | None, progress: Progress) -> OfflineUse:
    nvme, disk = _count(directory, progress), _Count([], {}, 0, [])
    groups = frozenset(folder.group for folder in nvme.folders)
    rows: list[UsageRow] = []
    try:
        if disk_dir is not None:
            with open_disk(disk_dir, settings) as opened:
                disk = _count(opened, progress)
                others = {group: size for group, size in disk.sizes.items() if group not in groups}
                rows += _rows(opened, disk.folders, {}, others)
    except (DataDirectoryError, StorageError) as error:
        disk.problems.append(f"the disk tier: {error}")
    ours = {group: size for group, size in disk.sizes.items() if group in groups}
    return OfflineUse(
        rows=(*_rows(directory, nvme.folders, nvme.sizes, ours), *rows),
        source="scan",
        as_of=time.time(),
        files=nvme.files + disk.files,
        notes=tuple(f"not looked at: {problem}" for problem in (*nvme.problems, *disk.problems)),
    )


@dataclass(frozen=True, slots=True)
class _Count:
    """Of one directory: bytes by group, and what of it could not be looked at."""

    folders: list[GroupFolder]
    sizes: dict[bytes, int]
    files: int
    problems: list[str]


def _count(directory: DataDirectory, progress: Progress) -> _Count:
    strays = Strays()
    folders = list(find_groups(directory, strays))
    sizes: dict[bytes, int] = {}
    files = 0
    for done, folder in enumerate(folders):
        progress(done, len(folders))
        for _, size in files_of(directory, folder, strays, []):
            sizes[folder.group] = sizes.get(folder.group, 0) + size
            files += 1
    return _Count(folders, sizes, files, strays.problems)


def _booked(directory: DataDirectory, settings: Settings) -> OfflineUse:
    try:
        journal = Journal(
            directory, max_bytes=settings.journal_bytes, max_age_seconds=1e12, now=time.time(), read_only=True
        )
    except (StorageError, UnknownFormat) as error:
        raise IncompleteError(f"the journal can't be read: {error}; --scan counts the files") from error
    if journal.is_new:
        raise IncompleteError("this data directory has no journal yet; --scan counts its files")
    nvme, disk = (journal.balances.of_account(account) for account in (Account.NVME, Account.DISK))
    rows = tuple(_rows(directory, list(find_groups(directory, Strays())), nvme, disk))
    begun = len(journal.balances.begun)
    moving = (f"{begun:,} files were being written or removed when the node ended",) if begun else ()
    excuse = (journal.balances.excuse,) if journal.balances.excuse else ()
    notes = (*excuse, *journal.losses, *moving)
    return OfflineUse(rows=rows, source="journal", as_of=journal.written_at, files=None, notes=notes)


def _rows(
    directory: DataDirectory, folders: list[GroupFolder], nvme: Mapping[bytes, int], disk: Mapping[bytes, int]
) -> Iterator[UsageRow]:
    """`disk` is what this node knew of the disk tier when it ended."""
    where = {folder.group: folder.fingerprint for folder in folders}
    for group in dict.fromkeys((*nvme, *disk)):
        yield _row(directory, where.get(group, ""), group, nvme.get(group, 0), disk.get(group, 0))


def _row(directory: DataDirectory, fingerprint: str, group: bytes, nvme_bytes: int, disk_bytes: int) -> UsageRow:
    """What can't be read of a group's identity is left out: it is shown by its digests."""
    words = model = None
    try:
        if fingerprint:
            words, model = read_identity(directory, fingerprint, group), read_model(directory, fingerprint)
    except StorageError:
        pass
    identity = words.identity if words is not None else None
    name = words.model_name if words is not None else model.model_name if model is not None else ""
    return UsageRow(
        fingerprint=fingerprint,
        group=group,
        model_name="(purged)" if group == NOBODY else name,
        adapter=identity.adapter if identity is not None else "",
        adapter_name="",
        salt=blake3(identity.salt.encode()).hexdigest()[:8] if identity is not None and identity.salt else "",
        dtype=identity.layout.dtype if identity is not None else "",
        layout=identity.layout.engine if identity is not None else "",
        codec=identity.layout.codec if identity is not None else "",
        block_tokens=identity.layout.block_tokens if identity is not None else 0,
        block_bytes=identity.layout.total_block_bytes if identity is not None else 0,
        ranks=identity.parallel.shards if identity is not None else 1,
        extents=0,
        tokens=0,
        host_bytes=0,
        nvme_bytes=nvme_bytes,
        disk_bytes=disk_bytes,
        last_used=0.0,
        persistent=True,
        reachable=False,
    )


# ---- what is shown


def as_object(found: OfflineUse, lines: list[Line], by: str) -> dict[str, object]:
    from tierkv_cli.du import total

    return {
        "by": by,
        "source": found.source,
        "as_of": found.as_of,
        "lines": [line.names | _numbers(line) for line in lines],
        "total": _numbers(total(lines)),
        "files": found.files,
        "notes": list(found.notes),
    }


def view(found: OfflineUse, lines: list[Line], by: str) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.du import HEADS, labels, total
    from tierkv_cli.output import ago, at, count, table

    if found.source == "scan":
        yield f"no node is running; {count(found.files or 0, 'file')} counted now, {at(found.as_of)}"
    else:
        yield (
            f"no node is running; the journal's balances as of {at(found.as_of)} ({ago(found.as_of)}): no file was "
            f"looked at, --scan counts them"
        )
    yield ""
    if not lines:
        yield "nothing is on disk"
        return
    heads = HEADS[by]
    tiers = ("nvme", "disk") if any(line.disk_bytes for line in lines) else ("nvme",)
    shown = table(*heads, *tiers, numbers=tiers)
    for line in lines:
        shown.add_row(*labels(line, by), *(human_size(_numbers(line)[f"{tier}_bytes"]) for tier in tiers))
    if len(lines) > 1:
        sums = _numbers(total(lines))
        shown.add_section()
        shown.add_row("total", *[""] * (len(heads) - 1), *(human_size(sums[f"{tier}_bytes"]) for tier in tiers))
    yield shown


def _numbers(line: Line) -> dict[str, int]:
    return {"groups": line.groups, "nvme_bytes": line.nvme_bytes, "disk_bytes": line.disk_bytes}
