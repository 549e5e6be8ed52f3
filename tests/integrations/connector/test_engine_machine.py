"""Both sides of the connector at random, between an engine that pages and a living node that is short of room.

Whatever is aborted, preempted, taken back, held up, restarted or broken: what the engine computes with is right, every
request is answered, and nothing is left at the node.

HYPOTHESIS_PROFILE=long runs it for long, at random; by default a bounded number of examples.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.integrations.connector.kit import BLOCK_TOKENS, count_stored
from tests.integrations.connector.living_node import LivingNode
from tests.integrations.connector.living_pool import OvertakingCopies
from tests.integrations.connector.paged_engine import PagedEngine
from tierkv.wire.messages import Acquire, Commit, Release, Reserve
from tierkv.wire.messages import Request as WireRequest

IS_LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
SETTINGS = settings(
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    max_examples=2_000 if IS_LONG else 20,
    stateful_step_count=80 if IS_LONG else 40,
    derandomize=not IS_LONG,
    deadline=None,
    print_blob=IS_LONG,
    database=None,
    suppress_health_check=list(HealthCheck),
)
NODE_BLOCKS = 24
NUM_PAGES = 14
BRANCHES = ["00000", "00001", "00010", "00100", "01000"]
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(BRANCHES), st.integers(1, 5), st.integers(0, BLOCK_TOKENS - 1), st.sampled_from([0, 1, 1, 6])
    ),
    min_size=1,
    max_size=4,
)
"""Of each: a branch, how many of its blocks, tokens behind them, and tokens of the answer."""

_numbers = itertools.count()


def at_once() -> None:
    pass


def take_long() -> None:
    """As a device does. Nobody waits for it to be over: the next step may begin before, and must not write."""
    time.sleep(0.004)


class Machine(RuleBasedStateMachine):
    """What a rule may do must not depend on how far threads have come, so those that can't do anything do nothing."""

    ranks = 1
    page_groups = 1
    device: str | None = None

    def __init__(self, node: LivingNode, hits: list[int]) -> None:
        """`hits`: how many requests loaded something, for each example; where there is a pool, how many blocks came
        from it."""
        super().__init__()
        self.node = node
        self.hits = hits
        self.held = ExitStack()
        self.is_held = False
        self.faults = 0
        self.prompts: list[list[int]] = []
        self.overtaking = OvertakingCopies()

    @initialize(has_prefix_cache=st.booleans(), are_copies_slow=st.booleans())
    def start(self, *, has_prefix_cache: bool, are_copies_slow: bool) -> None:
        self.engine = PagedEngine(
            self.node,
            weights=f"machine {next(_numbers)}",
            ranks=self.ranks,
            page_groups=self.page_groups,
            num_pages=NUM_PAGES,
            has_prefix_cache=has_prefix_cache,
            device=self.device,
            carry=self.overtaking,
        )
        self.before_read = take_long if are_copies_slow else at_once
        for pages in self.engine.kit.pages:
            pages.before_read = self.before_read

    # ---- requests

    def add(self, branch: str, blocks: int, tail: int, answer: int) -> None:
        prompt = [10 * int(digit) + offset for digit in branch[:blocks] for offset in range(BLOCK_TOKENS)]
        prompt += [70 + offset for offset in range(tail)]
        self.prompts.append(prompt)
        self.engine.add(prompt, answer)

    @rule(requests=REQUESTS, budget=st.integers(6, 24), count=st.integers(1, 4), waits=st.booleans())
    def serve(self, requests: list[tuple[str, int, int, int]], budget: int, count: int, *, waits: bool) -> None:
        for request in requests:
            self.add(*request)
        self.step(budget, count, waits=waits)

    @rule(requests=REQUESTS)
    def serve_to_the_end(self, requests: list[tuple[str, int, int, int]]) -> None:
        self.let_go()
        for request in requests:
            self.add(*request)
        self.engine.run_until_idle()

    @rule(budget=st.integers(1, 24), count=st.integers(1, 4), waits=st.booleans())
    def step(self, budget: int, count: int, *, waits: bool) -> None:
        for _ in range(count):
            self.engine.step(budget=budget, waits_for_stores=waits and not self.is_held)

    @rule(choice=st.integers(0, 99))
    def abort(self, choice: int) -> None:
        there = [one for one in [*self.engine.running, *self.engine.waiting] if not one.is_aborted]
        if there:
            self.engine.abort(there[choice % len(there)])

    @rule(choice=st.integers(0, 99))
    def preempt(self, choice: int) -> None:
        if self.engine.running:
            self.engine.preempt(self.engine.running[choice % len(self.engine.running)])

    # ---- the engine

    @rule()
    def empty_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule()
    def change_weights(self) -> None:
        if self.engine.may_be_emptied:
            self.engine.change_weights()

    @rule(rank=st.integers(0, 1), reads=st.booleans())
    def break_a_copy(self, rank: int, *, reads: bool) -> None:
        pages = self.engine.kit.pages[rank % self.ranks]

        def fail() -> None:
            pages.before_read, pages.before_write = self.before_read, at_once
            raise OSError("a fault to order")

        if reads:
            pages.before_read = fail
        else:
            pages.before_write = fail
        self.faults += 1

    # ---- the node

    @precondition(lambda self: not self.is_held)
    @rule(kind=st.sampled_from([Acquire, Reserve, Commit, Release]))
    def hold_up(self, kind: type[WireRequest]) -> None:
        self.held.enter_context(self.node.keep_back(kind))
        self.is_held = True

    @rule()
    def let_go(self) -> None:
        self.held.close()
        self.is_held = False

    @rule()
    def let_the_deadline_pass(self) -> None:
        self.engine.kit.clock.skip(61)

    @rule(choice=st.integers(0, 99))
    def revoke(self, choice: int) -> None:
        offsets = self.node.leased_offsets()
        if offsets:
            self.node.revoke(offsets[choice % len(offsets)])

    @precondition(lambda self: not self.is_held)
    @rule()
    def restart_node(self) -> None:
        self.node.restart_front()

    def teardown(self) -> None:
        self.held.close()
        try:
            self.engine.run_until_idle()
            self.node.wait_until_nothing_is_held()
            assert not self.engine.kit.fence.faults
            assert sum(self.engine.kit.worker_fence.faults.values()) <= self.faults
            for prompt in self.prompts[-3:]:
                for rank in range(self.ranks):
                    count_stored(self.node, self.engine.spec, prompt, rank=rank, page_groups=self.page_groups)
            self.hits.append(self.count_hits())
        finally:
            self.engine.close()
            self.overtaking.close()

    def count_hits(self) -> int:
        return self.engine.kit.scheduler.counts.hit_requests


