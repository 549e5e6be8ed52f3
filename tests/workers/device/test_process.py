"""The worker of a device as a process of its own: the pool that it hands out, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from tests.workers.desk import SECONDS, Arena, FrontSide
from tierkv.core.instructions import CopyDone, Download, PoolReady, Stop, Stopped, Upload
from tierkv.device.backends import Backend, cpu_backend
from tierkv.device.cpu import CpuBackend
from tierkv.device.memory import MemfdPool
from tierkv.errors import DeviceError
from tierkv.wire.pools import AnyPoolMessage, PoolFailed, PoolKind, PoolOffer, decode_pool_message
from tierkv.workers.channel import front_end
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.lifeline import EXIT_SUPERVISOR_GONE, EXIT_THREAD_DIED

REPOSITORY = Path(__file__).resolve().parents[3]
POOL_BYTES = 2**20
SLOT = 4096


class Process(FrontSide):
    """A worker started as a supervisor starts it."""

    def __init__(self, device: str = "cpu", **changes: Any) -> None:
        self.arena = Arena(2**20)
        front, back = socket.socketpair()
        self.export, export = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.export.settimeout(SECONDS)
        lifeline, self.lifeline_end = os.pipe()
        config = DeviceWorkerConfig(
            device=device,
            index=0,
            num_bytes=POOL_BYTES,
            epoch=3,
            channel_fd=back.fileno(),
            export_fd=export.fileno(),
            arena_fd=self.arena.fd,
            arena_bytes=self.arena.num_bytes,
            lifeline_fd=lifeline,
            parent_pid=os.getpid(),
            **changes,
        )
        with back, export:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.workers.device.process", config.encode()],
                pass_fds=[back.fileno(), export.fileno(), self.arena.fd, lifeline],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        os.close(lifeline)
        super().__init__(front_end(front))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.close_lifeline()
        self.process.kill()
        self.process.wait(SECONDS)
        self.export.close()
        self.arena.close()

    def close_lifeline(self) -> None:
        if self.lifeline_end >= 0:
            os.close(self.lifeline_end)
            self.lifeline_end = -1

    def take_offer(self) -> tuple[AnyPoolMessage, list[int]]:
        packet, fds, _flags, _address = socket.recv_fds(self.export, 65536, 4)
        return decode_pool_message(packet), fds

    def map_pool(self) -> MemfdPool:
        offer, fds = self.take_offer()
        assert isinstance(offer, PoolOffer)
        pool = cpu_backend().open_pool(offer.kind, offer.num_bytes, fd=fds[0])
        os.close(fds[0])
        assert isinstance(pool, MemfdPool)
        return pool


def test_the_pool_is_handed_out_and_copies_go_both_ways() -> None:
    with Process() as process:
        offer, fds = process.take_offer()
        assert offer == PoolOffer(
            epoch=3, kind=PoolKind.MEMFD, uuid="cpu", num_bytes=POOL_BYTES, device_name="host memory"
        )
        pool = cpu_backend().open_pool(PoolKind.MEMFD, POOL_BYTES, fd=fds[0])
        os.close(fds[0])
        assert isinstance(pool, MemfdPool)
        assert process.wait_type(PoolReady) == process.reports[0] == PoolReady(3, POOL_BYTES)
        process.arena.view[:5] = b"bytes"
        process.send(Upload(1, 5, [0], [SLOT]))
        assert isinstance(process.answer(1), CopyDone)
        assert pool.bytes[SLOT : SLOT + 5].tobytes() == b"bytes"
        process.send(Download(2, 5, [SLOT], [2 * SLOT]))
        assert isinstance(process.answer(2), CopyDone)
        assert bytes(process.arena.view[2 * SLOT : 2 * SLOT + 5]) == b"bytes"
        process.send(Stop(SECONDS))
        process.wait_type(Stopped)
        assert process.process.wait(SECONDS) == 0
        assert pool.close()


def test_a_pool_outlives_its_worker_where_it_is_mapped() -> None:
    with Process() as process:
        pool = process.map_pool()
        process.arena.view[:5] = b"bytes"
        process.send(Upload(1, 5, [0], [0]))
        process.answer(1)
        process.process.kill()
        process.process.wait(SECONDS)
        assert pool.bytes[:5].tobytes() == b"bytes"  # stale, and no fault: what is read of it is void by its generation
        assert pool.close()


def test_it_ends_when_the_supervisor_is_gone() -> None:
    with Process() as process:
        process.wait_type(PoolReady)
        process.close_lifeline()
        assert process.process.wait(SECONDS) == EXIT_SUPERVISOR_GONE


def test_it_ends_when_the_front_is_gone() -> None:
    with Process() as process:
        process.wait_type(PoolReady)
        process.channel.close()
        assert process.process.wait(SECONDS) == 0


def test_signals_to_all_do_not_end_it() -> None:
    with Process() as process:
        process.wait_type(PoolReady)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.process.send_signal(number)
        process.send(Stop(SECONDS))
        process.wait_type(Stopped)
        assert process.process.wait(SECONDS) == 0


def test_nonsense_on_the_channel_ends_it() -> None:
    with Process() as process:
        process.wait_type(PoolReady)
        os.write(process.channel.fileno(), b"\x01\x00\x00\x00\xc1")
        assert process.process.wait(SECONDS) == EXIT_THREAD_DIED


def refused(config: DeviceWorkerConfig) -> Backend:
    raise DeviceError("busy", "somebody has the GPU for himself")


class NoRoom(CpuBackend):
    def make_pool(self, num_bytes: int) -> MemfdPool:
        raise DeviceError("out_of_memory", f"{num_bytes} bytes are more than there are")


def no_room(config: DeviceWorkerConfig) -> Backend:
    return NoRoom()


@pytest.mark.parametrize(
    ("copies", "problem"),
    [
        (f"{__name__}:refused", "somebody has the GPU for himself"),
        (f"{__name__}:no_room", "1048576 bytes are more than there are"),
        ("no.such.module:copies", "copies: No module named"),
    ],
)
def test_what_has_no_pool_says_why_and_is_exit_2(copies: str, problem: str) -> None:
    with Process(copies=copies) as process:
        failed, fds = process.take_offer()
        assert isinstance(failed, PoolFailed)
        assert failed.epoch == 3
        assert problem in failed.problem
        assert fds == []
        assert process.process.wait(SECONDS) == 2


def test_a_gpu_that_is_not_there_is_exit_2() -> None:
    with Process(device="99") as process:
        failed, _ = process.take_offer()
        assert isinstance(failed, PoolFailed)
        assert failed.problem
        assert process.process.wait(SECONDS) == 2


def test_copies_that_overtake_each_other_are_all_made() -> None:
    with Process(copies="tierkv.torture.device:copies") as process:
        pool = process.map_pool()
        values = np.arange(1, 101, dtype=np.uint8)
        for op, value in enumerate(values):
            process.arena.view[op * SLOT : op * SLOT + 1] = bytes([value])
        process.send(*(Upload(op, 1, [op * SLOT], [op * SLOT]) for op in range(100)))
        for op in range(100):
            assert isinstance(process.answer(op), CopyDone)
        assert (pool.bytes[: 100 * SLOT : SLOT] == values).all()
        answered = [report.op for report in process.reports if isinstance(report, CopyDone)]
        assert sorted(answered) == list(range(100))
        assert pool.close()
