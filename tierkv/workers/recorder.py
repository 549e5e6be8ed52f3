"""The recorder: writes down what engines ask of the node, for `tierkv replay`.

    python -m tierkv.workers.recorder CONFIG      started by the supervisor where `record` names a file

    front -> packets -> this process -> FILE, and FILE.1 when that is full; what was there before FILE.1 is gone

It is a process of its own so that neither the front nor the storage worker ever waits for this file, and so that a node
without a data directory can have one. The front drops what it has no room for; a disk that is full or away loses lines,
and the node goes on. A purge removes the lines of its groups from both files, by rewriting them.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tierkv.core.recording import (
    FORMAT,
    AnyLine,
    AnyPacket,
    Asked,
    Begun,
    Forget,
    Forgotten,
    Group,
    Stored,
    split_short,
)
from tierkv.workers.lifeline import end_with_parent

MAX_PACKET_BYTES = 4 * 2**20
MAX_KNOWN_BLOCKS = 500_000
"""Keys that are remembered as written. When there are more, all are forgotten, and prompts are written whole again."""

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


class Recording:
    """The two files. Raises OSError where they can't be written; what was not written is lost, and the next line begins
    with a file that is whole."""

    def __init__(self, path: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._half = max_bytes // 2
        self._now = now
        self._fd = -1
        self._bytes = 0
        self._waiting: list[bytes] = []
        self._groups: dict[bytes, Group] = {}
        self._told: set[bytes] = set()  # groups that this file has told of
        self._known: set[tuple[bytes, bytes]] = set()  # of a group, blocks that this file has written

    def note(self, group: Group) -> None:
        self._groups[group.group] = group

    def add(self, happened: Asked | Stored) -> bool:
        """Whether its group is known; of others nothing can be written. To be followed by `flush`."""
        group = self._groups.get(happened.group)
        if group is None:
            return False
        if self._fd < 0:
            self._open()
        if group.group not in self._told:
            self._write(group)
            self._told.add(group.group)
        self._write(self._without_known(happened))
        return True

    def flush(self) -> None:
        """Hand it to the file system."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            _write_all(self._fd, b"".join(waiting))
        except OSError:
            self.close()  # a line may be torn
            raise
        if self._bytes >= self._half:
            self.close()
            os.replace(self._path, self._older)

    def close(self) -> None:
        self._waiting.clear()
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

    def _open(self) -> None:
        """Behind what is there, on a line of its own."""
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._bytes = os.fstat(self._fd).st_size
        if self._bytes:
            self._waiting.append(b"\n")
        self._write(Begun(format=FORMAT, time=self._now()))

    def _write(self, line: AnyLine) -> None:
        self._waiting.append(msgspec.json.encode(line) + b"\n")
        self._bytes += len(self._waiting[-1])

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
        case Begun():
            return b""
        case None:
            return _UNREADABLE if line.strip() else b""


def _decode(line: bytes) -> AnyLine | None:
    try:
        return _LINES.decode(line)
    except msgspec.MsgspecError:
        return None


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


class Recorder:
    """Packets in, lines out. One thread."""

    def __init__(self, sock: socket.socket, recording: Recording) -> None:
        self._sock = sock
        self._recording = recording
        self._problem = ""
        self._lost = 0
        self._decoder: msgspec.msgpack.Decoder[AnyPacket] = msgspec.msgpack.Decoder(AnyPacket)

    def run(self) -> None:
        """Until nobody is left who could send anything."""
        due = time.monotonic() + FLUSH_SECONDS
        while True:
            if select.select([self._sock], [], [], max(0.0, due - time.monotonic()))[0]:
                packet = self._sock.recv(MAX_PACKET_BYTES)
                if not packet:
                    break
                self._take(self._decoder.decode(packet))
            if time.monotonic() >= due:
                self._try(self._recording.flush)
                due = time.monotonic() + FLUSH_SECONDS
        self._try(self._recording.flush)
        self._recording.close()

    def _take(self, packet: AnyPacket) -> None:
        match packet:
            case Group():
                self._recording.note(packet)
            case Forget():
                self._forget(packet)
            case Asked() | Stored():
                self._try(lambda: self._recording.add(packet))

    def _try(self, write: Callable[[], object]) -> None:
        """A recording that can't be written is told of once, and tried again with the next line."""
        try:
            write()
        except OSError as error:
            self._lost += 1
            problem = f"{error.filename or 'the recording'}: {error.strerror}"
            if problem != self._problem:
                log.error("what engines ask is not recorded: %s", problem)
            self._problem = problem
        else:
            if self._problem:
                log.info("recording again, after %d writes that failed", self._lost)
            self._problem, self._lost = "", 0

    def _forget(self, purge: Forget) -> None:
        try:
            answer = Forgotten(job=purge.job, lines=self._recording.forget(purge))
        except OSError as error:
            answer = Forgotten(job=purge.job, lines=0, problem=f"{error.filename or 'recording'}: {error.strerror}")
            log.error("a purge could not remove its lines from the recording: %s", answer.problem)
        with suppress(OSError):  # the front is gone or does not listen: it asks again
            self._sock.send(msgspec.msgpack.encode(answer), socket.MSG_DONTWAIT)


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
