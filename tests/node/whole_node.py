"""A node in this process that moves real bytes: service, core, arena, a storage worker on a thread, a data directory.

Blocks are stamped, layer by layer (tierkv.torture.streams); destinations are poisoned and have guard rows around them.
Time stands still unless a test moves it; whoever waits for the worker waits for its report.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.node.kit import ENGINE, HOST_BYTES, Kit
from tests.node.stamped_node import require_quiet, unpack
from tests.workers.desk import SECONDS, Arena, hold_lock, make_config
from tierkv.core.grants import GRANTED
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.torture.oracle import POISON
from tierkv.torture.streams import rows_of
from tierkv.wire.messages import Acquire, Commit, Release, Reply, ReportBad, Request, Reserve, Seal, SealWait
from tierkv.workers.channel import worker_end
from tierkv.workers.storage import StorageWorker

GUARD_ROWS = 2
NVME_BYTES = 2**24


@dataclass(frozen=True)
class Loaded:
    """`blocks` are right. The engine computes the rest; `reason` says why there is not more of what was cached."""

    blocks: int
    nvme_blocks: int
    reason: str


class WholeNode:
    def __init__(self, root: Path, *, layers: tuple[int, ...] = (4096,), block_tokens: int = 2) -> None:
        self.root = root
        self.layers = layers
        self.block_tokens = block_tokens
        layout = Layout(
            dtype="u8", block_bytes=layers, axes="layer,byte", block_tokens=block_tokens, engine="whole node"
        )
        self.identity = Identity(weights="cd" * 32, config="config", layout=layout)
        self.group = self.identity.group_key()
        self.block_bytes = layout.total_block_bytes
        self._grants = 0
        self.late: list[Reply] = []
        self._begin()

    def _begin(self) -> None:
        self.kit = Kit(nvme_bytes=NVME_BYTES)
        self.arena = Arena(HOST_BYTES)
        self._lock = hold_lock(self.root)
        ours, theirs = socket.socketpair()
        self._channel = worker_end(theirs)
        self.worker = StorageWorker(
            make_config(self.root, self._lock, arena_bytes=HOST_BYTES),
            self._channel,
            self.arena.view,
            health_seconds=0.05,
            on_death=self._died,
        )
        self.kit.mover.attach(ours, pid=99, restarts=0, now=self.kit.now)
        self.kit.service.worker_started(self.kit.now)
        self.kit.mover.flush()
        self._thread = threading.Thread(target=self.worker.run, name="worker")
        self._thread.start()
        self.pump(lambda: not self.kit.state.is_recovering, "recovery is over")
        self.kit.open(self.identity)

    @staticmethod
    def _died(thread: str) -> None:
        raise AssertionError(f"thread {thread} of the worker has died")

    def pump(self, condition: Callable[[], bool], what: str) -> None:
        """Hear the worker until `condition` holds."""
        deadline = time.monotonic() + SECONDS
        mover = self.kit.mover
        while not condition():
            assert time.monotonic() < deadline, f"waited until {what}"
            mover.flush()
            if select.select([mover.fileno()], [], [], 0.05)[0]:
                for report in mover.receive(self.kit.now):
                    self.kit.service.on_report(report, self.kit.now)

    def is_quiet(self) -> bool:
        state = self.kit.state
        is_idle = not (state.num_reads_waiting or state.num_writes_waiting or state.dirty().extents)
        return is_idle and not state._cascade.nvme.removing_bytes

    def settle(self) -> None:
        """What still grows is sealed, and all is written."""
        self.kit.tick(20.0)
        self.pump(self.is_quiet, "the worker has nothing left to do")

    def end(self) -> None:
        """Nothing may be held or under way. Whatever comes of that, the worker's threads end."""
        try:
            require_quiet(self.kit)
        finally:
            self._close()

    def _close(self) -> None:
        self.kit.mover.detach()
        self._thread.join(SECONDS)
        self.worker.close()
        self._channel.close()
        os.close(self._lock)
        self.arena.close()
        self.kit.close()

    def restart(self) -> None:
        """Everything is on disk only."""
        self.settle()
        self.end()
        self._begin()

    def __enter__(self) -> WholeNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.settle()
                require_quiet(self.kit)
        finally:
            self._close()

    # ---- as an engine

    def ask(self, kind: type[Request], **fields: Any) -> Any:
        """The reply to it. What others were answered meanwhile is in `late`."""
        number = self.kit.send(kind, **fields)
        replies = self.kit.take_replies()
        self.late += [reply for reply in replies if reply.id != number]
        (reply,) = [reply for reply in replies if reply.id == number]
        return reply

    def keys(self, tokens: Sequence[int]) -> bytes:
        return chain_keys(self.group, pack_tokens(tokens), self.block_tokens)

    def stamps(self, tokens: Sequence[int]) -> np.ndarray:
        return rows_of(self.keys(tokens), self.layers)

    def _grant(self) -> bytes:
        self._grants += 1
        return b"grant%011d" % self._grants

    def match(self, tokens: Sequence[int]) -> int:
        return self.kit.state.match(self.group, self.keys(tokens)).blocks

    def reserve(self, tokens: Sequence[int], first: int = 0) -> tuple[bytes, Any]:
        """(grant, reply)"""
        grant = self._grant()
        whole = len(tokens) // self.block_tokens * self.block_tokens
        packed = pack_tokens(tokens[first * self.block_tokens : whole])
        reply = self.ask(Reserve, grant=grant, group=self.group, keys=self.keys(tokens), first=first, tokens=packed)
        return grant, reply

    def write(self, reply: Any, rows: np.ndarray, first: int = 0) -> list[int]:
        """Blocks that had a slot. What lies behind each in its last page is left as it is."""
        granted = [first + at for at, state in enumerate(reply.states) if state == GRANTED]
        for slot, block in zip(unpack(reply.offsets), granted, strict=True):
            self.arena.view[slot : slot + self.block_bytes] = rows[block].tobytes()
        return granted

    def store(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that were missing and are stored now."""
        grant, reply = self.reserve(tokens)
        granted = self.write(reply, self.stamps(tokens))
        if granted:
            self.ask(Commit, grant=grant)
        return granted

    def seal(self, tokens: Sequence[int]) -> None:
        self.ask(Seal, group=self.group, keys=self.keys(tokens), wait=SealWait.SEALED)

    def store_flushed(self, tokens: Sequence[int]) -> None:
        self.store(tokens)
        self.seal(tokens)
        self.settle()

    def load(self, tokens: Sequence[int], seconds: float = 10.0) -> Loaded:
        """Acquire, wait for the worker, copy, release. Bytes that are not the prompt's, or a write beside the blocks
        that were promised, fail the test."""
        grant = self._grant()
        number = self.kit.send(
            Acquire, grant=grant, group=self.group, keys=self.keys(tokens), deadline_ms=int(seconds * 1000)
        )
        self.pump(lambda: any(reply.id == number for _, reply in self.kit.replies), "the lease is answered")
        (reply,) = [reply for _, reply in self.kit.replies if reply.id == number]
        self.kit.take_replies()
        pages = np.full((2 * GUARD_ROWS + len(tokens) // self.block_tokens, self.block_bytes), POISON, np.uint8)
        destination = pages[GUARD_ROWS:]
        for block, slot in enumerate(unpack(reply.parts[0].offsets) if reply.blocks else ()):
            destination[block] = np.frombuffer(self.arena.view[slot : slot + self.block_bytes], np.uint8)
        right = self.stamps(tokens)[: reply.blocks]
        assert (destination[: reply.blocks] == right).all(), "bytes of somebody else"
        assert (pages[:GUARD_ROWS] == POISON).all()
        assert (destination[reply.blocks :] == POISON).all()
        if reply.blocks:
            self.ask(Release, grant=grant)
        return Loaded(reply.blocks, reply.nvme_blocks, reply.reason)

    def report_bad(self, tokens: Sequence[int], first_bad: int) -> None:
        self.ask(ReportBad, group=self.group, keys=self.keys(tokens), first_bad=first_bad)

    def file(self, tokens: Sequence[int]) -> Path:
        """Of the extent that begins with the prompt's first block."""
        name = self.keys(tokens)[:KEY_BYTES].hex()
        (path,) = self.root.glob(f"models/*/*/*/*/{name}.kv")
        return path

    def files(self) -> list[Path]:
        return sorted(self.root.glob("models/*/*/*/*/*.kv"))

    def quarantined(self) -> list[Path]:
        return [path for path in (self.root / "quarantine").rglob("*") if path.is_file()]


__all__ = ["ENGINE", "Loaded", "WholeNode"]
