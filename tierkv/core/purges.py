"""Purges: what an operator wants gone is unreachable at once, and gone as soon as nobody holds it any more.

    start     out of the tree, staged blocks dropped, open tickets refused at their commit  |  recorded on disk
    sweep     once no write or read of it is running: files, quarantine, temp files, index  |  reported: unreachable
    gone      once its leases and tickets have ended, and all memory that held it is zeroed

Until the sweep is reported nothing of the groups in scope is written, so that a sweep takes nothing that was stored
since. On a node without an NVMe tier there is nothing to sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import (
    LEFT_PATHS,
    PurgeAbout,
    PurgeRecorded,
    PurgeResumed,
    PurgeScope,
    PurgeSwept,
    RecordPurge,
    SweepPurge,
    Swept,
)
from tierkv.core.leases import Leases
from tierkv.core.ledger import Group, Ledger
from tierkv.core.purge_scope import Members, NotOne, What, find_members, is_in, is_wholly_in
from tierkv.core.reasons import Reason
from tierkv.core.tickets import Tickets
from tierkv.core.tier_files import TierFiles

__all__ = ["NotOne", "PurgePhase", "PurgeState", "PurgedGroup", "Purges", "What"]

MAX_REMEMBERED = 64
"""Purges that are over, whose receipt can still be had."""


class PurgePhase(StrEnum):
    PREVIEW = "preview"
    REMOVING = "removing"
    UNREACHABLE = "unreachable"  # in every tier, and across a power loss; some of its bytes are still held
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class PurgedGroup:
    """What one group had when the purge was asked for."""

    spec: GroupSpec
    extents: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeState:
    """A receipt: bytes by where they were, times of the node, 0 for not yet. Tickets and leases are those that still
    hold some of it. `reason` is why it does not get on."""

    phase: PurgePhase
    about: PurgeAbout
    swept: Swept
    groups: tuple[PurgedGroup, ...]
    recorded: bool
    leases: int
    tickets: int
    held_bytes: int
    wiping_bytes: int
    earlier_bytes: int
    unreachable: float
    gone: float
    reason: Reason | None


@dataclass(slots=True)
class _Sweep:
    """Of one tier's files, by its worker."""

    is_running: bool = False
    is_over: bool = False
    retry_at: float | None = None
    swept: Swept = field(default_factory=Swept)


@dataclass(slots=True, eq=False)
class _Job:
    purge: bytes
    about: PurgeAbout
    scope: PurgeScope
    groups: tuple[PurgedGroup, ...] = ()
    whole: frozenset[bytes] = frozenset()  # keys of groups of which all is to go
    files: list[Extent] = field(default_factory=list)  # left to the sweep
    busy: dict[Extent, None] = field(default_factory=dict)  # being written, read or removed one by one
    held: dict[Extent, None] = field(default_factory=dict)  # with slots that somebody may still touch
    tickets: dict[bytes, None] = field(default_factory=dict)
    reads: set[int] = field(default_factory=set)
    recorded: bool = False
    is_recording: bool = False  # asked for, and not answered
    on_nvme: _Sweep = field(default_factory=_Sweep)
    on_disk: _Sweep = field(default_factory=_Sweep)
    reason: Reason | None = None
    unreachable: float = 0.0
    gone: float = 0.0


