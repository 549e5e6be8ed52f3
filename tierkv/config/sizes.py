"""Sizes in words: strict to read, lossless to write.

"4GiB" and "4 GiB" are 4 * 1024**3 bytes, "4GB" is 4 * 1000**3. A unit that doesn't exist, a sign, "nan" or a fraction
of a byte is an error that says what to write: a size that was guessed is a full disk.
"""

from __future__ import annotations

import re
from fractions import Fraction

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"(?P<number>[0-9]{1,20}(\.[0-9]{1,20})?) ?(?P<unit>[A-Za-z]*)")
_HOW_TO_WRITE_SIZES = 'write a size like "512MiB", "4GiB" or "10GB", or whole bytes'


def parse_size(value: object) -> int:
    """Bytes of "4GiB", "512 MiB", "1.5TB", "4096" or 4096. Raises ValueError that says what to write."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; {_HOW_TO_WRITE_SIZES}")
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} isn't a size; {_HOW_TO_WRITE_SIZES}")
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        what = "is negative" if value.strip().startswith("-") else "isn't a size"
        raise ValueError(f"{value!r} {what}; {_HOW_TO_WRITE_SIZES}")
    unit = found["unit"] or "B"
    if unit not in _UNITS:
        raise ValueError(f"{value!r} has the unknown unit {unit!r}{_nearest_unit(unit)}; {_HOW_TO_WRITE_SIZES}")
    num_bytes = Fraction(found["number"]) * _UNITS[unit]
    if num_bytes.denominator != 1:
        raise ValueError(f"{value!r} isn't a whole number of bytes; {_HOW_TO_WRITE_SIZES}")
    return int(num_bytes)


def format_size(num_bytes: int) -> str:
    """As `parse_size` reads it, without loss: the largest binary unit that divides it, else bytes."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def human_size(num_bytes: int) -> str:
    """For people: one decimal, the largest binary unit that leaves a number of at least 1. "23.5 GiB", "512 B"."""
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def _nearest_unit(unit: str) -> str:
    close = [known for known in _UNITS if known.lower() == unit.lower()]
    close += [known for known in (f"{unit.upper()}iB", f"{unit.upper()}B") if known in _UNITS]
    return f" (do you mean {' or '.join(close)}?)" if close else ""
