"""vLLM's cache events for what was given to the node."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.integrations.connector.living_node import LivingNode
from tests.integrations.vllm.engine import BLOCK_TOKENS
from tests.integrations.vllm.small_engine import SmallEngine
from tests.integrations.vllm.test_connector import PROMPT, TAIL, cool, node
from tierkv.integrations.connector.plan import Plan, StoreJob
from tierkv.integrations.vllm.events import MOST_PENDING, StoredEvents

__all__ = ["node"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def engine(vllm_config: Any, node: LivingNode) -> Iterator[SmallEngine]:
    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    made = SmallEngine(vllm_config, node.directory)
    yield made
    made.close()


def watch(engine: SmallEngine) -> list[Any]:
    """vLLM takes the events itself; keep what it was given."""
    taken: list[Any] = []
    take = engine.connector.take_events

    def keep() -> list[Any]:
        events = list(take())
        taken.extend(events)
        return events

    engine.connector.take_events = keep  # type: ignore[method-assign]
    return taken


def test_blocks_that_are_in_the_node_are_told_with_vllm_s_own_hashes(engine: SmallEngine) -> None:
    taken = watch(engine)
    engine.run("r", PROMPT)
    engine.wait_stored()
    engine.until(lambda: taken, "an event")
    (event,) = taken
    assert isinstance(event, BlockStored)
    hashes = [maybe_convert_block_hash(one) for one in engine.requests["r"].block_hashes]
    assert event.block_hashes == hashes[:3]
    assert event.parent_block_hash is None
    assert event.token_ids == PROMPT[: 3 * BLOCK_TOKENS]
    assert (event.block_size, event.medium, event.ownership) == (BLOCK_TOKENS, "CPU", "tierkv")
    assert (event.lora_id, event.lora_name) == (None, None)


def test_what_was_loaded_and_what_the_node_had_is_not_told_again(engine: SmallEngine) -> None:
    cool(engine)
    taken = watch(engine)
    assert engine.run("warm", PROMPT) == TAIL
    engine.wait_stored()
    for _ in range(3):
        engine.step()
    assert taken == []


def test_the_rest_of_a_prefix_names_its_parent(engine: SmallEngine) -> None:
    cool(engine)
    taken = watch(engine)
    longer = [*PROMPT, *range(BLOCK_TOKENS)]
    engine.run("longer", longer)
    engine.wait_stored()
    engine.until(lambda: taken, "an event")
    (event,) = taken
    hashes = [maybe_convert_block_hash(one) for one in engine.requests["longer"].block_hashes]
    assert (event.block_hashes, event.parent_block_hash) == (hashes[3:4], hashes[2])
    assert event.token_ids == longer[3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS]


def test_blocks_that_were_not_stored_are_not_told(engine: SmallEngine, node: LivingNode) -> None:
    taken = watch(engine)
    node.go()
    engine.run("r", PROMPT)
    engine.wait_stored()
    for _ in range(3):
        engine.step()
    assert taken == []
    node.come()


def job(number: int) -> StoreJob:
    return StoreJob(request=f"r{number}", group=0, keys=b"", first_block=0, tokens=b"", extras={}, pages=((0,),))


def test_of_stores_whose_end_is_never_told_only_so_many_are_remembered(vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    events = StoredEvents(vllm_config, kv_cache_config)
    request = SimpleNamespace(block_hashes=[b"h" * 32], all_token_ids=[1] * BLOCK_TOKENS, lora_request=None)
    for number in range(MOST_PENDING + 10):
        events.planned(Plan(stores=(job(number),)), {f"r{number}": request})
    events.stored("r9", 0, 1)
    assert events.take() == []
    events.stored("r10", 0, 1)
    assert len(events.take()) == 1
    assert events.take() == []


def test_nothing_is_remembered_while_vllm_s_events_are_off(vllm_config: Any, kv_cache_config: Any) -> None:
    events = StoredEvents(vllm_config, kv_cache_config)
    events.planned(Plan(stores=(job(0),)), {"r0": None})
    events.stored("r0", 0, 1)
    assert events.take() == []


def test_a_block_of_several_of_vllm_s_hashes_goes_by_its_last(vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    kv_cache_config.hash_block_size = BLOCK_TOKENS // 2
    events = StoredEvents(vllm_config, kv_cache_config)
    hashes = [bytes([number]) * 32 for number in range(6)]
    request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(3 * BLOCK_TOKENS)), lora_request=None)
    two = StoreJob(request="r", group=0, keys=b"", first_block=1, tokens=b"", extras={}, pages=((0, 1),))
    events.planned(Plan(stores=(two,)), {"r": request})
    events.stored("r", 1, 2)
    (event,) = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(hashes[3]), maybe_convert_block_hash(hashes[5])]
    assert event.parent_block_hash == maybe_convert_block_hash(hashes[1])
