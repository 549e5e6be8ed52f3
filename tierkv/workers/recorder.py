"""The recorder: writes down what engines ask of the node, for `tierkv replay`.

    python -m tierkv.workers.recorder CONFIG      started by the supervisor where `record` names a file

    front -> packets -> this process -> FILE, and FILE.1 when that is full; what was there before FILE.1 is gone

It is a process of its own so that neither the front nor the storage worker ever waits for this file, and so that a node
without a data directory can have one. The front drops what it has no room for; a disk that is full or away loses lines,
and the node goes on. What is not recorded is counted, told to the front every second, and told of in the file by a
line of its own, so that no replay takes the rest for the whole. A purge removes the lines of its groups from both
files, by rewriting them.

Exit codes: 0 the front and the supervisor are gone, or it was told to end; 71 the supervisor is gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierkv.core.reasons import Reason
from tierkv.core.recording import (
    FORMAT,
    AnyAnswer,
    AnyLine,
    AnyPacket,
    Asked,
    Begun,
    Forget,
    Forgotten,
    Group,
    Mark,
    Missing,
    Recorded,
    Stored,
    split_short,
)
from tierkv.storage.system_calls import translate
from tierkv.workers.lifeline import end_with_parent

MAX_PACKET_BYTES = 4 * 2**20
MAX_KNOWN_BLOCKS = 500_000
"""Keys that are remembered as written. When there are more, all are forgotten, and prompts are written whole again."""

MAX_UNPLACED = 10_000
FLUSH_SECONDS = 1.0

log = logging.getLogger(__name__)


class RecorderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`max_bytes` is what both files together may have. `socket_fd` is inherited."""

    path: str
    max_bytes: int
    socket_fd: int
    parent_pid: int
    log_level: str = "info"

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A line for the file. Of requests that are missing it says so with a `reason`, and when the first one came."""

    content: bytes
    requests: int = 0
    reason: str = ""
    since: float = 0.0


class Recording:
    """The two files. Raises OSError where they can't be written; what was not written is lost and counted, and the next
    line begins with a file that is whole, and with what is missing before it."""

    def __init__(self, path: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._half = max_bytes // 2
        self._now = now
        self._fd = -1
        self._bytes = 0
        self._written_here = 0  # requests, since this file was opened
        self._waiting: list[_Waiting] = []
        self._unplaced: list[Asked | Stored] = []  # of groups that are not known yet
        self._untold: dict[str, tuple[int, float]] = {}  # by reason, how many requests no line says are missing
        self.written = 0
        self.missing: Counter[str] = Counter()
        self._groups: dict[bytes, Group] = {}
        self._told: set[bytes] = set()  # groups that this file has told of
        self._known: set[tuple[bytes, bytes]] = set()  # of a group, blocks that this file has written

    def note(self, group: Group) -> None:
        """Its group is known from here on, and what has waited for that is added."""
        self._groups[group.group] = group
        mine = [one for one in self._unplaced if one.group == group.group]
        self._unplaced = [one for one in self._unplaced if one.group != group.group]
        problem: OSError | None = None
        for one in mine:
            try:
                self.add(one)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem

    def add(self, happened: Asked | Stored) -> bool:
        """Whether its group is known. Else it waits until that is: the recorder before this one may have been told. To
        be followed by `flush`."""
        group = self._groups.get(happened.group)
        if group is None:
            if len(self._unplaced) < MAX_UNPLACED:
                self._unplaced.append(happened)
            else:
                self._lose(1, Reason.WORKER_DIED)
            return False
        if self._fd < 0:
            try:
                self._open()
            except OSError as error:
                self._lose(1, translate("open", error).reason)
                raise
        self._tell_missing()
        if group.group not in self._told:
            self._write(group)
            self._told.add(group.group)
        self._write(self._without_known(happened), requests=1)
        return True

    def note_missing(self, missing: Missing) -> None:
        """The front has counted these; they are told of before the next line."""
        self._keep_untold(missing.reason, missing.requests, missing.since)

    def flush(self) -> bool:
        """Hand it to the file system; whether there was anything."""
        is_moved = self._fd >= 0 and self._is_elsewhere()
        if self._fd >= 0:
            self._tell_missing()
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._hand_over(waiting)
        if is_moved:
            self.close()
        elif waiting and self._bytes >= self._half:
            self.close()
            os.replace(self._path, self._older)
        return bool(waiting)

    def finish(self) -> bool:
        """Nothing comes any more: say what is missing, and flush."""
        if self._untold and self._fd < 0:
            self._open()
        return self.flush()

    def untold(self) -> dict[str, int]:
        """Requests that are missing and that no line in the file says so of, by reason."""
        waiting = Counter[str]()
        for line in self._waiting:
            if line.reason:
                waiting[line.reason] += line.requests
        for reason, (requests, _) in self._untold.items():
            waiting[reason] += requests
        return dict(waiting)

    def file_bytes(self) -> int:
        """Of both files. What can't be looked at counts nothing: that it can't be written is told anyway."""
        total = 0
        for path in (self._path, self._older):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def close(self) -> None:
        self._waiting.clear()
        self._written_here = 0
        self._told.clear()
        self._known.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def forget(self, purge: Forget) -> int:
        """Remove what `purge` means from both files, across a power loss. Returns how many lines that were."""
        self.flush()
        self.close()
        removed = sum(self._rewrite(path, purge) for path in (self._older, self._path))
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return removed

    def _is_elsewhere(self) -> bool:
        """Whether somebody has moved the file: it gets its last lines, and a new one begins. From one that was removed
        all is lost that it had of ours, and what waits as well, for it builds on that."""
        try:
            there = self._path.stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError:
            return False  # it can't be said; whether it can be written is seen by writing
        ours = os.fstat(self._fd)
        if there is not None and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
            return False
        if ours.st_nlink:
            return True
        log.error("%s was removed, with %d requests that this recorder had written", self._path, self._written_here)
        self._lose(self._written_here, Reason.NOT_FOUND)
        waiting, self._waiting = self._waiting, []
        self._count(waiting, 0, Reason.NOT_FOUND)
        self.close()
        return False

    def _hand_over(self, waiting: list[_Waiting]) -> None:
        content = memoryview(b"".join(line.content for line in waiting))
        done = 0
        try:
            while done < len(content):
                done += os.write(self._fd, content[done:])
        except OSError as error:
            self._count(waiting, done, translate("write", error).reason)
            self.close()  # a line may be torn
            raise
        self._count(waiting, done)

    def _count(self, waiting: list[_Waiting], num_bytes: int, reason: str = "") -> None:
        """The lines that lie within `num_bytes` are written; those behind them are lost."""
        end = 0
        for line in waiting:
            end += len(line.content)
            is_written = end <= num_bytes
            if line.reason:
                if not is_written:
                    self._keep_untold(line.reason, line.requests, line.since)
            elif is_written:
                self.written += line.requests
                self._written_here += line.requests
            else:
                self._lose(line.requests, reason)

    def _lose(self, requests: int, reason: str) -> None:
        if requests:
            self.missing[reason] += requests
            self._keep_untold(reason, requests, self._now())

    def _keep_untold(self, reason: str, requests: int, since: float) -> None:
        before, first = self._untold.get(reason, (0, since))
        self._untold[reason] = before + requests, min(first, since)

    def _tell_missing(self) -> None:
        for reason, (requests, since) in self._untold.items():
            line = Missing(since=since, requests=requests, reason=reason)
            self._write(line, requests=requests, reason=reason, since=since)
        self._untold.clear()

    def _open(self) -> None:
        """Behind what is there, on a line of its own."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._bytes = os.fstat(self._fd).st_size
        if self._bytes:
            self._waiting.append(_Waiting(b"\n"))
        self._write(Begun(format=FORMAT, time=self._now()))

    def _write(self, line: AnyLine, *, requests: int = 0, reason: str = "", since: float = 0.0) -> None:
        content = msgspec.json.encode(line) + b"\n"
        self._waiting.append(_Waiting(content, requests, reason, since))
        self._bytes += len(content)

    def _without_known(self, happened: Asked | Stored) -> Asked | Stored:
        if len(self._known) > MAX_KNOWN_BLOCKS:
            self._known.clear()
        keys = split_short(happened.keys)
        blocks = [(happened.group, key) for key in keys]
        first = len(keys)
        while first and blocks[first - 1] not in self._known:
            first -= 1
        self._known.update(blocks[first:])
        after = keys[first - 1] if first else b""
        return msgspec.structs.replace(happened, after=after, keys=b"".join(keys[first:]))

    # ---- purges

    def _rewrite(self, path: Path, purge: Forget) -> int:
        """Without the lines that are to go."""
        try:
            doomed = _groups_in(path, purge)
        except FileNotFoundError:
            return 0
        fresh = path.with_name(path.name + ".new")
        removed = 0
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with path.open("rb") as lines, os.fdopen(fd, "wb") as kept:
            for line in lines:
                if _group_of(line) in doomed:
                    removed += 1
                else:
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(fresh, path)
        return removed


