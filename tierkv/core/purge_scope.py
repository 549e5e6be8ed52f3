"""What a purge means: which groups, extents, staged blocks and tickets a tenant, a model or a prefix comes to.

A prefix is named by a block key, or by enough of its first digits. The extent that holds the block goes whole, and with
it everything whose chain of keys leads there: extents below, staged blocks, open tickets. Of an orphan nobody knows
where its chain leads, so those of the group that lie deeper than the block go as well, and staged blocks likewise:
else one could be found again when what it hangs on is stored anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec

from tierkv.core.extent import Extent
from tierkv.core.grants import TicketState
from tierkv.core.instructions import PurgeScope, ScopeExtents, ScopeGroup
from tierkv.core.keys import KEY_BYTES, split_keys
from tierkv.core.ledger import Group, Ledger, StagedBlock

MIN_DIGITS = 16
"""Hexadecimal digits of a block key that a prefix is named by, at least."""


@dataclass(frozen=True, slots=True)
class OfTenant:
    """All groups with exactly this salt; empty for those without one."""

    salt: str


@dataclass(frozen=True, slots=True)
class OfModel:
    """All groups of a fingerprint: every adapter, tenant and layout."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class OfPrefix:
    """A block key in hexadecimal, or its first digits, MIN_DIGITS of them at least."""

    digits: str


What = OfTenant | OfModel | OfPrefix


@dataclass(frozen=True, slots=True)
class NotOne:
    """The digits of a prefix name `found` blocks, not one."""

    found: int


@dataclass(slots=True)
class Members:
    """Everything of a purge that the books know."""

    scope: PurgeScope
    is_prefix: bool = False
    groups: list[Group] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    staged: list[StagedBlock] = field(default_factory=list)
    tickets: list[TicketState] = field(default_factory=list)
    doubtful: list[Extent] = field(default_factory=list)
    """Of a prefix: extents on their way out, or with a part that is, which may hold blocks of it that nobody knows by
    their keys any more."""
    named: bytes = b""  # of a prefix: the block that it was named by


def find_members(ledger: Ledger, what: What, extents: Iterable[Extent]) -> Members | NotOne:
    """`extents` are all that anybody still knows, those that left the tree included."""
    match what:
        case OfTenant(salt):
            groups = [group for group in ledger.groups.values() if group.spec.identity.salt == salt]
            return _whole_groups(ledger, groups, extents, _scope_of_tenant(ledger, groups, salt))
        case OfModel(fingerprint):
            groups = [group for group in ledger.groups.values() if group.spec.identity.weights == fingerprint]
            named = tuple(ScopeGroup(fingerprint, group.spec.group) for group in groups)
            return _whole_groups(ledger, groups, extents, PurgeScope(models=(fingerprint,), groups=named))
        case OfPrefix(digits):
            return _prefix(ledger, digits, list(extents))


def is_in(scope: PurgeScope, group: Group) -> bool:
    """Whether any of the group is in scope."""
    weights = group.spec.identity.weights
    names: tuple[ScopeGroup | ScopeExtents, ...] = (*scope.groups, *scope.extents)
    return weights in scope.models or any(name.group == group.spec.group for name in names)


def is_wholly_in(scope: PurgeScope, group: Group) -> bool:
    return group.spec.identity.weights in scope.models or any(n.group == group.spec.group for n in scope.groups)


# ---- tenants and models


def _scope_of_tenant(ledger: Ledger, groups: list[Group], salt: str) -> PurgeScope:
    """The tenant's known groups, and those that it would have if it did what the others do: a group on disk may have
    lost the file that says whose it is. Without a fingerprint of weights there is no folder."""
    names = {group.spec.group: group.spec.identity.weights for group in groups if group.spec.identity.weights}
    for group in ledger.groups.values():
        identity = group.spec.identity
        if group.persistent and identity.salt != salt:
            names.setdefault(msgspec.structs.replace(identity, salt=salt).group_key(), identity.weights)
    return PurgeScope(groups=tuple(ScopeGroup(weights, key) for key, weights in names.items()), names_tenant=True)


def _whole_groups(ledger: Ledger, groups: list[Group], extents: Iterable[Extent], scope: PurgeScope) -> Members:
    keys = {group.spec.group for group in groups}
    return Members(
        scope,
        False,
        groups,
        [extent for extent in extents if extent.group in keys],
        [block for block in ledger.staged.values() if block.group in keys],
        [ticket for ticket in ledger.writers() if ticket.group in keys],
    )


# ---- prefixes


def _prefix(ledger: Ledger, digits: str, extents: list[Extent]) -> Members | NotOne:
    found = {key: group for group, key in _keys_that_begin(ledger, digits, extents)}
    if len(found) > 1 or (not found and len(digits) < 2 * KEY_BYTES):
        return NotOne(len(found))
    if not found:
        return _of_nobody_knows_what(ledger, extents, bytes.fromhex(digits))
    ((key, named),) = found.items()
    group = ledger.groups[named]
    members = _below(ledger, named, key, extents)
    heads = dict.fromkeys([*(extent.key for extent in members.extents), key])
    weights = group.spec.identity.weights
    on_disk = (ScopeExtents(weights, named, b"".join(heads)),) if weights else ()
    scope = PurgeScope(extents=on_disk)
    doubtful = _doubtful([extent for extent in extents if extent.group == named], members.extents)
    return replace(members, scope=scope, groups=[group], is_prefix=True, doubtful=doubtful, named=key)


