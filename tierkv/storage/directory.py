"""A directory of tiers' files: made, checked and opened, and everything in it reached through its descriptor.

    DATA/           a node's own
      LOCK          the node's (made before anything else here; a directory with it alone counts as empty)
      FORMAT        store id and format version; made first, renamed into place last
      models/ tmp/ quarantine/ index/ digests/ purges/ pins/ journal/ starts/ verdicts/
      disk-index/ disk-purges/       where there is, or was, a disk tier

    DISK/           of the disk tier; nodes may share it, on one machine or through a file server
      FORMAT models/ tmp/ quarantine/

No path is ever followed through a symbolic link: directories are opened one component after the other, each with
O_NOFOLLOW, relative to the one before. Directories are 0700 and files 0600 whatever the umask.

Durability of directories: a renamed file survives a power loss once its directory was flushed, and that directory once
*its* parent was. `unflushed` says which flushes a file still needs; what this process has not flushed itself counts as
unflushed, for a process before it may have been killed in between.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, DataDirectoryError, StorageError
from tierkv.storage.codec_names import FileCodec
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
    Parts,
)
from tierkv.storage.stamp import FORMAT, LOCK, OPEN_FOLDER, Kind, open_root, read_or_make_stamp
from tierkv.storage.system_calls import call
from tierkv.storage.temp_folder import Cleared, TempFolder

__all__ = [
    "DataDirectory",
    "Kind",
    "Space",
    "Cleared",
    "PAGE_BYTES",
    "FOLDERS",
    "FOLDERS_OF",
    "FORMAT",
    "LOCK",
    "DIRECT_REFUSED",
]

PAGE_BYTES = 4096  # alignment of files, headers and blocks; what O_DIRECT asks for on every device we know
FOLDERS = (MODELS, TEMP, QUARANTINE, INDEX, DIGESTS, PURGES, PINS, JOURNAL, STARTS, VERDICTS)
FOLDERS_OF = {Kind.DATA: FOLDERS, Kind.DISK: (MODELS, TEMP, QUARANTINE)}
"""What is made at the start."""

PROBE_SECONDS = 10.0
DIRECT_REFUSED = ("EINVAL", "EOPNOTSUPP", "ENOTSUP")  # how file systems say that they don't take O_DIRECT

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Space:
    """What the file system says, for an ordinary user: bytes and inodes."""

    free_bytes: int
    total_bytes: int
    free_inodes: int
    total_inodes: int


class DataDirectory:
    """An open directory of either kind; `open` makes one. Safe to use from several threads. Close it: it owns
    descriptors and the threads that hash beside reading and writing."""

    def __init__(
        self,
        path: Path,
        root_fd: int,
        store_id: str,
        *,
        direct_io: bool,
        read_only: bool = False,
        kind: Kind = Kind.DATA,
        owner: str = "",
        codec: FileCodec = FileCodec.RAW,
    ) -> None:
        self.read_only = read_only
        self.codec = codec
        self.kind = kind
        self.path = path
        self.store_id = store_id
        self._root_fd = root_fd
        self._direct_io = direct_io
        self.direct_problem = ""  # why it is off though the file system takes it
        self._temp = TempFolder(lambda: self.folder((TEMP,)), is_shared=self.is_shared, owner=owner)
        self._lock = threading.Lock()
        self._flushed: set[Parts] = set()  # directories whose own entry is known to be durable
        self._waiting: dict[Parts, set[Parts]] = {}  # parent -> children that its next flush makes durable
        self._flushing: list[set[Parts]] = []  # the children that each flush covers which is going on
        self._hashers: ThreadPoolExecutor | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        create: bool = True,
        writable: bool = True,
        direct_io: bool = True,
        ours: bool = False,
        read_only: bool = False,
        kind: Kind = Kind.DATA,
        owner: str = "",
        codec: FileCodec = FileCodec.RAW,
    ) -> DataDirectory:
        """Open the directory at `path`, making an absent or empty one unless `create` is false.

        Of a data directory, hold the lock first when it may be made. Of a disk directory, `owner` tells this node's
        temp files from those of others: 8 hexadecimal digits. `writable` proves by a file in tmp/ that it can be
        written to (a full disk passes: reading goes on there) and whether O_DIRECT works; readers of headers do
        without. `ours`: its folders may be there without FORMAT, for the caller has held it all the time. `read_only`:
        nothing below it is ever changed through this object; what would do so does nothing or raises StorageError
        (read_only). `codec`: how extents are written here; they are read whichever way they were. Raises
        DataDirectoryError, which says what is wrong with which path and what to do.
        """
        path = Path(path).absolute()
        create, writable = create and not read_only, writable and not read_only
        try:
            root_fd = open_root(path, create=create)
            try:
                stamp = read_or_make_stamp(
                    path, root_fd, create=create, kind=kind, ours=frozenset(FOLDERS_OF[kind] if ours else ())
                )
                directory = cls(
                    path,
                    root_fd,
                    stamp.store,
                    direct_io=direct_io,
                    read_only=read_only,
                    kind=kind,
                    owner=owner,
                    codec=codec,
                )
                directory._check_folders(create=create)
                if writable:
                    directory._prove_writable()
            except BaseException:
                os.close(root_fd)
                raise
        except StorageError as error:
            raise DataDirectoryError(f"{path} can't be used: {error}") from error
        return directory

    def close(self) -> None:
        if self._root_fd < 0:
            return
        if self._hashers is not None:
            self._hashers.shutdown(wait=True)
            self._hashers = None
        os.close(self._root_fd)
        self._root_fd = -1

    def __enter__(self) -> DataDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may put files here, and remove them, at any time."""
        return self.kind is Kind.DISK

    @property
    def own_names(self) -> frozenset[str]:
        """What may lie in the root and is ours."""
        names = {*FOLDERS_OF[self.kind], FORMAT}
        return frozenset(names if self.is_shared else names | {LOCK, DISK_INDEX, DISK_PURGES})

    # ---- reaching things

    @contextmanager
    def folder(self, parts: Parts, *, create: bool = False) -> Iterator[int]:
        """A descriptor of the directory `parts` below the root, for the length of the block. With `create`, missing
        ones are made. Raises StorageError (reason not_found where it is absent, io_error where it is no directory)."""
        fd = self.open_folder(parts, create=create and not self.read_only)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_folder(self, parts: Parts, *, create: bool = False) -> int:
        """Like `folder`, for a caller that keeps the descriptor and closes it."""
        fd = call("open", os.open, ".", OPEN_FOLDER, dir_fd=self._root_fd)
        try:
            for depth, name in enumerate(parts, 1):
                inner = self._open_child(fd, parts[:depth], name, create=create)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def is_present(self) -> bool:
        """Whether the directory at `path` is still the one that was opened, FORMAT included. Somebody may delete it
        under a running node; then nothing is to be made anew without its lock and its stamp."""
        try:
            named, mine = os.stat(self.path, follow_symlinks=False), os.fstat(self._root_fd)
            os.stat(FORMAT, dir_fd=self._root_fd, follow_symlinks=False)
        except OSError:
            return False  # whatever the reason, it can't be found where it was
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def find_loss(self, lock_fd: int = -1) -> str:
        """What was taken away under a running node, in words; empty while all is in its place: the directory at `path`
        is the one that was opened, with its FORMAT, and with the lock that is open as `lock_fd`. Raises StorageError
        when it can't be said: then it is not known to be gone."""
        try:
            mine = call("fstat", os.fstat, self._root_fd)
        except StorageError as error:
            if error.errno_name != "ESTALE" or _status(self.path, None) is None:
                raise
            return f"{self.path} is not what it was: its file server has been set up anew while it was in use"
        named = _status(self.path, None)
        if named is None:
            return f"{self.path} was removed or moved while in use"
        if (named.st_dev, named.st_ino) != (mine.st_dev, mine.st_ino):
            return f"{self.path} was replaced while in use: another directory has its name"
        if _status(FORMAT, self._root_fd) is None:
            return f"{self.path} was emptied while in use: its {FORMAT} is gone"
        if lock_fd < 0:
            return ""
        held, lock = call("fstat", os.fstat, lock_fd), _status(LOCK, self._root_fd)
        if lock is None or (lock.st_dev, lock.st_ino) != (held.st_dev, held.st_ino):
            return f"{self.path} has lost its {LOCK}, which this node holds: another node could start in it"
        return ""

    def space(self) -> Space:
        found = call("statvfs", os.fstatvfs, self._root_fd)
        unit = found.f_frsize
        return Space(found.f_bavail * unit, found.f_blocks * unit, found.f_favail, found.f_files)

    # ---- temp files

    def new_temp_name(self) -> str:
        return self._temp.new_name()

    def create_temp(self, *, direct: bool) -> tuple[str, int]:
        """A new file in tmp/: its name, and a descriptor for writing (`direct`: with O_DIRECT where that works). It is
        locked for as long as it is open: that is how others know that its writer lives."""
        if self.read_only:
            raise StorageError("open", "EROFS", Reason.READ_ONLY, f"{self.path} is used read only")
        name, fd = self._temp.create()
        if direct:
            try:
                self.use_direct(fd)
            except BaseException:
                os.close(fd)
                self._temp.remove(name)
                raise
        return name, fd

    def remove_temp(self, name: str) -> None:
        """Unlink a temp file; one that is gone is fine."""
        self._temp.remove(name)

    def clear_temp(self) -> Cleared:
        """Remove the temp files of dead writers, and what this process could not remove when it should have. Call it
        with the lock held, where there is one; an engine may be writing one, for it remembers digests here. Those of
        other nodes go when they are old."""
        return Cleared(0, 0, 0, 0) if self.read_only else self._temp.clear()

    # ---- O_DIRECT, remembered

    @property
    def direct_io(self) -> bool:
        return self._direct_io

    def use_direct(self, fd: int) -> bool:
        """Switch an open file to O_DIRECT if this file system takes it; says whether it is on."""
        if not self._direct_io:
            return False
        try:
            flags = call("fcntl", fcntl.fcntl, fd, fcntl.F_GETFL)
            call("fcntl", fcntl.fcntl, fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except StorageError as error:
            if error.errno_name not in DIRECT_REFUSED:
                raise
            self.refuse_direct("fcntl")
            return False
        return True

    def refuse_direct(self, operation: str) -> None:
        """The file system refused a direct transfer: go on buffered from here on, and say so once."""
        with self._lock:
            first, self._direct_io = self._direct_io, False
        if first:
            log.warning("%s: O_DIRECT is refused here (%s); using buffered transfers", self.path, operation)

    @property
    def hashers(self) -> Executor:
        """Threads that hash one piece of a file while the next one is read or written."""
        with self._lock:
            if self._hashers is None:
                workers = max(2, min(8, os.cpu_count() or 1))
                self._hashers = ThreadPoolExecutor(workers, thread_name_prefix="tierkv-hash")
            return self._hashers

    # ---- flushing

    def unflushed(self, folder: Parts) -> tuple[Parts, ...]:
        """Directories to `flush` before a file renamed into `folder` is durable: `folder` itself, and the parent of
        each directory on the way that this process has not yet seen flushed. Call it after `folder` was opened."""
        needed = [folder]
        with self._lock:
            for depth in range(1, len(folder) + 1):
                child, parent = folder[:depth], folder[: depth - 1]
                if child not in self._flushed:
                    self._waiting.setdefault(parent, set()).add(child)
                    needed.append(parent)
        return tuple(dict.fromkeys(needed))

    def flush(self, folder: Parts) -> None:
        """fsync a directory. Raises StorageError: then nothing that waits for it is durable."""
        if self.read_only:
            return
        with self._lock:  # a child that appears, or is made anew, during the flush is not covered by it
            covered = set(self._waiting.get(folder, ()))
            self._flushing.append(covered)
        is_done = False
        try:
            with self.folder(folder) as fd:
                call("fsync", os.fsync, fd)
            is_done = True
        finally:
            with self._lock:
                self._flushing = [one for one in self._flushing if one is not covered]
                if is_done:
                    self._note_flushed(folder, covered)

    def _note_flushed(self, folder: Parts, children: set[Parts]) -> None:
        self._flushed |= children
        left = self._waiting.get(folder, set()) - children
        if left:
            self._waiting[folder] = left
        else:
            self._waiting.pop(folder, None)

    # ---- how it is done

    def _open_child(self, parent_fd: int, parts: Parts, name: str, *, create: bool) -> int:
        if not name or "/" in name or name in (".", ".."):
            raise BrokenInvariant(f"{name!r} is not a name that tierkv gives to a directory")
        try:
            return call("open", os.open, name, OPEN_FOLDER, dir_fd=parent_fd)
        except StorageError as error:
            if error.errno_name in ("ELOOP", "ENOTDIR"):
                problem = f"{'/'.join(parts)} is not a directory (symbolic links are not followed)"
                raise StorageError(error.operation, error.errno_name, error.reason, problem) from error
            if error.errno_name != "ENOENT" or not create:
                raise
        return self._make_child(parent_fd, parts, name)

    def _make_child(self, parent_fd: int, parts: Parts, name: str) -> int:
        try:
            call("mkdir", os.mkdir, name, 0o700, dir_fd=parent_fd)
        except StorageError as error:
            if error.errno_name != "EEXIST":  # another thread was quicker
                raise
        else:
            with self._lock:  # it may have been there, flushed, and removed
                for known in (self._flushed, *self._flushing):
                    known.discard(parts)
        fd = call("open", os.open, name, OPEN_FOLDER, dir_fd=parent_fd)
        try:
            call("fchmod", os.fchmod, fd, 0o700)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_folders(self, *, create: bool) -> None:
        device = call("fstat", os.fstat, self._root_fd).st_dev
        for name in FOLDERS_OF[self.kind]:
            try:
                with self.folder((name,), create=create) as fd:
                    elsewhere = call("fstat", os.fstat, fd).st_dev != device
            except StorageError as error:
                if error.errno_name == "ENOENT" and not create:
                    continue  # the node makes it at its next start
                if error.errno_name in ("ELOOP", "ENOTDIR"):
                    raise DataDirectoryError(f"{self.path / name} is not a directory; remove what is there") from error
                raise
            if elsewhere and name in (MODELS, TEMP, QUARANTINE):
                raise DataDirectoryError(
                    f"{self.path / name} is on another file system than {self.path}: files are renamed between them,"
                    f" so mount the whole {self.kind} directory there"
                )

    def _prove_writable(self) -> None:
        """Write one page as an extent is written, directly if that comes back. A full disk is no reason to refuse: hits
        are still served."""
        try:
            name, fd = self.create_temp(direct=True)
        except StorageError as error:
            if error.reason != Reason.DISK_FULL:
                raise
            return
        probe = _Probe(lambda page: self._write_page(fd, page), lambda: os.close(fd))
        if not probe.run(beside=self._direct_io):
            # The descriptor and its file are that thread's now; the next start clears them away.
            self.direct_problem = f"a direct write of one page took more than {PROBE_SECONDS:g} s"
            self.refuse_direct(self.direct_problem)
            self._prove_writable()
            return
        os.close(fd)
        self.remove_temp(name)
        probe.raise_failure()

    def _write_page(self, fd: int, page: mmap.mmap) -> None:
        try:
            call("pwrite", os.pwrite, fd, page, 0)
        except StorageError as error:
            if error.errno_name in DIRECT_REFUSED and self._direct_io:
                self.refuse_direct("pwrite")
            elif error.reason != Reason.DISK_FULL:
                raise


class _Probe:
    """A write of one page that may never come back. On some file systems no direct one ever has, and whoever waits for
    it waits for ever: so a thread of its own does, and calls `clear` if it comes back when nobody waits any more."""

    def __init__(self, write: Callable[[mmap.mmap], None], clear: Callable[[], None]) -> None:
        self._write = write
        self._clear = clear
        self._changed = threading.Condition()
        self._has_ended = False
        self._is_late = False
        self._failure: BaseException | None = None

    def run(self, *, beside: bool) -> bool:
        """False: `beside` this thread it did not come back in time. In this thread there is no telling."""
        if not beside:
            self._run()
            return True
        threading.Thread(target=self._run, name="tierkv direct probe", daemon=True).start()
        with self._changed:
            self._is_late = not self._changed.wait_for(lambda: self._has_ended, PROBE_SECONDS)
            return not self._is_late

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                self._write(page)
            except BaseException as failure:  # noqa: BLE001 - whatever it is, it is raised where the write was asked for
                self._failure = failure
        with self._changed:
            self._has_ended = True
            self._changed.notify()
            if self._is_late:
                self._clear()


def _status(path: str | Path, dir_fd: int | None) -> os.stat_result | None:
    """None for what is not there. Raises StorageError."""
    try:
        return call("stat", os.stat, path, dir_fd=dir_fd, follow_symlinks=False)
    except StorageError as error:
        if error.errno_name in ("ENOENT", "ENOTDIR"):
            return None
        raise
