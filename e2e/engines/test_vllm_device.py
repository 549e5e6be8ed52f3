"""A real vLLM and a node with a pool on its device, here the CPU: blocks are copied between vLLM's pages and the pool.

The counters of both sides say so; the answers are those of a vLLM without tierkv. Then the pool's process is killed
while the engine loads and stores, and the same must hold.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.engines.harness import tierkv_at
from e2e.engines.one_process import OneProcess, Reply
from e2e.harness import Node, wait_until

BLOCK_TOKENS, NEW_TOKENS, PROMPT_TOKENS = 32, 8, 400
REUSABLE = (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
ARGUMENTS = {
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 64,
}
KILLS = 3


def _prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(1_000, 40_000), k=PROMPT_TOKENS)


PROMPTS = [_prompt(number) for number in range(2)]


@pytest.fixture(scope="module")
def answers(folder: Path, model: Path) -> list[tuple[int, ...]]:
    with OneProcess(folder / "device-plain.log", model, ARGUMENTS) as plain:
        plain.start()
        return [plain.ask(prompt, NEW_TOKENS).tokens for prompt in PROMPTS]


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[Node]:
    (folder / "device").mkdir()
    sizes = {"host_bytes": "256MiB", "nvme_bytes": "1GiB", "slab_bytes": "8MiB", "extent_bytes": None}
    with Node(folder / "device", gpu_devices="cpu", gpu_bytes="128MiB", **sizes) as made:
        made.start()
        yield made


@pytest.fixture(scope="module")
def engine(answers: list[tuple[int, ...]], folder: Path, model: Path, node: Node) -> Iterator[OneProcess]:
    transfer = tierkv_at(node.endpoint, device="cpu")
    with OneProcess(folder / "device.log", model, ARGUMENTS | {"kv_transfer": transfer}) as made:
        made.start()
        wait_until(lambda: _mapped(node) > 0, "the engine has mapped the pool", 120.0)
        yield made


def _mapped(node: Node) -> int:
    status = node.status()
    return 0 if status is None else sum(device.mapped_sessions for device in status.devices)


def _count(node: Node, name: str) -> int:
    status = node.status()
    assert status is not None, "the node does not answer"
    return int(status.counters.get(name, 0))


def _ask(engine: OneProcess, number: int) -> Reply:
    """With nothing in vLLM's own prefix cache."""
    engine.reset_prefix_cache()
    return engine.ask(PROMPTS[number], NEW_TOKENS)


def test_what_vllm_stored_in_the_pool_it_loads_from_there(
    engine: OneProcess, node: Node, answers: list[tuple[int, ...]]
) -> None:
    stored, loaded = engine.device_blocks()
    assert _ask(engine, 0).tokens == answers[0]

    def loads_all() -> bool:
        """Storing is best effort: what was given up is offered again."""
        reply = _ask(engine, 0)
        assert reply.tokens == answers[0]
        return reply.host == REUSABLE

    wait_until(loads_all, "all that was stored is loaded", 120.0)
    hits = _count(node, "hit_tokens.gpu")
    stored_before, loaded_before = engine.device_blocks()
    assert (stored_before - stored) * BLOCK_TOKENS >= REUSABLE, "it was stored by way of host memory"
    reply = _ask(engine, 0)
    assert (reply.tokens, reply.host, reply.failed) == (answers[0], REUSABLE, 0)
    assert _count(node, "hit_tokens.gpu") - hits == REUSABLE
    assert (engine.device_blocks()[1] - loaded_before) * BLOCK_TOKENS == REUSABLE
    assert loaded_before >= loaded


def test_a_pool_whose_process_is_killed_while_vllm_works_costs_no_answer(
    engine: OneProcess, node: Node, answers: list[tuple[int, ...]]
) -> None:
    over = threading.Event()
    killed: list[int] = []

    def kill_again_and_again() -> None:
        while not over.is_set() and len(killed) < KILLS:
            killed.append(node.kill("gpu0"))
            wait_until(lambda: over.is_set() or _mapped(node) > 0, "the engine has mapped the next pool", 240.0)

    killer = threading.Thread(target=kill_again_and_again)
    killer.start()
    try:
        asked = 0
        while len(killed) < KILLS or asked < 2 * KILLS:
            number = asked % len(PROMPTS)
            assert _ask(engine, number).tokens == answers[number]
            asked += 1
    finally:
        over.set()
        killer.join()

    def loads() -> bool:
        reply = _ask(engine, 0)
        assert reply.tokens == answers[0]
        return reply.host == REUSABLE

    wait_until(loads, "vLLM loads again", 120.0)
    node.wait_status(lambda status: (status.leases, status.tickets) == (0, 0), "no lease or ticket is left")
