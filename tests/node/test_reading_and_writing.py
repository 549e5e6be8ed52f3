"""Leases, tickets and seals through the service: answers now, answers later, and answers to who was forgotten."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from tests.node.kit import BLOCK_BYTES, ENGINE, GROUP, TWO_RANKS, Kit, prompt
from tierkv.core.instructions import Read, ReadDone, Write, WriteDone
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.prefill_rates import PrefillSample
from tierkv.core.reasons import Reason
from tierkv.core.value.cost import DOUBLING_TOKENS
from tierkv.node import key_check
from tierkv.node.waiting import GRACE_SECONDS
from tierkv.wire.messages import (
    MAX_PREFILL_SAMPLES,
    Abort,
    Acquire,
    Commit,
    CommitReply,
    Done,
    Error,
    ErrorCode,
    Holder,
    Match,
    Release,
    ReportBad,
    ReportPrefill,
    Reserve,
    Seal,
    SealWait,
    Usage,
)

T1, T2, L1 = b"ticket-number-01", b"ticket-number-02", b"lease--number-01"


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit()
    kit.open()
    yield kit
    kit.close()


def store(kit: Kit, num_blocks: int, grant: bytes = T1, start: int = 0) -> bytes:
    keys, tokens = prompt(num_blocks, start=start)
    kit.ask(Reserve, grant=grant, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert kit.ask(Commit, grant=grant).visible == num_blocks
    return keys


def numbers(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


# ---- storing and loading


def test_what_is_stored_can_be_matched_and_leased(kit: Kit) -> None:
    keys, tokens = prompt(3)
    ticket = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert ticket.states == b"\0\0\0"
    assert kit.ask(Match, group=GROUP, keys=keys).blocks == 0
    assert kit.ask(Commit, grant=T1) == CommitReply(id=4, visible=3, staged=0)
    lease = kit.ask(Acquire, grant=L1, group=GROUP, keys=keys)
    assert (lease.blocks, lease.cached_blocks, lease.nvme_blocks) == (3, 3, 0)
    assert numbers(lease.parts[0].offsets) == numbers(ticket.offsets)
    assert numbers(lease.parts[0].generations) == numbers(ticket.generations)
    assert isinstance(kit.ask(Release, grant=L1), Done)
    assert kit.state.num_leases == 0
    kit.state.check()


def test_repeating_any_of_it_changes_nothing(kit: Kit) -> None:
    keys, tokens = prompt(2)
    first = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    again = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert (first.states, first.offsets) == (again.states, again.offsets)
    assert [kit.ask(Commit, grant=T1).visible for _ in range(2)] == [2, 2]
    leases = [kit.ask(Acquire, grant=L1, group=GROUP, keys=keys) for _ in range(2)]
    assert leases[0].parts == leases[1].parts
    for _ in range(2):
        kit.ask(Release, grant=L1)
    kit.state.check()


def test_an_abort_that_overtakes_its_reserve_still_counts(kit: Kit) -> None:
    keys, tokens = prompt(2)
    kit.ask(Abort, grant=T1)
    reply = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert (reply.states, reply.reason) == (b"\3\3", "grant_ended")
    assert kit.ask(Commit, grant=T1).code == ErrorCode.UNKNOWN_GRANT
    assert kit.state.num_tickets == 0


def test_the_commit_of_nothing_is_an_error_with_a_name(kit: Kit) -> None:
    assert kit.ask(Commit, grant=T1).code == ErrorCode.UNKNOWN_GRANT


def test_tokens_must_be_as_many_as_the_blocks_need(kit: Kit) -> None:
    keys, tokens = prompt(2)
    reply = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens[:-4])
    assert (reply.code, reply.field) == (ErrorCode.INVALID, "tokens")


def test_blocks_reported_bad_are_gone(kit: Kit) -> None:
    keys = store(kit, 3)
    kit.ask(ReportBad, group=GROUP, keys=keys, first_bad=1)
    assert kit.ask(Match, group=GROUP, keys=keys).blocks == 1


def test_what_an_engine_needed_for_its_prompts_is_what_costs_are_reckoned_with(kit: Kit) -> None:
    kit.open()
    samples = (PrefillSample(2_048, 0, 2_048 / 500.0 * (1 + 1_024 / DOUBLING_TOKENS)),) * MAX_PREFILL_SAMPLES
    (before,) = kit.ask(Usage).prefill
    assert (before.tokens_per_second, before.samples) == (12_000.0, 0)
    assert isinstance(kit.ask(ReportPrefill, group=GROUP, samples=samples), Done)
    (row,) = kit.ask(Usage).prefill
    assert row.tokens_per_second == pytest.approx(500.0)
    assert (row.fingerprint, row.samples) == ("ab" * 32, MAX_PREFILL_SAMPLES)
    kit.ask(Acquire, grant=L1, group=GROUP, keys=prompt(50)[0])
    assert kit.state.counts.asked_prefill_seconds == pytest.approx(100 / 500.0, rel=0.01)


@pytest.mark.scenario("B199", then="both ranks' parts are found by the scheduler's keys, each rank its own")
def test_two_ranks_store_and_load_their_own_parts(kit: Kit) -> None:
    group = kit.open(TWO_RANKS).group
    tokens = pack_tokens([1, 2, 3, 4])
    keys = chain_keys(group, tokens, 2)
    second = b"worker-session-2"
    kit.join(second)
    for rank, (grant, holder) in enumerate(((T1, ENGINE), (T2, second))):
        kit.ask(Reserve, grant=grant, group=group, rank=rank, keys=keys, first=0, tokens=tokens, holder=holder)
        kit.ask(Commit, grant=grant)
    lease = kit.ask(Acquire, grant=L1, group=group, keys=keys, holders=(Holder(0, ENGINE), Holder(1, second)))
    assert [part.rank for part in lease.parts] == [0, 1]
    kit.ask(Release, grant=L1, rank=0)
    assert kit.state.num_leases == 1
    kit.service.end_session(second, kit.now)  # killed while it copied: the kernel says that it is gone
    assert kit.state.num_leases == 0
    kit.state.check()


def test_a_stranger_ends_nothing_that_others_copy_from_or_into(kit: Kit) -> None:
    stranger = b"another-session1"
    kit.join(stranger)
    store(kit, 2)
    keys, tokens = prompt(2, start=100)
    kit.ask(Reserve, grant=T2, group=GROUP, keys=keys, first=0, tokens=tokens)
    kit.ask(Acquire, grant=L1, group=GROUP, keys=prompt(2)[0])
    for kind, grant in ((Commit, T2), (Abort, T2), (Release, L1)):
        assert kit.ask(kind, grant=grant, session=stranger).code == ErrorCode.UNKNOWN_GRANT
    assert (kit.state.num_tickets, kit.state.num_leases) == (1, 1)
    assert kit.ask(Commit, grant=T2).visible == 2
    kit.ask(Release, grant=L1)
    assert kit.state.num_leases == 0


def test_nothing_is_granted_to_a_holder_that_has_left(kit: Kit) -> None:
    """Its process lives, so that its end can't be proven, and it will never say that its copies have ended."""
    store(kit, 2)
    left = b"worker-session-2"
    kit.join(left)
    kit.service.close_session(left)
    lease = kit.ask(Acquire, grant=L1, group=GROUP, keys=prompt(2)[0], holders=(Holder(0, left),))
    assert (lease.blocks, lease.reason) == (0, Reason.SESSION_GONE)
    keys, tokens = prompt(2, start=100)
    refused = kit.ask(Reserve, grant=T2, group=GROUP, keys=keys, first=0, tokens=tokens, holder=left)
    assert (refused.offsets, refused.reason) == (b"", Reason.SESSION_GONE)
    assert (kit.state.num_leases, kit.state.num_tickets) == (0, 0)


