"""Pages into rows and rows into pages, for each way in which an engine may lay out its KV memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tierkv.device.backends import cpu_backend
from tierkv.device.memory import HostMemory
from tierkv.errors import LayoutMismatch, UnsupportedModel
from tierkv.integrations.connector.plan import NO_PAGE
from tierkv.integrations.vllm import pages as pages_module
from tierkv.integrations.vllm.device import pages_on_device, uses_pools
from tierkv.integrations.vllm.pages import STAGED_BLOCKS, EnginePages

NUM_PAGES, HEADS, TOKENS, CONTENT = 40, 3, 4, 8
PAGE_BYTES = HEADS * TOKENS * CONTENT * 2
LAYERS = ("a", "b", "c")

Caches = dict[str, torch.Tensor]


def fill(caches: Caches) -> Caches:
    """Every element of every layer another number, whatever the order in memory."""
    for index, cache in enumerate(caches.values()):
        cache.view(torch.int16).copy_(
            torch.arange(cache.numel(), dtype=torch.int32).add(index * cache.numel()).to(torch.int16).view(cache.shape)
        )
    return caches


def evenly_spaced() -> Caches:
    whole = torch.zeros(len(LAYERS), NUM_PAGES, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, whole, strict=True))


def separate() -> Caches:
    return {name: torch.zeros(NUM_PAGES, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16) for name in LAYERS}


def blocks_outermost() -> Caches:
    whole = torch.zeros(NUM_PAGES, len(LAYERS), HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    return {name: whole[:, layer] for layer, name in enumerate(LAYERS)}


def inner_axes_permuted() -> Caches:
    """Tokens before heads in memory, heads before tokens in the view."""
    whole = torch.zeros(len(LAYERS), NUM_PAGES, TOKENS, HEADS, CONTENT, dtype=torch.bfloat16)
    return dict(zip(LAYERS, whole.transpose(2, 3), strict=True))


def of_differing_sizes() -> Caches:
    return {
        "a": torch.zeros(NUM_PAGES, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16),
        "b": torch.zeros(NUM_PAGES, 1, TOKENS, CONTENT, dtype=torch.bfloat16),
        "c": torch.zeros(NUM_PAGES, HEADS, TOKENS, 2 * CONTENT, dtype=torch.bfloat16),
    }


LAYOUTS = [evenly_spaced, separate, blocks_outermost, inner_axes_permuted, of_differing_sizes]


def page_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def made(caches: Caches, *groups: tuple[str, ...]) -> EnginePages:
    groups = groups or (LAYERS,)
    return EnginePages(caches, groups, [sum(page_bytes(caches[name]) for name in names) for names in groups])


def row_bytes(caches: Caches) -> int:
    return sum(page_bytes(cache) for cache in caches.values())


@contextmanager
def through_a_device(is_device: bool) -> Iterator[None]:
    """The way of pages on a device, on one that needs no driver."""
    with pytest.MonkeyPatch.context() as patch:
        if is_device:
            patch.setattr(
                pages_module, "_HostPages", lambda group: pages_module._DevicePages(group, torch.device("cpu"))
            )
        yield


@pytest.fixture(params=[False, True], ids=["host", "device"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with through_a_device(request.param):
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lay_out", LAYOUTS)
@pytest.mark.parametrize("count", [1, 5, STAGED_BLOCKS, STAGED_BLOCKS + 3])
def test_what_was_read_from_pages_and_written_to_others_is_the_same(lay_out: Callable[[], Caches], count: int) -> None:
    caches = fill(lay_out())
    before = {name: cache.clone() for name, cache in caches.items()}
    engine = made(caches)
    source = list(np.random.default_rng(count).permutation(NUM_PAGES // 2)[:count])
    target = [NUM_PAGES // 2 + page for page in range(count)]
    rows = np.zeros((count, row_bytes(caches)), np.uint8)

    engine.computed()
    engine.read_pages((tuple(map(int, source)),), rows)
    engine.write_pages(rows, (tuple(target),))

    for name, cache in caches.items():
        assert torch.equal(cache[target], before[name][source])
        others = [page for page in range(NUM_PAGES) if page not in target]
        assert torch.equal(cache[others], before[name][others])


@pytest.mark.parametrize("lay_out", LAYOUTS)
def test_a_row_is_the_same_whatever_way_it_was_read(lay_out: Callable[[], Caches]) -> None:
    caches = fill(lay_out())
    rows = [np.zeros((3, row_bytes(caches)), np.uint8) for _ in range(2)]
    for is_device, found in enumerate(rows):
        with through_a_device(bool(is_device)):
            made(caches).read_pages(((4, 2, 9),), found)
    assert np.array_equal(*rows)


def test_a_row_holds_one_layer_after_the_other_as_they_lie_in_memory() -> None:
    caches = fill(evenly_spaced())
    rows = np.zeros((1, row_bytes(caches)), np.uint8)
    made(caches).read_pages(((7,),), rows)
    wanted = [caches[name][7].contiguous().view(torch.uint8).flatten().numpy() for name in LAYERS]
    assert np.array_equal(rows[0], np.concatenate(wanted))


def test_permuted_axes_are_moved_as_they_lie_in_memory() -> None:
    caches = fill(inner_axes_permuted())
    rows = np.zeros((1, row_bytes(caches)), np.uint8)
    made(caches).read_pages(((7,),), rows)
    in_memory = caches["a"][7].transpose(0, 1)
    assert in_memory.is_contiguous()
    assert np.array_equal(rows[0, :PAGE_BYTES], in_memory.view(torch.uint8).flatten().numpy())


def test_a_load_that_comes_while_a_store_copies_does_not_use_the_same_pinned_memory() -> None:
    caches = fill(evenly_spaced())
    before = {name: cache.clone() for name, cache in caches.items()}
    rows, loaded = np.zeros((2, row_bytes(caches)), np.uint8), np.full((2, row_bytes(caches)), 7, np.uint8)
    with through_a_device(is_device=True):
        engine = made(caches)
    mover = engine._movers[0]
    assert isinstance(mover, pages_module._DevicePages)
    load = threading.Thread(target=engine.write_pages, args=(loaded, ((8, 9),)))

    def complete() -> None:
        if load.ident is None:  # the store has asked for its copy, and has not looked at it yet
            load.start()
            load.join(0.3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover, "_complete", complete)
        engine.read_pages(((4, 2),), rows)
        load.join()
    stored = [np.concatenate([before[name][page].view(torch.uint8).flatten() for name in LAYERS]) for page in (4, 2)]
    assert np.array_equal(rows, np.array(stored))
    assert all((cache[[8, 9]].view(torch.uint8) == 7).all() for cache in caches.values())


@pytest.mark.usefixtures("way")
def test_a_group_s_part_is_left_out_where_it_has_no_page() -> None:
    caches = fill(separate())
    before = {name: cache.clone() for name, cache in caches.items()}
    engine = made(caches, ("a", "b"), ("c",))
    rows = np.zeros((3, row_bytes(caches)), np.uint8)
    engine.read_pages(((1, 2, 3), (4, 5, 6)), rows)
    engine.write_pages(rows, ((21, 22, 23), (NO_PAGE, NO_PAGE, 26)))
    assert torch.equal(caches["a"][21:24], before["a"][1:4])
    assert torch.equal(caches["b"][21:24], before["b"][1:4])
    assert torch.equal(caches["c"][26], before["c"][6])
    untouched = [page for page in range(NUM_PAGES) if page != 26]
    assert torch.equal(caches["c"][untouched], before["c"][untouched])


@pytest.mark.usefixtures("way")
def test_where_no_group_has_a_page_nothing_is_written() -> None:
    caches = fill(separate())
    before = {name: cache.clone() for name, cache in caches.items()}
    rows = np.zeros((2, row_bytes(caches)), np.uint8)
    made(caches).write_pages(rows, ((NO_PAGE, NO_PAGE),))
    assert all(torch.equal(caches[name], before[name]) for name in caches)


@pytest.mark.usefixtures("way")
def test_pages_and_rows_that_are_not_as_many_are_refused() -> None:
    caches = separate()
    rows = np.zeros((2, row_bytes(caches)), np.uint8)
    with pytest.raises(ValueError, match="shorter"):
        made(caches, ("a", "b"), ("c",)).read_pages(((1, 2),), rows)


def test_a_page_that_is_not_one_piece_is_refused_by_name() -> None:
    """Heads outermost: the pages of a head lie together, those of a block do not."""
    whole = torch.zeros(HEADS, NUM_PAGES, TOKENS, CONTENT, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModel, match=r"KV memory of a: a page .* is not one piece"):
        EnginePages({"a": whole.transpose(0, 1)}, [("a",)], [PAGE_BYTES])


@pytest.mark.parametrize("declared", [PAGE_BYTES - 1, 2 * PAGE_BYTES, 0])
def test_pages_of_other_sizes_than_the_identity_says_are_refused(declared: int) -> None:
    with pytest.raises(LayoutMismatch, match=r"block_bytes of the page groups.*\(192,\)"):
        EnginePages(separate(), [("a",)], [declared])


def test_memory_on_several_devices_is_refused() -> None:
    caches = {"a": separate()["a"], "b": torch.zeros(NUM_PAGES, 1, TOKENS, CONTENT, device="meta")}
    with pytest.raises(UnsupportedModel, match="several devices"):
        EnginePages(caches, [("a", "b")], [PAGE_BYTES + TOKENS * CONTENT * 4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lay_out", LAYOUTS)
def test_pages_on_a_device_make_the_round_trip_behind_what_was_computed(lay_out: Callable[[], Caches]) -> None:
    on_host = fill(lay_out())
    caches: dict[str, Any] = {name: cache.contiguous().cuda() for name, cache in on_host.items()}
    engine = made(caches)
    rows = np.zeros((20, row_bytes(caches)), np.uint8)
    for cache in caches.values():
        cache.add_(1)
    engine.computed()
    engine.read_pages((tuple(range(20)),), rows)
    engine.write_pages(rows, (tuple(range(20, 40)),))
    for cache in caches.values():
        assert torch.equal(cache[:20].view(torch.int16), cache[20:].view(torch.int16))


@pytest.mark.parametrize("caches", LAYOUTS)
def test_a_layout_moves_the_same_bytes_as_the_engines_pages_do(caches: Callable[[], Caches]) -> None:
    """What is stored on a device is loaded by way of host memory elsewhere."""
    filled = fill(caches())
    engine = made(filled)
    pages, row = [5, 0, NUM_PAGES - 1], row_bytes(filled)
    expected = np.zeros((len(pages), row), np.uint8)
    engine.read_pages((tuple(pages),), expected)
    [layout] = engine.layouts()
    assert (layout.block_bytes, layout.num_pages) == (row, NUM_PAGES)
    slots = HostMemory(np.zeros(len(pages) * row, np.uint8))
    assert cpu_backend().gather(layout, pages, slots, [0, row, 2 * row]).wait(0.0)
    assert (slots.bytes.reshape(-1, row) == expected).all()


def test_each_page_group_has_a_layout_of_its_own_in_the_order_of_a_row() -> None:
    filled = fill(evenly_spaced())
    one, other = made(filled, ("a", "b"), ("c",)).layouts()
    assert (one.block_bytes, other.block_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)


@pytest.mark.parametrize(
    ("wanted", "found"), [("auto", None), ("none", None), ("cpu", "cpu"), ("cpu:1", "cpu:1"), ("cuda:0", None)]
)
def test_an_engine_on_a_cpu_uses_a_pool_only_where_it_is_told_which(wanted: str, found: str | None) -> None:
    """And never one that its pages can't be copied from."""
    on_device = pages_on_device(made(fill(evenly_spaced())), wanted)
    assert (None if on_device is None else on_device.device) == found


def test_a_scheduler_asks_for_slots_in_pools_where_workers_may_have_one() -> None:
    asked = {(wanted, kind): uses_pools(wanted, kind) for wanted in ("auto", "none", "cpu") for kind in ("cpu", "cuda")}
    assert [key for key, uses in asked.items() if uses] == [("auto", "cuda"), ("cpu", "cpu"), ("cpu", "cuda")]
