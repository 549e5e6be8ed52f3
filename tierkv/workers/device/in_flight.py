"""Copies that were asked of a device and haven't completed, in whatever order they do.

One thread watches them: the driver's events are asked, seldom while nothing happens, so that no thread sits in a call
that has no deadline. What is done is reported at once; what has failed is reported once it is sure that nothing of it
runs any more, which the backend sees to before it says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.core.instructions import OpFailed, Report
from tierkv.core.reasons import Reason
from tierkv.device.backends import Pending
from tierkv.errors import DeviceError, DeviceLost
from tierkv.workers.lifeline import OnDeath, end_process, start_thread

log = logging.getLogger(__name__)

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0001, 0.002


@dataclass(slots=True)
class _Copy:
    op: int
    pending: Pending
    done: Callable[[float], Report]  # given the seconds that it took
    asked: float


class InFlight:
    """`lost` is called once when the device is of no use any more: nothing is answered from then on, and the process
    has to end, for only its end proves that nothing writes."""

    def __init__(
        self,
        report: Callable[[Sequence[Report]], None],
        lost: Callable[[DeviceLost], None],
        *,
        on_death: OnDeath = end_process,
    ) -> None:
        self._report = report
        self._lost = lost
        self._copies: list[_Copy] = []
        self._change = threading.Condition()
        self._is_ending = False
        self._thread = start_thread("copies", self._run, on_death=on_death)

    def __len__(self) -> int:
        return len(self._copies)

    def oldest_seconds(self) -> float:
        """For how long the oldest of them has been in flight; 0.0 for none."""
        with self._change:
            return time.monotonic() - min(copy.asked for copy in self._copies) if self._copies else 0.0

    def add(self, op: int, pending: Pending, done: Callable[[float], Report]) -> None:
        copy = _Copy(op, pending, done, time.monotonic())
        if self._is_over(copy):
            return
        with self._change:
            self._copies.append(copy)
            self._change.notify_all()

    def wait_empty(self, timeout_seconds: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: not self._copies, timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """What is still in flight is not reported any more. False when the thread does not end."""
        with self._change:
            self._is_ending = True
            self._change.notify_all()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = SHORTEST_PAUSE_SECONDS
        while True:
            with self._change:
                self._change.wait_for(lambda: self._copies or self._is_ending)
                if self._is_ending:
                    return
                copies = list(self._copies)
            over = [copy for copy in copies if self._is_over(copy)]
            pause = SHORTEST_PAUSE_SECONDS if over else min(2 * pause, LONGEST_PAUSE_SECONDS)
            with self._change:
                for copy in over:
                    self._copies.remove(copy)
                self._change.notify_all()
                if not over:
                    self._change.wait_for(lambda: self._is_ending, pause)

    def _is_over(self, copy: _Copy) -> bool:
        """Whether it is; then it was reported."""
        try:
            if not copy.pending.is_done:
                return False
        except DeviceLost as lost:
            self._lost(lost)
            return False
        except DeviceError as error:
            log.error("operation %d: %s", copy.op, str(error))
            self._report([OpFailed(copy.op, Reason.DEVICE_DOWN, str(error))])
            return True
        self._report([copy.done(copy.pending.seconds)])
        return True
