"""The copies of `copies`, by a tenant that must not map the arena: payload travels in frames, through a gateway.

    gateway -> engine    acquire + lease.copy_into + release            beside numpy copying between two such buffers
    engine -> gateway    reserve + ticket.copy_from + commit

All of it runs on the same cores, so what stands here is what is left when engine, gateway and front share them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.machine import l3_bytes
from benchmarks.measure import Plan, alternate
from benchmarks.node import running_node
from benchmarks.prompts import EXTENT_BYTES, human, make_identity, make_tokens
from benchmarks.report import Figure, of_rates
from tierkv.client import Group, connect

QUESTION = "what does it cost a tenant not to be trusted?"

BLOCK_BYTES, BLOCKS = 2**20, 16
DEADLINE_SECONDS = 10.0


def measure(plan: Plan) -> Iterator[Figure]:
    buffers = max(8, 4 * l3_bytes() // EXTENT_BYTES)
    arena_bytes = 4 * buffers * EXTENT_BYTES
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        Path(folder).chmod(0o711)
        inline_dir = Path(folder) / "inline"
        with (
            running_node(
                name="inline",
                host_bytes=arena_bytes,
                session_bytes=arena_bytes,
                inline_users=os.geteuid(),
                inline_dir=inline_dir,
            ),
            connect(inline_dir, timeout_seconds=DEADLINE_SECONDS) as client,
        ):
            group = client.open(make_identity(BLOCK_BYTES, salt="inline"))
            until = time.monotonic() + DEADLINE_SECONDS
            while not client.is_connected() and time.monotonic() < until:
                time.sleep(0.05)  # between two looks at a condition that has a deadline
            yield from _both_ways(plan, group, buffers)


def _both_ways(plan: Plan, group: Group, buffers: int) -> Iterator[Figure]:
    engine = np.ones((buffers, BLOCKS, BLOCK_BYTES), np.uint8)

    def store(number: int) -> float:
        tokens = make_tokens(number + 1, BLOCKS)  # what the next round loads
        start = time.perf_counter()
        with group.reserve(tokens, deadline_seconds=DEADLINE_SECONDS) as ticket:
            ticket.copy_from(engine[number % buffers])
            committed = ticket.commit()
        assert committed.visible == BLOCKS, committed
        return time.perf_counter() - start

    def load(number: int) -> float:
        tokens = make_tokens(number, BLOCKS)
        start = time.perf_counter()
        with group.acquire(tokens, deadline_seconds=DEADLINE_SECONDS) as lease:
            valid = lease.copy_into(engine[number % buffers])
        assert valid == BLOCKS, (valid, lease.reason)
        return time.perf_counter() - start

    def plain(number: int) -> float:
        start = time.perf_counter()
        np.copyto(engine[number % buffers], engine[(number + buffers // 2) % buffers])
        return time.perf_counter() - start

    store(-1)
    works = {"store": store, "load": load, "plain": plain}
    seconds = alternate(plan.rounds(100, 10), works)
    for name, words in (("load", "gateway -> engine"), ("store", "engine -> gateway")):
        yield of_rates(
            f"{words}, {BLOCKS} blocks of {human(BLOCK_BYTES)}",
            BLOCKS * BLOCK_BYTES,
            seconds[name],
            beside="memcpy",
            limit=seconds["plain"],
        )
