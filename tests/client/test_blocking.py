"""Every verb, against a node that is well."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from tests.client.conftest import BLOCK_BYTES, TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode, answer
from tierkv.client import Client, Group, connect
from tierkv.client.answers import Committed, Match, Sealed
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError, LayoutMismatch
from tierkv.wire.messages import (
    Acquire,
    AcquireReply,
    BlockState,
    Error,
    ErrorCode,
    Holder,
    LeasePart,
    NotReady,
    OpenGroup,
    Release,
    Reserve,
    ReserveReply,
    Seal,
)
from tierkv.wire.messages import (
    Match as MatchRequest,
)


def test_what_was_stored_is_loaded(group: Group, node: FakeNode) -> None:
    assert group.match(TOKENS) == Match(blocks=0, host_blocks=0, tokens=0)
    rows = store(group, TOKENS)
    assert group.match(TOKENS) == Match(blocks=4, host_blocks=4, tokens=16)
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert (lease.blocks, lease.tokens, lease.cached_blocks, lease.nvme_blocks) == (4, 16, 4, 0)
        assert lease.copy_into(destination) == 4
        assert node.open_grants == 1
    assert (destination == rows).all()
    assert node.has_no_grants()


@pytest.mark.parametrize(
    ("name", "sent"), [("", ""), ("cmpl-7", "cmpl-7"), ("x" * 70, "x" * 64), ("é" * 40, "é" * 32), ("\ud800", "?")]
)
def test_a_request_s_name_is_sent_as_far_as_the_node_takes_it(
    group: Group, node: FakeNode, name: str, sent: str
) -> None:
    with group.acquire(TOKENS, name=name):
        assert node.saw(Acquire)[0].name == sent


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 10_000])
def test_blocks_of_any_size_come_back_and_nothing_beside_them_is_written(client: Client, block_bytes: int) -> None:
    group = client.open(make_identity(block_bytes))
    for count in range(18):
        tokens = [count * 1_000 + token for token in range(count)]
        rows = store(group, tokens)
        guarded = poisoned(len(rows) + 2, block_bytes)
        with group.acquire(tokens) as lease:
            assert lease.blocks == count // 4
            assert lease.copy_into(guarded[1:-1]) == lease.blocks
        assert (guarded[1:-1] == rows).all()
        assert (guarded[[0, -1]] == 0xFF).all()


def test_prompts_share_their_common_blocks_only(group: Group) -> None:
    store(group, TOKENS)
    other = [*TOKENS[:9], 1, 2, 3]
    assert group.match(other).blocks == 2
    assert group.match(TOKENS[1:]).blocks == 0


def test_groups_share_nothing(client: Client, group: Group) -> None:
    store(group, TOKENS)
    assert client.open(make_identity(weights="other")).match(TOKENS).blocks == 0


@pytest.mark.scenario("B040", then="blocks from scattered slots arrive in the order of the prompt")
def test_slots_that_are_scattered_come_in_the_order_of_the_prompt(group: Group) -> None:
    """Blocks 0 and 2 are stored first with others between them, then 1 and 3: no two neighbours lie together."""
    for tokens in (TOKENS[:4], [1, 2, 3, 4], TOKENS[:8], [5, 6, 7, 8], TOKENS[:12], [9, 10, 11, 12], TOKENS):
        store(group, tokens)
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert len(lease.raw_views()) == 4
        assert lease.copy_into(destination) == 4
    assert (destination == stamped(group, 4)).all()


@pytest.mark.scenario("B253", then="every verb of a client takes nothing and answers nothing, without asking the node")
def test_calls_about_nothing_answer_nothing(group: Group, node: FakeNode) -> None:
    before = len(node.saw(object))
    assert group.match([]) == Match(blocks=0, host_blocks=0, tokens=0)
    assert group.match([1, 2, 3]) == Match(blocks=0, host_blocks=0, tokens=0)
    with group.acquire([]) as lease:
        assert (lease.blocks, lease.reason, lease.copy_into(bytearray())) == (0, None, 0)
    with group.acquire(TOKENS, max_blocks=0) as lease:
        assert lease.blocks == 0
    with group.reserve([1, 2, 3]) as ticket:
        assert (ticket.granted, list(ticket.runs())) == ([], [])
        ticket.copy_from(bytearray())
        assert ticket.commit() == Committed(visible=0, staged=0)
    with group.reserve(TOKENS, first_block=4) as ticket:
        assert ticket.granted == []
    assert group.seal([]) == Sealed(blocks=0, flushed_blocks=0)
    assert len(node.saw(object)) == before


def test_a_miss_is_an_empty_lease(group: Group, node: FakeNode) -> None:
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert (lease.blocks, lease.reason) == (0, None)
        assert lease.copy_into(destination) == 0
    assert (destination == 0xFF).all()
    assert node.saw(Release) == []


def test_known_keys_spare_the_tokens(group: Group) -> None:
    store(group, TOKENS)
    keys = group.keys(TOKENS)
    assert group.match(keys=keys).blocks == 4
    with group.acquire(keys=keys) as lease:
        assert lease.blocks == 4
    chain = group.key_chain()
    chain.extend(TOKENS[:7])
    assert chain.extend(TOKENS[7:]) == keys


def test_either_tokens_or_keys(group: Group) -> None:
    for call in (group.match, group.acquire, group.seal):
        with pytest.raises(ValueError, match="either tokens or keys"):
            call()
        with pytest.raises(ValueError, match="either tokens or keys"):
            call(TOKENS, keys=group.keys(TOKENS))
        with pytest.raises(ValueError, match="no whole number of keys"):
            call(keys=b"short")


def test_max_blocks_shortens_the_lease(group: Group) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, max_blocks=3) as lease:
        assert (lease.blocks, lease.cached_blocks) == (3, 4)
    with pytest.raises(ValueError, match="max_blocks"):
        group.acquire(TOKENS, max_blocks=-1)


# ---- reading


class Scatter:
    """A destination that puts blocks where it wants them, in reverse."""

    def __init__(self, num_blocks: int, during: Callable[[int], None] = lambda first: None) -> None:
        self.rows = poisoned(num_blocks)
        self.during = during

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        self.during(first_block)
        with pytest.raises(ValueError, match="read-only"):
            blocks[0, 0] = 1
        for index, block in enumerate(blocks):
            self.rows[len(self.rows) - 1 - first_block - index] = block


def test_a_destination_may_place_blocks_itself(group: Group) -> None:
    rows = store(group, TOKENS)
    destination = Scatter(4)
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(destination) == 4
    assert (destination.rows[::-1] == rows).all()


def test_a_slot_that_is_revoked_during_the_copy_is_not_valid(group: Group, node: FakeNode, client: Client) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, revocable=True) as lease:
        offsets = np.frombuffer(lease.parts[0].offsets, "<u8")
        destination = Scatter(4, during=lambda first: node.bump(int(offsets[2])))
        assert lease.copy_into(destination) == 2
    assert client.counters.by_reason == {Reason.REVOKED: 1}


def test_what_was_revoked_before_is_not_copied_at_all(group: Group, node: FakeNode) -> None:
    rows = store(group, TOKENS)
    destination = poisoned(4)
    with group.acquire(TOKENS, revocable=True) as lease:
        node.bump(int(np.frombuffer(lease.parts[0].offsets, "<u8")[1]))
        assert lease.copy_into(destination) == 1
        assert lease.count_valid() == 1
    assert (destination[0] == rows[0]).all()
    assert (destination[1:] == 0xFF).all()


def test_raw_views_are_proven_only_afterwards(group: Group, node: FakeNode) -> None:
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        [(first, view)] = lease.raw_views()
        assert first == 0
        assert (view == rows).all()
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
        assert lease.count_valid() == 4
        node.bump(int(np.frombuffer(lease.parts[0].offsets, "<u8")[3]))
        assert lease.count_valid() == 3


def test_a_released_lease_reads_nothing_more(group: Group, node: FakeNode) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        pass
    lease.release()
    assert lease.released
    assert len(node.saw(Release, at_least=1)) == 1
    for read in (lambda: lease.copy_into(poisoned(4)), lease.raw_views, lease.count_valid):
        with pytest.raises(ValueError, match="released"):
            read()


@pytest.mark.parametrize(
    ("destination", "error"),
    [
        (np.zeros((3, BLOCK_BYTES), np.uint8), ValueError),
        (np.zeros((4, BLOCK_BYTES // 2), np.float32), LayoutMismatch),
        (bytes(4 * BLOCK_BYTES), ValueError),
        (None, ValueError),
    ],
)
def test_a_destination_that_does_not_fit_is_refused_before_anything_is_copied(
    group: Group, destination: object, error: type[Exception]
) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS) as lease, pytest.raises(error):
        lease.copy_into(destination)
    if isinstance(destination, np.ndarray):
        assert not destination.any()


def test_a_block_that_was_found_bad_is_a_miss_from_then_on(group: Group) -> None:
    store(group, TOKENS)
    keys = group.keys(TOKENS)
    assert group.report_bad(keys, 2) is None
    assert group.match(TOKENS).blocks == 2
    store(group, TOKENS)
    assert group.match(TOKENS).blocks == 4
    with pytest.raises(ValueError, match="first_bad"):
        group.report_bad(keys, 4)


def test_a_lease_can_be_held_by_another_session(node: FakeNode, client: Client, group: Group) -> None:
    rows = store(group, TOKENS)
    with connect(node.directory) as worker:
        held_by_worker = worker.open(make_identity())
        token = worker.session_token()
        asked = group.acquire(TOKENS, holders=(Holder(0, token),))
        with held_by_worker.hold(asked.grant, token, asked.parts[0]) as lease:
            destination = poisoned(4)
            assert lease.copy_into(destination) == 4
            assert (destination == rows).all()
        assert [release.rank for release in node.saw(Release, at_least=1)] == [0]
        assert held_by_worker.hold(asked.grant, b"of an older one.", asked.parts[0]).reason is Reason.SESSION_GONE
        asked.release()


def test_each_rank_leases_its_own_shard(client: Client, node: FakeNode) -> None:
    group = client.open(make_identity(shards=2), rank=1)
    rows = store(group, TOKENS)
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert [part.rank for part in lease.parts] == [1]
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()
    assert node.saw(Acquire)[0].holders == (Holder(1, client.session_token()),)
    assert node.has_no_grants()


def test_the_one_who_asked_for_others_has_nothing_to_copy_or_release(client: Client, node: FakeNode) -> None:
    group = client.open(make_identity(shards=2), rank=0)
    store(group, TOKENS)
    with group.acquire(TOKENS, holders=(Holder(1, b"another session."),)) as lease:
        assert (lease.blocks, [part.rank for part in lease.parts]) == (4, [1])
        with pytest.raises(ValueError, match="held by another session"):
            lease.copy_into(poisoned(4))
    assert node.saw(Release) == []
    lease.release_all()  # the request was given up before the other process heard of it
    assert [release.rank for release in node.saw(Release, at_least=1)] == [None]
    assert node.has_no_grants()


def test_who_asked_for_another_process_of_its_own_rank_neither_reads_nor_releases_its_part(
    node: FakeNode, client: Client, group: Group
) -> None:
    store(group, TOKENS)
    with connect(node.directory) as worker:
        token = worker.session_token()
        held = pytest.raises(ValueError, match="held by another session")
        with group.acquire(TOKENS, holders=(Holder(0, token),)) as asked, held:
            asked.copy_into(poisoned(4))
        assert node.saw(Release) == []
        with worker.open(make_identity()).hold(asked.grant, token, asked.parts[0]) as lease:
            assert lease.copy_into(poisoned(4)) == 4
        assert node.has_no_grants()


def test_a_part_of_another_rank_is_not_held(client: Client, node: FakeNode) -> None:
    group = client.open(make_identity(shards=2), rank=1)
    with pytest.raises(ValueError, match="rank 0's"):
        group.hold(b"g" * 16, client.session_token(), LeasePart(0, bytes(8), bytes(8)))
    with pytest.raises(ValueError, match="8 bytes of offsets, 16 of generations"):
        group.hold(b"g" * 16, client.session_token(), LeasePart(1, bytes(8), bytes(16)))


def test_only_the_one_who_asked_ends_every_part_and_not_while_it_reads(
    client: Client, node: FakeNode, group: Group
) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS) as lease, pytest.raises(ValueError, match="own part"):
        lease.release_all()
    with group.hold(b"g" * 16, client.session_token(), LeasePart(0, bytes(8), bytes(8))) as lease:
        pass
    with pytest.raises(ValueError, match="another process asked"):
        lease.release_all()


@pytest.mark.parametrize(
    "part",
    [
        LeasePart(0, (2**40).to_bytes(8, "little"), bytes(8)),  # outside of the arena
        LeasePart(0, (128 * 4096).to_bytes(8, "little"), bytes(8)),  # just behind it
        LeasePart(0, (100).to_bytes(8, "little"), bytes(8)),  # not on a page
        LeasePart(1, bytes(8), bytes(8)),  # somebody else's rank
    ],
)
def test_slots_that_cannot_be_are_not_touched_and_given_back(
    group: Group, node: FakeNode, client: Client, part: LeasePart
) -> None:
    node.script[Acquire].append(
        answer(lambda asked: AcquireReply(id=asked.id, blocks=1, nvme_blocks=0, cached_blocks=1, parts=(part,)))
    )
    with group.acquire(TOKENS) as lease:
        assert (lease.blocks, lease.reason) == (0, Reason.WIRE_ERROR)
    assert [release.grant for release in node.saw(Release, at_least=1)] == [node.saw(Acquire)[0].grant]


# ---- writing


def test_only_what_is_missing_is_granted(group: Group) -> None:
    store(group, TOKENS[:4])
    with group.reserve(TOKENS[:12]) as first, group.reserve(TOKENS) as second:
        assert (first.granted, second.granted) == ([1, 2], [3])
        assert list(second.states) == [BlockState.PRESENT, BlockState.PENDING, BlockState.PENDING, BlockState.GRANTED]


def test_a_ticket_that_is_left_is_aborted(group: Group, node: FakeNode) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
    ticket.abort()
    assert node.has_no_grants()
    assert group.match(TOKENS).blocks == 0
    with suppress(RuntimeError), group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        raise RuntimeError("what engines do")
    assert node.has_no_grants()


def test_a_block_that_nobody_wrote_is_not_published(group: Group) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.write(0, stamped(group, 1))
        ticket.write(3, bytes(BLOCK_BYTES))
        with pytest.raises(ValueError, match=r"blocks \[1, 2\]"):
            ticket.commit()
    assert group.match(TOKENS).blocks == 0


def test_blocks_can_be_written_one_by_one_or_in_runs(group: Group) -> None:
    rows = stamped(group, 4)
    with group.reserve(TOKENS[:8]) as ticket:
        for block in ticket.granted:
            ticket.write(block, rows[block])
        assert ticket.commit() == Committed(visible=2, staged=0)
    with group.reserve(TOKENS) as ticket:
        for first, view in ticket.runs():
            view[:] = rows[first : first + len(view)]
        assert ticket.commit() == Committed(visible=2, staged=0)
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        lease.copy_into(destination)
    assert (destination == rows).all()


def test_a_source_may_fill_blocks_itself(group: Group) -> None:
    rows = stamped(group, 4)

    class Gather:
        def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
            blocks[:] = rows[first_block : first_block + len(blocks)]

    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(Gather())
        ticket.commit()
    with group.acquire(TOKENS) as lease:
        assert (np.concatenate([view for _first, view in lease.raw_views()]) == rows).all()


def test_the_rows_of_a_source_begin_at_the_first_block(group: Group) -> None:
    rows = store(group, TOKENS[:8])
    with group.reserve(TOKENS, first_block=1) as ticket:
        assert (ticket.granted, ticket.first_block) == ([2, 3], 1)
        ticket.copy_from(stamped(group, 3, first=1))
        ticket.commit()
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        lease.copy_into(destination)
    assert (destination[:2] == rows).all()
    assert (destination == stamped(group, 4)).all()


def test_only_granted_blocks_can_be_written(group: Group) -> None:
    store(group, TOKENS[:4])
    with group.reserve(TOKENS) as ticket:
        for block in (0, 4, -1):
            with pytest.raises(ValueError, match="not granted"):
                ticket.write(block, bytes(BLOCK_BYTES))
        with pytest.raises(ValueError, match="2 blocks, where one"):
            ticket.write(1, bytes(2 * BLOCK_BYTES))
        with pytest.raises(LayoutMismatch):
            ticket.write(1, bytes(BLOCK_BYTES + 1))
        with pytest.raises(ValueError, match="source: holds 3 blocks"):
            ticket.copy_from(bytes(3 * BLOCK_BYTES))


def test_a_ticket_that_ended_writes_nothing_more(group: Group) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        assert ticket.commit().visible == 4
        assert ticket.commit() == Committed(visible=0, staged=0)
        with pytest.raises(ValueError, match="committed or aborted"):
            ticket.write(0, bytes(BLOCK_BYTES))


def test_no_room_is_an_answer(group: Group, client: Client, node: FakeNode) -> None:
    with group.reserve(range(4 * (node.pages + 6))) as ticket:
        assert (len(ticket.granted), ticket.reason) == (node.pages, Reason.NO_ROOM)
        assert ticket.states.count(BlockState.NO_ROOM) == 6
    assert client.counters.by_reason == {Reason.NO_ROOM: 1}


@pytest.mark.scenario("B251", then="keys that are not as many as the tokens make blocks are refused, with both numbers")
def test_keys_and_tokens_that_do_not_fit_are_refused_naming_both(group: Group) -> None:
    keys = group.keys(TOKENS)
    with pytest.raises(ValueError, match=r"keys: .* 3 keys, but tokens: 18 tokens are 4 full blocks"):
        group.reserve(TOKENS, keys=keys[:-KEY_BYTES])
    with group.reserve(TOKENS, keys=keys) as ticket:
        assert ticket.granted == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="first_block"):
        group.reserve(TOKENS, first_block=-1)


def test_a_reserve_carries_the_tokens_and_extras_of_its_blocks_only(group: Group, node: FakeNode) -> None:
    extras = {0: [b"system"], 2: [b"image"]}
    keys = group.keys(TOKENS, extras)
    with group.reserve(TOKENS, first_block=1, extras=extras):
        [request] = node.saw(Reserve)
        assert request.keys == keys
        assert np.frombuffer(request.tokens, "<u4").tolist() == TOKENS[4:16]
        assert request.extras == {2: [b"image"]}


def test_a_reserve_of_the_tail_asks_the_same_with_the_tokens_of_the_tail_alone(group: Group, node: FakeNode) -> None:
    extras = {0: [b"system"], 2: [b"image"]}
    keys = group.keys(TOKENS, extras)
    tokens = np.array(TOKENS, "<u4").tobytes()
    with group.reserve(TOKENS, first_block=1, extras=extras) as ticket:
        expected = ticket.states
    with group.reserve_tail(keys, first_block=1, tokens=tokens[4 * 4 : 16 * 4], extras=extras) as ticket:
        assert ticket.states == expected
    whole, tail = (msgspec.structs.replace(one, id=0, grant=b"", deadline_ms=0) for one in node.saw(Reserve))
    assert tail == whole
    with pytest.raises(ValueError, match=r"tokens: 64 bytes; 16 are needed for each of the blocks from 1 on.* are 3"):
        group.reserve_tail(keys, first_block=1, tokens=tokens[:64])
    with group.reserve_tail(keys, first_block=4, tokens=b"") as ticket:
        assert ticket.granted == []


def test_a_node_that_grants_other_blocks_than_were_asked_for_is_not_believed(group: Group, node: FakeNode) -> None:
    node.script[Reserve].append(
        answer(lambda asked: ReserveReply(id=asked.id, states=b"\x00", offsets=bytes(8), generations=bytes(8)))
    )
    with group.reserve(TOKENS) as ticket:
        assert (ticket.granted, ticket.reason) == ([], Reason.WIRE_ERROR)


def test_a_prompt_too_long_for_one_request_is_stored_as_far_as_it_goes(client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    tokens = np.arange(4 * 70_000, dtype=np.uint32)
    assert group.match(tokens).reason is None
    with group.reserve(tokens) as ticket:
        assert len(ticket.states) == 65_536
    assert len(node.saw(MatchRequest)[-1].keys) == 65_536 * KEY_BYTES


# ---- the rest


def test_sealing_tells_what_is_flushed(group: Group, node: FakeNode) -> None:
    store(group, TOKENS)
    assert group.seal(TOKENS) == Sealed(blocks=4, flushed_blocks=0)
    assert group.seal(TOKENS, wait="flushed", deadline_seconds=2.5) == Sealed(blocks=4, flushed_blocks=4)
    assert 2_000 < node.saw(Seal)[-1].deadline_ms <= 2_500
    with pytest.raises(ValueError, match="soon"):
        group.seal(TOKENS, wait="soon")


def test_the_deadline_travels(group: Group, node: FakeNode) -> None:
    for seconds, milliseconds in ((0, 0), (0.0004, 1), (0.5, 500)):
        group.acquire(TOKENS, deadline_seconds=seconds).release()
        assert node.saw(Acquire)[-1].deadline_ms <= milliseconds
    for seconds in (-1, 601):
        with pytest.raises(ValueError, match="deadline_seconds"):
            group.acquire(TOKENS, deadline_seconds=seconds)


def test_buffers_that_are_not_what_the_identity_says_are_refused(client: Client, node: FakeNode) -> None:
    with pytest.raises(LayoutMismatch, match=r"4096.*8192"):
        client.open(make_identity(), block_bytes=8192)
    assert node.saw(OpenGroup) == []
    assert client.open(make_identity(), block_bytes=4096).persistent is True


@pytest.mark.parametrize(
    "change",
    [{"salt": "\ud800"}, {"salt": 7.5}, {"adapter": None}, {"config": b"bytes"}, {"parallel": Parallel(tensor=2**70)}],
)
def test_an_identity_of_which_no_key_can_be_made_is_refused_by_name(
    client: Client, node: FakeNode, change: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="identity"):
        client.open(msgspec.structs.replace(make_identity(), **change))
    assert node.saw(OpenGroup) == []


def test_a_layout_that_the_node_refuses_is_the_same_error(client: Client, node: FakeNode) -> None:
    def refuse(asked: object) -> Error:
        return Error(id=asked.id, code=ErrorCode.LAYOUT_MISMATCH, problem="has 2 blocks of 8192", field="block_bytes")  # type: ignore[attr-defined]

    node.script[OpenGroup].append(answer(refuse))
    with pytest.raises(LayoutMismatch, match="8192"):
        client.open(make_identity())


def test_a_group_tells_what_it_is(client: Client) -> None:
    identity = make_identity(shards=2)
    group = client.open(identity, rank=1, model_name="a\udcff")
    assert (group.identity, group.rank, group.key) == (identity, 1, identity.group_key())
    assert (group.block_tokens, group.block_bytes, group.persistence_reason) == (4, BLOCK_BYTES, "")


def test_a_node_that_is_recovering_is_a_miss(group: Group, node: FakeNode, client: Client) -> None:
    def recovering(asked: object) -> NotReady:
        return NotReady(id=asked.id, stage="headers", done=1, total=2)  # type: ignore[attr-defined]

    node.script[MatchRequest].append(answer(recovering))
    node.script[Acquire].append(answer(recovering))
    assert group.match(TOKENS).reason is Reason.NOT_READY
    assert group.acquire(TOKENS).reason is Reason.NOT_READY
    assert node.saw(Release) == []
    assert group.match(TOKENS).reason is None


@pytest.mark.scenario("B168", then="a prompt of a million tokens in blocks of 16 is matched whole, with one request")
def test_a_prompt_of_a_million_tokens_is_matched_whole(client: Client, node: FakeNode) -> None:
    layout = Layout(dtype="uint8", block_bytes=(4_096,), axes="byte", block_tokens=16, engine="test")
    group = client.open(Identity(weights="5a" * 32, config="c", layout=layout))
    tokens = np.arange(1_000_000, dtype=np.uint32)
    keys = bytes(group.keys(tokens))
    node._memory.slots.update((keys[at : at + KEY_BYTES], 0) for at in range(0, len(keys), KEY_BYTES))
    match = group.match(tokens)
    assert (match.blocks, match.tokens) == (62_500, 1_000_000)
    assert len(node.saw(MatchRequest)) == 1
