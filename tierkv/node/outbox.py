"""Replies on their way out, and what is counted about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tierkv.metrics import Latency
from tierkv.node.waiting import Asker
from tierkv.wire.frames import encode
from tierkv.wire.messages import Error, Reply


class Outbox:
    """`transmit(peer, frame)` takes a frame without waiting, or says False: a peer that does not read its replies
    loses them, and nobody else waits for it. `clock` is the node's time, for latencies. `on_lost(session)` is called
    for each answer that was lost."""

    def __init__(self, transmit: Callable[[bytes, bytes], bool], clock: Callable[[], float]) -> None:
        self._transmit = transmit
        self._clock = clock
        self.errors: Counter[str] = Counter()
        self.latencies: dict[str, Latency] = {}
        self.dropped = 0
        self.slow_sessions = 0
        self.on_lost: Callable[[bytes], None] = lambda _session: None

    def reply(self, asker: Asker, reply: Reply, now: float) -> None:
        answered = max(now, self._clock())  # `now` is when deciding began; what it took belongs to the latency
        self.latencies.setdefault(asker.request, Latency()).observe(max(0.0, answered - asker.received))
        if not self.send(asker.peer, reply):
            self.on_lost(asker.session)

    def send(self, peer: bytes, reply: Reply) -> bool:
        """Whether it is on its way."""
        if isinstance(reply, Error):
            self.errors[reply.code] += 1
        is_sent = self._transmit(peer, encode(reply))
        self.dropped += not is_sent
        return is_sent
