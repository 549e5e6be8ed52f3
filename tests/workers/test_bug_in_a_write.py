"""A bug that one write meets: that write fails, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.samples import Sample
from tests.workers.desk import Arena, Desk
from tierkv.core.identity import Identity
from tierkv.core.instructions import OpFailed, Write, WriteDone
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import WrittenFile
from tierkv.storage.system_calls import Failure
from tierkv.workers.files import Files

WRITES = 300
BROKEN = 10


class FailsOnce(Files):
    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        if write.op == BROKEN:
            raise KeyError("nobody foresaw this")
        return super().write(directory, arena, write, identity)


@pytest.mark.scenario("B156", then="that write fails, logged once with its key; all others are durable")
def test_an_exception_in_one_write_costs_that_write_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = [Sample(seed=10 * number + 1, num_blocks=1) for number in range(WRITES)]
    arena = Arena(sum(len(sample.arena) for sample in samples) + 2**20)
    try:
        with Desk(tmp_path / "data", files=FailsOnce(), arena=arena, arena_bytes=arena.num_bytes) as desk:
            desk.open(samples[0])
            for op, sample in enumerate(samples):
                desk.send(desk.arena.write_order(sample, op))
            answers = [desk.answer(op) for op in range(WRITES)]
            failed = [answer for answer in answers if isinstance(answer, OpFailed)]
            assert [(answer.op, answer.reason) for answer in failed] == [(BROKEN, Reason.IO_ERROR)]
            assert "KeyError" in failed[0].problem
            assert sum(isinstance(answer, WriteDone) for answer in answers) == WRITES - 1
            told = [message for message in caplog.messages if samples[BROKEN].keys[:32].hex() in message]
            assert len(told) == 1
            assert desk.load(samples[BROKEN + 1], 9_999).valid == 1
    finally:
        arena.close()
