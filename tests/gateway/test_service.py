"""What tenants may ask, what each may have, and what none can do to another."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tests.client.conftest import BLOCK_BYTES, TOKENS, make_identity
from tests.client.fake_node import FakeNode, answer, drop, hold
from tests.gateway.desk import Desk, run
from tests.wire.samples import REQUESTS
from tierkv.core.reasons import Reason
from tierkv.gateway import users
from tierkv.gateway.tenant_session import MAX_ENDED
from tierkv.wire.frames import encode
from tierkv.wire.messages import (
    Abort,
    Acquire,
    AnyRequest,
    AskCodec,
    BlockState,
    Commit,
    CommitReply,
    Done,
    Error,
    ErrorCode,
    Fetch,
    Hello,
    Match,
    MatchReply,
    OpenGroup,
    Put,
    Release,
    Reply,
    ReportBad,
    Request,
    Reserve,
    ReserveReply,
    Seal,
)

ALLOWED = {Hello, OpenGroup, Match, Acquire, Release, Reserve, Commit, Abort, Seal, ReportBad, Fetch, Put, AskCodec}
PAYLOAD = bytes(range(256)) * (4 * BLOCK_BYTES // 256)
GRANT, OTHER_GRANT = b"grant-id-16bytes", b"another-grant-id"


@pytest.fixture
def folder(node: FakeNode) -> Path:
    return node.directory


@pytest.mark.parametrize(
    "kind", [kind for kind in get_args(AnyRequest) if kind not in ALLOWED], ids=lambda k: k.__name__
)
def test_what_is_for_operators_is_refused_and_never_reaches_the_node(node: FakeNode, kind: type[Request]) -> None:
    request = next(one for one in REQUESTS if type(one) is kind)

    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        reply = await desk.ask(tenant.user, msgspec.structs.replace(request, session=tenant.token))
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.NOT_ALLOWED

    run(node.directory, program)
    assert not [one for one in node.requests if not isinstance(one, Hello)]


def test_what_a_tenant_may_ask_is_this_list_and_nothing_else(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        assert desk.service._here.keys() | desk.service._at_node.keys() == ALLOWED

    run(folder, program)


@pytest.mark.scenario(
    "B231", then="a tenant that names another's salt is in a group of its own: a miss, and no hit for the other either"
)
@pytest.mark.parametrize("salts", [("", ""), ("s1", "s1"), ("s1", "s2"), ("s1", "inline:1:s1"), ("", "inline:1:")])
def test_two_users_share_nothing_whatever_salts_they_name(folder: Path, salts: tuple[str, str]) -> None:
    async def program(desk: Desk) -> None:
        one, other = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        await one.open(salt=salts[0])
        await other.open(salt=salts[1])
        assert one.group != other.group
        await one.store(TOKENS, PAYLOAD)
        assert (await one.match(TOKENS), await other.match(TOKENS)) == (4, 0)
        lease = await other.acquire(TOKENS, GRANT)
        assert (lease.blocks, lease.cached_blocks, lease.reason) == (0, 0, "")
        ticket = await other.reserve(TOKENS, OTHER_GRANT)
        assert ticket.states == bytes([BlockState.GRANTED]) * 4, "neither present nor pending for another's sake"

    run(folder, program)


def test_keys_and_groups_of_another_are_of_no_use(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        one, other = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        await one.open()
        await other.open()
        await one.store(TOKENS, PAYLOAD)
        keys = one.keys(TOKENS)
        for kind, more in (
            (Match, {}),
            (Acquire, {"grant": GRANT}),
            (Seal, {}),
            (ReportBad, {"first_bad": 0}),
            (Reserve, {"grant": GRANT, "first": 4, "tokens": b""}),
        ):
            stolen = await other.ask(kind, group=one.group, keys=keys, **more)
            assert isinstance(stolen, Error), kind
            assert stolen.code == ErrorCode.UNKNOWN_GROUP

    run(folder, program)
    assert len(node.saw(OpenGroup)) == 2


def test_what_a_tenant_calls_its_request_is_handed_on(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        one = desk.tenant(desk.user(1))
        await one.open()
        await one.ask(Acquire, group=one.group, keys=one.keys(TOKENS), grant=GRANT, name="mine")

    run(folder, program)
    assert [asked.name for asked in node.saw(Acquire)] == ["mine"]


def test_a_session_of_the_same_user_needs_to_open_the_group_too_and_shares_the_blocks(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        user = desk.user(1)
        one, other = desk.tenant(user), desk.tenant(user)
        await one.open()
        await one.store(TOKENS, PAYLOAD)
        refused = await other.ask(Match, group=one.group, keys=one.keys(TOKENS))
        assert refused.code == ErrorCode.UNKNOWN_GROUP
        await other.open()
        assert await other.match(TOKENS) == 4

    run(folder, program)


def test_a_token_is_good_for_its_own_user_only(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        one, other = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        await one.open()
        for token in (one.token, bytes(16), b"", os.urandom(16)):
            reply = await desk.ask(other.user, Match(id=1, session=token, group=one.group, keys=b""))
            assert isinstance(reply, Error)
            assert reply.code == ErrorCode.SESSION_GONE

    run(folder, program)


# ---- grants


def test_a_grant_id_means_nothing_to_another_session(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        user = desk.user(1)
        one, same_user, other = desk.tenant(user), desk.tenant(user), desk.tenant(desk.user(2))
        for tenant in (one, same_user, other):
            await tenant.open()
        await one.store(TOKENS, PAYLOAD)
        assert (await one.acquire(TOKENS, GRANT)).blocks == 4
        longer = [*TOKENS[:16], 9, 9, 9, 9]
        assert (await one.reserve(longer, OTHER_GRANT)).states[-1] == BlockState.GRANTED
        for thief in (same_user, other):
            for request in (
                await thief.ask(Fetch, grant=GRANT, start=0, num_bytes=1),
                await thief.ask(Put, grant=OTHER_GRANT, start=0, payload=b"x"),
                await thief.ask(Commit, grant=OTHER_GRANT),
            ):
                assert isinstance(request, Error)
                assert request.code == ErrorCode.UNKNOWN_GRANT
            assert isinstance(await thief.ask(Release, grant=GRANT), Done)
            assert isinstance(await thief.ask(Abort, grant=OTHER_GRANT), Done)
        fetched = await one.ask(Fetch, grant=GRANT, start=0, num_bytes=len(PAYLOAD))
        assert fetched.payload == PAYLOAD
        assert isinstance(await one.ask(Put, grant=OTHER_GRANT, start=0, payload=bytes(BLOCK_BYTES)), Done)
        assert isinstance(await one.ask(Commit, grant=OTHER_GRANT), CommitReply)
        # The same sixteen bytes are another grant in another session.
        assert (await same_user.acquire(TOKENS, GRANT)).reason == Reason.GRANT_ENDED
        assert (await other.acquire(TOKENS, os.urandom(16))).blocks == 0

    run(folder, program)


def test_the_arena_stays_unseen(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.reserve([1, 2, 3, 4], os.urandom(16))  # the slots below the next ones
        ticket = await tenant.reserve(TOKENS, GRANT)
        offsets = [int.from_bytes(ticket.offsets[i : i + 8], "little") for i in range(0, len(ticket.offsets), 8)]
        assert offsets == [0, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]
        assert ticket.generations == bytes(32)
        await tenant.ask(Put, grant=GRANT, start=0, payload=PAYLOAD)
        await tenant.ask(Commit, grant=GRANT)
        assert (await tenant.acquire(TOKENS, OTHER_GRANT)).parts == ()
        hello = await tenant.ask(Hello, protocol=1)
        assert (hello.data_dir, hello.host_bytes) == ("", 0)

    run(folder, program)


@pytest.mark.parametrize("pieces", [[(0, 3 * BLOCK_BYTES)], [(0, 4 * BLOCK_BYTES - 1)], []])
def test_a_ticket_with_a_block_that_is_not_whole_is_not_published(folder: Path, pieces: list[tuple[int, int]]) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.reserve(TOKENS, GRANT)
        for start, end in pieces:
            assert isinstance(await tenant.ask(Put, grant=GRANT, start=start, payload=PAYLOAD[start:end]), Done)
        refused = await tenant.ask(Commit, grant=GRANT)
        assert (refused.code, refused.field) == (ErrorCode.INVALID, "grant")
        assert await tenant.match(TOKENS) == 0
        end = pieces[0][1] if pieces else 0
        assert isinstance(await tenant.ask(Put, grant=GRANT, start=end, payload=PAYLOAD[end:]), Done)
        assert (await tenant.ask(Commit, grant=GRANT)).visible == 4

    run(folder, program)


def test_holes_and_what_lies_outside_are_refused_by_name(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.reserve(TOKENS, GRANT)
        size = 4 * BLOCK_BYTES
        for start, payload in ((1, b"x"), (BLOCK_BYTES + 1, b"x"), (size, b"x"), (size - 1, b"xy"), (2**63 - 1, b"x")):
            refused = await tenant.ask(Put, grant=GRANT, start=start, payload=payload)
            assert (refused.code, refused.field) == (ErrorCode.INVALID, "start")
        await tenant.ask(Put, grant=GRANT, start=0, payload=PAYLOAD)
        await tenant.ask(Commit, grant=GRANT)
        await tenant.acquire(TOKENS, OTHER_GRANT)
        for start, num_bytes in ((size, 1), (size - 1, 2), (0, size + 1), (2**63 - 1, 1)):
            refused = await tenant.ask(Fetch, grant=OTHER_GRANT, start=start, num_bytes=num_bytes)
            assert (refused.code, refused.field) == (ErrorCode.INVALID, "start")

    run(folder, program)


def test_nothing_is_written_after_the_commit_or_read_after_the_release(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.reserve(TOKENS, GRANT)
        await tenant.ask(Put, grant=GRANT, start=0, payload=PAYLOAD)
        commit, put = await asyncio.gather(
            tenant.ask(Commit, grant=GRANT), tenant.ask(Put, grant=GRANT, start=0, payload=b"late")
        )
        assert isinstance(commit, CommitReply)
        assert put.code == ErrorCode.UNKNOWN_GRANT
        again = await tenant.ask(Commit, grant=GRANT)
        assert (again.visible, again.id) == (4, again.id)
        await tenant.acquire(TOKENS, OTHER_GRANT)
        assert (await tenant.ask(Fetch, grant=OTHER_GRANT, start=0, num_bytes=len(PAYLOAD))).payload == PAYLOAD
        await tenant.ask(Release, grant=OTHER_GRANT)
        assert (await tenant.ask(Fetch, grant=OTHER_GRANT, start=0, num_bytes=1)).code == ErrorCode.UNKNOWN_GRANT

    run(folder, program)


def test_asking_again_with_an_id_gives_the_same_answer_and_one_grant(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        first, second = await asyncio.gather(tenant.reserve(TOKENS, GRANT), tenant.reserve(TOKENS, GRANT))
        assert (first.states, first.offsets) == (second.states, second.offsets)
        assert len(node.saw(Reserve)) == 1
        await tenant.ask(Put, grant=GRANT, start=0, payload=PAYLOAD)
        await tenant.ask(Commit, grant=GRANT)
        leases = await asyncio.gather(*(tenant.acquire(TOKENS, OTHER_GRANT) for _ in range(3)))
        assert [lease.blocks for lease in leases] == [4, 4, 4]
        assert len(node.saw(Acquire)) == 1
        assert (await tenant.acquire(TOKENS, GRANT)).reason == Reason.GRANT_ENDED  # the id of a ticket

    run(folder, program)
    assert node.has_no_grants()


def test_an_end_that_overtakes_its_grant_counts(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.ask(Abort, grant=GRANT)
        assert (await tenant.reserve(TOKENS, GRANT)).states == bytes([BlockState.NO_ROOM]) * 4
        await tenant.store(TOKENS, PAYLOAD)
        node.script[Acquire].append(hold)
        waiting = asyncio.ensure_future(tenant.acquire(TOKENS, OTHER_GRANT))
        while not node.held:
            await asyncio.sleep(0.001)  # between two looks at a condition that the test's time limit ends
        await tenant.ask(Release, grant=OTHER_GRANT)
        node.release_held()
        assert ((await waiting).blocks, (await waiting).reason) == (0, Reason.GRANT_ENDED)
        assert tenant.user.held_bytes == 0

    run(folder, program)
    assert node.has_no_grants()


def test_ended_ids_are_remembered_up_to_a_number(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        for number in range(MAX_ENDED + 10):
            await tenant.ask(Abort, grant=number.to_bytes(16, "little"))
        assert len(tenant.session.ended) == MAX_ENDED

    run(folder, program)


@pytest.mark.parametrize("kind", [Acquire, Reserve])
def test_a_session_that_ends_while_it_waits_leaves_nothing(folder: Path, node: FakeNode, kind: type[Request]) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        if kind is Acquire:
            await tenant.store(TOKENS, PAYLOAD)
        node.script[kind].append(hold)
        asked = tenant.acquire(TOKENS, GRANT) if kind is Acquire else tenant.reserve(TOKENS, GRANT)
        waiting = asyncio.ensure_future(asked)
        while not node.held:
            await asyncio.sleep(0.001)  # between two looks at a condition that the test's time limit ends
        desk.service.end_session(tenant.token)
        waiting.cancel()
        await asyncio.gather(*tenant.session.tasks, return_exceptions=True)
        assert (tenant.user.held_bytes, tenant.user.requests, tenant.user.sessions) == (0, 0, 0)
        node.release_held()

    run(folder, program)
    assert node.has_no_grants()


def test_the_end_of_a_session_gives_everything_back_at_once(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.store(TOKENS, PAYLOAD)
        await tenant.acquire(TOKENS, GRANT)
        await tenant.reserve([1, 2, 3, 4], OTHER_GRANT)
        assert tenant.user.held_bytes == 5 * BLOCK_BYTES
        desk.service.end_session(tenant.token)
        assert tenant.user.held_bytes == 0
        assert (await desk.ask(tenant.user, Match(id=1, session=tenant.token, group=tenant.group, keys=b""))).code == (  # type: ignore[attr-defined]
            ErrorCode.SESSION_GONE
        )

    run(folder, program)
    assert node.has_no_grants()


# ---- what each may have


def test_what_a_user_holds_is_capped_over_all_of_its_sessions(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        user = desk.user(1, limit_bytes=6 * BLOCK_BYTES)
        one, other, stranger = desk.tenant(user), desk.tenant(user), desk.tenant(desk.user(2))
        for tenant in (one, other, stranger):
            await tenant.open()
        ticket = await one.reserve(list(range(4 * 4)), GRANT)
        assert ticket.states == bytes([BlockState.GRANTED]) * 4
        more = await other.reserve(list(range(100, 100 + 4 * 4)), GRANT)
        assert more.states == bytes([BlockState.GRANTED]) * 2 + bytes([BlockState.NO_ROOM]) * 2
        assert more.reason == Reason.SESSION_CAP
        none = await other.reserve(list(range(200, 204)), OTHER_GRANT)
        assert (none.states, none.reason) == (bytes([BlockState.NO_ROOM]), Reason.SESSION_CAP)
        assert (await stranger.reserve(list(range(16)), GRANT)).reason == ""
        await one.ask(Abort, grant=GRANT)
        assert (await one.reserve(list(range(16)), OTHER_GRANT)).states == bytes([BlockState.GRANTED]) * 4
        assert user.held_bytes == 6 * BLOCK_BYTES

    run(folder, program)


def test_a_lease_is_cut_to_what_the_user_may_hold(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1, limit_bytes=4 * BLOCK_BYTES))
        await tenant.open()
        await tenant.store(TOKENS, PAYLOAD)
        await tenant.reserve([7, 7, 7, 7], OTHER_GRANT)
        lease = await tenant.acquire(TOKENS, GRANT)
        assert (lease.blocks, lease.reason) == (3, Reason.SESSION_CAP)
        assert (await tenant.ask(Fetch, grant=GRANT, start=0, num_bytes=3 * BLOCK_BYTES)).payload == PAYLOAD[
            : 3 * BLOCK_BYTES
        ]
        full = await tenant.acquire(TOKENS, os.urandom(16))
        assert (full.blocks, full.reason) == (0, Reason.SESSION_CAP)

    run(folder, program)


def test_what_is_asked_for_at_the_same_time_counts_before_it_is_granted(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1, limit_bytes=4 * BLOCK_BYTES))
        await tenant.open()
        replies = await asyncio.gather(
            *(tenant.reserve(list(range(n, n + 16)), n.to_bytes(16, "little")) for n in range(0, 160, 16))
        )
        granted = sum(reply.states.count(BlockState.GRANTED) for reply in replies)
        assert granted == 4
        assert tenant.user.held_bytes == 4 * BLOCK_BYTES

    run(folder, program)


def test_groups_are_capped_and_a_refused_one_takes_no_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "MAX_GROUPS", 3)

    async def program(desk: Desk) -> None:
        tenant, other = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        for salt in "abc":
            assert (await tenant.open(salt=salt)).group
        refused = await tenant.open(salt="d")
        assert refused.code == ErrorCode.TOO_MANY  # type: ignore[attr-defined]
        assert (await tenant.open(salt="b")).group
        assert (await other.open(salt="d")).group

    run(folder, program)


def test_a_group_counts_as_long_as_a_session_that_opened_it_lives(
    folder: Path, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "MAX_GROUPS", 1)

    async def program(desk: Desk) -> None:
        user = desk.user(1)
        one, other = desk.tenant(user), desk.tenant(user)
        for tenant in (one, one, other):
            await tenant.open(salt="a")
        desk.service.end_session(one.token)
        refused = await other.open(salt="b")
        assert refused.code == ErrorCode.TOO_MANY  # type: ignore[attr-defined]
        assert await other.match(TOKENS) == 0, "the group of the session that lives is still known"
        desk.service.end_session(other.token)

        for salt in ("b", "c", "a"):
            later = desk.tenant(user)
            assert (await later.open(salt=salt)).persistent
            await later.store(TOKENS, PAYLOAD)
            assert await later.match(TOKENS) == 4
            desk.service.end_session(later.token)
        session = desk.upstream.state.session()
        assert session is not None
        assert not session.opened, "what only grows"

    run(folder, program)
    assert [request.identity.salt[-1] for request in node.saw(OpenGroup)] == ["a", "b", "c", "a"]


def test_grants_and_requests_of_an_ended_session_find_an_end_though_its_group_is_forgotten(
    folder: Path, node: FakeNode
) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        await tenant.store(TOKENS, PAYLOAD)
        assert (await tenant.acquire(TOKENS, GRANT)).blocks == 4
        await tenant.reserve([7, 7, 7, 7], OTHER_GRANT)
        node.script[Match].append(hold)
        waiting = asyncio.ensure_future(tenant.match(TOKENS))
        while not node.held:
            await asyncio.sleep(0.001)  # between two looks at a condition that the test's time limit ends
        not_begun = Match(id=next(desk.ids), session=tenant.token, group=tenant.group, keys=tenant.keys(TOKENS))
        answers: list[Reply] = []
        desk.service.handle(tenant.user, encode(not_begun), lambda _session, reply: answers.append(reply))
        tasks = set(tenant.session.tasks)
        desk.service.end_session(tenant.token)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done] == [asyncio.CancelledError] * 2
        assert not answers
        waiting.cancel()
        node.release_held()
        assert (tenant.user.held_bytes, tenant.user.requests) == (0, 0)

    run(folder, program)
    assert node.has_no_grants()


def test_requests_under_way_are_capped_by_number_and_bytes(
    folder: Path, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.gateway.service.MAX_REQUESTS", 4)

    async def program(desk: Desk) -> None:
        tenant, other = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        await tenant.open()
        await other.open()
        node.script[Match].extend([hold] * 4)
        waiting = [asyncio.ensure_future(tenant.match(TOKENS)) for _ in range(4)]
        while len(node.held) < 4:
            await asyncio.sleep(0.001)  # between two looks at a condition that the test's time limit ends
        refused = await tenant.ask(Match, group=tenant.group, keys=b"")
        assert refused.code == ErrorCode.TOO_MANY
        assert await other.match(TOKENS) == 0
        node.release_held()
        assert await asyncio.gather(*waiting) == [0, 0, 0, 0]
        monkeypatch.setattr("tierkv.gateway.service.MAX_REQUEST_BYTES", 200)
        refused = await tenant.ask(Match, group=tenant.group, keys=bytes(320))
        assert refused.code == ErrorCode.TOO_MANY
        assert isinstance(await tenant.ask(Match, group=tenant.group, keys=tenant.keys(TOKENS[:4])), MatchReply)

    run(folder, program)


def test_one_tenant_that_waits_holds_up_nobody(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        slow, quick = desk.tenant(desk.user(1)), desk.tenant(desk.user(2))
        await slow.open()
        await quick.open()
        await quick.store(TOKENS, PAYLOAD)
        node.script[Seal].append(hold)
        waiting = asyncio.ensure_future(
            slow.ask(Seal, group=slow.group, keys=slow.keys(TOKENS), wait="flushed", deadline_ms=60_000)
        )
        while not node.held:
            await asyncio.sleep(0.001)  # between two looks at a condition that the test's time limit ends
        assert (await quick.acquire(TOKENS, GRANT)).blocks == 4
        assert (await quick.ask(Fetch, grant=GRANT, start=0, num_bytes=len(PAYLOAD))).payload == PAYLOAD
        assert not waiting.done()
        node.release_held()
        await waiting

    run(folder, program)


# ---- what is forwarded


def test_names_are_marked_and_manifests_left_out(folder: Path, node: FakeNode) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(7))
        identity = make_identity()
        await tenant.ask(
            OpenGroup,
            identity=identity,
            block_bytes=BLOCK_BYTES,
            model_name="Llama\x1b[2J" + "x" * 200,
            adapter_name="",
        )

    run(folder, program)
    opened = node.saw(OpenGroup)[0]
    assert opened.model_name == "Llama?[2J" + "x" * 91 + " (inline user 7)"
    assert (opened.adapter_name, opened.manifest) == ("", ())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"block_bytes": 1}, ErrorCode.LAYOUT_MISMATCH),
        ({"identity": msgspec.structs.replace(make_identity(), weights="")}, ErrorCode.INVALID),
        ({"identity": msgspec.structs.replace(make_identity(), config="")}, ErrorCode.INVALID),
        ({"identity": msgspec.structs.replace(make_identity(), salt="s" * 70_000)}, ErrorCode.INVALID),
    ],
)
def test_identities_that_can_not_be_are_refused_here(
    folder: Path, node: FakeNode, fields: dict[str, object], code: ErrorCode
) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        refused = await tenant.ask(OpenGroup, **{"identity": make_identity(), "block_bytes": BLOCK_BYTES} | fields)
        assert refused.code == code

    run(folder, program)
    assert not node.saw(OpenGroup)


def test_ranks_that_the_group_has_not_are_refused(folder: Path) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open(make_identity(shards=2))
        refused = await tenant.ask(Reserve, grant=GRANT, group=tenant.group, rank=2, keys=b"", first=0, tokens=b"")
        assert (refused.code, refused.field) == (ErrorCode.INVALID, "rank")
        refused = await tenant.ask(ReportBad, group=tenant.group, keys=bytes(32), first_bad=1)
        assert (refused.code, refused.field) == (ErrorCode.INVALID, "first_bad")
        refused = await tenant.ask(Reserve, grant=GRANT, group=tenant.group, keys=bytes(32), first=0, tokens=b"")
        assert (refused.code, refused.field) == (ErrorCode.INVALID, "tokens")

    run(folder, program)


def test_a_node_that_refuses_the_group_is_quoted(folder: Path, node: FakeNode) -> None:
    node.script[OpenGroup].append(
        answer(
            lambda request: Error(
                id=request.id, code=ErrorCode.INVALID, problem="raise slab_bytes", field="block_bytes"
            )
        )
    )

    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        refused = await tenant.open()
        assert (refused.code, refused.problem, refused.field) == (ErrorCode.INVALID, "raise slab_bytes", "block_bytes")  # type: ignore[attr-defined]
        assert (await tenant.open()).group

    run(folder, program)


def test_a_bug_in_one_request_is_answered_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setitem(desk.service._here, Fetch, broken)
        monkeypatch.setattr(desk.upstream.verbs, "seal", broken)
        for reply in (
            await tenant.ask(Fetch, grant=GRANT, start=0, num_bytes=1),
            await tenant.ask(Seal, group=tenant.group, keys=b""),
        ):
            assert reply.code == ErrorCode.INTERNAL
        assert await tenant.match(TOKENS) == 0

    run(folder, program)
    assert "a bug" in caplog.text


def test_lost_replies_of_the_node_are_a_timeout_and_leave_nothing(folder: Path, node: FakeNode, quick: None) -> None:
    async def program(desk: Desk) -> None:
        tenant = desk.tenant(desk.user(1))
        await tenant.open()
        node.script[Reserve].append(drop)
        lost = await tenant.ask(
            Reserve,
            grant=GRANT,
            group=tenant.group,
            keys=tenant.keys(TOKENS),
            first=0,
            tokens=b"".join(n.to_bytes(4, "little") for n in TOKENS[:16]),
            deadline_ms=100,
        )
        assert isinstance(lost, ReserveReply)
        assert (lost.states, lost.reason) == (bytes([BlockState.NO_ROOM]) * 4, Reason.DEADLINE)
        assert tenant.user.held_bytes == 0

    run(folder, program)
