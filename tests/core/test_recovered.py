"""Extents of which a start has not found every rank's file."""

from __future__ import annotations

import msgspec
import pytest

from tests.core.simulation import Bench, Prompt
from tierkv.core.instructions import Recovered, Remove, Rows, TierHealth
from tierkv.core.state import CacheState


def stored_in_two_ranks() -> tuple[Bench, Prompt]:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    for rank in (0, 1):
        bench.store(prompt, rank=rank)
    bench.seal(prompt)
    bench.work()
    assert bench.flushed(prompt) == 2
    return bench, prompt


def recover_rank_0(bench: Bench, unreadable: int) -> None:
    """A new incarnation, told of the files of rank 0 only."""
    bench.state = CacheState(bench.limits, [0] * len(bench.generations))
    bench.state.open_session(b"engine", bench.now)
    bench.absorb(bench.state.open_group(bench.spec, bench.now))
    bench.absorb(bench.state.worker_started(bench.now))
    for report in bench.disk.recovery([name for name in bench.disk.files if name[1] == 0]):
        told = msgspec.structs.replace(report, unreadable=unreadable) if isinstance(report, Recovered) else report
        bench.absorb(bench.state.report(told, bench.now))


def test_what_can_never_be_used_is_removed() -> None:
    bench, prompt = stored_in_two_ranks()
    recover_rank_0(bench, unreadable=0)
    assert [op.rank for op in bench.worker.waiting if isinstance(op, Remove)] == [0, 1]
    bench.work()
    assert bench.disk.files == {}
    assert bench.match(prompt) == (0, 0)


@pytest.mark.parametrize("reported", [0, 4096])
def test_nothing_is_removed_for_want_of_a_file_that_may_only_be_unreadable_now(reported: int) -> None:
    """An error that passes must not cost what was flushed: the next start finds all of it. Until then it takes room."""
    bench, prompt = stored_in_two_ranks()
    files = dict(bench.disk.files)
    (kept,) = [file.row.file_bytes for (_, rank, _), file in files.items() if rank == 0]
    recover_rank_0(bench, unreadable=1)
    assert bench.worker.waiting == []
    assert bench.match(prompt) == (0, 0)
    bench.absorb(bench.state.report(TierHealth(True, reported, 0), bench.now))
    nvme = bench.state.tiers()[1]
    assert (nvme.used_bytes, nvme.overhead_bytes) == (0, reported + kept)
    assert bench.disk.files == files
    bench.start()
    assert bench.match(prompt)[0] == 2


def test_what_was_left_may_be_stored_anew() -> None:
    bench, prompt = stored_in_two_ranks()
    recover_rank_0(bench, unreadable=1)
    for rank in (0, 1):
        bench.store(prompt, rank=rank)
    bench.seal(prompt)
    bench.work()
    assert bench.flushed(prompt) == 2
    bench.start()
    assert bench.match(prompt)[0] == 2


@pytest.mark.parametrize("change", [{"first_token": 7}, {"block_bytes": 8192}, {"parent": b"p" * 32}])
def test_ranks_that_tell_different_things_of_an_extent_are_not_put_together(change: dict[str, object]) -> None:
    bench, prompt = stored_in_two_ranks()
    reports = [
        msgspec.structs.replace(report, rows=[msgspec.structs.replace(report.rows[0], **change)])
        if isinstance(report, Rows) and report.rank == 1
        else report
        for report in bench.disk.recovery()
    ]
    bench.state = CacheState(bench.limits, [0] * len(bench.generations))
    bench.worker.waiting.clear()
    bench.absorb(bench.state.worker_started(bench.now))
    for report in reports:
        bench.absorb(bench.state.report(report, bench.now))
    assert bench.match(prompt) == (0, 0)
    bench.work()
    assert (bench.disk.files, bench.nvme_used()) == ({}, 0)
