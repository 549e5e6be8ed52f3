"""Replies are counted with what they really took."""

from __future__ import annotations

from tierkv.node.outbox import Outbox
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Done


def test_a_latency_includes_what_deciding_took() -> None:
    outbox = Outbox(lambda peer, frame: True, lambda: 10.3)
    outbox.reply(Asker(b"peer", 1, b"", "Match", received=10.0), Done(id=1), 10.0)
    latency = outbox.latencies["Match"]
    assert round(latency.total_seconds, 3) == 0.3
    assert sum(latency.counts) == 1


def test_a_reply_that_nobody_takes_is_counted() -> None:
    outbox = Outbox(lambda peer, frame: False, lambda: 0.0)
    outbox.send(b"peer", Done(id=1))
    assert outbox.dropped == 1
