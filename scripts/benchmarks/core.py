"""The core alone, in one process: microseconds of its operations, bytes an extent, rows taken in at recovery."""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Callable, Iterator

import psutil

from benchmarks.measure import Plan, timed
from benchmarks.prompts import BLOCK_TOKENS, SMOLLM2_BLOCK_BYTES, make_identity, make_tokens
from benchmarks.report import Figure, of_seconds, of_values
from tierkv.core.grants import Committed, GroupSpec, Lease, Match, Reservation
from tierkv.core.instructions import ExtentRow, GroupFound, Recovered, Rows
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits

QUESTION = "what does one decision cost, and one extent?"

_SESSION = b"s" * 16
_EXTENT_BLOCKS = 8
_ROWS_A_REPORT = 1_000


def measure(plan: Plan) -> Iterator[Figure]:
    for blocks in (45, 150, 1_125):
        yield from _operations(plan, blocks)
    yield from _recovery(plan)


def _operations(plan: Plan, blocks: int) -> Iterator[Figure]:
    """A core that is full, so that every reserve evicts, beside making and hashing the same keys."""
    identity = make_identity(SMOLLM2_BLOCK_BYTES)
    group = identity.group_key()
    state = _state(host_bytes=4 * 2**30)
    state.open_group(GroupSpec(group=group, identity=identity), 0.0)
    rounds = plan.rounds(200 if blocks < 1_000 else 60, 10)
    prompts = [pack_tokens(make_tokens(number, blocks)) for number in range(rounds + 1)]
    keys = [chain_keys(group, tokens, BLOCK_TOKENS) for tokens in prompts]
    grants = [os.urandom(16) for _ in prompts]

    def reserve(number: int) -> None:
        answer, _effects = state.reserve(
            grant=grants[number],
            session=_SESSION,
            holder=_SESSION,
            group=group,
            rank=0,
            keys=keys[number],
            first=0,
            tokens=prompts[number],
            now=float(number),
        )
        assert isinstance(answer, Reservation)
        assert len(answer.offsets) == blocks

    def commit(number: int) -> None:
        answer, _effects = state.commit(grants[number], float(number))
        assert isinstance(answer, Committed)
        assert answer.visible == blocks

    def match(number: int) -> None:
        assert state.match(group, keys[number]) == Match(blocks, blocks)

    def acquire(number: int) -> None:
        answer, _effects = state.acquire(
            grant=grants[number][::-1],
            session=_SESSION,
            group=group,
            keys=keys[number],
            max_blocks=blocks,
            deadline=float(number),
            now=float(number),
        )
        assert isinstance(answer, Lease)
        assert answer.blocks == blocks
        state.release(grants[number][::-1], None, float(number))

    in_turn: dict[str, Callable[[int], None]] = {
        "reserve": reserve,
        "commit": commit,
        "match": match,
        "acquire and release": acquire,
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*in_turn, "keys")}
    for number in range(rounds + 1):  # not turned round: each of them needs what the one before it left
        for name, work in in_turn.items():
            seconds[name].append(timed(work)(number))
        seconds["keys"].append(timed(lambda number: chain_keys(group, prompts[number], BLOCK_TOKENS))(number))
    for name in in_turn:
        yield of_seconds(
            f"{name}, {blocks:,} blocks", seconds[name][1:], unit="us", beside="making keys", limit=seconds["keys"][1:]
        )


def _recovery(plan: Plan) -> Iterator[Figure]:
    count = plan.rounds(100_000, 10_000)
    identity = make_identity(4096)
    group = identity.group_key()
    reports = _rows(group, count)
    before = psutil.Process().memory_info().rss
    state = _state(host_bytes=64 * 2**20, nvme_bytes=2**40)
    state.report(GroupFound(group=group, identity=identity), 0.0)
    start = time.perf_counter()
    for report in reports:
        state.report(report, 0.0)
    state.report(_recovered(count), 0.0)
    seconds = time.perf_counter() - start
    assert state.num_extents == count
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    row_bytes = _EXTENT_BLOCKS * KEY_BYTES
    note = f"{count:,} extents of {_EXTENT_BLOCKS} blocks, {row_bytes} of these bytes are keys that the rows share"
    yield of_values("rows taken in at recovery", [count / seconds / 1e3], unit="thousand/s")
    yield of_values("memory of an extent", [grown / count], unit="bytes", note=note)


def _rows(group: bytes, count: int) -> list[Rows]:
    """Conversations of ten extents each, parents before children."""
    rows = []
    for number in range(-(-count // 10)):
        tokens = pack_tokens(make_tokens(number, 10 * _EXTENT_BLOCKS))
        keys = chain_keys(group, tokens, BLOCK_TOKENS)
        for index in range(10):
            start = index * _EXTENT_BLOCKS * KEY_BYTES
            own = keys[start : start + _EXTENT_BLOCKS * KEY_BYTES]
            rows.append(
                ExtentRow(
                    key=own[:KEY_BYTES],
                    parent=keys[start - KEY_BYTES : start] if index else group,
                    first_token=index * _EXTENT_BLOCKS * BLOCK_TOKENS,
                    keys=own,
                    block_bytes=4096,
                    file_bytes=(_EXTENT_BLOCKS + 1) * 4096,
                    created=0.0,
                    last_used=float(number),
                    hits=0,
                )
            )
    return [
        Rows(fingerprint="be" * 32, group=group, rank=0, rows=rows[start : start + _ROWS_A_REPORT])
        for start in range(0, count, _ROWS_A_REPORT)
    ]


def _recovered(count: int) -> Recovered:
    return Recovered(
        seconds=0.0,
        extents=count,
        index_rows=count,
        headers_read=0,
        quarantined=0,
        foreign=0,
        unknown_format=0,
        temp_removed=0,
        index_rebuilt=False,
    )


def _state(*, host_bytes: int, nvme_bytes: int = 0) -> CacheState:
    limits = Limits(
        host_bytes=host_bytes,
        slab_bytes=64 * 2**20,
        extent_bytes=16 * 2**20,
        nvme_bytes=nvme_bytes,
        seal_after_seconds=10.0,
        session_bytes=host_bytes,
        inflight_writes=8,
        inflight_reads=16,
    )
    generations = array("Q", bytes(host_bytes // 4096 * 8))
    state = CacheState(limits, generations)
    state.open_session(_SESSION, 0.0)
    return state
