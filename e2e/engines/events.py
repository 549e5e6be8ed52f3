"""What vLLM publishes about its caches, as a router hears it: its own batches, over its own publisher."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

Event = BlockStored | BlockRemoved | AllBlocksCleared


def published_at(endpoint: str) -> dict[str, Any]:
    """What --kv-events-config says. vLLM binds what begins with ipc://, and connects to a tcp:// with a host."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}


class Subscriber:
    """Hears every batch from the first that arrives on. For one thread."""

    def __init__(self, folder: Path) -> None:
        """`folder` has a short path: the publisher's socket lies in it."""
        self.endpoint = f"ipc://{folder}/events"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next: int | None = None

    def hear(self) -> list[Event]:
        """What has come since the last look, in the order in which it was published."""
        events: list[Event] = []
        while self._socket.poll(0):
            _topic, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            assert self._next in (None, sequence), f"batch {sequence} came instead of {self._next}"
            self._next = sequence + 1
            events += self._decoder.decode(payload).events
        return events

    @property
    def hears(self) -> bool:
        """Whether a batch has come yet: from then on none is missed."""
        return self._next is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(linger=0)
        self._context.term()
