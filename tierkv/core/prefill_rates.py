"""How fast engines compute prompts, estimated from what they report: tokens a second at the start of a prompt.

    a sample       tokens, position and seconds of one stretch, solved for the rate (value/cost.py)
    the window     the last WINDOW samples; each weighs as many tokens as it has, and MOST_WEIGHT at most
    the estimate   none before ENOUGH_TOKENS have been weighed, and the setting counts; then the window's weighted
                   median, and from there on each report moves it towards the median, by a factor of MOST_STEP at most
    the price      what orders of eviction rank by: follows the estimate when that has moved by a quarter, since to
                   rank anew at every report would be work for nothing

So an engine that stood still, or whose clock is wrong, changes nothing as long as more than half of what was computed
is told rightly. The last rate is kept however old it is: an engine that isn't heard of is no faster and no slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from tierkv.core.identity import Identity
from tierkv.core.value.cost import prefill_seconds

WINDOW = 128
MOST_WEIGHT = 4_096
ENOUGH_TOKENS = 4 * MOST_WEIGHT
"""At least four samples, so that no single one is half of the first estimate."""
MOST_STEP = 1.5
PRICE_STEP = 1.25
SLOWEST, FASTEST = 0.01, 1e8
"""Tokens a second between which a sample is believed at all."""

MOST_TOKENS = 2**24
MOST_SECONDS = 3_600.0


class PrefillSample(msgspec.Struct, frozen=True):
    """An engine computed `tokens` tokens of a prompt, the first of which is at position `first_token`, in `seconds`."""

    tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    first_token: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    seconds: Annotated[float, Meta(gt=0, le=MOST_SECONDS)]

    @property
    def is_possible(self) -> bool:
        """Whether it is within the limits of its fields, which only a decoder checks."""
        return (
            1 <= self.tokens <= MOST_TOKENS
            and 0 <= self.first_token <= MOST_TOKENS
            and 0 < self.seconds <= MOST_SECONDS
        )

    @property
    def rate(self) -> float:
        """Tokens a second that this would have been at the start of a prompt."""
        return prefill_seconds(self.tokens, self.first_token, 1.0) / self.seconds


class PrefillRate:
    """Of one setup of engines. `tokens_per_second` is the setting until `is_measured`; `priced_tokens_per_second` the
    one that ranks are made with."""

    __slots__ = ("_window", "is_measured", "priced_tokens_per_second", "tokens_per_second")

    def __init__(self, setting: float) -> None:
        self.tokens_per_second = self.priced_tokens_per_second = setting
        self.is_measured = False
        self._window: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # rate, weight

    @property
    def samples(self) -> int:
        """In the window."""
        return len(self._window)

    def report(self, samples: Iterable[PrefillSample]) -> bool:
        """One report of an engine. Whether the price is another one now."""
        for sample in samples:
            if sample.is_possible and SLOWEST <= sample.rate <= FASTEST:
                self._window.append((sample.rate, min(sample.tokens, MOST_WEIGHT)))
        median = self._median()
        if median is None:
            return False
        if self.is_measured:
            before = self.tokens_per_second
            median = min(max(median, before / MOST_STEP), before * MOST_STEP)
        self.tokens_per_second, self.is_measured = median, True
        if self.priced_tokens_per_second / PRICE_STEP <= median <= self.priced_tokens_per_second * PRICE_STEP:
            return False
        self.priced_tokens_per_second = median
        return True

    def _median(self) -> float | None:
        """None: too little is known."""
        total = sum(weight for _, weight in self._window)
        if total < ENOUGH_TOKENS:
            return None
        passed = 0
        for rate, weight in sorted(self._window):
            passed += weight
            if 2 * passed >= total:
                return rate
        raise AssertionError("half of a sum is passed before its end")


class PrefillRates:
    """One rate for all groups that one setup of engines serves: the same weights, computed in the same layout, on as
    many devices. Tenants and adapters of a model share it, or each would have to be measured anew."""

    def __init__(self, setting: float) -> None:
        self._setting = setting
        self._rates: dict[bytes, PrefillRate] = {}

    def of(self, identity: Identity) -> PrefillRate:
        """The same object each time, and kept up to date."""
        key = msgspec.structs.replace(identity, adapter="", salt="", epoch="").group_key()
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = PrefillRate(self._setting)
        return rate
