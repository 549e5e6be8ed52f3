"""An engine that pages its KV, without a model: requests compete for few pages, prompts are computed in chunks, answers
token by token; requests are preempted, aborted and finished, and an own prefix cache keeps what it can.

Every page's bytes follow from the weights and from all tokens up to its end. Before anything is computed, every page
that it would read is looked at: one wrong byte, wherever it came from, ends the test.

The second page group, where there is one, is a sliding window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.integrations.connector.kit import BLOCK_TOKENS, POISON, Engine, make_spec, page_of
from tests.integrations.connector.living_node import LivingNode, wait_for
from tierkv.device.cpu import Carry, at_once
from tierkv.integrations.connector.plan import NO_PAGE, GroupSpec, Pages
from tierkv.integrations.connector.scheduler import Scheduled

WINDOW_TOKENS = 6

Key = tuple[int, ...]


class Pool:
    """The pages of one page group. A page that nobody uses keeps what it holds until it is taken for something else."""

    def __init__(self, num_pages: int, *, keeps: bool) -> None:
        self._keeps = keeps
        self._users = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(num_pages))
        self._cached: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._users[page] = 1
        return page

    def find(self, key: Key) -> int | None:
        return self._cached.get(key)

    def share(self, page: int) -> None:
        self._users[page] += 1
        self._free.pop(page, None)

    def give_back(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free[page] = None

    def keep(self, key: Key, page: int) -> None:
        if self._keeps and key not in self._cached and page not in self._keys:
            self._cached[key], self._keys[page] = page, key

    def clear(self) -> None:
        self._cached.clear()
        self._keys.clear()

    def _forget(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._cached[key]


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    max_tokens: int
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    is_loading: bool = False
    is_aborted: bool = False


class PagedEngine:
    def __init__(
        self,
        node: LivingNode,
        *,
        weights: str,
        ranks: int,
        page_groups: int,
        num_pages: int,
        has_prefix_cache: bool,
        device: str | None = None,
        carry: Carry = at_once,
    ) -> None:
        self._engine = Engine(
            node,
            ranks=ranks,
            page_groups=page_groups,
            num_pages=num_pages,
            weights=weights,
            device=device,
            carry=carry,
        )
        self._ranks, self._page_groups = ranks, page_groups
        self._pools = [Pool(num_pages, keeps=has_prefix_cache) for _ in range(page_groups)]
        self._generation = 0
        self._weights = weights
        self._spec = self._engine.spec
        self._names = 0
        self._fresh: list[tuple[int, int]] = []  # pages that this step writes to, and that hold what they held before
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.finished = 0
        self.loaded_tokens = 0
        self.expected_faults: set[str] = set()
        self._engine.introduce()

    @property
    def kit(self) -> Engine:
        return self._engine

    @property
    def spec(self) -> GroupSpec:
        return self._spec

    @property
    def may_be_emptied(self) -> bool:
        """Requests that wait may have pages: those that are being loaded, and those that were. They can't be preempted,
        and until they run an engine refuses to forget what it has computed."""
        return not any(request.tables for request in self.waiting)

    # ---- what is asked of an engine

    def add(self, prompt: list[int], answer: int) -> None:
        self._names += 1
        name = f"r{self._names}"
        self._engine.add(name, prompt, spec=self._spec)
        request = Request(name, self._engine.tokens[name], len(prompt) + answer)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        self._engine.scheduler.finished(request.name)
        if request.is_loading:
            request.is_aborted = True  # its pages stay until the load has ended
            return
        (self.running if request in self.running else self.waiting).remove(request)
        self._free(request)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.waiting.insert(0, request)

    def reset_prefix_cache(self) -> None:
        for request in list(reversed(self.running)):
            self.preempt(request)
        for pool in self._pools:
            pool.clear()

    def change_weights(self) -> None:
        """What was computed before is of no use any more, to anybody."""
        self.reset_prefix_cache()
        self._generation += 1
        self._spec = make_spec(
            ranks=self._ranks, page_groups=self._page_groups, weights=f"{self._weights} {self._generation}"
        )
        self._engine.scheduler.reset()

    # ---- a step

    def step(self, *, budget: int, waits_for_stores: bool) -> None:
        chunks = dict(self._schedule_running(budget))
        chunks |= dict(self._schedule_waiting(budget - sum(chunks.values())))
        if not chunks:
            self._unlock()
        plan = self._engine.begin(*(self._scheduled(request, count) for request, count in chunks.items()))
        for group, page in self._fresh:
            for pages in self._engine.pages:
                pages.memory[group, page] = POISON
        self._fresh.clear()
        for request, count in chunks.items():
            self._compute(request, count)
        self._engine.end()
        if waits_for_stores and plan.stores:
            for worker in self._engine.workers:
                worker._storer.submit(lambda: None).result(60)
            self._engine.hear()
        self._hear_of_loads()
        for request in chunks:
            self._sample(request)

    def _schedule_running(self, budget: int) -> Iterator[tuple[Request, int]]:
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            count = min(budget, len(request.tokens) - request.computed)
            while count and not self._extend(request, request.computed + count):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    count = 0
            if count:
                budget -= count
                yield request, count

    def _schedule_waiting(self, budget: int) -> Iterator[tuple[Request, int]]:
        for request in list(self.waiting):
            if request.is_loading or budget <= 0:
                continue
            if not request.computed:
                local = self._find_own(request)
                external = self._engine.scheduler.matched(request.name, local * BLOCK_TOKENS, len(request.tokens))
                if external is None:
                    continue
                assert external % BLOCK_TOKENS == 0
                assert local * BLOCK_TOKENS + external < len(request.tokens)
                count = 0 if external else min(budget, len(request.tokens) - local * BLOCK_TOKENS)
                if not self._admit(request, local, external, count):
                    continue
            else:
                external, count = 0, min(budget, len(request.tokens) - request.computed)
                if not self._extend(request, request.computed + count):
                    continue
            tables = request.tables
            self._engine.scheduler.allotted(
                request.name,
                external,
                lambda first, end, tables=tables: _cut(tables, first, end),  # type: ignore[misc]
            )
            if external:
                request.is_loading = True
                own = {(group, page) for group, table in enumerate(tables) for page in table}
                self._fresh = [place for place in self._fresh if place not in own]  # of who was preempted in this step
                self.loaded_tokens += external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            budget -= count
            yield request, count

    def _unlock(self) -> None:
        """Requests that were loaded, and have no pages to go on, are in each other's way: the last one begins anew."""
        stuck = [request for request in self.waiting if request.tables and not request.is_loading]
        if stuck and not self.running:
            self._free(stuck[-1])

    def _scheduled(self, request: Request, count: int) -> Scheduled:
        return Scheduled(
            request=request.name,
            computed_tokens=request.computed + count,
            known_tokens=len(request.tokens),
            pages=lambda first, end: _cut(request.tables, first, end),
        )

    def _compute(self, request: Request, count: int) -> None:
        """Reads all pages of what is computed already, and writes those of the blocks that are full now."""
        done = request.computed // BLOCK_TOKENS
        for group, rank, block, page in self._places(request, 0, done):
            found = self._engine.pages[rank].memory[group, page]
            if not np.array_equal(found, self._content(request, block, group, rank)):
                held = "poison" if (found == POISON).all() else "another block's bytes"
                raise AssertionError(f"{request.name} computes with {held} in block {block} of group {group}")
        request.computed += count
        full = request.computed // BLOCK_TOKENS
        for group, rank, block, page in self._places(request, done, full):
            self._engine.pages[rank].memory[group, page] = self._content(request, block, group, rank)
        self._keep(request, done, full)

    def _sample(self, request: Request) -> None:
        if request not in self.running or request.computed < len(request.tokens):
            return
        if len(request.tokens) < request.max_tokens:
            request.tokens.append(sum(request.tokens) % 3)
            return
        self._engine.scheduler.finished(request.name)
        self.running.remove(request)
        self._free(request)
        self.finished += 1

    def _hear_of_loads(self) -> None:
        ended, self._engine.ended_loads = self._engine.ended_loads, set()
        for request in [one for one in self.waiting if one.name in ended]:
            assert request.is_loading, "the end of a load that nobody waits for"
            self._end_load(request)

    def _end_load(self, request: Request) -> None:
        request.is_loading = False
        blocks = len(request.tables[0])
        has_failed = request.name in self._engine.failed_loads
        failed_pages = self._engine.failed_pages.pop(request.name, None)
        self._engine.failed_loads.discard(request.name)
        if has_failed and (self._page_groups > 1 or failed_pages is None):
            blocks = 0
        elif failed_pages is not None:
            blocks = next(index for index, page in enumerate(request.tables[0]) if page in failed_pages)
        if request.is_aborted:
            self.waiting.remove(request)
            self._free(request)
        elif not blocks:
            self._free(request)
        else:
            request.computed = blocks * BLOCK_TOKENS
            self._keep(request, 0, blocks)

    # ---- pages

    def _find_own(self, request: Request) -> int:
        """Blocks of the prompt that this engine's own prefix cache has, so that a token is left to compute."""
        for blocks in range((len(request.tokens) - 1) // BLOCK_TOKENS, 0, -1):
            wanted = [range(_outside(group, blocks * BLOCK_TOKENS), blocks) for group in range(self._page_groups)]
            keys = [[self._key(request, block) for block in needed] for needed in wanted]
            if all(pool.find(key) is not None for pool, some in zip(self._pools, keys, strict=True) for key in some):
                return blocks
        return 0

    def _admit(self, request: Request, local: int, external: int, count: int) -> bool:
        """Give it the pages of its own hit, of what is to be loaded, and of what it computes now; all or none."""
        assert not request.tables
        total = local * BLOCK_TOKENS + external
        for group, pool in enumerate(self._pools):
            table, begin = [NO_PAGE] * local, _outside(group, local * BLOCK_TOKENS)
            for block in range(begin, local):
                page = pool.find(self._key(request, block))
                assert page is not None
                pool.share(page)
                table[block] = page
            request.tables.append(table)
        request.computed = total
        if self._extend(request, total + count):
            return True
        self._free(request)
        return False

    def _extend(self, request: Request, tokens: int) -> bool:
        """Pages for so many tokens, or none more; pages outside of the window are given back."""
        needed = -(-tokens // BLOCK_TOKENS)
        for group, (pool, table) in enumerate(zip(self._pools, request.tables, strict=True)):
            outside = _outside(group, request.computed)
            for block in range(min(outside, len(table))):
                if table[block] != NO_PAGE:
                    pool.give_back(table[block])
                    table[block] = NO_PAGE
            if pool.num_free < needed - max(outside, len(table)):
                return False
        for group, (pool, table) in enumerate(zip(self._pools, request.tables, strict=True)):
            outside = _outside(group, request.computed)
            while len(table) < needed:
                is_outside = len(table) < outside
                table.append(NO_PAGE if is_outside else pool.take())
                if not is_outside and (len(table) - 1) * BLOCK_TOKENS >= request.computed:
                    self._fresh.append((group, table[-1]))
        return True

    def _free(self, request: Request) -> None:
        for pool, table in zip(self._pools, request.tables, strict=False):  # none while it waits for its first
            for page in reversed(table):
                if page != NO_PAGE:
                    pool.give_back(page)
        request.tables, request.computed = [], 0

    def _keep(self, request: Request, first: int, end: int) -> None:
        for pool, table in zip(self._pools, request.tables, strict=True):
            for block in range(first, end):
                if table[block] != NO_PAGE:
                    pool.keep(self._key(request, block), table[block])

    def _places(self, request: Request, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        for group, table in enumerate(request.tables):
            for block in range(first, end):
                if table[block] != NO_PAGE:
                    for rank in range(self._ranks):
                        yield group, rank, block, table[block]

    def _key(self, request: Request, block: int) -> Key:
        return tuple(request.tokens[: (block + 1) * BLOCK_TOKENS])

    def _content(self, request: Request, block: int, group: int, rank: int) -> np.ndarray:
        return page_of(self._spec, request.tokens, block, group=group, rank=rank)

    # ---- the end

    def run_until_idle(self) -> None:
        """No request hangs."""

        def is_idle() -> bool:
            self.step(budget=64, waits_for_stores=True)
            return not self.running and not self.waiting

        wait_for(is_idle, "every request is answered")

    def close(self) -> None:
        self._engine.close()


def _outside(group: int, computed: int) -> int:
    """How many blocks, from the first, no token behind `computed` ones looks at."""
    return 0 if group == 0 else max(0, computed - WINDOW_TOKENS + 1) // BLOCK_TOKENS


def _cut(tables: list[list[int]], first: int, end: int) -> Pages:
    return tuple(tuple(table[first:end]) for table in tables)