class WindowMachine(Machine):
    page_groups = 2


class DeviceMachine(Machine):
    """The node has a pool whose copies overtake each other, as the engine's do; its process dies at any moment."""

    page_groups = 2
    device = "cpu"

    @precondition(lambda self: not self.is_held)
    @rule()
    def kill_pool(self) -> None:
        self.node.kill_pool()

    def count_hits(self) -> int:
        return sum(worker.take_counts().device_loaded_blocks for worker in self.engine.kit.workers)


class RanksMachine(Machine):
    ranks = 2


@pytest.mark.timeout(0 if IS_LONG else 600)
@pytest.mark.parametrize("machine", [Machine, WindowMachine, RanksMachine, DeviceMachine])
@pytest.mark.scenario(
    "B024",
    then="no page of an engine that was not written is ever computed with",
)
def test_an_engine_with_a_cache_computes_with_right_bytes_whatever_happens(
    machine: type[Machine], runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.connector.worker.STORE_PATIENCE_SECONDS", 0.002)
    with tempfile.TemporaryDirectory(dir=runtime_dir) as directory:
        pool_bytes = NODE_BLOCKS * 4096 if machine.device else 0
        node = LivingNode(Path(directory), host_bytes=NODE_BLOCKS * 4096, slab_bytes=8 * 4096, pool_bytes=pool_bytes)
        hits: list[int] = []
        try:
            run_state_machine_as_test(partial(machine, node, hits), settings=SETTINGS)  # type: ignore[arg-type]
        finally:
            node.close()
    assert sum(hits) > 0, "nothing was tried"
