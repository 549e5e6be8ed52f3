"""The scheduler's side: what is cached of each request's prompt, what is to be loaded and stored in the next step.

Nothing here waits for the node, but for at most PATIENCE_SECONDS when a request is first asked about while the engine
computes for others: threads ask, and the engine comes back for the answer. The one that asks is this process; the
grants are the workers', who copy.

    phase     `matched` says                      `allotted`                        `finished`
    NEW       asks -> ASKED; nothing to gain: 0;  -> RUNNING                        gone
              too many are open: None, and after
              LINE_SECONDS MISSED
    ASKED     None, until the answer or the       gives up -> RUNNING               gives up, gone: a lease that still
              deadline: GRANTED or MISSED                                           comes is given back
    GRANTED   what the lease covers; a holder's   > 0: load -> LOADING;             gives the lease back, gone
              session is over: 0 -> MISSED        0: gives it back -> RUNNING
    MISSED    0                                   -> RUNNING                        gone
    LOADING   0: the load has failed -> MISSED    0: it is loaded -> RUNNING        gone; the workers end the load
    RUNNING   the engine took its pages: as NEW   -> RUNNING                        sealed, gone

A request whose load has failed once is not asked about again. When a worker's session is another one, the node has
restarted: what was stored of running requests is offered again, from their first block.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from tierkv.client import HOLDERS, Client, Group, Lease
from tierkv.client.prompt import Extras
from tierkv.core.identity import Identity
from tierkv.core.reasons import DAMAGE, Reason
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import (
    NO_PAGE,
    GroupSpec,
    HeldPart,
    LoadJob,
    NotStored,
    Pages,
    Plan,
    Report,
    SealJob,
    Stored,
    StoreJob,
)
from tierkv.integrations.connector.prefix import Prefix
from tierkv.integrations.connector.threads import start_threads
from tierkv.integrations.connector.transfer import open_group
from tierkv.wire.messages import Holder

PATIENCE_SECONDS = 0.0006
"""So long the first questions of new requests may keep one step of the engine waiting: enough for what is in host
memory, while an answer that comes later costs the request that step. An engine that has nobody else to compute for
takes its next step at once, and need not wait."""
MOST_OPEN = 64
"""So many requests are asked about, or have a lease and wait for pages, at once: a lease keeps memory from all others,
and the engine asks for every request that waits, however long the queue."""
LINE_SECONDS = 60.0
"""So long a request stands in line before it goes without the cache. Those that are open wait for the engine's pages,
which it would have to wait for as well, so it loses nothing; unless something else keeps them."""
ASKING_THREADS = 16
HOLDER_SECONDS = 0.5
"""So long a request waits for the workers to tell their sessions, at the start and when the node was restarted."""
MOST_HALF_STORED = 4_096
"""Stores that some ranks have ended and others have not; of more the oldest are forgotten, and nobody hears of them."""
TRANSIENT = (None, Reason.NODE_AWAY, Reason.SESSION_GONE)
"""Why blocks were not stored that are worth offering again: there was no time, or the node has restarted."""
MOST_GROUPS = 256
"""So many are remembered beyond those in use: one for each salt and adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request as it enters. `tokens(begin, end)` gives ids of its tokens, those of the answer so far included.
    `extras` are the inputs of blocks besides tokens. `loads`: whether it may use what is cached."""

    request: str
    spec: GroupSpec
    tokens: Callable[[int, int], Sequence[int]]
    extras: Extras = field(default_factory=dict)
    loads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request that computes in this step. Behind it the KV of `computed_tokens` tokens is there; `known_tokens` of
    them, from the first, are final. `pages(first, end)`: see plan.Pages."""

    request: str
    computed_tokens: int
    known_tokens: int
    pages: Callable[[int, int], Pages]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """`ranks` are asked for together: an answer is what all of them have. `load_deadline_seconds` is the longest that a
    request waits for its blocks to come from NVMe. `uses_pools`: workers read in the pools of GPUs that they have
    mapped."""

    block_tokens: int
    ranks: int = 1
    load_deadline_seconds: float = 2.0
    patience_seconds: float = PATIENCE_SECONDS
    uses_pools: bool = False


