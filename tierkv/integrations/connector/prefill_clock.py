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

import time
from collections import deque
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, slots=True)
class _Timed:
    number: int
    began: float
    chunks: Sequence[Chunk]
    tokens: int


class PrefillClock:
    """Steps without prompts are only counted: most are, and nobody has to look at a clock for them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._num_begun = self._num_ended = 0
        self._timed: deque[_Timed] = deque()
        self._ended = float("-inf")  # the last one that ended while a timed one was under way

    def begin(self, chunks: Sequence[Chunk] = (), tokens: int = 0) -> None:
        """A step, and what it computes of prompts if it is worth timing; `tokens` in all."""
        self._num_begun += 1
        if self._num_begun - self._num_ended > MOST_STEPS:
            self._num_ended = self._num_begun - 1
            self._timed.clear()
        of_prompts = sum(chunk.tokens for chunk in chunks) if chunks else 0
        if of_prompts >= max(LEAST_TOKENS, LEAST_SHARE * tokens):
            self._timed.append(_Timed(self._num_begun, self._clock(), chunks, tokens))

    def end(self) -> None:
        """Of the oldest step that is under way."""
        if self._num_ended < self._num_begun:
            self._num_ended += 1
            if self._timed:
                self._end_before(self._clock())

    def _end_before(self, now: float) -> None:
        since, self._ended = self._ended, now
        if self._timed[0].number == self._num_ended:
            step = self._timed.popleft()
            _tell(step, now - max(step.began, since))


def _tell(step: _Timed, seconds: float) -> None:
    costs = [prefill_seconds(chunk.tokens, chunk.first_token, 1.0) for chunk in step.chunks]
    of_prompts = sum(chunk.tokens for chunk in step.chunks)
    each = seconds * of_prompts / step.tokens / sum(costs)
    for chunk, cost in zip(step.chunks, costs, strict=True):
        if chunk.group is not None:
            chunk.group.report_prefill(tokens=chunk.tokens, first_token=chunk.first_token, seconds=each * cost)
