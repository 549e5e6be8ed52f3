"""A vLLM on a node with codec = fp8: half the bytes, and the same answer from memory and from disk, whoever was killed.

On a CPU its pages are packed for an instruction set; each head's keys and values are one run of them all the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import NEW_TOKENS, QUESTIONS, SMALL_CACHE, reusable
from e2e.engines.store import Store
from e2e.harness import Node, data_of
from tests.verdicts import write_passing
from tierkv.client import connect_operator
from tierkv.storage.manifest import fingerprint_model

RAW_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2-135M in bfloat16: layers, keys and values, heads, numbers of a head."""
BLOCK_TOKENS = 128


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Store:
    node = Node(tmp_path, codec="fp8", host_bytes="640MiB", nvme_bytes="4GiB", slab_bytes=None, extent_bytes=None)
    write_passing(data_of(node), fingerprint_model(model).fingerprint)
    return Store(node)


def test_the_answer_is_the_same_from_memory_and_from_disk_and_half_the_bytes_are_there(
    folder: Path, model: Path, store: Store
) -> None:
    node = store.node
    with (
        node,
        VllmServer(
            folder,
            model,
            "fp8",
            kv_transfer=tierkv_at(node.endpoint),
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            arguments=SMALL_CACHE,
        ) as server,
    ):
        node.start()
        server.start()
        cold = server.chat(QUESTIONS["help 1"].messages, new_tokens=NEW_TOKENS)
        store.note(server, cold)
        store.wait_stored()
        wanted = reusable(cold.prompt, BLOCK_TOKENS)
        server.reset_prefix_cache()
        with server.counted(1) as tokens:
            loaded = server.complete(cold.prompt, new_tokens=NEW_TOKENS, logprobs=1)
        assert tokens.by_source == {"host": wanted}
        store.note(server, loaded)
        store.wait_flushed()
        with connect_operator(node.endpoint) as operator:
            (row,) = operator.usage().rows
        raw = row.tokens * RAW_TOKEN_BYTES
        assert 0.5 * raw < row.host_bytes < 0.53 * raw
        on_disk = sum(path.stat().st_size for path in data_of(node).rglob("*.kv"))
        assert 0.5 * raw < on_disk < 0.53 * raw
        assert server.metrics().total("vllm:tierkv_uncoded_total") == 0

        server.kill()
        store.restart()
        server.start()
        with server.counted(1) as tokens:
            again = server.complete(cold.prompt, new_tokens=NEW_TOKENS, logprobs=1)
        assert tokens.by_source == {"disk": wanted}
        assert (again.tokens, again.logprobs) == (loaded.tokens, loaded.logprobs)