# ---- keys against tokens


def test_what_a_check_found_of_a_session_that_ended_is_forgotten(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)
    keys, tokens = prompt(3)
    kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    kit.send(Commit, grant=T1)
    kit.ask(Reserve, grant=T2, group=GROUP, keys=prompt(1, start=90)[0], first=0, tokens=prompt(1, start=50)[1])
    while kit.service.num_checks > 1:
        kit.service.check_keys(kit.now)
    kit.service.end_session(ENGINE, kit.now)
    assert kit.service.num_checks == 0
    assert kit.service._writing._checks.open_grants() == []
    kit.state.check()


@pytest.mark.scenario("B251", then="a ticket whose keys are not those of its tokens publishes nothing")
@pytest.mark.scenario("B202", then="what a store says its tokens are must give its keys, or it is refused")
def test_keys_that_are_not_those_of_the_tokens_are_never_published(kit: Kit) -> None:
    keys, tokens = prompt(2)
    other = prompt(2, start=50)[1]
    kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=other)
    for _ in range(2):
        assert kit.ask(Commit, grant=T1).code == ErrorCode.KEY_MISMATCH
    assert kit.ask(Match, group=GROUP, keys=keys).blocks == 0
    assert kit.state.num_tickets == 0
    kit.ask(Reserve, grant=T2, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert kit.ask(Commit, grant=T2).visible == 2
    kit.state.check()


def test_a_mismatch_found_early_does_not_take_the_slots_from_under_the_writer(kit: Kit) -> None:
    keys, _ = prompt(2)
    kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=prompt(2, start=50)[1])
    while kit.service.num_checks:
        kit.service.check_keys(kit.now)
    assert kit.state.num_tickets == 1
    assert kit.ask(Commit, grant=T1).code == ErrorCode.KEY_MISMATCH


