"""Leases and tickets as a client holds them: where the bytes are, and the copying. What ends them is in the client.

A lease is read in this order: copy, *then* compare generations, *then* tell how many blocks are valid. The node bumps
a slot's generation before the first byte of it is overwritten, so a generation that is still the granted one after
the copy proves that every byte copied was the block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.client.buffers import BlockReader, BlockWriter, as_rows
from tierkv.client.coding import Decoding, Encoding
from tierkv.client.copying import copy_in, copy_out
from tierkv.client.groups import GroupRecord
from tierkv.client.session import Session
from tierkv.client.slots import Slots
from tierkv.core.reasons import Reason
from tierkv.wire.messages import BlockState, LeasePart

if TYPE_CHECKING:
    from tierkv.client.inline import StagedBlocks

_NO_OFFSETS = np.empty(0, np.int64)


@dataclass(slots=True, kw_only=True)
class LeaseFacts:
    """What a lease is made from. Without slots (a miss, or another session holds them) there is nothing to copy; unless
    it `is_inline`, and its bytes are to be fetched. `asker` is the session that asked for it, if it was ours; `session`
    the one that holds `slots`. `keys` are known to the one who asked. `bad_block` was found to be damaged when it was
    decoded."""

    group: GroupRecord
    grant: bytes = b""
    session: Session | None = None
    asker: Session | None = None
    slots: Slots | None = None
    release_rank: int | None = None
    blocks: int = 0
    nvme_blocks: int = 0
    disk_blocks: int = 0
    device_blocks: int = 0
    cached_blocks: int = 0
    parts: tuple[LeasePart, ...] = ()
    reason: Reason | None = None
    revocable: bool = False
    is_inline: bool = False
    keys: bytes = b""
    bad_block: int | None = None

    def cut(self, blocks: int, reason: Reason) -> None:
        """Those behind can't be had. Where they came from isn't known of single ones: what is left counts as host's."""
        self.blocks, self.reason = blocks, reason
        self.nvme_blocks = self.disk_blocks = self.device_blocks = 0

    def let_go_of_slots(self) -> None:
        if self.slots is not None:
            self.slots.let_go()
            self.slots = None


