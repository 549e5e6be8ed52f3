"""Files that something else wrote into, their sizes unchanged: what lay in them is computed again, counted as damaged,
and the answer stays right. vLLM's own file tier takes such bytes for KV, and says wrong things without a word."""

from __future__ import annotations

import os
import random
from pathlib import Path

from e2e.engines.harness import Answer, PromptTokens, VllmServer, tierkv_at
from e2e.engines.store import Store
from e2e.harness import Node, data_of, wait_until
from tierkv.storage.format import decode_prefix
from tierkv.wire.messages import StatusReply

PROMPT_TOKENS = 1_000
BLOCK_TOKENS = 32
REUSABLE = 31 * BLOCK_TOKENS
"""Whole blocks in that."""


def test_what_was_overwritten_is_computed_again_and_the_answer_stays_right(folder: Path, model: Path) -> None:
    """In float32, where an answer is the same however its prompt was cut into pieces. First whole files while the node
    is stopped, which it finds at its start; then all but their headers while it runs, which only a read can find."""
    lost, other = _prompt(1), _prompt(2)
    (folder / "overwritten").mkdir()
    with (
        Node(
            folder / "overwritten", host_bytes="256MiB", nvme_bytes="1GiB", slab_bytes=None, extent_bytes=None
        ) as node,
        VllmServer(
            folder, model, "overwritten", kv_transfer=tierkv_at(node.endpoint), block_tokens=BLOCK_TOKENS
        ) as server,
    ):
        store = Store(node)
        node.start()
        server.start()
        right, _ = _ask(server, lost)
        store.note(server, right)
        store.wait_flushed()

        node.stop()
        _overwrite(node, headers=True)
        node.start()
        assert _status(node).found["set_aside"] > 0
        store.note(server, _wait_loading(server, other))
        answer, tokens = _ask(server, lost)
        assert answer.tokens == right.tokens
        assert tokens.external == 0
        store.wait_flushed()

        node.stop()
        node.start()
        _overwrite(node, headers=False)
        _wait_loading(server, other)
        answer, tokens = _ask(server, lost)
        assert answer.tokens == right.tokens
        assert tokens.external == 0
        assert _status(node).counters["damaged_extents.checksum"] > 0
        assert server.metrics().total("vllm:tierkv_misses_total") > 0

        assert _wait_loading(server, lost).tokens == right.tokens, "what was computed again was stored again"


def _ask(server: VllmServer, prompt: list[int]) -> tuple[Answer, PromptTokens]:
    """With nothing in vLLM's own prefix cache."""
    server.reset_prefix_cache()
    with server.counted(1) as tokens:
        answer = server.complete(prompt)
    return answer, tokens


def _wait_loading(server: VllmServer, prompt: list[int]) -> Answer:
    """Until the server gets this prompt, which it computes and stores first, from the node's memory: it has connected
    to it again. The answer that came of that."""

    def loaded() -> Answer | None:
        answer, tokens = _ask(server, prompt)
        return answer if tokens.by_source == {"host": REUSABLE} else None

    return wait_until(loaded, f"vLLM {server.name} loads from the node", 120.0)


def _status(node: Node) -> StatusReply:
    status = node.status()
    assert status is not None, "the node does not answer"
    return status


def _overwrite(node: Node, *, headers: bool) -> None:
    """With noise, in place."""
    files = sorted(data_of(node).glob("models/**/*.kv"))
    assert files
    for path in files:
        size = path.stat().st_size
        with path.open("r+b") as file:
            begin = 0 if headers else decode_prefix(file.read(4_096)).header_bytes
            file.seek(begin)
            file.write(os.urandom(size - begin))
        assert path.stat().st_size == size


def _prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(1_000, 40_000), k=PROMPT_TOKENS)