class Phase(Enum):
    NEW = "new"
    ASKED = "asked"
    GRANTED = "granted"
    MISSED = "missed"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True, kw_only=True)
class Answer:
    """What asking has brought: a lease on `blocks`, the last `nvme_blocks` of which came from files, and how many
    blocks from token 0 the node has."""

    lease: Lease | None = None
    blocks: int = 0
    nvme_blocks: int = 0
    cached_blocks: int = 0
    tokens: Mapping[int, bytes] = field(default_factory=dict)
    reason: Reason | None = None


@dataclass(slots=True, kw_only=True)
class _State:
    prompt: Prompt
    group: int
    prefix: Prefix
    phase: Phase = Phase.NEW
    computed: int = 0  # blocks that the engine had itself when it was last asked
    nvme_blocks: int = 0
    line_until: float = 0.0  # when it has stood in line long enough; 0 while it doesn't
    until: float = 0.0  # when it has waited long enough for an answer
    holders_until: float = 0.0
    asking: Future[Answer] | None = None
    answer: Answer | None = None
    gave_up: bool = False  # a load failed
    is_outdated: bool = False  # computed with weights that may be others now


@dataclass(slots=True, kw_only=True)
class SchedulerCounts:
    """Since the start. `misses` are requests that got less than the node had, by reason; `seconds` is what all calls
    together took of the engine's time, for `requests` requests."""

    requests: int = 0
    asked: int = 0
    hit_requests: int = 0
    host_tokens: int = 0
    nvme_tokens: int = 0
    failed_loads: int = 0
    late_stores: int = 0
    seconds: float = 0.0
    misses: Counter[str] = field(default_factory=Counter)
    uncoded: Counter[str] = field(default_factory=Counter)


