"""Purge requests at the service: one of three scopes, a job that goes on, receipts."""

from __future__ import annotations

import os

import msgspec
import pytest

from tests.node.kit import BLOCK_BYTES, GROUP, IDENTITY, TOOL, Kit, prompt
from tests.node.test_reading_and_writing import store
from tierkv.core.instructions import PurgeRecorded, PurgeSwept, RecordPurge, SweepPurge, Swept, Zero, Zeroed
from tierkv.core.reasons import Reason
from tierkv.node.arena_wiper import SLICE_BYTES, ArenaWiper
from tierkv.node.purging import Purging
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Error, ErrorCode, Match, Purge

JOB = b"job-number-00001"


@pytest.fixture
def durable(durable: Kit) -> Kit:
    """With an operator."""
    durable.join(TOOL, maps_arena=False)
    return durable


def of_kind(kit: Kit, *kinds: type) -> list[object]:
    return [instruction for instruction in kit.instructions() if isinstance(instruction, kinds)]


def test_a_purge_goes_from_its_record_to_its_end_and_every_answer_is_a_receipt(durable: Kit) -> None:
    keys = store(durable, 2)
    first = durable.ask(Purge, session=TOOL, job=JOB, tenant="")
    assert (first.phase, first.finished, first.recorded) == ("removing", False, False)
    assert (first.extents, first.blocks, first.tokens) == (1, 2, 4)
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 0
    told = of_kind(durable, RecordPurge, SweepPurge, Zero)
    assert [type(one) for one in told][:1] == [RecordPurge]
    durable.report(PurgeRecorded(JOB))
    durable.report(*[Zeroed(one.op) for one in told if isinstance(one, Zero)])  # type: ignore[attr-defined]
    durable.report(PurgeSwept(JOB, Swept(files=1, file_bytes=4096, index_rows=1)))
    last = durable.ask(Purge, session=TOOL, job=JOB)
    assert (last.phase, last.finished, last.recorded) == ("gone", True, True)
    assert (last.removed_files, last.removed_bytes, last.index_rows) == (1, 4096, 1)
    assert durable.ask(Purge, session=TOOL, job=JOB, tenant="") == msgspec.structs.replace(last, id=last.id + 1)


def test_a_model_without_a_name_is_not_every_model_that_has_none(durable: Kit) -> None:
    keys = store(durable, 2)
    refused = durable.ask(Purge, session=TOOL, job=JOB, model="")
    assert (refused.code, refused.field) == (ErrorCode.INVALID, "model")
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2


def test_a_node_that_may_not_write_says_so_instead_of_hiding_for_a_while_what_it_can_not_remove(durable: Kit) -> None:
    keys = store(durable, 2)
    purging = Purging(durable.core, is_read_only=True)
    request = Purge(id=1, session=TOOL, job=JOB, tenant="")
    refused = purging.ask(request, Asker(b"", 1, TOOL, "Purge", durable.now), durable.now)
    assert isinstance(refused, Error)
    assert "read_only" in refused.problem
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2


def test_a_dry_run_changes_nothing(durable: Kit) -> None:
    keys = store(durable, 2)
    durable.instructions()
    found = durable.ask(Purge, session=TOOL, job=JOB, tenant="", dry_run=True)
    assert (found.phase, found.finished, found.blocks) == ("preview", True, 2)
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2
    assert of_kind(durable, RecordPurge, Zero) == []
    assert durable.ask(Purge, session=TOOL, job=JOB).code is ErrorCode.INVALID


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tenant": "a", "model": "ab" * 32}, "tenant"),
        ({}, "job"),
        ({"prefix": "0123456789abcdef"}, "prefix"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_name(durable: Kit, fields: dict[str, str], field: str) -> None:
    error = durable.ask(Purge, session=TOOL, job=JOB, **fields)
    assert (error.code, error.field) == (ErrorCode.INVALID, field)


def test_the_receipt_names_groups_and_no_salt(durable: Kit) -> None:
    durable.open(msgspec.structs.replace(IDENTITY, salt="acme"))
    (group,) = durable.ask(Purge, session=TOOL, job=JOB, tenant="acme").groups
    assert group.salt
    assert "acme" not in repr(group)


def test_only_so_many_purges_are_under_way_at_one_time(durable: Kit) -> None:
    for number in range(16):
        assert durable.ask(Purge, session=TOOL, job=number.to_bytes(16, "big"), tenant="").phase == "removing"
    assert durable.ask(Purge, session=TOOL, job=JOB, tenant="").code is ErrorCode.INVALID
    assert durable.ask(Purge, session=TOOL, job=bytes(16)).phase == "removing"


def test_a_failing_sweep_is_named_and_asked_for_again(durable: Kit) -> None:
    store(durable, 1)
    durable.ask(Purge, session=TOOL, job=JOB, tenant="")
    durable.report(PurgeRecorded(JOB), PurgeSwept(JOB, Swept(), Reason.READ_ONLY))
    assert durable.ask(Purge, session=TOOL, job=JOB).reason == "read_only"
    durable.instructions()
    durable.tick(1.0)
    assert of_kind(durable, SweepPurge) == [SweepPurge(JOB)]


def test_zeroing_without_a_worker_is_the_supervisors_a_slice_at_a_time() -> None:
    fd = os.memfd_create("test")
    try:
        size = SLICE_BYTES + 4 * BLOCK_BYTES
        os.pwrite(fd, b"\xee" * size, 0)
        wiper = ArenaWiper(fd)
        assert not wiper.has_work
        wiper.add(1, [(BLOCK_BYTES, SLICE_BYTES)])
        wiper.add(2, [(size - BLOCK_BYTES, BLOCK_BYTES)])
        done = []
        while wiper.has_work:
            done += wiper.step()
        assert done == [1, 2]
        raw = os.pread(fd, size, 0)
        assert raw[:BLOCK_BYTES] == b"\xee" * BLOCK_BYTES
        assert raw[BLOCK_BYTES : BLOCK_BYTES + SLICE_BYTES] == bytes(SLICE_BYTES)
        assert raw[-BLOCK_BYTES:] == bytes(BLOCK_BYTES)
        assert raw[-2 * BLOCK_BYTES : -BLOCK_BYTES] == b"\xee" * BLOCK_BYTES
    finally:
        os.close(fd)


def test_without_an_nvme_tier_it_is_unreachable_with_the_first_answer() -> None:
    kit = Kit()
    kit.open()
    zeroed: list[Zero] = []
    kit.core._zero = zeroed.append
    keys, _ = prompt(2)
    store(kit, 2)
    assert kit.ask(Purge, job=JOB, tenant="").phase == "unreachable"
    assert kit.ask(Match, group=GROUP, keys=keys).blocks == 0
    for zero in zeroed:
        kit.service.on_report(Zeroed(zero.op), kit.now)
    assert kit.ask(Purge, job=JOB).phase == "gone"
    kit.close()
