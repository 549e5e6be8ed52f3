"""A model whose node wants fp8: what is loaded is what the codec made of what was computed, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.client.conftest import node, node_dir, quick
from tests.client.fake_node import FakeNode, answer
from tests.integrations.tiny import prompt, tiny_llama
from tierkv.client import Client, connect
from tierkv.core.codec import FP8, Fp8
from tierkv.core.reasons import Reason
from tierkv.integrations.kv_blocks import CacheSource
from tierkv.integrations.model_loading import LoadedModel
from tierkv.integrations.transformers import PrefixCache
from tierkv.wire.messages import AskCodec, CodecReply

__all__ = ["node", "node_dir", "quick"]

pytestmark = pytest.mark.engine

TOKENS, BLOCKS = 50, 3


@pytest.fixture
def client(node: FakeNode, quick: None) -> Iterator[Client]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with connect(node.directory, timeout_seconds=20) as made:
        yield made
    torch.set_num_threads(before)


def engine(client: Client, node: FakeNode, reply: CodecReply, *, breaks: bool = False) -> PrefixCache:
    node.script[AskCodec].append(
        answer(lambda request: CodecReply(id=request.id, codec=reply.codec, reason=reply.reason))
    )
    model = tiny_llama(dtype=torch.bfloat16)
    if breaks:
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    return PrefixCache(LoadedModel(model=model, weights="ab" * 32, name="tiny"), client, block_tokens=16)


CODED, REFUSED = CodecReply(id=0, codec=FP8), CodecReply(id=0, reason=Reason.NO_VERDICT)


def blocks_of(cache: PrefixCache, held: object) -> np.ndarray:
    rows = np.empty((BLOCKS, cache.shape.block_bytes), np.uint8)
    CacheSource(held, cache.shape).read_blocks(0, rows)  # type: ignore[arg-type]
    return rows


def test_what_is_loaded_is_what_the_codec_makes_of_what_was_computed(client: Client, node: FakeNode) -> None:
    cold, warm = engine(client, node, CODED), engine(client, node, CODED)
    computed = cold.prefill(prompt(TOKENS))
    loaded = warm.prefill(prompt(TOKENS))
    assert (computed.use.stored_blocks, loaded.use.reused_tokens) == (BLOCKS, BLOCKS * 16)
    assert not computed.use.fault
    assert not loaded.use.fault
    raw = blocks_of(cold, computed.cache)
    assert cold.shape.kv_shape is not None
    codec = Fp8(cold.shape.kv_shape)
    coded, expected = np.empty((BLOCKS, sum(codec.block_bytes)), np.uint8), np.empty_like(raw)
    codec.encode(raw, coded)
    codec.decode(coded, expected)
    assert blocks_of(warm, loaded.cache).tobytes() == expected.tobytes()
    assert computed.use.stored_bytes == loaded.use.loaded_bytes == coded.nbytes
    assert coded.nbytes < 0.6 * raw.nbytes  # heads of 8 numbers: more scales than in any real model


def test_storing_again_what_was_loaded_stores_the_same_bytes(client: Client, node: FakeNode) -> None:
    """Nothing drifts, however often a prefix goes round."""
    first = engine(client, node, CODED)
    raw = blocks_of(first, first.prefill(prompt(TOKENS)).cache)
    loaded = engine(client, node, CODED).prefill(prompt(TOKENS))
    again = blocks_of(first, loaded.cache)
    assert again.tobytes() != raw.tobytes()
    assert first.shape.kv_shape is not None
    codec = Fp8(first.shape.kv_shape)
    once, twice = (np.empty((BLOCKS, sum(codec.block_bytes)), np.uint8) for _ in range(2))
    codec.encode(raw, once)
    codec.encode(again, twice)
    assert once.tobytes() == twice.tobytes()


def test_without_a_verdict_blocks_are_stored_as_they_are_and_shared_with_no_coded_ones(
    client: Client, node: FakeNode
) -> None:
    coded, raw = engine(client, node, CODED), engine(client, node, REFUSED)
    assert (coded.identity.layout.codec, raw.identity.layout.codec) == (FP8, "")
    assert (raw.codec.codec, raw.codec.reason) == (None, Reason.NO_VERDICT)
    coded.prefill(prompt(TOKENS))
    assert raw.prefill(prompt(TOKENS)).use.reused_tokens == 0
    assert raw.prefill(prompt(TOKENS)).use.reused_tokens == BLOCKS * 16


def test_a_model_that_computes_nan_stores_nothing_and_answers_all_the_same(client: Client, node: FakeNode) -> None:
    cache = engine(client, node, CODED, breaks=True)
    result = cache.prefill(prompt(TOKENS))
    assert (result.use.stored_blocks, result.use.store_reason) == (0, Reason.NON_FINITE)
    assert not result.use.fault
    assert cache.prefill(prompt(TOKENS)).use.reused_tokens == 0
