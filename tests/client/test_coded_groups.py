"""Groups with a lossy codec: the slots hold coded blocks, engines see raw ones, by whichever client and way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest

from tests.client.conftest import TOKENS, make_identity
from tests.client.fake_device import DeviceNode
from tests.client.fake_node import FakeNode
from tierkv.client import Client, DevicePages, DevicePool, aio, connect
from tierkv.client.coding import Decoding
from tierkv.core.codec import FP8, Fp8, KVShape, coded_layout
from tierkv.core.identity import Identity
from tierkv.core.reasons import Reason
from tierkv.device.layouts import PagedLayout
from tierkv.errors import ConfigError, LayoutMismatch
from tierkv.wire.messages import Abort, Commit, Holder, OpenGroup, ReportBad

SHAPE = KVShape.head_first(element="float16", layers=2, heads=2, tokens=4, dim=16)
CODEC = Fp8(SHAPE)
RAW, CODED = SHAPE.total_raw_bytes, sum(CODEC.block_bytes)


def coded_identity(**changes: Any) -> Identity:
    base = make_identity(RAW)
    layout = msgspec.structs.replace(base.layout, dtype="float16", **changes)
    return msgspec.structs.replace(base, layout=coded_layout(layout, CODEC))


def raw_rows(count: int, seed: int = 1) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal((count, RAW // 2)) * 3
    return numbers.astype(np.float16).view(np.uint8)


def as_read(rows: np.ndarray) -> np.ndarray:
    """What the codec makes of it."""
    coded, back = np.empty((len(rows), CODED), np.uint8), np.empty_like(rows)
    assert CODEC.encode(rows, coded) == CODEC.decode(coded, back) == len(rows)
    return back


class Either:
    """The blocking client, or the asyncio one with a loop of its own, by the same verbs."""

    def __init__(self, kind: str, node: FakeNode) -> None:
        self._runner = asyncio.Runner() if kind == "asyncio" else None
        if self._runner is None:
            self.client: Any = connect(node.directory, timeout_seconds=5)
        else:
            self.client = self._runner.run(aio.connect(node.directory, timeout_seconds=5))
        self.group: Any = self.do(self.client.open(coded_identity(), kv_shape=SHAPE, block_bytes=RAW))

    def do(self, called: Any) -> Any:
        if self._runner is None:
            return called

        async def wait() -> Any:
            return await called

        return self._runner.run(wait()) if hasattr(called, "__await__") else called

    def store(self, source: Any, first_block: int = 0) -> Any:
        ticket = self.do(self.group.reserve(TOKENS, first_block=first_block))
        try:
            self.do(ticket.copy_from(source))
            return self.do(ticket.commit())
        finally:
            self.do(ticket.abort())

    def load(self, destination: Any) -> tuple[int, Reason | None]:
        lease = self.do(self.group.acquire(TOKENS))
        try:
            return self.do(lease.copy_into(destination)), lease.reason
        finally:
            self.do(lease.release())

    def close(self) -> None:
        self.do(self.client.close())
        assert self.client.counters.open_grants == 0
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(params=["blocking", "asyncio"])
def either(request: pytest.FixtureRequest, node: FakeNode, quick: None) -> Iterator[Either]:
    with Either(request.param, node) as made:
        yield made


class Moves:
    """An engine's memory that moves blocks by itself, a few rows of which were asked for at once."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.calls: list[tuple[int, int]] = []

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        self.calls.append((first_block, len(blocks)))
        blocks[:] = self.rows[first_block : first_block + len(blocks)]

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        assert not blocks.flags.writeable
        self.calls.append((first_block, len(blocks)))
        self.rows[first_block : first_block + len(blocks)] = blocks


def test_slots_hold_coded_blocks_and_the_engine_gets_what_the_codec_makes_of_its_own(
    either: Either, node: FakeNode
) -> None:
    rows = raw_rows(4)
    assert either.store(rows).visible == 4
    back = np.full_like(rows, 0xFF)
    assert either.load(back) == (4, None)
    assert back.tobytes() == as_read(rows).tobytes()
    assert back.tobytes() != rows.tobytes()
    assert (either.group.block_bytes, either.group.raw_block_bytes) == (CODED, RAW)
    assert [one.block_bytes for one in node.saw(OpenGroup)] == [CODED]


