"""Sessions, groups, readiness, and what happens when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest

from tests.node.kit import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    ENGINE,
    GROUP,
    IDENTITY,
    SLAB_BYTES,
    TOOL,
    Kit,
    prompt,
)
from tests.wire.samples import REQUESTS
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry, OpenNamespace, RecoveryProgress
from tierkv.core.keys import chain_keys
from tierkv.node import service as service_module
from tierkv.node.core_calls import CoreFailed
from tierkv.node.front_sessions import FrontSession
from tierkv.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_TEXT,
    Abort,
    Acquire,
    AnyRequest,
    Commit,
    Done,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    Holder,
    Match,
    MatchReply,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Release,
    Request,
    Reserve,
    Status,
    Usage,
)


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    yield kit
    kit.close()


@pytest.fixture
def durable() -> Iterator[Kit]:
    kit = Kit(nvme_bytes=2**20)
    yield kit
    kit.close()


# ---- sessions


def test_hello_names_the_incarnation(kit: Kit) -> None:
    reply = kit.ask(Hello, protocol=1)
    assert isinstance(reply, HelloReply)
    assert (reply.incarnation, reply.protocol) == (7, 1)


@pytest.mark.parametrize("protocol", [0, 2])
def test_another_protocol_is_refused_by_name(kit: Kit, protocol: int) -> None:
    assert kit.ask(Hello, protocol=protocol).code == ErrorCode.PROTOCOL_VERSION


def test_an_unknown_session_is_told_to_register_again(kit: Kit) -> None:
    assert kit.ask(Status, session=b"x" * 16).code == ErrorCode.SESSION_GONE
    assert kit.ask(Status, session=b"").code == ErrorCode.SESSION_GONE


def test_a_session_whose_announcement_is_still_unread_is_found(kit: Kit) -> None:
    kit.announced.append(FrontSession(b"n" * 16, "new", True))
    assert isinstance(kit.ask(Hello, session=b"n" * 16, protocol=1), HelloReply)


def test_a_closed_session_may_not_ask_and_keeps_what_it_holds(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(2)
    kit.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens)
    kit.service.close_session(ENGINE)
    assert kit.ask(Commit, grant=b"t" * 16).code == ErrorCode.SESSION_GONE
    assert kit.state.num_tickets == 1
    kit.service.end_session(ENGINE, kit.now)
    assert kit.state.num_tickets == 0
    kit.state.check()


# ---- groups


def test_a_group_must_be_opened_by_the_session_that_uses_it(kit: Kit) -> None:
    keys, _ = prompt(1)
    assert kit.ask(Match, group=GROUP, keys=keys).code == ErrorCode.UNKNOWN_GROUP
    kit.open()
    assert isinstance(kit.ask(Match, group=GROUP, keys=keys), MatchReply)
    kit.join(b"2" * 16)
    assert kit.ask(Match, session=b"2" * 16, group=GROUP, keys=keys).code == ErrorCode.UNKNOWN_GROUP


ABOUT_A_GROUP = [request for request in REQUESTS if "group" in request.__struct_fields__]


@pytest.mark.scenario("B229", then="every request about a group is refused to a session that has not opened it")
@pytest.mark.parametrize("sample", ABOUT_A_GROUP, ids=lambda sample: type(sample).__name__)
def test_no_verb_reaches_a_group_that_another_session_has_open(kit: Kit, sample: Request) -> None:
    kit.open()
    stranger = b"stranger-session"
    kit.join(stranger)
    kit.open(msgspec.structs.replace(IDENTITY, salt="another tenant"), session=stranger)
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__ if name not in ("id", "session")}
    reply = kit.ask(type(sample), session=stranger, **(fields | {"group": GROUP}))
    assert reply.code == ErrorCode.UNKNOWN_GROUP


def test_every_request_about_a_group_is_tried() -> None:
    about = {kind for kind in get_args(AnyRequest) if "group" in kind.__struct_fields__}
    assert {type(sample) for sample in ABOUT_A_GROUP} == about


def test_a_memory_only_node_says_that_nothing_is_persistent(kit: Kit) -> None:
    assert kit.open() == OpenGroupReply(id=1, group=GROUP, persistent=False, reason="nvme_off")


def test_groups_with_an_epoch_stay_in_memory(durable: Kit) -> None:
    durable.start_worker()
    assert durable.open().persistent is True
    for identity in (
        msgspec.structs.replace(IDENTITY, epoch="e"),
        msgspec.structs.replace(IDENTITY, epoch="e", weights=""),
    ):
        reply = durable.open(identity)
        assert (reply.persistent, reply.reason) == (False, "not_persistent")
    folders = {i.identity.weights for i in durable.instructions() if isinstance(i, OpenNamespace)}
    assert folders == {IDENTITY.weights}


def test_an_identity_that_says_nothing_is_refused_by_the_field(durable: Kit) -> None:
    """Two models that say nothing would read each other's blocks."""
    durable.start_worker()
    gaps = [{"weights": ""}, {"weights": "../../etc"}, {"weights": "AB" * 32}, {"config": ""}]
    for gap in gaps:
        reply = durable.open(msgspec.structs.replace(IDENTITY, **gap))
        assert isinstance(reply, Error)
        assert (reply.code, reply.field) == (ErrorCode.INVALID, f"identity.{next(iter(gap))}")
    for name in ("dtype", "axes", "engine"):
        layout = msgspec.structs.replace(IDENTITY.layout, **{name: ""})
        assert durable.open(msgspec.structs.replace(IDENTITY, layout=layout)).field == f"identity.layout.{name}"


