"""The connector under vLLM's own scheduler: what it asks, when, and what it does with the answers."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from tests.integrations.connector.kit import Gate
from tests.integrations.connector.living_node import LivingNode, wait_for
from tests.integrations.vllm.engine import BLOCK_TOKENS, full_attention
from tests.integrations.vllm.small_engine import SmallEngine
from tests.integrations.vllm.test_supported import sliding
from tierkv.client import Group, connect_operator
from tierkv.core.reasons import Reason

pytestmark = pytest.mark.timeout(400)  # beyond what is waited for within a test, however busy the machine is

PROMPT = [(7 * index) % 101 for index in range(3 * BLOCK_TOKENS + 5)]
NODE_BYTES = 64 * 2**14


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[LivingNode]:
    directory = Path(tempfile.mkdtemp(dir=runtime_dir))
    living = LivingNode(directory, host_bytes=NODE_BYTES, slab_bytes=2**17)
    yield living
    living.close()
    shutil.rmtree(directory)


@pytest.fixture
def engine(vllm_config: Any, node: LivingNode) -> Iterator[SmallEngine]:
    made = SmallEngine(vllm_config, node.directory)
    yield made
    made.close()


TAIL = 5
BLOCKS = 3


def cool(engine: SmallEngine) -> None:
    """The node has the blocks of PROMPT, and vLLM has forgotten it."""
    assert engine.run("before", PROMPT) == len(PROMPT)
    engine.wait_stored()
    engine.forget()


def clean(engine: SmallEngine, node: LivingNode) -> None:
    engine.until(lambda: not engine.scheduler.has_requests(), "vLLM has no request left")
    node.wait_until_nothing_is_held()
    assert engine.connector._scheduling._fence.faults == {}


def test_a_prompt_that_was_computed_once_is_loaded_when_vllm_has_forgotten_it(
    engine: SmallEngine, node: LivingNode
) -> None:
    cool(engine)
    assert engine.run("warm", PROMPT) == TAIL
    assert engine.count("loaded_blocks") == BLOCKS
    assert engine.count("hit_requests") == 1
    assert engine.count("host_tokens") == BLOCKS * BLOCK_TOKENS
    clean(engine, node)


def test_vllm_loads_what_it_lacks_behind_what_it_has_itself(engine: SmallEngine, node: LivingNode) -> None:
    cool(engine)
    engine.run("shorter", PROMPT[: BLOCK_TOKENS + 3])
    assert engine.run("warm", PROMPT) == TAIL
    assert engine.count("loaded_blocks") == 1 + BLOCKS - 1
    clean(engine, node)


def test_a_prompt_of_whole_blocks_leaves_one_to_compute(engine: SmallEngine, node: LivingNode) -> None:
    cool(engine)
    assert engine.run("warm", PROMPT[: BLOCKS * BLOCK_TOKENS]) == BLOCK_TOKENS
    clean(engine, node)


def test_an_answer_is_stored_block_by_block_and_found_by_the_next_turn(engine: SmallEngine, node: LivingNode) -> None:
    engine.run("first", PROMPT, answer=2 * BLOCK_TOKENS)
    engine.wait_stored()
    turn = list(engine.requests["first"].all_token_ids)
    engine.forget()
    assert len(turn) == 5 * BLOCK_TOKENS + TAIL
    assert engine.run("second", turn) == TAIL
    clean(engine, node)


def test_the_time_that_a_prompt_took_is_told_with_what_was_computed_of_it(
    engine: SmallEngine, node: LivingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Group, "report_prefill", lambda group, **one: told.append({"group": group.key} | one))
    for module in ("connector.prefill_clock", "vllm.connector"):
        monkeypatch.setattr(f"tierkv.integrations.{module}.LEAST_TOKENS", len(PROMPT) - BLOCK_TOKENS)
    engine.run("cold", PROMPT, answer=3)
    (cold,) = told
    assert (cold["tokens"], cold["first_token"]) == (len(PROMPT), 0)
    assert 0 < cold["seconds"] < 60
    engine.wait_stored()
    engine.forget()
    longer = [*PROMPT[: 2 * BLOCK_TOKENS], *PROMPT]
    assert engine.run("warm", longer) == len(PROMPT)
    _, warm = told
    assert (warm["tokens"], warm["first_token"]) == (len(PROMPT), 2 * BLOCK_TOKENS)
    assert warm["group"] == cold["group"]
    clean(engine, node)


def test_what_is_told_of_prompts_reaches_the_node_and_is_what_costs_are_reckoned_with(
    engine: SmallEngine, node: LivingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("connector.prefill_clock", "vllm.connector"):
        monkeypatch.setattr(f"tierkv.integrations.{module}.LEAST_TOKENS", len(PROMPT))
    monkeypatch.setattr("tierkv.core.prefill_rates.ENOUGH_TOKENS", len(PROMPT))
    monkeypatch.setattr("tierkv.client.prefill_reports.EVERY_SECONDS", 0.0)
    with connect_operator(node.directory) as operator:
        for number in range(3):
            engine.run(f"cold {number}", [number + 1, *PROMPT[1:]])
        wait_for(lambda: operator.usage().prefill[0].samples > 0, "a prompt's time has been told")
        (row,) = operator.usage().prefill
        assert row.tokens_per_second != 12_000.0
        assert engine.connector._scheduling._client.counters.stale_replies == 0
    clean(engine, node)


def test_a_load_that_fails_is_computed_from_the_first_block_that_lacks(engine: SmallEngine, node: LivingNode) -> None:
    """vLLM keeps what was loaded before it."""
    cool(engine)
    pages = engine.worker._working._pages
    written = pages.write_pages

    def revoke_the_last(rows: Any, places: Any) -> None:
        written(rows, places)
        node.revoke(node.leased_offsets()[-1])

    pages.write_pages = revoke_the_last
    computed = engine.run("warm", PROMPT)
    assert TAIL < computed < len(PROMPT)
    assert computed == TAIL + BLOCK_TOKENS * int(engine.count("failed_blocks"))
    assert engine.count("failed_loads") == 1
    clean(engine, node)


def test_a_load_that_fails_whole_is_computed_whole(engine: SmallEngine, node: LivingNode) -> None:
    cool(engine)
    engine.worker._working._pages.write_pages = fail
    assert engine.run("warm", PROMPT) == len(PROMPT)
    assert engine.worker._working._fence.faults == {"loading": 1}
    clean(engine, node)


def fail(*_: Any) -> None:
    raise OSError("a fault to order")


def test_a_load_that_cannot_be_planned_is_computed(engine: SmallEngine, node: LivingNode) -> None:
    cool(engine)
    engine.connector._scheduling._pages = fail
    engine.add("warm", PROMPT)
    engine.until(lambda: "warm" in engine.finished, "it is answered")
    assert engine.computed["warm"] == len(PROMPT)
    engine.until(lambda: not engine.scheduler.has_requests(), "vLLM has no request left")
    node.wait_until_nothing_is_held()


@pytest.mark.scenario(
    "B074",
    then="vLLM has its blocks back when the load has ended, and not before",
)
def test_a_request_that_is_aborted_while_it_is_loaded_keeps_its_blocks_until_the_end(
    vllm_config: Any, node: LivingNode
) -> None:
    engine = SmallEngine(vllm_config, node.directory)
    try:
        cool(engine)
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        before, gate = free(), Gate()
        pages = engine.worker._working._pages
        written = pages.write_pages

        def wait(rows: Any, places: Any) -> None:
            gate()
            written(rows, places)

        engine.add("other", PROMPT[:5], answer=30)  # so that no step is idle
        engine.step()
        pages.write_pages = wait
        engine.add("warm", PROMPT)
        engine.until(gate.reached.is_set, "the load has begun")
        assert engine.requests["warm"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        engine.abort("warm")
        engine.step()
        assert free() <= before - BLOCKS - 1
        gate.opened.set()
        clean(engine, node)
        assert free() == before
        assert "warm" not in engine.computed
    finally:
        engine.close()


@pytest.mark.scenario(
    "B038",
    then="under vLLM's own scheduler every block that is computed with is right",
)
@pytest.mark.scenario(
    "B076",
    then="under vLLM's own scheduler a request that was preempted is answered, with right blocks",
)
def test_requests_that_are_preempted_and_resumed_are_answered_with_right_blocks(
    vllm_config: Any, node: LivingNode
) -> None:
    engine = SmallEngine(vllm_config, node.directory, num_blocks=8)
    try:
        for name in ("one", "two", "three"):
            engine.add(name, [*PROMPT[:40], len(name)], answer=70)
        engine.until(lambda: len(engine.finished) == 3, "all are answered")
        assert sum(request.num_preemptions for request in engine.requests.values()) > 0
        clean(engine, node)
    finally:
        engine.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_that_dies_between_the_promise_and_the_load_costs_nobody_an_answer(
    engine: SmallEngine, node: LivingNode, *, comes_back: bool
) -> None:
    cool(engine)
    scheduling = engine.connector._scheduling
    allotted = scheduling.allotted

    def die(*given: Any) -> None:
        node.restart_front() if comes_back else node.go()
        session = engine.worker._working._client._state.session
        wait_for(lambda: session() is None, "the worker knows")
        allotted(*given)

    scheduling.allotted = die
    engine.add("warm", PROMPT)
    engine.until(lambda: engine.requests["warm"].num_computed_tokens > 0, "it was allotted")
    scheduling.allotted = allotted
    engine.until(lambda: "warm" in engine.finished, "it is answered")
    assert engine.computed["warm"] == len(PROMPT)
    if not comes_back:
        node.come()
    clean(engine, node)
    wait_until_served(engine)


def wait_until_served(engine: SmallEngine) -> None:
    """Until the node, which is there again, has been found and has what it is given."""
    computed: list[int] = []

    def is_served() -> bool:
        engine.forget()
        computed.append(engine.run(f"try {len(computed)}", PROMPT))
        engine.wait_stored()
        return computed[-1] == TAIL

    wait_for(is_served, "a prompt is loaded again")
    assert set(computed) <= {TAIL, len(PROMPT)}


def test_a_node_that_is_away_from_the_start_costs_nobody_an_answer(engine: SmallEngine, node: LivingNode) -> None:
    node.go()
    assert engine.run("cold", PROMPT) == len(PROMPT)
    engine.forget()
    assert engine.run("still cold", PROMPT) == len(PROMPT)
    node.come()
    wait_until_served(engine)


@pytest.mark.scenario(
    "B011",
    then="behind a reset with the connector nothing from before is found, and what runs stores nothing",
)
def test_a_reset_of_the_connector_too_makes_everything_cold(engine: SmallEngine, node: LivingNode) -> None:
    """As behind an update of the weights in place, with requests under way."""
    cool(engine)
    engine.add("running", [*PROMPT, 1, 2, 3], answer=40)
    engine.until(lambda: engine.computed["running"] > 3, "it runs")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.weights = "other weights"
    engine.until(lambda: "running" in engine.finished, "it is answered")
    engine.wait_stored()
    engine.forget()
    assert engine.run("cold", PROMPT) == len(PROMPT)
    engine.wait_stored()
    engine.forget()
    assert engine.run("warm", PROMPT) == TAIL
    clean(engine, node)


def test_requests_that_may_not_read_a_cache_are_computed(engine: SmallEngine, node: LivingNode) -> None:
    cool(engine)
    engine.add("prompt log-probs", PROMPT).skip_reading_prefix_cache = True
    engine.until(lambda: "prompt log-probs" in engine.finished, "it is answered")
    assert engine.computed["prompt log-probs"] == len(PROMPT)
    clean(engine, node)


def test_salts_part_what_is_found(engine: SmallEngine, node: LivingNode) -> None:
    assert engine.run("salted", PROMPT, cache_salt="a") == len(PROMPT)
    engine.wait_stored()
    engine.forget()
    assert engine.run("salted otherwise", PROMPT, cache_salt="b") == len(PROMPT)
    engine.forget()
    assert engine.run("salted as before", PROMPT, cache_salt="a") == TAIL
    clean(engine, node)


# ---- two cache groups, one of them a sliding window


@pytest.fixture
def hybrid(vllm_config: Any, node: LivingNode) -> Iterator[SmallEngine]:
    made = SmallEngine(vllm_config, node.directory, full_attention(), sliding(sliding_window=40), num_blocks=24)
    yield made
    made.close()


def test_both_groups_are_loaded_and_the_window_only_where_it_is_looked_at(
    hybrid: SmallEngine, node: LivingNode
) -> None:
    cool(hybrid)
    assert hybrid.run("warm", PROMPT) == TAIL
    assert hybrid.count("loaded_blocks") == BLOCKS
    clean(hybrid, node)


def test_with_several_groups_a_failed_load_is_computed_whole(hybrid: SmallEngine, node: LivingNode) -> None:
    """vLLM could not tell blocks of one group from another's, and must never be told of one."""
    cool(hybrid)
    pages = hybrid.worker._working._pages
    written = pages.write_pages

    def revoke_the_last(rows: Any, places: Any) -> None:
        written(rows, places)
        node.revoke(node.leased_offsets()[-1])

    pages.write_pages = revoke_the_last
    assert hybrid.run("warm", PROMPT) == len(PROMPT)
    assert hybrid.count("failed_loads") == 1
    clean(hybrid, node)


