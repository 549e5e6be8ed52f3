"""CacheState at random beside an obvious model: dictionaries of who may write, who may read, and what was promised.

Engines write owner stamps into the slots of their tickets and read the slots of their leases, whenever they like until
they say that they have ended. The storage worker does, fails, delays and forgets what it was told. Front and worker
die. Whatever happens, a leased block must carry its own stamp, and what was reported flushed must be found again.

HYPOTHESIS_PROFILE=long runs it for long, at random; by default a bounded, repeatable number of examples.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.disk_simulation import DiskWorker
from tests.core.simulation import (
    KEY_BYTES,
    PAGE,
    Arena,
    Disk,
    FileName,
    Prompt,
    Stamp,
    Worker,
    make_group,
    split,
    stamps,
)
from tierkv.core.addresses import pool_bases
from tierkv.core.extent import Extent
from tierkv.core.grants import (
    GRANTED,
    NO_ROOM,
    PENDING,
    PRESENT,
    Committed,
    Dropped,
    Evicted,
    Lease,
    LeaseReady,
    NeverHit,
    Refused,
    Regretted,
    Reservation,
    SealAnswer,
    SealReady,
    Waiting,
)
from tierkv.core.instructions import (
    Demote,
    FileLost,
    OnDevice,
    OnDisk,
    Read,
    ReadDone,
    Remove,
    ScrubProgress,
    SetAside,
    TierHealth,
    Write,
    Zero,
)
from tierkv.core.journal import Account, Balances
from tierkv.core.ledger import Departure
from tierkv.core.pins import PinPhase, PinRefused
from tierkv.core.prefill_rates import PrefillSample
from tierkv.core.purge_scope import NotOne, OfModel, OfPrefix, OfTenant
from tierkv.core.purges import MAX_REMEMBERED, PurgePhase
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.state import CacheState, Limits
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.warmup import WarmupScope

PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # explaining takes minutes here
settings.register_profile(
    "ci",
    phases=PHASES,
    max_examples=100,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "long",
    phases=PHASES,
    max_examples=20_000,
    stateful_step_count=120,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

MAX_BLOCKS = 5
# Prompts with a common beginning that branch after each block: a digit is a block.
BRANCHES = ["00000", "00001", "00010", "00100", "01000", "10000"]
EVICTED_FOR = {
    Reason.EVICTED,
    Reason.OPERATOR,
    Reason.EXPIRED,
    Reason.DISK_BEHIND,
    Reason.DISK_DEGRADED,
    Reason.NAME_TAKEN,
    Reason.DEVICE_DOWN,
}
SEAL_AFTER = 5.0
STAGED_SECONDS = 40.0
WRITE_FAILURES = [Reason.IO_ERROR, Reason.DISK_FULL, Reason.READ_ONLY]


# ---- what the model remembers


@dataclass(eq=False)
class Ticket:
    grant: bytes
    holder: bytes
    prompt: Prompt
    rank: int
    first: int
    answer: Reservation
    arena: Arena
    arguments: dict[str, object]
    purged: bool = False
    lost: set[int] = field(default_factory=set)  # slots of a pool that is no more: what is written there nobody sees

    @property
    def granted(self) -> list[int]:
        return [self.first + at for at, state in enumerate(self.answer.states) if state == GRANTED]

    @property
    def keys(self) -> list[bytes]:
        return [self.prompt.key(index) for index in self.granted]

    def fill(self) -> None:
        self._write([(key, self.rank) for key in self.keys])

    def scribble(self) -> None:
        self._write([("half written", self.grant)] * len(self.answer.offsets))

    def _write(self, content: list[object]) -> None:
        there = [(slot, one) for slot, one in zip(self.answer.offsets, content, strict=True) if slot not in self.lost]
        self.arena.update(there)


@dataclass(eq=False)
class Holding:
    """A lease as its engine sees it: parts not yet released."""

    grant: bytes
    prompt: Prompt
    holders: dict[int, bytes]
    revocable: bool
    deadline: float
    session: bytes
    arena: Arena
    arguments: dict[str, object]
    answer: Lease | None = None
    since: float = 0.0
    lost: set[int] = field(default_factory=set)  # slots of a pool that is no more

    def live_parts(self) -> Iterator[tuple[list[int], list[int], list[Stamp]]]:
        if self.answer is not None:
            for part in self.answer.parts:
                if part.rank in self.holders:
                    yield part.offsets, part.generations, stamps(self.prompt.keys, part.rank)[: self.answer.blocks]


@dataclass
class Promised:
    """A prefix that was reported flushed."""

    prompt: Prompt
    blocks: int

    def end_before(self, keys: set[bytes]) -> None:
        self.blocks = next((index for index in range(self.blocks) if self.prompt.key(index) in keys), self.blocks)


@dataclass
class Incarnation:
    """What dies with a front."""

    arena: Arena
    generations: list[int]
    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    holdings: dict[bytes, Holding] = field(default_factory=dict)
    sessions: list[bytes] = field(default_factory=list)
    handed_out: dict[int, int] = field(default_factory=dict)  # slot -> generation, when it was last written to


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.numbers = 0
        self.disk = Disk()
        self.tier = Disk()  # of the disk tier, that other nodes use too
        self.prompts: list[Prompt] = []

    # ---- the world's shape

    @initialize(
        draw=st.data(),
        host_slots=st.sampled_from([4, 2, 3, 6]),
        slab_slots=st.integers(1, 2),
        extent_blocks=st.sampled_from([2, 3, 1]),
        nvme_extents=st.sampled_from([3, 2, 4, 1, 8, 0]),
        disk_extents=st.sampled_from([4, 0, 8, 2, 0]),
        block_tokens=st.integers(1, 2),
        ranks=st.integers(1, 2),
        second_group=st.sampled_from([None, None, "salted", "wide", "fleeting"]),
        session_slots=st.sampled_from([100, 100, 100, 3]),
        inflight=st.integers(1, 2),
        pinned_share=st.sampled_from([0.5, 0.7, 0.3, 1.0, 0.0]),
        policy=st.sampled_from(["density", "density", "lru", "arc", "gdsf", "literal"]),
        budget=st.sampled_from([0, 0, 1, 20]),
        ttl=st.sampled_from([(), (), (("default", 90.0),), (("other", 1.0), ("none", 30.0))]),
        shares=st.sampled_from([(), (("none", 0.5),), (("none", 0.25), ("other", 0.5))]),
    )
    def begin(
        self,
        draw: st.DataObject,
        host_slots: int,
        slab_slots: int,
        extent_blocks: int,
        nvme_extents: int,
        disk_extents: int,
        block_tokens: int,
        ranks: int,
        second_group: str | None,
        session_slots: int,
        inflight: int,
        pinned_share: float,
        policy: str,
        budget: int,
        ttl: tuple[tuple[str, float], ...],
        shares: tuple[tuple[str, float], ...],
    ) -> None:
        self.ranks = ranks
        self.groups = [make_group(block_tokens=block_tokens, ranks=ranks)]
        slot_bytes = PAGE
        if second_group == "salted":
            self.groups.append(make_group(salt="other", block_tokens=block_tokens, ranks=ranks))
        elif second_group == "wide":
            self.groups.append(make_group(block_bytes=PAGE + 1, block_tokens=block_tokens))
            slot_bytes = 2 * PAGE
        elif second_group == "fleeting":
            self.groups.append(make_group(salt="fleeting", block_tokens=block_tokens, persistent=False))
        self.host_bytes = host_slots * ranks * slot_bytes
        self.limits = Limits(
            host_bytes=self.host_bytes,
            slab_bytes=slab_slots * slot_bytes,
            extent_bytes=extent_blocks * slot_bytes,
            nvme_bytes=nvme_extents * ranks * (2 * PAGE + extent_blocks * slot_bytes),
            disk_bytes=disk_extents * ranks * (2 * PAGE + extent_blocks * slot_bytes) if nvme_extents else 0,
            disk_inflight=inflight,
            seal_after_seconds=SEAL_AFTER,
            session_bytes=session_slots * slot_bytes,
            inflight_writes=inflight,
            inflight_reads=inflight,
            page_bytes=PAGE,
            staged_seconds=STAGED_SECONDS,
            pinned_share=pinned_share,
            policy=policy,
            device_bytes=self.device_bytes(draw, ranks * slot_bytes),
            nvme_write_bytes_per_day=budget * 24 * 4 * PAGE,
            ttl=ttl,
            shares=tuple((f"tenant:{name}", part) for name, part in shares),
        )
        self.prompts = [
            Prompt(spec, tuple(int(choice) for choice in choices for _ in range(block_tokens)))
            for spec in self.groups
            for choices in BRANCHES
        ]
        self.block_tokens = block_tokens
        self.blocks = {
            prompt.key(index): (
                prompt.key(index - 1) if index else prompt.group,
                index,
                prompt.first(index + 1).tokens_from(index),
            )
            for prompt in self.prompts
            for index in range(prompt.blocks)
        }
        self.overhead = 0
        self.real_bytes = 0
        self.promised: list[Promised] = []
        self.purges: list[bytes] = []
        self.old: list[Incarnation] = []
        self.start_front()
        if draw.draw(st.booleans()):  # a disk with something on it
            for _ in range(3):
                self._store(draw, "seal")
                self.work_until_quiet()
            self.start_front()
        for _ in range(draw.draw(st.integers(0, 2))):
            self._store(draw, draw.draw(st.sampled_from(["", "seal", "flush"])))

    def device_bytes(self, draw: st.DataObject, unit: int) -> tuple[int, ...]:
        return ()

    def start_front(self) -> None:
        *_, end = pool_bases(self.host_bytes, self.limits.slab_bytes, self.limits.device_bytes)
        self.here = Incarnation(Arena(), [0] * (end // PAGE))
        self.state = CacheState(self.limits, self.here.generations)
        self.watch_blocks()
        self.balances = Balances()
        self.worker = Worker(self.here.arena, self.disk)
        self.disk_worker = DiskWorker(self.here.arena, self.disk, self.tier)
        self.worker.disk_tier = self.tier if self.limits.disk_bytes else None
        self.is_worker_up = self.is_disk_worker_up = False
        self.disk_overhead = 0
        self.present: set[bytes] = set()  # blocks in the tree, after the last step
        self.others_did = self.others_took = False  # something from the disk tier, in this step
        self.nvme_limit = self.limits.nvme_bytes
        self.ended: dict[bytes, str] = {}
        self.cancelled: set[bytes] = set()
        self.waiting_seals: dict[int, tuple[Prompt, float]] = {}
        self.warmups: list[bytes] = []
        self.kept: dict[str, set[bytes]] = {"host": set(), "nvme": set()}  # what was pinned before this step
        self.tainted: dict[int, object] = {}  # pages -> what was purged and is in them; None: somebody writes such
        self.purges = []
        self.committed: dict[tuple[bytes, int], set[bytes]] = {}
        self.lost_with_notice: set[bytes] = set()
        for _ in range(2):
            self.join()
        self.start_devices()
        self.limit_host()
        if self.limits.nvme_bytes:
            self.start_worker()
        if self.limits.disk_bytes:
            self.start_disk_worker()
        for spec in self.groups:
            self.disk.specs[spec.group] = spec
            self.absorb(self.state.open_group(spec, self.now))
            for session in self.here.sessions:
                self.state.session_opens(session, spec.group)
        self.orphans = {extent.key for extent in self.state._ledger.tree if extent.is_orphan}
        self.damaged = self.pins_damaged = self.state.counts.damaged_extents.total()

    def start_devices(self) -> None:
        """There are none here; see test_device_state_machine."""

    def device_arguments(self) -> dict[str, object]:
        """Of a reserve or an acquire."""
        return {}

    def slots_of_devices(self) -> set[int]:
        """That their workers may touch."""
        return set()

    def instruct_device(self, device: int, instruction: object) -> None:
        raise AssertionError(f"there is no device {device} to take {instruction}")

    def devices_do_all(self) -> bool:
        """Whether there was anything to do."""
        return False

    def watch_blocks(self) -> None:
        """Count what comes into the tree and what leaves it, each where it happens."""
        ledger = self.state._ledger
        self.came = sum(extent.num_blocks for extent in ledger.tree)
        self.went: Counter[str] = Counter()  # blocks that no tier has any more, by reason
        self.told: Counter[str] = Counter()  # of those, what was told as evicted
        add, grow, cut = ledger.add_extent, ledger.grow_extent, ledger.cut_extent

        def add_extent(extent: Extent, above: Extent | None, index: int) -> None:
            self.came += extent.num_blocks
            add(extent, above, index)

        def grow_extent(extent: Extent, keys: bytes, slots: list[list[int]]) -> None:
            before = extent.num_blocks
            grow(extent, keys, slots)
            self.came += extent.num_blocks - before

        def cut_extent(extent: Extent, num_blocks: int, departure: Departure | None) -> None:
            self.went[departure.reason if departure is not None else Reason.PURGED] += extent.num_blocks - num_blocks
            cut(extent, num_blocks, departure)

        for watched in (add_extent, grow_extent, cut_extent):
            setattr(ledger, watched.__name__, watched)

    def recover(self, order: list[FileName] | None = None) -> None:
        resumed = self.disk.resume(Reason.IO_ERROR if self.number() % 3 == 0 else None)
        for spec in self.groups:
            for rank in range(spec.identity.parallel.shards):
                hidden = {name for scope, _ in self.disk.purges.values() for name in self.disk.in_scope(scope)}
                self.committed[spec.group, rank] = {
                    key
                    for name, file in self.disk.files.items()
                    if name[:2] == (spec.group, rank) and name not in hidden
                    for key in split(file.keys)
                }
        for report in resumed:
            self.absorb(self.state.report(report, self.now))
        self.absorb(self.state.report(TierHealth(True, self.overhead, free_bytes=1 << 30), self.now))
        for report in self.disk.recovery(order):
            self.absorb(self.state.report(report, self.now))

    def limit_host(self) -> None:
        """The old arenas count until nobody can touch them."""
        reserved = min(self.host_bytes, len(self.old) * self.host_bytes // 2)
        self.absorb(self.state.host_limit(self.host_bytes - reserved, self.now, earlier_bytes=reserved))

    # ---- small things

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def name(self, kind: str) -> bytes:
        return f"{kind} {self.number()}".encode().ljust(16)

    def join(self) -> None:
        session = self.name("session")
        self.state.open_session(session, self.now)
        for spec in self.groups:
            self.state.session_opens(session, spec.group)
        self.here.sessions.append(session)

    def prompt(self, draw: st.DataObject) -> Prompt:
        """Any prompt, more often one of which something is cached."""
        cached = [prompt for prompt in self.prompts if self.state.match(prompt.group, prompt.keys).blocks]
        whole = draw.draw(st.sampled_from(cached * 4 + self.prompts))
        blocks = draw.draw(st.sampled_from([MAX_BLOCKS, MAX_BLOCKS, MAX_BLOCKS, 3, 2, 1, 0]))
        return whole.first(blocks)

    def absorb(self, effects: list[object]) -> None:
        arena = self.here.arena
        self.tainted = {  # less what was wiped since, or filled with something else
            slot: purged for slot, purged in self.tainted.items() if slot in arena and purged in (None, arena[slot])
        }
        for effect in effects:
            if isinstance(effect, LeaseReady):
                self.lease_ready(effect)
            elif isinstance(effect, SealReady):
                self.seal_ready(effect.seal_id, effect.answer)
            elif isinstance(effect, Evicted):
                assert effect.to in ("nvme", "host", "dropped", "disk", "gpu")
                assert effect.blocks > 0
                if effect.tier == "gpu":
                    pass  # what is pinned stays in host memory, or on NVMe
                # What is beyond what pins may hold of NVMe goes on to the disk tier.
                elif effect.tier != "disk" and effect.to != "disk":
                    assert not self.is_pinned(effect.tier, effect.key), "pinned, and evicted"
                elif effect.to == "dropped":
                    assert not self.is_pinned("nvme", effect.key), "pinned, and evicted from the last tier"
                assert effect.tokens == effect.blocks * self.state._ledger.groups[effect.group].block_tokens
                self.told[effect.reason] += effect.blocks * (effect.to == "dropped")
                if effect.tier in ("nvme", "disk") and effect.to != "disk":
                    self.take_back(effect.group, effect.key)  # while the worker is away, nothing else tells of it
            elif isinstance(effect, OnDevice):
                self.instruct_device(effect.device, effect.instruction)
            elif isinstance(effect, OnDisk):
                self.instruct_on_disk(effect.instruction)
            elif not isinstance(effect, Dropped | NeverHit | Regretted):
                self.instruct(effect)

    def is_pinned(self, tier: str, key: bytes) -> bool:
        """The block was, before this step, and is."""
        return key in self.kept[tier] and key in self.blocks_that_stay()[tier]

    def blocks_that_stay(self) -> dict[str, set[bytes]]:
        """By tier: what is pinned there and cached, unless pins hold as much of a tier as they may."""
        stay: dict[str, set[bytes]] = {"host": set(), "nvme": set()}
        states = [state for state in self.state.pins() if state.phase is not PinPhase.PURGED]
        if any(state.phase is PinPhase.SHORT for state in states):
            return stay
        for state in states:
            keys = split(state.record.keys)
            stay["nvme"].update(keys[: state.cached_blocks])
            if state.record.tier == "host":
                stay["host"].update(keys[: state.host_blocks])
        return stay

    def instruct(self, instruction: object) -> None:
        is_wipe = isinstance(instruction, Zero)
        assert self.is_worker_up or (is_wipe and not self.limits.nvme_bytes), f"nobody is there to take {instruction}"
        if isinstance(instruction, Zero):
            for offset, size in instruction.ranges:
                assert not self.slots_of_engines() & set(range(offset, offset + size, PAGE)), "wiped under somebody"
        if isinstance(instruction, Read):
            assert not self.tainted.keys() & set(instruction.slots), "memory is used that still holds what was purged"
            assert not self.slots_in_use() & set(instruction.slots), "a read would overwrite a slot that somebody uses"
        if isinstance(instruction, Write):
            content = self.here.arena.read(instruction.slots)
            assert content == stamps(instruction.keys, instruction.rank), f"a write of foreign blocks: {content}"
        if isinstance(instruction, (Remove, SetAside)):
            self.take_back(instruction.group, instruction.key)
        self.worker.take(instruction)

    def instruct_on_disk(self, instruction: object) -> None:
        assert self.is_disk_worker_up, f"nobody is there to take {instruction}"
        if isinstance(instruction, Read):
            assert not self.tainted.keys() & set(instruction.slots), "memory is used that still holds what was purged"
            assert not self.slots_in_use() & set(instruction.slots), "a read would overwrite a slot that somebody uses"
        if isinstance(instruction, Demote):
            assert (instruction.group, instruction.rank, instruction.key) not in [
                (op.group, op.rank, op.key) for op in self.worker.waiting if isinstance(op, (Remove, SetAside))
            ], "copied while it is removed"
        if isinstance(instruction, (Remove, SetAside)):
            self.take_back(instruction.group, instruction.key)
        self.disk_worker.take(instruction)

    def take_back(self, group: bytes, head: bytes) -> None:
        """The file of an extent goes, knowingly: its blocks are promised no more."""
        extent = self.state._ledger.tree.heads.get(head)
        if extent is not None and extent.has_file:
            return  # from one tier, and it is in the other one
        for rank in range(self.ranks):
            for file in (self.disk.files.get((group, rank, head)), self.tier.files.get((group, rank, head))):
                for promise in self.promised if file is not None else []:
                    promise.end_before(set(split(file.keys)))

    def slots_of_engines(self) -> set[int]:
        tickets = {
            offset
            for ticket in self.here.tickets.values()
            for offset in ticket.answer.offsets
            if offset not in ticket.lost
        }
        leases = {
            offset
            for holding in self.here.holdings.values()
            if not holding.revocable
            for offsets, _, _ in holding.live_parts()
            for offset in offsets
            if offset not in holding.lost
        }
        return tickets | leases

    # ---- engines store

    def _store(self, draw: st.DataObject, then: str) -> None:
        """What engines do most of the time: each rank reserves what is missing of a prompt, writes, commits."""
        prompt = draw.draw(st.sampled_from(self.prompts)).first(draw.draw(st.sampled_from([2, 3, 1, 4, 5])))
        self.store_prompt(prompt, draw.draw(st.sampled_from(self.here.sessions)))
        if then:
            self.do_seal(prompt, waits=then == "flush", seconds=30.0)
        if draw.draw(st.booleans()):
            self.work_until_quiet()

    def store_prompt(self, prompt: Prompt, session: bytes) -> None:
        for rank in range(prompt.spec.identity.parallel.shards):
            ticket = self.do_reserve(prompt, rank, 0, grant=self.name("ticket"), session=session, holder=session)
            if ticket is not None:
                self.do_commit(ticket)

    # Rules are drawn evenly: what engines do most has several.
    store = rule(draw=st.data(), then=st.sampled_from(["", "seal"]))(_store)
    store_more = rule(draw=st.data(), then=st.sampled_from(["", "flush"]))(_store)
    store_and_go_on = rule(draw=st.data(), then=st.just(""))(_store)

    @rule(draw=st.data(), is_reply_lost=st.booleans(), first=st.sampled_from([0, 0, 0, 1, 2, MAX_BLOCKS]))
    def reserve(self, draw: st.DataObject, is_reply_lost: bool, first: int) -> None:
        prompt = self.prompt(draw)
        rank = draw.draw(st.integers(0, prompt.spec.identity.parallel.shards - 1))
        first = min(first, prompt.blocks)
        self.do_reserve(
            prompt,
            rank,
            first,
            grant=self.name("ticket"),
            session=draw.draw(st.sampled_from(self.here.sessions)),
            holder=draw.draw(st.sampled_from(self.here.sessions)),
            is_reply_lost=is_reply_lost,
        )

    def do_reserve(
        self,
        prompt: Prompt,
        rank: int,
        first: int,
        *,
        grant: bytes,
        session: bytes,
        holder: bytes,
        is_reply_lost: bool = False,
    ) -> Ticket | None:
        arguments = {
            "grant": grant,
            "session": session,
            "holder": holder,
            "group": prompt.group,
            "rank": rank,
            "keys": prompt.keys,
            "first": first,
            "tokens": prompt.tokens_from(first),
        }
        arguments |= self.device_arguments()
        taken = self.slots_in_use()
        visible = prompt.block_keys[: self.state.match(prompt.group, prompt.keys).blocks]
        answer, effects = self.state.reserve(**arguments, now=self.now)
        self.absorb(effects)
        if is_reply_lost:
            again, effects = self.state.reserve(**arguments, now=self.now)
            self.absorb(effects)
            if isinstance(answer, Reservation) and not answer.offsets:
                answer = again  # with nothing granted there is no ticket; it is simply asked again
            assert again == answer
        if isinstance(answer, Refused):
            assert grant in self.ended
            return None
        ticket = Ticket(grant, holder, prompt, rank, first, answer, self.here.arena, arguments)
        self.check_reservation(ticket)
        assert not set(ticket.keys) & set(visible), "asked to store again what can be matched"
        assert not taken & set(answer.offsets), "slots were handed out that somebody still uses"
        assert not self.tainted.keys() & set(answer.offsets), "memory was handed out that still holds what was purged"
        for offset, generation in zip(answer.offsets, answer.generations, strict=True):
            assert generation > self.here.handed_out.get(offset, -1), "a late reader could not tell"
            self.here.handed_out[offset] = generation
        if not answer.offsets:
            return None
        self.here.tickets[grant] = ticket
        ticket.scribble()
        return ticket

    def check_reservation(self, ticket: Ticket) -> None:
        answer, rank = ticket.answer, ticket.rank
        assert len(answer.states) == ticket.prompt.blocks - ticket.first
        assert len(answer.offsets) == len(answer.generations) == answer.states.count(GRANTED)
        assert len(set(answer.offsets)) == len(answer.offsets)
        others = [other for other in self.here.tickets.values() if other.rank == rank and not other.purged]
        pending = {key for other in others for key in other.keys} | self.keys_landing(rank)
        committed = self.committed.get((ticket.prompt.group, rank), set())
        for at, state in enumerate(answer.states):
            key = ticket.prompt.key(ticket.first + at)
            if state == GRANTED:
                assert key not in pending
            elif state == PENDING:
                assert key in pending
            elif state == PRESENT:
                # What other nodes have put behind a prefix that was purged is known to belong to it only with that.
                assert key in committed or key in self.tier.keys_of(ticket.prompt.group, rank)
            else:
                assert state == NO_ROOM
                assert answer.reason is not None
        assert [self.here.generations[offset // PAGE] for offset in answer.offsets] == answer.generations

    @precondition(lambda self: self.here.tickets)
    @rule(
        draw=st.data(),
        how=st.sampled_from(["commit", "commit twice", "abort", "abort twice", "write", "ask again"]),
    )
    def go_on_with_a_ticket(self, draw: st.DataObject, how: str) -> None:
        ticket = draw.draw(st.sampled_from(list(self.here.tickets.values())))
        if how == "write":
            draw.draw(st.sampled_from([ticket.fill, ticket.scribble]))()
        elif how == "ask again":
            assert self.state.reserve(**ticket.arguments, now=self.now) == (ticket.answer, [])
        elif how.startswith("commit"):
            self.do_commit(ticket, twice=how.endswith("twice"))
        else:
            del self.here.tickets[ticket.grant]
            self.ended[ticket.grant] = "aborted"
            for _ in range(2 if how.endswith("twice") else 1):
                self.absorb(self.state.abort(ticket.grant, self.now))

    def do_commit(self, ticket: Ticket, *, twice: bool = False) -> None:
        ticket.fill()
        self.here.tickets.pop(ticket.grant, None)
        if ticket.purged:
            self.ended[ticket.grant] = "purged"
            answer, effects = self.state.commit(ticket.grant, self.now)
            self.absorb(effects)
            assert answer == Refused(Reason.PURGED)
            return
        self.ended[ticket.grant] = "committed"
        self.committed.setdefault((ticket.prompt.group, ticket.rank), set()).update(ticket.keys)
        answer, effects = self.state.commit(ticket.grant, self.now)
        self.absorb(effects)
        assert isinstance(answer, Committed)
        matched = self.state.match(ticket.prompt.group, ticket.prompt.keys).blocks
        assert answer.visible == sum(index < matched for index in ticket.granted)
        assert answer.visible + answer.staged == len(ticket.granted)
        if twice:
            again, effects = self.state.commit(ticket.grant, self.now)
            assert again == answer
            self.absorb(effects)

    @rule(draw=st.data())
    def engines_say_something_else(self, draw: st.DataObject) -> None:
        kinds = [self.come_late, self.end_a_grant_before_it_is_asked_for, self.seal, self.warm_up]
        draw.draw(st.sampled_from(kinds))(draw)

    def come_late(self, draw: st.DataObject) -> None:
        """A verb about a grant that is over, or that was never heard of."""
        verb = draw.draw(st.sampled_from(["commit", "abort", "release", "reserve", "acquire"]))
        grant = draw.draw(st.sampled_from([*self.ended, b"from another front".ljust(20)[:16]]))
        counts = (self.state.num_tickets, self.state.num_leases)
        if verb == "commit":
            answer, effects = self.state.commit(grant, self.now)
            assert isinstance(answer, Committed) == (self.ended.get(grant) == "committed")
        elif verb == "abort":
            effects = self.state.abort(grant, self.now)
        elif verb == "release":
            effects = self.state.release(grant, None, self.now)
        elif grant not in self.ended:
            return
        elif verb == "reserve":
            prompt = self.prompt(draw)
            session = self.here.sessions[0]
            self.do_reserve(prompt, 0, 0, grant=grant, session=session, holder=session)
            effects = []
        else:
            answer, effects = self.ask_for_a_lease(self.prompt(draw), grant=grant, session=self.here.sessions[0])
            assert isinstance(answer, Refused) or answer.blocks == 0
        self.absorb(effects)
        if verb in ("abort", "release"):
            self.ended.setdefault(grant, "ended early")
        assert counts == (self.state.num_tickets, self.state.num_leases)

    def end_a_grant_before_it_is_asked_for(self, draw: st.DataObject) -> None:
        verb = draw.draw(st.sampled_from(["abort", "release"]))
        grant = self.name("early")
        session = draw.draw(st.sampled_from(self.here.sessions))
        self.ended[grant] = "ended early"
        if verb == "abort":
            self.absorb(self.state.abort(grant, self.now))
            assert self.do_reserve(self.prompt(draw), 0, 0, grant=grant, session=session, holder=session) is None
        else:
            self.absorb(self.state.release(grant, None, self.now))
            answer, effects = self.ask_for_a_lease(self.prompt(draw), grant=grant, session=session)
            self.absorb(effects)
            assert isinstance(answer, Refused) or answer.blocks == 0

    # ---- engines load

    def ask_for_a_lease(self, prompt: Prompt, *, grant: bytes, session: bytes) -> tuple[object, list[object]]:
        return self.state.acquire(
            grant=grant,
            session=session,
            group=prompt.group,
            keys=prompt.keys,
            max_blocks=MAX_BLOCKS,
            deadline=self.now,
            now=self.now,
        )

    @rule(
        draw=st.data(),
        wait=st.sampled_from([0.0, 1.0, 20.0]),
        max_blocks=st.sampled_from([MAX_BLOCKS, MAX_BLOCKS, MAX_BLOCKS, 2, 1, 0]),
        is_revocable=st.booleans(),
        is_reply_lost=st.booleans(),
    )
    def acquire(
        self, draw: st.DataObject, wait: float, max_blocks: int, is_revocable: bool, is_reply_lost: bool
    ) -> None:
        self.do_acquire(
            self.prompt(draw),
            draw,
            wait=wait,
            max_blocks=max_blocks,
            is_revocable=is_revocable,
            is_reply_lost=is_reply_lost,
        )

    def do_acquire(
        self,
        prompt: Prompt,
        draw: st.DataObject,
        *,
        wait: float,
        max_blocks: int = MAX_BLOCKS,
        is_revocable: bool = False,
        is_reply_lost: bool = False,
    ) -> Holding:
        ranks = range(prompt.spec.identity.parallel.shards)
        session = draw.draw(st.sampled_from(self.here.sessions))
        holders = {rank: draw.draw(st.sampled_from(self.here.sessions)) for rank in ranks}
        arguments = {
            "grant": self.name("lease"),
            "session": session,
            "group": prompt.group,
            "keys": prompt.keys,
            "holders": tuple(holders.items()),
            "max_blocks": max_blocks,
            "deadline": self.now + wait,
            "revocable": is_revocable,
            **self.device_arguments(),
        }
        matched = self.state.match(prompt.group, prompt.keys)
        answer, effects = self.state.acquire(**arguments, now=self.now)
        holding = Holding(
            grant=arguments["grant"],
            prompt=prompt,
            holders=holders,
            revocable=is_revocable,
            deadline=self.now + wait,
            session=session,
            arena=self.here.arena,
            arguments=arguments,
            since=self.now,
        )
        self.here.holdings[holding.grant] = holding
        if isinstance(answer, Lease):
            assert answer.cached_blocks == matched.blocks
            assert answer.blocks <= max_blocks
            assert answer.blocks == min(max_blocks, matched.blocks) or answer.reason is not None
            self.accept(holding, answer)
        else:
            assert isinstance(answer, Waiting)
            assert wait > 0
        self.absorb(effects)
        if is_reply_lost:
            again, effects = self.state.acquire(**arguments, now=self.now)
            self.absorb(effects)
            if isinstance(answer, Lease) and answer.blocks:
                assert again == answer
            elif isinstance(answer, Waiting):
                assert isinstance(again, Waiting) or again == holding.answer or again.blocks == 0
        return holding

    def accept(self, holding: Holding, answer: Lease) -> None:
        assert holding.answer is None, "a request was answered twice"
        assert answer.grant == holding.grant
        assert answer.nvme_blocks + answer.disk_blocks <= answer.blocks <= answer.cached_blocks
        assert answer.blocks <= holding.arguments["max_blocks"]
        assert holding.since <= self.now <= max(holding.deadline, self.now)
        holding.answer = answer
        if not answer.blocks:
            del self.here.holdings[holding.grant]
            self.ended[holding.grant] = "empty"
            return
        assert [part.rank for part in answer.parts] == list(holding.holders)  # those that have not let go meanwhile
        for part in answer.parts:
            assert len(part.offsets) == len(part.generations) == answer.blocks

    def lease_ready(self, notice: LeaseReady) -> None:
        holding = self.here.holdings.get(notice.grant)
        if holding is not None:
            self.accept(holding, notice.lease)
        else:  # its engine has let go before it was answered
            self.cancelled.remove(notice.grant)
            assert notice.lease.blocks == 0

    @precondition(lambda self: self.here.holdings)
    @rule(draw=st.data(), how=st.sampled_from(["whole", "part", "twice", "ask again"]))
    def go_on_with_a_lease(self, draw: st.DataObject, how: str) -> None:
        holding = draw.draw(st.sampled_from(list(self.here.holdings.values())))
        if how == "ask again":
            answer, effects = self.state.acquire(**holding.arguments, now=self.now)
            self.absorb(effects)
            assert answer == (holding.answer or Waiting()) or self.may_be_revoked(holding)
            return
        rank = draw.draw(st.sampled_from(list(holding.holders))) if how == "part" else None
        self.let_go(holding, rank)
        for _ in range(2 if how == "twice" else 1):
            self.absorb(self.state.release(holding.grant, rank, self.now))

    def let_go(self, holding: Holding, rank: int | None) -> None:
        for ending in list(holding.holders) if rank is None else [rank]:
            del holding.holders[ending]
        if not holding.holders:
            del self.here.holdings[holding.grant]
            self.ended[holding.grant] = "released"
            if holding.answer is None:
                self.cancelled.add(holding.grant)

    def may_be_revoked(self, holding: Holding) -> bool:
        return holding.revocable and self.now >= holding.since + self.limits.revoke_after_seconds

    # ---- engines end, and say other things

    @rule(draw=st.data(), comes=st.booleans())
    def a_session_comes_or_ends(self, draw: st.DataObject, comes: bool) -> None:
        if len(self.here.sessions) < 2 or (comes and len(self.here.sessions) < 4):
            self.join()
        else:
            self.bury(draw.draw(st.sampled_from(self.here.sessions)))

    def bury(self, session: bytes) -> None:
        self.here.sessions.remove(session)
        for ticket in [ticket for ticket in self.here.tickets.values() if ticket.holder == session]:
            del self.here.tickets[ticket.grant]
            self.ended[ticket.grant] = "session gone"
        for holding in list(self.here.holdings.values()):
            if holding.answer is None and holding.session == session:
                self.let_go(holding, None)
                continue
            for rank in [rank for rank, holder in holding.holders.items() if holder == session]:
                self.let_go(holding, rank)
        self.absorb(self.state.end_session(session, self.now))

    def seal(self, draw: st.DataObject) -> None:
        seconds = draw.draw(st.sampled_from([0.0, 3.0, 30.0]))
        self.do_seal(self.prompt(draw), waits=draw.draw(st.booleans()), seconds=seconds)

    def do_seal(self, prompt: Prompt, *, waits: bool, seconds: float) -> None:
        seal_id = self.number()
        matched = self.state.match(prompt.group, prompt.keys).blocks
        self.waiting_seals[seal_id] = (prompt, self.now + seconds)
        answer, effects = self.state.seal(
            seal_id=seal_id,
            group=prompt.group,
            keys=prompt.keys,
            wait_flushed=waits,
            deadline=self.now + seconds,
            now=self.now,
        )
        if isinstance(answer, SealAnswer):
            assert answer.blocks == matched
            self.seal_ready(seal_id, answer)
        else:
            assert waits
            assert seconds > 0
        self.absorb(effects)

    def seal_ready(self, seal_id: int, answer: SealAnswer) -> None:
        prompt, _ = self.waiting_seals.pop(seal_id)
        assert answer.flushed_blocks <= answer.blocks
        for rank in range(prompt.spec.identity.parallel.shards):
            flushed = set(prompt.block_keys[: answer.flushed_blocks])
            right = self.disk.right_keys(prompt.group, rank) | self.disk.harmed_keys(prompt.group, rank)
            right |= self.tier.right_keys(prompt.group, rank) | self.tier.harmed_keys(prompt.group, rank)
            assert flushed <= right, "reported flushed, and not there"
        self.promised.append(Promised(prompt, answer.flushed_blocks))
        self.renege_on_the_harmed()

    def renege_on_the_harmed(self) -> None:
        """What the disk itself has lost or spoilt is nobody's promise any more."""
        for promise in self.promised:
            for rank in range(promise.prompt.spec.identity.parallel.shards):
                promise.end_before(self.disk.harmed_keys(promise.prompt.group, rank))
                promise.end_before(self.tier.harmed_keys(promise.prompt.group, rank))

    @rule(draw=st.data())
    def report_bad(self, draw: st.DataObject) -> None:
        prompt = self.prompt(draw)
        first_bad = draw.draw(st.sampled_from([MAX_BLOCKS, 2, 1, 0]))
        before = self.state.match(prompt.group, prompt.keys).blocks
        bad = set(prompt.block_keys[first_bad:])
        for files in (self.disk.files, self.tier.files):
            for file in [file for file in files.values() if bad & set(split(file.keys))]:
                for promise in self.promised:
                    promise.end_before(set(split(file.keys)))  # a file goes as a whole
        for promise in self.promised:
            promise.end_before(bad)
        self.absorb(self.state.report_bad(prompt.group, prompt.keys, first_bad, self.now))
        assert self.state.match(prompt.group, prompt.keys).blocks <= min(before, first_bad)

    @rule(draw=st.data(), rate=st.sampled_from([4.0, 400.0, 12_000.0, 1e6]))
    def report_prefill(self, draw: st.DataObject, rate: float) -> None:
        """What goes first may be another one then, and nothing else."""
        sample = PrefillSample(8_192, 0, prefill_seconds(8_192, 0, rate))
        self.state.report_prefill(self.prompt(draw).group, [sample] * 8)

    # ---- time

    @rule(seconds=st.sampled_from([1.0, SEAL_AFTER, 60.0]))
    def time_passes(self, seconds: float) -> None:
        if seconds >= 60.0:
            self.much_time_passes()
            return
        wakeup = self.state.next_wakeup()
        self.now += seconds
        if wakeup is not None:
            self.now = max(self.now - seconds, min(wakeup, self.now))  # the front looks no later than asked
        self.tick()

    def much_time_passes(self) -> None:
        end = self.now + 60.0
        while self.now < end:
            self.now = max(self.now, min(self.state.next_wakeup() or end, end))
            self.tick()

    def tick(self) -> None:
        self.absorb(self.state.tick(self.now))
        late = [
            holding for holding in self.here.holdings.values() if not holding.answer and holding.deadline <= self.now
        ]
        assert not late, "a lease was not answered by its deadline"
        assert all(deadline > self.now for _, deadline in self.waiting_seals.values()), (
            "a seal was not answered in time"
        )
        wakeup = self.state.next_wakeup()
        assert wakeup is None or wakeup > self.now, "the front would spin"

    @rule()
    def learn(self) -> None:
        """As after many more requests than there can be here."""
        hazards = self.state._ledger.reuse.hazards
        hazards.request(self.now)
        hazards._learn(self.now)

    # ---- the storage worker and its disk

    @precondition(lambda self: self.worker.waiting)
    @rule(draw=st.data(), fails=st.sampled_from([False, False, False, True]), leaves=st.booleans())
    def the_worker_does_something(self, draw: st.DataObject, fails: bool, leaves: bool) -> None:
        self.worker.scribble()
        op = draw.draw(st.sampled_from(self.worker.runnable()))
        reason = draw.draw(st.sampled_from(WRITE_FAILURES)) if fails else None
        self.worker.run(op, reason, leaves_file=leaves, valid=draw.draw(st.integers(0, 2)))

    @precondition(lambda self: self.disk_worker.waiting or self.disk_worker.unheard)
    @rule(draw=st.data(), fails=st.sampled_from([False, False, False, True]))
    def the_disk_worker_does_something(self, draw: st.DataObject, fails: bool) -> None:
        worker = self.disk_worker
        if worker.unheard and (not worker.waiting or draw.draw(st.booleans())):
            self.disk_worker_is_heard()
            return
        worker.scribble()
        op = draw.draw(st.sampled_from(worker.runnable()))
        reason = draw.draw(st.sampled_from([*WRITE_FAILURES, Reason.NAME_TAKEN])) if fails else None
        if reason is Reason.NAME_TAKEN and not isinstance(op, Demote):
            reason = Reason.IO_ERROR
        worker.run(op, reason, valid=draw.draw(st.integers(0, 2)))

    @precondition(lambda self: self.limits.disk_bytes)
    @rule(draw=st.data())
    def something_happens_to_the_disk_tier(self, draw: st.DataObject) -> None:
        if not self.is_disk_worker_up:
            self.start_disk_worker()
            return
        kinds = [self.the_disk_worker_dies, self.the_disk_tier_is_looked_at, self.others_take_room_on_disk]
        kinds += [self.another_node_stores] * 2
        if self.tier.files:
            kinds += [self.another_node_uses, self.another_node_removes, self.the_disk_tier_is_harmed]
        draw.draw(st.sampled_from(kinds))(draw)

    def start_disk_worker(self) -> None:
        self.is_disk_worker_up = True
        self.absorb(self.state.disk_worker_started(self.now))
        if self.state.is_disk_recovering:
            for spec in self.groups:
                for rank in range(spec.identity.parallel.shards):
                    known = self.committed.setdefault((spec.group, rank), set())
                    known.update(self.tier.keys_of(spec.group, rank))
            for report in [*self.tier.resume(), *self.tier.recovery()]:
                self.absorb(self.state.disk_report(report, self.now))

    def the_disk_worker_dies(self, draw: st.DataObject) -> None:
        """What it would have told of others, the next one tells: it looks at all files again."""
        told = [report for op, report in self.disk_worker.unheard if op is None]
        self.disk_worker.die(draw.draw(st.integers(0, 3)))
        self.is_disk_worker_up = False
        self.absorb(self.state.disk_worker_died(self.now))
        for report in told:
            self.disk_worker.tell(report)

    def the_disk_tier_is_looked_at(self, draw: st.DataObject) -> None:
        is_writable = draw.draw(st.sampled_from([True, True, False]))
        self.disk_overhead = draw.draw(st.sampled_from([0, 0, PAGE]))
        reason = None if is_writable else draw.draw(st.sampled_from([Reason.READ_ONLY, Reason.IO_ERROR]))
        is_readable = draw.draw(st.sampled_from([True, True, True, False]))
        health = TierHealth(is_writable, self.disk_overhead, free_bytes=1 << 30, reason=reason, readable=is_readable)
        self.absorb(self.state.disk_report(health, self.now))

    def others_take_room_on_disk(self, draw: st.DataObject) -> None:
        limit = draw.draw(st.sampled_from([0, 3 * PAGE, self.limits.disk_bytes // 2, self.limits.disk_bytes]))
        self.absorb(self.state.disk_limit(limit, self.now))

    def another_node_stores(self, draw: st.DataObject) -> None:
        prompt = draw.draw(st.sampled_from([prompt for prompt in self.prompts if prompt.spec.persistent]))
        ranks = prompt.spec.identity.parallel.shards
        first = draw.draw(st.integers(0, MAX_BLOCKS - 1))
        end = draw.draw(st.integers(first + 1, MAX_BLOCKS))
        whose = [0, 1] if ranks == 1 or draw.draw(st.booleans()) else [draw.draw(st.integers(0, 1))]
        for rank in [rank for rank in whose if rank < ranks]:
            name = (prompt.group, rank, prompt.key(first))
            there = self.tier.files.get(name)
            keys = prompt.keys[first * KEY_BYTES : end * KEY_BYTES]
            if there is not None and not keys.startswith(there.keys):
                continue  # the file that is there stays
            if there is not None:
                self.disk_worker.tell(FileLost(*name))
            self.disk_worker.put_rank(prompt, first, end, rank, self.now)
            self.committed.setdefault((prompt.group, rank), set()).update(split(keys))

    def another_node_uses(self, draw: st.DataObject) -> None:
        self.disk_worker.use(draw.draw(st.sampled_from(list(self.tier.files))), self.now + 2.0)

    def another_node_removes(self, draw: st.DataObject) -> None:
        self.disk_worker.lose(draw.draw(st.sampled_from(list(self.tier.files))))
        self.renege_on_the_harmed()

    def the_disk_tier_is_harmed(self, draw: st.DataObject) -> None:
        name = draw.draw(st.sampled_from(list(self.tier.files)))
        if self.tier.files[name].content:
            self.tier.damage(name, draw.draw(st.integers(0, len(self.tier.files[name].content) - 1)))
            self.renege_on_the_harmed()

    @precondition(lambda self: self.worker.unheard)
    @rule()
    def the_worker_is_heard(self) -> None:
        self.absorb(self.state.report(self.worker.deliver(), self.now))

    @precondition(lambda self: self.worker.waiting)
    @rule(draw=st.data())
    def the_worker_does_all_it_can(self, draw: st.DataObject) -> None:
        if self.worker.waiting and draw.draw(st.booleans()):
            failing = draw.draw(st.sampled_from(self.worker.runnable()))
            reason = draw.draw(st.sampled_from(WRITE_FAILURES))
            self.worker.run(failing, reason, leaves_file=draw.draw(st.booleans()))
        self.worker.run_all()
        self.hear_all()

    def hear_all(self) -> None:
        while self.worker.unheard:
            self.absorb(self.state.report(self.worker.deliver(), self.now))

    def disk_worker_does_all(self) -> None:
        if self.is_disk_worker_up:
            self.disk_worker.run_all()
            while self.disk_worker.unheard:
                self.disk_worker_is_heard()

    def disk_worker_is_heard(self) -> None:
        report = self.disk_worker.deliver()
        is_gone = isinstance(report, ReadDone) and report.gone
        if is_gone or isinstance(report, FileLost):
            self.others_did = self.others_took = True
        self.absorb(self.state.disk_report(report, self.now))

    def _load(self, draw: st.DataObject) -> None:
        """A lease that waits for NVMe; a worker and a reader that are quick, or not."""
        if not self.state.num_extents:
            self._store(draw, "seal")  # or there is nothing to load
        holding = self.do_acquire(self.prompt(draw), draw, wait=20.0)
        haste = draw.draw(st.sampled_from(["", "work", "work and release", "release"]))
        if haste.startswith("work"):
            self.work_until_quiet()
        if haste.endswith("release") and holding.grant in self.here.holdings:
            self.let_go(holding, None)
            self.absorb(self.state.release(holding.grant, None, self.now))

    @rule(draw=st.data())
    def other_prompts_push_it_out(self, draw: st.DataObject) -> None:
        """Room in memory is taken by what is newer, and what was pushed out to disk is asked for again."""
        for prompt in self.prompts[draw.draw(st.integers(0, 2)) :: 3]:
            self.store_prompt(prompt, self.here.sessions[0])
            self.do_seal(prompt, waits=False, seconds=0.0)
            self.work_until_quiet()
        self._load(draw)

    load = rule(draw=st.data())(_load)
    load_more = rule(draw=st.data())(_load)

    @rule(draw=st.data())
    def something_happens_to_the_machine(self, draw: st.DataObject) -> None:
        kinds: list[Callable[[st.DataObject], None]] = []
        if self.is_worker_up:
            kinds += [self.the_tier_is_looked_at, self.other_data_take_room, *[self.the_worker_dies] * 3]
        if any(file.content for file in self.disk.files.values()):
            kinds += [self.the_disk_is_harmed] * 2 + [self.the_disk_is_scrubbed] * 2
        if self.old:
            kinds += [self.the_engines_of_an_old_front_end] * 4 + [self.the_engines_of_an_old_front_go_on]
        if self.is_worker_up:
            kinds += [self.the_front_restarts, self.the_node_stops]
        if not kinds:
            kinds += [self.the_front_restarts, self.warm_up, self.warm_up, self.warm_up, self.warm_up]
        draw.draw(st.sampled_from(kinds))(draw)

    def the_worker_dies(self, draw: st.DataObject) -> None:
        done = draw.draw(st.integers(0, 3))
        self.worker.die(done)
        self.is_worker_up = False
        self.absorb(self.state.worker_died(self.now))

    @precondition(lambda self: not self.is_worker_up and self.limits.nvme_bytes)
    @rule()
    def the_worker_comes_back(self) -> None:
        self.start_worker()

    def start_worker(self) -> None:
        self.is_worker_up = True
        self.absorb(self.state.worker_started(self.now))
        if self.state.is_recovering:
            self.recover()
            self.real_bytes = self.booked_bytes()

    def the_disk_is_harmed(self, draw: st.DataObject) -> None:
        name = draw.draw(st.sampled_from([name for name, file in self.disk.files.items() if file.content]))
        if draw.draw(st.booleans()):
            self.disk.lose(name)
        else:
            self.disk.damage(name, draw.draw(st.integers(0, len(self.disk.files[name].content) - 1)))
        self.renege_on_the_harmed()

    def the_tier_is_looked_at(self, draw: st.DataObject) -> None:
        is_writable = draw.draw(st.sampled_from([True, True, False]))
        self.overhead = overhead = draw.draw(st.sampled_from([0, 0, PAGE, 4 * PAGE]))
        reason = None if is_writable else Reason.READ_ONLY
        is_readable = draw.draw(st.sampled_from([True, True, True, False]))
        health = TierHealth(is_writable, overhead, free_bytes=1 << 30, reason=reason, readable=is_readable)
        self.absorb(self.state.report(health, self.now))

    def the_disk_is_scrubbed(self, draw: st.DataObject) -> None:
        """An operator has files verified; one is found bad and set aside."""
        if not self.is_worker_up:
            return
        name = draw.draw(st.sampled_from(list(self.disk.files)))
        self.disk.lose(name)
        self.renege_on_the_harmed()
        self.worker.tell(
            ScrubProgress(
                op=0, checked=1, total=1, checked_bytes=1, damaged=[("x", "checksum")], set_aside=[name], finished=True
            )
        )

    def other_data_take_room(self, draw: st.DataObject) -> None:
        self.nvme_limit = draw.draw(st.sampled_from([0, 3 * PAGE, self.limits.nvme_bytes // 2, self.limits.nvme_bytes]))
        self.absorb(self.state.nvme_limit(self.nvme_limit, self.now))

    # ---- operators

    def warm_up(self, draw: st.DataObject) -> None:
        budget = draw.draw(st.sampled_from([0, PAGE, 10 * PAGE]))
        if self.warmups and draw.draw(st.booleans()):
            self.absorb(self.state.cancel_warmup(self.warmups.pop(), self.now))
            return
        job = self.name("warmup")
        self.warmups.append(job)
        is_pin_due = bool(self.state._ledger.pins.to_promote)  # that may evict, and may come now
        evictable = {extent.key: extent.host_blocks for extent in self.state._ledger.tree}
        self.absorb(self.state.start_warmup(job, WarmupScope(budget_bytes=budget), self.now))
        for extent in [] if is_pin_due else self.state._ledger.tree:
            assert extent.host_blocks >= evictable.get(extent.key, 0), "a warm-up evicted for a guess"
        progress = self.state.warmup_progress(job)
        assert progress is not None
        assert progress.done_extents <= progress.total_extents

    @rule(
        draw=st.data(),
        tier=st.sampled_from(["host", "host", "nvme"]),
        seconds=st.sampled_from([0.0, 0.0, 3.0, 100.0]),
        failure=st.sampled_from([None, None, None, Reason.IO_ERROR]),
    )
    def pin(self, draw: st.DataObject, tier: str, seconds: float, failure: Reason | None) -> None:
        """Somebody wants a prefix to stay, or no more. Others want the room."""
        self.worker.pin_failure = failure
        known = [state.record.pin for state in self.state.pins()]
        if known and draw.draw(st.booleans()):
            pin = draw.draw(st.sampled_from(known))
            over, effects = self.state.unpin(pin, self.now)
            self.absorb(effects)
            assert over is not None
            assert pin not in [state.record.pin for state in self.state.pins()]
            return
        prompt, pin = self.prompt(draw).first(draw.draw(st.sampled_from([2, 1, 5]))), self.name("pin")
        before = self.state.pins()
        for _ in range(2):  # its reply may be lost
            answer, effects = self.state.pin(
                pin=pin,
                group=prompt.group,
                keys=prompt.keys,
                owner="ann",
                tier=tier,
                seconds=seconds,
                now=self.now,
            )
            self.absorb(effects)
        if isinstance(answer, PinRefused):
            assert self.state.pins() == before
            return
        for tier_bytes in self.state.pinned_tiers():
            assert tier_bytes.held_bytes <= tier_bytes.cap_bytes
        if draw.draw(st.booleans()):
            self.kept = self.blocks_that_stay()
            for other in self.prompts[:: draw.draw(st.sampled_from([1, -1]))]:
                self.store_prompt(other, self.here.sessions[0])
                self.do_seal(other, waits=False, seconds=0.0)
                self.work_until_quiet()

    @rule(draw=st.data())
    def purge(self, draw: st.DataObject) -> None:
        """An operator wants a tenant's, a model's or a prefix's data gone."""
        prompt = self.prompt(draw)
        kind = draw.draw(st.sampled_from(["tenant", "prefix", "prefix", "model"]))
        if kind == "prefix" and prompt.blocks:
            key = prompt.key(draw.draw(st.integers(0, prompt.blocks - 1)))
            what: object = OfPrefix(key.hex()[: draw.draw(st.sampled_from([64, 16]))])
            gone = self.blocks_from(self.head_of(key))
        else:
            what = OfModel("f" * 64) if kind == "model" else OfTenant(prompt.spec.identity.salt)
            groups = self.groups if kind == "model" else [s for s in self.groups if s.identity.salt == what.salt]
            gone = {p.key(i) for p in self.prompts if p.spec in groups for i in range(p.blocks)}
        before = [self.state.match(p.group, p.keys) for p in self.prompts]
        preview = self.state.preview_purge(what, self.now)
        assert before == [self.state.match(p.group, p.keys) for p in self.prompts]
        purge = self.name("purge")
        if not isinstance(preview, NotOne):
            self.expect_gone(gone)
            self.purges.append(purge)
        answer, effects = self.state.start_purge(purge, what, self.now)
        self.absorb(effects)
        for p in self.prompts:
            first_gone = next((index for index in range(p.blocks) if p.key(index) in gone), p.blocks)
            assert self.state.match(p.group, p.keys).blocks <= first_gone, "purged, and matched"
        if isinstance(answer, NotOne):  # the first digits of a key that is not known
            assert answer == preview
        else:
            assert answer.about == preview.about

    def expect_gone(self, gone: set[bytes]) -> None:
        for spec in self.groups:
            for rank in range(spec.identity.parallel.shards):
                self.committed.setdefault((spec.group, rank), set()).difference_update(gone)
        for promise in self.promised:
            promise.end_before(gone)
        pools = [self.state._ledger.pool, *(pool.slots for pool in self.state._ledger.devices.pools if pool.slots)]
        for slab in [slab for pool in pools for slab in pool._slabs.values()]:
            for slot in slab.used:  # who writes a wide slot writes all of its pages
                self.here.arena.zero(slot + PAGE, slab.slot_bytes - PAGE)
        self.tainted |= {slot: content for slot, content in self.here.arena.items() if content[0] in gone}
        for ticket in self.here.tickets.values():
            if set(ticket.prompt.block_keys) & gone:
                ticket.purged = True
                self.tainted |= dict.fromkeys(set(ticket.answer.offsets) - ticket.lost)

    def head_of(self, key: bytes) -> bytes:
        """Of the extent that holds the block; the block itself where none does."""
        holders = [extent.key for extent in self.state._ledger.tree if key in split(extent.keys)]
        return holders[0] if holders else key

    def blocks_from(self, head: bytes) -> set[bytes]:
        return {
            prompt.key(index)
            for prompt in self.prompts
            for index in range(prompt.blocks)
            if head in prompt.block_keys[: index + 1]
        }

    # ---- the front dies

    def the_front_restarts(self, draw: st.DataObject) -> None:
        """Its workers are killed with it; engines live on and may go on copying from and to the old arena."""
        self.worker.die(draw.draw(st.integers(0, 3)))
        self.disk_worker.die(draw.draw(st.integers(0, 3)))
        if self.disk.files and draw.draw(st.booleans()):
            name = draw.draw(st.sampled_from(list(self.disk.files)))
            draw.draw(st.sampled_from([self.disk.lose, self.disk.shorten]))(name)
            self.renege_on_the_harmed()
        if draw.draw(st.booleans()):
            self.old.append(self.here)
        self.start_front()

    def the_node_stops(self, draw: st.DataObject) -> None:
        """SIGTERM: seal, write what there is time for, give up the rest; then a new node on the same disk."""
        self.absorb(self.state.begin_shutdown(self.now))
        session = self.here.sessions[0]
        refused = Refused(Reason.SHUTDOWN)
        assert self.ask_for_a_lease(self.prompts[0], grant=self.name("late"), session=session) == (refused, [])
        for _ in range(draw.draw(st.integers(0, 4))):
            if self.worker.waiting:
                self.worker.run(self.worker.waiting[0])
                self.hear_all()
        self.absorb(self.state.drop_dirty(Reason.SHUTDOWN, self.now))
        self.work_until_quiet()
        assert self.state.dirty().extents == 0
        self.the_front_restarts(draw)

    def the_engines_of_an_old_front_go_on(self, draw: st.DataObject) -> None:
        old = draw.draw(st.sampled_from(self.old))
        for ticket in old.tickets.values():
            ticket.fill()
            answer, effects = self.state.commit(ticket.grant, self.now)
            assert answer == Refused(Reason.GRANT_ENDED)
            assert effects == []

    def the_engines_of_an_old_front_end(self, draw: st.DataObject) -> None:
        self.old.clear()
        self.limit_host()

    # ---- promises, after every step

    @invariant()
    def its_own_check_passes(self) -> None:
        self.state.check()

    @invariant()
    def what_was_posted_is_what_host_memory_holds(self) -> None:
        for posting in self.state.take_postings(self.now):
            self.balances.fold(posting)
        there = {group: num_bytes for group, num_bytes in self.state.host_balances() if num_bytes}
        assert self.balances.of_account(Account.HOST) == there
        on_disk = {group: num_bytes for group, num_bytes in self.state.disk_balances() if num_bytes}
        assert self.balances.of_account(Account.DISK) == on_disk
        on_devices = {group: num_bytes for group, num_bytes in self.state.gpu_balances() if num_bytes}
        assert self.balances.of_account(Account.GPU) == on_devices

    @invariant()
    def every_leased_block_carries_its_own_stamp(self) -> None:
        for incarnation in (self.here, *self.old):
            for holding in incarnation.holdings.values():
                for offsets, generations, expected in holding.live_parts():
                    now = [incarnation.generations[offset // PAGE] for offset in offsets]
                    content = holding.arena.read(offsets)
                    if holding.lost:
                        lost = [offset in holding.lost for offset in offsets]
                        assert all(now[at] != generations[at] for at, is_lost in enumerate(lost) if is_lost)
                    elif not holding.revocable:
                        assert now == generations, "a slot was given up under its reader"
                        assert content == expected
                    for index, stamp in enumerate(expected):
                        assert now[index] != generations[index] or content[index] == stamp

    @invariant()
    def every_extent_is_a_run_of_one_prompt(self) -> None:
        for extent in self.state._ledger.tree:
            parent, index, _ = self.blocks[extent.key]
            step = self.block_tokens
            assert (extent.parent, extent.first_token) == (parent, index * step)
            tokens = b""
            for key in split(extent.keys):
                its_parent, _, its_tokens = self.blocks[key]
                assert its_parent == parent, "a block behind another than its predecessor"
                parent, tokens = key, tokens + its_tokens
            assert extent.tokens in (None, tokens)

    @invariant()
    def what_is_told_as_dropped_left_the_last_tier_and_nothing_is_told_twice(self) -> None:
        resident = sum(extent.num_blocks for extent in self.state._ledger.tree)
        assert self.came == resident + self.went.total()
        evicted = {reason: blocks for reason, blocks in self.went.items() if reason in EVICTED_FOR and blocks}
        assert evicted == {reason: blocks for reason, blocks in self.told.items() if blocks}

    @invariant()
    def eviction_leaves_no_orphans(self) -> None:
        """A block goes only after all that hang on it; what is found bad may go at any time."""
        tree = self.state._ledger.tree
        orphans = {extent.key for extent in tree if extent.is_orphan}
        bereft = {key for key in orphans - self.orphans if {key, tree.heads[key].parent} <= self.present}
        damaged = self.state.counts.damaged_extents.total()
        is_excused = damaged > self.damaged or self.others_did
        assert not bereft or is_excused, "a parent was evicted before its children"
        self.orphans, self.damaged, self.others_did = orphans, damaged, False
        self.present = {key for extent in tree for key in split(extent.keys)}

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        ledger, cascade = self.state._ledger, self.state._cascade
        owners: dict[int, str] = {}

        def claim(slots: list[int], owner: str) -> None:
            for slot in slots:
                assert slot not in owners, f"slot {slot} belongs to {owners.get(slot)} and to {owner}"
                owners[slot] = owner

        for ticket in self.here.tickets.values():
            claim([slot for slot in ticket.answer.offsets if slot not in ticket.lost], f"ticket {ticket.grant!r}")
        self.claim_beside(claim)
        for block in ledger.staged.values():
            claim(list(block.slots.values()), f"staged {block.key[:4].hex()}")
            for rank, slot in block.slots.items():
                assert self.here.arena.read([slot]) == [(block.key, rank)]
        extents = {*ledger.tree, *self.extents_outside_the_tree()}
        for extent in extents:
            for rank, slots in enumerate(extent.slots):
                claim(slots, f"{extent} rank {rank}")
                assert self.here.arena.read(slots) == stamps(extent.keys, rank)[: len(slots)], "a foreign block"
            for doomed in extent.doomed:
                claim(doomed.slots, f"doomed of {extent}")
                assert doomed.waits_for
        for slot, owner in cascade.slots_being_read():
            claim([slot], owner)
        for wipe in self.state._wiping.all():
            claim(wipe.slots, "a wipe")
        used = ledger.pool.used_slots() | self.slots_used_in_pools()
        assert set(owners) == used, "slots in use that nobody owns, or the other way round"

    def claim_beside(self, claim: Callable[[list[int], str], None]) -> None:
        """Of what engines know nothing."""

    def slots_used_in_pools(self) -> set[int]:
        return set()

    def keys_landing(self, rank: int) -> set[bytes]:
        """Committed, and not to be seen before they are copied from a device."""
        return set()

    def slots_in_use(self) -> set[int]:
        """That engines or workers may touch."""
        workers = self.worker.slots_in_use() | self.disk_worker.slots_in_use() | self.slots_of_devices()
        return self.slots_of_engines() | workers

    def extents_outside_the_tree(self) -> set[object]:
        ledger, cascade = self.state._ledger, self.state._cascade
        extents = cascade.extents_in_operations()
        extents |= {segment.extent for lease in ledger.leases.values() for segment in lease.path}
        extents |= {extent for ticket in ledger.writers() for extent in ticket.path}
        return extents - set(ledger.tree)

    @invariant()
    def no_tier_holds_more_than_it_may(self) -> None:
        for tier in self.state.tiers():
            if tier.tier == "host":
                assert tier.used_bytes + tier.reserved_bytes <= tier.capacity_bytes
        if self.limits.nvme_bytes:
            booked = self.booked_bytes()
            assert self.disk.used_bytes <= booked, "more lies on the disk than is booked"
            assert booked + self.overhead <= self.nvme_limit or booked <= self.real_bytes
            self.real_bytes = booked

    def booked_bytes(self) -> int:
        """What the core says lies on the disk, or will, what a purge could not yet remove included."""
        (nvme,) = [tier for tier in self.state.tiers() if tier.tier == "nvme"]
        return nvme.used_bytes + nvme.reserved_bytes + self.state._cascade.nvme.stranded_bytes

    @invariant()
    def a_match_is_no_more_than_was_committed_and_is_there(self) -> None:
        for prompt in self.prompts:
            match = self.state.match(prompt.group, prompt.keys)
            assert match.host_blocks <= match.blocks <= prompt.blocks
            if not match.blocks:
                continue
            segments = self.state._ledger.tree.walk(prompt.group, prompt.keys)
            for rank in range(prompt.spec.identity.parallel.shards):
                committed = self.committed.get((prompt.group, rank), set())
                harmed = self.disk.harmed_keys(prompt.group, rank)
                for segment in segments:
                    for at in range(segment.blocks):
                        index = segment.start + at
                        assert prompt.key(index) in committed, "matched what nobody committed"
                        assert segment.extent.block_key(at) == prompt.key(index)
                        in_host = at < len(segment.extent.slots[rank])
                        on_disk = segment.extent.nvme is FileState.PRESENT and (
                            prompt.key(index) in harmed
                            or self.disk.has_block(prompt.group, rank, segment.extent.key, at)
                        )
                        in_tier = segment.extent.disk is FileState.PRESENT and (
                            prompt.key(index) in self.harmed_on_disk(prompt.group, rank)
                            or self.tier.has_block(prompt.group, rank, segment.extent.key, at)
                        )
                        in_pool = at < self.state._ledger.devices.longest_of_rank(segment.extent, rank)
                        assert in_host or on_disk or in_tier or in_pool, "matched, and nowhere"
                        assert in_host or index >= match.host_blocks

    @invariant()
    def a_file_that_is_believed_in_is_there(self) -> None:
        for extent in self.state._ledger.tree:
            if extent.nvme is FileState.PRESENT:
                for rank in range(len(extent.slots)):
                    file = self.disk.files.get((extent.group, rank, extent.key))
                    is_right = file is not None and file.keys.startswith(extent.keys)
                    assert is_right or extent.key in self.disk.harmed_keys(extent.group, rank)
            if extent.disk is FileState.PRESENT:
                for rank in range(len(extent.slots)):
                    file = self.tier.files.get((extent.group, rank, extent.key))
                    is_right = file is not None and file.keys.startswith(extent.keys)
                    assert is_right or extent.key in self.harmed_on_disk(extent.group, rank)

    def harmed_on_disk(self, group: bytes, rank: int) -> set[bytes]:
        """By others too, of whose doing the core has not heard."""
        unheard = {report.key for _, report in self.disk_worker.unheard if isinstance(report, FileLost)}
        return self.tier.harmed_keys(group, rank) | unheard

    @invariant()
    def nothing_waits_in_the_wings_that_could_appear(self) -> None:
        ledger = self.state._ledger
        visible = {extent.block_key(index) for extent in ledger.tree for index in range(extent.num_blocks)}
        for block in ledger.staged.values():
            is_whole = len(block.slots) == ledger.groups[block.group].ranks
            assert not (is_whole and (block.parent in visible or block.parent == block.group))

    @invariant()
    def what_is_pinned_stays(self) -> None:
        """Unless it is found bad, what was pinned before this step and is pinned now is where it was."""
        damaged = self.state.counts.damaged_extents.total()
        before, self.kept = self.kept, self.blocks_that_stay()
        wanted = {tier: set(self.keys_wanted(tier)) for tier in before}
        is_short = any(state.phase is PinPhase.SHORT for state in self.state.pins())
        for tier, keys in before.items():
            gone = (keys & wanted[tier]) - self.kept[tier]
            is_excused = is_short or damaged > self.pins_damaged or self.others_took
            assert not gone or is_excused, f"pinned, and gone from {tier}"
        self.pins_damaged, self.others_took = damaged, False

    def keys_wanted(self, tier: str) -> Iterator[bytes]:
        for state in self.state.pins():
            if state.phase is not PinPhase.PURGED and tier in ("nvme", state.record.tier):
                yield from split(state.record.keys)

    @invariant()
    def who_let_go_before_the_answer_is_answered_at_once(self) -> None:
        assert not self.cancelled

    @invariant()
    def the_counts_are_the_models(self) -> None:
        assert self.state.num_sessions == len(self.here.sessions)
        assert self.state.num_tickets == len(self.here.tickets)
        firm = [holding for holding in self.here.holdings.values() if not self.may_be_revoked(holding)]
        assert len(firm) <= self.state.num_leases <= len(self.here.holdings)

    def check_promises(self) -> None:
        """What was reported flushed, and is not evicted or harmed since, is found by match."""
        if self.state.is_recovering:
            return
        for promise in self.promised:
            keys = promise.prompt.keys[: promise.blocks * KEY_BYTES]
            assert self.state.match(promise.prompt.group, keys).blocks == promise.blocks, "flushed, and lost"

    @invariant()
    def what_was_flushed_is_found(self) -> None:
        self.check_promises()

    # ---- the end: everybody goes, and nothing is left over

    def teardown(self) -> None:
        if not self.prompts or sys.exc_info()[0] is not None:
            return  # it never began, or has failed already
        for session in list(self.here.sessions):
            self.bury(session)
        if not self.is_worker_up and self.limits.nvme_bytes:
            self.start_worker()
        if not self.is_disk_worker_up and self.limits.disk_bytes:
            self.start_disk_worker()
        if self.limits.disk_bytes:
            health = TierHealth(True, self.disk_overhead, free_bytes=1 << 30)
            self.absorb(self.state.disk_report(health, self.now))
        self.worker.pin_failure = None
        for _ in range(3):
            self.work_until_quiet()
            self.now += 2 * STAGED_SECONDS
            self.tick()
        self.work_until_quiet()
        self.check_quiet()
        self.every_slot_has_one_owner()
        self.the_worker_dies_for_good()

    def work_until_quiet(self) -> None:
        for _ in range(200):
            disk_is_idle = not (self.disk_worker.waiting or self.disk_worker.unheard) or not self.is_disk_worker_up
            is_idle = not self.devices_do_all()
            if not (self.worker.waiting or self.worker.unheard) and disk_is_idle and is_idle:
                return
            self.worker.run_all()
            self.hear_all()
            self.disk_worker_does_all()
        raise AssertionError("the core keeps the worker busy for ever")

    def check_quiet(self) -> None:
        state, ledger = self.state, self.state._ledger
        assert (state.num_leases, state.num_tickets, state.num_sessions) == (0, 0, 0)
        assert not ledger.staged
        assert not ledger.writing
        assert state.dirty().extents == 0 or not state._cascade.nvme.is_writable
        known = [progress for purge in self.purges if (progress := state.purge_progress(purge)) is not None]
        assert len(known) >= min(len(self.purges), MAX_REMEMBERED)
        for progress in known:
            assert progress.phase is PurgePhase.GONE or self.old, f"nobody holds anything of it: {progress}"
        assert not self.tainted or self.old
        assert not self.disk.purges
        assert not self.tier.purges
        resident = 0
        for extent in ledger.tree:
            assert not extent.holds
            assert not extent.doomed
            assert not extent.reading
            assert state._cascade.is_at_rest(extent)
            assert extent.nvme in (FileState.ABSENT, FileState.PRESENT), "waits for what nobody does"
            assert extent.disk in (FileState.ABSENT, FileState.PRESENT), "waits for what nobody does"
            resident += sum(map(len, extent.slots)) * ledger.group_of(extent).slot_bytes
        assert ledger.pool.used_bytes == resident
        assert ledger.doomed_bytes == 0
        if self.limits.nvme_bytes:
            assert set(self.disk.pins) == {state.record.pin for state in state.pins()}
            known = {
                (extent.group, rank, extent.key)
                for extent in ledger.tree
                if extent.nvme is not FileState.ABSENT
                for rank in range(len(extent.slots))
            }
            assert set(self.disk.files) <= known, "a file that nobody knows"

    def the_worker_dies_for_good(self) -> None:
        """One last restart: what was flushed is found."""
        self.old.clear()
        self.worker.die(0)
        self.disk_worker.die(0)
        self.start_front()
        self.check_promises()


# Seconds on a machine with nothing else to do; the limit is for one that has, and none for a long run.
TestCacheMachine = pytest.mark.timeout(0 if "HYPOTHESIS_PROFILE" in os.environ else 300)(CacheMachine.TestCase)
TestCacheMachine.settings = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
