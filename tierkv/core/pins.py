"""Pins: who wants which prefix to stay, on which tier and until when; written down, so that a restart changes nothing.

    pin      wanted from then on: what is cached stays, and what comes later, as far as the share of the tier goes
    ends     by unpin, by its time, or by a purge of any of it: then it stays on the list and says so

Pins hold against eviction, in all ranks together, and not against a purge. One for host memory keeps the files on NVMe
as well, and has what lies in files alone brought back to memory, for example after a restart. What has no file on NVMe
keeps the one that it has in the disk tier, and is written to NVMe as soon as all of it is in host memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import path_blocks
from tierkv.core.instructions import ForgetPin, PinForgotten, PinRecord, PinRecorded, PurgeScope, RecordPin
from tierkv.core.keys import KEY_BYTES, count_keys, split_keys
from tierkv.core.ledger import Group, Ledger
from tierkv.core.purge_scope import Members, matching_keys
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState

MAX_PINS = 1_000
MAX_OWNER = 64
"""Characters of an owner's name."""

AUTO = "auto"
"""Who owns automatic pins."""

RETRY_SECONDS = 10.0
"""Between two tries to write a record, to remove one, or to bring an extent to memory."""

READ_ONLY_RETRY_SECONDS = 600.0
"""The same, for records, where nothing can be written."""

_ID_BYTES = 16
_RENEWALS = 8  # of a pin, that are known when they are sent again
_READS_AHEAD = 2  # of what is to be brought to memory: the drive is for those who wait for an answer


class PinPhase(StrEnum):
    HOLDS = "holds"  # all of it is cached, and stays
    PARTLY = "partly"  # what is cached of it stays
    WAITING = "waiting"  # nothing of it is cached yet
    SHORT = "short"  # some of what is cached does not stay: what pins may hold of the tier is full
    PURGED = "purged"  # some of it was purged: it holds nothing any more


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """How a pin is doing. The first `cached_blocks` of its blocks can be matched, the first `host_blocks` are in
    memory; of the cached ones, `nvme_blocks` and `disk_blocks` are in files of that tier. Bytes of all ranks: its
    blocks' in memory, and of the files that they lie in. `booked_bytes` it is counted with. `recorded`: it is on disk;
    `reason`: why it is not."""

    record: PinRecord
    phase: PinPhase
    cached_blocks: int
    host_blocks: int
    nvme_blocks: int
    disk_blocks: int
    host_bytes: int
    nvme_bytes: int
    disk_bytes: int
    booked_bytes: int
    recorded: bool
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class PinRefused:
    """Why there is no pin. PINNED_SHARE: it wants `wanted_bytes` of `tier` that no other pin does, of which pins may
    have `cap_bytes` in all; they are booked with `booked_bytes`, by owner as `owners` say. NOT_FOUND: the group is not
    known, or `found` blocks have such a key, or the one that has lies behind a hole. KEY_MISMATCH: they are no keys of
    a prompt. NO_ROOM: there are MAX_PINS already. Else there is no such tier for this group."""

    reason: Reason
    tier: str = ""
    wanted_bytes: int = 0
    cap_bytes: int = 0
    booked_bytes: int = 0
    owners: tuple[tuple[str, int], ...] = ()
    found: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTier:
    """What pins may hold of a tier, what they hold, and what they would, were all that they want cached."""

    tier: str
    cap_bytes: int
    held_bytes: int
    booked_bytes: int


@dataclass(slots=True, eq=False)
class _Job:
    record: PinRecord
    is_auto: bool = False  # never written down
    recorded: bool = False
    reason: Reason | None = None
    retry_at: float | None = None
    renewed_by: deque[bytes] = field(default_factory=lambda: deque(maxlen=_RENEWALS))  # ids of requests

    @property
    def in_host(self) -> bool:
        return self.record.tier == "host"

    @property
    def booked_bytes(self) -> int:
        return 0 if self.record.purged else self.record.blocks * self.record.block_bytes


