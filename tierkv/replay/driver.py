"""Runs a trace through the core that a node runs: CacheState, asked as engines ask it, one request after the other.

    each request    acquire -> (prefill) -> reserve -> commit -> release -> seal

Nothing of the core is stood in for: what is found, what is evicted and what is written are its own decisions, so that a
change of it, or a fault in it, changes the figures. Prompts take no time, and the bytes are imagined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from tierkv.core.grants import GroupSpec, Lease, LeaseReady, Refused, Waiting
from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import Recovered
from tierkv.core.ledger import Effect
from tierkv.core.slabs import PAGE_BYTES
from tierkv.core.state import CacheState, Limits
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.value.tuning import AS_MEASURED, Tuning
from tierkv.errors import BrokenInvariant, ConfigError
from tierkv.replay.trace import Step, Trace, TraceGroup
from tierkv.replay.worker import ObedientWorker

EXTENT_BYTES = 16 * 2**20
SLAB_BYTES = 64 * 2**20
PREFILL_TOKENS_PER_SECOND = 12_000.0
LOAD_BYTES_PER_SECOND = 12.8e9
_SESSION = b"replay"
_PATIENCE_SECONDS = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run. `extent_blocks` None: as many as fit into EXTENT_BYTES. `write_bytes_per_second` None: NVMe takes at
    once what it is given; `write_bytes_per_day` is its budget, 0 for none. `load_bytes_per_second` is what a hit on
    NVMe is charged for, and nothing waits for it. `tuning` is of the policy density."""

    policy: str
    host_bytes: int
    nvme_bytes: int = 0
    extent_blocks: int | None = None
    prefill_rate: float = PREFILL_TOKENS_PER_SECOND
    load_bytes_per_second: float = LOAD_BYTES_PER_SECOND
    write_bytes_per_second: float | None = None
    write_bytes_per_day: int = 0
    tuning: Tuning = AS_MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run came to. `prefill_seconds` is what all prompts cost without a cache; `saved_seconds` what hits
    spared of that, less `load_seconds`, the time to read those from NVMe. Evictions are in blocks by tier; refusals in
    blocks that got no slot, and in writes that were not done, by reason."""

    setup: Setup
    asked_tokens: int
    host_hit_tokens: int
    nvme_hit_tokens: int
    prefill_seconds: float
    saved_seconds: float
    load_seconds: float
    stored_bytes: int
    written_bytes: int
    read_bytes: int
    evicted_blocks: Mapping[str, int]
    refused_blocks: Mapping[str, int]
    dropped_writes: Mapping[str, int]

    @property
    def hit_tokens(self) -> int:
        return self.host_hit_tokens + self.nvme_hit_tokens


def replay(trace: Trace, setup: Setup) -> Outcome:
    """Raises ConfigError where not even one block would fit, BrokenInvariant where the core's books don't balance in
    the end."""
    run = _Run(trace, setup)
    for step in trace.steps:
        run.step(step)
    return run.outcome()


class _Run:
    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup = setup
        self._groups = trace.groups
        self._specs = [_spec(group, number) for number, group in enumerate(trace.groups)]
        self._keys = trace.block_keys()
        self._worker = ObedientWorker(setup.write_bytes_per_second)
        self._now = trace.steps[0].time
        self._last_grant = 0
        self._leases: dict[bytes, Lease] = {}
        self._asked_tokens = self._host_tokens = self._nvme_tokens = 0
        self._prefill = self._saved = self._load = 0.0
        self._stored_bytes = 0
        self._state = CacheState(_limits(trace, setup), _NoGenerations())
        self._begin()

    def _begin(self) -> None:
        """The node has started, and found an empty disk."""
        state, now = self._state, self._now
        state.open_session(_SESSION, now)
        self._obey(state.worker_started(now))
        if self._setup.nvme_bytes:
            self._obey(state.report(_EMPTY_DISK, now))
        for spec in self._specs:
            self._obey(state.open_group(spec, now))

    def step(self, step: Step) -> None:
        self._advance(step.time)
        keys = b"".join(map(self._keys.__getitem__, step.blocks))
        lease = self._ask(step, keys) if step.asks else None
        if step.stores:
            self._store(step, keys)
        if lease is not None and lease.blocks:
            self._obey(self._state.release(lease.grant, None, self._now))
        if step.stores:
            self._seal(step, keys)

    def outcome(self) -> Outcome:
        """When what is still being written is done."""
        while (due := self._worker.next_due()) is not None:
            self._advance_past(due)
        self._state.check()
        counts = self._state.counts
        evicted = dict.fromkeys(("host", "nvme"), 0)
        for (tier, _), blocks in counts.evicted_blocks.items():
            evicted[tier] = evicted.get(tier, 0) + blocks
        return Outcome(
            setup=self._setup,
            asked_tokens=self._asked_tokens,
            host_hit_tokens=self._host_tokens,
            nvme_hit_tokens=self._nvme_tokens,
            prefill_seconds=self._prefill,
            saved_seconds=self._saved - self._load,
            load_seconds=self._load,
            stored_bytes=self._stored_bytes,
            written_bytes=counts.nvme_written_bytes,
            read_bytes=counts.nvme_read_bytes,
            evicted_blocks=evicted,
            refused_blocks=_by_name(counts.refused_blocks),
            dropped_writes=_by_name(counts.dropped_writes),
        )

    # ---- one request

    def _ask(self, step: Step, keys: bytes) -> Lease | None:
        group = self._groups[step.group]
        size, rate = group.block_tokens, self._setup.prefill_rate
        self._asked_tokens += step.tokens
        self._prefill += prefill_seconds(step.tokens, 0, rate)
        if not keys:
            return None
        grant = self._new_grant()
        answer, effects = self._state.acquire(
            grant=grant,
            session=_SESSION,
            group=self._specs[step.group].group,
            keys=keys,
            max_blocks=len(step.blocks),
            deadline=self._now + _PATIENCE_SECONDS,
            now=self._now,
        )
        self._obey(effects)
        if isinstance(answer, Waiting):
            answer = self._leases.pop(grant)
        if isinstance(answer, Refused):
            raise BrokenInvariant(f"a lease was refused in a replay: {answer.reason}")
        self._host_tokens += (answer.blocks - answer.nvme_blocks) * size
        self._nvme_tokens += answer.nvme_blocks * size
        self._saved += prefill_seconds(answer.blocks * size, 0, rate)
        self._load += answer.nvme_blocks * group.block_bytes / self._setup.load_bytes_per_second
        return answer

    def _store(self, step: Step, keys: bytes) -> None:
        """The whole prompt is offered, as an engine would that has just computed what it did not find."""
        if not keys:
            return
        grant = self._new_grant()
        answer, effects = self._state.reserve(
            grant=grant,
            session=_SESSION,
            holder=_SESSION,
            group=self._specs[step.group].group,
            rank=0,
            keys=keys,
            first=0,
            tokens=b"",  # the core hands them on to files, and never looks at them
            now=self._now,
        )
        self._obey(effects)
        if isinstance(answer, Refused):
            raise BrokenInvariant(f"a ticket was refused in a replay: {answer.reason}")
        if answer.offsets:
            self._stored_bytes += len(answer.offsets) * self._groups[step.group].block_bytes
            self._obey(self._state.commit(grant, self._now)[1])

    def _seal(self, step: Step, keys: bytes) -> None:
        _, effects = self._state.seal(
            seal_id=self._last_grant,
            group=self._specs[step.group].group,
            keys=keys,
            wait_flushed=False,
            deadline=self._now,
            now=self._now,
        )
        self._obey(effects)

    def _new_grant(self) -> bytes:
        self._last_grant += 1
        return self._last_grant.to_bytes(8, "little")

    # ---- time, and the worker

    def _advance(self, to: float) -> None:
        """Let happen what is due before `to`: the core's own wake-ups, and the ends of writes."""
        while True:
            wake, done = self._state.next_wakeup(), self._worker.next_due()
            due = min((at for at in (wake, done) if at is not None), default=to)
            if due >= to:
                break
            self._advance_past(due)
        self._now = max(self._now, to)

    def _advance_past(self, due: float) -> None:
        """One thing that is due then: the end of a write, or what the core has to do."""
        self._now = max(self._now, due)
        report = self._worker.take_due(self._now)
        self._obey(self._state.report(report, self._now) if report else self._state.tick(self._now))

    def _obey(self, effects: list[Effect]) -> None:
        """Have everything done, and what follows from that."""
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            if isinstance(effect, LeaseReady):
                self._leases[effect.grant] = effect.lease
                continue
            report = self._worker.take(effect, self._now)
            if report is not None:
                todo.extend(self._state.report(report, self._now))


