"""The GPU tier: what comes into the pools of devices, what leaves them, and what of it is under way.

    reserve     a device slot beside the host slot, as far as there is room for what ranks so high
    landing     committed on a device: copied into the host slots; then it is published as any commit is
    promotion   what a lease from a device has hit there in host memory: copied into the pool, for the next one

Nobody waits for a promotion. What is in a pool leaves it by the order in force, one order for each device and size.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from tierkv.core.changes import Changes
from tierkv.core.device_books import DevicePool
from tierkv.core.extent import Extent
from tierkv.core.grants import Evicted, Segment, TicketState
from tierkv.core.instructions import AnyReport, CopyDone, Download, OnDevice, OpFailed, Upload, Zero, Zeroed
from tierkv.core.journal import Account
from tierkv.core.ledger import Group, Ledger
from tierkv.core.left import stay_of_segment
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.value.order import Rank
from tierkv.core.wipes import Wipe

ADVANTAGE = 2.0
"""What comes into a full pool has to be worth more than what goes for it by this factor. The exchange costs a copy over
the bus, and what it gains is one copy over the bus saved with each use of the one, less one with each use of the other:
between two that are used nearly as often it never pays, and they would change places with every hit."""

HITS = 2
"""Of an extent, before something goes for it: the first may be the last."""

PROMOTING_BYTES = 256 * 2**20
PROMOTING_OPS = 16
"""Under way to a device at one time: some ten milliseconds of its bus, so that landings are not kept waiting."""

MOST_WANTED = 1_024
"""Promotions of one device that wait for their turn; of more, the coldest are forgotten."""

MAX_WIPES = 64


@dataclass(slots=True, eq=False)
class _Landing:
    ticket: TicketState
    device: int


@dataclass(slots=True, eq=False)
class _Promotion:
    extent: Extent
    device: int
    rank: int
    first: int
    slots: list[int]
    num_bytes: int
    unclean: bool = False  # what was purged may lie in its slots until they are filled

    @property
    def who(self) -> tuple[str, int, int]:
        return "upload", self.device, self.rank


_Wanted = tuple[Extent, int, int]
"""Extent, device, rank."""


class DeviceTier:
    def __init__(self, ledger: Ledger, changes: Changes, next_op: Callable[[], int]) -> None:
        self._ledger = ledger
        self._books = ledger.devices
        self._changes = changes
        self._next_op = next_op
        self._landings: dict[int, _Landing] = {}
        self._promotions: dict[int, _Promotion] = {}
        self._wipes: dict[int, tuple[int, Wipe]] = {}  # device, and what it zeroes
        self._wanted: dict[_Wanted, tuple[int, int]] = {}  # up to how many blocks, and the number of the right entry
        self._queues: dict[int, list[tuple[float, int, _Wanted]]] = {}  # by device, the hottest first
        self._numbers = count()
        self._promoting_bytes: Counter[int] = Counter()
        self._promoting_ops: Counter[int] = Counter()
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
        for key in [key for key in self._wanted if key[1] == device]:
            del self._wanted[key]
        self._queues.pop(device, None)
        self._wipes = {op: asked for op, asked in self._wipes.items() if asked[0] != device}
        extents = self._books.close(device)
        for op, promotion in [(op, one) for op, one in self._promotions.items() if one.device == device]:
            del self._promotions[op]
            ledger.unhold(promotion.extent, promotion.who)
        del self._promoting_bytes[device], self._promoting_ops[device]
        for op, landing in [(op, one) for op, one in self._landings.items() if one.device == device]:
            del self._landings[op]
            self.on_landed(landing.ticket, Reason.DEVICE_DOWN, now)
        for extent in extents:
            self._changes.note(extent)

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
            self._ledger.counts.failed_copies[problem] += op in self._landings or op in self._promotions
        landing = self._landings.pop(op, None)
        if landing is not None:
            self.on_landed(landing.ticket, problem, now)
        promotion = self._promotions.pop(op, None)
        if promotion is not None:
            self._promoted(promotion, problem)
        self.pump(now)

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
        while (have := pool.available(slot_bytes)) < wanted:
            cheapest = order.cheapest(now)
            if cheapest is None or pool.wiping_bytes >= (wanted - have) * slot_bytes:
                wanted = have
            elif not _outranks(rank_of_new(wanted - 1), cheapest, advantage):
                wanted -= 1
            else:
                victim = order.pop(now)
                assert victim is not None
                self._evict(pool, victim, wanted - have, now)
        return pool.slots.allocate(slot_bytes, wanted)

    def _evict(self, pool: DevicePool, extent: Extent, slots_needed: int, now: float) -> None:
        """From the tail, as few blocks as will do, at most one segment of use."""
        device = pool.device
        floor = self._books.floor(extent, device)
        if floor is None:
            return
        longest = self._books.longest(extent, device)
        floor = stay_of_segment(extent, floor, longest)
        lengths = [len(slots) for (on, _), slots in self._books.places(extent).items() if on == device]
        remaining, freed = longest, 0
        while remaining > floor and freed < slots_needed:
            remaining -= 1
            freed += sum(length > remaining for length in lengths)
        self.leave(extent, device, remaining, now)

    def leave(self, extent: Extent, device: int, remaining: int, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its copies on the device from block `remaining` on go."""
        ledger, books = self._ledger, self._books
        group = ledger.group_of(extent)
        places = [place for place in books.places(extent) if place[0] == device]
        blocks = books.longest(extent, device) - remaining
        freed = sum(max(0, len(books.places(extent)[place]) - remaining) for place in places) * group.slot_bytes
        ledger.counts.evicted_bytes["gpu", reason] += freed
        ledger.counts.evicted_blocks["gpu", reason] += blocks
        in_files = "nvme" if extent.nvme is FileState.PRESENT else "disk"
        ledger.effects.append(
            Evicted(
                group=extent.group,
                key=extent.block_key(remaining),
                tier="gpu",
                to="host" if extent.host_blocks >= remaining + blocks else in_files,
                blocks=blocks,
                num_bytes=freed,
                reason=reason,
                first_token=extent.first_token + remaining * group.block_tokens,
                tokens=blocks * group.block_tokens,
                created=extent.created,
                last_used=extent.used_at(remaining),
                hits=extent.hits_at(remaining),
                value=books.order(device, group.slot_bytes, pinned=False).value(extent, remaining, now),
            )
        )
        for place in places:
            books.cut(extent, place, remaining, reason, to=Account.COPIED)
        ledger.reconsider(extent)

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

    # ---- promotions

    def note_hit(self, path: list[Segment], devices: dict[int, int], now: float) -> None:
        """A lease has found these; `devices` are those that its ranks' holders have mapped."""
        ledger, books = self._ledger, self._books
        for segment in path:
            extent = segment.extent
            for rank, device in devices.items():
                until = min(segment.blocks, len(extent.slots[rank]))
                if until <= len(books.slots(extent, device, rank)):
                    continue
                has_room = books.pools[device].available(ledger.group_of(extent).slot_bytes) > 0
                if has_room or self._may_displace(extent):
                    self._want((extent, device, rank), until, now)
        self.pump(now)

    def _may_displace(self, extent: Extent) -> bool:
        return extent.hits >= HITS or self._ledger.pinned(extent)

    def _want(self, key: _Wanted, blocks: int, now: float) -> None:
        extent, device, _ = key
        order = self._books.order(device, self._ledger.group_of(extent).slot_bytes, pinned=False)
        orphan_last, value = order.rank(extent, 0, now)
        heat = float("inf") if self._ledger.pinned(extent) else value if orphan_last else 0.0
        number = next(self._numbers)
        self._wanted[key] = blocks, number
        queue = self._queues.setdefault(device, [])
        heapq.heappush(queue, (-heat, number, key))
        if len(queue) > 2 * MOST_WANTED:
            ranked = sorted(entry for entry in queue if self._is_right(entry))
            for *_, one in ranked[MOST_WANTED:]:
                del self._wanted[one]
            self._queues[device] = ranked[:MOST_WANTED]

    def _is_right(self, entry: tuple[float, int, _Wanted]) -> bool:
        known = self._wanted.get(entry[2])
        return known is not None and known[1] == entry[1]

    def pump(self, now: float) -> None:
        """Begin what may be begun."""
        for device, queue in self._queues.items():
            while queue and self._promoting_ops[device] < PROMOTING_OPS:
                if self._promoting_bytes[device] >= PROMOTING_BYTES:
                    break
                entry = heapq.heappop(queue)
                if self._is_right(entry):
                    blocks, _ = self._wanted.pop(entry[2])
                    self._promote(*entry[2], blocks, now)

    def _promote(self, extent: Extent, device: int, rank: int, blocks: int, now: float) -> None:
        ledger, books = self._ledger, self._books
        first = len(books.slots(extent, device, rank))
        until = min(blocks, len(extent.slots[rank]))
        if not extent.in_tree or until <= first or ("upload", device, rank) in extent.holds:
            return
        group = ledger.group_of(extent)
        promotion = _Promotion(extent, device, rank, first, [], 0)
        # Held while room is made for it, or it could be its own victim.
        ledger.hold(extent, promotion.who, until)
        wanted = until - first
        if not self._may_displace(extent):
            wanted = min(wanted, books.pools[device].available(group.slot_bytes))
        rank_of, advantage = self._rank_of_promoted(extent, device, first, now)
        promotion.slots = self.allocate(device, group, wanted, now, rank_of, advantage)
        if not promotion.slots:
            ledger.unhold(extent, promotion.who)
            return
        op = self._next_op()
        promotion.num_bytes = len(promotion.slots) * group.slot_bytes
        self._promotions[op] = promotion
        self._promoting_ops[device] += 1
        self._promoting_bytes[device] += promotion.num_bytes
        books.filling[extent, device] += 1
        ledger.reconsider(extent)
        upload = Upload(
            op=op,
            block_bytes=group.block_bytes,
            host=list(extent.slots[rank][first : first + len(promotion.slots)]),
            slots=books.pools[device].in_pool(promotion.slots),
        )
        ledger.effects.append(OnDevice(device, upload))

    def _rank_of_promoted(
        self, extent: Extent, device: int, first: int, now: float
    ) -> tuple[Callable[[int], Rank | None], float]:
        """What its blocks from `first` on rank, and by how much that has to be more: where ranks are no values, a
        factor of them says nothing."""
        if self._ledger.pinned(extent):
            return lambda index: None, ADVANTAGE
        order = self._books.order(device, self._ledger.group_of(extent).slot_bytes, pinned=False)
        is_value = order.rank_of_new(extent.kind, self._ledger.seconds_per_byte(extent)) is not None
        return lambda index: order.rank(extent, first + index, now), ADVANTAGE if is_value else 1.0

    def _promoted(self, one: _Promotion, problem: Reason | None) -> None:
        ledger, books, extent = self._ledger, self._books, one.extent
        self._promoting_ops[one.device] -= 1
        self._promoting_bytes[one.device] -= one.num_bytes
        books.filling[extent, one.device] -= 1
        if not books.filling[extent, one.device]:
            del books.filling[extent, one.device]
        ledger.has_let_go = ledger.has_let_go or one.unclean
        is_wanted = (
            problem is None
            and extent.in_tree
            and len(books.slots(extent, one.device, one.rank)) == one.first
            and one.first + len(one.slots) <= extent.num_blocks
        )
        if is_wanted:
            books.append(extent, one.device, one.rank, one.slots)
            ledger.counts.uploaded_blocks += len(one.slots)
        else:
            wipe = extent.purged or one.unclean
            books.release(one.slots, ledger.group_of(extent).slot_bytes, wipe=wipe)
        ledger.unhold(extent, one.who)
        self._changes.note(extent)

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

    def mark_unclean(self) -> set[int]:
        """Of the copies in flight, whose slots held something before: what they do not fill is wiped."""
        for promotion in self._promotions.values():
            promotion.unclean = True
        return set(self._promotions)

    def still_running(self, ops: set[int]) -> set[int]:
        return ops & self._promotions.keys()

    # ---- for the audit

    def extents(self) -> set[Extent]:
        return {promotion.extent for promotion in self._promotions.values()}

    def slots(self) -> Iterator[tuple[int, str]]:
        for one in self._promotions.values():
            yield from ((slot, f"copied from {one.extent!r}") for slot in one.slots)

    def wipes(self, device: int) -> Iterator[Wipe]:
        yield from (wipe for on, wipe in self._wipes.values() if on == device)
        yield from self._books.pools[device].wipes

    @property
    def num_in_flight(self) -> int:
        return len(self._landings) + len(self._promotions) + len(self._wanted)


def _outranks(rank: Rank | None, victim: Rank, advantage: float) -> bool:
    """Whether what ranks so comes in for that victim."""
    if rank is None or not victim[0]:
        return rank is None or rank[0]
    return rank[0] and rank[1] > advantage * victim[1]
