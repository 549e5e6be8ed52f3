"""An engine's copies between its own buffers and the arena, with all that the client does around them.

    host -> engine    acquire + lease.copy_into + release              beside numpy copying the same slots into such a
                                                                       buffer
    engine -> host    reserve + ticket.copy_from + commit, sent        beside numpy copying such a buffer into slots
                      the same, waiting for the commit's answer        like these

Keys are known in both: an engine makes them once, when it asks what is cached, and match_latency measures that.

Each round takes the next prompt and the next buffer of a set several times larger than the last cache, so that neither
side finds in the cache what the other has just moved. The destinations have been written before: no page is new.

A prompt of one extent (16 MiB) is the hardest case, since the requests to the node cost the same for longer ones; the
median prompt of the reference workload, 2,400 tokens of SmolLM2, stands beside it. What a request costs at the least at
such a moment, with caches that a copy has just swept, a bare ZeroMQ echo after a plain copy tells.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.echo import running_echo
from benchmarks.machine import l3_bytes
from benchmarks.measure import Plan, Work, alternate, timed
from benchmarks.node import running_node
from benchmarks.prompts import EXTENT_BYTES, SMOLLM2_BLOCK_BYTES, blocks_of_extent, human, make_identity, make_tokens
from benchmarks.report import Figure, of_rates, of_seconds
from tierkv.client import Client, CommitWait, Group, connect

QUESTION = "how near to a plain copy are an engine's copies, requests to the node included?"

LEAST_RATIO = 0.7
SHAPES = (
    (SMOLLM2_BLOCK_BYTES, blocks_of_extent(SMOLLM2_BLOCK_BYTES)),
    (2**20, blocks_of_extent(2**20)),
    (5 * 2**20, blocks_of_extent(5 * 2**20)),
    (SMOLLM2_BLOCK_BYTES, 150),
)
"""(bytes of a block, blocks of a prompt)"""

DEADLINE_SECONDS = 10.0


def measure(plan: Plan) -> Iterator[Figure]:
    yield from _bare_echo(plan, max(8, 4 * l3_bytes() // EXTENT_BYTES))
    for block_bytes, blocks in SHAPES:
        buffers = max(8, 4 * l3_bytes() // (blocks * block_bytes))
        arena_bytes = 4 * buffers * (-(-blocks * block_bytes // EXTENT_BYTES)) * EXTENT_BYTES
        with (
            running_node(name="copies", host_bytes=arena_bytes, session_bytes=arena_bytes) as node,
            connect(node.endpoint, timeout_seconds=DEADLINE_SECONDS) as client,
        ):
            yield from _host_to_engine(plan, client, block_bytes, blocks, buffers)
            yield from _engine_to_host(plan, client, block_bytes, blocks, buffers)


def _bare_echo(plan: Plan, buffers: int) -> Iterator[Figure]:
    memory = np.ones((2, buffers, EXTENT_BYTES), np.uint8)
    frame = bytes(2_048)
    with running_echo(1_024) as echo:

        def after_copy(number: int) -> float:
            np.copyto(memory[0, number % buffers], memory[1, (number + buffers // 2) % buffers])
            start = time.perf_counter()
            echo.ask(frame)
            return time.perf_counter() - start

        works = {"after": after_copy, "after nothing": timed(lambda _number: echo.ask(frame))}
        seconds = alternate(plan.rounds(300, 40), works)
    yield of_seconds(
        "a bare ZeroMQ echo after a copy of 16 MiB",
        seconds["after"],
        unit="us",
        beside="after nothing",
        limit=seconds["after nothing"],
    )


def _host_to_engine(plan: Plan, client: Client, block_bytes: int, blocks: int, buffers: int) -> Iterator[Figure]:
    group = client.open(make_identity(block_bytes, salt="read"))
    prompts = [make_tokens(number, blocks) for number in range(buffers)]
    engine = np.ones((buffers, blocks, block_bytes), np.uint8)
    for tokens in prompts:
        _store(group, tokens, engine[0])
    keys = [group.keys(tokens) for tokens in prompts]
    held = [group.acquire(tokens, deadline_seconds=DEADLINE_SECONDS) for tokens in prompts]
    slots = [lease.raw_views() for lease in held]
    around: list[float] = []

    def through_client(number: int) -> float:
        at = number % buffers
        start = time.perf_counter()
        with group.acquire(keys=keys[at], deadline_seconds=DEADLINE_SECONDS) as lease:
            before = time.perf_counter()
            valid = lease.copy_into(engine[at])
            after = time.perf_counter()
        end = time.perf_counter()
        assert valid == blocks, (valid, lease.reason)
        around.append(end - start - (after - before))
        return end - start

    def plain(number: int) -> float:
        at = (number + buffers // 2) % buffers
        start = time.perf_counter()
        for first, rows in slots[at]:
            np.copyto(engine[at, first : first + len(rows)], rows)
        return time.perf_counter() - start

    seconds = alternate(plan.rounds(300, 40), {"client": through_client, "plain": plain})
    slots.clear()
    for lease in held:
        lease.release()
    yield of_rates(
        f"host -> engine, {blocks} blocks of {human(block_bytes)}",
        blocks * block_bytes,
        seconds["client"],
        beside="memcpy",
        limit=seconds["plain"],
        least_ratio=LEAST_RATIO,
    )
    yield of_seconds("of that, all but the copy", around[1:], unit="us")


def _engine_to_host(plan: Plan, client: Client, block_bytes: int, blocks: int, buffers: int) -> Iterator[Figure]:
    group = client.open(make_identity(block_bytes, salt="write"))
    engine = np.ones((buffers, blocks, block_bytes), np.uint8)
    held = [  # half of the arena: the client goes round the other half, and neither knows its pages better
        group.reserve(make_tokens(-1 - number, blocks), deadline_seconds=DEADLINE_SECONDS)
        for number in range(2 * buffers)
    ]
    slots = [list(ticket.runs()) for ticket in held]
    for views in slots:
        for _first, rows in views:
            rows[:] = 0
    around: dict[CommitWait, list[float]] = {wait: [] for wait in CommitWait}

    def through_client(wait: CommitWait) -> Work:
        """Each round stores a prompt that is new to the node, which evicts an old one for it."""

        def run(number: int) -> float:
            at = number % buffers
            tokens = make_tokens(2 * number + (wait is CommitWait.SENT), blocks)
            keys = group.keys(tokens)
            start = time.perf_counter()
            with group.reserve(tokens, keys=keys, deadline_seconds=DEADLINE_SECONDS) as ticket:
                before = time.perf_counter()
                ticket.copy_from(engine[at])
                after = time.perf_counter()
                committed = ticket.commit(wait=wait)
            end = time.perf_counter()
            assert committed.visible + committed.staged == blocks, committed
            around[wait].append(end - start - (after - before))
            return end - start

        return run

    def plain(number: int) -> float:
        at = (number + buffers // 2) % buffers
        start = time.perf_counter()
        for first, rows in slots[number % len(slots)]:
            np.copyto(rows, engine[at, first : first + len(rows)])
        return time.perf_counter() - start

    works: dict[str, Work] = {wait: through_client(wait) for wait in CommitWait}
    seconds = alternate(plan.rounds(300, 40), works | {"plain": plain})
    slots.clear()
    for ticket in held:
        ticket.abort()
    for wait, words, least_ratio in (
        (CommitWait.SENT, "commit sent", LEAST_RATIO),
        (CommitWait.VISIBLE, "commit answered", None),
    ):
        yield of_rates(
            f"engine -> host, {blocks} blocks of {human(block_bytes)}, {words}",
            blocks * block_bytes,
            seconds[wait],
            beside="memcpy",
            limit=seconds["plain"],
            least_ratio=least_ratio,
        )
        yield of_seconds("of that, all but the copy", around[wait][1:], unit="us")


def _store(group: Group, tokens: list[int], source: np.ndarray) -> None:
    with group.reserve(tokens, deadline_seconds=DEADLINE_SECONDS) as ticket:
        ticket.copy_from(source)
        committed = ticket.commit()
    assert committed.visible == len(source), committed
