"""Tables of outcomes: a row an event, a column a state, in each cell what comes of it in each of two variants.

                 state_one        state_two          cell: "event first, completion first"
an_event         1/2 2/2          - -                or one word where the order does not matter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

MISSING = "no row of the table says"
ORDERS = ("event first", "completion first")
"""The variants, where nothing else is said: passed on as whether completion comes first."""


def read_table(text: str, variants: tuple[str, str] = ORDERS) -> dict[tuple[str, str, str], str]:
    """(state, event, variant) -> outcome. Columns are separated by `|`. Raises ValueError where a row is not whole."""
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines() if "|" in line]
    table: dict[tuple[str, str, str], str] = {}
    for event, *cells in rows:
        if len(cells) != len(head) - 1:
            raise ValueError(f"{event}: {len(cells)} cells for {len(head) - 1} states")
        for state, cell in zip(head[1:], cells, strict=True):
            outcomes = cell.split()
            for order, outcome in zip(variants, outcomes * 2 if len(outcomes) == 1 else outcomes, strict=True):
                if (state, event, order) in table:
                    raise ValueError(f"{state} and {event} are there twice")
                table[state, event, order] = outcome
    return table


def cells(
    states: Sequence[Callable[..., Any]],
    events: Sequence[Callable[..., Any]],
    table: dict[tuple[str, str, str], str],
    variants: tuple[str, str] = ORDERS,
) -> list[Any]:
    """One parameter a cell: (state, event, whether it is the second variant, outcome). A cell without an outcome fails,
    and so does an outcome without a cell."""
    wanted = {
        (state.__name__, event.__name__, order): (state, event, order == variants[1])
        for state in states
        for event in events
        for order in variants
    }
    spare = {name: (None, None, False) for name in table if name not in wanted}
    return [
        pytest.param(state, event, completes_first, table.get(name, MISSING), id=" ".join(name).replace(" ", "-"))
        for name, (state, event, completes_first) in (wanted | spare).items()
    ]


def print_table(
    states: Sequence[Callable[..., Any]],
    events: Sequence[Callable[..., Any]],
    play: Callable[[Callable[..., Any], Callable[..., Any], bool], str],
) -> None:
    """The table of what comes out now, to be looked at cell by cell before it is believed."""
    print(" " * 20, *(f"| {state.__name__}" for state in states))
    for event in events:
        row = [f"{event.__name__:20}"]
        for state in states:
            outcomes = [play(state, event, completes_first) for completes_first in (False, True)]
            row.append(f"{' '.join(dict.fromkeys(outcomes)):<{len(state.__name__)}}")
        print(" | ".join(row).rstrip())
