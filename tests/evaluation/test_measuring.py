"""Measuring, on a tiny model: a codec that loses nothing is perfect, and one that loses everything is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.bad_codecs import HarmedFp8, forget_values, fp8_of
from tests.integrations.tiny import prompt, tiny_llama
from tierkv.core.eval_results import Thresholds, why_failed
from tierkv.errors import ConfigError
from tierkv.evaluation.kept_prefix import DoesNotDecode, KeptPrefix, NotFinite, RawBlocks, run
from tierkv.evaluation.measuring import LEAST_POSITIONS, Haystack, measure, usable
from tierkv.evaluation.needles import DEPTHS, FACTS_EACH, QUESTION_ROOM, Fact, hide, lengths_for, make_facts, recall
from tierkv.integrations.kv_blocks import BlockShape, shape_of
from tierkv.integrations.supported import probe

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 4
LIMITS = Thresholds(min_agreement=0.95, max_kl=0.02, max_perplexity_ratio=1.02, min_retrieval=0.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def shape(model: Any) -> BlockShape:
    return shape_of(probe(model), BLOCK_TOKENS)


def prompts(count: int = 2, length: int = 208) -> list[list[int]]:
    return [prompt(length, seed=number)[0].tolist() for number in range(count)]


@pytest.fixture(autouse=True)
def generate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.evaluation.measuring.GENERATED_PROMPTS", 1)


def facts() -> list[Fact]:
    """Whose answer is what the question ends with: nothing that a model without training knows."""
    return make_facts(lambda text: [2 + one % 60 for one in text.encode()[:3]])


def haystack(*lengths: int) -> Haystack:
    return Haystack(facts=facts(), hay=prompts()[0], start=[1], lengths=lengths)


def test_without_a_codec_nothing_differs(model: Any, shape: BlockShape) -> None:
    told: list[tuple[str, int, int]] = []
    found = measure(model, shape, RawBlocks(shape), prompts(), haystack(200), lambda *progress: told.append(progress))
    assert (found.agreement, found.kl, found.kl_p99, found.perplexity_ratio) == (1.0, 0.0, 0.0, 1.0)
    assert (found.generated_agreement, found.generated) == (1.0, 32)
    assert all(row.both_found == row.raw_found for row in found.needles)
    assert why_failed(found, LIMITS) == ""
    assert (found.prompts, found.positions) == (2, 2 * 104)
    assert [(row.context_tokens, row.depth, row.asked) for row in found.needles] == [
        (200, depth, FACTS_EACH) for depth in DEPTHS
    ]
    assert told[0] == ("prompts", 0, 2)
    assert told[-1] == ("retrieval in 200 tokens", 0, 1)


def test_fp8_differs_a_little_and_losing_the_values_a_lot(model: Any, shape: BlockShape) -> None:
    good = measure(model, shape, fp8_of(shape), prompts(), haystack())
    bad = measure(model, shape, HarmedFp8(shape, forget_values), prompts(), haystack())
    assert 0.0 < good.kl < bad.kl / 10
    assert good.agreement > bad.agreement
    failed = why_failed(bad, LIMITS)
    assert "eval_min_agreement" in failed
    assert "eval_max_kl" in failed


def test_a_codec_that_breaks_the_model_gives_numbers_all_the_same(model: Any, shape: BlockShape) -> None:
    def explode(scales: np.ndarray, numbers: np.ndarray) -> None:
        scales[:] = 1e30
        numbers[:] = 0x7E

    found = measure(model, shape, HarmedFp8(shape, explode), prompts(), haystack())
    assert np.isfinite([found.kl, found.kl_p99, found.coded_perplexity, found.agreement]).all()
    assert "eval_max_kl" in why_failed(found, LIMITS)


# ---- what is kept


def test_a_prefix_that_grew_over_turns_is_that_of_one_pass(model: Any, shape: BlockShape) -> None:
    tokens = prompt(43)
    kept = KeptPrefix(model, shape, RawBlocks(shape))
    with torch.no_grad():
        kept.grow(tokens, 3)
        cache = kept.load()
        assert kept.num_tokens == cache.get_seq_length() == 40
        logits = run(model, tokens, cache)
        whole = model(tokens).logits[:, -1]
    assert torch.allclose(logits, whole, atol=1e-3)


def test_each_turn_is_computed_on_what_was_coded_before(model: Any, shape: BlockShape) -> None:
    """Or the loss would not add up as it does in a conversation."""
    tokens = prompt(40)
    kept = [KeptPrefix(model, shape, HarmedFp8(shape, forget_values)) for _ in range(2)]
    with torch.no_grad():
        for one, turns in zip(kept, (1, 2), strict=True):
            one.grow(tokens, turns)
    at_once, in_two = (one._blocks for one in kept)
    assert np.array_equal(at_once[0][:5], in_two[0])
    assert not np.array_equal(at_once[0][5:], in_two[1])


class Refuses(RawBlocks):
    def encode(self, raw: np.ndarray, coded: np.ndarray) -> int:
        return 0


class Damages(RawBlocks):
    def decode(self, coded: np.ndarray, raw: np.ndarray) -> int:
        return len(coded) - 1


@pytest.mark.parametrize(("codec", "error"), [(Refuses, NotFinite), (Damages, DoesNotDecode)])
def test_a_codec_that_can_not_code_measures_nothing(
    model: Any, shape: BlockShape, codec: type[RawBlocks], error: type[Exception]
) -> None:
    with pytest.raises(error):
        measure(model, shape, codec(shape), prompts(), haystack())


# ---- prompts


def test_prompts_that_are_too_short_are_left_out_and_long_ones_cut() -> None:
    assert usable([[1] * 7, [2] * 8, [3] * 50], BLOCK_TOKENS, 20) == [[2] * 8, [3] * 20]
    assert usable([[3] * 50], BLOCK_TOKENS, None) == [[3] * 50]


@pytest.mark.parametrize("given", [[[1] * 7], [[]], [[1], [2] * 3]])
def test_where_all_are_too_short_that_is_said(given: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=f"none has 8 tokens.*longest has {max(map(len, given))}") as raised:
        usable(given, BLOCK_TOKENS, None)
    assert raised.value.field == "prompts"


def test_few_tokens_are_too_few_to_tell(model: Any, shape: BlockShape) -> None:
    with pytest.raises(ConfigError, match=f"give 104 tokens.*takes {LEAST_POSITIONS}"):
        measure(model, shape, RawBlocks(shape), prompts(1), haystack())


# ---- needles


def test_facts_lie_at_their_depths_in_a_context_of_the_length_asked_for() -> None:
    given = facts()
    context = hide(given, [7], [1], 300)
    assert len(context) == 300 - QUESTION_ROOM
    assert context[0] == 1
    for fact in given:
        places = [at for at in range(len(context)) if context[at : at + 3] == fact.statement]
        assert any(abs(at / len(context) - fact.depth) < 0.15 for at in places), fact.depth


def test_facts_have_names_and_codes_of_their_own() -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [len(texts)]

    assert [fact.depth for fact in make_facts(encode)] == [depth for depth in DEPTHS for _ in range(FACTS_EACH)]
    assert len(set(texts)) == len(texts) == 3 * len(DEPTHS) * FACTS_EACH


def test_asking_for_one_fact_does_not_change_what_is_said_of_another(model: Any, shape: BlockShape) -> None:
    context = hide(facts(), prompts()[0], [1], 250)
    question = [5, 9, 11]
    with torch.no_grad():
        said = model(torch.tensor([context + question])).logits[0, -1].argmax().item()
        known = Fact(0.0, [], question, [int(said)])
        unknown = Fact(0.0, [], question, [(int(said) + 1) % 64])
        assert recall(model, shape, RawBlocks(shape), context, [known, unknown, known]) == [True, False, True]


def test_contexts_fit_into_the_models() -> None:
    assert lengths_for(None, long_context=False) == [512, 1_024]
    assert lengths_for(8_192, long_context=True) == [512, 1_024, 2_048, 8_192]
    assert lengths_for(700, long_context=True) == [512, 700]
    assert lengths_for(None, long_context=True)[-1] == 32_768
