"""The tables of this folder: scenarios.toml (every id) and F*.toml (one a kind), read strictly."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several outcomes would have been safe; this one was picked, and is the one asserted."""

    scenario: str
    picked: str


class NotApplicable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario about something that doesn't exist yet; with `part`, only that part of it."""

    scenario: str
    waits_for: str
    part: str = ""


class Mutation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of the code that breaks a kind's invariant: `test` must fail with it."""

    name: str
    file: str
    find: str
    replace: str
    test: str


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    title: str
    invariant: str
    enforced_by: list[str]
    """`path: how`, the path relative to the repository."""
    choice: list[Choice] = []
    not_applicable: list[NotApplicable] = []
    mutation: list[Mutation] = []


def read_scenarios(folder: Path = FOLDER) -> dict[str, dict[str, str]]:
    """Kind -> scenario id -> what went wrong."""
    return msgspec.convert(tomllib.loads((folder / "scenarios.toml").read_text()), dict[str, dict[str, str]])


def read_kinds(folder: Path = FOLDER) -> list[Kind]:
    """In the order of their names. Raises ValueError, with the file's name, for a table that is not as it should be."""
    kinds = []
    for path in sorted(folder.glob("F*.toml")):
        try:
            kind = msgspec.convert(tomllib.loads(path.read_text()), Kind)
        except ValueError as problem:  # of tomllib and of msgspec alike
            raise ValueError(f"{path.name}: {problem}") from problem
        if path.stem != kind.kind:
            raise ValueError(f"{path.name} says that it is kind {kind.kind}")
        kinds.append(kind)
    return kinds


@functools.cache
def kind_of_scenario() -> dict[str, str]:
    return {scenario: kind for kind, ids in read_scenarios().items() for scenario in ids}
