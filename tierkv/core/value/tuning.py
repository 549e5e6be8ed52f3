"""The numbers that the density order and its estimate are tuned by, in one place, for whoever wants to fit them again.

They come from simulations on the traces of docs/replay.md: a handful of runs on an hour of chat, one of coding agents
and one built of public data sets, checked on other draws of the agents' sessions. A study sets them with
`tierkv replay --set name=value`. They are no settings of a node: none of them is worth an operator's evening, and what
is learnt from the node's own requests does more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Raises ValueError for a number that makes no sense."""

    suffix_tokens: float = 1_024.0
    """Scale of the edges between kinds of blocks never hit: 1, 7, 31 and 127 times this many tokens of new suffix."""

    gap_seconds: float = 15.0
    """Scale of the edges between kinds of blocks hit: 3, 15, 63 and 255 times this long between the last two uses."""

    shrinkage_units: float = 300.0
    """So much data (units of 512 tokens) weighs as much as the estimate of the larger set that it is drawn towards."""

    own_share: float = 0.6
    """Exponent of the kind's own index in what is used; that of all kinds together has the rest. 1: kinds alone."""

    youngest_advantage: float = 1.5
    """The rank of the youngest of a kind is multiplied by this, so that it goes only when it is the cheapest by far."""

    least_share: float = 0.01
    """Of the exposures that have to have ended in a use. Of fewer nothing is learnt but that least is known of what
    waits longest, and for that reason nothing new would be taken: until then the least recently used goes."""

    memory_requests: float = 2_000.0
    """Counts have faded to 1/e after so many requests, or after `memory_units` of uses, whichever takes longer: small
    prompts make few units, and the estimate needs some thousand."""

    memory_units: float = 10_000.0

    learn_requests: int = 250
    """The index is computed again after so many requests, or `learn_seconds`: a few milliseconds each time."""

    learn_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in names():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} has to be more than 0")
        for name in ("own_share", "least_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share, at most 1")

    def with_text(self, assignment: str) -> Tuning:
        """With what "name=value" says. Raises ValueError in words."""
        name, _, text = (part.strip() for part in assignment.partition("="))
        if name not in names():
            raise ValueError(f"{name!r} is none of {', '.join(names())}")
        kind = type(getattr(self, name))
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name} needs {what} after '=', not {text!r}") from None
        return replace(self, **{name: value})


def names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Tuning))


AS_MEASURED = Tuning()
"""The values that docs/replay.md has figures of."""
