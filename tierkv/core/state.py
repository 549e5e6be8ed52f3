"""CacheState: the cache's decisions as one object. An event and the time go in; an answer and effects come out.

It never waits, does no I/O and knows no clock. "No room now" is an answer; what can't be answered yet is Waiting, and
its answer follows as a notice: perhaps among the effects of the same call, at its deadline at the latest, provided that
`tick` is called at `next_wakeup`.

    effects   instructions for the storage worker, to be carried out in order, and notices for the front
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import replace

from tierkv.core import audit, device_evicting, evicting, warmup
from tierkv.core.auto_pins import AutoPins
from tierkv.core.cascade import Cascade
from tierkv.core.counters import Counters
from tierkv.core.evicting import EvictState
from tierkv.core.expiry import Expiry
from tierkv.core.explain import Question, answer
from tierkv.core.explanation import Explanation
from tierkv.core.extent import Extent
from tierkv.core.grants import (
    Committed,
    Dirty,
    GroupSpec,
    Lease,
    Match,
    Refused,
    Reservation,
    SealAnswer,
    TicketState,
    Waiting,
)
from tierkv.core.hottest import HotPrefix
from tierkv.core.instructions import (
    AnyReport,
    DamageFound,
    FileLost,
    GroupFound,
    OnDisk,
    OpFailed,
    PinForgotten,
    PinFound,
    PinRecorded,
    PurgeRecorded,
    PurgeResumed,
    PurgeSwept,
    ReadDone,
    Recovered,
    RemoveDone,
    Rows,
    ScrubProgress,
    StillUsed,
    TierHealth,
    Touch,
    TouchRow,
    WriteDone,
    Zeroed,
)
from tierkv.core.journal import Posting
from tierkv.core.keys import NO_EXTRAS
from tierkv.core.leases import Leases
from tierkv.core.ledger import Effect, Ledger, Limits, SessionState, open_namespace
from tierkv.core.pins import PinnedTier, PinRefused, Pins, PinState
from tierkv.core.prefill_rates import PrefillSample
from tierkv.core.purge_scope import NotOne, What
from tierkv.core.purges import Purges, PurgeState
from tierkv.core.reasons import Reason
from tierkv.core.recent import RecentAcquires, Refusals
from tierkv.core.recount import HostRecount
from tierkv.core.recovered import RecoveredRows
from tierkv.core.residency import FileState
from tierkv.core.seals import Seals
from tierkv.core.size_report import SizeReport
from tierkv.core.tickets import Tickets
from tierkv.core.usage import (
    GroupUsage,
    PrefillUse,
    ShareUse,
    TierBytes,
    Wear,
    device_tier_bytes,
    group_usage,
    prefill_use,
    settled_bytes,
    share_use,
    tier_bytes,
    wear,
)
from tierkv.core.warmup import WarmupScope, WarmupState
from tierkv.core.wiping import Wiping

__all__ = ["CacheState", "Limits"]


class CacheState:
    """`generations` is indexed by slot offset / page_bytes; only this object writes it."""

    def __init__(self, limits: Limits, generations: MutableSequence[int]) -> None:
        self.limits = limits
        self._ledger = Ledger(limits, generations)
        self._cascade = Cascade(self._ledger)
        self._recovery: RecoveredRows | None = RecoveredRows(self._ledger, self._cascade) if limits.nvme_bytes else None
        self._cascade.nvme.is_open = self._recovery is None
        self._is_disk_recovering = self._ledger.has_disk
        self._leases = Leases(self._ledger, self._cascade)
        self._tickets = Tickets(self._ledger, self._cascade)
        self._seals = Seals(self._ledger, self._cascade)
        self._wiping = Wiping(self._ledger)
        self._purges = Purges(self._ledger, self._cascade, self._leases, self._tickets)
        self._pins = Pins(self._ledger, self._cascade)
        self._auto_pins = AutoPins(self._ledger, self._pins)
        self._purges.on_remove = self._pins.purged
        self._expiry = Expiry(self._ledger, self._cascade)
        self._warmups: dict[bytes, warmup.WarmupJob] = {}
        self._plan_due = 0.0
        self._touch_due = 0.0

    # ---- groups and sessions

    def open_group(self, spec: GroupSpec, now: float) -> list[Effect]:
        """Make a group known. Opening it again refreshes the names and nothing else."""
        group = self._ledger.groups.get(spec.group)
        if group is None:
            group = self._ledger.add_group(spec)
        else:
            self._ledger.rename(group, spec, self._cascade.staying_bytes_of)
            if group.persistent and not spec.persistent:
                self._ledger.make_memory_only(group)
        if group.persistent and self._ledger.has_nvme and not self._purges.covers(group):
            group.wants_folder = True
            if self._cascade.nvme.is_worker_up:
                self._ledger.effects.append(open_namespace(group))
        return self._effects()

    def open_session(self, session: bytes, now: float) -> None:
        self._ledger.sessions.setdefault(session, SessionState(session))

    def session_opens(self, session: bytes, group: bytes) -> None:
        """`session` works with `group`: `usage` calls it reachable while it lives."""
        state = self._ledger.sessions.get(session)
        if state is not None:
            state.groups.add(group)

    def map_device(self, session: bytes, device: int) -> None:
        """The session's process has mapped the pool that the device has now: from here on it may be granted slots
        there, until the pool is no more. Of several pools the last one that it mapped."""
        books = self._ledger.devices
        if session in self._ledger.sessions and books.pools[device].is_open:
            books.mapped[session] = device

    def group_shape(self, group: bytes) -> tuple[int, int, int]:
        """Ranks, tokens a block, bytes a block."""
        known = self._ledger.groups[group]
        return known.ranks, known.block_tokens, known.block_bytes

    def knows_group(self, group: bytes) -> bool:
        return group in self._ledger.groups

    def model_name(self, group: bytes) -> str:
        """What people call the model; empty for a group that isn't known any more."""
        known = self._ledger.groups.get(group)
        return known.spec.model_name if known is not None else ""

    def group_spec(self, group: bytes) -> GroupSpec | None:
        known = self._ledger.groups.get(group)
        return None if known is None else known.spec

    def end_session(self, session: bytes, now: float) -> list[Effect]:
        """The process has ended, proven: nothing of it touches a slot any more. Ends the grants it held."""
        if self._ledger.sessions.pop(session, None) is None:
            return []
        self._ledger.devices.mapped.pop(session, None)
        self._tickets.end_session(session)
        self._leases.end_session(session)
        return self._effects_after(now)

    # ---- reading

    def match(self, group: bytes, keys: bytes) -> Match:
        """Touches nothing: a question, not a use."""
        blocks = host_blocks = 0
        for segment in self._ledger.tree.walk(group, keys):
            blocks += segment.blocks
            if host_blocks == segment.start:
                host_blocks += min(segment.blocks, segment.extent.host_blocks)
        return Match(blocks, host_blocks)

    def acquire(
        self,
        *,
        grant: bytes,
        session: bytes,
        group: bytes,
        keys: bytes,
        holders: tuple[tuple[int, bytes], ...] = (),
        max_blocks: int,
        deadline: float,
        revocable: bool = False,
        on_device: bool = False,
        name: str = "",
        now: float,
    ) -> tuple[Lease | Waiting | Refused, list[Effect]]:
        """Lease the longest cached prefix that can be in memory by `deadline`, for the ranks of `holders` (none named:
        rank 0, for `session`): in host memory, or `on_device` in the pool that the rank's holder has mapped. `name` is
        what the asker calls the request, for people."""
        answer = self._leases.acquire(
            grant=grant,
            session=session,
            group=group,
            keys=keys,
            holders=holders,
            max_blocks=max_blocks,
            deadline=deadline,
            revocable=revocable,
            on_device=on_device,
            name=name,
            now=now,
        )
        return answer, self._effects_after(now)

    def is_strange_to(self, grant: bytes, session: bytes) -> bool:
        """Whether the grant is open and `session` neither asked for it nor holds of it: not its to end."""
        lease = self._ledger.leases.get(grant)
        ticket = self._ledger.tickets.get(grant)
        if lease is not None:
            return session not in lease.parties
        return ticket is not None and session not in (ticket.session, ticket.holder)

    def is_leased(self, grant: bytes) -> bool:
        return grant in self._ledger.leases

    def release(self, grant: bytes, rank: int | None, now: float, session: bytes | None = None) -> list[Effect]:
        """Every copy from the slots of `rank` (None: of all ranks) has completed. `session` says so (None: the asker);
        one that only holds of the lease ends its own part and no other."""
        self._leases.release(grant, rank, session)
        return self._effects_after(now)

    def report_bad(self, group: bytes, keys: bytes, first_bad: int, now: float) -> list[Effect]:
        """The blocks of `keys` from `first_bad` on were loaded and can't be used: no tier keeps them."""
        for segment in reversed(self._ledger.tree.walk(group, keys)):
            first = max(0, first_bad - segment.start)
            if first < segment.blocks:
                self._cascade.losses.condemn(segment.extent, first, Reason.REPORTED_BAD, now)
        return self._effects_after(now)

    def report_prefill(self, group: bytes, samples: Iterable[PrefillSample]) -> None:
        """An engine of this group has computed these: what a hit saves is reckoned from it."""
        self._ledger.report_prefill(self._ledger.groups[group], samples)

    def prefill_tokens_per_second(self, group: bytes) -> float:
        """At the start of a prompt; what the settings say for a group that isn't known or was never measured."""
        known = self._ledger.groups.get(group)
        return self.limits.prefill_tokens_per_second if known is None else self._ledger.prefill_rate(known)

    @property
    def recent(self) -> RecentAcquires:
        """The last acquires."""
        return self._ledger.recent

    @property
    def refusals(self) -> Refusals:
        """The last blocks that were refused a slot."""
        return self._ledger.refusals

    # ---- writing

    def reserve(
        self,
        *,
        grant: bytes,
        session: bytes,
        holder: bytes,
        group: bytes,
        rank: int,
        keys: bytes,
        first: int,
        tokens: bytes,
        extras: Mapping[int, Sequence[bytes]] = NO_EXTRAS,
        on_device: bool = False,
        now: float,
    ) -> tuple[Reservation | Refused, list[Effect]]:
        """A ticket for the missing ones of the blocks [first, end of keys) of `rank`, to be written by `holder`; with
        `on_device` to the pool that it has mapped, as far as there is room there, else to host memory."""
        answer = self._tickets.reserve(
            grant=grant,
            session=session,
            holder=holder,
            group=group,
            rank=rank,
            keys=keys,
            first=first,
            tokens=tokens,
            extras=extras,
            on_device=on_device,
            now=now,
        )
        return answer, self._effects_after(now)

    @property
    def has_idle_work(self) -> bool:
        """`make_ready` has something to do."""
        return (
            self._tickets.expects_more
            or self._ledger.sizing.has_work
            or self._cascade.found.is_busy
            or any(job.is_busy for job in self._warmups.values())
        )

    def make_ready(self, now: float) -> list[Effect]:
        """To be called when nobody waits: have the room that the next reservation will ask for, plan warm-ups, take in
        what is found in the disk tier, and look at what was asked for."""
        self._tickets.make_ready(now)
        self._ledger.sizing.step()
        self._plan_warmups(now)
        return self._effects_after(now)

    def _plan_warmups(self, now: float) -> None:
        self._plan_due = now + warmup.STEP_SECONDS
        self._cascade.found.step(now)
        for job in self._warmups.values():
            job.step()

    def commit(self, grant: bytes, now: float) -> tuple[Committed | Refused, list[Effect]]:
        """Every copy into the slots has completed: publish all blocks of the ticket."""
        answer = self._tickets.commit(grant, now)
        return answer, self._effects_after(now)

    def abort(self, grant: bytes, now: float, reason: Reason = Reason.GRANT_ENDED) -> list[Effect]:
        """No copy into the slots is running or will start: nothing is published, the slots are free."""
        self._tickets.abort(grant, reason)
        return self._effects_after(now)

    def ticket_to_check(self, grant: bytes) -> TicketState | None:
        """What the front needs to check a ticket's keys against its tokens."""
        return self._ledger.tickets.get(grant)

    def seal(
        self, *, seal_id: int, group: bytes, keys: bytes, wait_flushed: bool, deadline: float, now: float
    ) -> tuple[SealAnswer | Waiting, list[Effect]]:
        """Seal what still grows along `keys`; with `wait_flushed` answer when it is flushed or can't be."""
        answer = self._seals.seal(
            seal_id=seal_id, group=group, keys=keys, wait_flushed=wait_flushed, deadline=deadline, now=now
        )
        return answer, self._effects_after(now)

    # ---- the storage worker

    def report(self, report: AnyReport, now: float) -> list[Effect]:
        match report:
            case WriteDone():
                self._cascade.write_done(report, now)
            case ReadDone():
                self._cascade.read_done(report, now)
            case RemoveDone():
                self._cascade.remove_done(report, now)
            case OpFailed():
                self._cascade.op_failed(report, now)
            case TierHealth():
                self._cascade.health(report, now)
            case ScrubProgress():
                for group, _rank, key in report.set_aside:
                    extent = self._ledger.tree.heads.get(key)
                    if extent is not None and extent.group == group:
                        self._cascade.losses.lose_file(extent, Reason.CHECKSUM, now)
            case FileLost():
                extent = self._ledger.tree.heads.get(report.key)
                if extent is not None and extent.group == report.group:
                    self._cascade.losses.file_lost(extent, now)
            case GroupFound():
                if self._recovery is not None:
                    self._recovery.group_found(report)
            case Rows():
                if self._recovery is not None:
                    self._recovery.rows(report, now)
            case PurgeRecorded():
                self._purges.recorded(report)
            case PurgeSwept():
                self._purges.swept(report, now)
            case PurgeResumed():
                self._purges.resumed(report, now)
                self._pins.resumed(report.scope, now)
            case PinFound():
                self._pins.found(report.record, now)
            case PinRecorded():
                self._pins.recorded(report, now)
            case PinForgotten():
                self._pins.forgotten(report, now)
            case Zeroed():
                self._wiping.zeroed(report)
            case Recovered():
                if self._recovery is not None:
                    self._recovery.finish(saw_all=not report.unreadable)
                    self._recovery = None
                    self._purges.found_hidden(self._cascade.nvme, report.hidden_bytes)
                    self._cascade.nvme.is_open = True
                    self._cascade.shrink(now, at_once=True)
                    self._cascade.found.step(now)
                    self._cascade.pump(now)
            case _:
                pass  # progress and the worker's farewell are the front's
        return self._effects_after(now)

    @property
    def is_recovering(self) -> bool:
        return self._recovery is not None

    def disk_report(self, report: AnyReport, now: float) -> list[Effect]:
        """From the worker of the disk tier."""
        cascade = self._cascade
        match report:
            case WriteDone():
                cascade.demoted(report, now)
            case ReadDone():
                cascade.read_done(report, now)
            case RemoveDone() | StillUsed():
                cascade.removed_from_disk(report, now)
            case OpFailed():
                cascade.op_failed_on_disk(report, now)
            case TierHealth():
                cascade.disk_health(report, now)
            case ScrubProgress():
                for group, rank, key in report.set_aside:
                    cascade.found.set_aside(group, rank, key, now)
            case FileLost():
                cascade.found.file_lost(report, now)
            case DamageFound():
                self._ledger.counts.damaged_extents[report.reason] += 1
            case GroupFound():
                cascade.found.group_found(report, now)
            case Rows():
                cascade.found.rows(report, now)
            case PurgeSwept():
                self._purges.swept_on_disk(report, now)
            case PurgeResumed():
                self._purges.resumed_on_disk(report, now)
            case Recovered():
                self._is_disk_recovering = False
                cascade.found.step(now)
                self._purges.found_hidden(cascade.disk, report.hidden_bytes)
                self._open_disk(now)
            case _:
                pass  # progress and the worker's farewell are the front's
        return self._effects_after(now)

    @property
    def is_disk_recovering(self) -> bool:
        """Not all that lies in the disk tier is known yet. Requests are served meanwhile."""
        return self._is_disk_recovering

    def _open_disk(self, now: float) -> None:
        """Once it is known what hangs on what, something may leave the disk tier, and come to it."""
        cascade = self._cascade
        if self._is_disk_recovering or cascade.found.is_busy or cascade.disk.is_open or not cascade.nvme.is_open:
            return
        cascade.disk.is_open = self._ledger.has_disk
        cascade.shrink(now)
        cascade.pump(now)

    def disk_worker_started(self, now: float) -> list[Effect]:
        for group in self._ledger.groups.values():
            if group.wants_disk_folder:
                self._ledger.effects.append(OnDisk(open_namespace(group)))
        self._cascade.disk_worker_started(now)
        return self._effects_after(now)

    def disk_worker_died(self, now: float) -> list[Effect]:
        """Proven by waitpid: it touches no slot and no file any more."""
        self._cascade.disk_worker_died(now)
        self._purges.disk_worker_died()
        return self._effects_after(now)

    def disk_limit(self, num_bytes: int, now: float) -> list[Effect]:
        """How much the disk tier may hold in all, what other nodes put there included."""
        self._ledger.limits = replace(self._ledger.limits, disk_bytes=num_bytes)
        self._cascade.shrink(now)
        self._cascade.pump(now)
        return self._effects_after(now)

    def device_worker_started(self, device: int, num_bytes: int, now: float) -> list[Effect]:
        """It has a pool of so many bytes, empty, at the first of the device's addresses. Nobody has mapped it yet."""
        self._cascade.devices.started(device, num_bytes, now)
        return self._effects_after(now)

    def device_worker_died(self, device: int, now: float) -> list[Effect]:
        """Proven by waitpid: it touches no slot any more, and its pool is no more."""
        self._cascade.devices.died(device, now)
        self._leases.device_died(now)
        self._seals.settle(now)
        return self._effects_after(now)

    def device_report(self, device: int, report: AnyReport, now: float) -> list[Effect]:
        """From the worker of a device."""
        self._cascade.devices.report(report, now)
        self._seals.settle(now)
        return self._effects_after(now)

    def worker_started(self, now: float) -> list[Effect]:
        for group in self._ledger.groups.values():
            if group.persistent and group.wants_folder:
                self._ledger.effects.append(open_namespace(group))
        if self._recovery is not None:
            self._recovery.begin_again()
        self._purges.worker_started()
        self._cascade.worker_started(now)
        self._pins.worker_started()
        self._wiping.worker_started()
        return self._effects_after(now)

    def worker_died(self, now: float) -> list[Effect]:
        """Proven by waitpid: it touches no slot and no file any more."""
        self._cascade.worker_died(now)
        self._wiping.worker_died()
        self._purges.worker_died()
        return self._effects_after(now)

    def host_limit(self, num_bytes: int, now: float, *, earlier_bytes: int = 0) -> list[Effect]:
        """How much of the arena may be in use; grows when an old incarnation's arena is gone. `earlier_bytes` of those
        are still mapped by engines."""
        self._ledger.pool.limit_bytes = num_bytes
        self._ledger.earlier_bytes = earlier_bytes
        self._ledger.has_let_go = True
        self._ledger.host_limit_since = now
        return self._effects_after(now)

    def nvme_limit(self, num_bytes: int, now: float) -> list[Effect]:
        """How much NVMe may hold in all: other data on its file system takes from that, and gives it back."""
        self._ledger.limits = replace(self._ledger.limits, nvme_bytes=num_bytes)
        self._pins.caps_changed()
        self._cascade.shrink(now)
        self._cascade.pump(now)
        return self._effects_after(now)

    # ---- operators

    def start_warmup(self, job: bytes, scope: WarmupScope, now: float) -> list[Effect]:
        """Asking again by the same id lets it go on."""
        if job not in self._warmups:
            self._warmups[job] = warmup.begin(self._ledger, self._cascade, scope)
        return self._effects_after(now)

    def warmup_progress(self, job: bytes) -> WarmupState | None:
        known = self._warmups.get(job)
        return known.state() if known is not None else None

    def cancel_warmup(self, job: bytes, now: float) -> list[Effect]:
        self._warmups.pop(job, None)
        return self._effects_after(now)

    def evict(self, tier: str, to_bytes: int, fingerprint: str, now: float) -> tuple[EvictState, list[Effect]]:
        """Evict a slice from a tier that uses more than `to_bytes`, in the order in force: because an operator says so.
        Ask again until it is finished."""
        if tier == "gpu":
            answer = device_evicting.evict(self._ledger, self._cascade, to_bytes, fingerprint, now)
        else:
            answer = evicting.evict(self._ledger, self._cascade, tier, to_bytes, fingerprint, now)
        return answer, self._effects_after(now)

    def preview_eviction(self, tier: str, to_bytes: int, fingerprint: str, now: float) -> EvictState:
        """What `evict` would do, with its victims; nothing is evicted."""
        if tier == "gpu":
            return device_evicting.preview(self._ledger, self._cascade, to_bytes, fingerprint, now)
        return evicting.preview(self._ledger, self._cascade, tier, to_bytes, fingerprint, now)

    def start_purge(self, purge: bytes, what: What, now: float) -> tuple[PurgeState | NotOne, list[Effect]]:
        """Make all of `what` unreachable, at once in memory, and have its bytes removed from every tier. Asking again
        by the same id starts nothing new."""
        answer = self._purges.start(purge, what, now)
        return answer, self._effects_after(now)

    def preview_purge(self, what: What, now: float) -> PurgeState | NotOne:
        """What `start_purge` would find; changes nothing."""
        return self._purges.preview(what, now)

    def purge_progress(self, purge: bytes) -> PurgeState | None:
        return self._purges.progress(purge)

    def pin(
        self, *, pin: bytes, group: bytes, keys: bytes, owner: str, tier: str, seconds: float, now: float
    ) -> tuple[PinState | PinRefused, list[Effect]]:
        """Have the prefix with these keys stay on `tier` ("host" or "nvme"; host keeps the files too) for so many
        seconds, 0 for without an end. What is not cached yet stays from when it is. Idempotent by `pin`; what its owner
        has pinned there already keeps its id and gets the new end."""
        answer = self._pins.pin(pin=pin, group=group, keys=keys, owner=owner, tier=tier, seconds=seconds, now=now)
        return answer, self._effects_after(now)

    def pin_block(
        self, *, pin: bytes, digits: str, owner: str, tier: str, seconds: float, now: float
    ) -> tuple[PinState | PinRefused, list[Effect]]:
        """As `pin`, of the prefix that ends with the cached block whose key begins with these hexadecimal digits."""
        answer = self._pins.pin_block(pin=pin, digits=digits, owner=owner, tier=tier, seconds=seconds, now=now)
        return answer, self._effects_after(now)

    def unpin(self, pin: bytes, now: float) -> tuple[PinState | None, list[Effect]]:
        """It holds nothing from now on. Its state says whether its record is still on disk; None: no such pin."""
        answer = self._pins.unpin(pin)
        return answer, self._effects_after(now)

    def pins_ending_with(self, digits: str) -> list[bytes]:
        """The pins whose prefix ends with a block whose key begins with these hexadecimal digits."""
        return self._pins.ending_with(digits)

    def pins(self) -> list[PinState]:
        return self._pins.states()

    def pinned_tiers(self) -> list[PinnedTier]:
        return self._pins.tiers()

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def begin_shutdown(self, now: float) -> list[Effect]:
        """Nothing new is granted; what grows is sealed, parents first, and goes to NVMe, and so does last use."""
        self._ledger.is_closing = True
        self._warmups.clear()
        self._seals.seal_all(now)
        self._cascade.writes.order_by_depth()
        self._flush_touched(now)
        return self._effects_after(now)

    def dirty(self) -> Dirty:
        extents = list(self._cascade.writes.dirty_extents())
        ledger = self._ledger
        group_of, landing = ledger.group_of, ledger.landings.values()
        return Dirty(
            len(extents) + len(landing),
            sum(e.num_blocks * group_of(e).ranks * group_of(e).slot_bytes for e in extents)
            + sum(len(ticket.blocks) * ledger.groups[ticket.group].slot_bytes for ticket in landing),
        )

    def drop_dirty(self, reason: Reason, now: float) -> list[Effect]:
        """Give up what is queued and not yet on its way."""
        self._cascade.writes.give_up_all(reason)
        return self._effects_after(now)

    def explain(self, question: Question) -> Explanation:
        """Why something is not cached. Looks, and changes nothing."""
        return answer(self._ledger, question, lambda group: self._purges.last_of(self._ledger.groups[group]))

    def hottest(self, most: int, now: float) -> list[HotPrefix]:
        """The prefixes that save the most, the hottest first."""
        return self._ledger.hottest.prefixes(self._ledger.groups, most, now)

    def usage(self) -> list[GroupUsage]:
        return group_usage(self._ledger)

    def prefill_rates(self) -> list[PrefillUse]:
        return prefill_use(self._ledger)

    def wear(self, now: float) -> Wear | None:
        """None on a node without an NVMe tier."""
        return wear(self._ledger, self._cascade, now) if self._ledger.has_nvme else None

    def size_report(self, seconds: float, now: float) -> SizeReport:
        """What room would have been worth in the last `seconds`, as far back as that is known."""
        return self._ledger.sizing.report(seconds, now)

    @property
    def has_postings(self) -> bool:
        """`take_postings` has something to tell."""
        return bool(self._ledger.postings)

    def take_postings(self, now: float) -> list[Posting]:
        """What has moved into and out of host memory and the disk tier since the last call, summed by group, accounts
        and reason."""
        taken, self._ledger.postings = self._ledger.postings, Counter()
        return [
            Posting(now, group, source, target, num_bytes, reason)
            for (group, source, target, reason), num_bytes in taken.items()
        ]

    def host_balances(self) -> list[tuple[bytes, int]]:
        """What the books say of each group in host memory."""
        return [(key, group.host_slots * group.slot_bytes) for key, group in self._ledger.groups.items()]

    def gpu_balances(self) -> list[tuple[bytes, int]]:
        """Likewise on devices."""
        return [(key, group.gpu_slots * group.slot_bytes) for key, group in self._ledger.groups.items()]

    def disk_balances(self) -> list[tuple[bytes, int]]:
        """Likewise in the disk tier: extents that can be found there, or are being removed."""
        return [(key, group.disk_bytes) for key, group in self._ledger.groups.items()]

    def shares(self) -> list[ShareUse]:
        """By share as they are set, the rest last, and by tier. Empty where none are set."""
        return share_use(self._ledger)

    def device_tiers(self) -> list[TierBytes]:
        """One row a device, in the order of the setting; without room where there is no pool just now."""
        return device_tier_bytes(self._ledger)

    def tiers(self) -> list[TierBytes]:
        return tier_bytes(self._ledger, self._cascade)

    @property
    def counts(self) -> Counters:
        return self._ledger.counts

    @property
    def num_sessions(self) -> int:
        return len(self._ledger.sessions)

    @property
    def num_leases(self) -> int:
        return len(self._ledger.leases)

    @property
    def num_tickets(self) -> int:
        return len(self._ledger.tickets)

    @property
    def num_extents(self) -> int:
        return len(self._ledger.tree)

    @property
    def num_reads_waiting(self) -> int:
        return self._cascade.reads.num_in_flight

    @property
    def removing_bytes(self) -> int:
        """Of what NVMe uses, what is on its way out."""
        return self._cascade.nvme.removing_bytes

    @property
    def disk_removing_bytes(self) -> int:
        return self._cascade.disk.removing_bytes

    @property
    def num_demotions(self) -> int:
        """From NVMe to the disk tier, under way or waiting."""
        return len(self._cascade.demotions)

    @property
    def disk_read_bytes_per_second(self) -> float:
        """Measured. 0.0: not yet."""
        return self._cascade.reads.disk_speed.bytes_per_second

    @property
    def disk_write_bytes_per_second(self) -> float:
        """Measured, of demotions. 0.0: not yet."""
        return self._cascade.demotions.speed.bytes_per_second

    @property
    def num_writes_waiting(self) -> int:
        return len(self._cascade.writes)

    def settled_bytes(self, tier: str = "nvme") -> dict[bytes, int]:
        """What is on NVMe, or in the disk tier, by group, of those of which nothing moves now."""
        return settled_bytes(self._ledger, self._cascade, tier)

    def recount_host(self) -> HostRecount:
        """Begin to count what is in host memory. It is told of all changes until it has ended; one at a time."""
        return HostRecount(self._ledger, self._cascade, self._wiping)

    def check(self) -> None:
        """Every promise about ownership and sums. Raises BrokenInvariant."""
        audit.check(self._ledger, self._cascade, self._wiping, self._pins)

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        self._cascade.retry(now)
        self._purges.retry(now)
        self._leases.settle_due(now)
        self._seals.seal_idle(now)
        self._tickets.drop_stale(now)
        self._auto_pins.tick(now)
        self._pins.tick(now)
        self._expiry.tick(now)
        if self._plan_due <= now:
            self._plan_warmups(now)
        if self._touch_due <= now:
            self._flush_touched(now)
        self._cascade.shrink(now)
        self._cascade.pump(now)
        self._seals.settle(now)
        return self._effects_after(now)

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens."""
        ledger = self._ledger
        times = self._leases.deadlines() + self._seals.deadlines()
        if ledger.staged:
            times.append(next(iter(ledger.staged.values())).since + self.limits.staged_seconds)
        if ledger.touched and self._cascade.nvme.is_worker_up:
            times.append(self._touch_due)
        if self._cascade.is_behind:
            times.append(0.0)
        if self._cascade.found.is_busy or any(job.is_busy for job in self._warmups.values()):
            times.append(self._plan_due)
        due = (
            self._cascade.next_retry(),
            self._cascade.writes.next_admission(),
            self._purges.next_retry(),
            self._pins.next_wakeup(),
            self._auto_pins.next_wakeup(),
            self._expiry.next_wakeup(),
        )
        times += [time for time in due if time is not None]
        return min(times, default=None)

    # ---- what is due after an event

    def _flush_touched(self, now: float) -> None:
        """Hot stays hot: hits served from any tier refresh last use on disk."""
        ledger = self._ledger
        self._touch_due = now + self.limits.touch_seconds
        if not self._cascade.nvme.is_worker_up:
            return
        on_nvme = _touch_rows(ledger, [extent for extent in ledger.touched if extent.nvme is FileState.PRESENT])
        if on_nvme:
            ledger.effects.append(Touch(on_nvme))
        on_disk = _touch_rows(ledger, [extent for extent in ledger.touched if extent.disk is FileState.PRESENT])
        if on_disk and self._cascade.disk.is_worker_up:
            ledger.effects.append(OnDisk(Touch(on_disk)))
        ledger.touched.clear()

    def _effects_after(self, now: float) -> list[Effect]:
        """Answer what the event made due: leases and seals that waited for it, warm-ups that can go on."""
        cascade = self._cascade
        cascade.shrink(now)  # what was held a moment ago may be what must go
        failed: set[Extent] = set()
        while cascade.changes.progressed:
            changed = set(cascade.changes.progressed)
            cascade.changes.progressed.clear()
            self._purges.settle_changed(changed, now)
            self._leases.settle_changed(changed, now)
            failed.update(cascade.changes.read_problems)
            cascade.changes.read_problems.clear()
            self._seals.settle(now)
            if not cascade.is_behind:  # or all of its slices would be cut here and now
                cascade.shrink(now)
        for job in self._warmups.values():
            if not job.finished:
                warmup.advance(job, self._ledger, cascade, now, most_reads=self._reads_ahead(now), failed=failed)
        self._pins.write_again(now)
        if self._ledger.has_disk:
            cascade.found.settle(now)
            self._open_disk(now)
            cascade.demotions.pump(now)
        self._pins.promote(now, may_read=not self._leases.num_waiting)
        self._wiping.ask()
        self._cascade.devices.ask_wipes()
        self._purges.settle(now)
        return self._effects()

    def _reads_ahead(self, now: float) -> int:
        """That warm-ups may have under way."""
        if self._leases.num_waiting:
            return 0
        is_alone = now - self._leases.last_asked >= warmup.ALONE_SECONDS
        return warmup.READS_ALONE if is_alone else warmup.READS_BESIDE

    def _effects(self) -> list[Effect]:
        effects = list(self._ledger.effects)
        self._ledger.effects.clear()
        return effects


def _touch_rows(ledger: Ledger, extents: list[Extent]) -> list[TouchRow]:
    return [
        TouchRow(ledger.group_of(e).spec.identity.weights, e.group, rank, e.key, e.last_used, e.hits)
        for e in extents
        for rank in range(ledger.group_of(e).ranks)
    ]
