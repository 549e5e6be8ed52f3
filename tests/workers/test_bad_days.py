"""Days on which everything goes wrong: random operations while random calls fail, are cut short, or read flipped bits.

Nothing wrong is ever called valid; what was reported flushed is there until it is removed or told to be gone; after the
day a start finds exactly what is there. TIERKV_BAD_DAYS is how many days there are (default 2), TIERKV_BAD_DAYS_FROM
the first one.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.system_calls import ALL_ERRNOS, Fault, FlippedBit, ShortTransfers
from tests.storage.samples import Sample
from tests.workers.desk import Desk, DiskDesk, TierDesk, demote_order, put_on_nvme, remove_order
from tierkv.core.instructions import (
    AnyInstruction,
    OpFailed,
    ReadDone,
    RemoveDone,
    SetAside,
    StillUsed,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.reasons import Reason
from tierkv.torture.waits import wait_until

DAYS = int(os.environ.get("TIERKV_BAD_DAYS", "2"))
FIRST_DAY = int(os.environ.get("TIERKV_BAD_DAYS_FROM", "0"))
HOURS = 14
"""Rounds of operations that are sent together, each with a fault of its own."""

CALLS = (
    "open",
    "fstat",
    "stat",
    "pread",
    "preadv",
    "pwritev",
    "write",
    "fsync",
    "fdatasync",
    "mkdir",
    "rmdir",
    "rename",
    "link",
    "unlink",
    "fstatvfs",
    "utime",
    "posix_fadvise",
    "fcntl",
    "flock",
)


class Day:
    def __init__(self, root: Path, number: int, begin: Callable[..., TierDesk]) -> None:
        self.root = root
        self.begin = begin
        self.chance = random.Random(number)
        self.samples = [Sample(seed=100 * (1 + which // 3), num_blocks=1 + which % 3) for which in range(18)]
        self.flushed: dict[bytes, Sample] = {}  # by key, what must be there
        self.others: dict[bytes, set[bytes]] = {}  # by key, what may be there instead: longer or shorter extents
        self.op = 0

    def run(self) -> None:
        for _ in range(3):
            with self.begin(self.root, health_seconds=0.05, quarantine_bytes=60_000) as desk:
                desk.recovered()
                self.put_on_nvme(desk)
                self.check_found(desk)
                for _ in range(HOURS):
                    self.hour(desk)
                if self.chance.random() < 0.5:
                    desk.stop()
        with self.begin(self.root) as desk:
            desk.recovered()
            self.check_found(desk)
            wait_until(lambda: not os.listdir(self.root / "tmp"), "no temp file is left, what is written now aside")
            for sample in list(self.flushed.values()):
                self.load(desk, sample)

    def put_on_nvme(self, desk: TierDesk) -> None:
        """For the disk tier, what it copies: of the extents that begin alike, the longest."""
        if isinstance(desk, DiskDesk):
            for sample in sorted(self.samples, key=lambda sample: sample.num_blocks):
                put_on_nvme(desk.data, sample)

    def store_order(self, desk: TierDesk, sample: Sample) -> AnyInstruction:
        if isinstance(desk, DiskDesk):
            return demote_order(sample, self.op)
        return desk.arena.write_order(sample, self.op)

    def check_found(self, desk: TierDesk) -> None:
        for key, sample in self.flushed.items():
            assert key in desk.rows, "what was reported flushed is lost"
            assert len(desk.rows[key].keys) >= len(sample.keys)

    # ---- an hour

    def hour(self, desk: TierDesk) -> None:
        """Some operations on different keys, a fault meanwhile, and a quiet look at one of them afterwards."""
        chosen = {sample.name.key: sample for sample in self.chance.sample(self.samples, 5)}
        for sample in chosen.values():
            desk.open(sample)
        with pytest.MonkeyPatch.context() as patch:
            lies = self.inject(patch)
            sent = [(self.send(desk, sample), sample) for sample in chosen.values()]
            answers = [(what, sample, desk.answer(op)) for (what, op), sample in sent]
        for what, sample, answer in answers:
            self.hear(desk, what, sample, answer, lies=lies)
        desk.health(lambda health: health.writable)
        self.load(desk, self.chance.choice(list(chosen.values())))

    def inject(self, patch: pytest.MonkeyPatch) -> bool:
        """Whether the disk lies about what is on it, so that a good file may be taken for a damaged one."""
        worker_threads = ("io-", "flusher", "index-writer")

        def is_worker(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return threading.current_thread().name.startswith(worker_threads)

        match self.chance.randrange(10):
            case 0:
                FlippedBit(patch, "preadv", at=4096 + self.chance.randrange(8192), bit=self.chance.randrange(8))
                return True
            case 1:
                FlippedBit(patch, "pread", at=self.chance.randrange(600), bit=self.chance.randrange(8), times=2)
                return True
            case 2:
                ShortTransfers(patch, "pwritev", self.chance.choice([0, 512, 4096]))
            case 3:
                ShortTransfers(patch, "preadv", self.chance.choice([512, 4096]))
            case 4:
                pass
            case _:
                number, first = self.chance.choice(ALL_ERRNOS), self.chance.randrange(25)
                times = self.chance.choice([1, 1, 3, 10**6])
                Fault(patch, self.chance.choice(CALLS), number, first=first, times=times, when=is_worker)
        return False

    def send(self, desk: TierDesk, sample: Sample) -> tuple[str, int]:
        self.op += 1
        name = sample.name
        what = self.chance.choice(["store", "store", "store", "load", "load", "remove", "set aside", "touch"])
        match what:
            case "store":
                desk.send(self.store_order(desk, sample))
            case "remove":
                since = self.chance.choice([math.inf, 0.0, 2e9]) if isinstance(desk, DiskDesk) else math.inf
                desk.send(msgspec.structs.replace(remove_order(sample, self.op), unless_used_since=since))
            case "set aside":
                desk.send(SetAside(self.op, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
            case "touch":
                desk.send(Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, 1_700_000_000.0, 1)]))
                desk.arena.poison(sample)
                desk.send(desk.arena.read_order(sample, self.op))
                what = "load"
            case "load":
                desk.arena.poison(sample)
                desk.send(desk.arena.read_order(sample, self.op))
        return what, self.op

    # ---- what it comes to

    def hear(self, desk: TierDesk, what: str, sample: Sample, answer: object, *, lies: bool) -> None:
        key = sample.name.key
        match answer:
            case WriteDone():
                self.flushed[key] = sample
            case RemoveDone():
                self.flushed.pop(key, None)
            case StillUsed():
                pass
            case OpFailed() if what == "store":
                kept = self.flushed.get(key)
                if kept is not None and len(kept.keys) > len(sample.keys):
                    self.flushed[key] = sample  # the shorter one may be there by now, its folder not flushed
            case OpFailed():
                self.flushed.pop(key, None)  # it may be gone, or not
            case ReadDone():
                self.look(desk, sample, answer, lies=lies)
            case _:
                raise AssertionError(answer)

    def look(self, desk: TierDesk, sample: Sample, done: ReadDone, *, lies: bool) -> None:
        found = [desk.arena.read_back(sample, index) for index in range(done.valid)]
        assert found == sample.blocks[: done.valid], "wrong bytes were called valid"
        if done.gone and done.reason not in (Reason.NOT_FOUND, Reason.UNKNOWN_FORMAT):
            kept = self.flushed.pop(sample.name.key, None)
            is_longer = kept is None or len(sample.keys) > len(kept.keys)
            assert lies or is_longer, f"a good file was set aside: {done}"

    def load(self, desk: TierDesk, sample: Sample) -> None:
        """Without any fault."""
        self.op += 1
        done = desk.load(sample, self.op)
        self.look(desk, sample, done, lies=False)
        kept = self.flushed.get(sample.name.key)
        if kept is not None and len(kept.keys) >= len(sample.keys):
            assert done.valid == sample.num_blocks, f"what was reported flushed is lost: {done}"


@pytest.mark.parametrize("number", range(FIRST_DAY, FIRST_DAY + DAYS))
@pytest.mark.parametrize("begin", [Desk, DiskDesk])
def test_on_a_bad_day_nothing_is_wrong_and_nothing_that_was_flushed_is_lost(
    tmp_path: Path, begin: Callable[..., TierDesk], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="tierkv")  # a record keeps its error, and that the views of the arena
    Day(tmp_path / "tier", number, begin).run()
