"""The worker's side: moves blocks between the engine's pages and the node's slots, in two threads of its own.

When pages may be touched:

- A page that is stored from holds its block until the engine computes its next step, whatever becomes of the request in
  between (it ends, is aborted, preempted, the engine's own prefix cache is emptied): pages that become free are written
  to by a later step at the earliest. So `begin_step`, called before a step computes or loads anything, waits for the
  copies that have begun, and gives up those that have not. What was given up is never published.
- A page that is loaded into belongs to its request until this side has said that the load is over, for the engine keeps
  it that long even if the request is gone.

The request never waits for a store: what is computed is answered while the copy runs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tierkv.client import Client, DevicePages, DevicePool, Group
from tierkv.core.identity import Identity
from tierkv.core.reasons import Reason
from tierkv.device.layouts import PagedLayout
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import (
    NO_PAGE,
    GroupSpec,
    LoadJob,
    NotStored,
    Pages,
    Plan,
    Report,
    SealJob,
    Stored,
    StoreJob,
)
from tierkv.integrations.connector.threads import start_threads
from tierkv.integrations.connector.transfer import Given, load_blocks, open_group, store_blocks

STORE_PATIENCE_SECONDS = 0.05
"""So long a step waits for stores that have not begun to copy. A node that answers needs a hundredth of it."""
STORE_DEADLINE_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""How often the session is looked at while there is nothing to store."""


class PageStore(Protocol):
    """The engine's pages. Both move whole blocks; `rows` is uint8 [n, block_bytes], `pages` holds n pages for each page
    group. They return when the copy has completed, seen from the host."""

    def read_pages(self, pages: Pages, rows: np.ndarray) -> None:
        """Pages into rows."""

    def write_pages(self, rows: np.ndarray, pages: Pages) -> None:
        """Rows into pages; a page group's part of a block is left out where it has NO_PAGE."""


@dataclass(frozen=True, slots=True)
class PagesOnDevice:
    """Where the pages of a PageStore lie on a device whose pool the node may have: `device` as `Client.map_device`
    takes it, the layout of each page group, and what `computed` tells to wait for before they are touched: a torch
    event, or nothing."""

    device: str
    layouts: tuple[PagedLayout, ...]
    computed: Callable[[], object] = lambda: None


class _Copying:
    """A store's copies out of the engine's pages: begun by a thread, or given up by the step, whichever comes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_copying = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def begin(self) -> bool:
        """Whether the pages may be looked at, until `pause` or `end`."""
        with self._changed:
            self._is_copying = not self._is_over
            return self._is_copying

    def pause(self) -> None:
        with self._changed:
            self._is_copying = False
            self._changed.notify_all()

    def end(self) -> None:
        """The pages are not looked at any more."""
        with self._changed:
            self._is_copying, self._is_over = False, True
            self._changed.notify_all()

    def settle(self, until: float) -> None:
        """Return when the pages are not looked at any more, and never will be: what has not begun by `until` is given
        up; what has begun is a copy in memory, which ends."""
        with self._changed:
            while not self._is_over:
                left = until - time.monotonic()
                if left <= 0 and not self._is_copying:
                    self._is_over = True
                    return
                self._changed.wait(left if left > 0 else None)


@dataclass(slots=True, kw_only=True)
class WorkerCounts:
    """Since the last look. Seconds are of this side's threads, not of the engine; `waited_seconds` is what steps waited
    for copies."""

    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    failed_blocks: int = 0
    device_loaded_blocks: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    device_stored_blocks: int = 0
    store_seconds: float = 0.0
    waited_seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class Finished:
    """Requests whose load is over, and those of them where it failed. Where it is known which pages of the first page
    group were not filled, `failed_pages` has them; never none."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_pages: dict[str, tuple[int, ...]] = field(default_factory=dict)


