"""Headers are read by several processes, because one interpreter decodes one header at a time.

Processes are started only for many files. One that dies or falls silent costs time, not files: what it was asked for is
read here instead, or, where the disk does not answer, counted as unreadable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory
from tierkv.storage.header_reader import (
    FRAME,
    Finding,
    HeaderJob,
    Outcome,
    Unusable,
    encode_frame,
    read_headers,
)

log = logging.getLogger(__name__)

FILES_WORTH_A_PROCESS = 1_000
MAX_PROCESSES = 8
FILES_OF_A_JOB = 250  # two jobs lie in a pipe without filling it, so that handing them out never waits
STALL_SECONDS = 60.0
READER_COMMAND = ("-P", "-m", "tierkv.storage.header_reader")

_JOBS_AHEAD = 2
_END_SECONDS = 2.0

Found = tuple[HeaderJob, list[Finding]]


@dataclass(eq=False)
class _Reader:
    """One process, the jobs that it has, and the part of an answer that has come."""

    process: subprocess.Popen[bytes]
    asked: deque[HeaderJob] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    heard: float = 0.0

    @property
    def out_fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def ask(self, job: HeaderJob) -> None:
        assert self.process.stdin is not None
        self.asked.append(job)
        with contextlib.suppress(BrokenPipeError):  # it is dead: its end of file comes next
            self.process.stdin.write(encode_frame(job))
            self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # in a system call of a sick disk, maybe: not waited for without end
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("process %d reading headers does not end", self.process.pid)


class HeaderPool:
    """`submit` jobs, and take what was found from `collect` until `is_idle`. One thread uses it."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._waiting: deque[HeaderJob] = deque()
        self._readers: list[_Reader] = []
        self._decode = msgspec.msgpack.Decoder(list[Finding]).decode
        self._files_submitted = 0
        self._num_started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self._readers:
            reader.end()
        self._readers.clear()

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(reader.asked for reader in self._readers)

    def submit(self, job: HeaderJob) -> None:
        self._waiting.append(job)
        self._files_submitted += job.num_files
        wanted = min(self._files_submitted // FILES_WORTH_A_PROCESS, MAX_PROCESSES, max(2, os.cpu_count() or 1))
        while wanted >= 2 and self._num_started < wanted:  # one would only do what this process can do itself
            self._start()
        self._hand_out()

    def collect(self, wait_seconds: float) -> Iterator[Found]:
        """What has come by now; when there is nothing yet, what comes within `wait_seconds`. Without processes,
        one job is done here, unless `wait_seconds` is 0."""
        if not self._readers:
            if self._waiting and wait_seconds:
                job = self._waiting.popleft()
                yield job, read_headers(self._directory, job)
            return
        by_fd = {reader.out_fd: reader for reader in self._readers}
        readable, _, _ = select.select(list(by_fd), [], [], wait_seconds)
        for fd in readable:
            yield from self._receive(by_fd[fd])
        for reader in list(self._readers):
            if reader.asked and time.monotonic() - reader.heard > STALL_SECONDS:
                yield from self._give_up(reader)

    def _start(self) -> None:
        self._num_started += 1
        command = [sys.executable, *READER_COMMAND, str(self._directory.path), self._directory.kind]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:  # no memory, or no descriptors: fewer processes do the same
            log.warning("no process to read headers with: %s", error)
            return
        self._readers.append(_Reader(process, heard=time.monotonic()))

    def _hand_out(self) -> None:
        for depth in range(1, _JOBS_AHEAD + 1):
            for reader in self._readers:
                if self._waiting and len(reader.asked) < depth:
                    if not reader.asked:
                        reader.heard = time.monotonic()
                    reader.ask(self._waiting.popleft())

    def _receive(self, reader: _Reader) -> Iterator[Found]:
        part = os.read(reader.out_fd, 2**20)
        reader.heard = time.monotonic()
        if not part:
            yield from self._replace_dead(reader)
            return
        reader.received += part
        while len(reader.received) >= FRAME.size:
            end = FRAME.size + FRAME.unpack_from(reader.received)[0]
            if len(reader.received) < end:
                break
            with memoryview(reader.received) as view:
                findings = self._decode(view[FRAME.size : end])
            del reader.received[:end]
            job = reader.asked.popleft()
            self._hand_out()
            yield job, findings

    def _replace_dead(self, reader: _Reader) -> Iterator[Found]:
        """It is not started again: whatever killed it, this process goes on without."""
        self._readers.remove(reader)
        reader.end()
        log.warning("a process reading headers ended with %s", reader.process.returncode)
        for job in reader.asked:
            yield job, read_headers(self._directory, job)

    def _give_up(self, reader: _Reader) -> Iterator[Found]:
        self._readers.remove(reader)
        reader.process.kill()
        reader.end()
        log.error("headers can't be read: the disk has not answered for %.0f s", STALL_SECONDS)
        for job in reader.asked:
            problem = f"no answer within {STALL_SECONDS:.0f} s"
            yield job, [Unusable(key, Outcome.UNREADABLE, Reason.IO_ERROR, problem) for key in job.split_keys()]