class LeaseCore:
    """The right to read `blocks` blocks from token 0 until released."""

    def __init__(self, facts: LeaseFacts) -> None:
        self._facts = facts
        self._numbers = np.arange(facts.blocks)
        self._released = False

    @property
    def blocks(self) -> int:
        return self._facts.blocks

    @property
    def tokens(self) -> int:
        return self._facts.blocks * self._facts.group.block_tokens

    @property
    def nvme_blocks(self) -> int:
        """So many blocks were read from NVMe for this lease: they and those of `disk_blocks` are its last."""
        return self._facts.nvme_blocks

    @property
    def disk_blocks(self) -> int:
        """So many were read from the disk tier."""
        return self._facts.disk_blocks

    @property
    def device_blocks(self) -> int:
        """So many are in the pool of a device: of the first rank that was named, where several were."""
        return self._facts.device_blocks

    def count_on_device(self, first: int, end: int) -> int:
        """How many of the blocks [first, end) this process reads in a pool. Until the release."""
        return 0 if self._facts.slots is None else self._facts.slots.count_in_pool(first, end)

    @property
    def cached_blocks(self) -> int:
        """What `match` would have said: more than `blocks` when the deadline or the room was short (`reason`)."""
        return self._facts.cached_blocks

    @property
    def reason(self) -> Reason | None:
        return self._facts.reason

    @property
    def grant(self) -> bytes:
        return self._facts.grant

    @property
    def parts(self) -> tuple[LeasePart, ...]:
        """Each rank's slots, to be handed to its holder (`Group.hold`)."""
        return self._facts.parts

    @property
    def released(self) -> bool:
        return self._released

    def _copy_into(self, destination: Any) -> int:
        target = self._destination(destination)
        slots = self._slots()
        if slots is None:
            return 0
        # What was revoked already isn't copied: the destination keeps what it had there.
        leading = self._numbers[: slots.count_valid()] if self._facts.revocable else self._numbers
        copied = copy_out(slots, leading, target)
        return self._count_right(target, min(copied, slots.count_valid()))

    def _fetch_target(self, destination: Any) -> np.ndarray | BlockWriter:
        """Where fetched blocks go."""
        target = self._destination(destination)
        if self._released:
            raise ValueError("lease: it has been released, nothing of it can be fetched any more")
        return target

    def _destination(self, destination: Any) -> np.ndarray | BlockWriter:
        """As rows, unless it writes by itself; blocks of a coded group are decoded on their way."""
        group, target = self._facts.group, destination
        if isinstance(destination, np.ndarray) or not isinstance(destination, BlockWriter):
            size = group.raw_block_bytes
            target = as_rows(destination, name="destination", block_bytes=size, blocks=self.blocks, writable=True)
        return target if group.codec is None else Decoding(group.codec, target)

    def _count_right(self, target: np.ndarray | BlockWriter, valid: int) -> int:
        """Of so many blocks that are what was granted: how many could be decoded. What could not was stored so. To be
        asked behind the generations, for what is overwritten while it is decoded looks damaged too."""
        if not isinstance(target, Decoding):
            return valid
        right = target.count_right(valid)
        self._facts.bad_block = right if right < valid else None  # of this copy; an earlier one's was told
        if right < valid:
            self._facts.reason = Reason.BAD_SCALE
        return right

    def _came_short(self, valid: int) -> bool:
        """What is missing of a fetched lease was counted while it was fetched."""
        return self._facts.bad_block is not None or (valid < self.blocks and not self._facts.is_inline)

    def raw_views(self) -> list[tuple[int, np.ndarray]]:
        """Raw mode: (first block, read-only view [n, block_bytes] of the arena) of each run of neighbouring slots.

        What is read through a view is unproven until `count_valid`, called after the last read has completed, says
        so; and nothing may consume it before. Views are to be dropped before the lease is released: behind that
        the slots may be overwritten at any time. Raises ValueError for a group with a codec.
        """
        slots = self._slots()
        _refuse_coded(self._facts.group, "lease", "copy_into")
        return [] if slots is None else list(slots.require_host().runs(self._numbers, slots.readable))

    def count_valid(self) -> int:
        """How many blocks, from the first, hold what was granted; proves what was read from them before this call."""
        slots = self._slots()
        return 0 if slots is None else slots.count_valid()

    def _slots(self) -> Slots | None:
        if self._released:
            raise ValueError("lease: it has been released, its slots may hold anything by now")
        if self._facts.is_inline:
            raise ValueError("lease: this session does not map the arena, so it has no raw views; use copy_into")
        if self._facts.blocks and self._facts.slots is None:
            raise ValueError(f"lease: rank {self._facts.group.rank} of it is held by another session")
        return self._facts.slots and self._facts.slots.require_own_process()

    def _end(self) -> LeaseFacts | None:
        """Once: what is to be released. None when there is nothing, or it has been done."""
        if self._released:
            return None
        self._released = True
        facts = self._facts
        facts.let_go_of_slots()
        return facts if facts.session is not None else None

    def _end_all(self) -> LeaseFacts | None:
        """Whose every part is to be released; again and again, for others' parts may be open. Raises ValueError where
        our own part is open, or another process asked."""
        if self._facts.slots is not None:
            raise ValueError("lease: release this process's own part first")
        if self._facts.blocks and self._facts.asker is None:
            raise ValueError("lease: another process asked for it; only that one can end every part")
        return self._facts if self._facts.blocks else None


@dataclass(slots=True, kw_only=True)
class TicketFacts:
    """`granted` numbers the blocks (from token 0) that have a slot, in order. `staged`: they are written there, and
    sent with the commit. `refused_block` can't be coded: nothing of the ticket is published. `is_lost`: what was
    written can't be relied on, so it is not to be published."""

    group: GroupRecord
    first_block: int
    grant: bytes = b""
    session: Session | None = None
    slots: Slots | None = None
    staged: StagedBlocks | None = None
    states: bytes = b""
    granted: np.ndarray = field(default_factory=lambda: _NO_OFFSETS)
    reason: Reason | None = None
    refused_block: int | None = None
    is_lost: bool = False

    def let_go_of_slots(self) -> None:
        if self.slots is not None:
            self.is_lost |= self.slots.pool is not None and not self.slots.pool.is_usable
            self.slots.let_go()
            self.slots = None


