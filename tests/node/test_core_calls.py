from __future__ import annotations

import pytest

from tests.node.kit import GROUP, Kit
from tests.node.test_reading_and_writing import store
from tierkv.core.grants import NeverHit
from tierkv.core.instructions import Write
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, WireError
from tierkv.node.core_calls import CoreFailed
from tierkv.wire.messages import ErrorCode, Match, Seal, SealWait


def test_a_broken_invariant_is_not_lived_with(durable: Kit) -> None:
    def break_it() -> None:
        raise BrokenInvariant("a slot is freed twice")

    with pytest.raises(CoreFailed, match="freed twice"):
        durable.core.look(break_it)


def test_an_extent_too_large_to_be_described_is_not_written_and_stays_in_memory(
    durable: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = durable.mover.send

    def refuse_writes(instruction: object) -> None:
        if isinstance(instruction, Write):
            raise WireError(ErrorCode.TOO_LARGE, "a frame of 99 bytes")
        send(instruction)  # type: ignore[arg-type]

    monkeypatch.setattr(durable.mover, "send", refuse_writes)
    keys = store(durable, 2)
    durable.send(Seal, group=GROUP, keys=keys, wait=SealWait.FLUSHED)
    (reply,) = durable.take_replies()
    assert (reply.blocks, reply.flushed_blocks) == (2, 0)
    assert durable.state.counts.dropped_writes[Reason.LARGER_THAN_TIER] == 1
    assert durable.ask(Match, group=GROUP, keys=keys).host_blocks == 2
    assert durable.replaced == []
    durable.state.check()


def test_a_worker_that_reads_nothing_any_more_is_replaced_and_told_everything_again(
    durable: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(durable, 2)
    with monkeypatch.context() as patch:
        assert durable.mover._channel is not None
        patch.setattr(durable.mover._channel, "_max_buffered_bytes", -1)
        patch.setattr(durable.mover._channel, "flush", lambda: None)
        durable.ask(Seal, group=GROUP, keys=keys)
    assert len(durable.replaced) == 1
    assert not durable.mover.is_attached
    durable.kill_worker()
    durable.start_worker()
    assert [type(i) for i in durable.instructions()].count(Write) == 1
    durable.state.check()


def test_writes_that_will_not_happen_are_counted_in_bytes(durable: Kit) -> None:
    store(durable, 2)
    durable.kill_worker()
    durable.service.begin_shutdown(durable.now)
    durable.service.drop_dirty(durable.now)
    assert (durable.core.dropped_extents, durable.core.dropped_bytes) == (1, 2 * 4096)


def test_a_group_that_is_written_and_never_read_is_warned_of(durable: Kit, caplog: pytest.LogCaptureFixture) -> None:
    durable.core.do(durable.now, lambda: [NeverHit(group=GROUP, written_bytes=12_345)])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "12345 bytes" in warning
    assert GROUP.hex() in warning
