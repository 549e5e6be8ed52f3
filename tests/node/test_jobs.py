"""Warm-ups: progress while somebody asks, an end when nobody does."""

from __future__ import annotations

import pytest

from tests.node.kit import GROUP, Kit
from tests.node.test_reading_and_writing import put_on_nvme_only
from tierkv.core.instructions import Read, ReadDone
from tierkv.node import jobs
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.wire.messages import Acquire, ErrorCode, Match, Warmup

JOB, OTHER = b"job-number-00001", b"job-number-00002"
LEASE = b"lease-number-001"


def test_a_warmup_brings_back_what_was_used_and_reports_it(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.state._ledger.pool.limit_bytes *= 1  # nothing is evicted for a guess: make room as an engine would
    first = durable.ask(Warmup, job=JOB, budget_bytes=2**20)
    assert first.total_extents > 0
    for _ in range(first.total_extents):
        for read in [i for i in durable.instructions() if isinstance(i, Read)]:
            durable.report(ReadDone(op=read.op, valid=len(read.slots), seconds=0.01))
    last = durable.ask(Warmup, job=JOB)
    assert last.finished
    assert last.done_extents <= last.total_extents
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2


def test_a_warmup_keeps_to_what_was_asked_for(durable: Kit) -> None:
    put_on_nvme_only(durable, 2)
    everything = durable.ask(Warmup, job=JOB)
    assert everything.total_extents > 1
    durable.ask(Warmup, job=JOB, cancel=True)
    for other in ({"tenant": "nobody"}, {"fingerprint": "00"}):
        assert durable.ask(Warmup, job=OTHER, **other).total_extents == 0
        durable.ask(Warmup, job=OTHER, cancel=True)
    durable.now += 3_600.0
    assert durable.ask(Warmup, job=OTHER, since_seconds=3_000.0).total_extents == 0
    durable.ask(Warmup, job=OTHER, cancel=True)
    assert durable.ask(Warmup, job=OTHER, since_seconds=7_200.0).total_extents == everything.total_extents
    durable.ask(Warmup, job=OTHER, cancel=True)
    assert durable.ask(Warmup, job=OTHER, tenant="").total_extents == everything.total_extents


def test_a_warmup_says_that_it_gives_way(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.send(Acquire, grant=LEASE, group=GROUP, keys=keys, deadline_ms=10_000)
    assert durable.ask(Warmup, job=JOB).yielding
    (read,) = [i for i in durable.instructions() if isinstance(i, Read)]  # the lease's, and no other
    durable.report(ReadDone(op=read.op, valid=len(read.slots), seconds=0.01))
    durable.take_replies()  # to whoever waited
    assert not durable.ask(Warmup, job=JOB).yielding


def test_a_cancelled_or_unknown_warmup_is_over(durable: Kit) -> None:
    assert durable.ask(Warmup, job=JOB, cancel=True).finished
    put_on_nvme_only(durable, 2)
    durable.ask(Warmup, job=JOB)
    durable.ask(Warmup, job=JOB, cancel=True)
    assert durable.state.warmup_progress(JOB) is None


def test_a_warmup_that_nobody_asks_about_ends(durable: Kit) -> None:
    put_on_nvme_only(durable, 2)
    durable.ask(Warmup, job=JOB)
    assert durable.service.next_wakeup() is not None
    durable.tick(ABANDONED_SECONDS)
    assert durable.state.warmup_progress(JOB) is None


def test_warmups_are_bounded(durable: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_WARMUPS", 1)
    durable.ask(Warmup, job=JOB)
    assert durable.ask(Warmup, job=OTHER).code == ErrorCode.INVALID
    assert durable.ask(Warmup, job=JOB).finished
