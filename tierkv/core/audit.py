"""What must hold after every event, stated as ownership: each slot has one owner, each sum is what it sums.

Slow on purpose (it looks at everything); tests call it after each step, the node never does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Branch, Extent
from tierkv.core.keys import KEY_BYTES, split_keys
from tierkv.core.ledger import Ledger
from tierkv.core.pinned import Stay
from tierkv.core.pins import Pins
from tierkv.core.residency import FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.value.hazards import TOKENS_OF_A_UNIT
from tierkv.core.value.kinds import NUM_KINDS
from tierkv.core.wiping import Wiping
from tierkv.errors import BrokenInvariant


def check(ledger: Ledger, cascade: Cascade, wiping: Wiping, pins: Pins) -> None:
    _check_slots(ledger, cascade, wiping)
    _check_homes(ledger)
    _check_extents(ledger)
    _check_branches(ledger)
    _check_orders(ledger)
    _check_exposures(ledger)
    _check_sums(ledger, cascade)
    _check_grants(ledger)
    _check_pins(ledger, pins)


def _require(condition: bool, story: str) -> None:
    if not condition:
        raise BrokenInvariant(story)


def _owned_slots(ledger: Ledger, cascade: Cascade, wiping: Wiping) -> Iterator[tuple[int, str]]:
    for ticket in ledger.writers():
        yield from ((slot, f"ticket {ticket.grant.hex()}") for slot in ticket.offsets)
    for block in ledger.staged.values():
        yield from ((slot, f"staged {block.key[:4].hex()}") for slot in block.slots.values())
    yield from ((twin, f"beside {slot}") for slot, twin in ledger.devices.twins.items())
    yield from ledger.devices.owned_by_extents()
    yield from cascade.devices.slots()
    for pool in ledger.devices.pools:
        for wipe in cascade.devices.wipes(pool.device):
            yield from ((slot, f"a wipe of device {pool.device}") for slot in wipe.slots)
    for extent in _all_extents(ledger, cascade):
        for slots in extent.slots:
            yield from ((slot, repr(extent)) for slot in slots)
        for doomed in extent.doomed:
            yield from ((slot, f"doomed of {extent!r}") for slot in doomed.slots)
    yield from cascade.slots_being_read()
    for wipe in wiping.all():
        yield from ((slot, "a wipe") for slot in wipe.slots)


def _all_extents(ledger: Ledger, cascade: Cascade) -> set[Extent]:
    """Those in the tree, and those that left it while an operation or a grant still knows them."""
    extents = set(ledger.tree) | cascade.extents_in_operations()
    for ticket in ledger.writers():
        extents.update(ticket.path)
    for lease in ledger.leases.values():
        extents.update(segment.extent for segment in lease.path)
    return extents


def _check_slots(ledger: Ledger, cascade: Cascade, wiping: Wiping) -> None:
    owners: dict[int, str] = {}
    for slot, owner in _owned_slots(ledger, cascade, wiping):
        _require(slot not in owners, f"slot {slot} belongs to {owner} and to {owners.get(slot)}")
        owners[slot] = owner
    alone = ledger.devices.twins.keys() - _slots_with_twins(ledger)
    _require(not alone, f"slots beside {alone}, which no ticket and no staged block has")
    used = ledger.pool.used_slots().union(
        *(pool.slots.used_slots() for pool in ledger.devices.pools if pool.slots is not None)
    )
    _require(owners.keys() == used, f"slots without owner {used - owners.keys()}, not in use {owners.keys() - used}")
    _require(ledger.pool.used_bytes <= ledger.pool.limit_bytes, "host memory beyond its limit")
    wiped = sum(wipe.num_bytes for wipe in wiping.all())
    _require(ledger.wiping_bytes == wiped, f"{ledger.wiping_bytes} bytes being wiped counted, {wiped} there")


def _slots_with_twins(ledger: Ledger) -> set[int]:
    """Host slots that may have one beside them."""
    of_tickets = (slot for ticket in ledger.writers() for slot in ticket.offsets)
    return {*of_tickets, *(slot for block in ledger.staged.values() for slot in block.slots.values())}


def _check_homes(ledger: Ledger) -> None:
    """Who has slots in a slab is counted as extents grow and shrink."""
    there: dict[int, Counter[Extent]] = {}
    for extent in ledger.tree:
        for slots in extent.slots:
            for slot in slots:
                there.setdefault(ledger.pool.base_of(slot), Counter())[extent] += 1
    counted = {base: Counter(home) for base, home in ledger.homes.items()}
    _require(counted == there, f"slabs and the extents in them: {counted} counted, {there} there")


def _check_extents(ledger: Ledger) -> None:
    for key, extent in ledger.tree.heads.items():
        story = repr(extent)
        _require(extent.in_tree and extent.key == key == extent.block_key(0), f"not under its key: {story}")
        _require(len(extent.keys) == extent.num_blocks * KEY_BYTES > 0, f"keys and length differ: {story}")
        _require(
            extent.has_file or ledger.devices.memory_blocks(extent) == extent.num_blocks,
            f"a block without a usable copy in every rank: {story}",
        )
        _require(extent.longest_host_blocks <= extent.num_blocks, f"more slots than blocks: {story}")
        is_in_files = extent.nvme is not FileState.ABSENT or extent.disk is not FileState.ABSENT
        _require(extent.sealed or not is_in_files, f"in files and not sealed: {story}")
        _require((extent in ledger.unsealed) != extent.sealed, f"seal and list of growing ones differ: {story}")
        _require(extent.hot_blocks <= extent.num_blocks, f"hotter than long: {story}")
        _require(not extent.purged, f"purged and still to be found: {story}")


def _check_branches(ledger: Ledger) -> None:
    for extent in ledger.tree:
        places = [branch.index for branch in extent.branch_points]
        _require(len(set(places)) == len(places), f"two branches behind one block of {extent!r}")
        for branch in extent.branch_points:
            is_inside = branch.owner is extent and 0 <= branch.index < extent.num_blocks
            _require(is_inside, f"branch disagrees with {extent!r}")
            _require(bool(branch.kids), f"an empty branch at {extent!r}")
        if extent.above is not None:
            _require(extent in extent.above.kids, f"not among its siblings: {extent!r}")
            _check_branch_counts(extent.above)
            owner = extent.above.owner
            _require(
                owner is None or (owner.in_tree and owner.block_key(extent.above.index) == extent.parent),
                f"hangs at a block that is not its parent: {extent!r}",
            )


def _check_branch_counts(branch: Branch) -> None:
    there = (
        sum(kid.longest_host_blocks > 0 for kid in branch.kids),
        sum(kid.nvme is FileState.PRESENT for kid in branch.kids),
        sum(kid.disk is FileState.PRESENT for kid in branch.kids),
    )
    counted = (branch.host_kids, branch.nvme_kids, branch.disk_kids)
    _require(counted == there, f"kids in host memory, on NVMe, on disk: {counted} counted, {there} there")


def _check_orders(ledger: Ledger) -> None:
    """What may be evicted is on offer: else a full tier would be stuck."""
    for extent in ledger.tree:
        if ledger.host_floor(extent) is not None:
            order = ledger.host_order(ledger.group_of(extent).slot_bytes)
            _require(extent in order, f"may leave host memory and is not on offer: {extent!r}")
        if ledger.may_leave_nvme(extent):
            _require(extent in ledger.nvme_order, f"may leave NVMe and is not on offer: {extent!r}")
        if ledger.has_disk and ledger.may_leave_disk(extent):
            _require(extent in ledger.disk_order, f"may leave the disk tier and is not on offer: {extent!r}")


def _check_exposures(ledger: Ledger) -> None:
    """Each block that is cached or remembered waits for its next use, in one kind, since one time."""
    there: dict[int, Counter[int]] = {kind: Counter() for kind in range(NUM_KINDS)}
    for extent in ledger.tree:
        tokens = ledger.group_of(extent).block_tokens
        there[extent.kind][int(extent.last_used)] += extent.hot_blocks * tokens
        there[extent.tail_kind][int(extent.tail_used)] += (extent.num_blocks - extent.hot_blocks) * tokens
    for ghost in ledger.ghosts:
        there[ghost.kind][int(ghost.last_used)] += ghost.tokens
    for kind, tokens_by_second in there.items():
        counted = ledger.reuse.hazards.waiting_by_second(kind)
        for second, units in counted.items():
            waiting = tokens_by_second[second] / TOKENS_OF_A_UNIT
            _require(abs(waiting - units) < 1e-6, f"of kind {kind}, used at {second}: {units} counted, {waiting} there")


def _check_sums(ledger: Ledger, cascade: Cascade) -> None:
    extents: Counter[bytes] = Counter()
    blocks: Counter[bytes] = Counter()
    host: Counter[bytes] = Counter()
    for extent in ledger.tree:
        extents[extent.group] += 1
        blocks[extent.group] += extent.num_blocks
        host[extent.group] += sum(map(len, extent.slots))
    _check_devices(ledger)
    for key, group in ledger.groups.items():
        _require(group.extents == extents[key], f"{group.extents} extents counted, {extents[key]} there")
        _require(group.blocks == blocks[key], f"{group.blocks} blocks counted, {blocks[key]} there")
        _require(group.host_slots == host[key], f"{group.host_slots} host slots counted, {host[key]} there")
    for share in ledger.shares.all:
        its = [group for group in ledger.groups.values() if group.share is share]
        on_nvme = sum(map(cascade.nvme.staying_bytes_of, its))
        on_disk = sum(map(cascade.disk.staying_bytes_of, its))
        in_host = sum(group.host_slots * group.slot_bytes for group in its)
        for ticket in ledger.writers():
            group = ledger.groups[ticket.group]
            in_host += len(ticket.offsets) * group.slot_bytes if group.share is share else 0
        found = (share.host_bytes, share.nvme_bytes, share.disk_bytes)
        there = (in_host, on_nvme, on_disk)
        _require(found == there, f"{share.name} uses {found} counted, {there} there")
    cascade.nvme.check_sums()
    cascade.disk.check_sums()
    others = cascade.found.other_bytes()
    _require(cascade.disk.stranded_bytes >= others, f"files of others take {others} bytes, and count for less")
    if ledger.has_nvme:
        _check_room(cascade, cascade.nvme, any(cascade.nvme_eviction.may_go_now(e, 0.0) for e in ledger.tree))
    if ledger.has_disk:
        _check_room(cascade, cascade.disk, any(map(ledger.may_leave_disk, ledger.tree)))


def _check_devices(ledger: Ledger) -> None:
    books = ledger.devices
    slots: Counter[bytes] = Counter()
    kids: Counter[tuple[Branch, int]] = Counter()
    by_device: Counter[int] = Counter()
    for extent, own in books.copies.items():
        _require(extent.in_tree and bool(own) and all(own.values()), f"on a device, and not to be found: {extent!r}")
        size = ledger.group_of(extent).slot_bytes
        for (device, rank), there in own.items():
            _require(len(there) <= extent.num_blocks, f"more slots of rank {rank} on a device than blocks: {extent!r}")
            _require(all(map(books.pools[device].holds, there)), f"slots of another pool: {extent!r}")
            slots[extent.group] += len(there)
            by_device[device] += len(there) * size
        for device in {device for device, _ in own}:
            if extent.above is not None:
                kids[extent.above, device] += 1
            order = books.order(device, size, pinned=ledger.pinned(extent))
            may_go = books.floor(extent, device) is not None
            _require(may_go == (extent in order), f"on offer on device {device} is not {may_go}: {extent!r}")
    _require(books.kids == kids, f"kids on devices: {books.kids} counted, {kids} there")
    for key, group in ledger.groups.items():
        _require(group.gpu_slots == slots[key], f"{group.gpu_slots} slots on devices counted, {slots[key]} there")
    for pool in books.pools:
        counted, used = pool.resident_bytes, 0 if pool.slots is None else pool.slots.used_bytes
        _require(counted == by_device[pool.device], f"{counted} bytes on device {pool.device}, of {by_device}")
        _require(used <= pool.capacity_bytes, f"device {pool.device} beyond its capacity")


def _check_room(cascade: Cascade, files: TierFiles, may_any_go: bool) -> None:
    room = files.books.capacity_bytes - files.overhead_bytes
    staying = files.used_bytes + files.reserved_bytes - files.going_bytes
    is_due = files.is_open and files.can_remove and not cascade.is_behind
    _require(
        staying <= room or not is_due or not may_any_go,
        f"{files.books.tier} beyond its capacity while something may go: {staying} bytes stay where {room} may",
    )


def _check_grants(ledger: Ledger) -> None:
    held: Counter[bytes] = Counter()
    for ticket in ledger.tickets.values():
        _require(ticket.holder in ledger.sessions, f"ticket {ticket.grant.hex()} has no living holder")
        held[ticket.holder] += len(ticket.offsets) * ledger.groups[ticket.group].slot_bytes
    for lease in ledger.leases.values():
        size = sum(segment.blocks for segment in lease.path) * ledger.groups[lease.group].slot_bytes
        for holder in lease.holders.values():
            _require(holder in ledger.sessions, f"lease {lease.grant.hex()} has no living holder")
            held[holder] += size
        for segment in lease.path:
            _require(lease.grant in segment.extent.holds, f"lease {lease.grant.hex()} does not hold {segment.extent!r}")
    for session, state in ledger.sessions.items():
        _require(state.held_bytes == held[session], f"session holds {held[session]} bytes, {state.held_bytes} counted")
    for extent in ledger.tree:
        for who in extent.holds:
            is_known = not isinstance(who, bytes) or who in ledger.leases or ledger.writer(who) is not None
            _require(is_known, f"held by a grant that is over: {extent!r}")
    for rank, writing in ledger.writing.items():
        for key, grant in writing.items():
            writer = ledger.writer(grant)
            is_live = writer is not None and not writer.purged
            _require(is_live, f"rank {rank} of {key[:4].hex()} is being written by nobody")


def _check_pins(ledger: Ledger, pins: Pins) -> None:
    """What stays is wanted, is what the extents have of it, and no more than pins may hold."""
    wanted: dict[str, dict[bytes, int]] = {}
    times: Counter[tuple[str, bytes]] = Counter()
    for tier, key, size in pins.wanted_blocks():
        wanted.setdefault(tier, {})[key] = size
        times[tier, key] += 1
    counted = {
        (tier, key): number
        for key, one in ledger.pins.wanted.items()
        for tier, number in (("nvme", one.pins), ("host", one.in_host))
        if number
    }
    _require(counted == times, f"blocks that pins want: {counted} counted, {times} there")
    booked = {tier: sum(blocks.values()) for tier, blocks in wanted.items()}
    _require(pins.booked() == booked, f"pins are booked with {pins.booked()}, and want {booked}")
    stays = ledger.pins.stays
    for extent in ledger.tree:
        is_wanted = extent.key in ledger.pins.wanted
        _require(
            is_wanted == (extent in stays), f"wanted is {is_wanted}, and the books of what stays differ: {extent!r}"
        )
        if is_wanted:
            _check_stay(ledger, extent, stays[extent], wanted.get("host", {}))
    host = sum(stay.host_bytes for stay in stays.values())
    nvme = sum(stay.nvme_bytes for stay in stays.values())
    held = (ledger.pins.host_bytes, ledger.pins.nvme_bytes)
    _require(held == (host, nvme), f"bytes that stay: {held} counted, {host, nvme} there")
    _require(host <= ledger.pins.host_cap, f"pins hold {host} bytes of host memory, of {ledger.pins.host_cap}")
    _require(nvme <= ledger.pins.nvme_cap, f"pins hold {nvme} bytes of NVMe, of {ledger.pins.nvme_cap}")


def _check_stay(ledger: Ledger, extent: Extent, stay: Stay, in_host: dict[bytes, int]) -> None:
    keys = split_keys(extent.keys)
    is_on_nvme = extent.nvme is FileState.PRESENT
    kept = in_host if extent.has_file else ledger.pins.wanted
    depth = next((index for index, key in enumerate(keys) if key not in kept), len(keys))
    story = f"{stay} of {extent!r}, of which {depth} blocks are to stay in host memory"
    _require(stay.host_blocks <= depth, story)
    _require(stay.nvme_bytes in ((0, extent.nvme_bytes) if is_on_nvme else (0,)), story)
    slot_bytes = ledger.group_of(extent).slot_bytes
    there = sum(min(stay.host_blocks, len(slots)) for slots in extent.slots) * slot_bytes
    _require(stay.host_bytes == there, story)
    is_whole = stay.host_blocks == depth and bool(stay.nvme_bytes) == is_on_nvme
    _require(is_whole or extent in ledger.pins.short, f"keeps less than it is to, and waits for nothing: {story}")
    floor = ledger.host_floor(extent)
    _require(floor is None or floor >= stay.host_blocks, f"pinned, and on offer: {story}")
    _require(not stay.nvme_bytes or extent not in ledger.nvme_order, f"pinned on NVMe, and on offer: {story}")
    _require(bool(stay.nvme_bytes) or extent not in ledger.disk_order, f"pinned on disk, and on offer: {story}")