# ---- at random


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2])
def test_whatever_happens_vllm_computes_with_right_blocks_and_answers_everybody(
    vllm_config: Any, node: LivingNode, seed: int, groups: int
) -> None:
    specs = (full_attention(), sliding(sliding_window=40))[:groups]
    engine = SmallEngine(vllm_config, node.directory, *specs, num_blocks=10 * groups)
    chance = random.Random(seed)
    try:
        names = [f"r{number}" for number in range(25)]
        for name in names:
            tokens = [*PROMPT[: chance.randrange(1, len(PROMPT))], *chance.sample(range(100), chance.randrange(3))]
            engine.add(name, tokens, answer=chance.choice([1, 1, 2, 40]))
            for _ in range(chance.randrange(8)):
                engine.step()
            if chance.random() < 0.5:
                engine.wait_stored()
            match chance.randrange(8):
                case 0:
                    engine.abort(chance.choice(names[: names.index(name) + 1]))
                case 1 | 2:
                    engine.scheduler.reset_prefix_cache()
                case 3:
                    if offsets := node.leased_offsets():
                        node.revoke(chance.choice(offsets))
                case 4 if not chance.randrange(3):
                    node.restart_front()
        clean(engine, node)
    finally:
        engine.close()


def test_the_reason_of_a_miss_is_told_to_vllm(engine: SmallEngine, node: LivingNode) -> None:
    node.go()
    engine.run("cold", PROMPT)
    engine.until(lambda: any("misses" in stats for stats in engine.stats), "a miss is told")
    reasons = {reason for stats in engine.stats for reason in stats.get("misses", {})}
    assert reasons <= {Reason.NODE_AWAY, Reason.SESSION_GONE}
    node.come()