def test_the_parent_of_the_first_block_is_part_of_the_check(kit: Kit) -> None:
    keys, tokens = prompt(3)
    forged = bytes(KEY_BYTES) + keys[KEY_BYTES:]
    kit.ask(Reserve, grant=T1, group=GROUP, keys=forged, first=1, tokens=tokens[16 // 2 :])
    assert kit.ask(Commit, grant=T1).code == ErrorCode.KEY_MISMATCH


def test_a_commit_waits_for_a_long_check_and_others_do_not_wait_for_it(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)
    keys, tokens = prompt(4)
    kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    first = kit.send(Commit, grant=T1)
    assert kit.take_replies() == []
    assert kit.ask(Match, group=GROUP, keys=keys).blocks == 0
    second = kit.send(Commit, grant=T1)  # a client that lost patience asks again
    while kit.service.num_checks:
        kit.service.check_keys(kit.now)
    assert [(r.id, r.visible) for r in kit.take_replies()] == [(first, 4), (second, 4)]


def test_an_abort_answers_a_commit_that_still_waits(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "SLICE_BLOCKS", 1)
    keys, tokens = prompt(4)
    kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    commit = kit.send(Commit, grant=T1)
    abort = kit.send(Abort, grant=T1)
    answers = {reply.id: reply for reply in kit.take_replies()}
    assert isinstance(answers[commit], Error)
    assert isinstance(answers[abort], Done)
    assert kit.state.num_tickets == 0


# ---- answers that come later


def flush(kit: Kit) -> None:
    for instruction in kit.instructions():
        if isinstance(instruction, Write):
            kit.report(WriteDone(op=instruction.op, file_bytes=8192, seconds=0.01))


def put_on_nvme_only(kit: Kit, num_blocks: int) -> bytes:
    """Stored, flushed, and pushed out of host memory by others."""
    keys = store(kit, num_blocks)
    kit.ask(Seal, group=GROUP, keys=keys)
    flush(kit)
    for other in range(1, 5):
        filler = store(kit, 4, grant=bytes([other]) * 16, start=1_000 * other)
        kit.ask(Seal, group=GROUP, keys=filler)
        flush(kit)
    assert kit.ask(Match, group=GROUP, keys=keys).host_blocks == 0
    return keys


def test_a_lease_on_what_is_on_nvme_is_answered_when_it_was_read(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    request = durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=1_000)
    repeated = durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=1_000)
    assert durable.take_replies() == []
    (read,) = [i for i in durable.instructions() if isinstance(i, Read)]
    durable.report(ReadDone(op=read.op, valid=2, seconds=0.01, tokens=prompt(2)[1]))
    assert [(r.id, r.blocks, r.nvme_blocks) for r in durable.take_replies()] == [(request, 2, 2), (repeated, 2, 2)]


def test_at_the_deadline_the_answer_is_what_is_there(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    request = durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=500)
    wakeup = durable.service.next_wakeup()
    assert wakeup is not None
    assert wakeup <= durable.now + 0.5
    durable.tick(0.5)
    (reply,) = durable.take_replies()
    assert (reply.id, reply.blocks, reply.cached_blocks, reply.reason) == (request, 0, 2, "deadline")


def test_a_worker_that_died_meanwhile_is_waited_for_until_the_deadline(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=5_000)
    durable.kill_worker()
    assert durable.take_replies() == []
    assert durable.ask(Match, group=GROUP, keys=keys).blocks == 2
    durable.start_worker()
    (read,) = [i for i in durable.instructions() if isinstance(i, Read)]
    durable.report(ReadDone(op=read.op, valid=2, seconds=0.01, tokens=prompt(2)[1]))
    (reply,) = durable.take_replies()
    assert reply.blocks == 2
    durable.state.check()


def test_a_release_answers_who_still_waits_for_that_lease(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    waiting = durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=5_000)
    release = durable.send(Release, grant=L1)
    answers = {reply.id: reply for reply in durable.take_replies()}
    assert (answers[waiting].blocks, answers[waiting].reason) == (0, "grant_ended")
    assert isinstance(answers[release], Done)


def test_who_asked_for_a_holder_that_died_is_answered_past_the_deadline(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    holder = b"worker-session-2"
    durable.join(holder)
    request = durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=500, holders=(Holder(0, holder),))
    durable.service.end_session(holder, durable.now)
    durable.tick(0.5 + GRACE_SECONDS)
    (reply,) = durable.take_replies()
    assert (reply.id, reply.blocks) == (request, 0)
    durable.state.check()


def test_a_session_that_ends_while_it_waits_is_forgotten(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=500)
    durable.service.end_session(ENGINE, durable.now)
    durable.tick(10.0)
    assert durable.take_replies() == []
    durable.state.check()


def test_a_seal_that_waits_for_the_flush_is_answered_by_it(durable: Kit) -> None:
    keys = store(durable, 2)
    request = durable.send(Seal, group=GROUP, keys=keys, wait=SealWait.FLUSHED, deadline_ms=5_000)
    assert durable.take_replies() == []
    flush(durable)
    (reply,) = durable.take_replies()
    assert (reply.id, reply.blocks, reply.flushed_blocks, reply.reason) == (request, 2, 2, "")


def test_a_seal_that_only_seals_is_answered_at_once(durable: Kit) -> None:
    keys = store(durable, 2)
    reply = durable.ask(Seal, group=GROUP, keys=keys)
    assert (reply.blocks, reply.flushed_blocks) == (2, 0)


def test_a_seal_past_its_deadline_says_so(durable: Kit) -> None:
    keys = store(durable, 2)
    durable.send(Seal, group=GROUP, keys=keys, wait=SealWait.FLUSHED, deadline_ms=500)
    durable.tick(0.5)
    (reply,) = durable.take_replies()
    assert (reply.blocks, reply.flushed_blocks, reply.reason) == (2, 0, "deadline")


def test_who_waits_when_the_node_ends_is_told(durable: Kit) -> None:
    keys = put_on_nvme_only(durable, 2)
    durable.send(Acquire, grant=L1, group=GROUP, keys=keys, deadline_ms=5_000)
    durable.service.answer_everybody(durable.now)
    (reply,) = durable.take_replies()
    assert reply.code == ErrorCode.SHUTTING_DOWN


def test_what_one_session_may_hold_is_capped(kit: Kit) -> None:
    small = Kit(session_bytes=2 * BLOCK_BYTES)
    small.open()
    keys, tokens = prompt(3)
    reply = small.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens)
    assert (reply.states, reply.reason) == (b"\0\0\3", "session_cap")
