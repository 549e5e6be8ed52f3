"""Why was this a miss? What a prompt finds in one namespace, what stands where that ends, and which namespaces are like
the one that it was asked in.

Questions of an operator: everything here looks and changes nothing, no last use, no order of eviction, no tier. What a
question may look at is bounded, because nobody else is answered meanwhile.

    tokens      | 0 ........ 1,024 | 1,024 .. 1,280 | 1,280 .................... 2,400 | 2,400 .. 2,405
    stretches   | host and nvme    | nvme           |                                  |
    missing     |                  |                | evicted; behind it: unreachable  |
    rest        |                  |                |                                  | fills no block
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice, pairwise
from operator import attrgetter

import msgspec
from blake3 import blake3

from tierkv.core.absence import Absence, absence_of, find_absence, find_left
from tierkv.core.explanation import (
    Asked,
    Explanation,
    FieldDifference,
    Leaving,
    Missing,
    Namespace,
    Stretch,
    Trace,
)
from tierkv.core.extent import Extent
from tierkv.core.grants import Segment, path_blocks
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, count_keys, key_at, split_keys
from tierkv.core.ledger import Group, Ledger
from tierkv.core.recent import RecentAcquire
from tierkv.core.residency import FileState

MISSING_LOOKED_AT = 4_096
"""Blocks behind the end of what is cached of which is said what is known of each."""

OTHERS_LOOKED_AT = 10_000
"""Extents that are compared with the prompt where it leaves what is cached: some milliseconds."""

NAMESPACES = 32
REQUESTS = 16
KNOWN_TOKEN_BYTES = 2**20

DIGITS_SHOWN = 12
LONG_DIGEST = 32
MAX_SHOWN = 80
MIN_REQUEST_CHARACTERS = 6

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`wanted`: fields of an identity by name, whole values. `keys` of a prompt in namespace `of`, which is known, with
    its packed `tokens` as far as they are. `request`: an acquire by its name or grant id. `last`: so many misses."""

    wanted: Mapping[str, str] = field(default_factory=dict)
    of: bytes | None = None
    keys: bytes = b""
    tokens: bytes = b""
    request: str = ""
    last: int = 0


def answer(ledger: Ledger, question: Question, purged_at: Callable[[bytes], float]) -> Explanation:
    """`purged_at(group)` is when something of a group was last purged, 0 for never."""
    records: list[RecentAcquire] = []
    if question.request or question.last:
        records = find_requests(ledger, question.request) if question.request else last_misses(ledger, question.last)
    of, keys, tokens = question.of, question.keys, question.tokens
    if question.request and records and records[0].group in ledger.groups:
        of, keys = records[0].group, records[0].keys
        tokens = known_tokens(ledger, of, keys)
    wanted = question.wanted
    if question.request and of is not None and not wanted:
        wanted = identity_fields(ledger.groups[of].spec.identity)
    is_about_namespaces = bool(wanted) or (of is None and not (question.request or question.last))
    oldest = ledger.recent.oldest()
    return Explanation(
        namespaces=tuple(nearest(ledger, wanted)) if is_about_namespaces else (),
        trace=trace(ledger, of, keys, tokens, purged_at=purged_at(of)) if of is not None and keys else None,
        asked=tuple(tell(ledger, record) for record in records),
        tokens=tokens if question.request else b"",
        remembered=len(ledger.recent),
        remembered_since=oldest.asked_at if oldest is not None else 0.0,
    )


# ---- one prompt in one namespace


def trace(ledger: Ledger, group: bytes, keys: bytes, tokens: bytes, *, purged_at: float = 0.0) -> Trace:
    """`keys` are the prompt's in this namespace, `tokens` its packed token ids as far as they are known. `purged_at` is
    when something of the namespace was last purged."""
    known = ledger.groups[group]
    path = ledger.tree.walk(group, keys)
    cached = path_blocks(path)
    asked = count_keys(keys)
    stretches = list(_merge(_stretches(ledger, path, known)))
    return Trace(
        group=group,
        block_tokens=known.block_tokens,
        asked_blocks=asked,
        cached_blocks=cached,
        host_blocks=_leading_host_blocks(path),
        stretches=tuple(stretches),
        missing=_missing(ledger, known, keys, cached, purged_at) if cached < asked else None,
        leaving=_leaving(ledger, known, path, cached, tokens) if cached < asked else None,
    )


def _leading_host_blocks(path: list[Segment]) -> int:
    blocks = 0
    for segment in path:
        here = min(segment.blocks, segment.extent.host_blocks)
        blocks += here
        if here < segment.blocks:
            break
    return blocks


