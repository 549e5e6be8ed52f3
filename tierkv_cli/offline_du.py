"""What takes how much room, without a node: from the journal's balances, or from the files themselves.

The balances are a fold over a checkpoint and the rows behind it: reading them takes as long for ten files as for a
million. Counting the files takes a look at each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from tierkv.config import Settings
from tierkv.core.journal import NOBODY, Account
from tierkv.errors import IncompleteError, StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal import Journal
from tierkv.storage.namespace import read_identity, read_model
from tierkv.storage.recount import files_of
from tierkv.storage.walk import GroupFolder, Strays, find_groups
from tierkv.wire.messages import UsageRow
from tierkv_cli.offline_journal import locked

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tierkv_cli.du import Line

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineUse:
    """`source`: journal, the sums as they were at `as_of`, seconds since 1970; or scan, files counted then, and
    `files` says how many. `notes`: why the figures may be off, in words."""

    rows: tuple[UsageRow, ...]
    source: str
    as_of: float
    files: int | None
    notes: tuple[str, ...]


def usage_offline(settings: Settings, *, scan: bool, progress: Progress = lambda done, total: None) -> OfflineUse:
    """Raises DataDirectoryInUse when a node has the lock after all, DataDirectoryError when there is nothing,
    IncompleteError when there is no journal to tell it."""
    with locked(settings, read_only=True) as directory:
        strays = Strays()
        folders = list(find_groups(directory, strays))
        if scan:
            return _counted(directory, folders, strays, progress)
        return _booked(directory, settings, folders)


def _counted(directory: DataDirectory, folders: list[GroupFolder], strays: Strays, progress: Progress) -> OfflineUse:
    sizes: dict[bytes, int] = {}
    files = 0
    for done, folder in enumerate(folders):
        progress(done, len(folders))
        for _, size in files_of(directory, folder, strays, []):
            sizes[folder.group] = sizes.get(folder.group, 0) + size
            files += 1
    rows = tuple(_rows(directory, folders, sizes))
    notes = tuple(f"not looked at: {problem}" for problem in strays.problems)
    return OfflineUse(rows=rows, source="scan", as_of=time.time(), files=files, notes=notes)


def _booked(directory: DataDirectory, settings: Settings, folders: list[GroupFolder]) -> OfflineUse:
    try:
        journal = Journal(
            directory, max_bytes=settings.journal_bytes, max_age_seconds=1e12, now=time.time(), read_only=True
        )
    except (StorageError, UnknownFormat) as error:
        raise IncompleteError(f"the journal can't be read: {error}; --scan counts the files") from error
    if journal.is_new:
        raise IncompleteError("this data directory has no journal yet; --scan counts its files")
    rows = tuple(_rows(directory, folders, journal.balances.of_account(Account.NVME)))
    begun = len(journal.balances.begun)
    moving = (f"{begun:,} files were being written or removed when the node ended",) if begun else ()
    excuse = (journal.balances.excuse,) if journal.balances.excuse else ()
    notes = (*excuse, *journal.losses, *moving)
    return OfflineUse(rows=rows, source="journal", as_of=journal.written_at, files=None, notes=notes)


def _rows(directory: DataDirectory, folders: list[GroupFolder], sizes: Mapping[bytes, int]) -> Iterator[UsageRow]:
    where = {folder.group: folder.fingerprint for folder in folders}
    for group, num_bytes in sizes.items():
        yield _row(directory, where.get(group, ""), group, num_bytes)


def _row(directory: DataDirectory, fingerprint: str, group: bytes, num_bytes: int) -> UsageRow:
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
        block_tokens=identity.layout.block_tokens if identity is not None else 0,
        block_bytes=identity.layout.total_block_bytes if identity is not None else 0,
        ranks=identity.parallel.shards if identity is not None else 1,
        extents=0,
        tokens=0,
        host_bytes=0,
        nvme_bytes=num_bytes,
        last_used=0.0,
        persistent=True,
        reachable=False,
    )


# ---- what is shown


def as_object(found: OfflineUse, lines: list[Line], by: str) -> dict[str, object]:
    return {
        "by": by,
        "source": found.source,
        "as_of": found.as_of,
        "lines": [line.names | {"groups": line.groups, "nvme_bytes": line.nvme_bytes} for line in lines],
        "total": {"groups": sum(line.groups for line in lines), "nvme_bytes": sum(line.nvme_bytes for line in lines)},
        "files": found.files,
        "notes": list(found.notes),
    }


def view(found: OfflineUse, lines: list[Line], by: str) -> Iterator[RenderableType]:
    from tierkv.config.sizes import human_size
    from tierkv_cli.du import HEADS, labels
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
    shown = table(*heads, "nvme", numbers=("nvme",))
    for line in lines:
        shown.add_row(*labels(line, by), human_size(line.nvme_bytes))
    if len(lines) > 1:
        shown.add_section()
        shown.add_row("total", *[""] * (len(heads) - 1), human_size(sum(line.nvme_bytes for line in lines)))
    yield shown
