"""An engine in small: pages in an array, whose bytes tell which tokens of which model they are made from."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.client.fake_node import FakeNode
from tests.integrations.connector.living_node import LivingNode, wait_for
from tierkv.client import Client, connect
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.device.cpu import Carry, CpuBackend, at_once
from tierkv.device.layouts import PagedLayout
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import NO_PAGE, GroupSpec, Pages, Plan
from tierkv.integrations.connector.scheduler import PrefixScheduler, Prompt, Scheduled, SchedulerSettings
from tierkv.integrations.connector.worker import PagesOnDevice, PrefixWorker, WorkerCounts

BLOCK_TOKENS = 4
PAGE_BYTES = 2048
POISON = 0xA5


def make_spec(*, ranks: int = 1, page_groups: int = 1, weights: str = "w", salt: str = "") -> GroupSpec:
    layout = Layout(
        dtype="u8",
        block_bytes=(PAGE_BYTES,) * page_groups,
        axes="byte",
        block_tokens=BLOCK_TOKENS,
        engine="engine in small",
    )
    parallel = Parallel(tensor=ranks, shards=ranks)
    fingerprint = hashlib.sha256(weights.encode()).hexdigest()
    return GroupSpec(
        identity=Identity(weights=fingerprint, config="c", layout=layout, parallel=parallel, salt=salt), model_name="m"
    )


def page_of(spec: GroupSpec, tokens: Sequence[int], block: int, *, group: int = 0, rank: int = 0) -> np.ndarray:
    """What this model computes for a block: it depends on all tokens up to the block's end."""
    prefix = ",".join(map(str, tokens[: (block + 1) * BLOCK_TOKENS]))
    story = f"{spec.identity.group_key().hex()} {rank} {group} {prefix}"
    return np.frombuffer(hashlib.shake_128(story.encode()).digest(PAGE_BYTES), np.uint8)


class ArrayPages:
    """The pages of one rank, [page group][page]. A test may have a copy wait, or fail."""

    def __init__(self, num_pages: int, page_groups: int = 1) -> None:
        self.memory = np.full((page_groups, num_pages, PAGE_BYTES), POISON, np.uint8)
        self.reads = 0
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def read_pages(self, pages: Pages, rows: np.ndarray) -> None:
        self.reads += 1
        self.before_read()
        for group, numbers in enumerate(pages):
            for row, page in zip(rows, numbers, strict=True):
                assert page != NO_PAGE, "a block that lacks a page is stored"
                row[group * PAGE_BYTES : (group + 1) * PAGE_BYTES] = self.memory[group, page]

    def write_pages(self, rows: np.ndarray, pages: Pages) -> None:
        self.before_write()
        for group, numbers in enumerate(pages):
            for row, page in zip(rows, numbers, strict=True):
                if page != NO_PAGE:
                    self.memory[group, page] = row[group * PAGE_BYTES : (group + 1) * PAGE_BYTES]

    def on_device(self, device: str) -> PagesOnDevice:
        """The same pages as a device's, whose copies a test can have wait as well."""
        return PagesOnDevice(device, tuple(PagedLayout.of([group]) for group in self.memory))


