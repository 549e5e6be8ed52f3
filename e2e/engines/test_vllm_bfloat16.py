"""In bfloat16 a prompt that is computed in one pass and one that is computed behind a cached prefix are rounded
differently, whoever cached it. So what tierkv gives is held against a hit in vLLM's own prefix cache.

The server says that it is a vLLM of a version that nobody has tested, and has all that the connector uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.engines.another_version import VERSION
from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import NEW_TOKENS, QUESTIONS, SMALL_CACHE, reusable
from e2e.engines.store import Store
from tierkv.integrations.vllm.version import TESTED

UNTESTED = "0.33.1"
BLOCK_TOKENS = 128  # what vLLM chooses by itself on a CPU


@pytest.fixture(scope="module")
def server(folder: Path, model: Path, store: Store) -> Iterator[VllmServer]:
    with VllmServer(
        folder,
        model,
        "half",
        kv_transfer=tierkv_at(store.node.endpoint, module="e2e.engines.another_version"),
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
        arguments=SMALL_CACHE,
        variables={VERSION: UNTESTED},
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


def test_a_version_that_nobody_has_tested_is_warned_of_once_in_a_process(server: VllmServer) -> None:
    lines = [line for line in server.log().splitlines() if f"vLLM {UNTESTED} is not a tested version" in line]
    assert lines, server.tail()
    assert all(f"({TESTED}.x)" in line for line in lines)
    assert len(lines) <= len(server.pids())