class Purges:
    def __init__(self, ledger: Ledger, cascade: Cascade, leases: Leases, tickets: Tickets) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._leases = leases
        self._tickets = tickets
        self._jobs: dict[bytes, _Job] = {}
        self._unswept: dict[bytes, _Job] = {}  # of those, what is still to be removed from disk
        self._hiding: dict[TierFiles, set[bytes]] = {}  # of those, what hid files from a tier's recovery
        self._hidden: dict[TierFiles, int] = {}  # bytes of these files
        self.on_remove: Callable[[Members, PurgeScope, float], None] = lambda members, scope, now: None
        """Told of what is about to leave the tree."""
        cascade.hold_back(self.covers, self.covers_on_disk)

    # ---- from the asking on

    def start(self, purge: bytes, what: What, now: float) -> PurgeState | NotOne:
        known = self._jobs.get(purge)
        if known is not None:
            return self._state(known)
        members = self._find(what)
        if isinstance(members, NotOne):
            return members
        job = self._jobs[purge] = _Job(purge, self._count(members, now), members.scope, _groups_of(members))
        self._forget_oldest()
        self._ledger.counts.purges += 1
        self._ledger.counts.purged_blocks += job.about.blocks
        if self._ledger.has_nvme and self._cascade.nvme.is_worker_up:
            self._record(job, nvme=True, disk=True)
        self._remove(job, members, now)
        self.settle(now)
        return self._state(job)

    def _record(self, job: _Job, *, nvme: bool, disk: bool) -> None:
        """Have it written down for these tiers."""
        job.is_recording, job.recorded = True, False
        for_disk = disk if self._ledger.has_disk else None
        self._ledger.effects.append(RecordPurge(job.purge, job.scope, job.about, nvme=nvme, disk=for_disk))

    def preview(self, what: What, now: float) -> PurgeState | NotOne:
        members = self._find(what)
        if isinstance(members, NotOne):
            return members
        job = _Job(b"", self._count(members, now), members.scope, _groups_of(members))
        job.held = dict.fromkeys(extent for extent in members.extents if extent.holds)
        job.tickets = dict.fromkeys(ticket.grant for ticket in members.tickets)
        return replace(self._state(job), phase=PurgePhase.PREVIEW)

    def progress(self, purge: bytes) -> PurgeState | None:
        job = self._jobs.get(purge)
        return None if job is None else self._state(job)

    def last_of(self, group: Group) -> float:
        """When a purge that is still remembered was asked for, of all or some of the group; 0 for never."""
        return max((job.about.asked for job in self._jobs.values() if is_in(job.scope, group)), default=0.0)

    def covers(self, group: Group) -> bool:
        """Something of the group is being removed from NVMe: nothing of it is written for now."""
        return any(is_in(job.scope, group) for job in self._unswept.values() if not job.on_nvme.is_over)

    def covers_on_disk(self, group: Group) -> bool:
        """The same of the disk tier, which may be away for long."""
        return any(is_in(job.scope, group) for job in self._unswept.values() if not job.on_disk.is_over)

    def _find(self, what: What) -> Members | NotOne:
        ledger = self._ledger
        known = dict.fromkeys([*ledger.tree, *self._cascade.extents_in_operations()])
        for ticket in ledger.writers():
            known.update(dict.fromkeys(ticket.path))
        for lease in ledger.leases.values():
            known.update(dict.fromkeys(segment.extent for segment in lease.path))
        return find_members(ledger, what, known)

    def _count(self, members: Members, now: float) -> PurgeAbout:
        """Before anything is removed."""
        ledger = self._ledger
        devices = ledger.devices
        host = gpu = blocks = tokens = nvme = disk = extents = 0
        for extent in members.extents:
            group = ledger.group_of(extent)
            host += sum(map(len, extent.slots)) * group.slot_bytes
            gpu += sum(map(len, devices.places(extent).values())) * group.slot_bytes
            for doomed in extent.doomed:
                if doomed.slots[0] < devices.first_address:
                    host += len(doomed.slots) * group.slot_bytes
                else:
                    gpu += len(doomed.slots) * group.slot_bytes
            blocks += extent.num_blocks
            tokens += extent.num_blocks * group.block_tokens
            nvme += extent.nvme_bytes
            disk += extent.disk_bytes
            extents += extent.in_tree
        for block in members.staged:
            group = ledger.groups[block.group]
            host += len(block.slots) * group.slot_bytes
            gpu += sum(slot in devices.twins for slot in block.slots.values()) * group.slot_bytes
            blocks += 1
            tokens += group.block_tokens
        for ticket in members.tickets:
            slot_bytes = ledger.groups[ticket.group].slot_bytes * (not ticket.purged)
            host += len(ticket.offsets) * slot_bytes
            gpu += sum(slot in devices.twins for slot in ticket.offsets) * slot_bytes
        return PurgeAbout(now, extents, blocks, tokens, host, nvme, disk, gpu)

    def _remove(self, job: _Job, members: Members, now: float) -> None:
        cascade, ledger = self._cascade, self._ledger
        self.on_remove(members, job.scope, now)
        if ledger.has_nvme:
            self._unswept[job.purge] = job
            job.on_disk.is_over = not ledger.has_disk
        for ticket in members.tickets:
            self._tickets.purge(ticket)
            job.tickets[ticket.grant] = None
        for block in members.staged:
            ledger.drop_staged(block.key, wipe=True)
        for extent in members.extents:
            cascade.purge(extent)
        # A prefix that nobody knows may be one that was evicted, of any group.
        purged = frozenset(group.spec.group for group in members.groups) or None
        ledger.reuse.purge(ledger.ghosts.forget(purged))
        ledger.sizing.forget(purged)
        self._leases.purge_waiting()
        ledger.wipe_free()
        # Others' tickets and reads were given memory that may hold some of it, and may not have written to it yet.
        for ticket in ledger.writers():
            ticket.unclean = True
            job.tickets[ticket.grant] = None
        job.reads = cascade.reads.mark_unclean() | cascade.devices.mark_unclean()
        for extent in members.extents:
            if not cascade.is_at_rest(extent):
                job.busy[extent] = None
            if extent.doomed:
                job.held[extent] = None
        for extent in members.doubtful:
            for doomed in extent.doomed:
                doomed.wipe = True
                job.held[extent] = None
            if not cascade.is_at_rest(extent):
                job.busy[extent] = None
        concerned = {group.spec.group for group in members.groups} | {extent.group for extent in members.extents}
        ledger.recent.forget(concerned)
        ledger.refusals.forget(concerned)
        job.files = [extent for extent in members.extents if cascade.is_to_sweep(extent)]
        if not ledger.has_nvme:
            job.unreachable = now
        if not members.is_prefix:
            job.whole = frozenset(group.spec.group for group in members.groups)
            for group in members.groups:
                group.wants_folder = False
        ledger.has_let_go = True

    # ---- what happens meanwhile

    def settle_changed(self, changed: set[Extent], now: float) -> None:
        """Operations on some extents have ended."""
        for job in self._unswept.values():
            for extent in changed & job.busy.keys():
                if self._cascade.is_at_rest(extent):
                    del job.busy[extent]
        self._sweep_what_can_be(now)

    def settle(self, now: float) -> None:
        """Take note of what was let go."""
        self._sweep_what_can_be(now)
        ledger = self._ledger
        if not ledger.has_let_go:
            return
        ledger.has_let_go = False
        for job in self._jobs.values():
            if job.gone:
                continue
            job.held = {extent: None for extent in job.held if extent.doomed}
            job.tickets = {grant: None for grant in job.tickets if ledger.writer(grant) is not None}
            job.reads = self._cascade.reads.still_running(job.reads) | self._cascade.devices.still_running(job.reads)
            is_wiped = not (ledger.wiping_bytes or ledger.devices.wiping_bytes)
            is_held = job.held or job.tickets or job.reads or not is_wiped or ledger.earlier_bytes
            if job.unreachable and not is_held:
                job.gone = now
                self._forget_groups(job)

    def _forget_groups(self, job: _Job) -> None:
        """Groups of which nothing is left and that nobody has open: not even their salt is kept."""
        ledger = self._ledger
        needed = {group for session in ledger.sessions.values() for group in session.groups}
        needed.update(extent.group for extent in self._cascade.extents_in_operations())
        needed.update(ticket.group for ticket in ledger.writers())
        needed.update(lease.group for lease in ledger.leases.values())
        needed.update(block.group for block in ledger.staged.values())
        for key, group in list(ledger.groups.items()):
            is_meant = key in job.whole or is_wholly_in(job.scope, group)
            if is_meant and key not in needed and not group.extents:
                del ledger.groups[key]

    def _sweep_what_can_be(self, now: float) -> None:
        for job in self._unswept.values():
            for files, sweep in self._sweeps(job):
                is_due = sweep.retry_at is None or sweep.retry_at <= now
                # The disk tier's worker goes by the record, which must not be written again behind its sweep.
                is_known = sweep is job.on_nvme or job.recorded or (job.on_nvme.is_over and not job.is_recording)
                may_run = is_known and not (sweep.is_running or sweep.is_over or job.busy)
                if is_due and may_run and files.can_read:
                    sweep.is_running, sweep.retry_at = True, None
                    self._ledger.effects.append(files.books.addressed(SweepPurge(job.purge)))

    def _sweeps(self, job: _Job) -> tuple[tuple[TierFiles, _Sweep], ...]:
        return (self._cascade.nvme, job.on_nvme), (self._cascade.disk, job.on_disk)

    def recorded(self, report: PurgeRecorded) -> None:
        job = self._unswept.get(report.purge)
        if job is not None:
            job.is_recording, job.recorded = False, report.reason is None
            job.reason = report.reason

    def swept(self, report: PurgeSwept, now: float) -> None:
        job = self._unswept.get(report.purge)
        if job is not None:
            self._swept(job, self._cascade.nvme, job.on_nvme, report, now)

    def swept_on_disk(self, report: PurgeSwept, now: float) -> None:
        job = self._unswept.get(report.purge)
        if job is not None:
            self._swept(job, self._cascade.disk, job.on_disk, report, now)

    def _swept(self, job: _Job, files: TierFiles, sweep: _Sweep, report: PurgeSwept, now: float) -> None:
        if not sweep.is_running:
            return  # of a worker that died before its report was read: it is swept again
        sweep.swept = add_swept(sweep.swept, report.swept)
        sweep.is_running, job.reason = False, report.reason
        if report.reason is None:
            self._finish_sweep(job, files, sweep, now)
            return
        sweep.retry_at = now + self._ledger.limits.retry_seconds
        is_unknown = report.reason is Reason.NOT_FOUND  # swept, and nobody heard; or it could not be written down
        if is_unknown and self._cascade.nvme.is_worker_up:
            self._record(job, nvme=sweep is job.on_nvme, disk=sweep is job.on_disk)

    def _finish_sweep(self, job: _Job, files: TierFiles, sweep: _Sweep, now: float) -> None:
        sweep.is_over = True
        if sweep is job.on_nvme and not job.is_recording:
            job.recorded = True  # for the disk tier, at the latest now, when there is room for it
        self._cascade.swept(files, job.files, job.scope, now)
        hiding = self._hiding.get(files, set())
        if job.purge in hiding:
            hiding.remove(job.purge)
            if not hiding:
                files.unstrand(self._hidden.pop(files, 0))
        if not (job.on_nvme.is_over and job.on_disk.is_over):
            self._cascade.pump(now)
            return
        del self._unswept[job.purge]
        job.unreachable = now
        job.files = []
        self._ledger.has_let_go = True
        self._cascade.found.take_held(now)
        self._cascade.pump(now)

    def resumed(self, report: PurgeResumed, now: float) -> None:
        """Swept by recovery, or to be swept again."""
        job = self._job_of(report)
        self._resumed(job, self._cascade.nvme, job.on_nvme, report, now)

    def resumed_on_disk(self, report: PurgeResumed, now: float) -> None:
        job = self._job_of(report)
        self._resumed(job, self._cascade.disk, job.on_disk, report, now)

    def _job_of(self, report: PurgeResumed) -> _Job:
        """Each worker tells of what it has on record; what one has swept it tells no more."""
        job = self._jobs.get(report.purge)
        if job is None:
            job = self._jobs[report.purge] = _Job(report.purge, report.about, report.scope, recorded=True)
            job.on_nvme.is_over = job.on_disk.is_over = True
        return job

    def _resumed(self, job: _Job, files: TierFiles, sweep: _Sweep, report: PurgeResumed, now: float) -> None:
        sweep.swept = add_swept(sweep.swept, report.swept)
        job.reason = report.reason
        self._ledger.has_let_go = True
        sweep.is_running = False
        if report.reason is not None:
            sweep.is_over = False
            self._unswept[job.purge] = job
            self._hiding.setdefault(files, set()).add(job.purge)
            sweep.retry_at = now + self._ledger.limits.retry_seconds
        elif job.purge in self._unswept:
            self._finish_sweep(job, files, sweep, now)
        else:
            job.unreachable = job.unreachable or now

    def found_hidden(self, files: TierFiles, num_bytes: int) -> None:
        """Files that recovery did not tell of, because they are to go, take room until they are gone."""
        if num_bytes:
            files.unstrand(self._hidden.pop(files, 0))
            self._hidden[files] = num_bytes
            files.strand(num_bytes)

    def retry(self, now: float) -> None:
        self._sweep_what_can_be(now)

    def next_retry(self) -> float | None:
        times = [
            sweep.retry_at
            for job in self._unswept.values()
            if not job.busy
            for files, sweep in self._sweeps(job)
            if sweep.retry_at is not None and files.can_read
        ]
        return min(times, default=None)

    # ---- the worker's life

    def worker_died(self) -> None:
        for job in self._unswept.values():
            job.on_nvme.is_running = False
            self._busy_no_more(job)

    def disk_worker_died(self) -> None:
        for job in self._unswept.values():
            job.on_disk.is_running = False
            self._busy_no_more(job)

    def _busy_no_more(self, job: _Job) -> None:
        job.busy = {extent: None for extent in job.busy if not self._cascade.is_at_rest(extent)}

    def worker_started(self) -> None:
        """Told before anything else: what goes is written down first. Not again for a tier that is swept, or may be
        just now: the next start would sweep it once more, with all that is in it by then."""
        for job in self._unswept.values():
            nvme, disk = not job.on_nvme.is_over, not (job.recorded or job.on_disk.is_over)
            if nvme or disk:
                self._record(job, nvme=nvme, disk=disk)

    # ---- receipts

    def _state(self, job: _Job) -> PurgeState:
        ledger = self._ledger
        leases = {who for extent in job.held for who in extent.holds if who in ledger.leases}
        held = sum(len(d.slots) * ledger.group_of(e).slot_bytes for e in job.held for d in e.doomed)
        tickets = [ticket for grant in job.tickets if (ticket := ledger.writer(grant)) is not None]
        held += sum(len(ticket.offsets) * ledger.groups[ticket.group].slot_bytes for ticket in tickets)
        phase = PurgePhase.GONE if job.gone else PurgePhase.UNREACHABLE if job.unreachable else PurgePhase.REMOVING
        stuck = next((e.why_not_there for e in job.busy if self._cascade.is_retried(e)), None)
        return PurgeState(
            phase=phase,
            about=job.about,
            swept=_of_both(job.on_nvme.swept, job.on_disk.swept),
            groups=job.groups,
            recorded=job.recorded,
            leases=len(leases),
            tickets=len(tickets),
            held_bytes=held,
            wiping_bytes=0 if job.gone else ledger.wiping_bytes + ledger.devices.wiping_bytes,
            earlier_bytes=0 if job.gone else ledger.earlier_bytes,
            unreachable=job.unreachable,
            gone=job.gone,
            reason=job.reason or stuck or self._why_not_swept(job),
        )

    def _why_not_swept(self, job: _Job) -> Reason | None:
        """A tier that is still to be swept does not answer."""
        if job.purge not in self._unswept:
            return None
        for files, sweep in self._sweeps(job):
            if not (sweep.is_over or (files.can_read and files.is_readable)):
                return files.books.why_degraded
        return None

    def _forget_oldest(self) -> None:
        over = [purge for purge, job in self._jobs.items() if job.gone]
        for purge in over[: max(0, len(self._jobs) - MAX_REMEMBERED)]:
            del self._jobs[purge]


