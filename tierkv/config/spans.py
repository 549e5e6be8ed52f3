"""Spans of time in words, as command lines take them: "90s", "30m", "24h", "7d"."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_SPAN = re.compile(r"(?P<number>[0-9]{1,10}(\.[0-9]{1,6})?) ?(?P<unit>[a-z]*)")
_HOW_TO_WRITE_SPANS = 'write a span of time like "90s", "30m", "24h" or "7d"'


def parse_span(text: str) -> float:
    """Seconds of "90s", "1.5 h" or "7d". A number without a unit is refused: 24 what? Raises ValueError that says what
    to write."""
    found = _SPAN.fullmatch(text.strip())
    if found is None or found["unit"] not in _UNITS:
        raise ValueError(f"{text!r} isn't a span of time; {_HOW_TO_WRITE_SPANS}")
    seconds = float(found["number"]) * _UNITS[found["unit"]]
    if not seconds:
        raise ValueError(f"{text!r} is no time at all; {_HOW_TO_WRITE_SPANS}")
    return seconds
