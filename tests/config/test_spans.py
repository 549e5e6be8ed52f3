from __future__ import annotations

import pytest

from tierkv.config.spans import parse_span


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1_800), ("24h", 86_400), ("7d", 604_800), ("1.5 h", 5_400), (" 2d ", 172_800)],
)
def test_a_span_is_a_number_and_a_unit(text, seconds):
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["24", "", "h", "-1h", "1w", "1H", "nan h", "0s", "1h30m", "1e3s"])
def test_what_could_be_meant_in_two_ways_is_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match="24h"):
        parse_span(text)
