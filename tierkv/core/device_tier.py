"""The GPU tier: what comes into the pools of devices, what leaves them, and what of it is under way.

    reserve     a device slot beside the host slot, as far as there is room for what ranks so high
    landing     committed on a device: copied into the host slots; then it is published as any commit is
    promotion   what a lease from a device has hit there in host memory: copied into the pool, for the next one
    fetch       what is wanted in host memory and only a device has, copied there
    demotion    a fetch of what is to leave its device and is nowhere else: the device's slots go when it has ended

Nobody waits for a promotion. What is in a pool leaves it by the order in force, one order for each device and size.
Host memory may give up what a device has whole, so that a device's copy may be the only one; then it goes down before
it goes, unless it ranks below all that is in host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.grants import TicketState
from tierkv.core.host_room import HostRoom
from tierkv.core.instructions import AnyReport, CopyDone, Download, OnDevice, OpFailed, Zero, Zeroed
from tierkv.core.journal import Account
from tierkv.core.ledger import Departure, Group, Ledger
from tierkv.core.left import stay_of_segment, stay_of_tail
from tierkv.core.promotions import ADVANTAGE, Promotion, Promotions
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.tier_leaving import tell_evicted
from tierkv.core.value.order import Rank
from tierkv.core.wipes import Wipe
from tierkv.core.write_queue import WriteQueue

MAX_WIPES = 64


@dataclass(slots=True, eq=False)
class _Landing:
    ticket: TicketState
    device: int


@dataclass(slots=True, eq=False)
class _Fetch:
    extent: Extent
    device: int
    rank: int
    first: int
    slots: list[int]  # of host memory
    demotes: Reason | None = None  # why the device's copies go when it has ended
    unclean: bool = False

    @property
    def who(self) -> tuple[str, int, int]:
        return "download", self.device, self.rank


class DeviceTier:
    def __init__(
        self, ledger: Ledger, host: HostRoom, writes: WriteQueue, changes: Changes, next_op: Callable[[], int]
    ) -> None:
        self._ledger = ledger
        self._books = ledger.devices
        self._host = host
        self._writes = writes
        self._changes = changes
        self._next_op = next_op
        self._landings: dict[int, _Landing] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._to_fetch: dict[tuple[Extent, int], int] = {}  # extent and rank of those -> up to how many blocks
        self._wipes: dict[int, tuple[int, Wipe]] = {}  # device, and what it zeroes
        self.promotions = Promotions(ledger, changes, next_op, self.allocate)
        self.on_landed: Callable[[TicketState, Reason | None, float], None] = lambda ticket, problem, now: None
        """A landing has ended, with a problem or without."""

    # ---- the workers' lives

    def started(self, device: int, num_bytes: int, now: float) -> None:
        if self._books.pools[device].is_open:
            self.died(device, now)
        self._books.open(device, num_bytes)

    def died(self, device: int, now: float) -> None:
        """Proven dead: nothing of it touches a slot any more, and its pool is no more."""
        ledger = self._ledger
        if not self._books.pools[device].is_open:
            return
        ledger.counts.device_worker_deaths += 1
        ledger.has_let_go = True
        for ticket in ledger.tickets.values():
            ticket.is_device_lost = ticket.is_device_lost or ticket.device == device
        self._wipes = {op: asked for op, asked in self._wipes.items() if asked[0] != device}
        held = {extent: self._books.lengths(extent, device) for extent in self._books.copies}
        extents = self._books.close(device)
        self.promotions.worker_died(device)
        for op, landing in [(op, one) for op, one in self._landings.items() if one.device == device]:
            del self._landings[op]
            self.on_landed(landing.ticket, Reason.DEVICE_DOWN, now)
        for op, fetch in [(op, one) for op, one in self._fetches.items() if one.device == device]:
            del self._fetches[op], self._to_fetch[fetch.extent, fetch.rank]
            self._give_back(fetch)
        for extent in extents:
            self._lose(extent, held[extent], now)
            self._changes.note(extent)

    def _lose(self, extent: Extent, held: list[int], now: float) -> None:
        """What only the dead worker's pool had is in no tier any more. `held` blocks it had of some ranks."""
        ledger = self._ledger
        left = extent.num_blocks if extent.has_file else self._books.memory_blocks(extent)
        if not extent.in_tree or left >= extent.num_blocks:
            return
        ledger.counts.lost_blocks[Reason.DEVICE_DOWN] += extent.num_blocks - left
        group = ledger.group_of(extent)
        tell_evicted(
            ledger,
            extent,
            left,
            extent.num_blocks,
            tier="gpu",
            to="dropped",
            num_bytes=sum(max(0, length - left) for length in held) * group.slot_bytes,
            reason=Reason.DEVICE_DOWN,
            value=ledger.host_order(group.slot_bytes).value(extent, left, now),
        )
        self._changes.read_problems[extent] = Reason.DEVICE_DOWN
        ledger.cut_extent(extent, left, Departure("gpu", Reason.DEVICE_DOWN, now))
        if not left:
            self._writes.forget_unwritten(extent)
        elif not extent.sealed:  # it never grows again, lest who holds it finds another branch's blocks in it
            self._writes.seal(extent, now)

    def report(self, report: AnyReport, now: float) -> None:
        match report:
            case CopyDone():
                self._copy_ended(report.op, None, now)
            case OpFailed():
                self._copy_ended(report.op, report.reason, now)
            case Zeroed():
                self._zeroed(report)
            case _:
                pass  # how the device is, and its farewell, are the front's

    def _copy_ended(self, op: int, problem: Reason | None, now: float) -> None:
        """Of a worker that died before its report was read there is nothing left to end."""
        if problem is not None:
            is_known = op in self._landings or op in self.promotions.under_way or op in self._fetches
            self._ledger.counts.failed_copies[problem] += is_known
        landing = self._landings.pop(op, None)
        if landing is not None:
            self.on_landed(landing.ticket, problem, now)
        self.promotions.ended(op, problem)
        fetch = self._fetches.pop(op, None)
        if fetch is not None:
            self._fetched(fetch, problem, now)
        self.promotions.pump(now)

    # ---- room

    def allocate(
        self,
        device: int,
        group: Group,
        wanted: int,
        now: float,
        rank_of_new: Callable[[int], Rank | None],
        advantage: float = ADVANTAGE,
    ) -> list[int]:
        """Slots for up to `wanted` blocks, the first ones. `rank_of_new(index)`: None where it must come in."""
        pool, slot_bytes = self._books.pools[device], group.slot_bytes
        if pool.slots is None or not pool.slots.fits(slot_bytes):
            return []
        order = self._books.order(device, slot_bytes, pinned=False)
        stuck: dict[Extent, None] = {}  # of which nothing went: they are not asked again
        going = 0  # slots that are free when they have been copied to host memory
        while (have := pool.available(slot_bytes)) + going < wanted:
            cheapest = order.cheapest(now)
            if cheapest is None or pool.wiping_bytes >= (wanted - have) * slot_bytes:
                break
            if not _outranks(rank_of_new(wanted - 1), cheapest, advantage):
                wanted -= 1
                continue
            victim = order.pop(now)
            assert victim is not None
            if victim in stuck:
                continue
            follow = self._evict(device, victim, wanted - have - going, now)
            going += follow
            if not follow and pool.available(slot_bytes) <= have:
                stuck[victim] = None
                order.withdraw(victim)
        for victim in stuck:
            self._ledger.reconsider(victim)
        return pool.slots.allocate(slot_bytes, min(wanted, pool.available(slot_bytes)))

    def _evict(self, device: int, extent: Extent, slots_needed: int, now: float) -> int:
        """From the tail, as few blocks as will do, at most one segment of use. Returns how many slots follow later:
        what is nowhere else is copied to host memory first, and dropped where it is not worth what would go for it."""
        books = self._books
        floor = books.floor(extent, device)
        if floor is None:
            return 0
        longest = books.longest(extent, device)
        floor = stay_of_segment(extent, floor, longest)
        remaining = stay_of_tail(books.lengths(extent, device), floor, slots_needed)
        if self.is_safe(extent, device, remaining):
            self.leave(extent, device, remaining, now)
            return 0
        going = self.demote(extent, device, now)
        if not going and self._may_drop(extent, longest - 1, now):
            remaining = max([remaining, *(branch.index + 1 for branch in extent.branch_points if branch.kids)])
            if remaining < longest:
                self.leave(extent, device, remaining, now)
        return going

    def is_safe(self, extent: Extent, device: int, remaining: int) -> bool:
        """Nothing is lost when the device gives up the blocks from `remaining` on."""
        return extent.has_file or self._books.blocks_without(extent, device, remaining) == extent.num_blocks

    def _may_drop(self, extent: Extent, index: int, now: float) -> bool:
        """It ranks below all that would have to leave host memory for it."""
        order = self._ledger.host_order(self._ledger.group_of(extent).slot_bytes)
        cheapest = order.cheapest(now)
        return cheapest is not None and order.rank(extent, index, now) <= cheapest and not self._ledger.pinned(extent)

    def drop_only_copy(self, slot_bytes: int, now: float) -> bool:
        """Host memory has nothing to give: perhaps because of what hangs on it and only a device has. Drop the first of
        these that goes; whether there was one."""
        for pool in self._books.pools:
            order = self._books.order(pool.device, slot_bytes, pinned=False)
            passed: list[Extent] = []
            dropped = False
            while not dropped and (extent := order.pop(now)) is not None:
                passed.append(extent)
                floor = self._books.floor(extent, pool.device)
                if floor is None or self.is_safe(extent, pool.device, floor) or self._ledger.pinned(extent):
                    continue
                floor = max([floor, *(branch.index + 1 for branch in extent.branch_points if branch.kids)])
                dropped = floor < self._books.longest(extent, pool.device)
                if dropped:
                    self.leave(extent, pool.device, floor, now)
            for extent in passed:
                self._ledger.reconsider(extent)
            if dropped:
                return True
        return False

    def leave_all(self, extent: Extent, now: float, reason: Reason) -> None:
        """Off every device, whatever else there is of it."""
        for device in {on for on, _ in self._books.places(extent)}:
            if self._books.longest(extent, device):
                self.leave(extent, device, 0, now, reason)

    def leave(self, extent: Extent, device: int, remaining: int, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its copies on the device from block `remaining` on go, and with them what is nowhere else."""
        ledger, books = self._ledger, self._books
        group = ledger.group_of(extent)
        for first, end, num_bytes, to in self.parts(extent, device, remaining):
            ledger.counts.evicted_bytes["gpu", reason] += num_bytes
            ledger.counts.evicted_blocks["gpu", reason] += end - first
            value = books.order(device, group.slot_bytes, pinned=False).value(extent, first, now)
            tell_evicted(ledger, extent, first, end, tier="gpu", to=to, num_bytes=num_bytes, reason=reason, value=value)
            if to == "dropped":
                if ledger.has_nvme and group.persistent:
                    ledger.counts.dropped_unwritten_bytes[reason] += num_bytes
                ledger.cut_extent(extent, first, Departure("gpu", reason, now))
                if first == 0:
                    self._writes.forget_unwritten(extent)
        for place in [place for place in books.places(extent) if place[0] == device]:
            books.cut(extent, place, remaining, reason, to=Account.COPIED)
        ledger.reconsider(extent)

    def parts(
        self, extent: Extent, device: int, remaining: int, until: int = sys.maxsize
    ) -> list[tuple[int, int, int, str]]:
        """What becomes of the device's copies of blocks [remaining, until): first, end, bytes, and the tier where they
        still are. The last ones first, which are nowhere else."""
        books, group = self._books, self._ledger.group_of(extent)
        lengths = [min(length, until) for length in books.lengths(extent, device)]
        longest, blocks = max(lengths, default=0), min(extent.num_blocks, until)
        stay = blocks if extent.has_file else min(blocks, books.blocks_without(extent, device, remaining))
        in_files = "nvme" if extent.nvme is FileState.PRESENT else "disk"
        elsewhere = in_files if extent.has_file else "gpu"
        if extent.host_blocks >= min(longest, stay):
            elsewhere = "host"
        parts = [(stay, blocks, "dropped"), (remaining, min(longest, stay), elsewhere)]
        return [
            (first, end, sum(max(0, min(length, end) - first) for length in lengths) * group.slot_bytes, to)
            for first, end, to in parts
            if first < end
        ]

    # ---- fetches

    def fetch(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        """Have the first `blocks` blocks of a rank in host memory, that only a device has."""
        ledger, books, key = self._ledger, self._books, (extent, rank)
        if key in self._to_fetch:
            self._to_fetch[key] = max(blocks, self._to_fetch[key])
            return
        group, first = ledger.group_of(extent), len(extent.slots[rank])
        there = {on: len(slots) for (on, of), slots in books.places(extent).items() if of == rank}
        device = max(there, key=there.__getitem__, default=-1)
        until = min(blocks, there.get(device, 0))
        if until <= first:
            self._changes.progressed.append(extent)
            return
        # Held while room is made for it: the device's copies may be the only ones.
        who = _Fetch(extent, device, rank, first, []).who
        ledger.hold(extent, who, until)
        with group.share.asking(host_bytes=(until - first) * group.slot_bytes):
            room = self._host.make_room(group.slot_bytes, until - first, now)
        slots = ledger.pool.allocate(group.slot_bytes, room.slots)
        if slots:
            self._begin_fetch(_Fetch(extent, device, rank, first, slots), blocks)
            return
        ledger.unhold(extent, who)
        self._changes.read_problems[extent] = Reason.NO_ROOM
        self._changes.progressed.append(extent)

    @property
    def leaving_bytes(self) -> int:
        """On devices, that go once they have been copied to host memory; not what something there hangs on."""
        books, there = self._ledger.devices, 0
        for extent, device in {(one.extent, one.device) for one in self._fetches.values() if one.demotes is not None}:
            floor = max((at.index + 1 for at in extent.branch_points if books.has_kids(at, device)), default=0)
            lengths = (len(slots) for (on, _), slots in books.places(extent).items() if on == device)
            slots = sum(max(0, length - floor) for length in lengths)
            there += slots * self._ledger.group_of(extent).slot_bytes
        return there

    @property
    def is_operator_at_work(self) -> bool:
        """Whether something leaves a device by an operator's word once it has been copied."""
        return any(fetch.demotes is Reason.OPERATOR for fetch in self._fetches.values())

    def is_fetching(self, extent: Extent, rank: int) -> bool:
        return (extent, rank) in self._to_fetch

    def demote(self, extent: Extent, device: int, now: float, reason: Reason = Reason.EVICTED) -> int:
        """Copy to host memory what only this device has, if room can be made for it there by what ranks below; for an
        operator, who means the device, if there is room. Returns how many slots of the device are free then; 0: it
        stays as it is."""
        ledger, books = self._ledger, self._books
        group = ledger.group_of(extent)
        missing = self.missing_in_host(extent, device)
        if any(self.is_fetching(extent, rank) for rank in missing):
            return 0
        wanted = sum(until - len(extent.slots[rank]) for rank, until in missing.items())
        host_rank = ledger.host_order(group.slot_bytes).rank(extent, books.longest(extent, device) - 1, now)
        fetches = [_Fetch(extent, device, rank, len(extent.slots[rank]), [], reason) for rank in missing]
        for fetch in fetches:
            ledger.hold(extent, fetch.who, missing[fetch.rank])
        if reason is not Reason.OPERATOR:
            self._host.make_ready(group.slot_bytes, wanted, now, host_rank)
        if ledger.pool.available(group.slot_bytes) < wanted:
            for fetch in fetches:
                ledger.unhold(extent, fetch.who)
            return 0
        for fetch in fetches:
            until = missing[fetch.rank]
            fetch.slots = ledger.pool.allocate(group.slot_bytes, until - fetch.first)
            self._begin_fetch(fetch, until)
        return wanted

    def missing_in_host(self, extent: Extent, device: int) -> dict[int, int]:
        """By rank, how many blocks the device has, where that is more than host memory has."""
        return {
            rank: len(slots)
            for (on, rank), slots in self._books.places(extent).items()
            if on == device and len(slots) > len(extent.slots[rank])
        }

    def _begin_fetch(self, fetch: _Fetch, blocks: int) -> None:
        """It is held by it."""
        ledger, books, op = self._ledger, self._books, self._next_op()
        self._fetches[op] = fetch
        self._to_fetch[fetch.extent, fetch.rank] = blocks
        there = books.slots(fetch.extent, fetch.device, fetch.rank)
        download = Download(
            op=op,
            block_bytes=ledger.group_of(fetch.extent).block_bytes,
            slots=books.pools[fetch.device].in_pool(there[fetch.first : fetch.first + len(fetch.slots)]),
            host=list(fetch.slots),
        )
        ledger.effects.append(OnDevice(fetch.device, download))

    def _fetched(self, fetch: _Fetch, problem: Reason | None, now: float) -> None:
        ledger, extent, rank = self._ledger, fetch.extent, fetch.rank
        wanted = self._to_fetch.pop((extent, rank))
        is_wanted = (
            problem is None
            and extent.in_tree
            and len(extent.slots[rank]) == fetch.first
            and fetch.first + len(fetch.slots) <= extent.num_blocks
        )
        if is_wanted:
            ledger.append_host(extent, rank, fetch.slots, source=Account.COPIED)
            ledger.counts.fetched_blocks += len(fetch.slots)
            ledger.has_let_go = ledger.has_let_go or fetch.unclean
            ledger.unhold(extent, fetch.who)
        else:
            self._give_back(fetch)
        if problem is not None:
            self._changes.read_problems[extent] = problem
        elif is_wanted and fetch.demotes is not None:
            self._leave_after_fetch(extent, fetch.device, fetch.demotes, now)
        self._changes.note(extent)
        if is_wanted and extent.in_tree and wanted > len(extent.slots[rank]):
            self.fetch(extent, rank, wanted, now)

    def _leave_after_fetch(self, extent: Extent, device: int, reason: Reason, now: float) -> None:
        floor = self._books.floor(extent, device)
        if floor is not None and self.is_safe(extent, device, floor):
            self.leave(extent, device, floor, now, reason)

    def _give_back(self, fetch: _Fetch) -> None:
        """Nothing writes to its slots any more."""
        ledger, extent = self._ledger, fetch.extent
        ledger.has_let_go = ledger.has_let_go or fetch.unclean
        wipe = extent.purged or fetch.unclean
        ledger.release(fetch.slots, ledger.group_of(extent).slot_bytes, wipe=wipe)
        ledger.unhold(extent, fetch.who)

    # ---- landings

    def land(self, ticket: TicketState) -> None:
        """Its device slots have the bytes: copy them into the host slots."""
        books, op = self._books, self._next_op()
        host = [slot for slot in ticket.offsets if slot in books.twins]
        self._landings[op] = _Landing(ticket, ticket.device)
        download = Download(
            op=op,
            block_bytes=self._ledger.groups[ticket.group].block_bytes,
            slots=books.pools[ticket.device].in_pool(books.twins[slot] for slot in host),
            host=host,
        )
        self._ledger.effects.append(OnDevice(ticket.device, download))

    # ---- purging

    def ask_wipes(self) -> None:
        """Have zeroed what has become due."""
        for pool in self._books.pools:
            while pool.wipes and len(self._wipes) < MAX_WIPES:
                op, wipe = self._next_op(), pool.wipes.popleft()
                self._wipes[op] = pool.device, wipe
                ranges = [(address - pool.base, size) for address, size in wipe.ranges]
                self._ledger.effects.append(OnDevice(pool.device, Zero(op, ranges)))

    def _zeroed(self, report: Zeroed) -> None:
        asked = self._wipes.pop(report.op, None)
        if asked is None:
            return  # of a worker that died before its report was read
        device, wipe = asked
        pool, ledger = self._books.pools[device], self._ledger
        pool.wiping_bytes -= wipe.num_bytes
        ledger.counts.wiped_bytes += wipe.num_bytes
        if pool.slots is not None:
            pool.slots.release(wipe.slots)
            pool.slots.unpin_tails(wipe.tails)
        ledger.has_let_go = True

    def _copies(self) -> list[Promotion | _Fetch]:
        return [*self.promotions.under_way.values(), *self._fetches.values()]

    def mark_unclean(self) -> set[int]:
        """Of the copies in flight, whose slots held something before: what they do not fill is wiped."""
        for copy in self._copies():
            copy.unclean = True
        return {*self.promotions.under_way, *self._fetches}

    def still_running(self, ops: set[int]) -> set[int]:
        return {op for op in ops if op in self.promotions.under_way or op in self._fetches}

    # ---- for the audit

    def extents(self) -> set[Extent]:
        return {copy.extent for copy in self._copies()}

    def slots(self) -> Iterator[tuple[int, str]]:
        for copy in self._copies():
            yield from ((slot, f"a copy of {copy.extent!r}") for slot in copy.slots)

    @property
    def host_bytes(self) -> int:
        """Of the slots of host memory that fetches fill."""
        group_of = self._ledger.group_of
        return sum(len(one.slots) * group_of(one.extent).slot_bytes for one in self._fetches.values())

    def wipes(self, device: int) -> Iterator[Wipe]:
        yield from (wipe for on, wipe in self._wipes.values() if on == device)
        yield from self._books.pools[device].wipes

    @property
    def num_in_flight(self) -> int:
        ops = len(self._landings) + len(self.promotions.under_way) + len(self._fetches)
        return ops + self.promotions.num_waiting


def _outranks(rank: Rank | None, victim: Rank, advantage: float) -> bool:
    """Whether what ranks so comes in for that victim."""
    if rank is None or not victim[0]:
        return rank is None or rank[0]
    return rank[0] and rank[1] > advantage * victim[1]