def layout(**fields: object) -> Identity:
    return msgspec.structs.replace(IDENTITY, layout=msgspec.structs.replace(IDENTITY.layout, **fields))


@pytest.mark.parametrize(
    ("identity", "field"),
    [
        (layout(block_tokens=0), "identity.layout.block_tokens"),
        (layout(block_tokens=-2), "identity.layout.block_tokens"),
        (layout(block_bytes=()), "identity.layout.block_bytes"),
        (layout(block_bytes=(0,)), "identity.layout.block_bytes"),
        (layout(block_bytes=(-4096, 8192)), "identity.layout.block_bytes"),
        (layout(block_bytes=(2**63,)), "identity.layout.block_bytes"),
        (layout(block_bytes=(SLAB_BYTES + 1,)), "block_bytes"),
    ],
)
def test_a_layout_that_can_not_be_is_refused_by_field(kit: Kit, identity: Identity, field: str) -> None:
    total = max(0, min(identity.layout.total_block_bytes, 2**63 - 1))
    reply = kit.ask(OpenGroup, identity=identity, block_bytes=total)
    assert (reply.code, reply.field) == (ErrorCode.INVALID, field)


LONG = "x" * (MAX_TEXT + 1)


@pytest.mark.parametrize(
    ("identity", "manifest", "field"),
    [
        (msgspec.structs.replace(IDENTITY, salt=LONG), (), "identity.salt"),
        (msgspec.structs.replace(IDENTITY, config=LONG), (), "identity.config"),
        (msgspec.structs.replace(IDENTITY, adapter=LONG), (), "identity.adapter"),
        (layout(engine=LONG), (), "identity.layout.engine"),
        (IDENTITY, (ManifestEntry(name="x" * 2**20, size=1, digest="ab"),), "manifest"),
    ],
)
def test_what_a_node_would_have_to_remember_of_a_group_is_bounded(
    kit: Kit, identity: Identity, manifest: tuple[ManifestEntry, ...], field: str
) -> None:
    reply = kit.ask(OpenGroup, identity=identity, manifest=manifest, block_bytes=BLOCK_BYTES)
    assert (reply.code, reply.field) == (ErrorCode.INVALID, field)
    assert len(reply.problem) < 200


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "shards"])
@pytest.mark.parametrize("size", [0, -1, 1_025])
def test_parallel_sizes_are_checked(kit: Kit, name: str, size: int) -> None:
    parallel = msgspec.structs.replace(IDENTITY.parallel, **{name: size})
    identity = msgspec.structs.replace(IDENTITY, parallel=parallel)
    reply = kit.ask(OpenGroup, identity=identity, block_bytes=BLOCK_BYTES)
    assert (reply.code, reply.field) == (ErrorCode.INVALID, f"identity.parallel.{name}")


def test_buffers_that_are_not_what_the_layout_says_are_refused(kit: Kit) -> None:
    reply = kit.ask(OpenGroup, identity=IDENTITY, block_bytes=BLOCK_BYTES // 2)
    assert (reply.code, reply.field) == (ErrorCode.LAYOUT_MISMATCH, "block_bytes")


def test_equal_byte_counts_do_not_make_an_equal_layout(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(2)
    kit.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens)
    kit.ask(Commit, grant=b"t" * 16)
    other = kit.open(layout(dtype="fp16")).group
    assert other != GROUP
    assert kit.ask(Match, group=other, keys=chain_keys(other, tokens, BLOCK_TOKENS)).blocks == 0


def test_groups_are_bounded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_GROUPS", 1)
    kit.open()
    kit.open()
    assert kit.open(layout(dtype="fp16")).code == ErrorCode.INVALID


# ---- readiness


def test_while_recovering_requests_hear_how_far_it_is(durable: Kit) -> None:
    durable.start_worker(recovers=False)
    durable.report(RecoveryProgress(stage="headers", done=3, total=10))
    durable.open()
    keys, _ = prompt(1)
    reply = durable.ask(Match, group=GROUP, keys=keys)
    assert isinstance(reply, NotReady)
    assert (reply.stage, reply.done, reply.total) == ("headers", 3, 10)
    status = durable.ask(Status)
    assert (status.state, status.recovery_stage, status.recovery_done) == ("recovering", "headers", 3)
    durable.start_worker()
    assert isinstance(durable.ask(Match, group=GROUP, keys=keys), MatchReply)


def test_a_stopping_node_grants_nothing_new_and_takes_back_what_is_out(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(2)
    kit.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens)
    kit.service.begin_shutdown(kit.now)
    assert kit.ask(Match, group=GROUP, keys=keys).code == ErrorCode.SHUTTING_DOWN
    assert kit.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys).code == ErrorCode.SHUTTING_DOWN
    assert kit.ask(Commit, grant=b"t" * 16).visible == 2
    assert isinstance(kit.ask(Release, grant=b"l" * 16), Done)
    kit.ask(Usage)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", ErrorCode.MALFORMED),
        (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.MALFORMED),
        (msgspec.msgpack.encode({"type": "Teleport", "id": 5}), ErrorCode.UNKNOWN_MESSAGE),
        (msgspec.msgpack.encode({"type": "Match", "id": 5}), ErrorCode.INVALID),
        (bytes(MAX_FRAME_BYTES + 1), ErrorCode.TOO_LARGE),
    ],
)
def test_any_bytes_get_a_typed_answer_and_the_node_goes_on(kit: Kit, frame: bytes, code: ErrorCode) -> None:
    kit.service.handle(b"peer", frame, kit.now)
    (reply,) = kit.take_replies()
    assert isinstance(reply, Error)
    assert reply.code == code
    assert isinstance(kit.ask(Hello, protocol=1), HelloReply)


