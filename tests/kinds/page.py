"""`python -m tests.kinds.page` prints docs/faults.md, made from the tables here and the markers of the tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.kinds.markers import Marker, find_markers
from tests.kinds.tables import FOLDER, Kind, NotApplicable, read_kinds, read_scenarios

Scenarios = Mapping[str, Mapping[str, str]]

_HEAD = """\
# Faults, and what holds against them

What has gone wrong in caches like this one, in kinds. For each kind: the invariant that rules it out, the code that
enforces it, the tests that show it, and mutations, which are changes of the code that break the invariant and that a
test must catch.

A test is run by its name, a mutation by its name or its kind:

```
scripts/test --fast tests/core/test_keys.py       # needs nothing but the repository
scripts/test --e2e -k kill                        # whole processes
scripts/mutate F04                                # breaks a copy of the code; fails when no test notices
scripts/mutate --list
```

Made from the tables in tests/kinds/ and the `scenario` markers of the tests by `python -m tests.kinds.page`.
"""


def page() -> str:
    return "\n".join(_page(read_scenarios(), read_kinds(), find_markers()))


def _page(scenarios: Scenarios, kinds: Sequence[Kind], markers: Sequence[Marker]) -> Iterator[str]:
    marked: dict[str, list[Marker]] = defaultdict(list)
    for marker in markers:
        marked[marker.scenario].append(marker)
    yield _HEAD
    yield from _totals(scenarios, kinds, marked)
    verdicts = FOLDER / "verdicts.md"
    if verdicts.exists():
        yield verdicts.read_text()
    for kind in kinds:
        yield from _kind(kind, scenarios[kind.kind], marked)


def _totals(scenarios: Scenarios, kinds: Sequence[Kind], marked: Mapping[str, Sequence[Marker]]) -> Iterator[str]:
    rows = []
    for kind in kinds:
        ids = scenarios[kind.kind]
        tests = {marker.test for one in ids for marker in marked.get(one, ())}
        waiting = sum(one not in marked for one in ids)
        rows.append((kind, len(ids) - waiting, waiting, len(tests), len(kind.mutation)))
    covered, waiting = sum(row[1] for row in rows), sum(row[2] for row in rows)
    tests = {marker.test for ones in marked.values() for marker in ones}
    yield "## In numbers\n"
    partly = sum(bool(one.part) for kind in kinds for one in kind.not_applicable)
    yield (
        f"{covered + waiting} scenarios in {len(rows)} kinds: {covered} are covered by {len(tests)} tests ({partly} "
        f"of them but for a part that waits), {waiting} wait for parts of tierkv that don't exist yet. "
        f"{sum(row[4] for row in rows)} mutations, each caught.\n"
    )
    yield "| kind | | scenarios covered | waiting | tests | mutations |"
    yield "|---|---|---|---|---|---|"
    for kind, *numbers in rows:
        yield f"| [{kind.kind}](#{kind.kind.lower()}) | {kind.title} | " + " | ".join(map(str, numbers)) + " |"
    yield ""


def _kind(kind: Kind, scenarios: Mapping[str, str], marked: Mapping[str, Sequence[Marker]]) -> Iterator[str]:
    yield f'<a id="{kind.kind.lower()}"></a>\n'
    yield f"## {kind.kind}. {kind.title}\n"
    yield f"{kind.invariant}\n"
    yield "Enforced by\n"
    for path, _, how in (one.partition(": ") for one in kind.enforced_by):
        yield f"* [{path}](../{path}): {how}"
    covered = {one: what for one, what in scenarios.items() if one in marked}
    if covered:
        yield "\n| scenario | what went wrong elsewhere | what is asserted here | test |"
        yield "|---|---|---|---|"
    for scenario, what in covered.items():
        for number, marker in enumerate(marked[scenario]):
            first = f"{scenario} | {what}" if number == 0 else " | "
            yield f"| {first} | {_cell(marker.then)} | {_link(marker.test)} |"
    yield from _list("Among several safe outcomes", [f"{one.scenario}: {one.picked}" for one in kind.choice])
    waiting = [_waiting(one, scenarios[one.scenario]) for one in kind.not_applicable]
    yield from _list("Waiting for a part that doesn't exist yet", waiting)
    if kind.mutation:
        yield "\n| mutation | of | caught by |"
        yield "|---|---|---|"
    for mutation in kind.mutation:
        file = f"[{mutation.file}](../{mutation.file})"
        yield f"| {_cell(mutation.name)} | {file} | {_link(mutation.test)} |"
    yield ""


def _waiting(one: NotApplicable, what: str) -> str:
    return f"{one.scenario} ({what}{f'; only this: {one.part}' if one.part else ''}): {one.waits_for}"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"\n{title}:\n"
        yield from (f"* {' '.join(line.split())}" for line in lines)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{_cell(name or path)}](../{path})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
