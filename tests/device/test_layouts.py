"""Layouts, and the numpy reference that every kernel is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.device import reference
from tierkv.device.layouts import PagedArray, PagedLayout, Piece

PAGES, TOKENS, HEADS, DIM, LAYERS = 5, 4, 2, 8, 3


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def block_of(layout: PagedLayout, page: int) -> bytes:
    slots = np.full(layout.block_bytes + 32, 0xEE, np.uint8)
    reference.gather(layout, [page], slots, [16])
    assert set(slots[:16].tolist()) == set(slots[-16:].tolist()) == {0xEE}
    return slots[16:-16].tobytes()


def test_keys_and_values_apart_are_one_piece_each() -> None:
    arrays = [numbered(PAGES, TOKENS, HEADS, DIM) + index for index in range(2 * LAYERS)]
    layout = PagedLayout.of(arrays)
    assert len(layout.pieces) == 2 * LAYERS
    assert block_of(layout, 3) == b"".join(array[3].tobytes() for array in arrays)


def test_fused_with_the_pages_behind_is_two_pieces_a_layer() -> None:
    fused = numbered(2, PAGES, TOKENS, HEADS, DIM)
    layout = PagedLayout.of([fused], page_axis=1)
    assert len(layout.pieces) == 2
    assert block_of(layout, 2) == fused[:, 2].tobytes()


def test_fused_within_the_page_is_one_piece() -> None:
    fused = numbered(PAGES, 2, HEADS, TOKENS, DIM)
    layout = PagedLayout.of([fused])
    assert len(layout.pieces) == 1
    assert block_of(layout, 4) == fused[4].tobytes()


def test_latent_attention_is_one_piece_a_layer() -> None:
    latents = [numbered(PAGES, TOKENS, 36) * (1 + index) for index in range(LAYERS)]
    layout = PagedLayout.of(latents)
    assert len(layout.pieces) == LAYERS
    assert block_of(layout, 0) == b"".join(latent[0].tobytes() for latent in latents)


def test_a_page_of_transposed_axes_is_read_in_their_order_or_as_it_lies() -> None:
    stored = numbered(PAGES, TOKENS, HEADS, DIM)
    seen = stored.transpose(0, 2, 1, 3)  # as HND
    logical = PagedLayout.of([seen])
    assert len(logical.pieces) == HEADS * TOKENS
    assert block_of(logical, 1) == np.ascontiguousarray(seen[1]).tobytes()
    as_it_lies = PagedLayout.of([PagedArray.of(seen).in_memory_order()])
    assert len(as_it_lies.pieces) == 1
    assert block_of(as_it_lies, 1) == stored[1].tobytes()


def test_tokens_that_are_not_cut_into_pages_are_split() -> None:
    keys = numbered(HEADS, PAGES * TOKENS + 3, DIM)  # three tokens that fill no page
    layout = PagedLayout.of([PagedArray.of(keys).split_axis(1, TOKENS)], page_axis=1)
    assert layout.num_pages == PAGES
    assert len(layout.pieces) == HEADS
    assert block_of(layout, 2) == np.ascontiguousarray(keys[:, 2 * TOKENS : 3 * TOKENS]).tobytes()


def test_layers_side_by_side_in_a_page_are_joined() -> None:
    memory = numbered(PAGES, LAYERS, TOKENS, DIM)
    layout = PagedLayout.of([memory[:, layer] for layer in range(LAYERS)])
    assert layout.pieces == (Piece(memory.ctypes.data, memory.strides[0], memory[0].nbytes, 0),)


def test_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(PAGES * 6, dtype=torch.bfloat16).reshape(PAGES, 2, 3).transpose(1, 2)
    layout = PagedLayout.of([tensor])
    assert block_of(layout, 2) == tensor[2].contiguous().view(torch.uint8).numpy().tobytes()


def test_scatter_undoes_gather() -> None:
    source, target = numbered(PAGES, 2, TOKENS, DIM), np.zeros((PAGES, 2, TOKENS, DIM), np.uint16)
    here, there = PagedLayout.of([source]), PagedLayout.of([target])
    slots = np.zeros(3 * here.block_bytes, np.uint8)
    offsets = [2 * here.block_bytes, 0, here.block_bytes]
    reference.gather(here, [4, 0, 2], slots, offsets)
    reference.scatter(slots, offsets, there, [1, 3, 0])
    for page, found in ((4, 1), (0, 3), (2, 0)):
        assert (source[page] == target[found]).all()
    assert not target[[2, 4]].any()


@pytest.mark.parametrize(
    ("arrays", "axis", "problem"),
    [
        ([], 0, "no arrays"),
        ([np.zeros((2, 3), np.uint8)], 2, "no axis 2"),
        ([np.zeros((0, 3), np.uint8)], 0, "no memory"),
    ],
)
def test_what_has_no_pages_is_refused(arrays: list[np.ndarray], axis: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        PagedLayout.of(arrays, page_axis=axis)
