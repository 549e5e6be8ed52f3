"""Which slab of other block sizes is given up when a size starves, and what has to leave with it.

A slab is emptied whole: every extent with blocks in it is cut before the first of them, and what hangs behind a cut
leaves too, from the leaves up. So a slab goes only if nobody holds any of that and nothing of it is on its way to NVMe.

    slab        | A0 A1 A2 | B3 |            A is cut to nothing, B to 3 blocks;
    elsewhere     C, behind A1               C leaves before A
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.value.order import Rank

CANDIDATES = 16
"""So many of the emptiest slabs are compared; the others are looked at one by one, and only in need."""


@dataclass(frozen=True, slots=True)
class Relief:
    """Extents, and to how many host blocks each is cut, those that hang on others before these."""

    cuts: list[tuple[Extent, int]]
    num_bytes: int  # that leave host memory, in this slab and in others


def find_relief(ledger: Ledger, slot_bytes: int, below: Rank | None, now: float) -> Relief | None:
    """A slab of another size that may go: of the emptiest ones, that with which least leaves. `below`: the rank of what
    this size would give up of its own; then all that leaves ranks below that. None: the size has nothing to give, and
    any slab will do."""
    # One that is empty and still there waits for its last bytes to be wiped: nothing that leaves would free it.
    slabs = [slab for slab in ledger.pool.slabs_of_other_sizes(slot_bytes) if slab[1]]
    first = slabs[:CANDIDATES] if below is None else _likely(ledger, slot_bytes, slabs, now)
    found = [relief for base, used in first if (relief := _relief(ledger, base, used, below, now)) is not None]
    if found:
        return min(found, key=lambda relief: relief.num_bytes)
    rest = slabs[CANDIDATES:] if below is None else ()
    return next(filter(None, (_relief(ledger, base, used, None, now) for base, used in rest)), None)


def has_cheaper(ledger: Ledger, slot_bytes: int, rank: Rank, now: float) -> bool:
    """Whether another size would give up something that ranks below `rank`: two looks tell, nearly always."""
    return any(
        cheapest is not None and cheapest < rank
        for size, order in ledger.host_orders.items()
        if size != slot_bytes
        for cheapest in (order.cheapest(now),)
    )


def _likely(ledger: Ledger, slot_bytes: int, slabs: list[tuple[int, int]], now: float) -> list[tuple[int, int]]:
    """The emptiest ones, and those in which the next victims of the other sizes lie."""
    likely = dict(slabs[:CANDIDATES])
    used = dict(slabs)
    for size, order in ledger.host_orders.items():
        victim = order.next_victim(now) if size != slot_bytes else None
        if victim is not None:
            bases = {ledger.pool.base_of(slot) for slots in victim.slots for slot in slots[-1:]}
            likely.update({base: used[base] for base in bases if base in used})
    return list(likely.items())


def _relief(ledger: Ledger, base: int, used: int, below: Rank | None, now: float) -> Relief | None:
    cuts = _cuts(ledger, base, used, below, now)
    if cuts is None:
        return None
    num_bytes = sum(
        max(0, len(slots) - remaining) * ledger.group_of(extent).slot_bytes
        for extent, remaining in cuts.items()
        for slots in extent.slots
    )
    return Relief(sorted(cuts.items(), key=lambda cut: -cut[0].first_token), num_bytes)


def _cuts(ledger: Ledger, base: int, used: int, below: Rank | None, now: float) -> dict[Extent, int] | None:
    """None: something in the slab, or behind what is in it, has to stay."""
    homes = ledger.homes.get(base, {})
    if sum(homes.values()) != used:
        return None  # the rest is being written or read, is staged, or waits for those who may still touch it
    cuts: dict[Extent, int] = {}
    todo = [(extent, _first_inside(ledger, extent, base)) for extent in homes]
    while todo:
        extent, remaining = todo.pop()
        if cuts.get(extent, remaining + 1) <= remaining:
            continue
        if not _may_be_cut(ledger, extent, remaining, below, now):
            return None
        cuts[extent] = remaining
        behind = list(_kids_behind(extent, remaining))
        stays = extent.has_file or ledger.devices.is_whole(extent)
        if not stays and any(kid.has_file or kid in ledger.devices.copies for kid in behind):
            return None  # what is in files or on devices would be left without its parent
        todo += [(kid, 0) for kid in behind if kid.longest_host_blocks]
    return cuts


def _first_inside(ledger: Ledger, extent: Extent, base: int) -> int:
    base_of = ledger.pool.base_of
    return min(index for slots in extent.slots for index, slot in enumerate(slots) if base_of(slot) == base)


def _may_be_cut(ledger: Ledger, extent: Extent, remaining: int, below: Rank | None, now: float) -> bool:
    is_cheap = below is None or ledger.rank_of(extent, remaining, now) < below
    stays = max(extent.held_blocks, ledger.pins.host_blocks(extent))
    return is_cheap and not extent.reading and stays <= remaining and ledger.may_leave_host(extent)


def _kids_behind(extent: Extent, remaining: int) -> Iterator[Extent]:
    for branch in extent.branch_points:
        if branch.index >= remaining:
            yield from branch.kids
