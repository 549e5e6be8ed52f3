"""What a node says about what room is worth. tierkv/core/live_sizing.py makes it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Gain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What room of `need_bytes` finds, beyond what less room does: tokens, the prefill that they spare, and bytes."""

    need_bytes: int
    tokens: float
    seconds: float
    num_bytes: float


class MoreGain(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What `more_bytes` of a tier, beyond what it has, would have kept of what was evicted and asked for again."""

    tier: str
    more_bytes: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """Of what was asked for from `since` to `until`.

    The sample began at `sample_began`; it has `samples` of all blocks, `rate` of them, that together take `seen_bytes`
    of host memory, and saw `sampled_uses`. `first_tokens` of those asked for were asked for the first time since then:
    no room would have them. `file_factor`: bytes of files for one byte of host memory. `gains` are an estimate.

    What the node did: tokens hit by tier, seconds of prefill that this saved, tokens and seconds of what was evicted
    and asked for again. `more_gains`: what more room would have kept of that."""

    since: float
    until: float
    requests: int
    asked_tokens: int
    asked_seconds: float
    sample_began: float
    samples: int
    sampled_uses: int
    rate: float
    seen_bytes: int
    file_factor: float
    first_tokens: float
    gains: tuple[Gain, ...]
    hit_tokens: dict[str, int]
    saved_seconds: float
    regretted_tokens: int
    regretted_seconds: float
    more_gains: tuple[MoreGain, ...]
