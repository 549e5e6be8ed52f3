"""Where a codec finds each head's keys and values in vLLM's pages: told by vLLM's own views of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch

from tests.integrations.vllm.engine import BLOCK_TOKENS, full_attention, kv_config
from tierkv.core.codec import Fp8, KVShape
from tierkv.integrations.vllm.kv_shape import kv_shape_of

HEADS, DIM, LAYERS = 3, 16, 2


def spec(**changed: Any) -> Any:
    return full_attention(**({"num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.bfloat16} | changed))


def shape_of(config: Any, *specs: Any, layout: str = "LBHNC") -> KVShape | None:
    some = specs or (spec(),)
    sizes = tuple(LAYERS * one.page_size_bytes for one in some)
    return kv_shape_of(config, kv_config(*some, layers=LAYERS, layout=layout), sizes)


def named(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
    monkeypatch.setattr("tierkv.integrations.vllm.kv_shape.backend_names", lambda config: list(backends))


def changed_scales(shape: KVShape | None, page: torch.Tensor, part: torch.Tensor) -> list[int]:
    """Which scales of a block of LAYERS pages change when `part`, a view of the last of them, does."""
    assert shape is not None
    codec = Fp8(shape)
    torch.manual_seed(3)
    others = torch.randn((LAYERS - 1, page.numel()), dtype=torch.float32).to(page.dtype)
    page.copy_(torch.randn(page.shape, dtype=torch.float32).to(page.dtype))
    coded = np.empty((2, sum(codec.block_bytes)), np.uint8)
    for row in range(2):
        block = torch.cat([others.reshape(-1), page.reshape(-1)]).view(torch.uint8).numpy()[None]
        assert codec.encode(block, coded[row : row + 1]) == 1
        part.mul_(4)
    scales = coded[:, : 4 * 2 * HEADS * LAYERS].view("<f4")
    return np.flatnonzero(scales[0] != scales[1]).tolist()


@pytest.mark.parametrize("which", [0, 1])
def test_on_a_cpu_keys_and_values_are_the_halves_that_its_kernels_take(plain_config: Any, which: int) -> None:
    page = torch.empty((1, HEADS, BLOCK_TOKENS, 2 * DIM), dtype=torch.bfloat16)
    halves = page.view((1, HEADS, BLOCK_TOKENS * 2, -1)).chunk(2, dim=2)  # cpu_attn.py
    assert changed_scales(shape_of(plain_config), page, halves[which][0, 1]) == [(2 * (LAYERS - 1) + which) * HEADS + 1]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_on_a_gpu_they_are_the_halves_of_each_token_s_head(
    plain_config: Any, monkeypatch: pytest.MonkeyPatch, backend: str, layout: str, which: int
) -> None:
    named(monkeypatch, backend)
    order = (HEADS, BLOCK_TOKENS) if layout == "LBHNC" else (BLOCK_TOKENS, HEADS)
    page = torch.empty((*order, 2 * DIM), dtype=torch.bfloat16)
    by_head = page if layout == "LBHNC" else page.transpose(0, 1)
    halves = by_head.split(DIM, dim=-1)  # flash_attn.py, triton_attn.py
    found = changed_scales(shape_of(plain_config, layout=layout), page, halves[which][2])
    assert found == [(2 * (LAYERS - 1) + which) * HEADS + 2]


def test_groups_of_their_own_heads_are_coded_each(plain_config: Any) -> None:
    shape = shape_of(plain_config, spec(), spec(num_kv_heads=1))
    assert shape is not None
    assert [len(group) for group in shape.pieces] == [2 * LAYERS, 2 * LAYERS]
    assert [group[0].heads for group in shape.pieces] == [HEADS, 1]


def test_what_is_not_known_for_sure_is_not_coded(plain_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shape_of(plain_config, spec(dtype=torch.float64)) is None
    assert shape_of(plain_config, spec(), spec(dtype=torch.float16)) is None
    assert shape_of(plain_config, layout="LBNHC") is None, "no order that a CPU's kernels have"
    named(monkeypatch, "FLASHINFER")
    assert shape_of(plain_config) is None
    named(monkeypatch, "FLASH_ATTN", "TRITON_ATTN")
    assert shape_of(plain_config) is None


def test_pages_that_are_quantised_already_are_left_as_they_are(
    plain_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_config.cache_config, "cache_dtype", "fp8")
    assert shape_of(plain_config) is None