def _stretches(ledger: Ledger, path: list[Segment], group: Group) -> Iterator[Stretch]:
    """One to three an extent: a file has all of its blocks, host memory and devices the first ones."""
    for segment in path:
        extent = segment.extent
        in_files = tuple(
            tier for tier, state in (("nvme", extent.nvme), ("disk", extent.disk)) if state is FileState.PRESENT
        )
        in_host = min(segment.blocks, extent.host_blocks)
        on_devices = ledger.devices.blocks(extent)
        if ledger.devices.memory_blocks(extent) > extent.host_blocks:  # some ranks there, and others in host memory
            on_devices = ledger.devices.memory_blocks(extent)
        in_memory = {"gpu": min(segment.blocks, on_devices), "host": in_host}
        for first, end in pairwise(sorted({0, *in_memory.values(), segment.blocks})):
            tiers = (*(tier for tier, blocks in in_memory.items() if blocks >= end), *in_files)
            if end > first:
                yield Stretch(
                    first_token=(segment.start + first) * group.block_tokens,
                    tokens=(end - first) * group.block_tokens,
                    tiers=tiers,
                    growing=not extent.sealed,
                    nvme=extent.nvme,
                    why_not_there=extent.why_not_there or "",
                    being_read=bool(extent.reading) and first == in_host,
                    extents=1,
                    hits=extent.hits,
                    last_used=extent.last_used,
                    disk=extent.disk,
                )


