"""The books: groups, sessions, the tree, the slots, and the few steps that change who owns what.

Every slot in use belongs to exactly one of: a ticket, a landing, a staged block, a block of an extent, a read or a copy
in flight, the doomed slots of blocks that are gone while somebody may still touch them, or a wipe. The steps here keep
that true, of host memory and, with DeviceBooks, of the pools of devices.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, MutableSequence
from dataclasses import dataclass, field

from tierkv.core.counters import Counters
from tierkv.core.device_books import DeviceBooks
from tierkv.core.extent import Branch, Doomed, Extent, Growth
from tierkv.core.ghosts import Ghost, Ghosts
from tierkv.core.grants import EndedGrants, GroupSpec, LeaseState, Notice, Segment, TicketState
from tierkv.core.hottest import Hottest
from tierkv.core.instructions import AnyInstruction, OnDevice, OnDisk, OpenNamespace
from tierkv.core.journal import Account
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, split_keys
from tierkv.core.left import AS_IT_IS, Left
from tierkv.core.live_sizing import LiveSizing
from tierkv.core.pinned import Pinned
from tierkv.core.prefill_rates import PrefillRate, PrefillRates, PrefillSample
from tierkv.core.prefix_tree import PrefixTree
from tierkv.core.reasons import Reason
from tierkv.core.recent import RecentAcquires, Refusals
from tierkv.core.residency import FileState
from tierkv.core.shares import Share, SharedOrder, Shares
from tierkv.core.slabs import PAGE_BYTES, SlabPool
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.value.order import EvictionOrder, Rank
from tierkv.core.value.policies import order_of
from tierkv.core.value.reuse import Reuse
from tierkv.core.value.tuning import AS_MEASURED, Tuning
from tierkv.core.wipes import Wipe, wipes_of

Effect = AnyInstruction | OnDisk | OnDevice | Notice

_HOST, _COMPUTED, _DROPPED = Account.HOST.value, Account.COMPUTED.value, Account.DROPPED.value
"""As plain strings: to hash an enumeration's member takes a call in Python, several of them a block stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes, durations in seconds, shares of 1. `nvme_bytes` 0: there is no NVMe tier; `disk_bytes` alike."""

    host_bytes: int
    slab_bytes: int
    extent_bytes: int
    nvme_bytes: int
    seal_after_seconds: float
    session_bytes: int
    inflight_writes: int
    inflight_reads: int
    disk_bytes: int = 0
    disk_inflight: int = 4  # demotions at a time, and reads
    device_bytes: tuple[int, ...] = ()  # that each device's pool is to have
    page_bytes: int = PAGE_BYTES
    staged_seconds: float = 60.0
    touch_seconds: float = 5.0
    revoke_after_seconds: float = 30.0
    retry_seconds: float = 1.0
    prefill_tokens_per_second: float = 12_000.0  # at the start of a prompt, until an engine has told its own
    ghosts: int = 262_144  # most records of what was evicted
    policy: str = "density"  # one of PolicyName
    tuning: Tuning = AS_MEASURED  # of that one
    nvme_write_bytes_per_day: int = 0  # 0: no limit
    pinned_share: float = 0.1
    auto_pin_share: float = 0.0  # part of that, for the hottest prefixes
    shares: tuple[tuple[str, float], ...] = ()  # names of models and tenants, and what part of each tier is theirs
    ttl: tuple[tuple[str, float], ...] = ()  # names of tenants, and how long what they don't use is kept

    def pin_caps(self) -> tuple[int, int]:
        """What pins may hold of host memory and of NVMe."""
        return int(self.host_bytes * self.pinned_share), int(self.nvme_bytes * self.pinned_share)


