"""A power loss at any moment: what the real code did to files is recorded, and every state that it may leave is made.

    with CrashRecorder(tmp_path) as recorder:        everything below tmp_path is watched; what is there is durable
        ... the real code runs; recorder.note("k was reported flushed") ...
    for state in recorder.states(per_point=6, seed=1):
        state.build(fresh)                           state.notes: what had been noted before the power went

The model, at least as harsh as ext4 (data=ordered, delayed allocation) and XFS:

    content      what was written and not flushed is, page by page, absent, there, zeros, or torn at a sector; the size
                 may be old, new or in between. fsync and fdatasync of a file make what was written before them durable.
    names        each name in a directory has any of the values that it had since the directory was last flushed, one
                 name independent of another. So a rename from one directory to another can be seen half: both names,
                 or neither. Within a directory it is atomic: no state has neither name. A name that is replaced is
                 never absent. fsync of a directory makes the names of it durable, and neither its own name nor the
                 content of its files: journals promise more, POSIX does not.
    flushes      cover what came before they began, and count from when they have returned.

Modes, times and owners are not modelled: nothing of a file's content may depend on them.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pytest

PAGE_BYTES = 4096
SECTOR_BYTES = 512
ROOT = 0

# ---------------------------------------------------------------- what happened


@dataclass(frozen=True, slots=True)
class Named:
    """A name of a directory stands for `inode` from now on; None: for nothing."""

    folder: int
    name: str
    inode: int | None


@dataclass(frozen=True, slots=True)
class Renamed:
    folder: int
    name: str
    to_folder: int
    to_name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Wrote:
    inode: int
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Resized:
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """What was done to `inode` before event `upto` is durable."""

    inode: int
    upto: int


@dataclass(frozen=True, slots=True)
class Noted:
    note: Any


Event = Named | Renamed | Wrote | Resized | Flushed | Noted


# ---------------------------------------------------------------- choosing


class Chooser(Protocol):
    def pick(self, options: int, *, of_content: bool) -> int:
        """One of `options` (at least 2). 0 is always the oldest state, the last one the newest."""


class _Corner:
    """The oldest or newest of everything, names and contents apart."""

    def __init__(self, *, newest_names: bool, content: int) -> None:
        self._newest_names = newest_names
        self._content = content

    def pick(self, options: int, *, of_content: bool) -> int:
        if of_content:
            return min(self._content, options - 1) if self._content >= 0 else options + self._content
        return options - 1 if self._newest_names else 0


class _Random:
    def __init__(self, source: random.Random) -> None:
        self._source = source

    def pick(self, options: int, *, of_content: bool) -> int:
        return self._source.randrange(options)


class _Odometer:
    """All combinations, one after the other; `advance` is False behind the last one."""

    def __init__(self) -> None:
        self._digits: list[int] = []
        self._limits: list[int] = []
        self._at = 0

    def pick(self, options: int, *, of_content: bool) -> int:
        if self._at == len(self._digits):
            self._digits.append(0)
            self._limits.append(options)
        self._at += 1
        return self._digits[self._at - 1]

    def advance(self) -> bool:
        del self._digits[self._at :], self._limits[self._at :]
        self._at = 0
        while self._digits:
            if self._digits[-1] + 1 < self._limits[-1]:
                self._digits[-1] += 1
                return True
            self._digits.pop()
            self._limits.pop()
        return False


# Whole contents come in this order; what is in between is chosen page by page.
_OLD, _SIZE_OF_ZEROS, _PAGES, _NEW = range(4)

_CORNERS = (
    (False, _OLD),  # nothing of what was not flushed
    (True, _OLD),  # names without their content: files of no bytes
    (True, _SIZE_OF_ZEROS),  # names and sizes, and not the bytes
    (True, -1),  # everything, as after a kill
)


# ---------------------------------------------------------------- what is on the disk


class _File:
    def __init__(self, content: bytes) -> None:
        self.durable = content
        self.pending: list[tuple[int, Wrote | Resized]] = []
        self._newest: bytes | None = None

    def add(self, index: int, event: Wrote | Resized) -> None:
        self.pending.append((index, event))
        self._newest = None

    def flush(self, upto: int) -> None:
        self.durable = _replay(self.durable, [event for index, event in self.pending if index < upto])
        self.pending = [(index, event) for index, event in self.pending if index >= upto]

    @property
    def newest(self) -> bytes:
        if self._newest is None:
            self._newest = _replay(self.durable, [event for _, event in self.pending])
        return self._newest

    def choose(self, chooser: Chooser) -> bytes:
        if not self.pending or self.newest == self.durable:
            return self.durable
        old, new = self.durable, self.newest
        match chooser.pick(4, of_content=True):
            case 0:
                return old
            case 1:
                return old[: len(new)] + bytes(max(0, len(new) - len(old)))
            case 3:
                return new
        return self._choose_pages(chooser, old, new)

    def _choose_pages(self, chooser: Chooser, old: bytes, new: bytes) -> bytes:
        longest = max(len(old), len(new))
        made = bytearray(longest)
        for start in range(0, longest, PAGE_BYTES):
            stop = min(start + PAGE_BYTES, longest)
            before = old[start:stop].ljust(stop - start, b"\0")
            after = new[start:stop].ljust(stop - start, b"\0")
            if before == after:
                made[start:stop] = before
                continue
            match chooser.pick(4, of_content=True):
                case 0:
                    made[start:stop] = before
                case 1:
                    pass  # zeros
                case 2:
                    at = SECTOR_BYTES * chooser.pick(PAGE_BYTES // SECTOR_BYTES, of_content=True)
                    made[start:stop] = after[:at] + before[at:]
                case _:
                    made[start:stop] = after
        sizes = sorted({len(old), len(new), *range(0, longest, PAGE_BYTES)} - set(range(min(len(old), len(new)))))
        return bytes(made[: sizes[chooser.pick(len(sizes), of_content=True)] if len(sizes) > 1 else longest])


def _replay(content: bytes, events: Sequence[Wrote | Resized]) -> bytes:
    if not events:
        return content
    made = bytearray(content)
    for event in events:
        match event:
            case Wrote(_, offset, written):
                made.extend(bytes(max(0, offset - len(made))))
                made[offset : offset + len(written)] = written
            case Resized(_, size):
                made.extend(bytes(max(0, size - len(made))))
                del made[size:]
    return bytes(made)


class _Folder:
    def __init__(self) -> None:
        self.durable: dict[str, int | None] = {}
        self.pending: dict[str, list[tuple[int, int | None]]] = {}
        self.renames: list[tuple[int, str, str]] = []  # within this directory: event, old name, new name

    def add(self, index: int, name: str, inode: int | None) -> None:
        self.pending.setdefault(name, []).append((index, inode))

    def flush(self, upto: int) -> None:
        for name, values in list(self.pending.items()):
            for index, inode in values:
                if index < upto:
                    self.durable[name] = inode
            left = [(index, inode) for index, inode in values if index >= upto]
            if left:
                self.pending[name] = left
            else:
                del self.pending[name]
        self.renames = [rename for rename in self.renames if rename[0] >= upto]

    def choose(self, chooser: Chooser) -> dict[str, int]:
        reached: dict[str, int] = {}  # how many of a name's changes have come to the disk
        for name, values in sorted(self.pending.items()):
            reached[name] = chooser.pick(len(values) + 1, of_content=False)
        for index, old_name, new_name in self.renames:
            if reached[old_name] >= _changes_upto(self.pending[old_name], index):
                reached[new_name] = max(reached[new_name], _changes_upto(self.pending[new_name], index))
        found = dict(self.durable)
        for name, count in reached.items():
            if count:
                found[name] = self.pending[name][count - 1][1]
        return {name: inode for name, inode in sorted(found.items()) if inode is not None}


def _changes_upto(values: list[tuple[int, int | None]], event: int) -> int:
    return sum(index <= event for index, _ in values)


@dataclass(slots=True)
class KeptFile:
    inode: int
    content: bytes


@dataclass(slots=True)
class CrashState:
    """Directories and files as the next start finds them, and what had been noted before the power went.

    `at` is the number of recorded events that had happened.
    """

    at: int
    notes: tuple[Any, ...] = ()
    folders: list[str] = field(default_factory=list)
    files: dict[str, KeptFile] = field(default_factory=dict)

    def digest(self) -> int:
        kept = tuple((path, file.inode, file.content) for path, file in self.files.items())
        return hash((tuple(self.folders), kept))

    def build(self, root: Path) -> None:
        """Make it below `root`, an empty directory. Two names of one file are links of one file again."""
        made: dict[int, Path] = {}
        for folder in self.folders:
            (root / folder).mkdir(mode=0o700)
        for path, kept in self.files.items():
            if kept.inode in made:
                os.link(made[kept.inode], root / path)
                continue
            made[kept.inode] = root / path
            fd = os.open(root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(kept.content)


class Disk:
    """What is durable and what is pending; `apply` events in their order, `choose` states."""

    def __init__(self) -> None:
        self._folders: dict[int, _Folder] = {ROOT: _Folder()}
        self._files: dict[int, _File] = {}

    def add_folder(self, inode: int) -> None:
        self._folders[inode] = _Folder()

    def add_file(self, inode: int, content: bytes = b"") -> None:
        self._files[inode] = _File(content)

    def apply(self, index: int, event: Event) -> None:
        match event:
            case Named(folder, name, inode):
                self._folders[folder].add(index, name, inode)
            case Renamed(folder, name, to_folder, to_name, inode):
                self._folders[folder].add(index, name, None)
                self._folders[to_folder].add(index, to_name, inode)
                if folder == to_folder:
                    self._folders[folder].renames.append((index, name, to_name))
            case Wrote(inode) | Resized(inode):
                self._files[inode].add(index, event)
            case Flushed(inode, upto):
                (self._folders.get(inode) or self._files[inode]).flush(upto)
            case Noted():
                pass

    def choose(self, chooser: Chooser, at: int, notes: tuple[Any, ...]) -> CrashState:
        state = CrashState(at, notes)
        contents: dict[int, bytes] = {}
        self._walk(ROOT, "", chooser, state, contents, set())
        return state

    def _walk(
        self, folder: int, path: str, chooser: Chooser, state: CrashState, contents: dict[int, bytes], seen: set[int]
    ) -> None:
        for name, inode in self._folders[folder].choose(chooser).items():
            below = f"{path}/{name}" if path else name
            if inode in self._files:
                if inode not in contents:
                    contents[inode] = self._files[inode].choose(chooser)
                state.files[below] = KeptFile(inode, contents[inode])
            elif inode not in seen:  # a directory has one name: a half-seen rename of one shows the first
                seen.add(inode)
                state.folders.append(below)
                self._walk(inode, below, chooser, state, contents, seen)


# ---------------------------------------------------------------- recording


class CrashRecorder:
    """Watches the calls of `os` that change anything below `root`, for as long as the block lasts, from any thread.

    `root` has to be there, and what is in it counts as durable. What C code writes (LMDB) is not seen.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self.created: list[tuple[int, int, bool]] = []  # event before which an inode was made, inode, is a folder
        self._lock = threading.RLock()
        self._inodes: dict[tuple[int, int], int] = {}
        self._kinds: dict[int, bool] = {ROOT: True}
        self._initial: list[tuple[int, str, int, bytes | None]] = []
        self._patch = pytest.MonkeyPatch()
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        status = os.stat(self.root)
        self._inodes[status.st_dev, status.st_ino] = ROOT
        self._read_initial(self.root, ROOT)
        self._real["stat"] = os.stat
        for operation in _WATCHED:
            self._real[operation] = getattr(os, operation)
            self._patch.setattr(os, operation, getattr(self, f"_{operation}"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()

    def note(self, note: Any) -> None:
        """Something that is promised, or otherwise true, from here on."""
        with self._lock:
            self.events.append(Noted(note))

    def identify(self, status: os.stat_result) -> int | None:
        """The recorder's number of a file: unlike the file system's it is never given twice."""
        with self._lock:
            return self._inodes.get((status.st_dev, status.st_ino))

    def states(
        self, *, per_point: int, seed: int, first: int = 0, is_point: Callable[[int], bool] = lambda at: True
    ) -> Iterator[CrashState]:
        """States after each of the events from `first` on: all of them where they are at most `per_point`, else half of
        them corners (nothing, names only, sizes only, everything) and half random ones. A state that was given before,
        under the same notes, is left out. `is_point` may leave crash points out."""
        disk = self._initial_disk()
        created = iter([*self.created, (len(self.events) + 1, 0, False)])
        upcoming = next(created)
        notes: tuple[Any, ...] = ()
        seen: set[tuple[int, int]] = set()
        for at in range(len(self.events) + 1):
            if at:
                event = self.events[at - 1]
                while upcoming[0] < at:
                    (disk.add_folder if upcoming[2] else disk.add_file)(upcoming[1])
                    upcoming = next(created)
                disk.apply(at - 1, event)
                if isinstance(event, Noted):
                    notes = (*notes, event.note)
            if at < first or not is_point(at):
                continue
            for state in _choose_states(disk, at, notes, per_point, random.Random(f"{seed} {at}")):
                key = (len(notes), state.digest())
                if key not in seen:
                    seen.add(key)
                    yield state

    # ---- what was there before

    def _read_initial(self, path: Path, folder: int) -> None:
        for child in sorted(path.iterdir()):
            status = child.lstat()
            inode = self._new_inode(status, is_folder=child.is_dir(), at_start=True)
            self._initial.append((folder, child.name, inode, None if child.is_dir() else child.read_bytes()))
            if child.is_dir():
                self._read_initial(child, inode)

    def _initial_disk(self) -> Disk:
        disk = Disk()
        for folder, name, inode, content in self._initial:
            if content is None:
                disk.add_folder(inode)
            else:
                disk.add_file(inode, content)
            disk._folders[folder].durable[name] = inode
        return disk

    def _new_inode(self, status: os.stat_result, *, is_folder: bool, at_start: bool = False) -> int:
        number = len(self._kinds)
        self._kinds[number] = is_folder
        self._inodes[status.st_dev, status.st_ino] = number
        if not at_start:
            self.created.append((len(self.events), number, is_folder))
        return number

    # ---- finding out what a call is about

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """Directory and name that a path names, if we watch that directory."""
        text = os.fsdecode(path)
        above, name = os.path.split(text)
        if dir_fd is not None and not os.path.isabs(text):
            status = os.fstat(dir_fd) if not above else self._real["stat"](above, dir_fd=dir_fd)
        else:
            status = self._real["stat"](above or ".")
        folder = self._inodes.get((status.st_dev, status.st_ino))
        return None if folder is None or name in ("", ".", "..") else (folder, name)

    def _try_place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        with suppress(OSError):
            return self._place(path, dir_fd)
        return None

    def _inode_of(self, fd: int) -> int | None:
        status = os.fstat(fd)
        return self._inodes.get((status.st_dev, status.st_ino))

    def _exists(self, path: Any, dir_fd: int | None) -> bool:
        try:
            self._real["stat"](path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _number_at(self, path: Any, dir_fd: int | None) -> int | None:
        status = self._real["stat"](path, dir_fd=dir_fd, follow_symlinks=False)
        return self._inodes.get((status.st_dev, status.st_ino))

    # ---- the calls

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & (os.O_CREAT | os.O_TRUNC):
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
        with self._lock:
            place = self._try_place(path, dir_fd)
            is_new = place is not None and bool(flags & os.O_CREAT) and not self._exists(path, dir_fd)
            fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            if place is not None and is_new:
                self.events.append(Named(*place, self._new_inode(os.fstat(fd), is_folder=False)))
            elif place is not None and flags & os.O_TRUNC and (inode := self._inode_of(fd)) is not None:
                self.events.append(Resized(inode, 0))
        return fd

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._try_place(path, dir_fd)
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            if place is not None:
                status = self._real["stat"](path, dir_fd=dir_fd)
                self.events.append(Named(*place, self._new_inode(status, is_folder=True)))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._forget("unlink", path, dir_fd)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._forget("remove", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._forget("rmdir", path, dir_fd)

    def _forget(self, operation: str, path: Any, dir_fd: int | None) -> None:
        with self._lock:
            place = self._try_place(path, dir_fd)
            self._real[operation](path, dir_fd=dir_fd)
            if place is not None:
                self.events.append(Named(*place, None))

    def _link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        with self._lock:
            inode = self._number_at(src, src_dir_fd)
            place = self._try_place(dst, dst_dir_fd)
            options: dict[str, Any] = {"src_dir_fd": src_dir_fd, "dst_dir_fd": dst_dir_fd}
            self._real["link"](src, dst, **options, follow_symlinks=follow_symlinks)
            if place is not None and inode is not None:
                self.events.append(Named(*place, inode))

    def _rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        with self._lock:
            source, place = self._try_place(src, src_dir_fd), self._try_place(dst, dst_dir_fd)
            inode = self._number_at(src, src_dir_fd)
            self._real["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if source is None and place is None:
                return
            assert source is not None, "something was moved into the watched directory"
            assert place is not None, "something was moved out of the watched directory"
            assert inode is not None, "a file that was never seen was renamed"
            self.events.append(Renamed(*source, *place, inode))

    def _replace(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self._rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def _write(self, fd: int, content: Any) -> int:
        with self._lock:
            inode = self._inode_of(fd)
            offset = os.lseek(fd, 0, os.SEEK_CUR) if inode is not None else 0
            count: int = self._real["write"](fd, content)
            if inode is not None:
                self.events.append(Wrote(inode, offset, bytes(content[:count])))
        return count

    def _pwrite(self, fd: int, content: Any, offset: int) -> int:
        return self._transfer("pwrite", fd, content, [content], offset)

    def _pwritev(self, fd: int, views: Sequence[Any], offset: int, flags: int = 0) -> int:
        return self._transfer("pwritev", fd, views, views, offset)

    def _transfer(self, operation: str, fd: int, argument: Any, views: Sequence[Any], offset: int) -> int:
        with self._lock:
            inode = self._inode_of(fd)
            count: int = self._real[operation](fd, argument, offset)
            if inode is not None:
                self.events.append(Wrote(inode, offset, b"".join(bytes(view) for view in views)[:count]))
        return count

    def _ftruncate(self, fd: int, size: int) -> None:
        with self._lock:
            inode = self._inode_of(fd)
            self._real["ftruncate"](fd, size)
            if inode is not None:
                self.events.append(Resized(inode, size))

    def _truncate(self, path: Any, size: int) -> None:
        if isinstance(path, int):
            self._ftruncate(path, size)
            return
        with self._lock:
            inode = self._number_at(path, None)
            self._real["truncate"](path, size)
            if inode is not None:
                self.events.append(Resized(inode, size))

    def _posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        with self._lock:
            inode = self._inode_of(fd)
            self._real["posix_fallocate"](fd, offset, size)
            if inode is not None:
                self.events.append(Resized(inode, os.fstat(fd).st_size))

    def _fsync(self, fd: int) -> None:
        self._flush("fsync", fd)

    def _fdatasync(self, fd: int) -> None:
        self._flush("fdatasync", fd)

    def _flush(self, operation: str, fd: int) -> None:
        """Others may go on meanwhile: what they do is not covered."""
        with self._lock:
            inode, upto = self._inode_of(fd), len(self.events)
        self._real[operation](fd)
        if inode is not None:
            with self._lock:
                self.events.append(Flushed(inode, upto))


_WATCHED = (
    "open",
    "mkdir",
    "unlink",
    "remove",
    "rmdir",
    "link",
    "rename",
    "replace",
    "write",
    "pwrite",
    "pwritev",
    "ftruncate",
    "truncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
)


def _choose_states(
    disk: Disk, at: int, notes: tuple[Any, ...], per_point: int, source: random.Random
) -> Iterator[CrashState]:
    odometer = _Odometer()
    every = [disk.choose(odometer, at, notes)]
    while len(every) <= per_point and odometer.advance():
        every.append(disk.choose(odometer, at, notes))
    if len(every) <= per_point:
        yield from every
        return
    corners = min(len(_CORNERS), (per_point + at % 2) // 2)  # of one a point, every second is a corner
    for number in range(at // 2, at // 2 + corners):  # each of them at one of the next points, if not at this one
        newest_names, content = _CORNERS[number % len(_CORNERS)]
        yield disk.choose(_Corner(newest_names=newest_names, content=content), at, notes)
    for _ in range(per_point - corners):
        yield disk.choose(_Random(source), at, notes)