def _merge(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Neighbours of which the same is to be said, as one; of `hits` the most, of `last_used` the latest."""
    last: Stretch | None = None
    for one in stretches:
        if last is not None and _kind(last) == _kind(one):
            last = msgspec.structs.replace(
                last,
                tokens=last.tokens + one.tokens,
                extents=last.extents + one.extents,
                hits=max(last.hits, one.hits),
                last_used=max(last.last_used, one.last_used),
            )
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def _kind(stretch: Stretch) -> tuple[object, ...]:
    return stretch.tiers, stretch.growing, stretch.nvme, stretch.disk, stretch.why_not_there, stretch.being_read


def _missing(ledger: Ledger, group: Group, keys: bytes, first: int, purged_at: float) -> Missing:
    key = group.spec.group
    asked = count_keys(keys)
    end = min(asked, first + MISSING_LOOKED_AT)
    places = ledger.tree.places(key, keys[: end * KEY_BYTES])
    absences = [
        Absence.UNREACHABLE if places[index] is not None else find_absence(ledger, key, key_at(keys, index))
        for index in range(first, end)
    ]
    for stretch in ledger.ghosts.along(key, split_keys(keys[: end * KEY_BYTES], first)):
        for at in range(stretch.start, stretch.start + stretch.ghost.blocks):
            absences[at] = absence_of(stretch.ghost) if absences[at] is Absence.UNKNOWN else absences[at]
    missing_key = key_at(keys, first)
    absence = absences[0]
    is_purged = absence is Absence.UNKNOWN and purged_at > 0
    absence = Absence.PURGED if is_purged else absence
    staged = ledger.staged.get(missing_key)
    refusal = ledger.refusals.find(key, missing_key) if absence is Absence.REFUSED else None
    left = find_left(ledger, key, missing_key) if absence in (Absence.EVICTED, Absence.REFUSED) else None
    return Missing(
        token=first * group.block_tokens,
        tokens=(asked - first) * group.block_tokens,
        absence=absence,
        tokens_by={name: count * group.block_tokens for name, count in Counter(absences).items()},
        looked_at_tokens=(end - first) * group.block_tokens,
        ranks=group.ranks,
        ranks_there=len(staged.slots) if staged is not None else 0,
        left=left,
        reason=refusal.reason if refusal is not None else left.reason if left is not None else "",
        at=refusal.at if refusal is not None else left.at if left is not None else purged_at if is_purged else 0.0,
    )


# ---- where it leaves what others have


def _leaving(ledger: Ledger, group: Group, path: list[Segment], cached: int, tokens: bytes) -> Leaving | None:
    step = group.block_tokens * TOKEN_BYTES
    asked = tokens[cached * step : (cached + 1) * step]
    others, is_known, best, nearest_block = 0, False, -1, b""
    for extent, index in _others(ledger, group, path):
        others += 1
        block = (extent.tokens or b"")[index * step : (index + 1) * step]
        if len(block) < step or len(asked) < step:
            continue
        is_known = True
        if block.startswith(asked[: (best + 1) * TOKEN_BYTES]):
            best, nearest_block = _common_tokens(block, asked), block
    if not others:
        return None
    start = cached * group.block_tokens
    if not is_known:
        return Leaving(token=start, others=others, tokens_known=False)
    best = max(0, best)
    is_same = best == group.block_tokens
    return Leaving(
        token=start + best,
        others=others,
        tokens_known=True,
        asked=None if is_same else _token(asked, best),
        cached=_token(nearest_block, best) if nearest_block and not is_same else None,
        same_tokens=is_same,
    )


def _others(ledger: Ledger, group: Group, path: list[Segment]) -> Iterator[tuple[Extent, int]]:
    """Blocks of others that stand where the prompt's first missing one would: extent, and index within it."""
    if not path:
        some = islice(ledger.tree, OTHERS_LOOKED_AT)
        yield from ((extent, 0) for extent in some if extent.parent == extent.group == group.spec.group)
        return
    extent, blocks = path[-1].extent, path[-1].blocks
    if blocks < extent.num_blocks:
        yield extent, blocks
    branch = extent.branch_at(blocks - 1)
    if branch is not None:
        yield from ((kid, 0) for kid in islice(branch.kids, OTHERS_LOOKED_AT))


def _common_tokens(left: bytes, right: bytes) -> int:
    both = min(len(left), len(right)) // TOKEN_BYTES
    return next((at for at in range(both) if _token(left, at) != _token(right, at)), both)


def _token(packed: bytes, index: int) -> int:
    return int.from_bytes(packed[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")


# ---- namespaces that are like one another


def identity_fields(identity: Identity) -> dict[str, str]:
    """Every field by its name ("weights", "layout.dtype", ...) as text, whole. The salt is a secret."""
    return dict(_flatten(identity, ""))


def _flatten(value: msgspec.Struct, before: str) -> Iterator[tuple[str, str]]:
    for name in value.__struct_fields__:
        part = getattr(value, name)
        if isinstance(part, msgspec.Struct):
            yield from _flatten(part, f"{before}{name}.")
        else:
            yield before + name, _text(part)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


FIELD_NAMES = tuple(
    identity_fields(
        Identity(weights="", config="", layout=Layout(dtype="", block_bytes=(), axes="", block_tokens=0, engine=""))
    )
)


def shown(name: str, value: str) -> str:
    """A field's value as it may be shown: digests by their first digits, a salt by those of its digest."""
    if not value:
        return "(none)"
    if name == "salt":
        return blake3(value.encode()).hexdigest()[:8]
    if len(value) >= LONG_DIGEST and not set(value) - _HEX:
        return value[:DIGITS_SHOWN]
    return value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "..."


def nearest(ledger: Ledger, wanted: Mapping[str, str], most: int = NAMESPACES) -> list[Namespace]:
    """Those that share the most of the `wanted` fields (by name, whole values) first, of equals the one last used."""
    getters = [(attrgetter(name), value) for name, value in wanted.items()]

    def rank(group: Group) -> tuple[int, bool, float, bytes]:
        identity = group.spec.identity
        equal = sum(_text(get(identity)) == value for get, value in getters)
        return -equal, group.extents == 0, -group.last_used, group.spec.group

    reachable = {group for session in ledger.sessions.values() for group in session.groups}
    best = nsmallest(most, ledger.groups.values(), key=rank)
    return [_namespace(group, wanted, group.spec.group in reachable) for group in best]


def _namespace(group: Group, wanted: Mapping[str, str], reachable: bool) -> Namespace:
    fields = identity_fields(group.spec.identity)
    differences = tuple(
        FieldDifference(name, shown(name, value), shown(name, fields[name]))
        for name, value in wanted.items()
        if fields[name] != value
    )
    return Namespace(
        group=group.spec.group,
        model_name=group.spec.model_name,
        adapter_name=group.spec.adapter_name,
        fields={name: shown(name, value) for name, value in fields.items()},
        differences=differences,
        equal_fields=len(wanted) - len(differences),
        block_tokens=group.block_tokens,
        extents=group.extents,
        tokens=group.blocks * group.block_tokens,
        last_used=group.last_used,
        persistent=group.persistent,
        reachable=reachable,
    )


# ---- acquires that are remembered


def find_requests(ledger: Ledger, text: str, most: int = REQUESTS) -> list[RecentAcquire]:
    """Those of that name, else those whose name, or whose grant id in hexadecimal, begins so; the latest first."""
    named = [record for record in ledger.recent if record.name == text]
    if not named and len(text) >= MIN_REQUEST_CHARACTERS:
        digits = text.lower()
        named = [r for r in ledger.recent if r.name.startswith(text) or r.grant.hex().startswith(digits)]
    return named[:most]


def last_misses(ledger: Ledger, most: int) -> list[RecentAcquire]:
    return list(islice((record for record in ledger.recent if record.is_miss), most))


def tell(ledger: Ledger, record: RecentAcquire) -> Asked:
    group = ledger.groups.get(record.group)
    block_tokens = group.block_tokens if group is not None else 0
    return Asked(
        name=record.name,
        grant=record.grant,
        group=record.group,
        model_name=group.spec.model_name if group is not None else "",
        asked_tokens=record.asked_blocks * block_tokens,
        cached_tokens=record.cached_blocks * block_tokens,
        host_tokens=record.host_blocks * block_tokens,
        tokens=record.blocks * block_tokens,
        nvme_tokens=record.nvme_blocks * block_tokens,
        reason=record.reason or "",
        absence=record.absence or "",
        asked_at=record.asked_at,
        answered_at=record.answered_at,
        left=record.left,
        disk_tokens=record.disk_blocks * block_tokens,
    )


def known_tokens(ledger: Ledger, group: bytes, keys: bytes, most_bytes: int = KNOWN_TOKEN_BYTES) -> bytes:
    """Packed ids of the prompt's first tokens, as far as extents in memory tell them: what an acquire did not say, and
    whoever stored the prompt did."""
    step = ledger.groups[group].block_tokens * TOKEN_BYTES
    found: list[bytes] = []
    size = 0
    for segment in ledger.tree.walk(group, keys):
        tokens = segment.extent.tokens
        if tokens is None or size >= most_bytes:
            break
        found.append(tokens[: segment.blocks * step])
        size += len(found[-1])
    return b"".join(found)[:most_bytes]
