"""Pins at the service: who may ask, what is refused and in which words, and what a row says."""

from __future__ import annotations

import msgspec
import pytest

from tests.node.kit import BLOCK_BYTES, BLOCK_TOKENS, GROUP, HEALTHY, HOST_BYTES, RECOVERED, TOOL, Kit, prompt
from tests.node.test_reading_and_writing import store
from tierkv.core.instructions import ForgetPin, PinForgotten, PinRecorded, RecordPin
from tierkv.core.reasons import Reason
from tierkv.node.pinning import Pinning
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Error, ErrorCode, Pin, Pins, PinTier, Shares, Unpin

ID = b"pin-number-00001"


@pytest.fixture
def durable(durable: Kit) -> Kit:
    """With an operator, who has opened no group."""
    durable.join(TOOL, maps_arena=False)
    return durable


def of_kind(kit: Kit, *kinds: type) -> list[object]:
    return [instruction for instruction in kit.instructions() if isinstance(instruction, kinds)]


def test_a_pin_goes_from_the_asking_to_its_record_and_away_again(durable: Kit) -> None:
    keys = store(durable, 1)
    asked = {"pin": ID, "of": GROUP, "keys": keys, "owner": "ann", "seconds": 60.0}
    first = durable.ask(Pin, session=TOOL, **asked).row
    assert (first.phase, first.recorded, first.reason) == ("holds", False, "")
    assert (first.blocks, first.tokens, first.host_bytes) == (1, BLOCK_TOKENS, BLOCK_BYTES)
    assert (first.owner, first.tier, first.until, first.key) == ("ann", "host", durable.now + 60.0, keys[-32:])
    ((told),) = of_kind(durable, RecordPin)
    assert isinstance(told, RecordPin)
    assert told.record.keys == keys
    durable.report(PinRecorded(ID))
    assert durable.ask(Pin, session=TOOL, **asked).row == msgspec.structs.replace(first, recorded=True)
    pins = durable.ask(Pins, session=TOOL)
    assert [row.pin for row in pins.rows] == [ID]
    assert pins.tiers[0].held_bytes == BLOCK_BYTES
    assert pins.tiers[0].cap_bytes == int(HOST_BYTES * 0.1)
    (over,) = durable.ask(Unpin, session=TOOL, pin=ID).rows
    assert over.recorded
    assert len(of_kind(durable, ForgetPin)) == 1
    durable.report(PinForgotten(ID))
    assert durable.ask(Unpin, session=TOOL, pin=ID).rows == ()
    assert durable.ask(Pins, session=TOOL).rows == ()


def test_a_record_that_failed_is_told_with_its_reason(durable: Kit) -> None:
    keys = store(durable, 1)
    durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=keys)
    durable.report(PinRecorded(ID, Reason.DISK_FULL))
    row = durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=keys).row
    assert (row.recorded, row.reason) == (False, "disk_full")


def test_a_prefix_is_named_by_digits_of_its_last_block(durable: Kit) -> None:
    keys = store(durable, 1)
    digits = keys[-32:].hex()[:16]
    assert durable.ask(Pin, session=TOOL, pin=ID, prefix=digits).row.key == keys[-32:]
    assert [row.pin for row in durable.ask(Unpin, session=TOOL, prefix=digits).rows] == [ID]


