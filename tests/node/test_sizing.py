"""Size, as an operator's session asks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.kit import GROUP, TOOL, Kit, prompt
from tests.node.test_reading_and_writing import store
from tierkv.wire.messages import Acquire, Release, Size


@pytest.fixture
def tool() -> Iterator[Kit]:
    """A session that has opened no group asks."""
    kit = Kit()
    kit.open()
    kit.join(TOOL, maps_arena=False)
    yield kit
    kit.close()


def acquire(kit: Kit, num_blocks: int, grant: bytes) -> None:
    if kit.ask(Acquire, grant=grant, group=GROUP, keys=prompt(num_blocks)[0]).blocks:
        kit.ask(Release, grant=grant)


def test_a_node_that_nobody_has_asked_tells_nothing(tool: Kit) -> None:
    reply = tool.ask(Size, session=TOOL)
    assert (reply.requests, reply.asked_tokens, reply.gains, reply.more_gains) == (0, 0, (), ())
    assert (reply.since, reply.until, reply.samples, reply.rate) == (tool.now, tool.now, 0, 1.0)
    assert reply.load_bytes_per_second == 0.0
    assert [(tier.tier, tier.hit_tokens) for tier in reply.tiers][:1] == [("host", 0)]


def test_it_tells_what_was_asked_and_what_was_found_of_it(tool: Kit) -> None:
    acquire(tool, 2, b"grant-id-0000001")
    store(tool, 2)
    acquire(tool, 2, b"grant-id-0000002")
    reply = tool.ask(Size, session=TOOL, seconds=60.0)
    tokens = tool.state.group_shape(GROUP)[1]
    assert (reply.requests, reply.asked_tokens, reply.first_tokens) == (2, 4 * tokens, 2 * tokens)
    assert sum(gain.tokens for gain in reply.gains) == 2 * tokens
    assert reply.tiers[0].hit_tokens == 2 * tokens
    assert reply.tiers[0].capacity_bytes == tool.state.limits.host_bytes
    assert reply.saved_seconds == pytest.approx(sum(gain.seconds for gain in reply.gains))
    assert (reply.policy, reply.prefill_tokens_per_second) == ("density", 12_000.0)


def test_asking_is_no_use_of_anything(tool: Kit) -> None:
    acquire(tool, 2, b"grant-id-0000001")
    first = tool.ask(Size, session=TOOL)
    assert tool.ask(Size, session=TOOL).gains == first.gains
    assert tool.state.counts.asked_tokens == first.asked_tokens