def test_a_bug_in_one_request_is_its_own_error(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(kit.service._handlers, Usage, explode)
    assert kit.ask(Usage).code == ErrorCode.INTERNAL
    assert isinstance(kit.ask(Hello, protocol=1), HelloReply)


def test_an_exception_out_of_the_core_ends_the_front(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError

    kit.open()
    monkeypatch.setattr(kit.state, "match", explode)
    with pytest.raises(CoreFailed, match="ZeroDivisionError"):
        kit.send(Match, group=GROUP, keys=prompt(1)[0])


@pytest.mark.scenario(
    "B162", then="replies beyond the queue are lost and counted, the session ends as a slow consumer, others go on"
)
def test_who_takes_no_replies_loses_them_and_its_session_but_may_end_what_it_holds(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(2)
    ticket = {"grant": b"t" * 16, "group": GROUP}
    assert kit.ask(Reserve, **ticket, keys=keys, tokens=tokens, first=0).offsets
    kit.takes_replies = False
    for _ in range(3):
        kit.send(Match, group=GROUP, keys=keys)
    kit.takes_replies = True
    refused = kit.ask(Match, group=GROUP, keys=keys)
    assert (refused.code, refused.problem.partition(":")[0]) == (ErrorCode.SESSION_GONE, "slow_consumer")
    assert isinstance(kit.ask(Abort, grant=b"t" * 16), Done)
    kit.join(TOOL)
    told = kit.ask(Status, session=TOOL)
    assert (told.counters["dropped_replies"], told.counters["slow_sessions"], told.tickets) == (3, 1, 0)


def test_an_error_to_nobody_in_particular_that_is_lost_ends_no_session(kit: Kit) -> None:
    kit.takes_replies = False
    kit.send(Hello, protocol=1, session=b"x" * 16)
    kit.service.handle(b"peer", b"rubbish", kit.now)
    kit.takes_replies = True
    told = kit.ask(Status)
    assert (told.counters["dropped_replies"], told.counters["slow_sessions"]) == (2, 0)


# ---- holders


def test_only_sessions_with_the_arena_mapped_can_hold_a_grant(kit: Kit) -> None:
    kit.open()
    kit.join(TOOL, maps_arena=False)
    keys, tokens = prompt(1)
    reserve = {"grant": b"t" * 16, "group": GROUP, "keys": keys, "first": 0, "tokens": tokens}
    assert kit.ask(Reserve, holder=TOOL, **reserve).field == "holder"
    kit.open(session=TOOL)
    assert kit.ask(Reserve, session=TOOL, **reserve).field == "holder"
    reply = kit.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys, holders=(Holder(0, TOOL),))
    assert reply.field == "holder"


def test_ranks_that_do_not_exist_or_come_twice_are_refused(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(1)
    reply = kit.ask(Reserve, grant=b"t" * 16, group=GROUP, rank=1, keys=keys, first=0, tokens=tokens)
    assert (reply.code, reply.field) == (ErrorCode.INVALID, "rank")
    twice = (Holder(0, ENGINE), Holder(0, ENGINE))
    assert kit.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys, holders=twice).field == "rank"


def test_a_holder_that_has_ended_gets_no_grant(kit: Kit) -> None:
    kit.open()
    keys, tokens = prompt(1)
    gone = b"g" * 16
    reply = kit.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens, holder=gone)
    assert (reply.states, reply.reason) == (b"\3", "session_gone")
    lease = kit.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys, holders=(Holder(0, gone),))
    assert (lease.blocks, lease.reason) == (0, "session_gone")
