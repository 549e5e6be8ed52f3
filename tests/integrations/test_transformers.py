from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.integrations.stand_in import StandInClient, StandInGroup
from tests.integrations.tiny import prompt, tiny_llama
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, UnsupportedModel
from tierkv.integrations.model_loading import LoadedModel
from tierkv.integrations.supported import forward
from tierkv.integrations.transformers import GenerateResult, PrefixCache

pytestmark = pytest.mark.engine

BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Engine:
    """One process's worth: a model and its cache in front of the stand-in for a node."""

    def __init__(self, client: StandInClient, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = tiny_llama(dtype=dtype)
        self.loaded = LoadedModel(model=self.model, weights="ab" * 32, name="tiny")
        self.cache = PrefixCache(self.loaded, client, block_tokens=BLOCK, **options)  # type: ignore[arg-type]

    @property
    def group(self) -> StandInGroup:
        group = self.cache.group
        assert isinstance(group, StandInGroup)
        return group

    def plain(self, tokens: torch.Tensor, count: int = 8, **options: Any) -> list[int]:
        output = self.model.generate(tokens, max_new_tokens=count, do_sample=False, **options)
        new: list[int] = output[0, tokens.shape[1] :].tolist()
        return new

    def generate(self, tokens: torch.Tensor, count: int = 8, **options: Any) -> GenerateResult:
        return self.cache.generate(tokens, **({"max_new_tokens": count, "do_sample": False} | options))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def client() -> StandInClient:
    return StandInClient()


@pytest.fixture
def engine(client: StandInClient) -> Engine:
    return Engine(client)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def same_kv(one: DynamicCache, other: DynamicCache, tokens: int) -> bool:
    return all(
        np.array_equal(bits(getattr(left, name)[:, :, :tokens]), bits(getattr(right, name)[:, :, :tokens]))
        for left, right in zip(one.layers, other.layers, strict=True)
        for name in ("keys", "values")
    )


# ---- the answer is the one without the cache


def test_a_cold_request_gives_the_plain_answer_and_stores_its_full_blocks(engine: Engine) -> None:
    tokens = prompt(100)
    result = engine.generate(tokens)
    assert result.new_tokens == engine.plain(tokens)
    assert result.use.reused_tokens == 0
    assert result.use.stored_blocks == (100 + 8 - 1) // BLOCK
    assert result.use.stored_bytes == result.use.stored_blocks * engine.cache.shape.block_bytes
    assert result.cache.get_seq_length() == 100 + 8 - 1
    assert result.sequences.shape == (1, 108)


def test_the_same_prompt_again_computes_only_what_is_behind_the_last_full_block(engine: Engine) -> None:
    tokens = prompt(100)
    first = engine.generate(tokens)
    second = engine.generate(tokens)
    assert second.use.reused_tokens == second.use.host_tokens == 96
    assert second.use.stored_blocks == 0
    assert second.new_tokens == first.new_tokens == engine.plain(tokens)


def test_a_prompt_of_whole_blocks_leaves_the_last_one_to_compute(engine: Engine) -> None:
    tokens = prompt(96)
    engine.generate(tokens)
    assert engine.generate(tokens).use.reused_tokens == 80


def test_what_computing_a_prompt_took_is_told_without_what_was_reused(engine: Engine) -> None:
    tokens = prompt(300)
    cold = engine.cache.prefill(tokens)
    (told,) = engine.group.prefills
    assert (told["tokens"], told["first_token"]) == (300, 0)
    assert 0 < told["seconds"] <= cold.prefill_seconds
    engine.generate(tokens)
    assert len(engine.group.prefills) == 1, "a dozen tokens tell nothing"
    longer = torch.cat([tokens[:, :160], prompt(280, seed=7)], dim=1)
    warm = engine.generate(longer, count=3)
    _, told = engine.group.prefills
    assert (told["tokens"], told["first_token"]) == (280, 160)
    assert 0 < told["seconds"] <= warm.time_to_first_token_seconds


def test_a_fault_in_telling_is_nobody_s_concern(engine: Engine) -> None:
    engine.group.failing["report_prefill"] = RuntimeError("a fault to order")
    tokens = prompt(300)
    result = engine.generate(tokens)
    assert result.new_tokens == engine.plain(tokens)
    assert result.use.fault == ""
    assert result.use.stored_blocks == (300 + 8 - 1) // BLOCK


def test_the_next_turn_reuses_the_answer_too(engine: Engine) -> None:
    first = engine.generate(prompt(90), count=40)
    turn = torch.cat([first.sequences, prompt(20, seed=9)], dim=1)
    second = engine.generate(turn)
    assert second.use.reused_tokens == (90 + 40 - 1) // BLOCK * BLOCK
    assert second.new_tokens == engine.plain(turn)


@pytest.mark.parametrize("length", [*range(1, 2 * BLOCK + 2), 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_any_length_of_a_prompt_follows_the_floor_rule(length: int) -> None:
    engine = Engine(StandInClient())
    tokens = prompt(length, seed=length)
    cold = engine.generate(tokens, count=2)
    warm = engine.generate(tokens, count=2)
    assert cold.use.stored_blocks == (length + 1) // BLOCK
    assert warm.use.reused_tokens == (length - 1) // BLOCK * BLOCK
    assert warm.new_tokens == cold.new_tokens == engine.plain(tokens, count=2)


def test_two_prompts_that_differ_at_token_900_share_56_blocks(engine: Engine) -> None:
    one = prompt(950)
    other = one.clone()
    other[0, 900] = one[0, 900] % 60 + 1
    assert other[0, 900] != one[0, 900]
    engine.generate(one, count=2)

    result = engine.generate(other, count=2)

    assert result.use.reused_tokens == 900 // BLOCK * BLOCK == 896
    assert result.use.stored_blocks == 951 // BLOCK - 900 // BLOCK
    assert result.new_tokens == engine.plain(other, count=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_another_engine_loads_is_bit_for_bit_what_the_first_one_stored(dtype: torch.dtype) -> None:
    client, tokens = StandInClient(), prompt(120)
    stored = Engine(client, dtype).generate(tokens)
    loaded = Engine(client, dtype).generate(tokens)
    assert loaded.use.reused_tokens == 112
    assert same_kv(stored.cache, loaded.cache, 112)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_answer_is_that_of_the_prefill_split_where_the_reuse_ends(dtype: torch.dtype) -> None:
    client, tokens = StandInClient(), prompt(150)
    Engine(client, dtype).generate(tokens)
    engine = Engine(client, dtype)
    split = DynamicCache(config=engine.model.config)
    with torch.no_grad():
        forward(engine.model, tokens, split)
    split.crop(-(150 - 144))
    reference = engine.plain(tokens, past_key_values=split, attention_mask=torch.ones_like(tokens))

    result = engine.generate(tokens)

    assert result.use.reused_tokens == 144
    assert result.new_tokens == reference


def test_element_types_do_not_share(client: StandInClient) -> None:
    tokens = prompt(64)
    for dtype in DTYPES:
        assert Engine(client, dtype).generate(tokens).use.reused_tokens == 0


def test_tenants_do_not_share(client: StandInClient) -> None:
    tokens = prompt(64)
    Engine(client, salt="one").generate(tokens)
    assert Engine(client, salt="two").generate(tokens).use.reused_tokens == 0
    assert Engine(client).generate(tokens).use.reused_tokens == 0
    assert Engine(client, salt="one").generate(tokens).use.reused_tokens == 48


def test_sampling_with_a_seed_gives_the_same_answer_with_the_cache(engine: Engine) -> None:
    tokens = prompt(80)
    engine.generate(tokens)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 20}
    torch.manual_seed(5)
    plain = engine.model.generate(tokens, **options)
    torch.manual_seed(5)
    assert torch.equal(engine.cache.generate(tokens, **options).sequences, plain)


def test_the_library_s_own_result_type_is_handed_through(engine: Engine) -> None:
    tokens = prompt(40)
    result = engine.generate(tokens, return_dict_in_generate=True, output_scores=True)
    assert len(result.output.scores) == 8
    assert result.new_tokens == engine.plain(tokens)


def test_generation_that_stops_early_stores_only_what_is_final(client: StandInClient) -> None:
    engine = Engine(client)
    tokens = prompt(60)
    stop_at = engine.plain(tokens, count=30)[10]
    result = engine.generate(tokens, count=30, eos_token_id=stop_at, pad_token_id=0)
    assert len(result.new_tokens) <= 11
    assert result.new_tokens[-1] == stop_at
    assert result.use.stored_blocks == (60 + len(result.new_tokens) - 1) // BLOCK


@settings(max_examples=8, deadline=None, derandomize=True)  # the odd tie between two logits would be luck
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=5))
def test_any_sequence_of_requests_answers_as_without_a_cache(requests: list[tuple[int, int, int]]) -> None:
    engine = Engine(StandInClient())
    for length, branch, count in requests:
        tokens = torch.cat([prompt(length), prompt(branch * 7, seed=branch)], dim=1)
        assert engine.generate(tokens, count=count).new_tokens == engine.plain(tokens, count=count)


def test_keys_are_rooted_as_the_group_says_for_the_tenant_that_asks(engine: Engine) -> None:
    engine.group.root = bytes(range(32))
    tokens = prompt(100)
    cold, warm = engine.generate(tokens), engine.generate(tokens)
    assert (cold.use.fault, cold.use.stored_blocks) == ("", 6)
    assert warm.use.reused_tokens == 96


# ---- prefill alone


def test_prefill_gives_the_cache_and_the_last_logits(engine: Engine) -> None:
    tokens = prompt(70)
    with torch.no_grad():
        expected = engine.model(tokens).logits[:, -1]
    cold, warm = engine.cache.prefill(tokens), engine.cache.prefill(tokens)
    assert torch.allclose(cold.logits, expected, atol=1e-4)
    assert (cold.use.stored_blocks, warm.use.reused_tokens) == (4, 64)
    assert torch.allclose(warm.logits, expected, atol=1e-3)
    assert warm.cache.get_seq_length() == cold.cache.get_seq_length() == 70


def test_the_node_is_told_what_the_caller_calls_the_request(engine: Engine) -> None:
    engine.cache.prefill(prompt(40), request_name="first")
    engine.cache.generate(prompt(40), request_name="second", max_new_tokens=1, do_sample=False)
    engine.cache.prefill(prompt(40))
    assert engine.group.names == ["first", "second", ""]


def test_the_cache_of_a_prefill_can_be_generated_from(engine: Engine) -> None:
    tokens = prompt(70)
    engine.cache.prefill(tokens)
    filled = engine.cache.prefill(tokens[0, :65])
    mask = torch.ones_like(tokens)
    assert engine.plain(tokens, past_key_values=filled.cache, attention_mask=mask) == engine.plain(tokens)


# ---- when and what is stored


class Streamer:
    def __init__(self, group: StandInGroup) -> None:
        self.group = group
        self.seen: list[tuple[int, int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((value.numel(), len(self.group.stored)))

    def end(self) -> None:
        self.ended = True


def test_the_first_token_is_out_before_anything_is_stored(engine: Engine) -> None:
    streamer = Streamer(engine.group)
    engine.generate(prompt(64), count=3, streamer=streamer)
    assert streamer.seen == [(64, 0), (1, 0), (1, 4), (1, 4)]
    assert streamer.ended


def test_the_answer_is_stored_while_it_grows_and_the_rest_at_its_end(client: StandInClient) -> None:
    engine = Engine(client, store_every_blocks=2)
    streamer = Streamer(engine.group)
    engine.generate(prompt(64), count=16 * 3 + 1, streamer=streamer)
    stored_after = [stored for _, stored in streamer.seen]
    assert stored_after[2] == 4
    assert 6 in stored_after
    assert len(engine.group.stored) == 7
    assert engine.group.order == list(range(7))


def test_blocks_are_sealed_when_the_request_is_finished(engine: Engine) -> None:
    engine.generate(prompt(64), count=2)
    assert engine.group.sealed == [4]
    engine.generate(prompt(64), count=2)
    assert engine.group.sealed == [4], "nothing new was stored, so there is nothing to seal"


def test_flush_asks_about_the_blocks_of_the_prompt(engine: Engine) -> None:
    tokens = prompt(64)
    engine.generate(tokens, count=2)
    assert engine.cache.flush(tokens).flushed_blocks == 4


def test_only_missing_blocks_are_written(engine: Engine) -> None:
    tokens = prompt(64)
    engine.generate(tokens, count=2)
    longer = torch.cat([tokens, prompt(40, seed=3)], dim=1)
    assert engine.generate(longer, count=2).use.stored_blocks == 2


# ---- what is amiss costs time, not the answer


def test_a_node_that_is_away_is_a_miss(engine: Engine) -> None:
    engine.group.away = True
    tokens = prompt(64)
    result = engine.generate(tokens)
    assert result.new_tokens == engine.plain(tokens)
    assert result.use.reason is Reason.NODE_AWAY
    assert result.use.store_reason is Reason.NODE_AWAY
    assert engine.group.calls == ["acquire", "reserve"], "no second try within one request"


@pytest.mark.parametrize("verb", ["acquire", "copy_into", "release", "reserve", "copy_from", "commit", "seal"])
def test_an_exception_at_any_verb_is_set_aside(engine: Engine, verb: str) -> None:
    tokens = prompt(100)
    engine.generate(tokens, count=2)
    longer = torch.cat([tokens, prompt(40, seed=3)], dim=1)
    engine.group.failing[verb] = RuntimeError("planted")

    result = engine.generate(longer)

    assert result.new_tokens == engine.plain(longer)
    assert "planted" in result.use.fault
    if verb in ("acquire", "copy_into", "release"):
        assert result.use.reused_tokens == 0
        assert "reserve" not in engine.group.calls[-2:], "without a trusted load nothing is stored either"


def test_blocks_that_turn_out_invalid_are_computed_again(engine: Engine) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    engine.group.valid_blocks = 2

    result = engine.generate(tokens)

    assert result.use.reused_tokens == 32
    assert result.use.reason is Reason.REVOKED
    assert result.new_tokens == engine.plain(tokens)


def test_a_lease_of_which_nothing_is_valid_is_a_miss(engine: Engine) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    engine.group.valid_blocks = 0
    result = engine.generate(tokens)
    assert (result.use.reused_tokens, result.use.cached_tokens) == (0, 96)
    assert result.new_tokens == engine.plain(tokens)


def test_a_lease_shorter_than_what_is_cached_says_why(engine: Engine) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    engine.group.max_lease_blocks = 3
    result = engine.generate(tokens)
    assert (result.use.reused_tokens, result.use.cached_tokens) == (48, 96)
    assert result.use.reason is Reason.DEADLINE
    assert result.new_tokens == engine.plain(tokens)


@pytest.mark.parametrize("damaged", [0, 3])
def test_what_is_found_damaged_is_stored_anew_by_the_request_that_computes_it(engine: Engine, damaged: int) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    engine.group.damaged = damaged
    result = engine.generate(tokens)
    assert (result.use.reused_tokens, result.use.cached_tokens) == (damaged * BLOCK, 96)
    assert result.use.reason is Reason.CHECKSUM
    assert result.use.stored_blocks == 6 - damaged
    assert result.new_tokens == engine.plain(tokens)
    assert engine.generate(tokens).use.reused_tokens == 96


def test_tokens_are_counted_by_the_tier_they_came_from(engine: Engine) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    engine.group.nvme_blocks = 4
    use = engine.generate(tokens).use
    assert (use.host_tokens, use.nvme_tokens) == (32, 64)
    engine.group.valid_blocks = 3
    use = engine.generate(tokens).use
    assert (use.host_tokens, use.nvme_tokens) == (32, 16)


def test_without_room_the_rest_of_the_request_is_not_stored(engine: Engine) -> None:
    engine.group.room_blocks = 3
    tokens = prompt(100)
    result = engine.generate(tokens, count=80)
    assert result.use.stored_blocks == 3
    assert result.use.store_reason is Reason.NO_ROOM
    assert engine.group.calls.count("reserve") == 1
    assert engine.group.sealed == [3]
    assert engine.generate(tokens).use.reused_tokens == 48


def test_a_block_that_somebody_else_is_writing_does_not_end_storing(client: StandInClient) -> None:
    engine = Engine(client, store_every_blocks=1)
    engine.group.pending = frozenset({1})
    result = engine.generate(prompt(64), count=2 * BLOCK + 1)
    assert result.use.stored_blocks == 6 - 1
    assert result.use.store_reason is None, "of the last store"


# ---- the model that was fingerprinted is the one in use


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.5)


def load_other_weights(model: Any) -> None:
    model.load_state_dict(tiny_llama(seed=7).state_dict())


def convert(model: Any) -> None:
    model.to(torch.bfloat16)


def replace_parameter(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)


@pytest.mark.parametrize("change", [change_in_place, load_other_weights, convert, replace_parameter])
def test_weights_that_changed_in_memory_are_not_served_from_the_cache(engine: Engine, change: Any) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    change(engine.model)

    result = engine.generate(tokens)

    assert result.use.reused_tokens == 0
    assert result.use.stored_blocks == 0
    assert "not those that were fingerprinted" in result.use.fault
    assert result.new_tokens == engine.plain(tokens)


def test_a_model_put_into_training_mode_is_refused(engine: Engine) -> None:
    engine.model.train()
    with pytest.raises(UnsupportedModel, match="training mode"):
        engine.generate(prompt(20))


def test_a_refused_option_reaches_neither_model_nor_node(engine: Engine) -> None:
    with pytest.raises(UnsupportedModel, match="num_beams"):
        engine.generate(prompt(40), num_beams=2)
    assert engine.group.calls == []


def test_a_library_that_computes_the_prompt_behind_the_cache_is_found_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(100)
    engine.generate(tokens)
    generate = engine.model.generate
    stored = len(engine.group.stored)

    def without_mask(ids: torch.Tensor, **options: Any) -> Any:
        return generate(ids, **(options | {"attention_mask": torch.ones(1, 100 + 96)}))

    monkeypatch.setattr(engine.model, "generate", without_mask)
    with pytest.raises(BrokenInvariant, match="holds 196 tokens, not 100"):
        engine.generate(tokens)
    assert len(engine.group.stored) == stored


def test_the_model_is_left_as_it_was(engine: Engine) -> None:
    before = {name: id(value) for name, value in vars(engine.model).items()}
    settings_before = engine.model.generation_config.to_dict()
    engine.generate(prompt(40))
    assert {name: id(value) for name, value in vars(engine.model).items()} == before
    assert engine.model.generation_config.to_dict() == settings_before


def test_the_group_is_declared_with_what_the_buffers_hold(client: StandInClient) -> None:
    engine = Engine(client, adapter_name="none")
    declared = client.declared[0]
    assert declared["block_bytes"] == engine.cache.shape.block_bytes == engine.cache.identity.layout.total_block_bytes
    assert declared["model_name"] == "tiny"
    assert declared["persistent"]


def test_a_model_without_a_fingerprint_is_not_kept(client: StandInClient) -> None:
    loaded = LoadedModel(model=tiny_llama(), weights="", epoch="e", name="tiny")
    cache = PrefixCache(loaded, client)  # type: ignore[arg-type]
    assert not client.declared[0]["persistent"]
    assert not cache.identity.is_persistent