KEYS = prompt(1)[0]


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({}, "pin", "one of the two"),
        ({"keys": KEYS}, "pin", "one of the two"),
        ({"of": GROUP}, "pin", "one of the two"),
        ({"of": GROUP, "keys": KEYS, "prefix": "ab" * 8}, "pin", "one of the two"),
        ({"of": bytes(32), "keys": KEYS}, "of", "doesn't know the group"),
        ({"of": GROUP, "keys": KEYS * 2}, "keys", "a key comes twice"),
        ({"prefix": "ab" * 8}, "prefix", "no block cached here"),
        ({"of": GROUP, "keys": KEYS, "owner": "a\nb"}, "pin", "can be printed"),
        ({"of": GROUP, "keys": KEYS, "owner": "a" * 65}, "pin", "up to 64"),
        ({"of": GROUP, "keys": prompt(8)[0]}, "tier", "pins may hold"),
    ],
)
def test_what_is_no_pin_is_refused_by_name(durable: Kit, fields: dict[str, object], field: str, problem: str) -> None:
    error = durable.ask(Pin, session=TOOL, pin=ID, **fields)
    assert isinstance(error, Error)
    assert (error.code, error.field) == (ErrorCode.INVALID, field)
    assert problem in error.problem


def test_one_that_would_pass_the_share_is_told_who_has_how_much(durable: Kit) -> None:
    durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=prompt(1)[0], owner="ann")
    error = durable.ask(Pin, session=TOOL, pin=b"pin-number-00002", of=GROUP, keys=prompt(1, start=90)[0])
    assert error.problem == (
        "pins may hold 6.4 KiB of host (pinned_share), and have 4.0 KiB (ann 4.0 KiB); this one wants 4.0 KiB more"
    )


def test_a_node_without_a_directory_pins_in_memory_only() -> None:
    memory = Kit()
    memory.open()
    keys = store(memory, 1)
    error = memory.ask(Pin, pin=ID, of=GROUP, keys=keys, tier=PinTier.NVME)
    assert (error.field, error.problem) == ("tier", "this node has no data directory: pin for host")
    row = memory.ask(Pin, pin=ID, of=GROUP, keys=keys).row
    assert (row.recorded, row.reason) == (False, "nvme_off")


def test_a_node_takes_so_many_pins_and_no_more(durable: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.pins.MAX_PINS", 1)
    durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=KEYS)
    error = durable.ask(Pin, session=TOOL, pin=b"pin-number-00002", of=GROUP, keys=KEYS, owner="bob")
    assert "as many as a node takes" in error.problem
    assert durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=KEYS).row.pin == ID, "asked again, it is no other"


def test_a_node_that_reads_only_changes_no_pin(durable: Kit) -> None:
    pinning = Pinning(durable.core, is_read_only=True, unreadable=lambda: 3)
    asker = Asker(b"", 1, TOOL, "Pin", durable.now)
    for request in (Pin(id=1, session=TOOL, pin=ID, of=GROUP, keys=KEYS), Unpin(id=1, session=TOOL, pin=ID)):
        refused = pinning.handlers[type(request)](request, asker, durable.now)
        assert isinstance(refused, Error)
        assert "read_only" in refused.problem
    assert pinning.handlers[Pins](Pins(id=1), asker, durable.now).unreadable == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("fields", [{}, {"pin": ID, "prefix": "ab" * 8}])
def test_an_unpin_names_one_pin_or_one_prefix(durable: Kit, fields: dict[str, object]) -> None:
    assert durable.ask(Unpin, session=TOOL, **fields).code is ErrorCode.INVALID


def test_a_node_that_stops_still_says_what_is_pinned_and_pins_no_more(durable: Kit) -> None:
    durable.service.begin_shutdown(durable.now)
    assert durable.ask(Pins, session=TOOL).rows == ()
    assert durable.ask(Shares, session=TOOL).rows == ()
    error = durable.ask(Pin, session=TOOL, pin=ID, of=GROUP, keys=KEYS)
    assert error.code is ErrorCode.SHUTTING_DOWN


def test_records_that_no_pin_could_be_read_from_are_a_note_in_the_status(durable: Kit) -> None:
    durable.start_worker(recovers=False)
    durable.report(msgspec.structs.replace(RECOVERED, unreadable_pins=2), HEALTHY)
    assert durable.ask(Pins, session=TOOL).unreadable == 2
    told = durable.survey.status(1, durable.now)
    assert any("2 records of pins" in note for note in told.warnings)
    assert told.state == "ready"