class PrefixScheduler:
    """Not thread-safe: the engine's scheduler is one thread."""

    def __init__(
        self,
        client: Client,
        settings: SchedulerSettings,
        fence: Fence,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = SchedulerCounts()
        self._client = client
        self._settings = settings
        self._fence = fence
        self._clock = clock
        self._threads = start_threads(ASKING_THREADS, "tierkv-ask")
        self._requests: dict[str, _State] = {}
        self._open: set[str] = set()  # those that are ASKED or GRANTED
        self._patience_left = settings.patience_seconds  # of this step
        self._groups = _Groups(client)
        self._tokens: dict[int, bytes] = {}  # of the sessions that copy, by rank
        self._loads: list[LoadJob] = []
        self._broken: list[str] = []
        self._loading: dict[str, Lease] = {}  # until all ranks have said that they are done
        self._failed_loads: set[str] = set()
        self._seals: list[SealJob] = []
        self._half_stored: dict[tuple[str, int, int], set[int]] = {}

    # ---- a request enters, and is asked about

    def add(self, prompt: Prompt) -> None:
        self.counts.requests += 1
        self._end(prompt.request)
        root, block_tokens = _root(prompt.spec.identity), self._settings.block_tokens
        prefix = Prefix(root, block_tokens, prompt.tokens, prompt.extras)
        self._requests[prompt.request] = _State(prompt=prompt, group=self._groups.take(prompt.spec), prefix=prefix)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    def matched(
        self, request: str, computed_tokens: int, num_tokens: int, *, others_compute: bool = True
    ) -> int | None:
        """How many tokens behind the first `computed_tokens` can be loaded, in whole blocks; at least one of all
        `num_tokens` is left to compute. None: not known yet, come again. The same answer however often it is asked.
        `others_compute`: the engine's step has something to compute without this request."""
        state = self._requests.get(request)
        if state is None or not state.prompt.loads:
            return 0
        state.computed = computed = self._blocks(computed_tokens)
        limit = state.prefix.loadable_blocks(num_tokens)
        if state.phase is Phase.LOADING:
            self._move(state, Phase.MISSED)
        if state.phase is Phase.RUNNING:
            self._move(state, Phase.MISSED if state.gave_up else Phase.NEW)
        if state.phase is Phase.GRANTED and state.answer is not None and state.answer.tokens != self._tokens:
            self._miss(state, Reason.SESSION_GONE)
        if state.phase is Phase.NEW:
            if limit <= computed:
                return 0
            if not self._ask(state, limit, self._patience_left if others_compute else 0.0):
                return None
        if state.phase is Phase.ASKED and not self._hear(state, limit):
            return None
        if state.phase is not Phase.GRANTED or state.answer is None:
            return 0
        return max(0, min(state.answer.blocks, limit) - computed) * self._settings.block_tokens

    def _ask(self, state: _State, limit: int, patience: float) -> bool:
        """Whether there is more to know now: False while it stands in line."""
        now, deadline = self._clock(), self._settings.load_deadline_seconds
        if len(self._open) >= MOST_OPEN:
            state.line_until = state.line_until or now + LINE_SECONDS
            return now >= state.line_until and self._miss(state, Reason.DEADLINE)
        keys = state.prefix.keys(limit)
        self.counts.asked += 1
        self._move(state, Phase.ASKED)
        state.until, state.holders_until = now + deadline, now + min(deadline, HOLDER_SECONDS)
        asking = self._send(state, keys)
        if patience > 0:
            started = time.monotonic()
            wait((asking,), patience)
            self._patience_left = max(0.0, self._patience_left - (time.monotonic() - started))
        return True

    def _move(self, state: _State, phase: Phase) -> None:
        state.phase = phase
        if phase in (Phase.ASKED, Phase.GRANTED):
            self._open.add(state.prompt.request)
        else:
            self._open.discard(state.prompt.request)
        state.line_until = 0.0

    def _send(self, state: _State, keys: bytes) -> Future[Answer]:
        tokens = dict(self._tokens)
        name = state.prompt.request
        state.asking = self._threads.submit(self._acquire, name, state.group, keys, tokens, state.until)
        return state.asking

    def _hear(self, state: _State, limit: int) -> bool:
        """Whether the question is settled."""
        asking, now = state.asking, self._clock()
        assert asking is not None
        if not asking.done():
            return now >= state.until and self._miss(state, Reason.DEADLINE)
        answer = self._fence.run("asking the node", asking.result, Answer(reason=Reason.WIRE_ERROR))
        if answer.reason is Reason.SESSION_GONE and answer.lease is None and now < state.holders_until:
            # A worker's session ended with the node's last incarnation, or is not known yet: a step tells the next one.
            if answer.tokens != self._tokens:
                self._send(state, state.prefix.keys(limit))
            return False
        state.asking = None
        state.prefix.found(answer.cached_blocks)
        if answer.reason in DAMAGE:
            state.prefix.lost(answer.blocks)
        if answer.lease is None:
            return self._miss(state, answer.reason)
        self._move(state, Phase.GRANTED)
        state.answer = answer
        if answer.reason is not None:
            self.counts.misses[answer.reason] += 1
        return True

    def _miss(self, state: _State, reason: Reason | None) -> bool:
        self._let_go(state)
        self._move(state, Phase.MISSED)
        if reason is not None:
            self.counts.misses[reason] += 1
        return True

    def _acquire(self, name: str, group: int, keys: bytes, tokens: Mapping[int, bytes], until: float) -> Answer:
        """In a thread of ours."""
        remaining = until - self._clock()
        if remaining <= 0:
            return Answer(reason=Reason.DEADLINE)
        if not all(tokens.values()) and not self._client.session_token():
            return Answer(reason=Reason.NODE_AWAY, tokens=tokens)
        if not all(tokens.values()) or len(tokens) < self._settings.ranks:
            return Answer(reason=Reason.SESSION_GONE, tokens=tokens)
        holders = tuple(Holder(rank, token) for rank, token in sorted(tokens.items()))
        opened = self._groups.open(group)
        lease = opened.acquire(
            keys=keys,
            deadline_seconds=remaining,
            holders=holders,
            name=name,
            device=HOLDERS if self._settings.uses_pools else None,
        )
        reason, cached_blocks = lease.reason, lease.cached_blocks
        if lease.blocks and {part.rank for part in lease.parts} == set(tokens):
            return Answer(
                lease=lease,
                blocks=lease.blocks,
                nvme_blocks=lease.nvme_blocks + lease.disk_blocks,
                cached_blocks=cached_blocks,
                tokens=tokens,
                reason=reason,
            )
        if lease.blocks:
            self._give_back(lease)
            reason = Reason.INCOMPLETE_RANKS
        return Answer(cached_blocks=cached_blocks, tokens=tokens, reason=reason)

    # ---- the engine has found room, or not

    def allotted(self, request: str, external_tokens: int, pages: Callable[[int, int], Pages]) -> None:
        """The engine has pages for the request, and wants `external_tokens` of what `matched` promised to be loaded,
        behind what it has itself. With 0: nothing to load, or it has been loaded.

        Once the engine wants a load it waits for its end: a load that can't be planned is planned to fail."""
        state = self._requests.get(request)
        planned = False
        if state is not None and state.phase is Phase.GRANTED and external_tokens > 0:
            planned = self._fence.run("planning a load", lambda: self._load(state, external_tokens, pages), False)
        if state is not None and not planned:
            self._let_go(state)
            self._move(state, Phase.RUNNING)
        if external_tokens > 0 and not planned:
            self._broken.append(request)

    def _load(self, state: _State, external_tokens: int, pages: Callable[[int, int], Pages]) -> bool:
        answer, blocks = state.answer, self._blocks(external_tokens)
        assert answer is not None
        assert answer.lease is not None
        first, end = state.computed, state.computed + blocks
        if blocks * self._settings.block_tokens != external_tokens or end > answer.blocks:
            raise ValueError(
                f"{external_tokens} tokens are to be loaded behind block {first}: these are no whole blocks of the "
                f"{answer.blocks} that were promised"
            )
        job = LoadJob(
            request=state.prompt.request,
            group=state.group,
            grant=answer.lease.grant,
            parts={part.rank: HeldPart(token=answer.tokens[part.rank], part=part) for part in answer.lease.parts},
            first_block=first,
            pages=pages(first, end),
            keys=b"" if state.prompt.spec.kv_shape is None else state.prefix.keys(answer.blocks),
        )
        self._loads.append(job)
        self._loading[state.prompt.request] = answer.lease
        state.answer = None
        self._move(state, Phase.LOADING)
        state.nvme_blocks = max(0, end - max(first, answer.blocks - answer.nvme_blocks))
        self.counts.hit_requests += 1
        self.counts.nvme_tokens += state.nvme_blocks * self._settings.block_tokens
        self.counts.host_tokens += (blocks - state.nvme_blocks) * self._settings.block_tokens
        return True

    def nvme_tokens(self, request: str) -> int:
        """How many of the tokens that are being loaded came from files; the others were in host memory."""
        state = self._requests.get(request)
        return 0 if state is None else state.nvme_blocks * self._settings.block_tokens

    # ---- a step

    def group_of(self, request: str) -> Group | None:
        """None for a request that goes without the cache, or whose group the node hasn't been asked for yet."""
        state = self._requests.get(request)
        return None if state is None else self._groups.opened(state.group)

    def is_due(self, request: str, tokens: int) -> bool:
        """Whether a step behind which the KV of the request's first `tokens` tokens is there has something to store, so
        that `step` is to be told of it. Most steps add a token or two to a block that is not full."""
        state = self._requests.get(request)
        return state is not None and tokens >= state.prefix.due_at

    def step(self, scheduled: Sequence[Scheduled], *, is_idle: bool) -> Plan:
        """What the workers are to do in this step."""
        self._patience_left = self._settings.patience_seconds
        if not (scheduled or self._loads or self._seals or self._broken or self._groups.has_news):
            return Plan(is_idle=is_idle)  # as in most steps
        stores = tuple(job for one in scheduled if (job := self._planned_store(one)) is not None)
        loads, self._loads = self._loads, []
        seals, self._seals = self._seals, []
        broken, self._broken = self._broken, []
        return Plan(
            groups=self._groups.untold(),
            dropped_groups=self._groups.dropped(),
            loads=tuple(loads),
            broken_loads=tuple(broken),
            stores=stores,
            seals=tuple(seals),
            is_idle=is_idle,
        )

    def _planned_store(self, one: Scheduled) -> StoreJob | None:
        state = self._requests.get(one.request)
        if state is None:
            return None
        return self._fence.run("planning a store", lambda: self._store(state, one), None)

    def _store(self, state: _State, one: Scheduled) -> StoreJob | None:
        prefix = state.prefix
        waiting = prefix.to_offer(min(one.computed_tokens, one.known_tokens))
        if not waiting or not all(self._tokens.values()):
            return None
        pages = one.pages(waiting.start, waiting.stop)
        first, end = waiting.start + _behind_gaps(pages), waiting.stop
        prefix.give(end)
        if first == end:
            return None
        return StoreJob(
            request=one.request,
            group=state.group,
            keys=prefix.keys(end),
            first_block=first,
            tokens=prefix.packed_tokens(first, end),
            extras=prefix.extras(first, end),
            pages=tuple(group[len(group) - (end - first) :] for group in pages),
        )

    def report(self, report: Report) -> list[tuple[str, int, int]]:
        """What the workers said. Returns (request, first block, blocks) of what all ranks have stored now."""
        self._note_sessions(report.tokens)
        for request in report.failed_loads - self._failed_loads:
            self.counts.failed_loads += 1
            self._failed_loads.add(request)
            if (state := self._requests.get(request)) is not None:
                state.gave_up = True
                state.prefix.lost(0)
        for stored in report.stored:
            if (state := self._requests.get(stored.request)) is not None:
                state.prefix.stored()
        for not_stored in report.not_stored:
            if not_stored.reason is None:
                self.counts.late_stores += 1
            if (state := self._requests.get(not_stored.request)) is not None:
                self._offer_again(state, not_stored)
        return [done for stored in report.stored if (done := self._count_ranks(stored)) is not None]

    def _note_sessions(self, tokens: Mapping[int, bytes]) -> None:
        """Behind another session there may be another node, or one that has lost what it had in memory."""
        is_another = any(self._tokens.get(rank, token) != token for rank, token in tokens.items())
        self._tokens.update(tokens)
        if is_another:
            for state in self._requests.values():
                if not state.is_outdated:
                    state.prefix.begin_again()

    def loaded(self, requests: Iterable[str]) -> None:
        """All ranks are done with the loads of these requests, whether they failed or not. Each rank has released its
        part; one that could not take it up at all has not, so what is left of a failed load is ended here."""
        for request in requests:
            lease = self._loading.pop(request, None)
            if lease is not None and request in self._failed_loads:
                self._threads.submit(self._give_back, lease)
            self._failed_loads.discard(request)

    def _offer_again(self, state: _State, not_stored: NotStored) -> None:
        if not_stored.reason in TRANSIENT:
            state.prefix.came_late(not_stored.first_block)
        else:
            state.prefix.end()

    def _count_ranks(self, stored: Stored) -> tuple[str, int, int] | None:
        what = (stored.request, stored.first_block, stored.blocks)
        ranks = self._half_stored.setdefault(what, set())
        ranks.add(stored.rank)
        if len(ranks) == self._settings.ranks:
            del self._half_stored[what]
            return what
        if len(self._half_stored) > MOST_HALF_STORED:
            del self._half_stored[next(iter(self._half_stored))]
        return None

    # ---- the end

    def finished(self, request: str) -> None:
        """The request is over, or was given up, in whatever phase."""
        state = self._end(request)
        if state is not None and state.prefix.offered and state.phase is Phase.RUNNING:
            self._seals.append(SealJob(group=state.group, keys=state.prefix.keys(state.prefix.offered)))

    def reset(self) -> None:
        """What was asked and stored so far is no longer right (the weights are others now). Requests that are under way
        go on without the cache."""
        for state in self._requests.values():
            self._let_go(state)
            state.gave_up = state.is_outdated = True
            state.prefix.end()
            if state.phase in (Phase.NEW, Phase.ASKED, Phase.GRANTED):
                self._move(state, Phase.MISSED)

    def close(self) -> None:
        for request in list(self._requests):
            self._end(request)
        self._threads.shutdown(wait=True, cancel_futures=False)

    def _end(self, request: str) -> _State | None:
        state = self._requests.pop(request, None)
        self._open.discard(request)
        if state is not None:
            self._let_go(state)
            self._groups.leave(state.group)
        return state

    def _let_go(self, state: _State) -> None:
        """Of the question, and of the lease that it brought or may still bring."""
        asking, state.asking = state.asking, None
        if asking is not None and not asking.cancel():
            asking.add_done_callback(self._discard)
        answer, state.answer = state.answer, None
        if answer is not None and answer.lease is not None:
            self._threads.submit(self._give_back, answer.lease)

    def _discard(self, asking: Future[Answer]) -> None:
        """Nobody waits for the answer any more; a fault is told all the same."""
        answer = self._fence.run("asking the node", asking.result, Answer())
        if answer.lease is not None:
            self._give_back(answer.lease)

    def _give_back(self, lease: Lease) -> None:
        """No worker has been told of it, so nobody copies."""
        self._fence.run("giving a lease back", lease.release_all, None)

    # ---- helpers

    def _blocks(self, tokens: int) -> int:
        return tokens // self._settings.block_tokens


def _behind_gaps(pages: Pages) -> int:
    """How many blocks to leave out, from the first, so that none of the rest lacks a page."""
    return max((len(group) - group[::-1].index(NO_PAGE) for group in pages if NO_PAGE in group), default=0)


@lru_cache(maxsize=MOST_GROUPS)
def _root(identity: Identity) -> bytes:
    return identity.group_key()


class _Groups:
    """Groups by number, of which those longest without a request are forgotten."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers: dict[Identity, int] = {}  # the longest unused first
        self._specs: dict[int, GroupSpec] = {}
        self._opened: dict[int, Group] = {}
        self._users: Counter[int] = Counter()
        self._next = 0
        self._untold: dict[int, GroupSpec] = {}
        self._dropped: list[int] = []

    def take(self, spec: GroupSpec) -> int:
        number = self._numbers.pop(spec.identity, None)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._specs[number] = self._untold[number] = spec
        self._numbers[spec.identity] = number
        self._users[number] += 1
        self._forget()
        return number

    def leave(self, number: int) -> None:
        self._users[number] -= 1

    def opened(self, number: int) -> Group | None:
        return self._opened.get(number)

    def open(self, number: int) -> Group:
        """In any thread. Two threads may open it at once, which does no harm."""
        group = self._opened.get(number)
        if group is None:
            spec = self._specs[number]
            group = self._opened[number] = open_group(self._client, spec)
        return group

    @property
    def has_news(self) -> bool:
        """For the workers."""
        return bool(self._untold or self._dropped)

    def untold(self) -> dict[int, GroupSpec]:
        """Those that the workers haven't been told yet; told with this call."""
        untold, self._untold = self._untold, {}
        return untold

    def dropped(self) -> tuple[int, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _forget(self) -> None:
        spare = len(self._numbers) - MOST_GROUPS
        if spare <= 0:
            return
        idle = [identity for identity, number in self._numbers.items() if not self._users[number]]
        for identity in idle[:spare]:
            number = self._numbers.pop(identity)
            del self._specs[number], self._users[number]
            self._untold.pop(number, None)
            self._opened.pop(number, None)
            self._dropped.append(number)
