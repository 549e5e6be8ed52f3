"""A model whose node has a pool on its device, the CPU: blocks go between the library's cache and the pool."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.client.fake_device import DeviceNode
from tests.integrations.tiny import prompt, tiny_llama
from tierkv.client import Client, connect
from tierkv.errors import ConfigError
from tierkv.integrations.model_loading import LoadedModel
from tierkv.integrations.transformers import PrefixCache

pytestmark = pytest.mark.engine

BLOCK = 16


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[DeviceNode]:
    directory = Path(tempfile.mkdtemp(dir=runtime_dir))
    fake = DeviceNode(directory)
    yield fake
    fake.close()
    shutil.rmtree(directory)


@pytest.fixture
def client(node: DeviceNode) -> Iterator[Client]:
    with connect(node.directory, timeout_seconds=20) as made:
        yield made


def cache_of(client: Client, **options: Any) -> PrefixCache:
    loaded = LoadedModel(model=tiny_llama(), weights="ab" * 32, name="tiny")
    return PrefixCache(loaded, client, block_tokens=BLOCK, **options)


def plain(tokens: torch.Tensor) -> list[int]:
    output = tiny_llama().generate(tokens, max_new_tokens=8, do_sample=False)
    new: list[int] = output[0, tokens.shape[1] :].tolist()
    return new


def test_a_prompt_that_was_stored_in_the_pool_comes_from_there_and_gives_the_plain_answer(
    node: DeviceNode, client: Client
) -> None:
    tokens = prompt(100)
    first = cache_of(client, device="cpu").generate(tokens, max_new_tokens=8, do_sample=False)
    assert first.use.stored_blocks == 107 // BLOCK
    node.spoil_arena()
    second = cache_of(client, device="cpu").generate(tokens, max_new_tokens=8, do_sample=False)
    assert (second.use.reused_tokens, second.use.device_tokens, second.use.host_tokens) == (96, 96, 0)
    assert second.new_tokens == first.new_tokens == plain(tokens)
    assert (first.use.fault, second.use.fault) == ("", "")


def test_blocks_of_both_kinds_make_one_prefix(node: DeviceNode, client: Client) -> None:
    tokens, cache = prompt(100), cache_of(client, device="cpu")
    cache.prefill(tokens)
    node.only_in_host(cache.group.keys(tokens[0].numpy()), (0, 2, 5))
    again = cache.generate(tokens, max_new_tokens=8, do_sample=False)
    assert (again.use.device_tokens, again.use.host_tokens) == (3 * BLOCK, 3 * BLOCK)
    assert again.new_tokens == plain(tokens)


def test_a_pool_that_died_is_done_without(node: DeviceNode, client: Client) -> None:
    tokens, cache = prompt(100), cache_of(client, device="cpu")
    cache.prefill(tokens)
    node.end_pool()
    again = cache.generate(tokens, max_new_tokens=8, do_sample=False)
    assert (again.use.device_tokens, again.use.host_tokens) == (0, 96)
    assert again.new_tokens == plain(tokens)


@pytest.mark.parametrize("device", ["auto", "none"])
def test_a_model_on_the_cpu_asks_for_no_pool_unless_told_to(node: DeviceNode, client: Client, device: str) -> None:
    cache_of(client, device=device).prefill(prompt(100))
    assert node.asked_for == []


def test_a_pool_of_another_device_than_the_models_is_refused_by_name(client: Client) -> None:
    with pytest.raises(ConfigError, match="'cuda:1', but the model is on cpu"):
        cache_of(client, device="cuda:1")