@dataclass(slots=True, eq=False)
class Group:
    """One identity's share. The sums are kept as extents change, so that a report reads them and scans nothing."""

    spec: GroupSpec
    ranks: int
    block_tokens: int
    block_bytes: int
    slot_bytes: int
    prefill: PrefillRate
    persistent: bool
    share: Share
    extents: int = 0
    blocks: int = 0
    host_slots: int = 0
    gpu_slots: int = 0  # of all devices
    nvme_bytes: int = 0
    disk_bytes: int = 0
    wants_folder: bool = False  # its identity is to lie in the data directory
    wants_disk_folder: bool = False  # and in the disk tier
    last_used: float = 0.0
    written_bytes: int = 0  # to NVMe, since this core began
    was_hit: bool = False  # a lease found something of it, since this core began

    @property
    def seconds_per_byte(self) -> float:
        """That a hit saves: of prefill at the start of a prompt, as ranks go by it."""
        return self.block_tokens / (self.prefill.priced_tokens_per_second * self.slot_bytes * self.ranks)

    def file_bytes(self, num_blocks: int) -> int:
        """Upper bound of one rank's file: the header with its keys, checksums and tokens, then the blocks."""
        header = 4096 + num_blocks * (2 * 32 + TOKEN_BYTES * self.block_tokens + 16)
        return -(-header // PAGE_BYTES) * PAGE_BYTES + num_blocks * self.slot_bytes


@dataclass(slots=True, eq=False)
class SessionState:
    session: bytes
    groups: set[bytes] = field(default_factory=set)
    held_bytes: int = 0


@dataclass(slots=True, eq=False)
class StagedBlock:
    """A committed block that is not visible yet: its predecessor, or another rank's part, is missing."""

    group: bytes
    key: bytes
    parent: bytes
    index: int  # in its prompt
    tokens: bytes
    extras: list[bytes]
    suffix_tokens: int
    slots: dict[int, int]  # rank -> slot
    since: float


@dataclass(frozen=True, slots=True)
class Departure:
    """Blocks leave the last tier that had them: which, why and when."""

    tier: str
    reason: Reason
    now: float


def open_namespace(group: Group) -> OpenNamespace:
    return OpenNamespace(
        group=group.spec.group,
        identity=group.spec.identity,
        model_name=group.spec.model_name,
        manifest=group.spec.manifest,
    )


class Ledger:
    def __init__(self, limits: Limits, generations: MutableSequence[int]) -> None:
        self.limits = limits
        self.has_nvme = limits.nvme_bytes > 0  # for good: a limit that sinks to 0 later leaves a tier without room
        self.has_disk = limits.disk_bytes > 0  # likewise
        self.pool = SlabPool(limits.host_bytes, limits.slab_bytes, generations, page_bytes=limits.page_bytes)
        self.tree = PrefixTree()
        self.groups: dict[bytes, Group] = {}
        self._prefill_rates = PrefillRates(limits.prefill_tokens_per_second)
        self.sessions: dict[bytes, SessionState] = {}
        self.tickets: dict[bytes, TicketState] = {}
        self.landings: dict[bytes, TicketState] = {}  # committed, and still being copied from a device
        self.leases: dict[bytes, LeaseState] = {}
        self.ended = EndedGrants()
        self.ghosts = Ghosts(limits.ghosts)
        self.recent = RecentAcquires()
        self.refusals = Refusals()
        self.hottest = Hottest()
        self.writing: dict[int, dict[bytes, bytes]] = {}  # rank -> block key -> grant of the ticket
        self.staged: dict[bytes, StagedBlock] = {}
        self.staged_children: dict[bytes, list[bytes]] = {}
        self.unsealed: dict[Extent, Growth] = {}
        self._new_unsealed: list[Extent] = []
        self._cut_off: dict[Extent, bytes] = {}  # key of the first block that was, while none is in its place
        self.host_limit_since = 0.0
        self.touched: dict[Extent, None] = {}
        self.host_orders: dict[int, EvictionOrder] = {}  # slot size -> order
        self.homes: dict[int, dict[Extent, int]] = {}  # slab -> whose slots of the tree are in it, and how many
        self.reuse = Reuse(limits.tuning)
        self._new_order = order_of(limits.policy, self.reuse.hazards, self)
        self.shares = Shares(limits.shares)
        self.nvme_order = self._order_for("nvme")
        self.disk_order = self._order_for("disk")
        self.left_tree: list[bytes] = []  # keys of extents: with a disk tier, what lies there may be of use now
        self.pins = Pinned(*limits.pin_caps())
        self.devices = DeviceBooks(self, generations)
        self.postings: Counter[tuple[bytes, str, str, str]] = Counter()  # (group, source, target, reason) -> bytes
        self.on_host_change: Callable[[Extent, int], None] | None = None  # a recount that is going on
        self.doomed_bytes = 0
        self.wipes: deque[Wipe] = deque()  # to be asked for
        self.wiping_bytes = 0  # of those, and of those that were asked for
        self.has_let_go = False  # something purged was, since somebody looked
        self.earlier_bytes = 0  # of earlier fronts' arenas that engines still have mapped
        self.counts = Counters()
        self.sizing = LiveSizing(self.counts, self.groups.get, self.prefill_rate, limits.extent_bytes)
        self.ghosts.on_change = self.sizing.ghost_changed
        self.ghosts.on_replaced = lambda ghost: self.reuse.purge([ghost])
        self.effects: deque[Effect] = deque()
        self.is_closing = False

    def writers(self) -> list[TicketState]:
        """Tickets, and those that were committed and are not in host memory yet."""
        return [*self.tickets.values(), *self.landings.values()]

    def writer(self, grant: bytes) -> TicketState | None:
        return self.tickets.get(grant) or self.landings.get(grant)

    def group_of(self, extent: Extent) -> Group:
        return self.groups[extent.group]

    def add_group(self, spec: GroupSpec) -> Group:
        layout = spec.identity.layout
        group = self.groups[spec.group] = Group(
            spec=spec,
            ranks=spec.identity.parallel.shards,
            block_tokens=layout.block_tokens,
            block_bytes=layout.total_block_bytes,
            slot_bytes=self.pool.slot_bytes(layout.total_block_bytes),
            prefill=self._prefill_rates.of(spec.identity),
            persistent=spec.persistent and spec.identity.is_persistent,
            share=self.shares.of(spec),
        )
        return group

    def rename(self, group: Group, spec: GroupSpec, file_bytes_of: Callable[[Group], tuple[int, int]]) -> None:
        """What people call it may decide whose share it uses."""
        group.spec = spec
        share = self.shares.of(spec)
        if share is group.share:
            return
        extents = [extent for extent in self.tree if extent.group == spec.group]
        for extent in extents:
            self.host_order(group.slot_bytes).withdraw(extent)
            self.nvme_order.withdraw(extent)
            self.disk_order.withdraw(extent)
        nvme_bytes, disk_bytes = file_bytes_of(group)
        slots = group.host_slots + sum(len(t.offsets) for t in self.writers() if t.group == spec.group)
        for one, sign in ((group.share, -1), (share, +1)):
            one.host_bytes += sign * slots * group.slot_bytes
            one.nvme_bytes += sign * nvme_bytes
            one.disk_bytes += sign * disk_bytes
        group.share = share
        self._reconsider_all(extents)

    def declare(self, group: Group) -> None:
        """Have the worker write down the group's identity, before its first file."""
        if not group.wants_folder:
            group.wants_folder = True
            self.effects.append(open_namespace(group))

    def host_order(self, slot_bytes: int) -> EvictionOrder:
        order = self.host_orders.get(slot_bytes)
        if order is None:
            order = self.host_orders[slot_bytes] = self._order_for("host")
        return order

    def new_order(self) -> EvictionOrder:
        """The policy's, that knows of no shares."""
        return self._new_order()

    def _order_for(self, tier: str) -> EvictionOrder:
        """The policy's, or where there are shares a layer around as many of them."""
        if not self.shares.is_set:
            return self._new_order()

        def capacity() -> int:
            of_tier = {"host": self.limits.host_bytes, "nvme": self.limits.nvme_bytes, "disk": self.limits.disk_bytes}
            return of_tier[tier]

        return SharedOrder(tier, capacity, lambda group: self.groups[group].share, self._new_order)

    def blocks_allowed(self, group: Group, holders: list[bytes], blocks: int) -> tuple[int, Reason | None]:
        """What the sessions may still hold, in blocks."""
        reason = None
        for holder in set(holders):
            cost = group.slot_bytes * holders.count(holder)
            left = self.limits.session_bytes - self.sessions[holder].held_bytes
            if blocks * cost > left:
                blocks, reason = max(0, left // cost), Reason.SESSION_CAP
        return blocks, reason

    def take_new_unsealed(self) -> list[Extent]:
        """Extents that have begun to grow since the last call."""
        taken, self._new_unsealed = self._new_unsealed, []
        return taken

    def make_memory_only(self, group: Group) -> None:
        """Nothing more of the group goes to NVMe; so what grows in it need not wait for that before it is evicted."""
        group.persistent = False
        self._reconsider_all(extent for extent in self.unsealed if extent.group == group.spec.group)

    # ---- extents come, grow, shrink, go

    def add_extent(self, extent: Extent, above: Extent | None, index: int) -> None:
        group = self.group_of(extent)
        self.tree.add(extent, above, index)
        group.extents += 1
        group.blocks += extent.num_blocks
        group.last_used = max(group.last_used, extent.last_used)
        if not extent.sealed:
            self.unsealed[extent] = Growth(extent.created)
            self._new_unsealed.append(extent)

    def adopt(self, extent: Extent) -> None:
        """Have those that hang on it, and came without being told their parent, hang on it."""
        self.adopted(extent, self.tree.adopt(extent))

    def adopted(self, extent: Extent, branches: Iterable[Branch]) -> None:
        for branch in branches:
            self._reconsider_all(branch.kids)
            self.reconsider(extent)

    def grow_extent(self, extent: Extent, keys: bytes, slots: list[list[int]]) -> None:
        """Append blocks that every rank has in host memory; `slots` per rank."""
        first = extent.num_blocks
        self.tree.grow(extent, keys)
        self.group_of(extent).blocks += extent.num_blocks - first
        for rank, of_rank in enumerate(slots):
            self.append_host(extent, rank, of_rank)
        for branch in extent.branch_points:
            if branch.index >= first:
                self._reconsider_all(branch.kids)

    def cut_extent(self, extent: Extent, num_blocks: int, departure: Departure | None) -> None:
        """The blocks from `num_blocks` on are no longer cached, in any rank; they are remembered, unless there is no
        `departure`. Down to 0 the extent leaves the tree."""
        group = self.group_of(extent)
        if departure is not None:
            self._remember(extent, num_blocks, departure)
        else:
            self.reuse.cut(extent, num_blocks, group.block_tokens)
        for rank in range(group.ranks):
            if departure is None:
                self.cut_host(extent, rank, num_blocks, Reason.PURGED, to=Account.PURGED)
            else:
                self.cut_host(extent, rank, num_blocks, departure.reason)
        if extent in self.devices.copies:
            reason = Reason.PURGED if departure is None else departure.reason
            to = Account.PURGED if departure is None else Account.DROPPED
            self.devices.cut_all(extent, num_blocks, reason, to=to)
        group.blocks -= extent.num_blocks - num_blocks
        orphans = [kid for branch in extent.branch_points if branch.index >= num_blocks for kid in branch.kids]
        if num_blocks == 0:
            self._remove_extent(extent)
            self._reconsider_all(orphans)
            return
        self.tree.cut(extent, num_blocks)
        self._reconsider_all(orphans)
        if extent.tokens is not None:
            extent.tokens = extent.tokens[: num_blocks * group.block_tokens * TOKEN_BYTES]
        if extent.extras:
            extent.extras = {index: extra for index, extra in extent.extras.items() if index < num_blocks}
        extent.hot_blocks = min(extent.hot_blocks, num_blocks)
        self.settle_pins(extent)

    def _remember(self, extent: Extent, num_blocks: int, departure: Departure) -> None:
        """Ghosts of the blocks from `num_blocks` on: one a segment, the last first, for each joins what follows it."""
        hot = min(max(num_blocks, extent.hot_blocks), extent.num_blocks)
        for start, stop in ((hot, extent.num_blocks), (num_blocks, hot)):
            if start == stop:
                continue
            keys = extent.keys[start * KEY_BYTES : stop * KEY_BYTES]
            ghost = Ghost(
                group=extent.group,
                key=keys[:KEY_BYTES],
                keys=keys,
                blocks=stop - start,
                first_token=extent.first_token + start * self.group_of(extent).block_tokens,
                block_tokens=self.group_of(extent).block_tokens,
                hits=extent.hits_at(start),
                misses=extent.misses_at(start),
                kind=extent.kind_at(start),
                last_used=extent.used_at(start),
                last_cached_use=extent.used_at(start),
                evicted_at=departure.now,
                tier=departure.tier,
                reason=departure.reason,
            )
            behind = self._cut_off.get(extent, b"")
            self.reuse.forget(self.ghosts.note(ghost, behind), departure.now)
            self._cut_off[extent] = ghost.key

    def _remove_extent(self, extent: Extent) -> None:
        group = self.group_of(extent)
        above = extent.above.owner if extent.above is not None else None
        self.tree.remove(extent)
        group.extents -= 1
        self.unsealed.pop(extent, None)
        self.touched.pop(extent, None)
        self._cut_off.pop(extent, None)
        self.host_order(group.slot_bytes).withdraw(extent)
        self.nvme_order.withdraw(extent)
        self.disk_order.withdraw(extent)
        self.pins.leave(extent)
        if self.has_disk:
            self.left_tree.append(extent.key)
        if above is not None:
            self.reconsider(above)

    # ---- uses

    def use(self, group: Group, path: list[Segment], now: float) -> None:
        """A hit on the whole of `path`, the deepest first: of blocks used at one time it is the first to go."""
        self.reuse.used(path, group.block_tokens, now)
        group.last_used = now
        for segment in reversed(path):
            self.touched[segment.extent] = None
            self.reconsider(segment.extent)

    def asked_for(self, ghost: Ghost, now: float) -> None:
        """These blocks, all or the first of a ghost, are asked for: a use like any other."""
        block_keys = split_keys(ghost.keys)
        for stretch in self.ghosts.claim(ghost.group, block_keys):
            self.ghosts.put_back(self.reuse.asked_for(stretch.ghost, now))
        for order in (self.host_order(self.groups[ghost.group].slot_bytes), self.nvme_order, self.disk_order):
            order.regretted(ghost)

    def store(
        self, extent: Extent, block_keys: list[bytes], slots: list[list[int]], suffix_tokens: int, now: float
    ) -> None:
        """Append blocks that every rank has in host memory (`slots` per rank), computed by a request with a suffix of
        so many tokens. What is remembered of them as ghosts is theirs again."""
        group = self.group_of(extent)
        claimed = self.ghosts.claim(extent.group, block_keys) if self.ghosts else []
        pieces = self.reuse.pieces(len(block_keys), suffix_tokens, claimed, now)
        self.reuse.grow(extent, pieces, group.block_tokens, now)
        self.unsealed[extent].appended(now)
        self._cut_off.pop(extent, None)
        group.last_used = now
        keys = b"".join(block_keys)
        self.grow_extent(extent, keys, slots)
        self.sizing.stored(group, keys, now)

    # ---- host slots of an extent

    def append_host(self, extent: Extent, rank: int, slots: list[int], *, source: str = _COMPUTED) -> None:
        before, first = extent.longest_host_blocks, len(extent.slots[rank])
        self.postings[extent.group, source, _HOST, ""] += len(slots) * self.group_of(extent).slot_bytes
        extent.append_slots(rank, slots)
        for base, inside in self.pool.by_slab(slots):
            home = self.homes.setdefault(base, {})
            home[extent] = home.get(extent, 0) + len(inside)
        if self.devices.twins:
            self.devices.adopt_twins(extent, rank, first, slots)
        self._host_changed(extent, before, len(slots))

    def cut_host(
        self, extent: Extent, rank: int, num_blocks: int, reason: Reason | None = None, *, to: str = _DROPPED
    ) -> None:
        """Give up a rank's host copies from `num_blocks` on: at once, or when the last who holds them lets go. `to` is
        the account that they go to."""
        slots = list(extent.slots[rank][num_blocks:])
        if not slots:
            return
        self.postings[extent.group, _HOST, to, reason or ""] += len(slots) * self.group_of(extent).slot_bytes
        before = extent.longest_host_blocks
        extent.cut_slots(rank, num_blocks)
        for base, inside in self.pool.by_slab(slots):
            self._leave_home(extent, base, len(inside))
        waits_for = {who for who, blocks in extent.holds.items() if blocks > num_blocks}
        if waits_for:
            extent.doomed += (Doomed(slots, waits_for),)
            self.doomed_bytes += len(slots) * self.group_of(extent).slot_bytes
        else:
            self.release(slots, self.group_of(extent).slot_bytes, wipe=extent.purged)
        self._host_changed(extent, before, -len(slots))

    def _leave_home(self, extent: Extent, base: int, count: int) -> None:
        home = self.homes[base]
        home[extent] -= count
        if not home[extent]:
            del home[extent]
            if not home:
                del self.homes[base]

    def _host_changed(self, extent: Extent, before: int, change: int) -> None:
        group = self.group_of(extent)
        group.host_slots += change
        group.share.host_bytes += change * group.slot_bytes
        self.settle_pins(extent)
        if self.on_host_change is not None:
            self.on_host_change(extent, change)
        after = extent.longest_host_blocks
        if extent.above is not None and (before > 0) != (after > 0):
            extent.above.host_kids += 1 if after > 0 else -1
            if extent.above.owner is not None:
                self.reconsider(extent.above.owner)

    def hold(self, extent: Extent, who: Hashable, blocks: int) -> None:
        extent.hold(who, max(blocks, extent.holds.get(who, 0)))
        self.reconsider(extent)

    def unhold(self, extent: Extent, who: Hashable) -> None:
        if not extent.unhold(who):
            return
        for doomed in extent.doomed:
            doomed.waits_for.discard(who)
            if not doomed.waits_for:
                self.release(doomed.slots, self.group_of(extent).slot_bytes, wipe=extent.purged or doomed.wipe)
                if doomed.slots[0] < self.devices.first_address:
                    self.doomed_bytes -= len(doomed.slots) * self.group_of(extent).slot_bytes
        if extent.doomed:
            extent.doomed = tuple(doomed for doomed in extent.doomed if doomed.waits_for)
            self.devices.settle_doomed(extent)
        self.reconsider(extent)

    # ---- what is pinned

    def pinned(self, extent: Extent) -> bool:
        """Whether some of it stays because of a pin."""
        stay = self.pins.stays.get(extent)
        if stay is None:
            return False
        return stay.host_blocks > 0 or stay.nvme_bytes > 0 or extent.disk is FileState.PRESENT

    def settle_pins(self, extent: Extent) -> None:
        """Its blocks, its copies or what is wanted of it have changed: see what stays now. `reconsider` follows."""
        if extent.in_tree and self.pins.concerns(extent):
            group = self.group_of(extent)
            self.pins.settle(extent, group.slot_bytes, may_be_written=self.has_nvme and group.persistent)

    # ---- who may be evicted

    def host_floor(self, extent: Extent, left: Left = AS_IT_IS) -> int | None:
        """The block from which on this extent's host copies may go, with what is `left`; None: none may."""
        if extent.reading or not self.may_leave_host(extent):
            return None
        floor = max(extent.held_blocks, self.pins.host_blocks(extent))
        has_file = extent.has_file or self.devices.is_whole(extent)  # or what is as good
        for branch in extent.branch_points:
            if left.has_host_kids(branch) or (not has_file and left.kids(branch)):
                floor = max(floor, branch.index + 1)
        return floor if floor < left.host_blocks(extent) else None

    def may_leave_host(self, extent: Extent) -> bool:
        """Whoever holds it aside: whether its host copies are needed for nothing that is on its way to NVMe, or will
        be when it is sealed."""
        if not extent.in_tree or extent.nvme in (FileState.QUEUED, FileState.WRITING):
            return False
        return extent.sealed or not (self.has_nvme and self.group_of(extent).persistent)

    def rank_of(self, extent: Extent, remaining: int, now: float) -> Rank:
        """How late the last of the blocks from `remaining` on goes."""
        order = self.host_order(self.group_of(extent).slot_bytes)
        return max(
            order.rank(extent, index, now)
            for index in {remaining, extent.longest_host_blocks - 1}  # one of each segment
            if index >= remaining
        )

    # ---- what a use saves

    def prefill_rate(self, group: Group) -> float:
        """Tokens a second that an engine of this group computes at the start of a prompt."""
        return group.prefill.tokens_per_second

    def report_prefill(self, group: Group, samples: Iterable[PrefillSample]) -> None:
        """An engine of this group has computed these."""
        if group.prefill.report(samples):
            for order in (*self.host_orders.values(), self.nvme_order, self.disk_order):
                order.repriced()

    def seconds_per_byte(self, extent: Extent) -> float:
        return self.group_of(extent).seconds_per_byte

    def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
        group = self.group_of(extent)
        position = extent.first_token + index * group.block_tokens
        seconds = prefill_seconds(group.block_tokens, position, group.prefill.priced_tokens_per_second)
        return seconds / (group.slot_bytes * group.ranks)

    def prefix_tokens(self, extent: Extent, index: int) -> int:
        return extent.first_token + (index + 1) * self.group_of(extent).block_tokens

    def may_leave_nvme(self, extent: Extent) -> bool:
        """Leaves first: of NVMe where it may go on to the disk tier, else of the tree."""
        if not self.may_file_go(extent):
            return False
        if self.has_disk:
            return not any(branch.nvme_kids for branch in extent.branch_points)
        return not extent.has_kids

    def may_file_go(self, extent: Extent) -> bool:
        """Whatever hangs on it: whether its file on NVMe is needed for nothing. One that is being copied to the disk
        tier goes when that has ended."""
        return (
            extent.in_tree
            and extent.nvme is FileState.PRESENT
            and not extent.holds
            and not extent.reading
            and extent.disk not in (FileState.QUEUED, FileState.WRITING)
            and not self.pins.keeps_file(extent)
        )

    def may_leave_disk(self, extent: Extent) -> bool:
        """Leaves first, of the disk tier, and of the tree where no other tier has all of it."""
        if not extent.in_tree or extent.disk is not FileState.PRESENT or extent.holds or extent.reading:
            return False
        if any(branch.disk_kids for branch in extent.branch_points) or self.pins.keeps_disk_file(extent):
            return False
        is_elsewhere = extent.nvme is FileState.PRESENT or self.devices.memory_blocks(extent) == extent.num_blocks
        return is_elsewhere or not extent.has_kids

    def reconsider(self, extent: Extent) -> None:
        """Offer the extent to the eviction orders, or take it back, after something about it has changed."""
        if not extent.in_tree:
            return
        order = self.host_order(self.group_of(extent).slot_bytes)
        floor = self.host_floor(extent)
        if floor is None:
            order.withdraw(extent)
        else:
            order.offer(extent, extent.longest_host_blocks - 1)
        if self.may_leave_nvme(extent):
            self.nvme_order.offer(extent, 0)
        else:
            self.nvme_order.withdraw(extent)
        if self.has_disk:
            self._reconsider_on_disk(extent)
        if self.devices.copies:
            self.devices.reconsider(extent)

    def _reconsider_on_disk(self, extent: Extent) -> None:
        if self.may_leave_disk(extent):
            self.disk_order.offer(extent, 0)
        else:
            self.disk_order.withdraw(extent)

    def _reconsider_all(self, extents: Iterable[Extent]) -> None:
        for extent in list(extents):
            self.reconsider(extent)

    # ---- staged blocks

    def stage(self, block: StagedBlock) -> None:
        self.staged[block.key] = block
        self.staged_children.setdefault(block.parent, []).append(block.key)

    def unstage(self, key: bytes) -> StagedBlock:
        block = self.staged.pop(key)
        siblings = self.staged_children[block.parent]
        siblings.remove(key)
        if not siblings:
            del self.staged_children[block.parent]
        return block

    def drop_staged(self, key: bytes, *, wipe: bool = False) -> None:
        block = self.unstage(key)
        self.release(list(block.slots.values()), self.groups[block.group].slot_bytes, wipe=wipe)
        self.counts.stale_staged_blocks += not wipe

    # ---- memory that is wiped before anybody else gets it

    def release(self, slots: list[int], slot_bytes: int, *, wipe: bool) -> None:
        """Give slots of one memory up, and their twins. With `wipe` they stay in use until they are zeroed; a late
        reader can tell from now on."""
        if self.devices.twins:
            self.devices.release_twins(slots, slot_bytes, wipe=wipe)
        if slots and slots[0] >= self.devices.first_address:
            self.devices.release(slots, slot_bytes, wipe=wipe)
            return
        if not wipe:
            self.pool.release(slots)
            return
        self.has_let_go = True
        self.pool.retire(slots)
        self._wipe(slots, slot_bytes)

    def wipe_free(self) -> None:
        """Have all free memory zeroed that was in use before: what was evicted from it is still in it."""
        for slot_bytes, slots in self.pool.take_free():
            self._wipe(slots, slot_bytes)
        tails = self.pool.pin_tails()
        if tails:
            self.wipes.append(Wipe([], tails, tails))
            self.wiping_bytes += self.wipes[-1].num_bytes
        self.devices.wipe_free()

    def _wipe(self, slots: list[int], slot_bytes: int) -> None:
        for wipe in wipes_of(slots, slot_bytes):
            self.wipes.append(wipe)
            self.wiping_bytes += wipe.num_bytes
