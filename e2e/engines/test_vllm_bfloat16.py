"""In bfloat16 a prompt that is computed in one pass and one that is computed behind a cached prefix are rounded
differently, whoever cached it. So what tierkv gives is held against a hit in vLLM's own prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import NEW_TOKENS, QUESTIONS, SMALL_CACHE, reusable
from e2e.engines.store import Store

BLOCK_TOKENS = 128  # what vLLM chooses by itself on a CPU


@pytest.fixture(scope="module")
def server(folder: Path, model: Path, store: Store) -> Iterator[VllmServer]:
    connector = tierkv_at(store.node.endpoint)
    with VllmServer(
        folder, model, "half", kv_transfer=connector, dtype="bfloat16", block_tokens=BLOCK_TOKENS, arguments=SMALL_CACHE
    ) as server:
        server.start()
        yield server


@pytest.mark.parametrize("name", ["help 1", "code 1"])
def test_a_prefix_from_the_node_is_as_good_as_one_in_vllms_own_cache(
    server: VllmServer, store: Store, name: str
) -> None:
    cold = server.chat(QUESTIONS[name].messages, new_tokens=NEW_TOKENS)
    store.note(server, cold)
    store.wait_stored()
    wanted = reusable(cold.prompt, BLOCK_TOKENS)

    with server.counted(1) as tokens:
        local = server.complete(cold.prompt, new_tokens=NEW_TOKENS, logprobs=1)
    assert tokens.by_source == {"device": wanted}
    store.note(server, local)
    server.reset_prefix_cache()
    with server.counted(1) as tokens:
        loaded = server.complete(cold.prompt, new_tokens=NEW_TOKENS, logprobs=1)
    assert tokens.by_source == {"host": wanted}
    assert (loaded.tokens, loaded.logprobs) == (local.tokens, local.logprobs)