_LINES = msgspec.json.Decoder(AnyLine)


def _groups_in(path: Path, purge: Forget) -> set[bytes]:
    """Groups of which nothing may stay. What can't be read is of nobody, and goes with any purge."""
    doomed = {_UNREADABLE, *purge.groups}
    keys = set(purge.keys)
    with path.open("rb") as lines:
        for line in lines:
            match _decode(line):
                case Group() as group:
                    if group.fingerprint in purge.fingerprints or group.salt in purge.salts:
                        doomed.add(group.group)
                case Asked() | Stored() as happened:
                    if not keys.isdisjoint(split_short(happened.keys)):
                        doomed.add(happened.group)
    return doomed


_UNREADABLE = b"?"


def _group_of(line: bytes) -> bytes:
    match _decode(line):
        case Group(group=group) | Asked(group=group) | Stored(group=group):
            return group
        case Begun() | Missing():
            return b""
        case None:
            return _UNREADABLE if line.strip() else b""


def _decode(line: bytes) -> AnyLine | None:
    try:
        return _LINES.decode(line)
    except msgspec.MsgspecError:
        return None


class Recorder:
    """Packets in, lines out. One thread."""

    def __init__(self, sock: socket.socket, recording: Recording) -> None:
        self._sock = sock
        self._recording = recording
        self._problem = ""
        self._lost = 0
        self._taken = 0
        self._mark = 0
        self._said = Recorded(pid=os.getpid(), file_bytes=0)  # all that the front was told, summed
        self._decoder: msgspec.msgpack.Decoder[AnyPacket] = msgspec.msgpack.Decoder(AnyPacket)

    def run(self) -> None:
        """Until nobody is left who could send anything."""
        self._report()
        due = time.monotonic() + FLUSH_SECONDS
        while True:
            if select.select([self._sock], [], [], max(0.0, due - time.monotonic()))[0]:
                packet = self._sock.recv(MAX_PACKET_BYTES)
                if not packet:
                    break
                self._take(self._decoder.decode(packet))
            if time.monotonic() >= due:
                self._flush()
                self._report()
                due = time.monotonic() + FLUSH_SECONDS
        self._try(self._recording.finish)
        self._recording.close()

    def _take(self, packet: AnyPacket) -> None:
        match packet:
            case Group():
                self._try(lambda: self._recording.note(packet))
            case Forget():
                self._forget(packet)
            case Missing():
                self._recording.note_missing(packet)
            case Mark(number=number):
                self._mark = number
                self._flush()
                self._report()
            case Asked() | Stored():
                self._taken += 1
                self._try(lambda: self._recording.add(packet))

    def _flush(self) -> None:
        if self._try(self._recording.flush) and self._problem:
            log.info("recording again, after %d writes that failed", self._lost)
            self._problem, self._lost = "", 0

    def _try(self, write: Callable[[], bool | None]) -> bool:
        """Whether it did something. A recording that can't be written is told of once, and tried again with the next
        line."""
        try:
            return bool(write())
        except OSError as error:
            self._lost += 1
            problem = f"{error.filename or 'the recording'}: {error.strerror}"
            if problem != self._problem:
                log.error("what engines ask is not recorded: %s", problem)
            self._problem = problem
            return False

    def _report(self) -> None:
        """What is new since the last one that the front could be told."""
        recording, said = self._recording, self._said
        report = Recorded(
            pid=said.pid,
            file_bytes=recording.file_bytes(),
            taken=self._taken - said.taken,
            written=recording.written - said.written,
            missing=dict(recording.missing - Counter(said.missing)),
            untold=recording.untold(),
            problem=self._problem,
            mark=self._mark,
        )
        if self._say(report):
            missing = dict(recording.missing)
            self._said = msgspec.structs.replace(said, taken=self._taken, written=recording.written, missing=missing)

    def _forget(self, purge: Forget) -> None:
        try:
            answer = Forgotten(job=purge.job, lines=self._recording.forget(purge))
        except OSError as error:
            answer = Forgotten(job=purge.job, lines=0, problem=f"{error.filename or 'recording'}: {error.strerror}")
            log.error("a purge could not remove its lines from the recording: %s", answer.problem)
        self._say(answer)  # else it is asked for again

    def _say(self, answer: AnyAnswer) -> bool:
        """Whether the front will read it, or the one after it: it may be gone, or not listen."""
        try:
            self._sock.send(msgspec.msgpack.encode(answer), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True


def main(arguments: list[str]) -> int:
    config = msgspec.json.decode(arguments[0], type=RecorderConfig, strict=True)
    end_with_parent(config.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor; the end of the socket is what ends this
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s recorder: %(message)s")
    with socket.socket(fileno=config.socket_fd) as sock:
        Recorder(sock, Recording(Path(config.path), config.max_bytes)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
