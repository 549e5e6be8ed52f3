"""A step of a round: something that happens to a node, after which its promises are looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.torture.round import Round


@dataclass(frozen=True)
class Scenario:
    """One kill or trouble, and what leads to it. `stage` is a barrier, a point at which an engine is caught, or what is
    done."""

    victim: str
    stage: str
    act: Callable[[Round, Scenario], None]

    def play(self, round_: Round) -> None:
        self.act(round_, self)
        round_.look(everything=self.victim == "supervisor")


def scenarios(act: Callable[[Round, Scenario], None], **victims: str) -> list[Scenario]:
    """`stage=victims`, separated by blanks."""
    return [Scenario(victim, stage, act) for stage, several in victims.items() for victim in several.split()]
