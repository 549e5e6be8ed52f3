from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from tests.integrations.tiny import HEAD_DIM, HEADS, LAYERS, prompt, tiny_config, tiny_llama
from tierkv.core.codec import Fp8
from tierkv.errors import LayoutMismatch
from tierkv.integrations.kv_blocks import BlockShape, CacheDestination, CacheSource, shape_of

pytestmark = pytest.mark.engine

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cache_of(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> DynamicCache:
    """A cache of random bits: NaNs and denormals included, for bytes are moved, not numbers."""
    generator = np.random.default_rng(seed)
    cache = DynamicCache(config=tiny_config())
    for index in range(LAYERS):
        bits = [generator.integers(0, 256, (1, HEADS, tokens, HEAD_DIM * dtype.itemsize), np.uint8) for _ in range(2)]
        cache.update(torch.from_numpy(bits[0]).view(dtype), torch.from_numpy(bits[1]).view(dtype), index)
    return cache


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    block_tokens=st.sampled_from([1, 4, 16]),
    padding=st.sampled_from([0, 64]),
    data=st.data(),
)
def test_what_went_out_of_a_cache_comes_back_bit_for_bit(
    dtype: torch.dtype, tokens: int, block_tokens: int, padding: int, data: st.DataObject
) -> None:
    source = cache_of(tokens, dtype, seed=tokens)
    shape = shape_of(source, block_tokens)
    num_blocks = tokens // block_tokens
    cuts = sorted(data.draw(st.sets(st.integers(0, num_blocks), max_size=3)) | {0, num_blocks})
    slots = np.full((num_blocks, shape.block_bytes + padding), 0xA5, np.uint8)
    destination = CacheDestination(shape, num_blocks)
    for begin, end in pairwise(cuts):  # runs of neighbouring slots, in any number
        CacheSource(source, shape).read_blocks(begin, slots[begin:end, : shape.block_bytes])
    slots.setflags(write=False)
    for begin, end in reversed(list(pairwise(cuts))):
        destination.write_blocks(begin, slots[begin:end, : shape.block_bytes])

    target = DynamicCache(config=tiny_config())
    destination.hand_to(target, num_blocks)

    kept = num_blocks * block_tokens
    for one, other in zip(source.layers, target.layers, strict=True):
        assert np.array_equal(bits(one.keys[:, :, :kept]), bits(other.keys))
        assert np.array_equal(bits(one.values[:, :, :kept]), bits(other.values))
    assert (slots[:, shape.block_bytes :] == 0xA5).all(), "padding of a slot is not ours to write"


def test_the_order_of_the_bytes_is_layer_kv_head_token_dim() -> None:
    cache = cache_of(8)
    shape = shape_of(cache, 4)
    row = np.empty((1, shape.block_bytes), np.uint8)

    CacheSource(cache, shape).read_blocks(1, row)

    number = row.view(np.float32).reshape(LAYERS, 2, HEADS, 4, HEAD_DIM).view(np.uint32)
    for layer in range(LAYERS):
        for which, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            assert np.array_equal(number[layer, which], tensor[0, :, 4:8].numpy().view(np.uint32))


def test_block_bytes_follow_from_the_shape() -> None:
    shape = BlockShape(layers=30, heads=3, block_tokens=16, head_dim=64, dtype=torch.bfloat16)
    assert shape.block_bytes == 16 * 23_040
    assert BlockShape(layers=30, heads=3, block_tokens=16, head_dim=64, dtype=torch.float32).block_bytes == 16 * 46_080


def test_only_the_valid_blocks_are_handed_over() -> None:
    source = cache_of(32)
    shape = shape_of(source, 8)
    rows = np.empty((4, shape.block_bytes), np.uint8)
    CacheSource(source, shape).read_blocks(0, rows)
    destination = CacheDestination(shape, 4)
    destination.write_blocks(0, rows)

    cache = DynamicCache(config=tiny_config())
    destination.hand_to(cache, 3)

    assert cache.get_seq_length() == 24
    assert np.array_equal(bits(cache.layers[1].values), bits(source.layers[1].values[:, :, :24]))


def test_a_cache_filled_from_blocks_goes_on_as_the_one_that_was_computed() -> None:
    model, tokens = tiny_llama(), prompt(24)
    computed = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :16], past_key_values=computed)
    shape = shape_of(computed, 8)
    rows = np.empty((2, shape.block_bytes), np.uint8)
    CacheSource(computed, shape).read_blocks(0, rows)
    destination = CacheDestination(shape, 2)
    destination.write_blocks(0, rows)
    loaded = DynamicCache(config=model.config)
    destination.hand_to(loaded, 2)

    with torch.no_grad():
        one = model(tokens[:, 16:], past_key_values=computed, attention_mask=torch.ones_like(tokens)).logits
        other = model(tokens[:, 16:], past_key_values=loaded, attention_mask=torch.ones_like(tokens)).logits

    assert torch.equal(one, other)


def test_layers_that_differ_in_shape_are_refused_by_name() -> None:
    cache = cache_of(4)
    cache.layers[1].values = cache.layers[1].values[:, :1]
    with pytest.raises(LayoutMismatch, match=r"layers\[1\]\.values"):
        shape_of(cache, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_codec_finds_each_head_where_the_block_has_it(dtype: torch.dtype) -> None:
    """One layer's values of one head are changed: one scale changes, and the numbers behind it."""
    shape = BlockShape(layers=2, heads=3, block_tokens=4, head_dim=8, dtype=dtype)
    assert shape.kv_shape is not None
    codec = Fp8(shape.kv_shape)
    assert codec.raw_bytes == (shape.block_bytes,)
    numbers = torch.randn((2, 2, 3, 4, 8), generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = numbers.clone()
    changed[1, 1, 2] *= 3
    coded = np.empty((2, sum(codec.block_bytes)), np.uint8)
    raw = torch.stack([numbers, changed]).view(torch.uint8).numpy().reshape(2, -1)
    assert codec.encode(raw, coded) == 2
    scales = coded[:, : 4 * 12].view("<f4")
    assert np.flatnonzero(scales[0] != scales[1]).tolist() == [(1 * 2 + 1) * 3 + 2]


def test_no_codec_is_for_an_element_type_that_it_does_not_know() -> None:
    assert BlockShape(layers=1, heads=1, block_tokens=4, head_dim=8, dtype=torch.float64).kv_shape is None