def _of_nobody_knows_what(ledger: Ledger, extents: list[Extent], named: bytes) -> Members:
    """The block is gone, and what hung on it may still be there: all that hangs on something unknown goes."""
    adrift = dict.fromkeys(extent for extent in extents if extent.in_tree and extent.is_orphan)
    todo = list(adrift)
    while todo:
        kids = [kid for branch in todo.pop().branch_points for kid in branch.kids if kid not in adrift]
        adrift.update(dict.fromkeys(kids))
        todo += kids
    heads: dict[bytes, list[bytes]] = {}
    for extent in adrift:
        heads.setdefault(extent.group, []).append(extent.key)
    on_disk = tuple(
        ScopeExtents(ledger.groups[group].spec.identity.weights, group, b"".join(keys))
        for group, keys in heads.items()
        if ledger.groups[group].spec.identity.weights
    )
    return Members(
        PurgeScope(extents=on_disk),
        True,
        extents=list(adrift),
        staged=[block for block in ledger.staged.values() if block.index],
        doubtful=_doubtful(extents, list(adrift)),
        named=named,
    )


def _doubtful(extents: list[Extent], members: list[Extent]) -> list[Extent]:
    certain = set(members)
    return [extent for extent in extents if (extent.doomed or not extent.in_tree) and extent not in certain]


def _keys_that_begin(ledger: Ledger, digits: str, extents: list[Extent]) -> Iterator[tuple[bytes, bytes]]:
    """(group, key) of the blocks, known in any way, whose key begins with `digits`."""
    whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
    for extent in extents:
        for packed in (extent.keys, extent.key, extent.parent if extent.parent != extent.group else b""):
            yield from ((extent.group, key) for key in matching_keys(packed, whole, digits))
    for block in ledger.staged.values():
        yield from ((block.group, key) for key in matching_keys(block.key, whole, digits))
        if block.parent != block.group:
            yield from ((block.group, key) for key in matching_keys(block.parent, whole, digits))
    for ticket in ledger.writers():
        yield from ((ticket.group, key) for key in matching_keys(ticket.keys, whole, digits))


def matching_keys(packed: bytes, whole: bytes, digits: str) -> Iterator[bytes]:
    """Those of the packed keys that begin with these hexadecimal digits; `whole` are the bytes that the digits fill."""
    at = packed.find(whole)
    while at >= 0:
        if at % KEY_BYTES == 0 and packed[at : at + KEY_BYTES].hex().startswith(digits):
            yield packed[at : at + KEY_BYTES]
        at = packed.find(whole, at + 1)


def _below(ledger: Ledger, group: bytes, key: bytes, extents: list[Extent]) -> Members:
    """What is at `key` or behind it, found by following parents downwards."""
    inside = [extent for extent in extents if extent.group == group]
    by_parent: dict[bytes, list[Extent]] = {}
    for extent in inside:
        by_parent.setdefault(extent.parent, []).append(extent)
        by_parent.setdefault(extent.key, []).append(extent)  # one that was cut to nothing has no keys but this
    writers = {ticket.grant: ticket for ticket in ledger.writers() if ticket.group == group}
    chains = {grant: split_keys(ticket.keys) for grant, ticket in writers.items()}
    on_chain: dict[bytes, list[bytes]] = {}
    for grant, chain in chains.items():
        for one in chain:
            on_chain.setdefault(one, []).append(grant)

    holder = next((extent for extent in inside if any(matching_keys(extent.keys, key, key.hex()))), None)
    todo = [key] if holder is None else split_keys(holder.keys)
    seen = set(todo)
    step = ledger.groups[group].block_tokens
    depth = _depth(ledger, key, holder, inside, chains, step)
    found: dict[Extent, None] = {} if holder is None else {holder: None}
    grants: dict[bytes, None] = {}

    def reach(keys: Iterable[bytes]) -> None:
        for one in keys:
            if one not in seen:
                seen.add(one)
                todo.append(one)

    lost = [extent for extent in inside if extent.is_orphan or not extent.in_tree]
    rooted = _rooted_keys(group, inside) if lost else frozenset()
    for extent in lost:
        if extent.first_token > depth and extent.parent not in rooted:
            found[extent] = None
            reach((extent.key, *split_keys(extent.keys)))
    while todo:
        at = todo.pop()
        for extent in by_parent.get(at, ()):
            found[extent] = None
            reach((extent.key, *split_keys(extent.keys)))
        reach(ledger.staged_children.get(at, ()))
        for grant in on_chain.get(at, ()):
            if grant not in grants:
                grants[grant] = None
                chain = chains[grant]
                reach(chain[chain.index(at) :])
    return Members(
        PurgeScope(),
        True,
        [],
        list(found),
        [
            block
            for block in ledger.staged.values()
            if block.group == group and (block.key in seen or block.index * step > depth)
        ],
        [writers[grant] for grant in grants],
    )


def _rooted_keys(group: bytes, extents: list[Extent]) -> frozenset[bytes]:
    """Of what hangs on one of these it is known where it belongs: an extent that is on its way out may have a successor
    in the tree, which must not go because of it."""
    in_place = [extent.keys for extent in extents if extent.in_tree and not extent.is_orphan]
    return frozenset((group, *(key for keys in in_place for key in split_keys(keys))))


def _depth(
    ledger: Ledger,
    key: bytes,
    holder: Extent | None,
    extents: list[Extent],
    chains: dict[bytes, list[bytes]],
    block_tokens: int,
) -> int:
    """At which token the purge begins: what hangs on it lies deeper."""
    if holder is not None:
        return holder.first_token
    if key in ledger.staged:
        return ledger.staged[key].index * block_tokens
    for child in ledger.staged_children.get(key, ()):
        return (ledger.staged[child].index - 1) * block_tokens
    for chain in chains.values():
        if key in chain:
            return chain.index(key) * block_tokens
    return min(
        (e.first_token if e.key == key else e.first_token - block_tokens for e in extents if key in (e.key, e.parent)),
        default=0,
    )