def add_swept(one: Swept, other: Swept) -> Swept:
    """What two sweeps of one tier removed; what is left is as the later one found it."""
    return Swept(
        files=one.files + other.files,
        file_bytes=one.file_bytes + other.file_bytes,
        quarantined_files=one.quarantined_files + other.quarantined_files,
        quarantined_bytes=one.quarantined_bytes + other.quarantined_bytes,
        temp_files=one.temp_files + other.temp_files,
        temp_bytes=one.temp_bytes + other.temp_bytes,
        index_rows=one.index_rows + other.index_rows,
        left_files=other.left_files,
        unknown_groups=other.unknown_groups,
        left_paths=other.left_paths,
    )


def _of_both(nvme: Swept, disk: Swept) -> Swept:
    return msgspec.structs.replace(
        add_swept(nvme, disk),
        left_files=nvme.left_files + disk.left_files,
        unknown_groups=nvme.unknown_groups + disk.unknown_groups,
        left_paths=(*nvme.left_paths, *disk.left_paths)[:LEFT_PATHS],
    )


def _groups_of(members: Members) -> tuple[PurgedGroup, ...]:
    extents: dict[bytes, list[Extent]] = {}
    for extent in members.extents:
        extents.setdefault(extent.group, []).append(extent)
    return tuple(
        PurgedGroup(group.spec, len(mine), sum(extent.num_blocks for extent in mine))
        for group in members.groups
        for mine in (extents.get(group.spec.group, []),)
    )
