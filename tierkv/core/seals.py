"""Seals: freezing what a finished request has made, and telling when it is flushed."""

from __future__ import annotations

import heapq
from itertools import count

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent, Growth
from tierkv.core.grants import SealAnswer, SealReady, Segment, TicketState, Waiting, path_blocks
from tierkv.core.keys import split_keys
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState


class _WaitingSeal:
    __slots__ = ("deadline", "group", "keys", "landings", "path", "seal_id")

    def __init__(self, seal_id: int, group: bytes, keys: bytes, path: list[Segment], deadline: float) -> None:
        self.seal_id = seal_id
        self.group = group
        self.keys = keys
        self.path = path
        self.deadline = deadline
        self.landings: list[TicketState] = []  # with blocks of it, that were under way


class Seals:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._waiting: dict[int, _WaitingSeal] = {}
        # One entry for each growing extent, due no later than the extent is: growth moves the due time, not the entry.
        self._idle: list[tuple[float, int, Extent]] = []
        self._numbers = count()

    def seal(
        self, *, seal_id: int, group: bytes, keys: bytes, wait_flushed: bool, deadline: float, now: float
    ) -> SealAnswer | Waiting:
        path = self._seal_along(group, keys, now)
        landings = self._landings_along(group, keys) if self._ledger.landings else []
        for ticket in landings:
            ticket.seals = True
        if not path and not landings:
            return SealAnswer(0, 0, Reason.NOT_FOUND if keys else None)
        if not wait_flushed:
            pending = Reason.PENDING if landings else None
            return SealAnswer(path_blocks(path), self._flushed_blocks(path), pending)
        seal = _WaitingSeal(seal_id, group, keys, path, deadline)
        seal.landings = landings
        answer = self._answer(seal, now)
        if answer is None:
            self._waiting[seal_id] = seal
            return Waiting()
        return answer

    def _seal_along(self, group: bytes, keys: bytes, now: float) -> list[Segment]:
        path = self._ledger.tree.walk(group, keys)
        for segment in path:
            if not segment.extent.sealed:
                self._cascade.seal(segment.extent, now)
        return path

    def _landings_along(self, group: bytes, keys: bytes) -> list[TicketState]:
        """Those that bring blocks of this prompt."""
        along = frozenset(split_keys(keys))
        landings = self._ledger.landings.values()
        return [one for one in landings if one.group == group and not along.isdisjoint(one.block_keys)]

    def seal_idle(self, now: float) -> None:
        """Extents that have not grown for a while are not going to."""
        while (due := self._next_idle()) is not None and due <= now:
            self._cascade.seal(self._idle[0][2], now)

    def seal_all(self, now: float) -> None:
        """Parents before what hangs on them, so that a budget that ends early leaves no hole."""
        for extent in sorted(self._ledger.unsealed, key=lambda extent: extent.first_token):
            self._cascade.seal(extent, now)

    def deadlines(self) -> list[float]:
        idle = self._next_idle()
        return [*(seal.deadline for seal in self._waiting.values()), *(() if idle is None else (idle,))]

    def _next_idle(self) -> float | None:
        """When the extent at the head of the queue has been idle for long enough; O(log n), however many grow."""
        growing = self._ledger.unsealed
        for extent in self._ledger.take_new_unsealed():
            if extent in growing:
                heapq.heappush(self._idle, (self._due(growing[extent]), next(self._numbers), extent))
        while self._idle:
            due, number, extent = self._idle[0]
            growth = growing.get(extent)
            if growth is None:
                heapq.heappop(self._idle)
            elif due < self._due(growth):
                heapq.heapreplace(self._idle, (self._due(growth), number, extent))
            else:
                return due
        return None

    def _due(self, growth: Growth) -> float:
        return growth.last_append + max(self._ledger.limits.seal_after_seconds, 4 * growth.longest_gap)

    def settle(self, now: float) -> None:
        for seal in list(self._waiting.values()):
            answer = self._answer(seal, now)
            if answer is not None:
                del self._waiting[seal.seal_id]
                self._ledger.effects.append(SealReady(seal.seal_id, answer))

    def _answer(self, seal: _WaitingSeal, now: float) -> SealAnswer | None:
        """None: not all is flushed, but it may still be."""
        if seal.landings:
            landings = self._ledger.landings
            seal.landings = [one for one in seal.landings if landings.get(one.grant) is one]
            if seal.landings and now < seal.deadline:
                return None
            seal.path = self._seal_along(seal.group, seal.keys, now)
            if not seal.path:
                return SealAnswer(0, 0, Reason.DEADLINE if seal.landings else Reason.NOT_FOUND)
        path = _still_there(seal.path)
        blocks, flushed = path_blocks(path), self._flushed_blocks(path)
        lost = Reason.NOT_FOUND if blocks < path_blocks(seal.path) else None
        if flushed == blocks and not seal.landings:
            return SealAnswer(blocks, flushed, lost)
        if now >= seal.deadline:
            return SealAnswer(blocks, flushed, Reason.DEADLINE)
        if any(segment.extent.nvme in (FileState.QUEUED, FileState.WRITING) for segment in path):
            return None
        if any(self._cascade.reads.is_lost(segment.extent) for segment in path):
            return None  # until the other ranks' reads have ended, and it is known what is left
        return SealAnswer(blocks, flushed, lost or self._why_not_flushed(seal))

    def _flushed_blocks(self, path: list[Segment]) -> int:
        flushed = 0
        for segment in path:
            if not segment.extent.has_file or self._cascade.reads.is_lost(segment.extent):
                break
            flushed += segment.blocks
        return flushed

    def _why_not_flushed(self, seal: _WaitingSeal) -> Reason:
        ledger = self._ledger
        if not ledger.has_nvme:
            return Reason.NVME_OFF
        if any(not ledger.group_of(segment.extent).persistent for segment in seal.path):
            return Reason.NOT_PERSISTENT
        dropped = (segment.extent.why_not_there for segment in seal.path if not segment.extent.has_file)
        return self._cascade.nvme.why_not_writable or next(filter(None, dropped), Reason.NVME_DEGRADED)


def _still_there(path: list[Segment]) -> list[Segment]:
    """As far as it goes now: blocks may have been found bad, or been evicted, since the path was walked."""
    there: list[Segment] = []
    for segment in path:
        blocks = min(segment.blocks, segment.extent.num_blocks) if segment.extent.in_tree else 0
        if blocks:
            there.append(Segment(segment.extent, segment.start, blocks))
        if blocks < segment.blocks:
            break
    return there
