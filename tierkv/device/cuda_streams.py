"""Streams and events of one device: how what was asked for is known to be done.

Each kind of work has a stream of its own, non-blocking: the default stream, and what an engine asks of it, is in no
order with them but for `wait_for`. A Pending is two events around its work. They are asked, never waited for in a call
without a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float

from tierkv.device import cuda_driver as cuda
from tierkv.device.cuda_driver import CudaError, CudaLost, Driver
from tierkv.errors import DeviceLost

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.00002, 0.001


class CudaPending:
    """`keeps` is what the work reads or writes and nobody else keeps alive."""

    def __init__(self, streams: CudaStreams, begin: int, end: int, keeps: Sequence[object]) -> None:
        self._streams = streams
        self._events = (begin, end)
        self._keeps: Sequence[object] = keeps
        self._lock = threading.Lock()
        self._is_done = False
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        with self._lock:
            if not self._is_done:
                seconds = self._streams.seconds_of(*self._events)
                if seconds is not None:
                    self.seconds, self._is_done, self._keeps = seconds, True, ()
            return self._is_done

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        pause = FIRST_PAUSE_SECONDS
        while not self.is_done:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)  # between two looks, with a deadline: the driver's own wait has none
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return True


class CudaStreams:
    """Made and used with any thread; `context` is made current for each call."""

    def __init__(self, driver: Driver, context: int, names: Sequence[str]) -> None:
        self._driver = driver
        self._context = context
        self._lock = threading.Lock()  # held while something is asked for, which may take as long as a copy
        self._events_lock = threading.Lock()
        self._free_events: list[int] = []
        self._all_events: list[int] = []
        with driver.current(context):
            self._streams = {name: driver.read_pointer("cuStreamCreate", cuda.STREAM_NON_BLOCKING) for name in names}

    def stream(self, name: str) -> int:
        return self._streams[name]

    @contextmanager
    def submitting(self, name: str, keeps: list[object]) -> Iterator[list[CudaPending]]:
        """Work for the stream `name` is asked for inside, by one thread at a time; the Pending is in what was yielded
        when it is over. Where something raises, nothing of it runs any more when that arrives: the stream has been
        waited for, or the device is lost."""
        made: list[CudaPending] = []
        stream = self._streams[name]
        with self._lock, self._driver.current(self._context):
            begin, end = self._event(), self._event()
            try:
                self._driver.call("cuEventRecord", begin, stream)
                yield made
                self._driver.call("cuEventRecord", end, stream)
            except DeviceLost:
                raise
            except BaseException:  # whatever it was: what was asked for before it is still running
                self._driver_settles(stream)
                with self._events_lock:
                    self._free_events += [begin, end]
                raise
            made.append(CudaPending(self, begin, end, tuple(keeps)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody asks for work inside, and the context is current."""
        with self._lock, self._driver.current(self._context):
            yield

    def seconds_of(self, begin: int, end: int) -> float | None:
        """Between two events, None while the second has not come. They are given back once it has: ask once more than
        that and they are somebody else's."""
        with self._driver.current(self._context):
            result = self._driver.result("cuEventQuery", end)
            if result == cuda.NOT_READY:
                return None
            if result != 0:
                raise self._lost("cuEventQuery", result)
            elapsed = c_float()
            self._driver.call("cuEventElapsedTime", byref(elapsed), begin, end)
        with self._events_lock:
            self._free_events += [begin, end]
        return elapsed.value / 1000.0

    def wait_for(self, event: int) -> None:
        """All that is asked for later runs behind what `event` was recorded behind."""
        with self._lock, self._driver.current(self._context):
            for stream in self._streams.values():
                self._driver.call("cuStreamWaitEvent", stream, event, 0)

    def record(self, stream: int) -> int:
        """An event of its own on somebody's stream, as a mark for `wait_for`. Destroy it."""
        with self._driver.current(self._context):
            event = self._driver.read_pointer("cuEventCreate", cuda.EVENT_DISABLE_TIMING)
            try:
                self._driver.call("cuEventRecord", event, stream)
            except CudaError:
                self._driver.result("cuEventDestroy_v2", event)
                raise
        return event

    def destroy(self, event: int) -> None:
        with self._driver.current(self._context):
            self._driver.result("cuEventDestroy_v2", event)

    def settle(self) -> None:
        """Wait until all that was asked for has completed. The context is current already."""
        for stream in self._streams.values():
            self._driver.call("cuStreamSynchronize", stream)

    def close(self) -> None:
        with self._lock, self._driver.current(self._context):
            self.settle()
            for event in self._all_events:
                self._driver.result("cuEventDestroy_v2", event)
            for stream in self._streams.values():
                self._driver.result("cuStreamDestroy_v2", stream)
            self._all_events, self._free_events, self._streams = [], [], {}

    def _event(self) -> int:
        with self._events_lock:
            if self._free_events:
                return self._free_events.pop()
            event = self._driver.read_pointer("cuEventCreate", cuda.EVENT_DEFAULT)
            self._all_events.append(event)
            return event

    def _driver_settles(self, stream: int) -> None:
        result = self._driver.result("cuStreamSynchronize", stream)
        if result != 0:
            raise self._lost("cuStreamSynchronize", result)

    def _lost(self, call: str, result: int) -> CudaLost:
        """An event or a stream that fails has met what some work did: nothing proves what still runs."""
        error = self._driver.error(call, result)
        return error if isinstance(error, CudaLost) else CudaLost(call, result, "work on the device failed", str(error))
