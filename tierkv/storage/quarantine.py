"""Files found damaged, kept for a while so that somebody can look at them, and out of the way of a new copy.

    quarantine/<time>-<reason>-<number>-<group>-<rank>-<key>.kv

The name says when, why and whose; the file's own header may not be readable any more. Bounded in bytes and in age, the
oldest going first; age is read from the name, so a clock that was wrong can't empty it. What has not such a name is
neither counted nor touched.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime

from tierkv.core.journal import Account
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import QUARANTINE, ExtentName
from tierkv.storage.system_calls import call

_TIME = "%Y%m%dT%H%M%S.%fZ"
_NAME = re.compile(
    r"([0-9]{8}T[0-9]{6}\.[0-9]{6}Z)-([a-z_]{1,32})-([0-9]{1,15})-([0-9a-f]{64})-([0-9]{1,5})-([0-9a-f]{64})\.kv"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Files in quarantine, and the bytes that they take on disk."""

    files: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """`num_bytes` on disk, which the bounds are about; `length` as the journal books it."""

    file: str
    time: float
    number: int
    num_bytes: int
    length: int


class Quarantine:
    """The quarantine of an open data directory. One process uses it, from any of its threads.

    What lies there is listed at the start and by `prune`, and remembered in between, so that setting aside costs the
    same however much there is.
    """

    def __init__(
        self,
        directory: DataDirectory,
        *,
        max_bytes: int,
        max_age_seconds: float,
        moving: Callable[[ExtentName, str, str], AbstractContextManager[None]] = lambda *_: nullcontext(),
        left: Callable[[bytes, int, str, str], None] = lambda *_: None,
    ) -> None:
        """Of a directory that is read only, it is looked at, and nothing is moved to it or removed. A file is moved
        inside of `moving(name, account, reason)`; of one that is gone `left(group, length, account, reason)` is told.
        Raises StorageError when it can't be listed."""
        self._moving = moving
        self._left = left
        self._read_only = directory.read_only
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_age_seconds = max_age_seconds
        self._lock = threading.Lock()
        self._kept = self._listed()
        self._num_bytes = sum(one.num_bytes for one in self._kept)
        self._number = 1 + max((one.number for one in self._kept), default=-1)
        self.num_set_aside = 0  # since the start

    def set_aside(self, name: ExtentName, reason: Reason, now: float) -> bool:
        """Move a file here, then keep to the bounds; `now` is in seconds since 1970. False: there is no such file.
        Raises StorageError. A link or a directory under that name is not ours and is left: False as well."""
        if self._read_only:
            raise StorageError("rename", "EROFS", Reason.READ_ONLY, "started with read_only: it stays where it is")
        with self._lock:
            kept = self._move(name, reason, now)
            if kept is None:
                return False
            self._number += 1
            self.num_set_aside += 1
            self._kept.append(kept)
            self._num_bytes += kept.num_bytes
            self._keep_bounds(now)
        return True

    def prune(self, now: float) -> Usage:
        """Look what is there, remove what is too old or too much; what is left. Raises StorageError."""
        with self._lock:
            self._list_again()
            self._num_bytes = sum(one.num_bytes for one in self._kept)
            if not self._read_only:
                self._keep_bounds(now)
        return self.usage()

    def remove(self, is_meant: Callable[[str, bytes], bool]) -> Usage:
        """Remove the files of which `is_meant(file, group)` says so; what they took. Not flushed. Raises
        StorageError."""
        with self._lock, self._directory.folder((QUARANTINE,), create=True) as fd:
            self._list_again()
            meant = [one for one in self._kept if is_meant(one.file, group_of(one.file))]
            for one in meant:
                _unlink(fd, one.file)
                self._kept.remove(one)
                self._left(group_of(one.file), one.length, Account.PURGED, Reason.PURGED)
            self._num_bytes = sum(one.num_bytes for one in self._kept)
        return Usage(len(meant), sum(one.num_bytes for one in meant))

    def usage(self) -> Usage:
        return Usage(len(self._kept), self._num_bytes)

    def files(self) -> list[str]:
        """Names in quarantine/, oldest first."""
        return [one.file for one in self._kept]

    def lengths(self) -> dict[bytes, int]:
        """Of the files in quarantine/, summed by group."""
        sums: Counter[bytes] = Counter()
        for one in self._kept:
            sums[group_of(one.file)] += one.length
        return dict(sums)

    def _list_again(self) -> None:
        """Somebody who has looked at a file may have removed it."""
        before, self._kept = self._kept, self._listed()
        there = {one.file for one in self._kept}
        for one in before:
            if one.file not in there:
                self._left(group_of(one.file), one.length, Account.DROPPED, Reason.NOT_FOUND)

    def _listed(self) -> deque[_Kept]:
        try:
            with self._directory.folder((QUARANTINE,), create=True) as fd:
                found = [_look(fd, file) for file in call("listdir", os.listdir, fd)]
        except StorageError as error:
            if not self._read_only or error.errno_name != "ENOENT":
                raise
            found = []
        return deque(sorted((one for one in found if one is not None), key=lambda one: (one.time, one.number)))

    def _move(self, name: ExtentName, reason: Reason, now: float) -> _Kept | None:
        time = datetime.fromtimestamp(now, UTC).strftime(_TIME)
        file = f"{time}-{reason}-{self._number}-{name.group.hex()}-{name.rank}-{name.file}"
        try:
            with self._directory.folder(name.folder) as from_fd:
                found = call("stat", os.stat, name.file, dir_fd=from_fd, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    return None
                with (
                    self._directory.folder((QUARANTINE,), create=True) as to_fd,
                    self._moving(name, Account.QUARANTINE, str(reason)),
                ):
                    call("rename", os.rename, name.file, file, src_dir_fd=from_fd, dst_dir_fd=to_fd)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
            return None
        return _Kept(file, now, self._number, found.st_blocks * 512, found.st_size)

    def _keep_bounds(self, now: float) -> None:
        with self._directory.folder((QUARANTINE,), create=True) as fd:
            while self._kept:
                oldest = self._kept[0]
                is_too_old = now - oldest.time > self._max_age_seconds
                if self._num_bytes <= self._max_bytes and not is_too_old:
                    return
                _unlink(fd, oldest.file)
                self._kept.popleft()
                self._num_bytes -= oldest.num_bytes
                reason = Reason.EXPIRED if is_too_old else Reason.NO_ROOM
                self._left(group_of(oldest.file), oldest.length, Account.DROPPED, reason)


def group_of(file: str) -> bytes:
    """Whose a file in quarantine was, by its name."""
    named = _NAME.fullmatch(file)
    assert named is not None, "only files with such names are kept"
    return bytes.fromhex(named[4])


def _look(fd: int, file: str) -> _Kept | None:
    named = _NAME.fullmatch(file)
    if named is None:
        return None
    try:
        time = datetime.strptime(named[1], _TIME).replace(tzinfo=UTC).timestamp()
        found = call("stat", os.stat, file, dir_fd=fd, follow_symlinks=False)
    except ValueError:
        return None  # digits, but no time: not a name of ours
    except StorageError as error:
        if error.errno_name != "ENOENT":  # an operator removed it meanwhile
            raise
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return _Kept(file, time, int(named[3]), found.st_blocks * 512, found.st_size)


def _unlink(fd: int, file: str) -> None:
    try:
        call("unlink", os.unlink, file, dir_fd=fd)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
