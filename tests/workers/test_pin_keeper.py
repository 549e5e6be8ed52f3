"""A worker's part of pins: their records, and what a start tells of them."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec

from tests.faults.system_calls import inject
from tests.storage.samples import Sample
from tests.storage.test_pin_record import record
from tests.workers.desk import Desk
from tierkv.core.instructions import (
    ForgetPin,
    GroupFound,
    PinForgotten,
    PinFound,
    PinRecorded,
    RecordPin,
    Recovered,
)
from tierkv.core.reasons import Reason


def test_a_start_tells_of_the_pins_before_it_tells_of_any_group(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.store(Sample(), 1)
        desk.send(RecordPin(record(2)), RecordPin(record(1)))
        desk.wait(lambda report: report == PinRecorded(record(1).pin))
    (tmp_path / "data" / "pins" / ("ab" * 16)).write_bytes(b"damaged")
    with Desk(tmp_path / "data") as desk:
        assert desk.wait_type(Recovered).unreadable_pins == 1
        kinds = [type(report) for report in desk.reports]
        assert kinds.index(PinFound) < kinds.index(GroupFound)
        assert [one.record for one in desk.reports if isinstance(one, PinFound)] == [record(1), record(2)]
        desk.send(ForgetPin(record(1).pin))
        assert desk.wait_type(PinForgotten) == PinForgotten(record(1).pin)
    with Desk(tmp_path / "data") as desk:
        desk.wait_type(Recovered)
        assert [one.record for one in desk.reports if isinstance(one, PinFound)] == [record(2)]


def test_what_the_disk_does_not_take_is_told_with_its_reason(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.wait_type(Recovered)
        with inject(errno.ENOSPC, "write", times=10):
            desk.send(RecordPin(record()))
            assert desk.wait_type(PinRecorded).reason == Reason.DISK_FULL
        desk.send(RecordPin(record(2)))
        desk.wait(lambda report: report == PinRecorded(record(2).pin))
        with inject(errno.EIO, "unlink", times=1, when=lambda args, kwargs: args[0] == record(2).pin.hex()):
            desk.send(ForgetPin(record(2).pin))
            assert desk.wait_type(PinForgotten).reason == Reason.IO_ERROR


def test_what_is_told_travels_as_it_is() -> None:
    for message in (RecordPin(record(until=9.5, purged=8.5)), ForgetPin(b"p" * 16), PinFound(record())):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