def require_room(trace: Trace, host_bytes: int) -> None:
    """Raises ConfigError where not every block would fit alone."""
    largest = max(_slot_sizes(trace))
    if host_bytes < largest:
        raise ConfigError("capacity", f"{host_bytes:,} bytes hold no block of {largest:,}")


def _slot_sizes(trace: Trace) -> set[int]:
    return {-(-group.block_bytes // PAGE_BYTES) * PAGE_BYTES for group in trace.groups}


def _limits(trace: Trace, setup: Setup) -> Limits:
    require_room(trace, setup.host_bytes)
    slots = _slot_sizes(trace)
    largest = max(slots)
    blocks = setup.extent_blocks or max(1, EXTENT_BYTES // largest)
    if len(slots) == 1:  # one slab, so that capacity counts to the block
        host_bytes = slab_bytes = setup.host_bytes // largest * largest
    else:
        slab_bytes = max(SLAB_BYTES, largest)
        host_bytes = max(slab_bytes, setup.host_bytes)
    return Limits(
        host_bytes=host_bytes,
        slab_bytes=slab_bytes,
        extent_bytes=blocks * largest,
        nvme_bytes=setup.nvme_bytes,
        seal_after_seconds=10.0,
        session_bytes=2**62,
        inflight_writes=8,
        inflight_reads=64,
        policy=setup.policy,
        tuning=setup.tuning,
        nvme_write_bytes_per_day=setup.write_bytes_per_day,
        prefill_tokens_per_second=setup.prefill_rate,
    )


def _spec(group: TraceGroup, number: int) -> GroupSpec:
    layout = Layout(
        dtype="u8", block_bytes=(group.block_bytes,), axes="byte", block_tokens=group.block_tokens, engine="replay"
    )
    identity = Identity(weights=f"{number:064x}", config="replay", layout=layout)
    return GroupSpec(group=identity.group_key(), identity=identity, model_name=group.name)


def _by_name(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}


_EMPTY_DISK = Recovered(
    seconds=0.0,
    extents=0,
    index_rows=0,
    headers_read=0,
    quarantined=0,
    foreign=0,
    unknown_format=0,
    temp_removed=0,
    index_rebuilt=False,
)


class _NoGenerations(MutableSequence[int]):
    """Nobody reads slots here, so nobody has to be told that they were given up; and the arena may have any size."""

    def __getitem__(self, index: Any) -> Any:
        return 0

    def __setitem__(self, index: Any, value: Any) -> None:
        pass

    def __delitem__(self, index: Any) -> None:
        raise BrokenInvariant("a generation was taken away")

    def __len__(self) -> int:
        return 0

    def insert(self, index: int, value: int) -> None:
        raise BrokenInvariant("a generation was put in between")
