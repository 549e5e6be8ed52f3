"""Payload in frames, for sessions that get no memory from the node: the same grants, moved in pieces.

lease     Fetch, Fetch, ...  -> a few blocks in memory of our own -> the destination, proven block by block
ticket    written into memory of our own -> Put, Put, ... -> Commit

A piece is at most MAX_PAYLOAD_BYTES, so a block that is larger travels in parts, and one request of ours never holds up
another tenant's for long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from tierkv.client.asking import Asking, Failure
from tierkv.client.breaker import Permit
from tierkv.client.copying import Deliver
from tierkv.client.grants import LeaseFacts, TicketFacts
from tierkv.client.session import Session
from tierkv.client.slots import Slots
from tierkv.client.steps import Verb
from tierkv.core.reasons import Reason
from tierkv.wire.messages import MAX_PAYLOAD_BYTES, Fetch, FetchReply, Put, Reply, Request


class StagedBlocks(Slots):
    """What a ticket's slots are to a session without the arena: memory of our own, in the order of the granted blocks.
    It becomes real page by page, as it is written."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self.block_bytes = self.slot_bytes = block_bytes
        self.offsets = np.arange(count) * block_bytes
        self.writable = self.readable = np.empty(count * block_bytes, np.uint8)
        self._pid = os.getpid()


class InlineVerbs(Asking):
    def fetch(self, facts: LeaseFacts, deliver: Deliver) -> Verb[int]:
        """Hand all blocks of a lease to `deliver`, a few at a time; how many, from the first, were right."""
        block_bytes, session = facts.group.block_bytes, facts.session
        if session is None:
            return 0
        step = min(facts.blocks, max(1, MAX_PAYLOAD_BYTES // block_bytes))
        staging = np.empty((step, block_bytes), np.uint8)
        done = 0
        while done < facts.blocks:
            rows = staging[: facts.blocks - done]
            valid = yield from self._fetch_rows(session, facts.grant, done * block_bytes, rows)
            if valid:
                proven = rows[:valid]
                proven.flags.writeable = False
                deliver(done, proven)
            done += valid
            if valid < len(rows):
                break
        return done

    def _fetch_rows(self, session: Session, grant: bytes, start: int, rows: np.ndarray) -> Verb[int]:
        """Fill rows with the bytes of a lease from `start` on; how many of them are whole and proven."""
        flat = rows.reshape(-1)
        filled = 0
        while filled < len(flat):
            wanted = min(MAX_PAYLOAD_BYTES, len(flat) - filled)
            request = Fetch(
                id=self._state.next_id(), session=session.token, grant=grant, start=start + filled, num_bytes=wanted
            )
            answer = yield from self._move(session, request)
            if isinstance(answer, Failure):
                self._reason(answer)
                break
            assert isinstance(answer, FetchReply), "the reply that belongs to Fetch"
            got = min(len(answer.payload), wanted)
            flat[filled : filled + got] = np.frombuffer(answer.payload, np.uint8, got)
            filled += got
            if got < wanted:
                self._state.count(Reason.REVOKED)
                break
        return filled // int(rows.shape[1])

    def put_staged(self, facts: TicketFacts) -> Verb[Failure | None]:
        """Send all granted blocks. None when they have arrived."""
        session, staged = facts.session, facts.staged
        assert session is not None
        assert staged is not None
        for start, piece in _pieces(staged):
            request = Put(
                id=self._state.next_id(), session=session.token, grant=facts.grant, start=start, payload=piece.tobytes()
            )
            answer = yield from self._move(session, request)
            if isinstance(answer, Failure):
                return answer
        return None

    def _move(self, session: Session, request: Request) -> Verb[Reply | Failure]:
        """Of a grant, so under its session only: a new one doesn't know it."""
        if session.over:
            self._state.session_over(session)
            return Failure(Reason.SESSION_GONE)
        if self._state.permit() is Permit.REFUSED:
            return Failure(Reason.NODE_AWAY)
        return (yield from self._exchange(session, request, self.budget().until))


def _pieces(staged: StagedBlocks) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(staged.readable), MAX_PAYLOAD_BYTES):
        yield start, staged.readable[start : start + MAX_PAYLOAD_BYTES]