class PrefixWorker:
    """One rank. Its calls come from the engine's own thread, in this order for each step: `begin_step`, `end_step`,
    `take_finished`, `take_report`."""

    def __init__(
        self,
        client: Client,
        pages: PageStore,
        fence: Fence,
        *,
        rank: int = 0,
        check: Callable[[Identity], None] = lambda identity: None,
        on_device: PagesOnDevice | None = None,
    ) -> None:
        """`check` raises where an identity that the scheduler tells is not what this worker's pages hold. `on_device`:
        copies go between pages and a pool where there is one."""
        self.rank = rank
        self._check = check
        self._client = client
        self._pages = pages
        self._fence = fence
        self._on_device = on_device
        self._pool: DevicePool | None = None  # once it was asked for
        self._groups: dict[int, _KnownGroup] = {}
        self._lock = threading.Lock()
        self._finished = Finished()
        self._counts = WorkerCounts()
        self._stored: list[Stored] = []
        self._not_stored: list[NotStored] = []
        self._failed_loads: set[str] = set()
        self._token: bytes | None = None  # as it is now
        self._told: bytes | None = None  # as the scheduler knows it
        self._copies: list[_Copying] = []
        self._look_at = 0.0
        self._looking: Future[None] | None = None
        self._loader = start_threads(1, "tierkv-load")
        self._storer = start_threads(1, "tierkv-store")
        self._looker = start_threads(1, "tierkv-session")
        if on_device is not None:  # ahead of the first request, whose blocks shall go there
            self._look_for_session()

    # ---- a step

    def begin_step(self, plan: Plan) -> None:
        """Before the step computes. Loads begin, and run while it computes; in an idle step they are over when this
        returns."""
        self._settle()
        self._look_for_session()
        self._groups.update({number: _KnownGroup(spec=spec) for number, spec in plan.groups.items()})
        with self._lock:
            self._finished.requests.update(plan.broken_loads)
            self._finished.failed.update(plan.broken_loads)
            self._failed_loads.update(plan.broken_loads)
        for load in plan.loads:
            group = self._groups.get(load.group)
            if plan.is_idle:
                self._load(load, group)
            else:
                self._loader.submit(self._load, load, group)

    def end_step(self, plan: Plan) -> None:
        """Behind the step's computing, which has completed as far as `PageStore.read_pages` needs it."""
        for store in plan.stores:
            copying = _Copying()
            self._copies.append(copying)
            self._storer.submit(self._store, store, self._groups.get(store.group), copying)
        for seal in plan.seals:
            self._storer.submit(self._seal, seal, self._groups.get(seal.group))
        for number in plan.dropped_groups:
            self._groups.pop(number, None)

    def take_finished(self) -> Finished:
        """Loads that ended since the last look."""
        with self._lock:
            finished, self._finished = self._finished, Finished()
        return finished

    def take_report(self) -> Report | None:
        """What the scheduler's process is to be told; None: nothing new."""
        with self._lock:
            token, self._told = (self._token, self._token) if self._token != self._told else (None, self._told)
            stored, self._stored = tuple(self._stored), []
            not_stored, self._not_stored = tuple(self._not_stored), []
            failed, self._failed_loads = frozenset(self._failed_loads), set()
        if token is None and not stored and not not_stored and not failed:
            return None
        tokens = {} if token is None else {self.rank: token}
        return Report(tokens=tokens, stored=stored, not_stored=not_stored, failed_loads=failed)

    def take_counts(self) -> WorkerCounts:
        with self._lock:
            counts, self._counts = self._counts, WorkerCounts()
        return counts

    def close(self) -> None:
        """Ends what was begun; nothing looks at the engine's pages any more when this returns."""
        self._settle()
        for threads in (self._loader, self._storer, self._looker):
            threads.shutdown(wait=True, cancel_futures=True)

    def _look_for_session(self) -> None:
        """Begun again when the last look is over, which takes long while the node does not answer."""
        now = time.monotonic()
        if now >= self._look_at and (self._looking is None or self._looking.done()):
            self._look_at = now + LOOK_SECONDS
            self._looking = self._looker.submit(self._look)

    def _settle(self) -> None:
        copies, self._copies = self._copies, []
        if not copies:
            return
        started = time.monotonic()
        for copying in copies:
            copying.settle(started + STORE_PATIENCE_SECONDS)
        with self._lock:
            self._counts.waited_seconds += time.monotonic() - started

    # ---- in threads of ours

    def _load(self, job: LoadJob, known: _KnownGroup | None) -> None:
        started = time.monotonic()
        loaded = self._fence.run("loading", lambda: self._load_blocks(job, self._open(known)), 0)
        with self._lock:
            self._counts.loads += 1
            self._counts.loaded_blocks += loaded
            self._counts.failed_blocks += job.blocks - loaded
            self._counts.load_seconds += time.monotonic() - started
            if loaded < job.blocks:
                self._failed_loads.add(job.request)
                self._finished.failed.add(job.request)
                if pages := tuple(page for page in job.pages[0][loaded:] if page != NO_PAGE):
                    self._finished.failed_pages[job.request] = pages
            self._finished.requests.add(job.request)

    def _load_blocks(self, job: LoadJob, group: Group) -> int:
        """How many of the job's blocks, from its first, are in their pages now."""
        held = job.parts[self.rank]
        with group.hold(job.grant, held.token, held.part, keys=job.keys) as lease:
            found = load_blocks(lease, self._moving(job))
        self._count_reason(found.reason)
        loaded = min(max(0, found.blocks - job.first_block), job.blocks)
        with self._lock:
            self._counts.loaded_bytes += loaded * group.block_bytes
            self._counts.device_loaded_blocks += min(loaded, found.device_blocks)
        return loaded

    def _store(self, job: StoreJob, known: _KnownGroup | None, copying: _Copying) -> None:
        started = time.monotonic()
        problem: _Problem | None = _Problem(None)
        if not copying.is_over:  # else the node need not be asked: the engine has its pages back
            broken: _Problem | None = _Problem(Reason.WIRE_ERROR)
            problem = self._fence.run("storing", lambda: self._store_blocks(job, self._open(known), copying), broken)
        copying.end()
        with self._lock:
            self._counts.store_seconds += time.monotonic() - started
            if problem is None:
                self._stored.append(
                    Stored(rank=self.rank, request=job.request, first_block=job.first_block, blocks=job.blocks)
                )
            else:
                self._not_stored.append(
                    NotStored(request=job.request, first_block=job.first_block, reason=problem.reason)
                )

    def _store_blocks(self, job: StoreJob, group: Group, copying: _Copying) -> _Problem | None:
        """None when the node has all blocks of the job."""
        given = store_blocks(
            group,
            self._moving(job),
            keys=job.keys,
            first_block=job.first_block,
            tokens=job.tokens,
            extras=job.extras,
            deadline_seconds=STORE_DEADLINE_SECONDS,
            access=copying,
            device=self._pool,
        )
        self._count_stored(given, group.block_bytes)
        if given.is_whole:
            return None
        self._count_reason(given.reason)
        return _Problem(given.reason)

    def _moving(self, job: LoadJob | StoreJob) -> _PagesOf | DevicePages:
        """The job's pages as a destination and a source. Which memory their blocks come from is the client's affair."""
        through_host = _PagesOf(self._pages, job)
        if self._on_device is None or self._pool is None:
            return through_host
        return DevicePages(
            pool=self._pool,
            layouts=self._on_device.layouts,
            pages=job.pages,
            host=through_host,
            first_block=job.first_block,
            after=self._on_device.computed(),
        )

    def _count_stored(self, given: Given, block_bytes: int) -> None:
        with self._lock:
            self._counts.stored_blocks += given.stored_blocks
            self._counts.stored_bytes += given.stored_blocks * block_bytes
            self._counts.device_stored_blocks += given.device_blocks

    def _seal(self, job: SealJob, known: _KnownGroup | None) -> None:
        self._fence.run("sealing", lambda: self._open(known).seal(keys=job.keys), None)

    def _look(self) -> None:
        """Open a session if there is none, map the pool if there is one, and remember the session's token: once that
        is told, leases have slots in the pool."""
        if self._on_device is not None:
            device = self._on_device.device
            self._pool = self._fence.run("mapping a pool", lambda: self._client.map_device(device), None)
        token = self._fence.run("opening a session", self._client.session_token, b"")
        with self._lock:
            self._token = token

    def _open(self, known: _KnownGroup | None) -> Group:
        if known is None:
            raise LookupError("a job of a group that no plan has told")
        if known.group is None:
            self._check(known.spec.identity)
            known.group = open_group(self._client, known.spec, rank=self.rank)
        return known.group

    def _count_reason(self, reason: Reason | None) -> None:
        if reason is not None:
            with self._lock:
                self._counts.reasons[reason] += 1


@dataclass(slots=True, kw_only=True)
class _KnownGroup:
    """Jobs keep what they need of it: it may be dropped by a later plan while they wait for their turn."""

    spec: GroupSpec
    group: Group | None = None  # once it was opened, which two threads may do at once


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why blocks were not stored; None: the engine wanted its pages back."""

    reason: Reason | None


class _PagesOf:
    """The pages that a job is about, by the numbers of their blocks."""

    def __init__(self, pages: PageStore, job: LoadJob | StoreJob) -> None:
        self._pages = pages
        self._job = job

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        """Those blocks of a lease that have a page here."""
        job = self._job
        begin = max(first_block, job.first_block)
        end = min(first_block + len(blocks), job.first_block + job.blocks)
        if begin < end:
            rows = blocks[begin - first_block : end - first_block]
            self._pages.write_pages(rows, _part(job.pages, begin - job.first_block, end - job.first_block))

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        begin = first_block - self._job.first_block
        self._pages.read_pages(_part(self._job.pages, begin, begin + len(blocks)), blocks)


def _part(pages: Pages, begin: int, end: int) -> Pages:
    return tuple(group[begin:end] for group in pages)
