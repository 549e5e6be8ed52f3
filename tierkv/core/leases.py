"""Leases: who may read which slots, from the asking to the last rank's release.

A lease holds its extents from the moment it is asked for, so that nothing of it is evicted while the rest is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tierkv.core.absence import Absence, find_absence, find_left
from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import Lease, LeaseReady, LeaseState, Part, Refused, Regretted, Segment, Waiting, path_blocks
from tierkv.core.keys import count_keys, key_at, split_keys
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.recent import RecentAcquire
from tierkv.core.residency import FileState
from tierkv.core.value.cost import prefill_seconds

_NEVER = float("inf")
_NO_DEVICES: dict[int, int] = {}


class Leases:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._waiting: dict[bytes, LeaseState] = {}
        self.last_asked = -_NEVER

    @property
    def num_waiting(self) -> int:
        """Whose answer is not there yet."""
        return len(self._waiting)

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
    ) -> Lease | Waiting | Refused:
        """Lease the longest cached prefix that can be in memory by `deadline`, for the ranks of `holders`: in host
        memory, or with `on_device` in the pool that the rank's holder has mapped."""
        self.last_asked = now
        ledger = self._ledger
        known = ledger.leases.get(grant)
        if known is not None and not known.is_asked_by(session, group, keys):
            return Refused(Reason.GRANT_ENDED)  # its slots hold what another request asked for
        if known is not None:
            return known.answer or Waiting()
        if ledger.ended.get(grant) is not None:
            return _empty_lease(grant, 0, Reason.GRANT_ENDED)
        if grant in ledger.tickets:
            return Refused(Reason.GRANT_ENDED)
        if ledger.is_closing:
            return Refused(Reason.SHUTDOWN)
        by_rank = dict(holders) or {0: session}
        if any(holder not in ledger.sessions for holder in by_rank.values()):
            return Refused(Reason.SESSION_GONE)
        shape = ledger.groups[group]
        if any(not 0 <= rank < shape.ranks for rank in by_rank):
            return Refused(Reason.LAYOUT_MISMATCH)
        path = ledger.tree.walk(group, keys)
        cached = path[-1].start + path[-1].blocks if path else 0
        ledger.reuse.hazards.request(now)
        ledger.sizing.asked(shape, keys, now)
        self._regret(group, keys, cached, now)
        allowed, reason = ledger.blocks_allowed(shape, list(by_rank.values()), min(cached, max_blocks))
        devices = ledger.devices.mapped_by(by_rank) if on_device else {}
        resident = self._resident_blocks(path, tuple(by_rank), devices)
        asked = count_keys(keys)
        missing = key_at(keys, cached)
        absence = find_absence(ledger, group, missing) if missing else None
        record = RecentAcquire(
            grant=grant,
            name=name,
            session=session,
            group=group,
            keys=keys,
            asked_blocks=asked,
            cached_blocks=cached,
            host_blocks=resident,
            absence=absence,
            asked_at=now,
            left=find_left(ledger, group, missing) if absence in (Absence.EVICTED, Absence.REFUSED) else None,
        )
        ledger.recent.note(record)
        path = _clip(path, allowed)
        worth_it = self._cascade.break_even.blocks_worth_reading(shape, path, tuple(by_rank), now)
        if worth_it < path_blocks(path):
            allowed, reason = worth_it, Reason.SLOWER_THAN_COMPUTE
            path = _clip(path, allowed)
        if not path:
            if reason is Reason.SLOWER_THAN_COMPUTE:
                ledger.counts.shortened_leases[reason] += 1
            self._count_asked(shape, asked * shape.block_tokens, 0)
            ledger.ended.remember(grant, Refused(Reason.GRANT_ENDED))
            record.answer(0, 0, reason, now)
            return _empty_lease(grant, cached, reason)
        lease = LeaseState(
            grant=grant,
            session=session,
            group=group,
            keys=keys,
            holders=by_rank,
            parties=frozenset({session, *by_rank.values()}),
            ranks=tuple(by_rank),
            path=path,
            asked_blocks=asked,
            cached_blocks=cached,
            host_blocks=min(resident, allowed),
            from_disk=tuple(_only_on_disk(path)),
            from_device=tuple(_in_no_file(path)) if ledger.devices.copies else (),
            deadline=deadline,
            revocable=revocable,
            on_device=on_device,
            record=record,
            shortened=reason,
        )
        ledger.leases[grant] = lease
        self._charge(lease, allowed)
        for segment in path:
            ledger.hold(segment.extent, grant, segment.blocks)
        self._waiting[grant] = lease
        self._want_reads(lease, now)
        self._settle(lease, now)
        if lease.answer is None:
            return Waiting()
        ledger.effects = deque(e for e in ledger.effects if not (isinstance(e, LeaseReady) and e.grant == grant))
        return lease.answer

    def release(self, grant: bytes, rank: int | None, session: bytes | None = None) -> None:
        """Every copy from the slots of `rank` (None: of all ranks) has completed. Who holds a part and did not ask for
        the lease can say so of its own part only, for it knows nothing of the others' copies."""
        lease = self._ledger.leases.get(grant)
        if lease is None:
            if self._ledger.ended.get(grant) is None:
                self._ledger.ended.remember(grant, Refused(Reason.GRANT_ENDED))
            return
        if session is not None and session != lease.session:
            for held in [held for held, holder in lease.holders.items() if holder == session and rank in (None, held)]:
                self._end_part(lease, held, Reason.GRANT_ENDED)
        elif rank is None:
            self._end(lease, Reason.GRANT_ENDED)
        elif rank in lease.holders:
            self._end_part(lease, rank, Reason.GRANT_ENDED)

    def end_session(self, session: bytes) -> None:
        """A session has ended: cancel what it waits for, end the parts it held."""
        for lease in [lease for lease in self._waiting.values() if lease.session == session]:
            self._end(lease, Reason.SESSION_GONE)
        for lease in [lease for lease in self._ledger.leases.values() if session in lease.holders.values()]:
            for rank in [rank for rank, holder in lease.holders.items() if holder == session]:
                self._end_part(lease, rank, Reason.SESSION_GONE)

    def purge_waiting(self) -> None:
        """Who waits for something that was purged gets nothing of it."""
        for lease in [lease for lease in self._waiting.values() if any(s.extent.purged for s in lease.path)]:
            self._end(lease, Reason.PURGED)

    def settle_changed(self, changed: set[Extent], now: float) -> None:
        """Extents have got host copies, or won't: grant the leases that waited for it."""
        for lease in list(self._waiting.values()):
            if any(segment.extent in changed for segment in lease.path):
                self._settle(lease, now)

    def settle_due(self, now: float) -> None:
        for lease in [lease for lease in self._waiting.values() if lease.deadline <= now]:
            self._settle(lease, now)
        for lease in [lease for lease in self._ledger.leases.values() if self._revoke_due(lease) <= now]:
            self._revoke(lease)

    def deadlines(self) -> list[float]:
        due = [lease.deadline for lease in self._waiting.values()]
        return due + [self._revoke_due(lease) for lease in self._ledger.leases.values() if lease.revocable]

    def _regret(self, group: bytes, keys: bytes, cached: int, now: float) -> None:
        """Of the blocks behind the cached ones, those that were cached once have to be computed again."""
        ledger = self._ledger
        if not ledger.ghosts:
            return
        for stretch in ledger.ghosts.along(group, split_keys(keys, cached)):
            ghost = stretch.ghost
            ledger.asked_for(ghost, now)
            seconds = prefill_seconds(ghost.tokens, ghost.first_token, ledger.prefill_rate(ledger.groups[group]))
            ledger.counts.regretted_tokens[ghost.reason] += ghost.tokens
            ledger.counts.regretted_seconds += seconds
            ledger.sizing.regretted(ghost, seconds, now)
            ledger.effects.append(
                Regretted(
                    group=group,
                    key=ghost.key,
                    tier=ghost.tier,
                    blocks=ghost.blocks,
                    tokens=ghost.tokens,
                    seconds=seconds,
                    evicted_at=ghost.evicted_at,
                    reason=ghost.reason,
                )
            )

    def _charge(self, lease: LeaseState, blocks: int) -> None:
        slot_bytes = self._ledger.groups[lease.group].slot_bytes
        for holder in lease.holders.values():
            state = self._ledger.sessions[holder]
            state.held_bytes += blocks * slot_bytes

    def _uncharge(self, lease: LeaseState, holder: bytes, blocks: int) -> None:
        state = self._ledger.sessions.get(holder)
        if state is not None:
            state.held_bytes -= blocks * self._ledger.groups[lease.group].slot_bytes

    def _devices_of(self, lease: LeaseState) -> dict[int, int]:
        """By rank, those that its holders have mapped now."""
        return self._ledger.devices.mapped_by(lease.holders) if lease.on_device else _NO_DEVICES

    def _want_reads(self, lease: LeaseState, now: float) -> None:
        devices = self._devices_of(lease)
        for segment in lease.path:
            for rank in lease.ranks:
                if self._blocks_here(segment.extent, rank, devices) < segment.blocks:
                    self._cascade.want_read(segment.extent, rank, segment.blocks, now)

    def device_died(self, now: float) -> None:
        """What leases that wait had counted on may be in host memory only from now on, or in no memory at all."""
        for lease in [lease for lease in self._waiting.values() if lease.on_device]:
            self._want_reads(lease, now)

    def _blocks_here(self, extent: Extent, rank: int, devices: dict[int, int]) -> int:
        """Of a rank, that its holder can have as they lie."""
        here = len(extent.slots[rank])
        if rank in devices:
            here = max(here, len(self._ledger.devices.slots(extent, devices[rank], rank)))
        return here

    def _resident_blocks(self, path: list[Segment], ranks: tuple[int, ...], devices: dict[int, int]) -> int:
        resident = 0
        for segment in path:
            if devices:
                here = min(segment.blocks, *(self._blocks_here(segment.extent, rank, devices) for rank in ranks))
            else:
                here = min(segment.blocks, *(len(segment.extent.slots[rank]) for rank in ranks))
            resident += here
            if here < segment.blocks:
                break
        return resident

    def _settle(self, lease: LeaseState, now: float) -> None:
        """Grant a waiting lease if all it waits for is there, can't come, or is too late."""
        wanted = path_blocks(lease.path)
        lease.problem = lease.problem or self._read_problem(lease)
        resident = self._resident_blocks(lease.path, lease.ranks, self._devices_of(lease))
        if resident < wanted:
            if now < lease.deadline and self._is_progress_due(lease):
                return
            lease.shortened = lease.problem or (Reason.DEADLINE if now >= lease.deadline else Reason.NO_ROOM)
        self._grant(lease, resident, now)

    def _is_progress_due(self, lease: LeaseState) -> bool:
        """The first stretch that is not there yet is being read, by a disk that answers."""
        devices = self._devices_of(lease)
        for segment in lease.path:
            missing = [r for r in lease.ranks if self._blocks_here(segment.extent, r, devices) < segment.blocks]
            if missing:
                return any(self._cascade.is_coming(segment.extent, rank) for rank in missing)
        return False

    def _read_problem(self, lease: LeaseState) -> Reason | None:
        problems = self._cascade.changes.read_problems
        return next((problems[s.extent] for s in lease.path if s.extent in problems), None)

    def _grant(self, lease: LeaseState, blocks: int, now: float) -> None:
        ledger = self._ledger
        del self._waiting[lease.grant]
        for holder in lease.holders.values():
            self._uncharge(lease, holder, path_blocks(lease.path) - blocks)
        kept = _clip(lease.path, blocks)
        self._hold_only(lease, kept)
        lease.path = kept
        group = ledger.groups[lease.group]
        tokens = group.block_tokens
        promoted = max(0, blocks - lease.host_blocks)
        disk_blocks = _between(lease.from_disk, lease.host_blocks, blocks)
        fetched = _between(lease.from_device, lease.host_blocks, blocks)
        nvme_blocks = promoted - disk_blocks - fetched
        devices = self._devices_of(lease)
        held_ranks = [rank for rank in lease.ranks if rank in lease.holders] if blocks else []
        parts = tuple(self._part(kept, rank, devices) for rank in held_ranks)
        device_blocks = self._device_blocks(parts[0]) if devices and parts else 0
        self._count_asked(group, lease.asked_blocks * tokens, blocks * tokens)
        ledger.counts.hit_tokens["host"] += (blocks - promoted - min(device_blocks, blocks - promoted)) * tokens
        if ledger.devices.pools:
            ledger.counts.hit_tokens["gpu"] += (min(device_blocks, blocks - promoted) + fetched) * tokens
        if ledger.has_disk:
            ledger.counts.hit_tokens["disk"] += disk_blocks * tokens
        ledger.counts.hit_tokens["nvme"] += nvme_blocks * tokens
        if lease.shortened is not None:
            ledger.counts.shortened_leases[lease.shortened] += 1
        if kept:
            ledger.use(ledger.groups[lease.group], kept, now)
        for segment in kept:  # parents first
            self._cascade.writes.used_again(segment.extent, now)
        ledger.hottest.note(kept, now)
        if devices and kept:
            self._cascade.devices.promotions.note_hit(kept, devices, now)
        lease.answer = Lease(
            grant=lease.grant,
            blocks=blocks,
            nvme_blocks=nvme_blocks,
            cached_blocks=lease.cached_blocks,
            parts=parts,
            reason=lease.shortened,
            disk_blocks=disk_blocks,
            device_blocks=device_blocks,
        )
        lease.granted_at = now
        lease.record.answer(blocks, nvme_blocks, lease.shortened, now, disk_blocks)
        ledger.effects.append(LeaseReady(lease.grant, lease.answer))
        if blocks:
            ledger.counts.leases += 1
            ledger.groups[lease.group].was_hit = True
        else:
            self._end(lease, Reason.GRANT_ENDED)

    def _count_asked(self, group: Group, asked_tokens: int, granted_tokens: int) -> None:
        counts = self._ledger.counts
        counts.asked_tokens += asked_tokens
        rate = self._ledger.prefill_rate(group)
        counts.asked_prefill_seconds += prefill_seconds(asked_tokens, 0, rate)
        counts.missed_prefill_seconds += prefill_seconds(asked_tokens - granted_tokens, granted_tokens, rate)

    def _part(self, path: list[Segment], rank: int, devices: dict[int, int]) -> Part:
        offsets: list[int] = []
        for segment in path:
            if rank in devices:
                there = self._ledger.devices.slots(segment.extent, devices[rank], rank)[: segment.blocks]
                offsets += there
                offsets += segment.extent.slots[rank][len(there) : segment.blocks]
            else:
                offsets += segment.extent.slots[rank][: segment.blocks]
        return Part(rank, offsets, self._ledger.pool.generations(offsets))

    def _device_blocks(self, part: Part) -> int:
        first_address = self._ledger.devices.first_address
        return sum(offset >= first_address for offset in part.offsets)

    def _hold_only(self, lease: LeaseState, kept: list[Segment]) -> None:
        blocks_of = {segment.extent: segment.blocks for segment in kept}
        for segment in lease.path:
            blocks = blocks_of.get(segment.extent)
            if blocks is None:
                self._ledger.unhold(segment.extent, lease.grant)
            elif blocks < segment.blocks:
                # Never let go altogether in between: the blocks that stay might be evicted.
                segment.extent.hold(lease.grant, blocks)
                self._ledger.reconsider(segment.extent)

    def _end_part(self, lease: LeaseState, rank: int, reason: Reason) -> None:
        holder = lease.holders.pop(rank)
        self._uncharge(lease, holder, path_blocks(lease.path))
        if not lease.holders:
            self._end(lease, reason)

    def _end(self, lease: LeaseState, reason: Reason) -> None:
        if lease.answer is None:  # somebody still waits for one
            lease.answer = _empty_lease(lease.grant, lease.cached_blocks, reason)
            lease.record.answer(0, 0, reason, lease.record.asked_at)
            self._ledger.effects.append(LeaseReady(lease.grant, lease.answer))
        for rank in list(lease.holders):
            self._uncharge(lease, lease.holders.pop(rank), path_blocks(lease.path))
        for segment in lease.path:
            self._ledger.unhold(segment.extent, lease.grant)
        self._waiting.pop(lease.grant, None)
        self._ledger.leases.pop(lease.grant, None)
        self._ledger.ended.remember(lease.grant, Refused(reason))

    def _revoke(self, lease: LeaseState) -> None:
        """Take a lease back from a holder that agreed to it. The slots' generations move when they are given up; the
        reader compares them after its copy."""
        self._ledger.counts.revoked_leases += 1
        self._end(lease, Reason.REVOKED)

    def _revoke_due(self, lease: LeaseState) -> float:
        is_running = lease.revocable and lease.answer is not None
        return lease.granted_at + self._ledger.limits.revoke_after_seconds if is_running else _NEVER


def _only_on_disk(path: list[Segment]) -> Iterator[tuple[int, int]]:
    for segment in path:
        if segment.extent.nvme is not FileState.PRESENT and segment.extent.disk is FileState.PRESENT:
            yield segment.start, segment.start + segment.blocks


def _in_no_file(path: list[Segment]) -> Iterator[tuple[int, int]]:
    for segment in path:
        if not segment.extent.has_file:
            yield segment.start, segment.start + segment.blocks


def _between(stretches: tuple[tuple[int, int], ...], start: int, stop: int) -> int:
    """Blocks of them in [start, stop)."""
    return sum(max(0, min(end, stop) - max(first, start)) for first, end in stretches)


def _empty_lease(grant: bytes, cached: int, reason: Reason | None) -> Lease:
    return Lease(grant=grant, blocks=0, nvme_blocks=0, cached_blocks=cached, parts=(), reason=reason)


def _clip(path: list[Segment], blocks: int) -> list[Segment]:
    """The first `blocks` blocks of a path."""
    return [
        Segment(segment.extent, segment.start, min(segment.blocks, blocks - segment.start))
        for segment in path
        if segment.start < blocks
    ]
