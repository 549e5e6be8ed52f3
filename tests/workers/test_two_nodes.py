"""Two nodes in one disk directory, at random, while calls of both fail: nothing wrong is ever called valid, both live,
and in the end each of them finds exactly what is there. TIERKV_BAD_DAYS is how many days there are (default 2)."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.system_calls import ALL_ERRNOS, Fault
from tests.storage.samples import Sample
from tests.workers.desk import DiskDesk, demote_order, put_on_nvme, remove_order
from tests.workers.test_bad_days import CALLS, DAYS, FIRST_DAY
from tierkv.core.instructions import (
    AnyReport,
    OpFailed,
    ReadDone,
    RemoveDone,
    StillUsed,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.extent_file import verify_file

ROUNDS = 25


class Node:
    def __init__(self, desk: DiskDesk, samples: list[Sample]) -> None:
        self.desk = desk
        self.op = 0
        desk.recovered()
        for sample in samples:
            put_on_nvme(desk.data, sample)

    def send(self, chance: random.Random, sample: Sample) -> tuple[int, Sample]:
        self.op += 1
        name, now = sample.name, time.time()
        self.desk.open(sample)
        match chance.choice(["demote", "demote", "load", "load", "remove", "evict", "touch"]):
            case "demote":
                used = chance.choice([now - 9000, now])
                self.desk.send(demote_order(sample, self.op, last_used=used))
            case "load":
                self.desk.arena.poison(sample)
                self.desk.send(self.desk.arena.read_order(sample, self.op))
            case "remove":
                self.desk.send(remove_order(sample, self.op))
            case "evict":
                since = now - chance.choice([100, 9500])
                self.desk.send(msgspec.structs.replace(remove_order(sample, self.op), unless_used_since=since))
            case "touch":
                self.desk.send(Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, now, 1)]))
                self.desk.arena.poison(sample)
                self.desk.send(self.desk.arena.read_order(sample, self.op))
        return self.op, sample

    def hear(self, op: int, sample: Sample) -> None:
        answer: AnyReport = self.desk.answer(op)
        assert isinstance(answer, WriteDone | ReadDone | RemoveDone | StillUsed | OpFailed), answer
        if isinstance(answer, ReadDone):
            found = [self.desk.arena.read_back(sample, index) for index in range(answer.valid)]
            assert found == sample.blocks[: answer.valid], "wrong bytes were called valid"
            assert answer.reason not in (Reason.CHECKSUM, Reason.SHORT_FILE, Reason.BAD_HEADER), answer


@pytest.mark.parametrize("number", range(FIRST_DAY, FIRST_DAY + DAYS))
def test_two_nodes_share_a_directory_on_a_bad_day(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="tierkv")
    chance, disk = random.Random(number), tmp_path / "shared"
    samples = [Sample(seed=100 * which + 1, num_blocks=1 + which % 3) for which in range(8)]

    def is_worker(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return threading.current_thread().name.startswith(("io-", "flusher", "index-writer"))

    with (
        DiskDesk(disk, data=tmp_path / "a", rescan_seconds=0.0, health_seconds=0.02) as a,
        DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.0, health_seconds=0.02) as b,
    ):
        nodes = [Node(desk, samples) for desk in (a, b)]
        for _ in range(ROUNDS):
            with pytest.MonkeyPatch.context() as patch:
                if chance.random() < 0.6:
                    first, times = chance.randrange(25), chance.choice([1, 1, 3])
                    error = chance.choice(ALL_ERRNOS)
                    Fault(patch, chance.choice(CALLS), error, first=first, times=times, when=is_worker)
                asked = [(node, *node.send(chance, sample)) for node in nodes for sample in chance.sample(samples, 5)]
                for node, op, sample in asked:
                    node.hear(op, sample)
            for node in nodes:
                node.desk.health(lambda health: health.writable)
        for node in nodes:
            node.desk.stop()
    for name in ("a", "b"):
        with DiskDesk(disk, data=tmp_path / name) as desk:
            desk.recovered()
            there = {bytes.fromhex(path.stem) for path in disk.glob("models/*/*/*/*/*.kv")}
            assert set(desk.rows) == there
    assert os.listdir(disk / "tmp") == []  # each has cleared away its own
    assert os.listdir(disk / "quarantine") == []
    with DataDirectory.open(disk, kind=Kind.DISK, owner="0" * 8) as directory:
        for sample in samples:
            verified = verify_file(directory, sample.name)
            assert not verified.damaged
            assert verified.valid in (0, sample.num_blocks)
