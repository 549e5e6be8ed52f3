"""Explain and Top, as an operator's session asks them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.node.kit import GROUP, IDENTITY, TOOL, Kit, prompt
from tests.node.test_reading_and_writing import store
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.wire.messages import Acquire, Error, ErrorCode, Explain, Match, Release, Top

GRANT = b"grant-id-16bytes"


def acquire(kit: Kit, num_blocks: int, *, name: str = "", grant: bytes = GRANT) -> int:
    """Blocks it got."""
    reply = kit.ask(Acquire, grant=grant, group=GROUP, keys=prompt(num_blocks)[0], name=name)
    if reply.blocks:
        kit.ask(Release, grant=grant)
    return int(reply.blocks)


@pytest.fixture
def tool() -> Iterator[Kit]:
    """A session that has opened no group asks."""
    kit = Kit()
    kit.open()
    kit.join(TOOL, maps_arena=False)
    yield kit
    kit.close()


def test_who_has_opened_no_group_may_ask_about_each(tool: Kit) -> None:
    store(tool, 2)
    keys, tokens = prompt(3)
    reply = tool.ask(Explain, session=TOOL, of=GROUP, keys=keys, tokens=tokens)
    assert (reply.trace.cached_blocks, reply.trace.asked_blocks, reply.now) == (2, 3, tool.now)
    assert reply.trace.missing.absence == "unknown"


def test_a_prompt_that_leaves_another_one_is_told_where(tool: Kit) -> None:
    store(tool, 2)
    tokens = pack_tokens([0, 1, 2, 99])
    reply = tool.ask(Explain, session=TOOL, of=GROUP, keys=chain_keys(GROUP, tokens, 2), tokens=tokens)
    assert (reply.trace.leaving.token, reply.trace.leaving.asked, reply.trace.leaving.cached) == (3, 99, 3)


def test_an_acquire_is_found_by_the_name_that_the_engine_gave_it(tool: Kit) -> None:
    store(tool, 2)
    assert acquire(tool, 3, name="cmpl-7") == 2
    reply = tool.ask(Explain, session=TOOL, request="cmpl-7")
    (asked,) = reply.asked
    assert (asked.name, asked.grant, asked.asked_tokens, asked.tokens) == ("cmpl-7", GRANT, 6, 4)
    assert reply.namespaces[0].group == GROUP
    assert reply.namespaces[0].differences == ()
    assert (reply.remembered, reply.remembered_since) == (1, asked.asked_at)


def test_the_last_misses_are_told(tool: Kit) -> None:
    store(tool, 2)
    acquire(tool, 2, name="hit", grant=b"grant-of-a-hit-1")
    acquire(tool, 4, name="miss", grant=b"grant-of-a-miss1")
    assert [one.name for one in tool.ask(Explain, session=TOOL, last=5).asked] == ["miss"]


def test_the_namespaces_nearest_to_an_identity_are_told(tool: Kit) -> None:
    store(tool, 1)
    layout = msgspec.structs.replace(IDENTITY.layout, dtype="fp16")
    tool.open(msgspec.structs.replace(IDENTITY, layout=layout))
    reply = tool.ask(Explain, session=TOOL, wanted={"weights": IDENTITY.weights, "layout.dtype": "fp16"})
    assert [(one.equal_fields, len(one.differences)) for one in reply.namespaces] == [(2, 0), (1, 1)]
    assert reply.namespaces[1].differences[0].has == "bf16"


def test_a_field_that_no_identity_has_is_refused_with_those_that_there_are(tool: Kit) -> None:
    reply = tool.ask(Explain, session=TOOL, wanted={"dtype": "fp16"})
    assert isinstance(reply, Error)
    assert (reply.code, reply.field) == (ErrorCode.INVALID, "wanted")
    assert "layout.dtype" in reply.problem


def test_a_namespace_that_is_not_known_is_refused(tool: Kit) -> None:
    reply = tool.ask(Explain, session=TOOL, of=bytes(32), keys=bytes(32))
    assert (reply.code, reply.field) == (ErrorCode.UNKNOWN_GROUP, "of")


def test_an_empty_node_answers_with_nothing() -> None:
    kit = Kit()
    for question in ({"request": "cmpl-7"}, {"last": 3}, {}):
        reply = kit.ask(Explain, **question)
        assert (reply.namespaces, reply.asked, reply.trace, reply.remembered) == ((), (), None, 0)
    reply = kit.ask(Top)
    assert (reply.hottest, reply.evictions) == ((), ())
    assert reply.queues == {"reads": 0, "writes": 0, "leases": 0, "seals": 0}
    kit.close()


def test_asking_is_no_use_of_what_is_asked_about(tool: Kit) -> None:
    store(tool, 2)
    before = tool.state.counts.asked_tokens
    keys, tokens = prompt(2)
    tool.ask(Explain, session=TOOL, of=GROUP, keys=keys, tokens=tokens)
    assert tool.state.counts.asked_tokens == before
    assert tool.ask(Match, group=GROUP, keys=keys).host_blocks == 2


def test_top_tells_the_hottest_prefix_with_what_it_saved(tool: Kit) -> None:
    store(tool, 2)
    for number in range(5):
        acquire(tool, 2, grant=b"grant-id-%07d" % number)
    (hot,) = tool.ask(Top, session=TOOL).hottest
    assert (hot.group, hot.tokens, hot.hits, hot.saved_tokens) == (GROUP, 4, 4, 16)
    assert hot.saved_seconds == pytest.approx(16 / 12_000, rel=1e-3)


def test_top_tells_the_latest_evictions(tool: Kit) -> None:
    for number in range(10):  # more than host memory holds
        store(tool, 4, grant=b"ticket-id-%06d" % number, start=100 * number)
        tool.tick(3.0)
    rows = tool.ask(Top, session=TOOL, most=2).evictions
    assert len(rows) == 2
    assert rows[0].at >= rows[1].at
    assert (rows[0].tier, rows[0].to, rows[0].reason) == ("host", "dropped", "evicted")
    assert rows[0].tokens > 0
    assert rows[0].num_bytes > 0
