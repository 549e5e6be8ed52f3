"""Are the keys of a ticket those of its tokens? Checked off the reply path, and before anything becomes visible.

A ticket with wrong keys is not taken away when that is found, for its holder may still be writing to the slots: it is
marked, and refused at its commit.

Work is done in slices, so that nobody's request waits for somebody's long prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, chain_keys, key_at

SLICE_BLOCKS = 256
"""A fraction of a millisecond."""

MAX_WAITING_BYTES = 64 * 2**20
"""Of keys and tokens that wait to be checked; with more, checking goes before reading requests."""

T = TypeVar("T")


class Verdict(Enum):
    RIGHT = auto()
    WRONG = auto()
    PENDING = auto()


@dataclass(slots=True)
class _Check(Generic[T]):
    group: bytes
    block_tokens: int
    keys: bytes
    first: int
    tokens: bytes
    extras: Mapping[int, Sequence[bytes]]
    done: int = 0
    waiting: list[T] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return len(self.keys) + len(self.tokens)

    @property
    def num_blocks(self) -> int:
        return len(self.keys) // KEY_BYTES - self.first

    def run(self, max_blocks: int) -> Verdict:
        start = self.first + self.done
        end = min(self.first + self.num_blocks, start + max_blocks)
        parent = key_at(self.keys, start - 1) if start else self.group
        step = self.block_tokens * TOKEN_BYTES
        tokens = self.tokens[(start - self.first) * step : (end - self.first) * step]
        made = chain_keys(parent, tokens, self.block_tokens, first_block=start, extras=self.extras)
        if made != self.keys[start * KEY_BYTES : end * KEY_BYTES]:
            return Verdict.WRONG
        self.done = end - self.first
        return Verdict.RIGHT if self.done == self.num_blocks else Verdict.PENDING


class KeyChecks(Generic[T]):
    """By grant. `T` is whatever waits for a verdict: the senders of commits."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._checks: OrderedDict[bytes, _Check[T]] = OrderedDict()
        self._wrong: set[bytes] = set()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def is_hurried(self) -> bool:
        """Somebody waits for a verdict."""
        return bool(self._urgent) and any(grant in self._checks for grant in self._urgent)

    @property
    def is_behind(self) -> bool:
        return self._num_bytes > MAX_WAITING_BYTES

    def add(
        self,
        grant: bytes,
        *,
        group: bytes,
        block_tokens: int,
        keys: bytes,
        first: int,
        tokens: bytes,
        extras: Mapping[int, Sequence[bytes]],
    ) -> None:
        if grant in self._checks or grant in self._wrong:
            return
        check: _Check[T] = _Check(group, block_tokens, keys, first, tokens, extras)
        if check.num_blocks > 0:
            self._checks[grant] = check
            self._num_bytes += check.num_bytes

    def verdict(self, grant: bytes) -> Verdict:
        if grant in self._wrong:
            return Verdict.WRONG
        return Verdict.PENDING if grant in self._checks else Verdict.RIGHT

    def settle(self, grant: bytes, waiter: T) -> Verdict:
        """The verdict now if it takes but a slice; else `waiter` comes back from `run`, before others' checks."""
        check = self._checks.get(grant)
        if check is None:
            return self.verdict(grant)
        # Where somebody waits already, the verdict is for all of them together, from `run`.
        verdict = Verdict.PENDING if check.waiting else self._advance(grant, check)
        if verdict is Verdict.PENDING:
            check.waiting.append(waiter)
            self._urgent.append(grant)
        return verdict

    def run(self) -> list[T]:
        """One slice. Who waited for a verdict that is there now."""
        while self._urgent and self._urgent[0] not in self._checks:
            self._urgent.popleft()
        grant = self._urgent[0] if self._urgent else next(iter(self._checks), None)
        if grant is None:
            return []
        check = self._checks[grant]
        return [] if self._advance(grant, check) is Verdict.PENDING else check.waiting

    def forget(self, grant: bytes) -> list[T]:
        """The ticket has ended. Who still waited for a verdict."""
        self._wrong.discard(grant)
        check = self._checks.pop(grant, None)
        if check is None:
            return []
        self._num_bytes -= check.num_bytes
        return check.waiting

    def open_grants(self) -> list[bytes]:
        """Those that are still being checked, or were found wrong and not forgotten."""
        return [*self._checks, *self._wrong]

    def _advance(self, grant: bytes, check: _Check[T]) -> Verdict:
        verdict = check.run(SLICE_BLOCKS)
        if verdict is not Verdict.PENDING:
            del self._checks[grant]
            self._num_bytes -= check.num_bytes
        if verdict is Verdict.WRONG:
            self._wrong.add(grant)
        return verdict
