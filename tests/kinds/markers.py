"""What covers which scenario: `pytest.mark.scenario(id, then=...)` in tests/ and e2e/, found without importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kinds.tables import ROOT

FOLDERS = ("tests", "e2e")


@dataclass(frozen=True, slots=True)
class Marker:
    """`test` is what pytest takes on its command line; `then` the outcome that it asserts."""

    scenario: str
    then: str
    test: str


class MarkerError(ValueError):
    """A marker that says nothing, or that no test carries."""


def find_markers(root: Path = ROOT) -> list[Marker]:
    """All of them, by file and line. Raises MarkerError."""
    return [
        marker
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("test_*.py"))
        if "pytest.mark.scenario" in (text := path.read_text())
        for marker in markers_of(text, path.relative_to(root).as_posix())
    ]


def names_of_tests(text: str) -> set[str]:
    """The tests of a file as pytest names them behind `::`, without parameters."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):  # TestMachine = Machine.TestCase
            names |= {f"{one.id}::runTest" for one in node.targets if isinstance(one, ast.Name)}
    return names


def markers_of(text: str, path: str) -> list[Marker]:
    tree = ast.parse(text)
    found = list(_of_body(tree.body, path))
    calls = sum(_is_marker(node) for node in ast.walk(tree))
    if calls != len(found):
        raise MarkerError(f"{path}: {calls - len(found)} scenario markers stand where no test carries them")
    return found


def _of_body(body: list[ast.stmt], test: str) -> Iterator[Marker]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith(("test_", "Test")):
                for decorator in node.decorator_list:
                    yield from _of_expression(decorator, f"{test}::{node.name}")
            if isinstance(node, ast.ClassDef):
                yield from _of_body(node.body, f"{test}::{node.name}")
        elif isinstance(node, ast.Assign) and any(
            (isinstance(one, ast.Name) and one.id == "pytestmark")
            or (isinstance(one, ast.Attribute) and one.attr == "pytestmark")
            for one in node.targets
        ):
            yield from _of_expression(node.value, test)


def _of_expression(expression: ast.expr, test: str) -> Iterator[Marker]:
    """Markers of a decorator, those of single parameters (`pytest.param(..., marks=...)`) included."""
    for node in ast.walk(expression):
        if _is_marker(node):
            assert isinstance(node, ast.Call)
            yield _read(node, test)


def _is_marker(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.scenario"


def _read(call: ast.Call, test: str) -> Marker:
    match call:
        case ast.Call(
            args=[ast.Constant(value=str(scenario))],
            keywords=[ast.keyword(arg="then", value=ast.Constant(value=str(then)))],
        ) if then.strip():
            return Marker(scenario, " ".join(then.split()), test)
    raise MarkerError(f"{test}: not pytest.mark.scenario(ID, then=TEXT), both spelled out: {ast.unparse(call)}")