class Pins:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._pinned = ledger.pins
        self._jobs: dict[bytes, _Job] = {}  # the oldest first
        self._over: dict[bytes, _Job] = {}  # with a record that is still to be removed
        self._booked: Counter[str] = Counter()  # bytes by tier, each block once
        self._promoting: dict[Extent, float] = {}  # -> when its reads were asked for last
        self._writing: dict[Extent, float] = {}  # to NVMe -> when it was last tried

    def __len__(self) -> int:
        return len(self._jobs)

    # ---- from the asking to the end

    def pin(
        self, *, pin: bytes, group: bytes, keys: bytes, owner: str, tier: str, seconds: float, now: float
    ) -> PinState | PinRefused:
        """Have the prefix stay, for so many seconds (0: without an end). Asking again by its id changes nothing. What
        its owner has already pinned there keeps its id, and gets the new end."""
        known = self._asked_before(pin)
        if known is not None:
            return self._state(known)
        ledger = self._ledger
        shape = ledger.groups.get(group)
        if shape is None or not keys:
            return PinRefused(Reason.NOT_FOUND)
        until = now + seconds if seconds else 0.0
        same = self._same_wish(group, keys, owner, tier)
        if same is not None:
            same.renewed_by.append(pin)
            if same.record.until != until:
                same.record = msgspec.structs.replace(same.record, until=until)
                self._write_down(same)
            return self._state(same)
        if len(self._jobs) >= MAX_PINS:
            return PinRefused(Reason.NO_ROOM)
        if len(frozenset(split_keys(keys))) < count_keys(keys):  # no chain of digests repeats itself
            return PinRefused(Reason.KEY_MISMATCH)
        if tier != "host" and not (ledger.has_nvme and shape.persistent):
            return PinRefused(Reason.NOT_PERSISTENT if ledger.has_nvme else Reason.NVME_OFF, tier)
        record = PinRecord(
            pin=pin,
            fingerprint=shape.spec.identity.weights,
            group=group,
            keys=keys,
            blocks=count_keys(keys),
            block_tokens=shape.block_tokens,
            block_bytes=shape.ranks * shape.slot_bytes,
            owner=owner,
            tier=tier,
            made=now,
            until=until,
        )
        refused = self._why_refused(record)
        if refused is not None and refused.reason is Reason.PINNED_SHARE and self._end_automatic():
            refused = self._why_refused(record)
        if refused is not None:
            return refused
        job = _Job(record)
        self._begin(job)
        self._write_down(job)
        for extent in self._extents_along(keys):
            self._cascade.writes.used_again(extent, now)  # what admission kept from NVMe goes there now
        return self._state(job)

    def _asked_before(self, pin: bytes) -> _Job | None:
        """What became of the request with that id: a pin of its own, or another end of one that was there."""
        own = self._jobs.get(pin)
        return own or next((job for job in self._jobs.values() if pin in job.renewed_by), None)

    def _same_wish(self, group: bytes, keys: bytes, owner: str, tier: str) -> _Job | None:
        """The pin of that owner which wants the same already."""
        wish = (group, keys, owner, tier)
        for job in self._jobs.values():
            record = job.record
            is_same = (record.group, record.keys, record.owner, record.tier) == wish
            if is_same and not (job.is_auto or record.purged):
                return job
        return None

    def keep(self, group: Group, keys: bytes, seconds: float, now: float) -> bool:
        """An automatic pin in host memory, or the same one for longer. Whether there is room for it."""
        record = PinRecord(
            pin=keys[-KEY_BYTES:][:_ID_BYTES],
            fingerprint=group.spec.identity.weights,
            group=group.spec.group,
            keys=keys,
            blocks=count_keys(keys),
            block_tokens=group.block_tokens,
            block_bytes=group.ranks * group.slot_bytes,
            owner=AUTO,
            tier="host",
            made=now,
            until=now + seconds,
        )
        known = self._jobs.get(record.pin)
        if known is not None:
            if known.is_auto:
                known.record = msgspec.structs.replace(known.record, until=record.until)
            return known.is_auto
        if len(self._jobs) >= MAX_PINS or self._why_refused(record) is not None:
            return False
        self._begin(_Job(record, is_auto=True))
        return True

    def _end_automatic(self) -> bool:
        """They give way to what somebody wants."""
        automatic = [job for job in self._jobs.values() if job.is_auto]
        for job in automatic:
            self._end(job)
        return bool(automatic)

    def pin_block(
        self, *, pin: bytes, digits: str, owner: str, tier: str, seconds: float, now: float
    ) -> PinState | PinRefused:
        """The prefix that ends with the cached block whose key begins with these hexadecimal digits."""
        known = self._asked_before(pin)
        if known is not None:
            return self._state(known)
        found = self._ends_with(digits)
        chain = self.chain_to(*found[0]) if len(found) == 1 else b""
        if not chain:
            return PinRefused(Reason.NOT_FOUND, found=len(found))
        group = found[0][0].group
        return self.pin(pin=pin, group=group, keys=chain, owner=owner, tier=tier, seconds=seconds, now=now)

    def unpin(self, pin: bytes) -> PinState | None:
        """It holds nothing from now on. `recorded` says whether its record is still on disk."""
        job = self._jobs.get(pin)
        if job is not None:
            self._end(job)
        job = job or self._over.get(pin)
        return None if job is None else self._state(job)

    def ending_with(self, digits: str) -> list[bytes]:
        """The pins whose prefix ends with a block whose key begins so."""
        return [pin for pin, job in self._jobs.items() if job.record.keys[-KEY_BYTES:].hex().startswith(digits)]

    def states(self) -> list[PinState]:
        return [self._state(job) for job in self._jobs.values()]

    def tiers(self) -> list[PinnedTier]:
        pinned = self._pinned
        tiers = [("host", pinned.host_cap, pinned.host_bytes)]
        if self._ledger.has_nvme:
            tiers.append(("nvme", pinned.nvme_cap, pinned.nvme_bytes))
        return [
            PinnedTier(tier=tier, cap_bytes=cap, held_bytes=held, booked_bytes=self._booked[tier])
            for tier, cap, held in tiers
        ]

    def _why_refused(self, record: PinRecord) -> PinRefused | None:
        in_host = record.tier == "host"
        caps = {"nvme": self._pinned.nvme_cap} if self._ledger.has_nvme else {}
        for tier, cap in (caps | {"host": self._pinned.host_cap} if in_host else caps).items():
            new = self._pinned.new_blocks(record.keys, in_host=tier == "host") * record.block_bytes
            if self._booked[tier] + new > cap:
                owners: Counter[str] = Counter()
                for job in self._jobs.values():
                    owners[job.record.owner] += job.booked_bytes if tier == "nvme" or job.in_host else 0
                return PinRefused(
                    Reason.PINNED_SHARE,
                    tier,
                    wanted_bytes=new,
                    cap_bytes=cap,
                    booked_bytes=self._booked[tier],
                    owners=tuple((owner, size) for owner, size in owners.most_common() if size),
                )
        return None

    def _begin(self, job: _Job) -> None:
        record = job.record
        self._jobs[record.pin] = job
        if record.purged:
            return
        self._book(job, +1)
        self._pinned.want(record.keys, in_host=job.in_host)
        self._settle_along(record.keys)

    def _let_go(self, job: _Job) -> None:
        record = job.record
        if record.purged:
            return
        self._pinned.want_no_more(record.keys, in_host=job.in_host)
        self._book(job, -1)
        self._settle_along(record.keys)
        self._settle_short()

    def _book(self, job: _Job, sign: int) -> None:
        """The blocks that no other pin wants: before they are wanted, and when they are no more."""
        record = job.record
        self._booked["nvme"] += sign * self._pinned.new_blocks(record.keys, in_host=False) * record.block_bytes
        if job.in_host:
            self._booked["host"] += sign * self._pinned.new_blocks(record.keys, in_host=True) * record.block_bytes

    def _end(self, job: _Job) -> None:
        pin = job.record.pin
        del self._jobs[pin]
        self._let_go(job)
        if self._ledger.has_nvme and not job.is_auto:
            self._over[pin] = job
            job.recorded, job.reason, job.retry_at = True, None, None
            self._tell(ForgetPin(pin))

    def _settle_along(self, keys: bytes) -> None:
        for extent in self._extents_along(keys):
            self._settle(extent)

    def _extents_along(self, keys: bytes) -> list[Extent]:
        heads = self._ledger.tree.heads
        return [heads[key] for key in split_keys(keys) if key in heads]

    def _settle_short(self) -> None:
        """There is more room in the share than there was."""
        for extent in list(self._pinned.short):
            self._settle(extent)

    def _settle(self, extent: Extent) -> None:
        self._ledger.settle_pins(extent)
        self._ledger.reconsider(extent)

    # ---- which prefix

    def _ends_with(self, digits: str) -> list[tuple[Extent, int]]:
        whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
        return [
            (extent, extent.keys.index(key) // KEY_BYTES)
            for extent in self._ledger.tree
            for key in matching_keys(extent.keys, whole, digits)
        ]

    def chain_to(self, extent: Extent, index: int) -> bytes:
        """The packed keys from token 0 to that block. Empty: something before it is not cached."""
        chain = extent.keys[: (index + 1) * KEY_BYTES]
        while extent.parent != extent.group:
            branch = extent.above
            if branch is None or branch.owner is None:
                return b""
            extent, chain = branch.owner, branch.owner.keys[: (branch.index + 1) * KEY_BYTES] + chain
        return chain

    # ---- how it is doing

    def _state(self, job: _Job) -> PinState:
        record = job.record
        cached = in_host = on_nvme = on_disk = host_bytes = nvme_bytes = disk_bytes = 0
        phase = PinPhase.PURGED
        group = self._ledger.groups.get(record.group)
        if not record.purged:
            path = self._ledger.tree.walk(record.group, record.keys)
            cached = path_blocks(path)
            is_short = False
            for segment in path:
                extent = segment.extent
                here = min(segment.blocks, extent.host_blocks)
                in_host += here if in_host == segment.start else 0
                if group is not None:
                    host_bytes += sum(min(segment.blocks, len(slots)) for slots in extent.slots) * group.slot_bytes
                if extent.nvme is FileState.PRESENT:
                    on_nvme, nvme_bytes = on_nvme + segment.blocks, nvme_bytes + extent.nvme_bytes
                if extent.disk is FileState.PRESENT:
                    on_disk, disk_bytes = on_disk + segment.blocks, disk_bytes + extent.disk_bytes
                is_short = is_short or extent in self._pinned.short
            phase = PinPhase.SHORT if is_short else PinPhase.HOLDS if cached == record.blocks else PinPhase.PARTLY
            phase = phase if cached else PinPhase.WAITING
        return PinState(
            record=record,
            phase=phase,
            cached_blocks=cached,
            host_blocks=in_host,
            nvme_blocks=on_nvme,
            disk_blocks=on_disk,
            host_bytes=host_bytes,
            nvme_bytes=nvme_bytes,
            disk_bytes=disk_bytes,
            booked_bytes=job.booked_bytes,
            recorded=job.recorded,
            reason=job.reason,
        )

    # ---- records on disk

    def _write_down(self, job: _Job) -> None:
        job.recorded, job.retry_at = False, None
        job.reason = None if self._ledger.has_nvme else Reason.NVME_OFF
        if self._ledger.has_nvme:
            self._tell(RecordPin(job.record))

    def _tell(self, instruction: RecordPin | ForgetPin) -> None:
        """A worker that is not there yet is told when it starts."""
        if self._cascade.nvme.is_worker_up:
            self._ledger.effects.append(instruction)

    def recorded(self, report: PinRecorded, now: float) -> None:
        job = self._jobs.get(report.pin)
        if job is not None:
            job.recorded, job.reason = report.reason is None, report.reason
            job.retry_at = _next_try(report.reason, now)

    def forgotten(self, report: PinForgotten, now: float) -> None:
        job = self._over.get(report.pin)
        if job is None:
            return
        job.reason = report.reason
        if report.reason is None:
            del self._over[report.pin]
            job.recorded = False
        else:
            job.retry_at = _next_try(report.reason, now)

    def found(self, record: PinRecord, now: float) -> None:
        """On disk, at a start. What it wants is not there yet. A worker that begins anew tells it again."""
        if record.pin in self._jobs or record.pin in self._over:
            return
        job = _Job(record, recorded=True)
        self._begin(job)
        if record.until and record.until <= now:
            self._end(job)

    def worker_started(self) -> None:
        for job in self._jobs.values():
            if not (job.recorded or job.is_auto):
                self._write_down(job)
        for pin in self._over:
            self._tell(ForgetPin(pin))

    # ---- purges

    def purged(self, members: Members, scope: PurgeScope, now: float) -> None:
        """Before anything is taken out of the tree."""
        if not self._jobs:
            return
        groups = frozenset() if members.is_prefix else frozenset(group.spec.group for group in members.groups)
        staged = {block.key for block in members.staged}
        self._void(scope, groups, {extent.key for extent in members.extents} | staged | {members.named}, now)

    def resumed(self, scope: PurgeScope, now: float) -> None:
        """A purge that an earlier front did not see through; it may not have come to the pins."""
        self._void(scope, frozenset(), set(), now)

    def _void(self, scope: PurgeScope, groups: frozenset[bytes], blocks: set[bytes], now: float) -> None:
        """Those that want any of it want nothing any more."""
        groups |= {named.group for named in scope.groups}
        blocks = blocks | {head for named in scope.extents for head in split_keys(named.heads)}
        for job in list(self._jobs.values()):
            record = job.record
            is_meant = record.group in groups or (record.fingerprint and record.fingerprint in scope.models)
            if record.purged or not (is_meant or not blocks.isdisjoint(split_keys(record.keys))):
                continue
            if job.is_auto:
                self._end(job)
            else:
                self._let_go(job)
                job.record = msgspec.structs.replace(record, keys=record.keys[-KEY_BYTES:], purged=now)
                self._write_down(job)

    # ---- time, and room

    def caps_changed(self) -> None:
        """The tiers have another size. Where pins hold more than they may now, the newest give way."""
        pinned = self._pinned
        pinned.host_cap, pinned.nvme_cap = self._ledger.limits.pin_caps()
        if pinned.host_bytes <= pinned.host_cap and pinned.nvme_bytes <= pinned.nvme_cap:
            self._settle_short()
            return
        before = list(pinned.stays)
        for extent in before:
            pinned.leave(extent)
        for job in self._jobs.values():
            self._settle_along(b"" if job.record.purged else job.record.keys)
        for extent in before:
            self._ledger.reconsider(extent)

    def tick(self, now: float) -> None:
        for job in [job for job in self._jobs.values() if 0.0 < job.record.until <= now]:
            self._end(job)
        for job in self._jobs.values():
            if job.retry_at is not None and job.retry_at <= now:
                self._write_down(job)
        for pin, job in self._over.items():
            if job.retry_at is not None and job.retry_at <= now:
                job.retry_at = None
                self._tell(ForgetPin(pin))

    def next_wakeup(self) -> float | None:
        times = [job.record.until for job in self._jobs.values() if job.record.until]
        if self._cascade.nvme.is_worker_up:
            jobs = [*self._jobs.values(), *self._over.values()]
            times += [job.retry_at for job in jobs if job.retry_at is not None]
        if self._may_promote:
            times += [asked + RETRY_SECONDS for asked in self._promoting.values()]
        if self._may_write:
            times += [
                tried + RETRY_SECONDS for extent, tried in self._writing.items() if extent in self._pinned.to_write
            ]
        return min(times, default=None)

    @property
    def _may_promote(self) -> bool:
        cascade = self._cascade
        return bool(self._pinned.to_promote) and cascade.nvme.is_ready and cascade.nvme.is_readable

    @property
    def _may_write(self) -> bool:
        nvme = self._cascade.nvme
        return bool(self._pinned.to_write) and nvme.is_ready and nvme.is_writable and not self._ledger.is_closing

    def write_again(self, now: float) -> None:
        """Have what is pinned and has come to host memory whole from the disk tier written to NVMe, as far as pins may
        have files there."""
        if not self._may_write:
            return
        pinned, cascade = self._pinned, self._cascade
        self._writing = {
            extent: tried
            for extent, tried in self._writing.items()
            if extent in pinned.to_write and now < tried + RETRY_SECONDS
        }
        for extent in [extent for extent in pinned.to_write if extent not in self._writing]:
            if pinned.nvme_bytes + cascade.nvme.need(extent) <= pinned.nvme_cap:
                self._writing[extent] = now
                cascade.writes.write_pinned(extent, now)

    def promote(self, now: float, *, may_read: bool) -> None:
        """Have what is wanted in host memory and is not there read from NVMe, a few extents at a time. Not while a
        request waits for the drive (`may_read` false): what it asks for next comes with the event that answers it."""
        if not self._may_promote:
            return
        pinned, cascade = self._pinned, self._cascade
        self._promoting = {
            extent: asked
            for extent, asked in self._promoting.items()
            if extent in pinned.to_promote and now < asked + RETRY_SECONDS
        }
        if not may_read:
            return
        room = _READS_AHEAD - sum(bool(extent.reading) for extent in self._promoting)
        for extent in [extent for extent in pinned.to_promote if extent not in self._promoting][: max(0, room)]:
            self._promoting[extent] = now
            wanted = pinned.host_blocks(extent)
            for rank, slots in enumerate(extent.slots):
                if len(slots) < wanted:
                    cascade.want_read(extent, rank, wanted, now)

    # ---- for the audit

    def wanted_blocks(self) -> Iterator[tuple[str, bytes, int]]:
        """Tier, key and bytes of each block that is wanted, as often as it is."""
        for job in self._jobs.values():
            for key in split_keys(b"" if job.record.purged else job.record.keys):
                yield "nvme", key, job.record.block_bytes
                if job.in_host:
                    yield "host", key, job.record.block_bytes

    def booked(self) -> dict[str, int]:
        return {tier: size for tier, size in self._booked.items() if size}


def _next_try(reason: Reason | None, now: float) -> float | None:
    if reason is None:
        return None
    return now + (READ_ONLY_RETRY_SECONDS if reason is Reason.READ_ONLY else RETRY_SECONDS)
