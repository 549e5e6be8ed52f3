"""A node that vLLM servers use: what it has counted, what it ought to hold, and waiting for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from e2e.engines.harness import BASE, Answer, PromptTokens, VllmServer
from e2e.engines.questions import QUESTIONS, ask, reusable
from e2e.harness import Node, wait_until
from tierkv.client import connect_operator
from tierkv.errors import NodeUnreachable
from tierkv.torture.waits import NeverCame

STORED_SECONDS = 30.0
ASKING_SECONDS = 240.0


@dataclass(slots=True)
class Hits:
    """Tokens that the node granted, by the tier that they came from."""

    host: int = 0
    nvme: int = 0


class Store:
    """Keeps the books of what servers have computed: each whole block once, however often it was computed."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._blocks: dict[tuple[str, ...], int] = {}

    def note(self, server: VllmServer, answer: Answer, weights: str = "") -> None:
        """That a server has computed this; `weights`: with others than the model's, an adapter's for one."""
        computed = [str(token) for token in answer.computed]
        size = server.block_tokens
        for end in range(size, len(computed) + 1, size):
            self._blocks[server.dtype, weights, *computed[:end]] = size

    def wait_stored(self) -> None:
        """Until the node holds what was noted, and nothing else."""
        expected = self._num_noted()
        wait_until(self.holds_all, f"the node holds {expected} tokens")
        assert self._num_held() == expected, "something is stored that nobody has computed, or it is stored twice"

    def holds_all(self) -> bool:
        """Whether all that was noted is there, as far as can be told now."""
        with suppress(NodeUnreachable):
            return self._num_held() >= self._num_noted()
        return False

    def wait_flushed(self) -> None:
        """Until all that was noted is on disk."""
        self.wait_stored()
        self.node.wait_status(lambda status: status.dirty_extents == 0, "all extents are on disk")

    def wait_idle(self) -> None:
        """Until nobody holds anything of the node."""
        self.node.wait_status(lambda status: (status.leases, status.tickets) == (0, 0), "no lease or ticket is left")

    def _num_noted(self) -> int:
        return sum(self._blocks.values())

    def _num_held(self) -> int:
        with connect_operator(self.node.endpoint) as operator:
            return sum(row.tokens for row in operator.usage().rows)

    def num_acquires(self) -> int:
        """Since the node's start; retries count too."""
        status = self.node.status()
        return int(status.counters.get("requests.Acquire", 0)) if status is not None else 0

    def restart(self) -> None:
        """After kill -9: what is on disk is all that it has."""
        self.node.kill("supervisor")
        self.node.start()

    @contextmanager
    def hits(self) -> Iterator[Hits]:
        """Filled in when the block is left."""
        found = Hits()
        before = self._hits()
        yield found
        after = self._hits()
        found.host, found.nvme = after.host - before.host, after.nvme - before.nvme

    def _hits(self) -> Hits:
        status = self.node.status()
        assert status is not None, "the node does not answer"
        return Hits(*(int(status.counters.get(f"hit_tokens.{tier}", 0)) for tier in ("host", "nvme")))


@dataclass(frozen=True, slots=True)
class Checked:
    """A server whose every answer must be that of a vLLM without tierkv. `adapter` says which weights its adapter has,
    `weights` which ones itself has, if they aren't those of all others."""

    server: VllmServer
    store: Store
    references: dict[str, Answer]
    adapter: str = ""
    weights: str = ""

    def ask(self, name: str, *, model: str | None = None) -> PromptTokens:
        """Where the tokens of the prompt came from."""
        with self.server.counted(1) as tokens:
            answer = ask(self.server, name, model=model)
        self.check(name, answer)
        return tokens

    def ask_again(self, name: str, *, model: str | None = None) -> PromptTokens:
        """With nothing in vLLM's own prefix cache."""
        self.server.reset_prefix_cache()
        return self.ask(name, model=model)

    def ask_and_store(self, name: str, *, model: str | None = None) -> PromptTokens:
        """And see to it that the node holds what was computed."""
        given_up = self.num_given_up()
        tokens = self.ask(name, model=model)
        self.see_stored(given_up, lambda: self.ask_again(name, model=model))
        return tokens

    def ask_adapter(self, name: str, *, model: str | None = None) -> PromptTokens:
        """With nothing in vLLM's own prefix cache, and the adapter known by its content: requests go without the
        cache, and are counted, until its files were read. Sees to it that the node holds what was computed."""

        def answered() -> tuple[PromptTokens, float] | None:
            bypassed, given_up = self.num_bypassed(), self.num_given_up()
            tokens = self.ask_again(name, model=model)
            return (tokens, given_up) if self.num_bypassed() == bypassed else None

        tokens, given_up = wait_until(answered, "vLLM knows the adapter", ASKING_SECONDS)
        self.see_stored(given_up, lambda: self.ask_again(name, model=model))
        return tokens

    def see_stored(self, given_up: float, ask_again: Callable[[], object]) -> None:
        """Storing is best effort: a store that comes too late for vLLM, which wants its blocks back, is given up, and a
        new adapter is not cached before it was read. Both are counted; then it is asked again. `given_up` is how often
        that had happened before."""
        deadline = time.monotonic() + ASKING_SECONDS
        while not self._is_stored(given_up):
            assert time.monotonic() < deadline, "it is given up again and again"
            ask_again()
            given_up_now = self.num_given_up()
            assert given_up_now > given_up, "not everything was stored, and nothing says why"
            given_up = given_up_now
        self.store.wait_stored()

    def _is_stored(self, given_up: float) -> bool:
        """Waits for it, as long as there is hope."""
        with suppress(NeverCame):
            wait_until(
                lambda: self.store.holds_all() or self.num_given_up() > given_up, "it is stored or not", STORED_SECONDS
            )
        return self.store.holds_all()

    def num_bypassed(self) -> float:
        return self.server.metrics().total("vllm:tierkv_bypassed_total")

    def num_given_up(self) -> float:
        now = self.server.metrics()
        return sum(now.total(f"vllm:tierkv_{name}_total") for name in ("late_stores", "reasons", "bypassed"))

    def wait_connected(self) -> None:
        """Until the server loads from the node, which may have been away."""

        def loads() -> bool:
            return self.ask_again("known").external == reusable(self.references["known"].prompt)

        wait_until(loads, f"vLLM {self.server.name} loads from the node", 120.0)

    def check(self, name: str, answer: Answer) -> None:
        expected = self.references[name]
        assert answer.prompt == expected.prompt, "another chat template, then"
        assert answer.tokens == expected.tokens, f"{name}: {answer.text!r} instead of {expected.text!r}"
        if self.store.node.is_running:
            self.store.note(self.server, answer, self.adapter if QUESTIONS[name].model != BASE else self.weights)
