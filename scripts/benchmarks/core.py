"""The core alone, in one process: microseconds of its operations, bytes an extent, rows taken in at recovery."""

from __future__ import annotations

import gc
import os
import random
import time
from array import array
from collections.abc import Callable, Iterator

import msgspec
import psutil

from benchmarks.measure import Plan, timed
from benchmarks.prompts import BLOCK_TOKENS, SMOLLM2_BLOCK_BYTES, make_identity, make_tokens
from benchmarks.report import Figure, of_seconds, of_values
from tierkv.core.extent import Extent
from tierkv.core.grants import Committed, GroupSpec, Lease, Match, Reservation
from tierkv.core.instructions import ExtentRow, GroupFound, Recovered, Rows
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits
from tierkv.core.value.density import Density
from tierkv.core.value.hazards import Hazards
from tierkv.core.value.kinds import NUM_KINDS

QUESTION = "what does one decision cost, and one extent?"

_SESSION = b"s" * 16
_EXTENT_BLOCKS = 8
_ROWS_A_REPORT = 1_000
_MILLION = 1_000_000
_BATCH = 64


def measure(plan: Plan) -> Iterator[Figure]:
    for blocks in (45, 150, 1_125):
        yield from _operations(plan, blocks)
    yield from _recovery(plan)
    yield from _memory(plan)
    for count in (_MILLION // 10, _MILLION):
        yield from _decisions(plan, plan.rounds(count, count // 100))


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
    state = _state(host_bytes=64 * 2**20, nvme_bytes=2**40)
    state.report(GroupFound(group=group, identity=identity), 0.0)
    start = time.perf_counter()
    for report in reports:
        state.report(report, 0.0)
    state.report(_recovered(count), 0.0)
    seconds = time.perf_counter() - start
    assert state.num_extents == count
    yield of_values("rows taken in at recovery", [count / seconds / 1e3], unit="thousand/s")


def _memory(plan: Plan) -> Iterator[Figure]:
    """All that the front's process grows by: keys, tree, order of eviction. Rows are as the channel brings them, and
    gone when they are taken in."""
    count = plan.rounds(_MILLION, 20_000)
    identity = make_identity(4096)
    group = identity.group_key()
    state = _state(host_bytes=64 * 2**20, nvme_bytes=2**40)
    state.report(GroupFound(group=group, identity=identity), 0.0)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Rows)
    gc.collect()
    before = psutil.Process().memory_info().rss
    for first in range(0, count, _ROWS_A_REPORT):
        (rows,) = _rows(group, _ROWS_A_REPORT, first=first)
        state.report(decoder.decode(encoder.encode(rows)), float(count))
        del rows
    state.report(_recovered(count), float(count))
    assert state.num_extents == count
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    yield of_values(
        "memory of an extent",
        [grown / count],
        unit="bytes",
        most=2**30 / _MILLION,
        note=f"{count:,} extents of {_EXTENT_BLOCKS} blocks on NVMe; {_EXTENT_BLOCKS * KEY_BYTES} of them are keys",
    )


class _Alike:
    """Every block saves the same."""

    def seconds_per_byte(self, extent: Extent) -> float:
        return 1.0

    def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
        return 1.0

    def prefix_tokens(self, extent: Extent, index: int) -> int:
        return 1


def _decisions(plan: Plan, count: int) -> Iterator[Figure]:
    """Choosing a victim of so many extents of all kinds: alone, after a second in which others came, and in a batch."""

    def use(extent: Extent) -> None:
        extent.kind, extent.last_used = rng.randrange(NUM_KINDS), now
        order.offer(extent, 0)

    rng = random.Random(7)
    hazards = Hazards()
    order = Density(hazards, _Alike())
    extents = [_extent(number) for number in range(count)]
    now = 0.0
    for number in range(4_000):
        now += 1.0
        kind = number % NUM_KINDS
        hazards.begin(kind, now, 1.0)
        hazards.end(kind, max(0.0, now - rng.random() * 60 * (1 + kind)), now, 1.0)
        hazards.request(now)
    for extent in extents:
        extent.kind, extent.last_used = rng.randrange(NUM_KINDS), now - rng.random() * 3_600
        order.offer(extent, 0)
    alone, batch, learning = [], [], []
    for _ in range(plan.rounds(2_000, 100)):
        now += 1.0
        for _ in range(3):
            use(rng.choice(extents))
        start = time.perf_counter()
        victim = order.pop(now)
        alone.append(time.perf_counter() - start)
        assert victim is not None
        use(victim)
    for _ in range(plan.rounds(200, 20)):
        now += 1.0
        start = time.perf_counter()
        gone = [order.pop(now) for _ in range(_BATCH)]
        batch.append((time.perf_counter() - start) / _BATCH)
        for victim in gone:
            assert victim is not None
            use(victim)
    for _ in range(plan.rounds(30, 3)):
        now += 60.0
        start = time.perf_counter()
        hazards.request(now)
        learning.append(time.perf_counter() - start)
    note = f"of {count:,} extents"
    yield of_seconds("choosing one victim", alone, unit="us", most=60.0, note=note)
    yield of_seconds(f"the same, in a batch of {_BATCH}", batch, unit="us", most=20.0, note=note)
    yield of_seconds("learning from what happened", learning, unit="ms", note="every 250 requests or 30 s")


def _extent(number: int) -> Extent:
    group = bytes(32)
    extent = Extent(
        group=group, key=number.to_bytes(32, "big"), parent=group, first_token=0, ranks=1, created=float(number)
    )
    extent.num_blocks = extent.hot_blocks = _EXTENT_BLOCKS
    return extent


def _rows(group: bytes, count: int, *, first: int = 0) -> list[Rows]:
    """Conversations of ten extents each, parents before children."""
    rows = []
    for number in range(first // 10, (first + count + 9) // 10):
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
