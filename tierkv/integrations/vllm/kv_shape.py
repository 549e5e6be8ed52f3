"""Where in a page of vLLM's each head's keys and values stand, for codecs; None where that isn't known for sure.

    CPU                     [head][keys of all tokens][values of all tokens], each run packed for an instruction set in
                            an order of its own. A scale is of the whole run, so the order within it does not matter.
    FLASH_ATTN, TRITON_ATTN [head][token] or [token][head], by the layout's name; of each the keys, then the values

Read in the backends' sources (0.32): `CPUAttentionBackendImpl.forward` takes the halves of [block_size * 2, head_size],
the others split the last axis at `head_size`. FlashInfer parts keys and values otherwise, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tierkv.core.codec import Kind, KVShape, Piece
from tierkv.core.fp8 import ITEM_BYTES, is_element
from tierkv.integrations.identity_common import element_type
from tierkv.integrations.vllm.packing import backend_names
from tierkv.integrations.vllm.supported import kv_layout, layer_specs

_SPLIT_BY_RUN = ("CPU_ATTN",)
_SPLIT_BY_TOKEN = ("FLASH_ATTN", "TRITON_ATTN")


def kv_shape_of(vllm_config: Any, kv_cache_config: Any, block_bytes: tuple[int, ...]) -> KVShape | None:
    """Of the blocks whose layer groups have `block_bytes` in the identity's layout."""
    specs = [list(layer_specs(group)) for group in kv_cache_config.kv_cache_groups]
    elements = {element_type(spec.dtype) for some in specs for spec in some}
    element = elements.pop()
    if elements or vllm_config.cache_config.cache_dtype != "auto" or not is_element(element):
        return None
    backends = backend_names(vllm_config)
    if len(backends) != 1 or backends[0] not in _SPLIT_BY_RUN + _SPLIT_BY_TOKEN:
        return None
    by_token = backends[0] in _SPLIT_BY_TOKEN
    heads_first = kv_layout(vllm_config, kv_cache_config).endswith("HNC")
    if not by_token and not heads_first:
        return None
    groups = []
    for some, size in zip(specs, block_bytes, strict=True):
        pages = _pages(some, size // ITEM_BYTES[element])
        if pages is None:
            return None
        spec, count = pages
        pieces = _by_token(spec, count, heads_first=heads_first) if by_token else _by_run(spec, count)
        groups.append(tuple(pieces))
    return KVShape(element=element, raw_bytes=block_bytes, pieces=tuple(groups))


def _pages(specs: list[Any], elements: int) -> tuple[Any, int] | None:
    """The spec that all layers of a group share, and how many layers there are. None where they differ, or where a page
    holds something else than keys and values of its heads."""
    first = specs[0]
    page = 2 * first.num_kv_heads * first.block_size * first.head_size
    alike = {(spec.num_kv_heads, spec.block_size, spec.head_size) for spec in specs}
    if len(alike) != 1 or getattr(first, "head_size_v", first.head_size) != first.head_size or elements % page:
        return None
    return first, elements // page


def _by_run(spec: Any, layers: int) -> Iterator[Piece]:
    run = spec.block_size * spec.head_size
    for layer in range(layers):
        for which, kind in enumerate((Kind.KEYS, Kind.VALUES)):
            yield Piece(
                layer=layer,
                kind=kind,
                heads=spec.num_kv_heads,
                tokens=spec.block_size,
                dim=spec.head_size,
                start=layer * 2 * spec.num_kv_heads * run + which * run,
                head_stride=2 * run,
                token_stride=spec.head_size,
            )


def _by_token(spec: Any, layers: int, *, heads_first: bool) -> Iterator[Piece]:
    content = 2 * spec.head_size
    for layer in range(layers):
        for which, kind in enumerate((Kind.KEYS, Kind.VALUES)):
            yield Piece(
                layer=layer,
                kind=kind,
                heads=spec.num_kv_heads,
                tokens=spec.block_size,
                dim=spec.head_size,
                start=layer * content * spec.num_kv_heads * spec.block_size + which * spec.head_size,
                head_stride=content * (spec.block_size if heads_first else 1),
                token_stride=content * (1 if heads_first else spec.num_kv_heads),
            )