def test_an_engine_that_moves_blocks_itself_gets_and_gives_raw_ones(
    either: Either, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.coding.STAGING_BYTES", 3 * RAW + 1)
    rows = raw_rows(4)
    source, target = Moves(rows), Moves(np.zeros_like(rows))
    assert either.store(source).visible == 4
    assert either.load(target) == (4, None)
    assert source.calls == target.calls == [(0, 3), (3, 1)]
    assert target.rows.tobytes() == as_read(rows).tobytes()


def test_rows_of_a_source_begin_at_the_first_block(either: Either) -> None:
    rows = raw_rows(4)
    ticket = either.do(either.group.reserve(TOKENS[:8]))
    either.do(ticket.copy_from(rows))
    assert either.do(ticket.commit()).visible == 2
    assert either.store(rows[2:], first_block=2).visible == 2
    back = np.zeros_like(rows)
    assert either.load(back)[0] == 4
    assert back.tobytes() == as_read(rows).tobytes()


@pytest.mark.scenario(
    "B216", then="a ticket with inf or NaN is refused with non_finite, counted, and nothing is stored"
)
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("moves", [False, True])
def test_a_block_that_is_not_finite_is_never_published(
    either: Either, node: FakeNode, number: float, moves: bool
) -> None:
    rows = raw_rows(4)
    rows.view(np.float16)[2, 5] = number
    committed = either.store(Moves(rows) if moves else rows)
    assert (committed.visible, committed.staged, committed.reason) == (0, 0, Reason.NON_FINITE)
    assert either.client.counters.by_reason == {Reason.NON_FINITE: 1}
    assert either.do(either.group.match(TOKENS)).blocks == 0
    assert not node.saw(Commit)
    assert node.saw(Abort, at_least=1)
    assert node.has_no_grants()


@pytest.mark.scenario(
    "B217", then="a block with a bad scale does not count, the read says bad_scale, the node drops it"
)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
@pytest.mark.parametrize("moves", [False, True])
def test_a_block_with_a_bad_scale_is_a_miss_and_the_node_is_told(
    either: Either, node: FakeNode, scale: float, moves: bool
) -> None:
    rows = raw_rows(4)
    either.store(rows)
    spoil(either, 2, scale)
    back = np.zeros_like(rows)
    assert either.load(Moves(back) if moves else back) == (2, Reason.BAD_SCALE)
    assert back[:2].tobytes() == as_read(rows)[:2].tobytes()
    assert [one.first_bad for one in node.saw(ReportBad)] == [2]
    assert either.client.counters.by_reason == {Reason.BAD_SCALE: 1}
    assert either.do(either.group.match(TOKENS)).blocks == 2


def spoil(either: Either, block: int, scale: float) -> None:
    """A scale of a stored block: written through the memory that this process maps, as a broken engine would."""
    lease = either.do(either.group.acquire(TOKENS))
    slots = lease._slots()
    offset = int(slots.offsets[block])
    slots.writable[offset : offset + 4].view("<f4")[:] = scale
    either.do(lease.release())


def test_what_is_revoked_while_it_is_decoded_is_revoked_and_no_damage(either: Either, node: FakeNode) -> None:
    rows = raw_rows(4)
    either.store(rows)
    spoil(either, 3, 0.0)
    lease = either.do(either.group.acquire(TOKENS, revocable=True))

    class Revoking(Moves):
        def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
            super().write_blocks(first_block, blocks)
            node.bump(int(np.frombuffer(lease.parts[0].offsets, "<u8")[1]))

    assert either.do(lease.copy_into(Revoking(np.zeros_like(rows)))) == 1
    assert lease.reason is None
    either.do(lease.release())
    assert not node.saw(ReportBad)
    assert either.client.counters.by_reason == {Reason.REVOKED: 1}


def test_the_one_who_holds_for_another_reports_damage_by_the_keys_that_it_was_told(
    either: Either, node: FakeNode
) -> None:
    rows = raw_rows(4)
    either.store(rows)
    spoil(either, 1, 0.0)
    token = either.do(either.client.session_token())
    with connect(node.directory, timeout_seconds=5) as other:
        asked = other.open(coded_identity(), kv_shape=SHAPE).acquire(TOKENS, holders=(Holder(0, token),))
        keys = either.group.keys(TOKENS)
        held = either.group.hold(asked.grant, token, asked.parts[0], keys=keys)
        assert either.do(held.copy_into(np.zeros_like(rows))) == 1
        either.do(held.release())
        assert [(one.first_bad, one.keys) for one in node.saw(ReportBad)] == [(1, keys)]
        asked.release_all()


def test_raw_views_of_coded_slots_are_refused_by_name(client: Client) -> None:
    group = client.open(coded_identity(), kv_shape=SHAPE)
    with group.reserve(TOKENS) as ticket:
        with pytest.raises(ValueError, match=FP8):
            next(iter(ticket.runs()))
        for block, row in zip(ticket.granted, raw_rows(4), strict=True):
            ticket.write(block, row)
        assert ticket.commit().visible == 4
    with group.acquire(TOKENS) as lease:
        with pytest.raises(ValueError, match=FP8):
            lease.raw_views()
        back = np.zeros((4, RAW), np.uint8)
        assert lease.copy_into(back) == 4
    assert back.tobytes() == as_read(raw_rows(4)).tobytes()


def test_one_block_that_is_not_finite_refuses_its_ticket(client: Client) -> None:
    group = client.open(coded_identity(), kv_shape=SHAPE)
    rows = raw_rows(4)
    rows.view(np.float16)[1, 0] = np.nan
    with group.reserve(TOKENS) as ticket:
        for block, row in zip(ticket.granted, rows, strict=True):
            ticket.write(block, row)
        assert (ticket.commit().reason, ticket.reason) == (Reason.NON_FINITE, Reason.NON_FINITE)
    assert group.match(TOKENS).blocks == 0


@pytest.mark.scenario("B221", then="a size by another formula is refused when the group is opened, with both sizes")
def test_a_layout_whose_size_is_not_the_coded_one_is_refused(client: Client) -> None:
    shape = KVShape.head_first(element="float16", layers=1, heads=2, tokens=4, dim=32)
    assert Fp8(shape).block_bytes == (512 + 16,)
    base = make_identity()
    layout = msgspec.structs.replace(base.layout, dtype="float16", codec=FP8, block_bytes=(512,))
    with pytest.raises(LayoutMismatch, match=r"512.*528"):
        client.open(msgspec.structs.replace(base, layout=layout), kv_shape=shape)


@pytest.mark.parametrize(
    ("identity", "kv_shape", "block_bytes", "error"),
    [
        (coded_identity(), None, None, ConfigError),
        (make_identity(RAW), SHAPE, None, ConfigError),
        (coded_identity(), SHAPE, CODED, LayoutMismatch),
        (
            coded_identity(),
            KVShape.head_first(element="bfloat16", layers=2, heads=2, tokens=4, dim=16),
            None,
            LayoutMismatch,
        ),
    ],
)
def test_a_codec_and_a_shape_belong_together(
    client: Client, identity: Identity, kv_shape: KVShape | None, block_bytes: int | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.open(identity, kv_shape=kv_shape, block_bytes=block_bytes)


def test_a_raw_and_a_coded_group_of_a_model_share_nothing(client: Client, node: FakeNode) -> None:
    coded = client.open(coded_identity(), kv_shape=SHAPE)
    raw = client.open(msgspec.structs.replace(coded.identity, layout=make_identity(RAW).layout))
    with coded.reserve(TOKENS) as ticket:
        ticket.copy_from(raw_rows(4))
        ticket.commit()
    assert raw.match(TOKENS).blocks == 0
    assert coded.match(TOKENS).blocks == 4


# ---- with a device


class Paged:
    """An engine's pages of two layers, and the same as raw rows: block i is on page 7 - i."""

    def __init__(self) -> None:
        self.memory = np.full((2, 8, RAW // 2), 0xFF, np.uint8)

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for block, row in enumerate(blocks, first_block):
            row[:] = self.memory[:, 7 - block].reshape(-1)

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for block, row in enumerate(blocks, first_block):
            self.memory[:, 7 - block] = row.reshape(2, -1)

    def on(self, pool: DevicePool) -> DevicePages:
        return DevicePages(pool=pool, layouts=[PagedLayout.of(list(self.memory))], pages=[[7, 6, 5, 4]], host=self)


@pytest.fixture
def device_node(node_dir: Path) -> Iterator[DeviceNode]:
    made = DeviceNode(node_dir)
    yield made
    made.close()


@pytest.mark.parametrize("in_host", [(), (0,), (1, 3)])
def test_a_pool_holds_coded_blocks_and_an_engine_s_pages_raw_ones(
    device_node: DeviceNode, quick: None, in_host: tuple[int, ...]
) -> None:
    rows, source, target = raw_rows(4), Paged(), Paged()
    source.write_blocks(0, rows)
    with connect(device_node.directory, timeout_seconds=5) as client:
        group, pool = client.open(coded_identity(), kv_shape=SHAPE), client.map_device("cpu")
        with group.reserve(TOKENS, device=pool) as ticket:
            ticket.copy_from(source.on(pool))
            ticket.commit()
        device_node.only_in_host(group.keys(TOKENS), in_host)
        with group.acquire(TOKENS, device=pool) as lease:
            assert (lease.blocks, lease.device_blocks) == (4, 4 - len(in_host))
            back = np.zeros_like(rows)
            assert lease.copy_into(back) == 4
            assert lease.copy_into(target.on(pool)) == 4
    assert back.tobytes() == as_read(rows).tobytes()
    target.read_blocks(0, back)
    assert back.tobytes() == as_read(rows).tobytes()


def test_what_is_damaged_in_front_counts_whatever_is_decoded_first() -> None:
    rows, coded = raw_rows(4), np.empty((4, CODED), np.uint8)
    CODEC.encode(rows, coded)
    coded[[1, 3], :4] = 0
    back = np.zeros_like(rows)
    decoding = Decoding(CODEC, back)
    for begin in (2, 0):
        decoding.write_blocks(begin, coded[begin : begin + 2])
    assert (decoding.first_bad, decoding.count_right(4)) == (1, 1)
    assert back[0].tobytes() == as_read(rows)[0].tobytes()
