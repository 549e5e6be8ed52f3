"""What a round does when all that was flushed is gone."""

from __future__ import annotations

import random

import pytest

from tierkv.torture.round import Round


def test_where_nothing_flushed_is_left_something_is_flushed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Round.__new__(Round)  # without a node
    round_.random, round_.claims = random.Random(1), {}
    done: list[str] = []
    monkeypatch.setattr(round_, "until_flushed", lambda: done.append("flushed"))
    monkeypatch.setattr(round_, "take_events", lambda: round_.claim({("plain", 1_000): 3}))
    assert round_.flushed() == {"kind": "plain", "prompt": 1_000, "blocks": 3}
    assert round_.flushed()["prompt"] == 1_000
    assert done == ["flushed"]
