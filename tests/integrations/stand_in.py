"""A node in a dictionary, with the verbs of a client's group that the integration uses, and faults to order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.client.answers import CodecAnswer, Committed, Sealed
from tierkv.core.identity import Identity
from tierkv.core.keys import KEY_BYTES, chain_keys, count_keys, key_at, pack_tokens
from tierkv.core.reasons import Reason


@dataclass
class StandInLease:
    group: StandInGroup
    keys: bytes
    blocks: int
    cached_blocks: int
    nvme_blocks: int
    reason: Reason | None = None
    disk_blocks: int = 0

    def copy_into(self, destination: Any) -> int:
        self.group.meet("copy_into")
        for index in range(self.blocks):
            row = np.frombuffer(self.group.stored[key_at(self.keys, index)], np.uint8)
            if index >= self.group.valid_blocks:
                row = np.full_like(row, 0xEE)
            destination.write_blocks(index, row[np.newaxis])
        return min(self.blocks, self.group.valid_blocks)

    def count_on_device(self, first: int, end: int) -> int:
        return 0


@dataclass
class StandInTicket:
    group: StandInGroup
    keys: bytes
    states: bytes
    granted: list[int]
    reason: Reason | None = None
    written: dict[int, bytes] = field(default_factory=dict)

    def copy_from(self, source: Any) -> None:
        self.group.meet("copy_from")
        for index in self.granted:
            row = np.full((1, self.group.block_bytes), 0xDD, np.uint8)
            source.read_blocks(index, row)
            self.written[index] = row.tobytes()

    @property
    def device_blocks(self) -> int:
        return 0

    def commit(self) -> Committed:
        self.group.meet("commit")
        for index, content in self.written.items():
            self.group.stored[key_at(self.keys, index)] = content
            self.group.order.append(index)
        return Committed(visible=len(self.written), staged=0)


@dataclass
class StandInGroup:
    identity: Identity
    stored: dict[bytes, bytes] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the requests that acquired
    failing: dict[str, Exception] = field(default_factory=dict)
    valid_blocks: int = 1 << 30
    room_blocks: int = 1 << 30
    nvme_blocks: int = 0
    max_lease_blocks: int = 1 << 30
    damaged: int | None = None  # the first block that can't be read any more: it and what is behind it goes
    away: bool = False
    pending: frozenset[int] = frozenset()  # blocks that somebody else is writing
    root: bytes = b""  # of a tenant's keys
    prefills: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return self.root or self.identity.group_key()

    @property
    def block_bytes(self) -> int:
        return self.identity.layout.total_block_bytes

    def meet(self, verb: str) -> None:
        self.calls.append(verb)
        if verb in self.failing:
            raise self.failing[verb]

    def count_cached(self, keys: bytes) -> int:
        present = [key_at(keys, index) in self.stored for index in range(count_keys(keys))]
        return present.index(False) if False in present else len(present)

    @contextmanager
    def acquire(
        self, *, keys: bytes, deadline_seconds: float, name: str = "", device: Any = None
    ) -> Iterator[StandInLease]:
        self.meet("acquire")
        self.names.append(name)
        if self.away:
            yield StandInLease(self, keys, 0, 0, 0, Reason.NODE_AWAY)
            return
        cached = self.count_cached(keys)
        blocks = min(cached, self.max_lease_blocks)
        reason = Reason.DEADLINE if blocks < cached else None
        if self.damaged is not None:
            blocks, reason = self.damaged, Reason.CHECKSUM
            for index in range(self.damaged, cached):
                del self.stored[key_at(keys, index)]
            self.damaged = None
        yield StandInLease(self, keys, blocks, cached, min(self.nvme_blocks, blocks), reason)
        self.meet("release")

    @contextmanager
    def reserve_tail(
        self,
        keys: bytes,
        *,
        first_block: int,
        tokens: bytes,
        extras: Any,
        deadline_seconds: float,
        device: Any = None,
    ) -> Iterator[StandInTicket]:
        self.meet("reserve")
        if self.away:
            yield StandInTicket(self, keys, b"", [], Reason.NODE_AWAY)
            return
        parent = key_at(keys, first_block - 1) if first_block else self.key
        tail = keys[first_block * KEY_BYTES :]
        assert tail == chain_keys(parent, tokens, self.identity.layout.block_tokens), "keys of other tokens"
        missing = [index for index in range(first_block, count_keys(keys)) if key_at(keys, index) not in self.stored]
        free = [index for index in missing if index not in self.pending]
        granted = free[: max(0, self.room_blocks - len(self.stored))]
        reason = Reason.NO_ROOM if len(granted) < len(free) else None if free == missing else Reason.PENDING
        yield StandInTicket(self, keys, bytes(count_keys(keys) - first_block), granted, reason)

    def report_prefill(self, **told: Any) -> None:
        self.meet("report_prefill")
        self.prefills.append(told)

    def seal(
        self, tokens: Any = None, *, keys: bytes = b"", wait: str = "sealed", deadline_seconds: float = 1.0
    ) -> Sealed:
        self.meet("seal")
        if tokens is not None:
            keys = chain_keys(self.key, pack_tokens(tokens), self.identity.layout.block_tokens)
        blocks = self.count_cached(keys)
        self.sealed.append(blocks)
        return Sealed(blocks=blocks, flushed_blocks=blocks if wait == "flushed" else 0)


class StandInClient:
    """Keeps its groups by identity, as a node does: engines that declare the same one share what is stored."""

    def __init__(self, codec: CodecAnswer | None = None) -> None:
        self.groups: dict[bytes, StandInGroup] = {}
        self.declared: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self.codec = codec or CodecAnswer()

    def ask_codec(self, weights: str, adapter: str = "") -> CodecAnswer:
        self.asked.append((weights, adapter))
        return self.codec

    def open(self, identity: Identity, **declared: Any) -> StandInGroup:
        self.declared.append(declared)
        return self.groups.setdefault(identity.group_key(), StandInGroup(identity))
