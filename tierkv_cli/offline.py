"""Verification without a node: the data directory is locked, and its files are checked here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from tierkv.config import Settings
from tierkv.errors import DataDirectoryError
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.verification import Progress, verify_directory
from tierkv.wire.messages import DamagedEntry, VerifyReply

SECONDS_PER_DAY = 86_400.0


def verify_offline(settings: Settings, *, repair: bool) -> Iterator[VerifyReply]:
    """Progress, as a node would give it. Holds the lock, so that no node starts meanwhile; rows of files that are moved
    away stay in the index, and the next start drops them.

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
        quarantine = Quarantine(
            directory,
            max_bytes=settings.quarantine_bytes,
            max_age_seconds=settings.quarantine_days * SECONDS_PER_DAY,
        )
        yield from map(_as_reply, verify_directory(directory, quarantine if repair else None))


def _as_reply(progress: Progress) -> VerifyReply:
    return VerifyReply(
        id=0,
        checked_files=progress.checked_files,
        total_files=progress.total_files,
        checked_bytes=progress.checked_bytes,
        damaged_files=progress.damaged_files,
        damaged=tuple(DamagedEntry(one.path, str(one.reason)) for one in progress.damaged),
        finished=progress.finished,
        set_aside_files=progress.set_aside_files,
    )
