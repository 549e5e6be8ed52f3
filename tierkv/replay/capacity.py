"""Capacities as an operator gives them: a size, or a share of what a trace would fill."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tierkv.config.sizes import human_size, parse_size
from tierkv.replay.trace import Trace

_SHARE = re.compile(r"(?P<number>[0-9]{1,3}(\.[0-9]{1,6})?) ?%")


@dataclass(frozen=True, slots=True)
class Capacity:
    """`share` of the bytes of a trace's distinct blocks where it is given, else `num_bytes`."""

    text: str
    num_bytes: int = 0
    share: Fraction | None = None

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """ "3%", "40GiB". Raises ValueError that says what to write."""
        found = _SHARE.fullmatch(text.strip())
        if found is not None:
            share = Fraction(found["number"]) / 100
            if not share:
                raise ValueError(f"{text!r} is nothing; write a share like 3% or a size like 40GiB")
            return cls(f"{found['number']}%", share=share)
        try:
            num_bytes = parse_size(text)
        except ValueError as error:
            raise ValueError(f"{error}, or a share of the trace's blocks like 3%") from None
        if not num_bytes:
            raise ValueError(f"{text!r} is nothing; write a share like 3% or a size like 40GiB")
        return cls(human_size(num_bytes), num_bytes)

    def bytes_of(self, trace: Trace) -> int:
        """Bytes, rounded down to whole blocks where all blocks have one size."""
        num_bytes = self.num_bytes if self.share is None else int(self.share * trace.num_bytes)
        size = trace.block_bytes
        return num_bytes // size * size if size else num_bytes
