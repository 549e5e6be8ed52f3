from __future__ import annotations

import pytest

from tests.cli.conftest import tier, usage_row
from tierkv_cli.output import ago, bar, duration, percent, plain


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (41.9, "41 s"), (60, "1 m 0 s"), (3_725, "1 h 2 m"), (90_000, "1 d 1 h"), (-5, "0 s")],
)
def test_a_duration_has_its_two_largest_units(seconds, words):
    assert duration(seconds) == words


def test_a_time_that_never_was_is_never():
    assert ago(0.0) == "never"
    assert ago(100.0, now=141.0) == "41 s ago"


def test_a_bar_is_never_longer_than_itself():
    assert bar(1, 2, 4) == "##.."
    assert bar(9, 2, 4) == "####"
    assert bar(0, 0, 4) == "...."


def test_a_share_of_nothing_is_not_a_number():
    assert percent(1, 0) == "-"
    assert percent(1, 8) == "12.5 %"


def test_messages_become_plain_objects_with_hex_for_bytes():
    found = plain({"rows": (usage_row(group=b"\xab" * 32),), "tier": tier("host")})
    assert found["rows"][0]["group"] == "ab" * 32
    assert found["tier"]["tier"] == "host"
