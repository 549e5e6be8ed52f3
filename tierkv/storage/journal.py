"""The journal of a data directory: segments that are appended to, folded into balances, and kept within bounds.

    journal/<16 digits>.log        segments, see journal_segment.py; the last one grows
    journal/differences.json       what recounts found, see differences.py

Opening reads the last segment: it begins with a checkpoint. What a crash left behind the last right row is cut off.
A row that can't be written still counts in the balances; a checkpoint is written before the next one that can.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from tierkv.core.journal import NOBODY, Anonymizer, AnyRow, Balances, Checkpoint, Ended, FileOf
from tierkv.core.reasons import Reason
from tierkv.errors import ForeignFile, StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.journal_segment import HEAD, Scan, encode_row, encode_segment, read_rows
from tierkv.storage.names import JOURNAL
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

SEGMENTS = 8
"""In how many pieces the journal is kept: the oldest one is what goes when there is too much."""

MIN_SEGMENT_BYTES = 16 * 2**10
SEGMENTS_PER_AGE = 8
CLOCKS_APART_SECONDS = 3_600.0
"""A file's time is the file system's, a row's the node's."""

SECONDS_PER_DAY = 86_400.0

BEGINS_HERE = "the journal begins here: what was stored before is not in it"
MACHINE_WENT_DOWN = "the machine went down without a stop: the last rows may not have been on disk yet"
ROWS_WERE_DAMAGED = "rows of the journal were damaged and skipped"
END_WAS_DAMAGED = "the end of the journal was cut off or damaged"
WAS_REMOVED = "files of the journal were removed or replaced while the node ran"

MAX_TOLD = 10
"""Of what was removed: the last ones."""

NOT_THERE = frozenset({"ENOENT", "ENOTDIR", "ELOOP"})

_NAME = re.compile(r"([0-9]{16})\.log")


@dataclass(slots=True)
class _Segment:
    number: int
    num_bytes: int
    last_at: float  # when it was last written to
    begun_at: float
    num_rows: int = 0  # that were appended since it was opened

    @property
    def file(self) -> str:
        return f"{self.number:016d}.log"


class Journal:
    """Safe to use from several threads. `balances` are those after the last row. Close it."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        max_bytes: int,
        max_age_seconds: float,
        now: float,
        boot: str = "",
        read_only: bool = False,
    ) -> None:
        """`boot` is the kernel's boot id. Raises StorageError; UnknownFormat when a later version has written here.
        `read_only`: what is there is read, and nothing is changed."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = max(MIN_SEGMENT_BYTES, max_bytes // SEGMENTS)
        self._max_age_seconds = max_age_seconds
        self._boot = boot
        self._read_only = read_only or directory.read_only
        self._lock = threading.RLock()
        self._fd = -1
        self._needs_checkpoint = False
        self._is_dirty = False
        self.balances = Balances()
        self.damaged = 0  # rows of what was folded that had to be skipped
        self.torn_bytes = 0  # cut off at the end
        self._next_number = 1
        self.problem = ""  # why nothing can be written, in words; empty while it can
        self.damage: tuple[str, ...] = ()  # what `check` found, in words
        self._removed: tuple[str, ...] = ()  # what `look` found
        self._in_the_way: list[str] = []  # what had a segment's name when it was opened
        self._segments = self._listed()
        self.is_new = not self._segments
        self._fold()
        self.balances.excuse = self._excuse()
        if not self._read_only:
            self._begin(now)

    # ---------------------------------------------------------------- opening

    def _listed(self) -> list[_Segment]:
        """Whatever has a segment's name: its number is not given again."""
        found = []
        try:
            with self._directory.folder((JOURNAL,), create=not self._read_only) as folder_fd:
                for name in call("listdir", os.listdir, folder_fd):
                    if (named := _NAME.fullmatch(name)) is not None:
                        self._next_number = max(self._next_number, int(named[1]) + 1)
                        status = call("stat", os.stat, name, dir_fd=folder_fd, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(_Segment(int(named[1]), status.st_size, status.st_mtime, status.st_mtime))
                        else:
                            self._in_the_way.append(f"{name} of the journal is no file")
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
        return sorted(found, key=lambda segment: segment.number)

    def _fold(self) -> None:
        """From the last checkpoint that begins a segment."""
        rows: list[AnyRow] = []
        for segment in reversed(self._segments):
            scan = Scan()
            raw = self._read(segment)
            rows = [*read_rows(raw, scan), *rows]
            is_last = segment is self._segments[-1]
            self.damaged += scan.damaged + (scan.is_torn and not is_last)
            if is_last and scan.end == 0 and scan.is_torn:
                self.damaged += 1  # not one that was just being made: others have written over it
            elif is_last and scan.is_torn:
                self.torn_bytes = segment.num_bytes - scan.end
                segment.num_bytes = scan.end
            if is_last and rows:
                segment.begun_at = rows[0].at
            if rows and isinstance(rows[0], Checkpoint):
                break
        for row in rows:
            self.balances.fold(row)

    def _read(self, segment: _Segment) -> bytes:
        try:
            with (
                self._directory.folder((JOURNAL,)) as folder_fd,
                open_regular(folder_fd, segment.file) as (fd, found),
            ):
                parts, left = [], found.st_size
                while left and (part := call("read", os.read, fd, left)):
                    parts.append(part)
                    left -= len(part)
                return b"".join(parts)
        except ForeignFile:
            return b""  # a link or a folder under that name: nothing of ours
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
            return b""  # it was too old meanwhile

    def _begin(self, now: float) -> None:
        is_named_last = bool(self._segments) and self._segments[-1].number == self._next_number - 1
        if is_named_last and self._is_readable(self._segments[-1]):
            self._open_last()
        elif is_named_last and self._segments[-1].num_bytes <= len(HEAD):
            self._next_number = self._segments[-1].number
            self._remove(self._segments.pop())
        if self._fd < 0:
            self._add_segment(now)
        elif self.balances.excuse or self.balances.boot != self._boot:
            self._needs_checkpoint = True

    def _excuse(self) -> str:
        if self.is_new:
            return BEGINS_HERE
        if self.balances.excuse:
            return self.balances.excuse
        if self.damaged:
            return ROWS_WERE_DAMAGED
        if self.torn_bytes:
            return END_WAS_DAMAGED
        return "" if self.balances.is_closed or self.balances.boot == self._boot else MACHINE_WENT_DOWN

    def _is_readable(self, segment: _Segment) -> bool:
        """Whether rows may be appended: there is one that is right."""
        return next(read_rows(self._read(segment), Scan()), None) is not None

    def counted(self, at: float) -> None:
        """A recount has put right what there was an excuse for. Raises StorageError."""
        with self._lock:
            if self.balances.excuse:
                self.balances.excuse = ""
                self._needs_checkpoint = True
                self.append([Ended(at, FileOf("", NOBODY, 0, b""))])

    def _open_last(self) -> None:
        last = self._segments[-1]
        with self._directory.folder((JOURNAL,)) as folder_fd:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = call("open", os.open, last.file, flags, dir_fd=folder_fd)
        if self.torn_bytes:
            call("ftruncate", os.ftruncate, self._fd, last.num_bytes)

    # ---------------------------------------------------------------- writing

    def append(self, rows: Sequence[AnyRow]) -> None:
        """Count them, and write them: a kill of this process does not lose them, a power loss may until `flush`. Raises
        StorageError when they could not be written."""
        if not rows:
            return
        with self._lock:
            for row in rows:
                self.balances.fold(row)
            if self._read_only:
                return
            raw = b"".join(map(encode_row, rows))
            try:
                self._reopen(rows[-1].at)
                if self._needs_checkpoint:  # these rows are in it
                    raw += encode_row(self.balances.checkpoint(rows[-1].at, self._boot))
                self._write(raw, rows[-1].at, len(rows))
            except StorageError:
                self._needs_checkpoint = True
                raise
            self._needs_checkpoint = False

    def _reopen(self, at: float) -> None:
        """After a purge could not open what it had rewritten."""
        if self._fd >= 0:
            return
        try:
            if self.problem or not self._segments:
                self._add_segment(at)
            else:
                self._open_last()
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
            self._add_segment(at)
        self._needs_checkpoint = True

    def _write(self, raw: bytes, at: float, num_rows: int = 0) -> None:
        segment = self._segments[-1]
        rest = memoryview(raw)
        try:
            while rest:
                written = call("write", os.write, self._fd, rest)
                if not written:
                    raise StorageError("write", "ZERO", Reason.IO_ERROR, "nothing was written to the journal")
                rest = rest[written:]
        except StorageError:
            self._cut_back(segment)
            raise
        segment.num_bytes += len(raw)
        segment.last_at = at
        segment.num_rows += num_rows
        self._is_dirty = True
        if segment.num_bytes >= self._segment_bytes:
            self._roll(at)

    def _cut_back(self, segment: _Segment) -> None:
        """A piece of a row is no row; what follows it is found by its marker all the same."""
        try:
            call("ftruncate", os.ftruncate, self._fd, segment.num_bytes)
        except StorageError:
            segment.num_bytes = os.fstat(self._fd).st_size

    def _roll(self, at: float) -> None:
        """Begin another segment; if that fails, the old one is gone on with."""
        old_fd = self._fd
        try:
            call("fdatasync", os.fdatasync, old_fd)
            self._add_segment(at)
        except StorageError:
            self._fd = old_fd
            return
        os.close(old_fd)
        self._keep_bounds(at)

    def _add_segment(self, at: float) -> None:
        segment = _Segment(self._next_number, 0, at, at)
        raw = encode_segment([self.balances.checkpoint(at, self._boot)])
        with self._directory.folder((JOURNAL,), create=True) as folder_fd:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = call("open", os.open, segment.file, flags, 0o600, dir_fd=folder_fd)
            try:
                if call("write", os.write, fd, raw) != len(raw):
                    raise StorageError("write", "SHORT", Reason.DISK_FULL, "no room for a segment of the journal")
                call("fdatasync", os.fdatasync, fd)
                self._directory.flush((JOURNAL,))
            except StorageError:
                os.close(fd)
                os.unlink(segment.file, dir_fd=folder_fd)
                raise
        segment.num_bytes = len(raw)
        self._fd = fd
        self._next_number = segment.number + 1
        self.problem = ""
        self._segments.append(segment)
        self._needs_checkpoint = False

    def look(self, at: float) -> int:
        """Whether the segments are where they were put; how many rows of this process went with one that is not. Then
        another one is begun, with the balances as they are known here. Where that fails `problem` says why, and the
        next look tries again. Raises StorageError where it can't be said."""
        with self._lock:
            if self._read_only or (self._fd < 0 and not self.problem):
                return 0
            lost, where = self._lost()
            for segment in lost:
                self._segments.remove(segment)
            num_rows = sum(segment.num_rows for segment in lost)
            if lost:
                names = f"{lost[0].file} to {lost[-1].file}" if len(lost) > 1 else lost[0].file
                when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                self._removed = (*self._removed[1 - MAX_TOLD :], f"{WAS_REMOVED}: {names}, seen at {when}")
            if self._fd >= 0 and where:
                os.close(self._fd)
                self._fd = -1
            if self._fd < 0:
                try:
                    self._add_segment(at)
                except StorageError as error:
                    self.problem = f"the journal can't be written where it was: {error}"
                    self._needs_checkpoint = True
            return num_rows

    def _lost(self) -> tuple[list[_Segment], bool]:
        """Segments that are not there any more, and whether the open one is among them."""
        try:
            with self._directory.folder((JOURNAL,)) as folder_fd:
                names = _inodes(folder_fd)
        except StorageError as error:
            if error.errno_name not in NOT_THERE:
                raise
            names = {}
        self._next_number = max([self._next_number, *(int(name[:16]) + 1 for name in names)])
        lost = [segment for segment in self._segments if segment.file not in names]
        if self._fd < 0 or not self._segments:
            return lost, False
        last = self._segments[-1]
        if last not in lost and names[last.file] != os.fstat(self._fd).st_ino:
            lost.append(last)
        return lost, last in lost

    @property
    def written_at(self) -> float:
        """When the last row was, by the file system's clock or the node's; 0.0 where there is none."""
        return max((segment.last_at for segment in list(self._segments)), default=0.0)

    @property
    def losses(self) -> tuple[str, ...]:
        """What the journal lacks, in words, as far as it is known. Waits for no write, as `num_bytes` does not."""
        torn = (END_WAS_DAMAGED,) if self.torn_bytes else ()
        return (*self._in_the_way, *torn, *self.damage, *self._removed)

    def check(self) -> None:
        """Read all, for `damage`. Raises StorageError."""
        scan = Scan()
        for _ in self.rows(0.0, scan):
            pass
        self.damage = tuple(scan.problems)

    def flush(self) -> None:
        """What was appended outlives a power loss from here on. Raises StorageError."""
        with self._lock:
            if self._fd < 0 or not self._is_dirty:
                return
            fd = call("dup", os.dup, self._fd)  # others append meanwhile, and may begin another segment
            self._is_dirty = False
        try:
            call("fdatasync", os.fdatasync, fd)
        except StorageError:
            with self._lock:
                self._is_dirty = True
            raise
        finally:
            os.close(fd)

    def close(self, now: float, *, in_order: bool) -> None:
        """`in_order`: with a checkpoint that says so; where it can't be written, it is as after a crash."""
        with self._lock:
            if self._fd < 0:
                return
            try:
                if in_order:
                    self._write(encode_row(self.balances.checkpoint(now, self._boot, is_closed=True)), now)
                    call("fdatasync", os.fdatasync, self._fd)
            except StorageError:
                pass
            os.close(self._fd)
            self._fd = -1

    # ---------------------------------------------------------------- bounds

    @property
    def num_bytes(self) -> int:
        """Without the lock, which who writes may hold for as long as the disk likes: it is told as part of the tier's
        health. A copy of the list is one step, and so is each number."""
        return sum(segment.num_bytes for segment in list(self._segments))

    def keep_bounds(self, now: float) -> None:
        """Remove what is too old: to be called now and then, for somebody may write nothing for days. Raises
        StorageError."""
        with self._lock:
            if self._fd < 0:
                return
            is_stale = now - self._segments[-1].begun_at > self._max_age_seconds / SEGMENTS_PER_AGE
            if is_stale and self._is_worth_rolling():
                self._roll(now)
            self._keep_bounds(now)

    def _is_worth_rolling(self) -> bool:
        checkpoint = len(HEAD) + len(encode_row(self.balances.checkpoint(0.0, self._boot)))
        return self._segments[-1].num_bytes > 2 * checkpoint

    def _keep_bounds(self, now: float) -> None:
        while len(self._segments) > 1 and (
            sum(segment.num_bytes for segment in self._segments) > self._max_bytes
            or now - self._segments[0].last_at > self._max_age_seconds
        ):
            self._remove(self._segments.pop(0))

    def _remove(self, segment: _Segment) -> None:
        with self._directory.folder((JOURNAL,)) as folder_fd:
            try:
                call("unlink", os.unlink, segment.file, dir_fd=folder_fd)
            except StorageError as error:
                if error.errno_name != "ENOENT":
                    raise

    # ---------------------------------------------------------------- reading

    def rows(self, since: float, scan: Scan) -> Iterator[AnyRow]:
        """Rows that are not older than `since`, oldest first; `scan.damaged` counts what was skipped, and
        `scan.problems` says which segments are missing, can't be read, or lack rows. Others may append meanwhile.
        Raises StorageError."""
        with self._lock:
            kept = list(self._segments)
        segments = [one for one in kept if one.last_at + CLOCKS_APART_SECONDS >= since] or kept[-1:]
        follows = {one.number: before.number for before, one in pairwise(kept)}
        before: Balances | None = None  # what the last segment came to, where that is known
        for segment in segments:
            if (missing := segment.number - follows.get(segment.number, segment.number - 1) - 1) > 0:
                scan.problems.append(f"segments are missing from the journal: {missing}, before {segment.file}")
                before = None
            one, balances = Scan(), None
            try:
                for row in read_rows(self._read(segment), one):
                    if balances is None and isinstance(row, Checkpoint):
                        balances = Balances()
                        balances.fold(row)
                        # A purge moves bytes from group to group meanwhile, not from account to account.
                        if before is not None and before.of_accounts() != balances.of_accounts():
                            scan.problems.append(f"rows are missing from the journal before {segment.file}")
                    elif balances is not None:
                        balances.fold(row)
                    if row.at >= since:
                        yield row
            except UnknownFormat:
                one.damaged += 1
            scan.damaged += one.damaged
            before = None if one.damaged or one.is_torn else balances
            with self._lock:
                is_kept, is_last = segment in self._segments, segment is kept[-1]
            if is_kept and not one.any_row and segment.num_bytes > len(HEAD):
                scan.problems.append(f"{segment.file} of the journal can't be read")
            elif is_kept and one.is_torn and not is_last:
                scan.problems.append(f"the end of {segment.file} of the journal was cut off or damaged")

    def begins(self) -> float:
        """When the oldest row that is kept was written; 0.0 for none. Raises StorageError."""
        with self._lock:
            segments = list(self._segments)
        for segment in segments:
            row = next(read_rows(self._read(segment), Scan()), None)
            if row is not None:
                return row.at
        return 0.0

    # ---------------------------------------------------------------- purging

    def rewrite(self, anonymizer: Anonymizer, now: float) -> int:
        """Put every row as `anonymizer` has it, durably; how many changed. Each segment is replaced whole. Raises
        StorageError, and may then be asked for again."""
        if self._read_only:
            raise StorageError("write", "EROFS", Reason.READ_ONLY, "the journal is used read only")
        with self._lock:
            closed = self._segments[:-1]
        changed = sum(self._rewrite(segment, anonymizer) for segment in closed)  # nobody writes to those any more
        with self._lock:
            changed += sum(self._rewrite(segment, anonymizer) for segment in self._segments if segment not in closed)
            for segment in closed:
                if segment not in self._segments:  # it was too old meanwhile, and would be there again
                    self._remove(segment)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            self.torn_bytes = 0
            self._reopen(now)
            self.balances.fold(anonymizer.apply(self.balances.checkpoint(now, self._boot)))
            self._directory.flush((JOURNAL,))
        return changed

    def _rewrite(self, segment: _Segment, anonymizer: Anonymizer) -> int:
        scan = Scan()
        before = list(read_rows(self._read(segment), scan))
        after = [anonymizer.apply(row) for row in before]
        changed = sum(one is not other for one, other in zip(before, after, strict=True))
        if changed or scan.damaged or scan.is_torn:  # of what can't be read nobody can say whose it was
            raw = encode_segment(after)
            write_small_file(self._directory, (JOURNAL,), segment.file, raw)
            with self._directory.folder((JOURNAL,)) as folder_fd:
                times = (segment.last_at, segment.last_at)
                call("utime", os.utime, segment.file, times, dir_fd=folder_fd, follow_symlinks=False)
            segment.num_bytes = len(raw)
        return changed


def _inodes(folder_fd: int) -> dict[str, int]:
    """By name, of all that has a segment's name. Raises StorageError."""
    found = {}
    for name in call("listdir", os.listdir, folder_fd):
        if _NAME.fullmatch(name):
            try:
                found[name] = call("stat", os.stat, name, dir_fd=folder_fd, follow_symlinks=False).st_ino
            except StorageError as error:
                if error.errno_name != "ENOENT":  # removed since it was listed
                    raise
    return found
