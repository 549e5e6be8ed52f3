"""The third side of an audit: what the front's own sums say of a tier, beside the journal's balances and the files.

Journal and files are held against each other where they are, by a worker. Here it is looked for sums of the core that
agree with neither: blocks would be promised that are not there, or room thought taken that is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tierkv.core.instructions import Difference, GroupCount


def core_differences(
    tier: str, settled: Mapping[bytes, int], counted: Sequence[GroupCount], table: Sequence[Difference], now: float
) -> list[Difference]:
    """`settled` is what the core has of the groups of which nothing moves. One that agrees with what was booked differs
    from the files as the journal does, which is told of already; so is what stands in the `table` since an earlier
    count, as long as the core has not looked after the files itself."""
    found = []
    for one in counted:
        known = settled.get(one.group, one.booked_bytes)
        if known in (one.counted_bytes, one.booked_bytes):
            continue
        if one.counted_bytes - known in _told(tier, one.group, table):
            continue
        found.append(
            Difference(
                tier=tier,
                what="core",
                booked_bytes=known,
                counted_bytes=one.counted_bytes,
                found_at=now,
                group=one.group.hex(),
            )
        )
    return found


def seen_twice(first: Iterable[Difference], second: Iterable[Difference]) -> list[Difference]:
    """Those of the `second` count that the first had as well, of as many bytes: what came and went in between, and was
    counted half, differs otherwise the next time."""
    seen = {(one.group, one.counted_bytes - one.booked_bytes) for one in first}
    return [one for one in second if (one.group, one.counted_bytes - one.booked_bytes) in seen]


def _told(tier: str, group: bytes, table: Sequence[Difference]) -> set[int]:
    """What the differences in files of a group come to: the last one, the last two, and so on."""
    total, sums = 0, set[int]()
    for row in reversed(table):
        if (row.tier, row.what, row.group) == (tier, "files", group.hex()):
            total += row.counted_bytes - row.booked_bytes
            sums.add(total)
    return sums
