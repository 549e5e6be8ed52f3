"""Memory as vLLM lays it out for a model with several groups: one pool of pages, each of which belongs to a block of
one group. Layer i of every group lies in the same place."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.integrations.connector.plan import NO_PAGE, Pages
from tierkv.integrations.vllm.pages import EnginePages

GROUPS, LAYERS, PAGES, TOKENS, HEADS, DIM = 3, 2, 12, 4, 2, 8
PAGE_BYTES = 2 * HEADS * TOKENS * DIM * 4
GROUP_BYTES = LAYERS * PAGE_BYTES
NAMES = [[f"layers.{layer * GROUPS + group}.attn" for layer in range(LAYERS)] for group in range(GROUPS)]


class Pool:
    def __init__(self, *, layers_first: bool = True, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(0, 256, (LAYERS * PAGES * PAGE_BYTES,), generator=generator, dtype=torch.uint8)
        self.numbers = whole.view(torch.float32)
        shape = (LAYERS, PAGES) if layers_first else (PAGES, LAYERS)
        by_layer = self.numbers.view(*shape, 2, HEADS, TOKENS, DIM)
        self.layers = by_layer if layers_first else by_layer.transpose(0, 1)
        self.bytes = whole.view(*shape, PAGE_BYTES) if layers_first else whole.view(*shape, PAGE_BYTES).transpose(0, 1)

    def caches(self) -> Mapping[str, torch.Tensor]:
        return {name: self.layers[layer] for names in NAMES for layer, name in enumerate(names)}

    def engine_pages(self) -> EnginePages:
        return EnginePages(self.caches(), NAMES, [GROUP_BYTES] * GROUPS)


def rows_of(blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, GROUPS * GROUP_BYTES), np.uint8)


def expected_row(pool: Pool, pages: tuple[int, ...]) -> bytes:
    return b"".join(pool.bytes[layer, page].numpy().tobytes() for page in pages for layer in range(LAYERS))


@pytest.mark.parametrize("layers_first", [True, False])
def test_a_row_is_the_pages_of_a_block_group_after_group_and_layer_after_layer(layers_first: bool) -> None:
    pool = Pool(layers_first=layers_first)
    rows = np.empty((2, GROUPS * GROUP_BYTES), np.uint8)
    pool.engine_pages().read_pages(((3, 7), (1, 11), (0, 5)), rows)
    assert rows[0].tobytes() == expected_row(pool, (3, 1, 0))
    assert rows[1].tobytes() == expected_row(pool, (7, 11, 5))


@st.composite
def tables(draw: st.DrawFn) -> Pages:
    """Pages of up to four blocks, in some groups none for the first of them."""
    blocks = draw(st.integers(1, PAGES // GROUPS))
    order = draw(st.permutations(range(PAGES)))
    gone = [draw(st.integers(0, blocks)) for _ in range(GROUPS)]
    return tuple(
        tuple(NO_PAGE if block < gone[group] else order[group * blocks + block] for block in range(blocks))
        for group in range(GROUPS)
    )


@pytest.mark.parametrize("layers_first", [True, False])
@settings(max_examples=60, deadline=None)
@given(pages=tables())
def test_a_load_fills_the_pages_that_the_engine_keeps_and_no_others(layers_first: bool, pages: Pages) -> None:
    pool, rows = Pool(layers_first=layers_first), rows_of(len(pages[0]), seed=1)
    before = pool.bytes.clone()

    pool.engine_pages().write_pages(rows, pages)

    for group, table in enumerate(pages):
        for block, page in enumerate(table):
            if page == NO_PAGE:
                continue
            part = rows[block, group * GROUP_BYTES : (group + 1) * GROUP_BYTES].reshape(LAYERS, PAGE_BYTES)
            assert np.array_equal(pool.bytes[:, page].numpy(), part)
    kept = {page for table in pages for page in table if page != NO_PAGE}
    others = [page for page in range(PAGES) if page not in kept]
    assert torch.equal(pool.bytes[:, others], before[:, others]), "a page of somebody else was written to"