class Clock:
    """Time that passes by itself, and that a test can put forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def skip(self, seconds: float) -> None:
        self._ahead += seconds


@dataclass
class Gate:
    """Something that waits until a test lets it go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Engine:
    """One scheduler's side and its workers, driven by hand. A request's block i lies on page `first_page + i`."""

    def __init__(
        self,
        node: LivingNode | FakeNode,
        *,
        ranks: int = 1,
        page_groups: int = 1,
        num_pages: int = 64,
        load_deadline_seconds: float = 60.0,
        patience_seconds: float = 0.0,
        weights: str = "w",
        device: str | None = None,
        carry: Carry = at_once,
    ) -> None:
        """With `device` blocks are copied between pages and that pool of the node, as `carry` does it."""
        self.node = node
        self.ranks = ranks
        self.spec = make_spec(ranks=ranks, page_groups=page_groups, weights=weights)
        self.clock = Clock()
        self.fence, self.worker_fence = Fence(), Fence()
        self._clients = [connect(node.directory, timeout_seconds=20) for _ in range(ranks + 1)]
        self.client = self._clients[0]
        if device is not None:
            for client in self._clients:
                client._state.pool(device)._open_backend = lambda name: CpuBackend(carry)
        self.scheduler = PrefixScheduler(
            self.client,
            SchedulerSettings(
                block_tokens=BLOCK_TOKENS,
                ranks=ranks,
                load_deadline_seconds=load_deadline_seconds,
                patience_seconds=patience_seconds,
                uses_pools=device is not None,
            ),
            self.fence,
            clock=self.clock,
        )
        self.pages = [ArrayPages(num_pages, page_groups) for _ in range(ranks)]
        self.workers = [
            PrefixWorker(
                client,
                pages,
                self.worker_fence,
                rank=rank,
                on_device=None if device is None else pages.on_device(device),
            )
            for rank, (client, pages) in enumerate(zip(self._clients[1:], self.pages, strict=True))
        ]
        self.counts = WorkerCounts()
        self.events: list[tuple[str, int, int]] = []
        self.plan = Plan()
        self.tokens: dict[str, list[int]] = {}
        self.ended_loads: set[str] = set()
        self.failed_loads: set[str] = set()
        self.failed_pages: dict[str, set[int]] = {}
        self._loads_left: dict[str, int] = {}

    def worker_client(self, rank: int = 0) -> Client:
        return self._clients[1 + rank]

    # ---- the scheduler's side

    def add(self, request: str, tokens: Sequence[int], *, loads: bool = True, spec: GroupSpec | None = None) -> None:
        known = self.tokens[request] = list(tokens)
        self.scheduler.add(
            Prompt(request=request, spec=spec or self.spec, tokens=lambda begin, end: known[begin:end], loads=loads)
        )

    def matched(self, request: str, computed: int = 0) -> int | None:
        return self.scheduler.matched(request, computed, len(self.tokens[request]))

    def wait_matched(self, request: str, computed: int = 0) -> int:
        """As an engine does that has nothing else to do: steps that compute nothing, until the answer is there."""
        answers: list[int | None] = []

        def is_answered() -> bool:
            answers.append(self.matched(request, computed))
            if answers[-1] is None:
                self.step(())
            return answers[-1] is not None

        wait_for(is_answered, f"an answer about {request}")
        assert answers[-1] is not None
        return answers[-1]

    def allot(self, request: str, tokens: int, *, first_page: int = 0) -> None:
        self.scheduler.allotted(request, tokens, lambda first, end: self.places(first, end, first_page))

    def places(self, first: int, end: int, first_page: int = 0) -> Pages:
        return (tuple(range(first_page + first, first_page + end)),) * self.pages[0].memory.shape[0]

    # ---- a step

    def begin(self, *scheduled: Scheduled, is_idle: bool | None = None) -> Plan:
        """Plan a step, and have the workers begin it."""
        self.plan = self.scheduler.step(scheduled, is_idle=not scheduled if is_idle is None else is_idle)
        for worker in self.workers:
            worker.begin_step(self.plan)
        return self.plan

    def end(self) -> None:
        """What the workers tell behind the step's computing."""
        for worker in self.workers:
            worker.end_step(self.plan)
        self.hear()

    def hear(self) -> None:
        ended = set()
        for worker in self.workers:
            finished = worker.take_finished()
            self.failed_loads |= finished.failed
            for request, pages in finished.failed_pages.items():
                self.failed_pages.setdefault(request, set()).update(pages)
            for request in finished.requests:
                left = self._loads_left.get(request, self.ranks) - 1
                self._loads_left[request] = left
                if not left:
                    del self._loads_left[request]
                    ended.add(request)
        reports = [report for worker in self.workers if (report := worker.take_report()) is not None]
        for report in reports[1:]:
            reports[0] = reports[0].merge(report)
        for report in reports[:1]:
            self.events += self.scheduler.report(report)
        self.scheduler.loaded(ended)
        self.ended_loads |= ended

    def step(self, scheduled: Sequence[Scheduled], *, is_idle: bool | None = None) -> Plan:
        plan = self.begin(*scheduled, is_idle=is_idle)
        self.end()
        return plan

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Steps without computing, until it is so."""

        def is_so() -> bool:
            self.step(())
            return condition()

        wait_for(is_so, what)

    def introduce(self) -> None:
        """Until the workers' sessions are known."""
        self.until(lambda: len(self.scheduler._tokens) == self.ranks, "the workers' sessions are known")

    # ---- whole requests

    def compute(self, request: str, first: int, end: int, *, first_page: int = 0) -> None:
        """The KV of blocks [first, end), on all ranks."""
        for rank, pages in enumerate(self.pages):
            for group, memory in enumerate(pages.memory):
                for block in range(first, end):
                    memory[first_page + block] = page_of(self.spec, self.tokens[request], block, group=group, rank=rank)

    def scheduled(self, request: str, *, computed: int | None = None, first_page: int = 0) -> Scheduled:
        known = len(self.tokens[request])
        return Scheduled(
            request=request,
            computed_tokens=known if computed is None else computed,
            known_tokens=known,
            pages=lambda first, end: self.places(first, end, first_page),
        )

    def run(self, request: str, tokens: Sequence[int], *, first_page: int = 0) -> None:
        """A request that is computed whole, stored and finished."""
        self.add(request, tokens, loads=False)
        self.allot(request, 0)
        plan = self.begin(self.scheduled(request, first_page=first_page))
        self.compute(request, 0, len(tokens) // BLOCK_TOKENS, first_page=first_page)
        self.end()
        wanted = {(request, job.first_block, job.blocks) for job in plan.stores}
        wait_for(lambda: self._hears(wanted), f"{request} is stored")
        self.scheduler.finished(request)
        self.step(())

    def _hears(self, wanted: set[tuple[str, int, int]]) -> bool:
        """Without a step: one would give up stores that have not begun."""
        self.hear()
        return wanted <= set(self.events)

    def is_right(self, request: str, first: int, end: int, *, first_page: int = 0) -> bool:
        """Whether the pages hold what this model computes for these blocks."""
        return all(
            np.array_equal(
                memory[first_page + block],
                page_of(self.spec, self.tokens[request], block, group=group, rank=rank),
            )
            for rank, pages in enumerate(self.pages)
            for group, memory in enumerate(pages.memory)
            for block in range(first, end)
        )

    def poison(self) -> None:
        for pages in self.pages:
            pages.memory[:] = POISON

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()
        for client in self._clients:
            client.close()


def count_stored(
    node: LivingNode, spec: GroupSpec, tokens: Sequence[int], *, rank: int = 0, page_groups: int = 1
) -> int:
    """How many blocks of these tokens another process of this engine finds, each of which must be right."""
    blocks = len(tokens) // BLOCK_TOKENS
    with connect(node.directory, timeout_seconds=20) as client:
        group = client.open(spec.identity, rank=rank)
        rows = np.full((blocks, page_groups * PAGE_BYTES), POISON, np.uint8)
        with group.acquire(tokens) as lease:
            valid = lease.copy_into(rows)
        for block in range(valid):
            right = [page_of(spec, tokens, block, group=group, rank=rank) for group in range(page_groups)]
            assert np.array_equal(rows[block], np.concatenate(right)), f"block {block} holds other bytes"
        return valid
