"""Verification without a node: the data directory is locked, and its files are checked here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click

from tierkv.config import Settings
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.disk_directory import last_disk_directory
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.verification import Progress, verify_directory
from tierkv.wire.messages import DamagedEntry, VerifyReply

SECONDS_PER_DAY = 86_400.0
NOTHING = Progress(0, 0, 0, 0, 0, (), finished=False)


def verify_offline(settings: Settings, *, repair: bool) -> Iterator[VerifyReply]:
    """Progress, as a node would give it. Holds the lock, so that no node starts meanwhile; rows of files that are moved
    away stay in the index, and the next start drops them. The disk directory comes behind it, and is not locked, for
    other nodes may use it; where it can't be looked at, the last step says why.

    Raises DataDirectoryInUse when a node has the lock after all, DataDirectoryError when there is nothing to verify.
    """
    if settings.data_dir is None:
        raise DataDirectoryError("there is nothing to verify without a data directory; name one with --data-dir")
    with ExitStack() as owned:
        # Opened before the lock is made: a directory that isn't ours gets no file of ours.
        opened = DataDirectory.open(
            settings.data_dir, create=False, writable=False, direct_io=settings.direct_io == "auto"
        )
        directory = owned.enter_context(opened)
        owned.enter_context(lock_data_directory(settings.data_dir, 0.0))
        disk, problem = None, ""
        try:
            if (disk_dir := find_disk(settings, directory)) is not None:
                disk = owned.enter_context(open_disk(disk_dir, settings))
        except (DataDirectoryError, StorageError) as error:
            problem = f"the disk tier is not looked at: {error}"
        before = NOTHING
        for progress in verify_directory(directory, _quarantine(directory, settings) if repair else None):
            is_last = progress.finished and disk is None
            yield _as_reply(progress, NOTHING, "nvme", finished=is_last, problem=problem if is_last else "")
            before = progress
        if disk is not None:
            for progress in verify_directory(disk, _quarantine(disk, settings) if repair else None):
                yield _as_reply(progress, before, "disk", finished=progress.finished)


def find_disk(settings: Settings, directory: DataDirectory) -> Path | None:
    """The disk directory: that of the settings, or else the one that the node of this data directory has used last,
    which is said on stderr. None: it has none. Raises DataDirectoryError where it can't be told."""
    if settings.disk_dir is not None:
        return settings.disk_dir
    found = last_disk_directory(directory)
    if found is not None:
        click.echo(f"tierkv: no setting names disk_dir; this node has last used {found}", err=True)
    return found


def open_disk(disk_dir: Path, settings: Settings) -> DataDirectory:
    """The disk directory, to be looked at. Raises DataDirectoryError, StorageError."""
    return DataDirectory.open(
        disk_dir,
        kind=Kind.DISK,
        create=False,
        writable=False,
        direct_io=settings.direct_io == "auto",
    )


def _quarantine(directory: DataDirectory, settings: Settings) -> Quarantine:
    return Quarantine(
        directory,
        max_bytes=settings.quarantine_bytes,
        max_age_seconds=settings.quarantine_days * SECONDS_PER_DAY,
    )


def _as_reply(progress: Progress, before: Progress, tier: str, *, finished: bool, problem: str = "") -> VerifyReply:
    """`before` is how the tier before it ended."""
    return VerifyReply(
        id=0,
        checked_files=before.checked_files + progress.checked_files,
        total_files=before.total_files + progress.total_files,
        checked_bytes=before.checked_bytes + progress.checked_bytes,
        damaged_files=before.damaged_files + progress.damaged_files,
        damaged=tuple(DamagedEntry(one.path, str(one.reason), tier) for one in progress.damaged),
        finished=finished,
        set_aside_files=before.set_aside_files + progress.set_aside_files,
        problem=problem,
    )