class TicketCore:
    """The right to write the granted blocks until commit or abort."""

    def __init__(self, facts: TicketFacts) -> None:
        self._facts = facts
        self._written = np.zeros(len(facts.granted), np.bool_)
        self._ended = False

    @property
    def granted(self) -> list[int]:
        """Indices, counted from token 0, of the blocks to write. The others are present, being written, or have no
        room: `states` says which."""
        granted: list[int] = self._facts.granted.tolist()
        return granted

    @property
    def first_block(self) -> int:
        return self._facts.first_block

    @property
    def device_blocks(self) -> int:
        """So many of the granted ones have their slots in the pool of a device. Until the commit."""
        return 0 if self._facts.slots is None else self._facts.slots.count_in_pool(0, len(self._facts.granted))

    @property
    def states(self) -> bytes:
        """A `BlockState` code for each block from `first_block` on."""
        return self._facts.states

    @property
    def reason(self) -> Reason | None:
        return self._facts.reason

    @property
    def grant(self) -> bytes:
        return self._facts.grant

    def runs(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first block, writable view [n, block_bytes] of the arena) of neighbouring slots. Whoever is handed a view
        writes all of it before the commit; it counts as written. Raises ValueError for a group with a codec."""
        slots = self._slots()
        _refuse_coded(self._facts.group, "ticket", "copy_from")
        if slots is None:
            return
        slots.require_host()
        for first, rows in slots.runs(self._facts.granted, slots.writable):
            yield first, rows
            self._mark(first, len(rows))

    def write(self, block_index: int, buffer: Any) -> None:
        """One granted block, from a buffer of exactly its bytes; coded where the group has a codec."""
        slots, group = self._slots(), self._facts.group
        position = int(np.searchsorted(self._facts.granted, block_index))
        if slots is None or position >= len(self._facts.granted) or self._facts.granted[position] != block_index:
            raise ValueError(f"block {block_index} is not granted by this ticket")
        slots.require_host()
        rows = as_rows(buffer, name="buffer", block_bytes=group.raw_block_bytes, blocks=1, writable=False)
        if len(rows) != 1:
            raise ValueError(f"buffer: {len(rows)} blocks, where one is to be written")
        offset = int(slots.offsets[position])
        slot = slots.writable[offset : offset + slots.block_bytes]
        if group.codec is None:
            slot[:] = rows[0]
        elif not group.codec.encode(rows, slot[None]):
            self._refuse(block_index)
        self._written[position] = True

    def _copy_from(self, source: Any) -> None:
        slots = self._slots()
        needed = len(self._facts.states)
        if isinstance(source, np.ndarray) or not isinstance(source, BlockReader):
            size = self._facts.group.raw_block_bytes
            source = as_rows(source, name="source", block_bytes=size, blocks=needed, writable=False)
        if slots is None:
            return
        codec, first = self._facts.group.codec, self._facts.first_block
        self._written[:] = False  # what an earlier copy wrote is overwritten by now, should this one not end
        if codec is None:
            self._facts.is_lost |= not copy_in(slots, self._facts.granted, source, first)
        else:
            encoding = Encoding(codec, source, first)
            self._facts.is_lost |= not copy_in(slots, self._facts.granted, encoding, first)
            if encoding.refused is not None:
                self._refuse(encoding.refused)
        self._written[:] = True

    def _refuse(self, block: int) -> None:
        """A ticket is published whole or not at all."""
        self._facts.refused_block, self._facts.reason = block, Reason.NON_FINITE

    def _mark(self, first: int, count: int) -> None:
        whole = count == len(self._written)
        position = 0 if whole else int(np.searchsorted(self._facts.granted, first))
        self._written[position : position + count] = True

    def _slots(self) -> Slots | None:
        if self._ended:
            raise ValueError("ticket: it has been committed or aborted, its slots are no longer its own")
        return self._facts.slots and self._facts.slots.require_own_process()

    def _require_written(self) -> None:
        """A block that nobody wrote must not be published."""
        if not self._written.all():
            missing = self._facts.granted[~self._written].tolist()
            raise ValueError(f"ticket: blocks {missing[:8]} were granted and not written; write them or abort")

    def _end(self) -> TicketFacts | None:
        """Once: what is to be committed or aborted. None when there is nothing, or it has been done."""
        if self._ended:
            return None
        self._ended = True
        facts = self._facts
        facts.let_go_of_slots()
        return facts if facts.session is not None else None


def _refuse_coded(group: GroupRecord, what: str, instead: str) -> None:
    if group.codec is not None:
        raise ValueError(f"{what}: its slots hold blocks coded as {group.codec.name}, not the engine's; use {instead}")


def granted_blocks(states: bytes, first_block: int) -> np.ndarray:
    if states.count(BlockState.GRANTED) == len(states):
        return np.arange(first_block, first_block + len(states))
    codes = np.frombuffer(states, np.uint8)
    return np.flatnonzero(codes == BlockState.GRANTED) + first_block
