"""Pins are asked for, and ended, until their records are on disk or off it: one story for both clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from tests.wire.samples import PIN
from tierkv.client import operators
from tierkv.client.operators import RECORD_SECONDS, RECORD_WAIT_SECONDS, PinWish, pin_until_settled, unpin_until_settled
from tierkv.client.steps import Pause, Verb
from tierkv.client.verbs import Verbs
from tierkv.wire.messages import PinRow

WISH = PinWish(pin=b"p" * 16)


@dataclass
class Node:
    """What it answers, one after the other, and the clock that pauses move on."""

    answers: Iterator[Any]
    now_is: float = 0.0
    asked: list[Any] = field(default_factory=list)

    def now(self) -> float:
        return self.now_is

    def step(self, _verbs: object, *what: object) -> Verb[Any]:
        self.asked.append(what)
        return next(self.answers)
        yield  # a generator, as the real one

    def run(self, verb: Verb[Any]) -> Any:
        try:
            step = next(verb)
            while True:
                assert step == Pause(RECORD_SECONDS)
                self.now_is += step.seconds
                step = verb.send(None)
        except StopIteration as end:
            return end.value


def row(pin: int = 0, *, recorded: bool = False, reason: str = "") -> PinRow:
    return msgspec.structs.replace(PIN, pin=bytes([pin]) * 16, recorded=recorded, reason=reason)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    def ask(verb: str, *answers: Any, forever: Any = None) -> tuple[Any, Node]:
        def all_answers() -> Iterator[Any]:
            yield from answers
            while forever is not None:
                yield forever

        node = Node(all_answers())
        monkeypatch.setattr(operators, f"{verb}_step", node.step)
        verbs = cast("Verbs", node)
        if verb == "pin":
            return node.run(pin_until_settled(verbs, WISH)), node
        return node.run(unpin_until_settled(verbs, None, "ab" * 8)), node

    return ask


def test_a_pin_is_asked_for_until_it_is_on_disk_or_can_not_be(ask: Any) -> None:
    found, node = ask("pin", row(), row(), row(recorded=True))
    assert (found, node.asked) == (row(recorded=True), 3 * [(WISH,)])
    found, node = ask("pin", row(), row(reason="disk_full"))
    assert found.reason == "disk_full"


def test_a_record_that_is_not_written_is_waited_for_so_long_and_no_longer(ask: Any) -> None:
    found, node = ask("pin", forever=row())
    assert found == row()
    assert RECORD_WAIT_SECONDS <= node.now_is < RECORD_WAIT_SECONDS + 2 * RECORD_SECONDS


def test_of_pins_that_are_ended_only_those_are_asked_about_again_whose_records_are_there(ask: Any) -> None:
    first = (row(1, recorded=True), row(2), row(3, recorded=True, reason="io_error"))
    found, node = ask("unpin", first, (row(1, recorded=True),), ())
    assert node.asked == [(None, "ab" * 8), (row(1).pin, None), (row(1).pin, None)]
    assert found == [row(1), row(2), row(3, recorded=True, reason="io_error")]
