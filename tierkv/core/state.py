"""CacheState: the cache's decisions as one object. An event and the time go in; an answer and effects come out.

It never waits, does no I/O and knows no clock. "No room now" is an answer; what can't be answered yet is Waiting, and
follows as a notice, at its deadline at the latest, provided that `tick` is called at `next_wakeup`.

    effects   instructions for the storage worker, to be carried out in order, and notices for the front
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence

from tierkv.core import audit, warmup
from tierkv.core.cascade import Cascade
from tierkv.core.counters import Counters
from tierkv.core.extent import Extent
from tierkv.core.grants import (
    GRANTED,
    NO_ROOM,
    PENDING,
    PRESENT,
    Committed,
    Dirty,
    GroupSpec,
    Lease,
    LeaseReady,
    LeaseState,
    Match,
    Part,
    Refused,
    Reservation,
    SealAnswer,
    SealReady,
    Segment,
    TicketState,
    Waiting,
)
from tierkv.core.instructions import (
    AnyReport,
    GroupFound,
    OpenNamespace,
    OpFailed,
    ReadDone,
    Recovered,
    RemoveDone,
    Rows,
    ScrubProgress,
    TierHealth,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.keys import NO_EXTRAS, TOKEN_BYTES, count_keys, key_at
from tierkv.core.ledger import Effect, Group, Ledger, Limits, SessionState, StagedBlock
from tierkv.core.reasons import Reason
from tierkv.core.recovered import RecoveredRows
from tierkv.core.residency import NvmeState
from tierkv.core.usage import GroupUsage, TierBytes, group_usage, tier_bytes
from tierkv.core.warmup import WarmupState

__all__ = ["CacheState", "Limits"]

_DEADLINE_PASSED = float("inf")


class _WaitingSeal:
    __slots__ = ("deadline", "path", "seal_id")

    def __init__(self, seal_id: int, path: list[Segment], deadline: float) -> None:
        self.seal_id = seal_id
        self.path = path
        self.deadline = deadline


class CacheState:
    """`generations` is indexed by slot offset / page_bytes; only this object writes it."""

    def __init__(self, limits: Limits, generations: MutableSequence[int]) -> None:
        self.limits = limits
        self._ledger = Ledger(limits, generations)
        self._cascade = Cascade(self._ledger)
        self._recovery: RecoveredRows | None = RecoveredRows(self._ledger, self._cascade) if limits.nvme_bytes else None
        self._cascade.is_open = self._recovery is None
        self._waiting_leases: dict[bytes, LeaseState] = {}
        self._waiting_seals: dict[int, _WaitingSeal] = {}
        self._warmups: dict[bytes, warmup.WarmupJob] = {}
        self._is_closing = False
        self._touch_due = 0.0

    # ---- groups and sessions

    def open_group(self, spec: GroupSpec, now: float) -> list[Effect]:
        """Make a group known. Opening it again refreshes the names and nothing else."""
        group = self._ledger.groups.get(spec.group)
        if group is None:
            group = self._ledger.add_group(spec)
        else:
            group.spec = spec
            group.persistent = group.persistent and spec.persistent
        if group.persistent and self._ledger.has_nvme and self._cascade.is_worker_up:
            self._ledger.effects.append(_open_namespace(group))
        return self._effects()

    def open_session(self, session: bytes, now: float) -> None:
        self._ledger.sessions.setdefault(session, SessionState(session))

    def session_opens(self, session: bytes, group: bytes) -> None:
        """`session` works with `group`: `usage` calls it reachable while it lives."""
        state = self._ledger.sessions.get(session)
        if state is not None:
            state.groups.add(group)

    def has_session(self, session: bytes) -> bool:
        return session in self._ledger.sessions

    def has_group(self, group: bytes) -> bool:
        return group in self._ledger.groups

    def group_shape(self, group: bytes) -> tuple[int, int, int]:
        """Ranks, tokens a block, bytes a block."""
        known = self._ledger.groups[group]
        return known.ranks, known.block_tokens, known.block_bytes

    def end_session(self, session: bytes, now: float) -> list[Effect]:
        """The process has ended, proven: nothing of it touches a slot any more. Ends the grants it held."""
        state = self._ledger.sessions.pop(session, None)
        if state is None:
            return []
        for grant in list(state.tickets):
            self._end_ticket(grant, Refused(Reason.SESSION_GONE))
            self._ledger.counts.aborted_tickets[Reason.SESSION_GONE] += 1
        for lease in [lease for lease in self._waiting_leases.values() if lease.session == session]:
            self._end_lease(lease, Reason.SESSION_GONE)
        for grant in list(state.leases):
            lease = self._ledger.leases[grant]
            for rank in [rank for rank, holder in lease.holders.items() if holder == session]:
                self._end_lease_part(lease, rank, Reason.SESSION_GONE)
        return self._effects_after(now)

    # ---- reading

    def match(self, group: bytes, keys: bytes) -> Match:
        """Touches nothing: a question, not a use."""
        blocks = host_blocks = 0
        for segment in self._ledger.tree.walk(keys):
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
        now: float,
    ) -> tuple[Lease | Waiting | Refused, list[Effect]]:
        """Lease the longest cached prefix that can be in host memory by `deadline`, for the ranks of `holders`."""
        ledger = self._ledger
        known = ledger.leases.get(grant)
        if known is not None:
            return known.answer or Waiting(), []
        if ledger.ended.get(grant) is not None:
            return _empty_lease(grant, 0, Reason.GRANT_ENDED), []
        if self._is_closing:
            return Refused(Reason.SHUTDOWN), []
        by_rank = dict(holders) or {0: session}
        if any(holder not in ledger.sessions for holder in by_rank.values()):
            return Refused(Reason.SESSION_GONE), []
        shape = ledger.groups[group]
        if any(not 0 <= rank < shape.ranks for rank in by_rank):
            return Refused(Reason.LAYOUT_MISMATCH), []
        path = ledger.tree.walk(keys)
        cached = path[-1].start + path[-1].blocks if path else 0
        allowed, reason = self._blocks_allowed(shape, list(by_rank.values()), min(cached, max_blocks))
        path = _clip(path, allowed)
        if not path:
            ledger.counts.asked_tokens += count_keys(keys) * shape.block_tokens
            ledger.ended.remember(grant, Refused(Reason.GRANT_ENDED))
            return _empty_lease(grant, cached, reason), []
        lease = LeaseState(
            grant=grant,
            session=session,
            group=group,
            holders=by_rank,
            ranks=tuple(by_rank),
            path=path,
            asked_blocks=count_keys(keys),
            cached_blocks=cached,
            host_blocks=self._resident_blocks(path, tuple(by_rank)),
            deadline=deadline,
            revocable=revocable,
            created=now,
            shortened=reason,
        )
        ledger.leases[grant] = lease
        self._charge(lease, allowed)
        for segment in path:
            ledger.hold(segment.extent, grant, segment.blocks)
        self._waiting_leases[grant] = lease
        self._want_reads(lease, now)
        self._settle_lease(lease, now)
        effects = self._effects_after(now)
        if lease.answer is not None:
            return lease.answer, [e for e in effects if not (isinstance(e, LeaseReady) and e.grant == grant)]
        return Waiting(), effects

    def release(self, grant: bytes, rank: int | None, now: float) -> list[Effect]:
        """Every copy from the slots of `rank` (None: of all ranks) has completed."""
        lease = self._ledger.leases.get(grant)
        if lease is None:
            if self._ledger.ended.get(grant) is None:
                self._ledger.ended.remember(grant, Refused(Reason.GRANT_ENDED))
            return []
        if rank is None:
            self._end_lease(lease, Reason.GRANT_ENDED)
        elif rank in lease.holders:
            self._end_lease_part(lease, rank, Reason.GRANT_ENDED)
        return self._effects_after(now)

    def report_bad(self, group: bytes, keys: bytes, first_bad: int, now: float) -> list[Effect]:
        """The blocks of `keys` from `first_bad` on were loaded and can't be used: no tier keeps them."""
        for segment in reversed(self._ledger.tree.walk(keys)):
            first = max(0, first_bad - segment.start)
            if first < segment.blocks:
                self._cascade.condemn(segment.extent, first, Reason.REPORTED_BAD, now)
        return self._effects_after(now)

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
        now: float,
    ) -> tuple[Reservation | Refused, list[Effect]]:
        """A ticket for the missing ones of the blocks [first, end of keys) of `rank`."""
        ledger = self._ledger
        known = ledger.tickets.get(grant)
        if known is not None:
            return known.answer, []
        if ledger.ended.get(grant) is not None:
            return Refused(Reason.GRANT_ENDED), []
        if self._is_closing:
            return Refused(Reason.SHUTDOWN), []
        if holder not in ledger.sessions:
            return Refused(Reason.SESSION_GONE), []
        shape = ledger.groups[group]
        if not 0 <= rank < shape.ranks:
            return Refused(Reason.LAYOUT_MISMATCH), []
        states, missing = self._missing_blocks(keys, first, rank)
        # The prefix of what is being stored is not its own victim.
        path = ledger.tree.walk(keys)
        for segment in path:
            ledger.hold(segment.extent, grant, segment.blocks)
        allowed, reason = self._blocks_allowed(shape, [holder], len(missing))
        if missing and not ledger.pool.fits(shape.slot_bytes):
            allowed, reason = 0, Reason.LARGER_THAN_TIER
        room = self._cascade.make_room(shape.slot_bytes, allowed, now) if allowed else 0
        offsets = ledger.pool.allocate(shape.slot_bytes, room)
        if len(offsets) < len(missing):
            reason = reason or Reason.NO_ROOM
            ledger.counts.refused_blocks[reason] += len(missing) - len(offsets)
            for index in missing[len(offsets) :]:
                states[index - first] = NO_ROOM
        answer = Reservation(
            grant=grant,
            states=bytes(states),
            offsets=offsets,
            generations=[ledger.pool.generation(offset) for offset in offsets],
            reason=reason,
        )
        if not offsets:
            for segment in path:
                ledger.unhold(segment.extent, grant)
            return answer, self._effects_after(now)
        ticket = TicketState(
            grant=grant,
            session=session,
            holder=holder,
            group=group,
            rank=rank,
            keys=keys,
            first=first,
            tokens=tokens,
            extras=extras,
            blocks=missing[: len(offsets)],
            offsets=offsets,
            path=[segment.extent for segment in path],
            answer=answer,
        )
        ledger.tickets[grant] = ticket
        ledger.counts.tickets += 1
        ledger.sessions[holder].tickets.add(grant)
        ledger.sessions[holder].held_bytes += len(offsets) * shape.slot_bytes
        for index in ticket.blocks:
            ledger.writing[key_at(keys, index), rank] = grant
        return answer, self._effects_after(now)

    def commit(self, grant: bytes, now: float) -> tuple[Committed | Refused, list[Effect]]:
        """Every copy into the slots has completed: publish all blocks of the ticket."""
        ledger = self._ledger
        ticket = ledger.tickets.get(grant)
        if ticket is None:
            return ledger.ended.get(grant) or Refused(Reason.GRANT_ENDED), []
        self._forget_ticket(ticket)
        self._publish(ticket, now)
        if self._is_closing:
            for extent in list(ledger.unsealed):
                self._cascade.seal(extent, now)
        visible_blocks = sum(segment.blocks for segment in ledger.tree.walk(ticket.keys))
        visible = sum(index < visible_blocks for index in ticket.blocks)
        answer = Committed(visible, len(ticket.blocks) - visible)
        ledger.ended.remember(grant, answer)
        return answer, self._effects_after(now)

    def abort(self, grant: bytes, now: float, reason: Reason = Reason.GRANT_ENDED) -> list[Effect]:
        """No copy into the slots is running or will start: nothing is published, the slots are free."""
        ledger = self._ledger
        if grant in ledger.tickets:
            ledger.counts.aborted_tickets[reason] += 1
            self._end_ticket(grant, Refused(reason))
        elif ledger.ended.get(grant) is None:
            ledger.ended.remember(grant, Refused(reason))
        return self._effects_after(now)

    def ticket_to_check(self, grant: bytes) -> TicketState | None:
        """What the front needs to check a ticket's keys against its tokens."""
        return self._ledger.tickets.get(grant)

    def seal(
        self, *, seal_id: int, group: bytes, keys: bytes, wait_flushed: bool, deadline: float, now: float
    ) -> tuple[SealAnswer | Waiting, list[Effect]]:
        """Seal what still grows along `keys`; with `wait_flushed` answer when it is flushed or can't be."""
        path = self._ledger.tree.walk(keys)
        for segment in path:
            if not segment.extent.sealed:
                self._cascade.seal(segment.extent, now)
        seal = _WaitingSeal(seal_id, path, deadline)
        answer = self._seal_answer(seal, now if wait_flushed else _DEADLINE_PASSED)
        if answer is None:
            self._waiting_seals[seal_id] = seal
        effects = self._effects_after(now)
        if answer is None and seal_id not in self._waiting_seals:
            ready = next(e for e in effects if isinstance(e, SealReady) and e.seal_id == seal_id)
            effects.remove(ready)
            answer = ready.answer
        return answer or Waiting(), effects

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
                        self._cascade.lose_file(extent, Reason.CHECKSUM, now)
            case GroupFound():
                if self._recovery is not None:
                    self._recovery.group_found(report)
            case Rows():
                if self._recovery is not None:
                    self._recovery.rows(report, now)
            case Recovered():
                if self._recovery is not None:
                    self._recovery.finish(now)
                    self._recovery = None
                    self._cascade.is_open = True
                    self._cascade.shrink(now)
                    self._cascade.pump(now)
            case _:
                pass  # progress and the worker's farewell are the front's
        return self._effects_after(now)

    @property
    def is_recovering(self) -> bool:
        return self._recovery is not None

    def worker_started(self, now: float) -> list[Effect]:
        for group in self._ledger.groups.values():
            if group.persistent:
                self._ledger.effects.append(_open_namespace(group))
        if self._recovery is not None:
            self._recovery.begin_again()
        self._cascade.worker_started(now)
        return self._effects_after(now)

    def worker_died(self, now: float) -> list[Effect]:
        """Proven by waitpid: it touches no slot and no file any more."""
        self._cascade.worker_died(now)
        return self._effects_after(now)

    def host_limit(self, num_bytes: int, now: float) -> list[Effect]:
        """How much of the arena may be in use; grows when an old incarnation's arena is gone."""
        self._ledger.pool.limit_bytes = num_bytes
        return self._effects_after(now)

    # ---- operators

    def start_warmup(self, job: bytes, budget_bytes: int, fingerprint: str, now: float) -> list[Effect]:
        if job not in self._warmups:
            self._warmups[job] = warmup.plan(self._ledger, budget_bytes, fingerprint)
        return self._effects_after(now)

    def warmup_progress(self, job: bytes) -> WarmupState | None:
        known = self._warmups.get(job)
        return known.state() if known is not None else None

    def cancel_warmup(self, job: bytes, now: float) -> list[Effect]:
        self._warmups.pop(job, None)
        return self._effects_after(now)

    def begin_shutdown(self, now: float) -> list[Effect]:
        """Nothing new is granted; everything that grows is sealed, parents first, and goes to NVMe."""
        self._is_closing = True
        self._warmups.clear()
        for extent in sorted(self._ledger.unsealed, key=lambda extent: extent.first_token):
            self._cascade.seal(extent, now)
        self._cascade.order_writes_by_depth()
        return self._effects_after(now)

    def dirty(self) -> Dirty:
        extents = list(self._cascade.dirty_extents())
        group_of = self._ledger.group_of
        return Dirty(
            len(extents),
            sum(e.num_blocks * group_of(e).ranks * group_of(e).slot_bytes for e in extents),
        )

    def drop_dirty(self, reason: Reason, now: float) -> list[Effect]:
        """Give up what is queued and not yet on its way."""
        self._cascade.drop_all_queued(reason, now)
        return self._effects_after(now)

    def usage(self) -> list[GroupUsage]:
        return group_usage(self._ledger)

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
        return self._cascade.num_reads_in_flight()

    @property
    def num_writes_waiting(self) -> int:
        return self._cascade.num_writes_waiting()

    def check(self) -> None:
        """Every promise about ownership and sums. Raises BrokenInvariant."""
        audit.check(self._ledger, self._cascade)

    # ---- time

    def tick(self, now: float) -> list[Effect]:
        ledger = self._ledger
        self._cascade.retry(now)
        for lease in [lease for lease in self._waiting_leases.values() if lease.deadline <= now]:
            self._settle_lease(lease, now)
        for extent in [extent for extent in ledger.unsealed if self._seal_due(extent) <= now]:
            self._cascade.seal(extent, now)
        for key in [b.key for b in ledger.staged.values() if b.since + self.limits.staged_seconds <= now]:
            ledger.drop_staged(key)
        for lease in [lease for lease in ledger.leases.values() if self._revoke_due(lease) <= now]:
            self._revoke(lease)
        if self._touch_due <= now:
            self._flush_touched(now)
        self._cascade.shrink(now)
        self._cascade.pump(now)
        self._settle_seals(now)
        return self._effects_after(now)

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens."""
        ledger = self._ledger
        times = [lease.deadline for lease in self._waiting_leases.values()]
        times += [seal.deadline for seal in self._waiting_seals.values()]
        times += [self._seal_due(extent) for extent in ledger.unsealed]
        times += [self._revoke_due(lease) for lease in ledger.leases.values() if lease.revocable]
        if ledger.staged:
            times.append(next(iter(ledger.staged.values())).since + self.limits.staged_seconds)
        if ledger.touched and self._cascade.is_worker_up:
            times.append(self._touch_due)
        retry = self._cascade.next_retry()
        if retry is not None:
            times.append(retry)
        return min(times, default=None)

    def _seal_due(self, extent: Extent) -> float:
        return extent.last_append + max(self.limits.seal_after_seconds, 4 * extent.longest_gap)

    def _revoke_due(self, lease: LeaseState) -> float:
        is_running = lease.revocable and lease.answer is not None
        return lease.created + self.limits.revoke_after_seconds if is_running else _DEADLINE_PASSED

    # ---- leases

    def _blocks_allowed(self, group: Group, holders: list[bytes], blocks: int) -> tuple[int, Reason | None]:
        """What the sessions may still hold, in blocks."""
        reason = None
        for holder in set(holders):
            cost = group.slot_bytes * holders.count(holder)
            left = self.limits.session_bytes - self._ledger.sessions[holder].held_bytes
            if blocks * cost > left:
                blocks, reason = max(0, left // cost), Reason.SESSION_CAP
        return blocks, reason

    def _charge(self, lease: LeaseState, blocks: int) -> None:
        slot_bytes = self._ledger.groups[lease.group].slot_bytes
        for holder in lease.holders.values():
            state = self._ledger.sessions[holder]
            state.leases.add(lease.grant)
            state.held_bytes += blocks * slot_bytes

    def _uncharge(self, lease: LeaseState, holder: bytes, blocks: int) -> None:
        state = self._ledger.sessions.get(holder)
        if state is not None:
            state.held_bytes -= blocks * self._ledger.groups[lease.group].slot_bytes
            if holder not in lease.holders.values():
                state.leases.discard(lease.grant)

    def _want_reads(self, lease: LeaseState, now: float) -> None:
        for segment in lease.path:
            for rank in lease.ranks:
                if len(segment.extent.slots[rank]) < segment.blocks:
                    self._cascade.want_read(segment.extent, rank, segment.blocks, now)

    @staticmethod
    def _resident_blocks(path: list[Segment], ranks: tuple[int, ...]) -> int:
        resident = 0
        for segment in path:
            here = min(segment.blocks, *(len(segment.extent.slots[rank]) for rank in ranks))
            resident += here
            if here < segment.blocks:
                break
        return resident

    def _settle_lease(self, lease: LeaseState, now: float) -> None:
        """Grant a waiting lease if all it waits for is there, can't come, or is too late."""
        wanted = _blocks(lease.path)
        resident = self._resident_blocks(lease.path, lease.ranks)
        if resident < wanted:
            if now < lease.deadline and self._is_progress_due(lease):
                return
            problem = self._read_problem(lease)
            lease.shortened = problem or (Reason.DEADLINE if now >= lease.deadline else Reason.NO_ROOM)
        self._grant_lease(lease, resident, now)

    def _is_progress_due(self, lease: LeaseState) -> bool:
        """The first stretch that is not there yet is being read."""
        for segment in lease.path:
            missing = [rank for rank in lease.ranks if len(segment.extent.slots[rank]) < segment.blocks]
            if missing:
                return any(self._cascade.is_reading(segment.extent, rank) for rank in missing)
        return False

    def _read_problem(self, lease: LeaseState) -> Reason | None:
        problems = self._cascade.read_problems
        return next((problems[s.extent] for s in lease.path if s.extent in problems), None)

    def _grant_lease(self, lease: LeaseState, blocks: int, now: float) -> None:
        ledger = self._ledger
        del self._waiting_leases[lease.grant]
        for holder in lease.holders.values():
            self._uncharge(lease, holder, _blocks(lease.path) - blocks)
        kept = _clip(lease.path, blocks)
        self._hold_only(lease, kept)
        lease.path = kept
        tokens = ledger.groups[lease.group].block_tokens
        nvme_blocks = max(0, blocks - lease.host_blocks)
        ledger.counts.asked_tokens += lease.asked_blocks * tokens
        ledger.counts.hit_tokens["host"] += (blocks - nvme_blocks) * tokens
        ledger.counts.hit_tokens["nvme"] += nvme_blocks * tokens
        if lease.shortened is not None:
            ledger.counts.shortened_leases[lease.shortened] += 1
        for segment in kept:
            segment.extent.touch(segment.blocks, now)
            ledger.touched[segment.extent] = None
            ledger.groups[lease.group].last_used = now
            ledger.reconsider(segment.extent)
        lease.answer = Lease(
            grant=lease.grant,
            blocks=blocks,
            nvme_blocks=nvme_blocks,
            cached_blocks=lease.cached_blocks,
            parts=tuple(self._part(kept, rank) for rank in lease.ranks) if blocks else (),
            reason=lease.shortened,
        )
        ledger.effects.append(LeaseReady(lease.grant, lease.answer))
        if blocks:
            ledger.counts.leases += 1
        else:
            self._end_lease(lease, Reason.GRANT_ENDED)

    def _part(self, path: list[Segment], rank: int) -> Part:
        offsets: list[int] = []
        for segment in path:
            offsets += segment.extent.slots[rank][: segment.blocks]
        generation = self._ledger.pool.generation
        return Part(rank, offsets, [generation(offset) for offset in offsets])

    def _hold_only(self, lease: LeaseState, kept: list[Segment]) -> None:
        blocks_of = {segment.extent: segment.blocks for segment in kept}
        for segment in lease.path:
            blocks = blocks_of.get(segment.extent)
            if blocks is None:
                self._ledger.unhold(segment.extent, lease.grant)
            elif blocks < segment.blocks:
                # Never let go altogether in between: the blocks that stay might be evicted.
                segment.extent.holds[lease.grant] = blocks
                self._ledger.reconsider(segment.extent)

    def _end_lease_part(self, lease: LeaseState, rank: int, reason: Reason) -> None:
        holder = lease.holders.pop(rank)
        self._uncharge(lease, holder, _blocks(lease.path))
        if not lease.holders:
            self._end_lease(lease, reason)

    def _end_lease(self, lease: LeaseState, reason: Reason) -> None:
        if lease.answer is None:  # somebody still waits for one
            lease.answer = _empty_lease(lease.grant, lease.cached_blocks, reason)
            self._ledger.effects.append(LeaseReady(lease.grant, lease.answer))
        for rank in list(lease.holders):
            self._uncharge(lease, lease.holders.pop(rank), _blocks(lease.path))
        for segment in lease.path:
            self._ledger.unhold(segment.extent, lease.grant)
        self._waiting_leases.pop(lease.grant, None)
        self._ledger.leases.pop(lease.grant, None)
        self._ledger.ended.remember(lease.grant, Refused(reason))

    def _revoke(self, lease: LeaseState) -> None:
        """Take a lease back from a holder that agreed to it. The slots' generations move when they are given up; the
        reader compares them after its copy."""
        self._ledger.counts.revoked_leases += 1
        self._end_lease(lease, Reason.REVOKED)

    # ---- tickets

    def _missing_blocks(self, keys: bytes, first: int, rank: int) -> tuple[bytearray, list[int]]:
        ledger = self._ledger
        places = ledger.tree.places(keys)
        states = bytearray(len(places) - first)
        missing = []
        for index in range(first, len(places)):
            key = key_at(keys, index)
            staged = ledger.staged.get(key)
            if places[index] is not None or (staged is not None and rank in staged.slots):
                states[index - first] = PRESENT
            elif (key, rank) in ledger.writing:
                states[index - first] = PENDING
            else:
                states[index - first] = GRANTED
                missing.append(index)
        return states, missing

    def _forget_ticket(self, ticket: TicketState) -> None:
        """Take a ticket off the books, all but its slots."""
        ledger = self._ledger
        del ledger.tickets[ticket.grant]
        for index in ticket.blocks:
            del ledger.writing[key_at(ticket.keys, index), ticket.rank]
        holder = ledger.sessions.get(ticket.holder)
        if holder is not None:
            holder.tickets.discard(ticket.grant)
            holder.held_bytes -= len(ticket.offsets) * ledger.groups[ticket.group].slot_bytes
        for extent in ticket.path:
            ledger.unhold(extent, ticket.grant)

    def _end_ticket(self, grant: bytes, answer: Refused) -> None:
        ticket = self._ledger.tickets[grant]
        self._forget_ticket(ticket)
        self._ledger.pool.release(ticket.offsets)
        self._ledger.ended.remember(grant, answer)

    def _publish(self, ticket: TicketState, now: float) -> None:
        """Stage every block, then let those appear whose predecessor is visible and whose ranks are all there."""
        ledger = self._ledger
        group = ledger.groups[ticket.group]
        step = group.block_tokens * TOKEN_BYTES
        places = ledger.tree.places(ticket.keys)
        for index, slot in zip(ticket.blocks, ticket.offsets, strict=True):
            key = key_at(ticket.keys, index)
            block = ledger.staged.get(key)
            if places[index] is not None or (block is not None and ticket.rank in block.slots):
                ledger.pool.release([slot])
                ledger.counts.duplicate_blocks += 1
                continue
            if block is None:
                at = (index - ticket.first) * step
                block = StagedBlock(
                    group=ticket.group,
                    key=key,
                    parent=key_at(ticket.keys, index - 1) if index else ticket.group,
                    index=index,
                    tokens=ticket.tokens[at : at + step],
                    extras=list(ticket.extras.get(index, ())),
                    slots={},
                    since=now,
                )
                ledger.stage(block)
            block.slots[ticket.rank] = slot
        for index in ticket.blocks:
            place = places[index - 1] if index else None
            if index == 0:
                self._surface(ticket.group, None, -1, now)
            elif place is not None:
                self._surface(key_at(ticket.keys, index - 1), *place, now)

    def _surface(self, parent: bytes, above: Extent | None, index: int, now: float) -> None:
        """Blocks staged behind `parent`, which is visible now, become visible, and what is staged behind them."""
        ledger = self._ledger
        todo = [(parent, above, index)]
        while todo:
            parent, above, index = todo.pop()
            for key in list(ledger.staged_children.get(parent, ())):
                block = ledger.staged[key]
                if len(block.slots) == ledger.groups[block.group].ranks:
                    ledger.unstage(key)
                    extent, place = self._append(block, above, index, now)
                    todo.append((key, extent, place))

    def _append(self, block: StagedBlock, above: Extent | None, index: int, now: float) -> tuple[Extent, int]:
        """Put a block behind block `index` of `above`: into the same extent while it grows, else into a new one."""
        ledger = self._ledger
        group = ledger.groups[block.group]
        slots = [block.slots[rank] for rank in range(group.ranks)]
        known = ledger.tree.heads.get(block.key)
        if known is not None:
            ledger.pool.release(slots)
            ledger.counts.duplicate_blocks += 1
            return known, 0
        if above is not None and self._may_grow(above, index, group):
            extent = above
            extent.longest_gap = max(extent.longest_gap, now - extent.last_append)
        else:
            extent = Extent(
                group=block.group,
                key=block.key,
                parent=block.parent,
                first_token=block.index * group.block_tokens,
                ranks=group.ranks,
                created=now,
            )
            ledger.add_extent(extent, above, index)
        ledger.grow_extent(extent, block.key, slots)
        if extent.tokens is not None:
            extent.tokens += block.tokens
        if block.extras:
            extent.extras[extent.num_blocks - 1] = block.extras
        extent.last_append = extent.last_used = extent.tail_used = now
        extent.hot_blocks = extent.num_blocks
        group.last_used = now
        ledger.counts.stored_tokens += group.block_tokens
        if not self._has_room(extent, group):
            self._cascade.seal(extent, now)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)
        return extent, extent.num_blocks - 1

    def _may_grow(self, extent: Extent, index: int, group: Group) -> bool:
        return (
            not extent.sealed
            and index == extent.num_blocks - 1
            and extent.host_blocks == extent.num_blocks
            and self._has_room(extent, group)
        )

    def _has_room(self, extent: Extent, group: Group) -> bool:
        return (extent.num_blocks + 1) * group.slot_bytes <= self.limits.extent_bytes

    # ---- seals, touches, what is due after an event

    def _seal_answer(self, seal: _WaitingSeal, now: float) -> SealAnswer | None:
        """None: not all is flushed, but it may still be."""
        blocks = _blocks(seal.path)
        flushed = 0
        for segment in seal.path:
            if segment.extent.nvme is not NvmeState.PRESENT:
                break
            flushed += segment.blocks
        if flushed == blocks:
            return SealAnswer(blocks, flushed)
        if now >= seal.deadline:
            return SealAnswer(blocks, flushed, None if now is _DEADLINE_PASSED else Reason.DEADLINE)
        if any(segment.extent.nvme in (NvmeState.QUEUED, NvmeState.WRITING) for segment in seal.path):
            return None
        return SealAnswer(blocks, flushed, self._why_not_flushed(seal))

    def _why_not_flushed(self, seal: _WaitingSeal) -> Reason:
        ledger = self._ledger
        if not ledger.has_nvme:
            return Reason.NVME_OFF
        if any(not ledger.group_of(segment.extent).persistent for segment in seal.path):
            return Reason.NOT_PERSISTENT
        return self._cascade.why_not_writable or Reason.NVME_FULL

    def _settle_seals(self, now: float) -> None:
        for seal in list(self._waiting_seals.values()):
            answer = self._seal_answer(seal, now)
            if answer is not None:
                del self._waiting_seals[seal.seal_id]
                self._ledger.effects.append(SealReady(seal.seal_id, answer))

    def _flush_touched(self, now: float) -> None:
        """Hot stays hot: hits served from any tier refresh last use on disk."""
        ledger = self._ledger
        self._touch_due = now + self.limits.touch_seconds
        if not self._cascade.is_worker_up:
            return
        rows = [
            TouchRow(ledger.group_of(e).spec.identity.weights, e.group, rank, e.key, e.last_used, e.hits)
            for e in ledger.touched
            if e.nvme is NvmeState.PRESENT
            for rank in range(ledger.group_of(e).ranks)
        ]
        ledger.touched.clear()
        if rows:
            ledger.effects.append(Touch(rows))

    def _effects_after(self, now: float) -> list[Effect]:
        """Answer what the event made due: leases and seals that waited for it, warm-ups that can go on."""
        cascade = self._cascade
        while cascade.progressed:
            changed = set(cascade.progressed)
            cascade.progressed.clear()
            for lease in list(self._waiting_leases.values()):
                if any(segment.extent in changed for segment in lease.path):
                    self._settle_lease(lease, now)
            cascade.read_problems.clear()
            if self._waiting_seals:
                self._settle_seals(now)
        for job in self._warmups.values():
            if not job.finished:
                warmup.advance(job, self._ledger, cascade, now)
        return self._effects()

    def _effects(self) -> list[Effect]:
        effects = list(self._ledger.effects)
        self._ledger.effects.clear()
        return effects


def _open_namespace(group: Group) -> OpenNamespace:
    return OpenNamespace(
        group=group.spec.group,
        identity=group.spec.identity,
        model_name=group.spec.model_name,
        manifest=group.spec.manifest,
    )


def _empty_lease(grant: bytes, cached: int, reason: Reason | None) -> Lease:
    return Lease(grant=grant, blocks=0, nvme_blocks=0, cached_blocks=cached, parts=(), reason=reason)


def _blocks(path: list[Segment]) -> int:
    return path[-1].start + path[-1].blocks if path else 0


def _clip(path: list[Segment], blocks: int) -> list[Segment]:
    """The first `blocks` blocks of a path."""
    return [
        Segment(segment.extent, segment.start, min(segment.blocks, blocks - segment.start))
        for segment in path
        if segment.start < blocks
    ]
