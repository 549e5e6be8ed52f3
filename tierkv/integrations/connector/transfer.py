"""Blocks from the node into an engine's memory and back, in whichever process the engine keeps it.

The engine's memory is what the client's `BlockWriter` and `BlockReader` are: it takes and fills rows of blocks, by
their number from token 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierkv.client import Client, DevicePool, Group, Lease
from tierkv.client.buffers import BlockReader, BlockWriter
from tierkv.client.prompt import Extras
from tierkv.core.keys import NO_EXTRAS, count_keys
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.plan import GroupSpec


def open_group(client: Client, spec: GroupSpec, *, rank: int = 0, block_bytes: int | None = None) -> Group:
    """`block_bytes`: see `Client.open`."""
    return client.open(
        spec.identity,
        rank=rank,
        model_name=spec.model_name,
        adapter_name=spec.adapter_name,
        manifest=spec.manifest,
        block_bytes=block_bytes,
        persistent=spec.identity.is_persistent,
        kv_shape=spec.kv_shape,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The first `blocks` blocks of a lease are in the engine's memory, and proven; the last `nvme_blocks` of them came
    from NVMe or from the disk tier, `device_blocks` from the pool of a GPU. `reason` says why it is less than the node
    has."""

    blocks: int
    nvme_blocks: int
    device_blocks: int = 0
    reason: Reason | None


def load_blocks(lease: Lease, destination: BlockWriter) -> Loaded:
    """Copy a lease's blocks. What lies behind those that count holds anything."""
    if not lease.blocks:
        return Loaded(blocks=0, nvme_blocks=0, reason=lease.reason)
    valid = lease.copy_into(destination)
    return Loaded(
        blocks=valid,
        nvme_blocks=max(0, valid - (lease.blocks - lease.nvme_blocks - lease.disk_blocks)),
        device_blocks=lease.count_on_device(0, valid),
        reason=lease.reason or (Reason.REVOKED if valid < lease.blocks else None),
    )


class Access(Protocol):
    """When an engine's memory may be read: between `begin`, if that said so, and `pause` or `end`."""

    def begin(self) -> bool: ...

    def pause(self) -> None: ...

    def end(self) -> None: ...


class Always:
    """Memory that waits for us."""

    def begin(self) -> bool:
        return True

    def pause(self) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What became of blocks that were given to the node. It has all of them if `is_whole`, though others may be writing
    some (PENDING). Else `reason` says why not; None: the engine wanted its memory back. `device_blocks` of those stored
    went into the pool of a GPU."""

    stored_blocks: int
    is_whole: bool
    reason: Reason | None = None
    device_blocks: int = 0


def store_blocks(
    group: Group,
    source: BlockReader,
    *,
    keys: bytes,
    first_block: int,
    tokens: bytes,
    extras: Extras = NO_EXTRAS,
    deadline_seconds: float,
    access: Access | None = None,
    device: DevicePool | None = None,
) -> Given:
    """Give the blocks from `first_block` on to the node, those that it has not. `keys` are of all blocks from token 0,
    `tokens`, packed, of those that are given. `device`: into that pool, as far as there is room. The copies have
    completed when this returns."""
    access = access or Always()
    first, end, stored, on_device = first_block, count_keys(keys), 0, 0
    token_bytes = len(tokens) // max(1, end - first)  # of one block
    reason: Reason | None = None
    while first < end:
        with group.reserve_tail(
            keys,
            first_block=first,
            tokens=tokens[(first - first_block) * token_bytes :],
            extras={block: inputs for block, inputs in extras.items() if block >= first},
            deadline_seconds=deadline_seconds,
            device=device,
        ) as ticket:
            reason = ticket.reason
            if ticket.granted:
                if not access.begin():
                    return Given(stored_blocks=stored, is_whole=False, device_blocks=on_device)
                ticket.copy_from(source)
                access.pause()
            first += len(ticket.states)
            if first >= end:
                access.end()
            if ticket.granted:
                in_pool = ticket.device_blocks
                committed = ticket.commit()
                stored += committed.visible + committed.staged
                on_device += in_pool if committed.reason is None else 0
                reason = committed.reason or reason
            if reason is None and not ticket.states:
                reason = Reason.NO_ROOM
        if reason is not None and reason is not Reason.PENDING:
            return Given(stored_blocks=stored, is_whole=False, reason=reason, device_blocks=on_device)
    return Given(stored_blocks=stored, is_whole=True, reason=reason, device_blocks=on_device)
