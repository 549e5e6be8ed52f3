"""How long computing prompts takes an engine, from its steps.

    begin        the step is handed to the engine's workers, with the chunks of prompts that it computes
    end          its output is there; steps end in the order in which they began

A step's time is from its begin, or from the end of the step before where that is later: an engine that plans ahead
begins a step while another is still computed.

A step computes chunks of prompts and a token each of answers in one pass, in which every token costs about the same. So
the prompts' part of its time is their part of its tokens, and it is divided among them by what each should cost at its
position. A step that has few tokens of prompts, or a lot of answers, tells more of the engine's overhead and of reading
KV than of computing, and is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.client import Group
from tierkv.core.value.cost import prefill_seconds

LEAST_TOKENS = 256
"""Of prompts, in a step that counts."""
LEAST_SHARE = 0.75
"""They are at least so much of all its tokens."""
CHUNK_TOKENS = 16
"""What has fewer in a step is an answer: a token, or a few that were guessed."""
MOST_STEPS = 16
"""That are under way at once. More have been given up without an output."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Of one prompt, in one step. Without a group it takes its part of the time and isn't told of."""

    group: Group | None
    first_token: int
    tokens: int


class PrefillClock:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, Sequence[Chunk], int]] = deque()
        self._ended = float("-inf")

    def begin(self, chunks: Sequence[Chunk], tokens: int, now: float) -> None:
        """A step of so many `tokens` in all."""
        if len(self._steps) == MOST_STEPS:
            self._steps.clear()
        self._steps.append((now, chunks, tokens))

    def end(self, now: float) -> None:
        """Of the oldest step that is under way."""
        if not self._steps:
            return
        began, chunks, tokens = self._steps.popleft()
        seconds, self._ended = now - max(began, self._ended), now
        if not chunks:
            return  # as in most steps
        of_prompts = sum(chunk.tokens for chunk in chunks)
        if of_prompts < max(LEAST_TOKENS, LEAST_SHARE * tokens):
            return
        costs = [prefill_seconds(chunk.tokens, chunk.first_token, 1.0) for chunk in chunks]
        each = seconds * of_prompts / tokens / sum(costs)
        for chunk, cost in zip(chunks, costs, strict=True):
            if chunk.group is not None:
                chunk.group.report_prefill(tokens=chunk.tokens, first_token=chunk.first_token, seconds=each * cost)
