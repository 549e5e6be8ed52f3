"""Every call of the core, to its last effect: instructions to the workers, notices to who waits for them.

What goes wrong in here is CoreFailed. The core's state can't be trusted any more, or what it decided was not carried
out; so the front ends, and the supervisor starts a new one. Never wrong beats available.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tierkv.core.grants import Dropped, Evicted, LeaseReady, NeverHit, Regretted, SealReady, Waiting
from tierkv.core.instructions import AnyInstruction, OnDevice, OnDisk, OpFailed, RecordPurge, SweepPurge, Write, Zero
from tierkv.core.ledger import Effect
from tierkv.core.reasons import Reason
from tierkv.core.recent_evictions import RecentEvictions
from tierkv.core.state import CacheState
from tierkv.errors import TierkvError, WireError
from tierkv.node.control import WorkerName
from tierkv.node.journal_feed import JournalFeed
from tierkv.node.mover import Mover
from tierkv.node.outbox import Outbox
from tierkv.node.recording import Recording
from tierkv.node.replies import lease_reply, seal_reply
from tierkv.node.waiting import WaitingRoom
from tierkv.wire.messages import ErrorCode

T = TypeVar("T")

log = logging.getLogger(__name__)


class CoreFailed(TierkvError):
    """An exception out of the core, or while its effects were carried out."""


class CoreCalls:
    """`replace_worker(problem)` asks for another storage worker, as this one reads nothing any more; so does
    `replace_disk_worker` of the disk tier's. `devices` are the movers of gpu_devices, in order, with how another worker
    is asked for. `zero` is who zeroes memory on a node without a storage worker."""

    def __init__(
        self,
        state: CacheState,
        mover: Mover,
        outbox: Outbox,
        replace_worker: Callable[[str], None] = lambda _: None,
        zero: Callable[[Zero], None] | None = None,
        recording: Recording | None = None,
        disk: Mover | None = None,
        replace_disk_worker: Callable[[str], None] = lambda _: None,
        devices: Mapping[Mover, Callable[[str], None]] | None = None,
    ) -> None:
        self.state = state
        self.mover = mover
        self.disk = disk or Mover(WorkerName.DISK)
        self.devices = tuple(devices or ())
        self.recording = recording or Recording(None)
        self.leases: WaitingRoom[bytes] = WaitingRoom()
        self.seals: WaitingRoom[int] = WaitingRoom()
        self.evictions = RecentEvictions()
        self.journal = JournalFeed(state, mover, has_nvme=state.limits.nvme_bytes > 0)
        self.dropped_bytes = 0
        self.dropped_extents = 0
        self._outbox = outbox
        self._replace = {self.mover: replace_worker, self.disk: replace_disk_worker, **(devices or {})}
        self._zero = zero

    def queues(self) -> dict[str, int]:
        """What waits, by name."""
        state = self.state
        demotions = {"demotions": state.num_demotions} if state.limits.disk_bytes else {}
        reads_and_writes = {"reads": state.num_reads_waiting, "writes": state.num_writes_waiting}
        return reads_and_writes | demotions | {"leases": len(self.leases), "seals": len(self.seals)}

    def look(self, question: Callable[[], T]) -> T:
        """A question that changes nothing."""
        try:
            return question()
        except Exception as error:  # whatever it is, it came out of the core
            raise CoreFailed(f"{type(error).__name__}: {error}") from error

    def do(self, now: float, event: Callable[[], list[Effect]]) -> None:
        """An event without an answer."""
        self.look(lambda: self._carry_out(event(), now))

    def ask(
        self, now: float, event: Callable[[], tuple[T, list[Effect]]], on_waiting: Callable[[], None] | None = None
    ) -> T:
        """An event with an answer. When that is Waiting, `on_waiting` runs first: the answer that is waited for may be
        among the effects already."""

        def decide() -> T:
            answer, effects = event()
            if isinstance(answer, Waiting) and on_waiting is not None:
                on_waiting()
            self._carry_out(effects, now)
            return answer

        return self.look(decide)

    def instruct(self, instruction: AnyInstruction, now: float, mover: Mover | None = None) -> None:
        """One instruction for a worker, the storage worker unless another is meant; nothing when there is none."""
        mover = mover or self.mover
        try:
            mover.send(instruction)
        except WireError as error:
            if error.code == ErrorCode.TOO_LARGE and isinstance(instruction, Write):
                failed = OpFailed(op=instruction.op, reason=Reason.LARGER_THAN_TIER, problem=error.problem)
                self.do(now, lambda: self.state.report(failed, now))
                return
            # What it was told and has not read is told again to the one that follows.
            mover.detach()
            self._replace[mover](error.problem)

    def _carry_out(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            self._carry_out_one(effect, now)

    def _carry_out_one(self, effect: Any, now: float) -> None:
        match effect:
            case LeaseReady():
                self.recording.answer(effect.grant, effect.lease)
                for asker in self.leases.take(effect.grant):
                    self._outbox.reply(asker, lease_reply(asker.request_id, effect.lease), now)
            case SealReady():
                for asker in self.seals.take(effect.seal_id):
                    self._outbox.reply(asker, seal_reply(asker.request_id, effect.answer), now)
            case Evicted():
                self.evictions.note(effect, now)
                self.journal.evicted(effect, now)
            case Regretted():
                self.journal.regretted(effect, now)
            case Dropped():
                self.dropped_extents += 1
                self.dropped_bytes += effect.num_bytes
                log.debug("extent %s is not written: %s", effect.key.hex(), effect.reason)
            case NeverHit():
                log.warning(
                    "%d bytes of group %s were written and none ever read: no prompt of it repeats, or keys or "
                    "identity differ each time (a time stamp in front, an engine that is not the one that stored)",
                    effect.written_bytes,
                    effect.group.hex(),
                )
            case RecordPurge() | SweepPurge():
                self.journal.flush(now)  # rows of what is to go are there before it goes
                self.instruct(effect, now)
            case OnDevice():
                self.instruct(effect.instruction, now, self.devices[effect.device])
            case OnDisk():
                self.instruct(effect.instruction, now, self.disk)
            case Zero() if self._zero is not None:
                self._zero(effect)
            case _:
                self.instruct(effect, now)
