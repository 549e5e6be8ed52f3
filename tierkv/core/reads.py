"""A tier's files -> host memory: what somebody waits for is read, as room and the drive permit."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.host_room import HostRoom
from tierkv.core.instructions import Read, ReadDone
from tierkv.core.journal import Account
from tierkv.core.keys import KEY_BYTES
from tierkv.core.ledger import Group, Ledger
from tierkv.core.losses import Losses
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_speed import TierSpeed

_USUAL_SLOWNESS = 10.0  # of a disk tier, before both were measured


@dataclass(slots=True, eq=False)
class _ReadOp:
    extent: Extent
    rank: int
    first: int
    slots: list[int]
    tier: TierFiles
    unclean: bool = False  # what was purged may lie in its slots until they are filled


class Reads:
    def __init__(
        self,
        ledger: Ledger,
        nvme: TierFiles,
        disk: TierFiles,
        host: HostRoom,
        losses: Losses,
        changes: Changes,
        next_op: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._nvme = nvme
        self._disk = disk
        self._host = host
        self._losses = losses
        self._changes = changes
        self._next_op = next_op
        self._ops: dict[int, _ReadOp] = {}
        self._in_flight: Counter[TierFiles] = Counter()
        self._wanted: OrderedDict[tuple[Extent, int], int] = OrderedDict()  # -> up to how many blocks
        # Why their files in a tier are to go, when the reads of the other ranks have ended.
        self._lost: dict[tuple[Extent, TierFiles], Reason] = {}
        self.nvme_speed = TierSpeed()
        self.disk_speed = TierSpeed()

    def want(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        """Have the first `blocks` blocks of a rank in host memory, as soon as room and the drive permit."""
        if not self.is_readable(extent):
            self._cant_be_read(extent)
            return
        wanted = (extent, rank)
        self._wanted[wanted] = max(blocks, self._wanted.get(wanted, 0))
        self.pump(now)

    def source(self, extent: Extent) -> TierFiles:
        """The tier that it is read from: NVMe, unless only the disk tier has it, or answers."""
        if extent.disk is not FileState.PRESENT:
            return self._nvme
        if extent.nvme is not FileState.PRESENT:
            return self._disk
        can_nvme = self._nvme.is_readable and self._nvme.can_read
        return self._nvme if can_nvme or not (self._disk.is_readable and self._disk.can_read) else self._disk

    def is_readable(self, extent: Extent) -> bool:
        """The disk that it would be read from answers."""
        return self.source(extent).is_readable

    def _cant_be_read(self, extent: Extent) -> None:
        """Whoever waits for it gets what is in host memory, now."""
        self._changes.read_problems[extent] = self.source(extent).why_not_readable
        self._changes.progressed.append(extent)

    def want_no_more(self, extent: Extent) -> None:
        for rank in range(self._ledger.group_of(extent).ranks):
            self._wanted.pop((extent, rank), None)

    def is_reading(self, extent: Extent, rank: int) -> bool:
        return rank in extent.reading or (extent, rank) in self._wanted

    @property
    def num_in_flight(self) -> int:
        """Those that wait for their turn included."""
        return len(self._ops) + len(self._wanted)

    def pump(self, now: float) -> None:
        ready = [wanted for wanted in self._wanted if wanted[1] not in wanted[0].reading]
        for extent, rank in ready:
            tier = self.source(extent)
            if tier.can_read and self._in_flight[tier] < self._limit(tier):
                blocks = self._wanted.pop((extent, rank), 0)
                self._issue(extent, rank, blocks, now)

    def _limit(self, tier: TierFiles) -> int:
        limits = self._ledger.limits
        return limits.disk_inflight if tier is self._disk else limits.inflight_reads

    def _issue(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        ledger = self._ledger
        group = ledger.group_of(extent)
        first = len(extent.slots[rank])
        blocks = min(blocks, extent.num_blocks)
        if blocks <= first or not extent.has_file:
            self._changes.progressed.append(extent)
            return
        # Held while room is made for it, or it could be its own victim.
        who = ("read", rank)
        ledger.hold(extent, who, blocks)
        with group.share.asking(host_bytes=(blocks - first) * group.slot_bytes):
            room = self._host.make_room(group.slot_bytes, blocks - first, now)
        slots = ledger.pool.allocate(group.slot_bytes, room.slots)
        if not slots:
            ledger.unhold(extent, who)
            self._changes.read_problems[extent] = Reason.NO_ROOM
            self._changes.progressed.append(extent)
            return
        op, tier = self._next_op(), self.source(extent)
        self._ops[op] = _ReadOp(extent, rank, first, slots, tier)
        self._in_flight[tier] += 1
        extent.begin_read(rank, op)
        ledger.reconsider(extent)
        read = Read(
            op=op,
            fingerprint=group.spec.identity.weights,
            group=extent.group,
            rank=rank,
            key=extent.key,
            parent=extent.parent,
            first_token=extent.first_token,
            block_tokens=group.block_tokens,
            block_bytes=group.block_bytes,
            keys=extent.keys[: (first + len(slots)) * KEY_BYTES],
            first=first,
            slots=list(slots),
        )
        ledger.effects.append(tier.books.addressed(read))

    def done(self, report: ReadDone, now: float) -> bool:
        """Whether it is about a read under way."""
        op = self._ops.pop(report.op, None)
        if op is None:
            return False
        self._in_flight[op.tier] -= 1
        ledger = self._ledger
        extent, rank = op.extent, op.rank
        group = ledger.group_of(extent)
        extent.end_read(rank)
        ledger.has_let_go = ledger.has_let_go or op.unclean
        is_wanted = (
            extent.in_tree
            and op.tier.books.state(extent) is FileState.PRESENT
            and len(extent.slots[rank]) == op.first
            and op.first + report.valid <= extent.num_blocks
        )
        valid = report.valid if is_wanted else 0
        if valid:
            ledger.append_host(extent, rank, op.slots[:valid], source=Account.COPIED)
            ledger.counts.promoted_blocks += valid
            self._remember_tokens(extent, group, report)
        if valid < len(op.slots):
            ledger.release(op.slots[valid:], group.slot_bytes, wipe=extent.purged or op.unclean)
        self._count(op, report.valid * group.slot_bytes, report.seconds, now)
        ledger.unhold(extent, ("read", rank))
        if report.reason is not None:
            ledger.counts.failed_reads[report.reason] += 1
            self._changes.read_problems[extent] = report.reason
            self._wanted.pop((extent, rank), None)
        if report.gone:
            self._lost[extent, op.tier] = report.reason or Reason.NOT_FOUND
        self._lose_what_is_lost(extent, now)
        self._changes.note(extent)
        return True

    def _count(self, op: _ReadOp, num_bytes: int, seconds: float, now: float) -> None:
        counts = self._ledger.counts
        if op.tier is not self._disk:
            counts.nvme_read_bytes += num_bytes
            counts.nvme_read_seconds += seconds
            self.nvme_speed.note(num_bytes, seconds, self._in_flight[op.tier] + 1, now)
            return
        counts.disk_read_bytes += num_bytes
        counts.disk_read_seconds += seconds
        self.disk_speed.note(num_bytes, seconds, self._in_flight[op.tier] + 1, now)

    def slowness(self, extent: Extent) -> float:
        """How much longer a byte of it takes to read than one on NVMe, as measured, or as such disks are."""
        if self.source(extent) is not self._disk:
            return 1.0
        nvme, disk = self.nvme_speed.bytes_per_second, self.disk_speed.bytes_per_second
        return max(1.0, nvme / disk) if nvme > 0 and disk > 0 else _USUAL_SLOWNESS

    @property
    def disk_bytes_waiting(self) -> int:
        """What the disk tier is still to read."""
        group_of = self._ledger.group_of
        there = sum(
            len(op.slots) * group_of(op.extent).slot_bytes for op in self._ops.values() if op.tier is self._disk
        )
        for (extent, rank), blocks in self._wanted.items():
            if self.source(extent) is self._disk:
                there += max(0, blocks - len(extent.slots[rank])) * group_of(extent).slot_bytes
        return there

    def _lose_what_is_lost(self, extent: Extent, now: float) -> None:
        """What the other ranks are reading just now is right, and stays as far as every rank has it."""
        for tier in (self._nvme, self._disk):
            if (extent, tier) in self._lost and not extent.reading:
                reason = self._lost.pop((extent, tier))
                if tier is self._disk:
                    self._losses.lose_disk_copy(extent, reason, now)
                else:
                    self._losses.lose_file(extent, reason, now)

    def is_lost(self, extent: Extent) -> bool:
        """Its file is to go, once the reads of the other ranks have ended."""
        return (extent, self.source(extent)) in self._lost

    def _remember_tokens(self, extent: Extent, group: Group, report: ReadDone) -> None:
        num_bytes = extent.num_blocks * group.block_tokens * 4
        if extent.tokens is None and len(report.tokens) >= num_bytes:
            extent.tokens = report.tokens[:num_bytes]
            extent.extras = {index: extra for index, extra in report.extras.items() if index < extent.num_blocks}

    def stop(self, tier: TierFiles) -> None:
        """What was asked of the disk keeps its slots until it comes back; nobody waits for it, and nothing follows."""
        waiting = [op.extent for op in self._ops.values() if op.tier is tier]
        for wanted in [wanted for wanted in self._wanted if self.source(wanted[0]) is tier]:
            del self._wanted[wanted]
            waiting.append(wanted[0])
        for extent in waiting:
            self._cant_be_read(extent)

    def worker_died(self, tier: TierFiles, now: float) -> None:
        """Proven dead: nothing of it touches a slot any more. What it read is wanted again."""
        ledger = self._ledger
        for number, op in [(number, op) for number, op in self._ops.items() if op.tier is tier]:
            del self._ops[number]
            self._in_flight[tier] -= 1
            op.extent.end_read(op.rank)
            wipe = op.extent.purged or op.unclean
            ledger.release(op.slots, ledger.group_of(op.extent).slot_bytes, wipe=wipe)
            ledger.unhold(op.extent, ("read", op.rank))
            if op.extent.purged:
                self._lost.pop((op.extent, tier), None)
                self._changes.progressed.append(op.extent)
                continue
            self._lose_what_is_lost(op.extent, now)
            wanted = (op.extent, op.rank)
            blocks = op.first + len(op.slots)
            self._wanted[wanted] = max(blocks, self._wanted.get(wanted, 0))

    # ---- purging

    def mark_unclean(self) -> set[int]:
        """Of the reads in flight, whose slots held something before: what they do not fill is wiped."""
        for op in self._ops.values():
            op.unclean = True
        return set(self._ops)

    def still_running(self, numbers: set[int]) -> set[int]:
        return numbers & self._ops.keys()

    # ---- for the audit

    @property
    def slot_bytes(self) -> int:
        """Of the slots that reads in flight fill."""
        return sum(len(op.slots) * self._ledger.group_of(op.extent).slot_bytes for op in self._ops.values())

    def slots(self) -> Iterator[tuple[int, str]]:
        for op in self._ops.values():
            yield from ((slot, f"read into {op.extent!r}") for slot in op.slots)

    def extents(self) -> set[Extent]:
        return {op.extent for op in self._ops.values()}
