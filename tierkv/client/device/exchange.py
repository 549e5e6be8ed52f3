"""What is said on a session's socket about pools of devices: one question at a time, whichever thread reads its answer,
and what the supervisor tells by itself of pools that are gone.

The supervisor answers each MapDevice once, in order. So an answer that comes when nobody waits for it any more is known
by its number, and its descriptor is closed.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tierkv.wire.session import DeviceGrant, DeviceRefused, MapDevice, PoolEnded


@dataclass(frozen=True, slots=True)
class PoolOffered:
    """`descriptor` is the receiver's to close; None for a kind that has none."""

    grant: DeviceGrant
    descriptor: int | None


NO_ANSWER = DeviceRefused(code="no_answer", problem="the node did not say in time whether it has a pool there")
SESSION_OVER = DeviceRefused(code="session_over", problem="the node went away while it was asked for its pool")


class PoolExchange:
    """Of one session. `take_answer` and `take_end` are called by whoever reads the socket."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._lock = threading.Lock()
        self._asked = self._answered = 0
        self._waited_for = 0  # number of the question somebody waits for the answer to; 0: nobody does
        self._answer: PoolOffered | DeviceRefused | None = None
        self._wake = -1
        self._ended: set[tuple[int, int]] = set()
        self._when_ended: dict[tuple[int, int], Callable[[], None]] = {}

    def has_ended(self, device: int, epoch: int) -> bool:
        return (device, epoch) in self._ended

    def when_ended(self, device: int, epoch: int, then: Callable[[], None]) -> None:
        """Have `then` called by whoever reads that this pool is gone; at once where that has been read."""
        with self._lock:
            self._when_ended[device, epoch] = then
            has_ended = (device, epoch) in self._ended
        if has_ended:
            then()

    def take_end(self, message: PoolEnded) -> None:
        pool = message.device, message.epoch
        with self._lock:
            self._ended.add(pool)
            then = self._when_ended.get(pool)
        if then is not None:
            then()

    def take_answer(self, message: DeviceGrant | DeviceRefused, descriptors: Sequence[int]) -> None:
        """The descriptors are ours now."""
        keep = descriptors[:1] if isinstance(message, DeviceGrant) else []
        with self._lock:
            self._answered += 1
            if self._answered == self._waited_for:
                self._answer = (
                    PoolOffered(message, keep[0] if keep else None) if isinstance(message, DeviceGrant) else message
                )
                os.eventfd_write(self._wake, 1)
            else:
                keep = []
        for descriptor in descriptors[len(keep) :]:
            os.close(descriptor)

    def ask(
        self,
        wish: MapDevice,
        *,
        send: Callable[[MapDevice], None],
        look: Callable[[], bool],
        descriptor: int,
        until: float,
    ) -> PoolOffered | DeviceRefused:
        """`send` raises OSError where it can't be; `look` reads what has come and says whether the session goes on;
        `descriptor` can be waited on and is closed here. `until` is monotonic."""
        try:
            if not self._one_at_a_time.acquire(timeout=max(0.0, until - time.monotonic())):
                return NO_ANSWER
            try:
                return self._ask(wish, send, look, descriptor, until)
            finally:
                self._one_at_a_time.release()
        finally:
            os.close(descriptor)

    def _ask(
        self,
        wish: MapDevice,
        send: Callable[[MapDevice], None],
        look: Callable[[], bool],
        descriptor: int,
        until: float,
    ) -> PoolOffered | DeviceRefused:
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._lock:
            self._wake, self._answer = wake, None
            self._asked += 1
            self._waited_for = self._asked
        try:
            try:
                send(wish)
            except OSError:
                with self._lock:
                    self._asked -= 1
                return SESSION_OVER
            return self._wait(look, descriptor, wake, until)
        finally:
            with self._lock:
                self._waited_for, self._wake = 0, -1
                late = self._take()
            if isinstance(late, PoolOffered) and late.descriptor is not None:
                os.close(late.descriptor)  # it came while we gave up
            os.close(wake)

    def _wait(self, look: Callable[[], bool], descriptor: int, wake: int, until: float) -> PoolOffered | DeviceRefused:
        events = select.poll()
        events.register(descriptor, select.POLLIN)
        events.register(wake, select.POLLIN)
        while True:
            goes_on = look()
            with self._lock:
                answer = self._take()
            if answer is not None:
                return answer
            if not goes_on:
                return SESSION_OVER
            left = until - time.monotonic()
            if left <= 0:
                return NO_ANSWER
            with suppress(InterruptedError):
                events.poll(left * 1_000)

    def _take(self) -> PoolOffered | DeviceRefused | None:
        """Under the lock."""
        answer, self._answer = self._answer, None
        return answer
