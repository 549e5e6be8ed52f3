"""What each instruction comes to: which files and rows change, and what is reported.

Every operation runs on one of the queue's threads, alone on its extent. It answers with reports of its own, or hands
its report to the flusher, which sends it when the directories are flushed. An operation that meets a bug fails alone.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from tierkv.core.identity import Identity
from tierkv.core.instructions import (
    DamageFound,
    Demote,
    ExtentRow,
    FileLost,
    OpenNamespace,
    OpFailed,
    Read,
    ReadDone,
    Remove,
    RemoveDone,
    Report,
    SetAside,
    StillUsed,
    TouchRow,
    Write,
    WriteDone,
)
from tierkv.core.keys import count_keys
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, StorageError
from tierkv.storage.catalog import DropRow, PutRow, Restamp, TouchedRow
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, Verified, WrittenFile
from tierkv.storage.format import ALIGN_BYTES, file_bytes, stored_bytes
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import MODELS, QUARANTINE, ExtentName, Parts
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure
from tierkv.storage.unused_file import Used
from tierkv.workers.coarse_times import CoarseTimes
from tierkv.workers.files import Files
from tierkv.workers.flusher import Flusher, Then
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.quiet_log import QuietLog
from tierkv.workers.tier_gate import Closed, TierGate
from tierkv.workers.tier_health import probe

log = logging.getLogger(__name__)

_GONE = (Reason.NOT_FOUND, Reason.UNKNOWN_FORMAT)  # nothing under that name that could be read later

_IN_THE_WAY = ("ENOTDIR", "ELOOP", "EISDIR")
"""How it fails to get to a name where something foreign is in its place, or in that of a folder above it."""

_LOCKED = ("EACCES", "EPERM")
"""How it fails to look at what has a name where that is somebody else's. That nothing may be named is the tier's."""


class FileBooks(Protocol):
    """Where files that come and go are written down, before and after."""

    def writing(self, name: ExtentName) -> AbstractContextManager[None]: ...
    def removing(self, name: ExtentName, target: str, reason: str) -> AbstractContextManager[None]: ...
    def left_quarantine(self, group: bytes, num_bytes: int, target: str, reason: str) -> None: ...


class Unbooked:
    """For a tier whose files others book."""

    def writing(self, name: ExtentName) -> AbstractContextManager[None]:
        return nullcontext()

    def removing(self, name: ExtentName, target: str, reason: str) -> AbstractContextManager[None]:
        return nullcontext()

    def left_quarantine(self, group: bytes, num_bytes: int, target: str, reason: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Checked:
    """What scrubbing found of one file, and whether it was set aside."""

    verified: Verified
    was_set_aside: bool


class Operations:
    def __init__(
        self,
        *,
        directory: DataDirectory,
        arena: memoryview,
        files: Files,
        quarantine: Quarantine,
        groups: Groups,
        index: IndexWriter,
        flusher: Flusher,
        gate: TierGate,
        times: CoarseTimes,
        books: FileBooks,
        report: Callable[[Sequence[Report]], None],
        now: Callable[[], float],
        quiet: QuietLog | None = None,
        source: DataDirectory | None = None,
    ) -> None:
        """`source` has the files that Demote copies, where there are any."""
        self._source = source
        self._arriving: set[ExtentName] = set()
        self._quiet = quiet or QuietLog(log)
        self._directory = directory
        self._arena = arena
        self._files = files
        self._quarantine = quarantine
        self._groups = groups
        self._index = index
        self._flusher = flusher
        self._gate = gate
        self._times = times
        self._books = books
        self._report = report
        self._now = now

    # ---------------------------------------------------------------- groups

    def open_namespace(self, opened: OpenNamespace) -> None:
        """Not reported: where it fails, so does the first write, which tries again."""
        self._answer("OpenNamespace", opened.group, lambda: self._open_namespace(opened), None)

    def _open_namespace(self, opened: OpenNamespace) -> None:
        if self._directory.read_only:
            return
        try:
            self._groups.make(opened.identity.weights, opened.group)
        except StorageError as error:
            self._note_unwritten(Failure.of(error), 0)
            self._warn("groups not made", error, f"the folder of group {opened.group.hex()} was not made: {error}")

    # ---------------------------------------------------------------- write, demote

    def write(self, write: Write) -> None:
        self._answer(
            "Write", write.key, lambda: self._write(write), lambda reason, problem: OpFailed(write.op, reason, problem)
        )

    def _write(self, write: Write) -> Report | None:
        return self._arrive(
            write, _expected_bytes(write), lambda known: self._files.write(self._directory, self._arena, write, known)
        )

    def demote(self, demote: Demote) -> None:
        self._answer(
            "Demote",
            demote.key,
            lambda: self._demote(demote),
            lambda reason, problem: OpFailed(demote.op, reason, problem),
        )

    def _demote(self, demote: Demote) -> Report | None:
        source = self._source
        if source is None:
            raise BrokenInvariant("this worker has no tier above its own")
        try:
            expected = self._files.status(source, ExtentName.of(demote)).st_size
        except StorageError as error:
            return OpFailed(demote.op, Reason(error.reason), f"the file to be copied: {error}")
        if self._directory.codec is FileCodec.RAW:  # one that is smaller there becomes what it was
            expected = max(expected, count_keys(demote.keys) * stored_bytes(demote.block_bytes))
        return self._arrive(demote, expected, lambda known: self._files.copy(source, self._directory, demote, known))

    def is_arriving(self, name: ExtentName) -> bool:
        """Whether a file is being written under that name, or its row may not have got to the index writer yet."""
        return name in self._arriving

    def _arrive(
        self, order: Write | Demote, expected: int, move: Callable[[Identity], WrittenFile | Failure]
    ) -> Report | None:
        """A file of about `expected` bytes comes to its name by `move`, which gets the identity of its group."""
        started = time.monotonic()
        name = ExtentName.of(order)
        try:
            identity = self._groups.make(order.fingerprint, order.group, self._source)
        except StorageError as error:
            reason = self._note_unwritten(Failure.of(error), 0)
            reason = Reason.IO_ERROR if reason is Reason.NOT_FOUND else reason
            return OpFailed(order.op, reason, f"the group's folder can't be made: {error}")
        if identity is None:
            reason = Reason.IDENTITY_MISMATCH if self._source is None else Reason.IO_ERROR  # the file may well be right
            return OpFailed(order.op, reason, f"group {order.group.hex()} was never opened")
        closed = self._admit(expected)
        if closed is not None:
            return OpFailed(order.op, closed.reason, closed.problem)
        self._arriving.add(name)
        try:
            try:
                with self._books.writing(name):
                    outcome = move(identity)
            finally:
                self._gate.finish(expected)
            if isinstance(outcome, Failure):
                return self._write_failed(order, name, outcome, expected)
            self._put_row(order, name, outcome)
            if outcome.damaged is not None:
                self._damage_replaced(name, outcome.damaged)
        finally:
            self._arriving.discard(name)
        self._times.was_set(name, time.monotonic())
        self._flush_then(outcome.flush, lambda failure: self._written(order, outcome, failure, started))
        return None

    def _damage_replaced(self, name: ExtentName, reason: Reason) -> None:
        self._quiet.warning(f"damaged extents ({reason})", f"{name} was damaged ({reason}), and has been replaced")
        self._report([DamageFound(reason)])

    def _admit(self, num_bytes: int) -> Closed | None:
        try:
            space = self._directory.space()
        except StorageError as error:
            self._gate.write_failed(Failure.of(error), num_bytes)
            return Closed(Reason(error.reason), str(error))
        return self._gate.admit(num_bytes, space)

    def _write_failed(self, order: Write | Demote, name: ExtentName, failure: Failure, expected: int) -> Report:
        reason = self._note_unwritten(failure, expected) if failure.errno_name else failure.reason
        self._quiet.warning(
            f"extents not written ({failure.operation} {failure.errno_name})",
            f"{name} was not written: {failure.operation}: {failure.problem}",
        )
        return OpFailed(order.op, reason, failure.problem)

    def _note_unwritten(self, failure: Failure, expected: int) -> Reason:
        """Why nothing was written: for something about the tier, which the gate is told, or about that one name, where
        another file can be written at the same moment."""
        is_locked = failure.operation == "open" and failure.errno_name in _LOCKED
        if (is_locked or failure.errno_name in _IN_THE_WAY) and self._is_well():
            self._gate.count(failure)
            return Reason.NAME_TAKEN
        self._gate.write_failed(failure, expected)
        return failure.reason

    def _is_well(self) -> bool:
        try:
            with self._directory.folder((MODELS,)):
                return probe(self._directory) is None
        except StorageError:
            return False

    def _put_row(self, order: Write | Demote, name: ExtentName, written: WrittenFile) -> None:
        try:
            status = self._files.status(self._directory, name)
        except StorageError as error:
            if error.reason == Reason.NOT_FOUND:
                self._count_absent(Failure.of(error))
            else:
                self._gate.count(Failure.of(error))
            return  # the next start reads its header
        row = ExtentRow(
            key=order.key,
            parent=order.parent,
            first_token=order.first_token,
            keys=written.keys,
            block_bytes=order.block_bytes,
            file_bytes=written.file_bytes,
            created=order.created,
            last_used=order.last_used,
            hits=order.hits,
        )
        self._index.add(PutRow(_row_name(name), IndexedFile(row, status.st_ino, status.st_ctime_ns)))

    def _written(self, order: Write | Demote, written: WrittenFile, failure: Failure | None, started: float) -> Report:
        if failure is None:
            return WriteDone(order.op, written.file_bytes, time.monotonic() - started)
        self._gate.write_failed(failure, 0)
        if self._directory.is_shared:  # it may stay: then it is news, as another node's is
            self._index.add(DropRow(_row_name(ExtentName.of(order))))
        return OpFailed(
            order.op, failure.reason, f"the file is there, but its folder was not flushed: {failure.problem}"
        )

    # ---------------------------------------------------------------- read

    def read(self, read: Read) -> None:
        self._answer("Read", read.key, lambda: self._read(read), lambda reason, _: ReadDone(read.op, 0, 0.0, reason))

    def _read(self, read: Read) -> Report:
        started = time.monotonic()
        name = ExtentName.of(read)
        outcome = self._files.read(self._directory, self._arena, read, self._identity_for(read))
        self._note_reading(name, outcome)
        return ReadDone(
            op=read.op,
            valid=outcome.valid,
            seconds=time.monotonic() - started,
            reason=outcome.reason,
            gone=self._settle(name, outcome),
            tokens=outcome.tokens,
            extras=outcome.extras,
        )

    def _note_reading(self, name: ExtentName, outcome: ReadOutcome) -> None:
        if outcome.failure is None:
            self._gate.read_succeeded()
        elif outcome.reason is Reason.NOT_FOUND:
            self._count_absent(outcome.failure)
        elif outcome.reason is None:
            self._gate.count(outcome.failure)
        else:
            self._gate.read_failed(outcome.failure, name)
            failure = outcome.failure
            kind = f"extents not read ({failure.operation} {failure.errno_name})"
            self._quiet.warning(kind, f"{name} was not read: {failure.operation}: {failure.problem}")

    def _count_absent(self, failure: Failure) -> None:
        """Where nodes share the files, one that is gone is no error: another node has evicted it."""
        if not self._directory.is_shared:
            self._gate.count(failure)

    def _identity_for(self, read: Read) -> Identity | None:
        """None where it is not known: the header's own digest of it is compared in any case."""
        try:
            return self._groups.look_up(read.fingerprint, read.group)
        except StorageError as error:
            self._gate.count(Failure.of(error))
            return None

    def _settle(self, name: ExtentName, outcome: ReadOutcome) -> bool:
        """Whether there is nothing to read under that name any more. A damaged file is set aside; where that fails, it
        is still not to be asked for again."""
        if outcome.damaged:
            self._quiet.warning(
                f"damaged extents ({outcome.reason})", f"{name} is damaged ({outcome.reason}): {outcome.problem}"
            )
            try:
                self._set_aside(name, outcome.reason or Reason.BAD_HEADER)
            except StorageError as error:
                self._gate.count(Failure.of(error))
                self._warn("damaged extents that can't be set aside", error, f"{name} can't be set aside: {error}")
            return True
        if outcome.reason in _GONE or outcome.reason == Reason.KEY_MISMATCH:  # there is one, but another node's
            self._index.add(DropRow(_row_name(name)))
            return True
        return False

    # ---------------------------------------------------------------- remove, set aside

    def remove(self, remove: Remove) -> None:
        self._answer(
            "Remove",
            remove.key,
            lambda: self._remove(remove),
            lambda reason, problem: OpFailed(remove.op, reason, problem),
        )

    def _remove(self, remove: Remove) -> Report | None:
        name = ExtentName.of(remove)
        if self._directory.read_only:
            return OpFailed(remove.op, Reason.READ_ONLY, f"{name} stays: started with read_only")
        try:
            with self._books.removing(name, remove.to, remove.reason or ""):
                if math.isinf(remove.unless_used_since):
                    was_there: bool | Used = self._files.remove(self._directory, name)
                else:
                    since = remove.unless_used_since
                    was_there = self._files.remove_unused(self._directory, name, since, self._now())
        except StorageError as error:
            self._index.add(DropRow(_row_name(name)))
            return self._remove_failed(remove.op, name, error)
        if isinstance(was_there, Used):
            return StillUsed(remove.op, was_there.last_used)
        self._index.add(DropRow(_row_name(name)))
        if not was_there:
            return RemoveDone(remove.op)
        self._flush_then((name.folder,), lambda failure: self._removed(remove.op, failure))
        return None

    def set_aside(self, aside: SetAside) -> None:
        self._answer(
            "SetAside",
            aside.key,
            lambda: self._move_away(aside),
            lambda reason, problem: OpFailed(aside.op, reason, problem),
        )

    def _move_away(self, aside: SetAside) -> Report | None:
        name = ExtentName.of(aside)
        try:
            was_there = self._set_aside(name, aside.reason)
        except StorageError as error:
            return self._remove_failed(aside.op, name, error)
        if not was_there:
            return RemoveDone(aside.op)
        self._flush_then(((QUARANTINE,), name.folder), lambda failure: self._removed(aside.op, failure))
        return None

    def _set_aside(self, name: ExtentName, reason: Reason) -> bool:
        self._index.add(DropRow(_row_name(name)))
        return self._quarantine.set_aside(name, reason, self._now())

    def _removed(self, op: int, failure: Failure | None) -> Report:
        """It is gone from its name either way; a flush that failed may bring it back after a power loss, when the next
        start finds and counts it."""
        if failure is not None:
            self._gate.count(failure)
        return RemoveDone(op)

    def _remove_failed(self, op: int, name: ExtentName, error: StorageError) -> Report:
        self._gate.count(Failure.of(error))
        self._warn("extents not removed", error, f"{name} was not removed: {error}")
        return OpFailed(op, Reason(error.reason), str(error))

    # ---------------------------------------------------------------- touch

    def touch_row(self, row: TouchRow) -> None:
        """The index's part, which needs no place in the queue: a row that is not there is not made."""
        self._index.add(TouchedRow(_row_name(ExtentName.of(row)), row.last_used, row.hits))

    def touch_file(self, row: TouchRow) -> None:
        """The mtime, and the row's stamp with it."""
        self._answer("Touch", row.key, lambda: self._touch_file(row), None)

    def _touch_file(self, row: TouchRow) -> None:
        name = ExtentName.of(row)
        self._times.was_set(name, time.monotonic())
        try:
            before = self._files.status(self._directory, name)
            used = min(row.last_used, self._now())
            if self._directory.is_shared and before.st_mtime >= used:
                return  # another node has used it since
            self._files.set_mtime(self._directory, name, used)
            after = self._files.status(self._directory, name)
        except StorageError as error:
            if error.reason != Reason.NOT_FOUND:  # it was removed meanwhile
                self._gate.count(Failure.of(error))
            return
        restamp = Restamp(before.st_ctime_ns, after.st_ctime_ns)
        self._index.add(TouchedRow(_row_name(name), row.last_used, row.hits, restamp))

    def look_for(self, name: ExtentName) -> None:
        """Is the file of a row still there? Told when it is not."""
        self._answer("Look", name.key, lambda: self._look_for(name), None)

    def _look_for(self, name: ExtentName) -> Report | None:
        try:
            self._files.status(self._directory, name)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                self._gate.count(Failure.of(error))
                return None
            self._index.add(DropRow(_row_name(name)))
            return FileLost(name.group, name.rank, name.key)
        return None

    # ---------------------------------------------------------------- scrub

    def check(self, name: ExtentName, *, repair: bool, pause: Callable[[int], None]) -> Checked:
        """Verify one file; with `repair`, set it aside when it is damaged. Raises what `pause` raises."""
        verified = self._files.verify(self._directory, name, pause)
        if verified.failure is not None and verified.reason != Reason.NOT_FOUND:
            self._gate.count(verified.failure)
        if not verified.damaged:
            return Checked(verified, False)
        self._quiet.warning(
            f"damaged extents ({verified.reason})", f"{name} is damaged ({verified.reason}): {verified.problem}"
        )
        try:
            return Checked(verified, repair and self._set_aside(name, verified.reason or Reason.CHECKSUM))
        except StorageError as error:
            self._gate.count(Failure.of(error))
            return Checked(verified, False)

    # ---------------------------------------------------------------- answering

    def _warn(self, what: str, error: StorageError, text: str) -> None:
        self._quiet.warning(f"{what} ({error.operation} {error.errno_name})", text)

    def _answer(
        self,
        what: str,
        key: bytes,
        work: Callable[[], Report | None],
        failed: Callable[[Reason, str], Report] | None,
    ) -> None:
        """Report what `work` comes to. An exception that nobody foresaw fails this operation alone."""
        try:
            report = work()
        # A bug met by one extent must not take the worker, and all others' bytes, with it.
        except Exception as error:  # noqa: BLE001 - told with its trace, once in a while if there are many
            self._quiet.warning(
                f"{what} met a bug ({type(error).__name__})", f"{what} of {key.hex()} failed: {traceback.format_exc()}"
            )
            report = failed(Reason.IO_ERROR, f"{type(error).__name__}: {error}") if failed is not None else None
        if report is not None:
            self._report([report])

    def _flush_then(self, folders: Sequence[Parts], then: Then) -> None:
        self._flusher.add(folders, then)


def _row_name(name: ExtentName) -> bytes:
    return Namespace.of(name).row_name(name.key)


def _expected_bytes(write: Write) -> int:
    """Room for the blocks, and for a header of about the size of what goes into it."""
    extras = sum(len(extra) for several in write.extras.values() for extra in several)
    header = ALIGN_BYTES + 2 * len(write.keys) + len(write.tokens) + extras
    return file_bytes(count_keys(write.keys), write.block_bytes, -(-header // ALIGN_BYTES) * ALIGN_BYTES)
