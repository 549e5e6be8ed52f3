"""May blocks of these weights be stored with loss? Only where an eval has passed for them, and for their adapter.

What was evaluated is told once, at the start of a front; until then, and for all that nobody has evaluated, no.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tierkv.core.identity import Identity
from tierkv.core.reasons import Reason

RAW = ""
"""The codec of blocks that are stored as they are, as `Layout.codec` says it."""

CODECS = {"raw": RAW, "fp8": "fp8_e4m3"}
"""What the setting `codec` may say, and what it is in a layout."""

MAX_PROBLEM = 400
"""Characters."""

NEVER_EVALUATED = "no eval has been run for these weights and this adapter; `tierkv eval` does it"


class JudgedModel(msgspec.Struct, frozen=True, array_like=True):
    """What an eval has said about one codec for one fingerprint of weights and one of an adapter, empty for none.
    `problem` empty: blocks may be stored with it. Else why not, in words."""

    weights: str
    adapter: str
    codec: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec for new groups of a model, RAW for none. With `reason` another one was wanted; `problem` says more."""

    codec: str = RAW
    reason: Reason | None = None
    problem: str = ""


class CodecGate:
    """`codec` is the one that the node would use, RAW for none."""

    def __init__(self, codec: str = RAW) -> None:
        self.codec = codec
        self._problems: dict[tuple[str, str, str], str] = {}

    def learn(self, judged: Iterable[JudgedModel]) -> None:
        for one in judged:
            self._problems[one.weights, one.adapter, one.codec] = one.problem

    def choose(self, weights: str, adapter: str) -> CodecChoice:
        if self.codec == RAW:
            return CodecChoice()
        if problem := self._problem(weights, adapter, self.codec):
            return CodecChoice(RAW, Reason.NO_VERDICT, problem)
        return CodecChoice(self.codec)

    def why_refused(self, identity: Identity) -> str:
        """Why a group of this identity can't be opened here, in words; empty when it can."""
        codec = identity.layout.codec
        if codec == RAW:
            return ""
        if codec != self.codec:
            used = f"with the codec {self.codec}" if self.codec else "as they are (codec = raw)"
            return f"this node stores blocks {used}, not with the codec {codec[:80]!r}"
        return self._problem(identity.weights, identity.adapter, codec)

    def _problem(self, weights: str, adapter: str, codec: str) -> str:
        return self._problems.get((weights, adapter, codec), NEVER_EVALUATED)
