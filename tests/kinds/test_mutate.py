"""tests/kinds/mutate.py: a mutation is killed only by a test that ran, failed, and passes without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kinds.mutate import Outcome, main, try_all
from tests.kinds.tables import Mutation


def mutation(find: str, replace: str, test: str = "test_twice_is_two") -> Mutation:
    return Mutation(name="m", file="tierkv/x.py", find=find, replace=replace, test=f"tests/test_x.py::{test}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("tierkv", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tierkv/x.py").write_text("def twice(n):\n    return n * 2  # and that is all\n")
    (tmp_path / "tests/test_x.py").write_text(
        "from tierkv.x import twice\n\n\ndef test_twice_is_two():\n    assert twice(1) == 2\n\n\n"
        "def test_never():\n    assert twice(1) == 3\n"
    )
    return tmp_path


@pytest.mark.timeout(300)
def test_only_a_failing_test_kills(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # seconds: runs of pytest
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading plugins, which these need not, is most of a run
    before = (tree / "tierkv/x.py").read_bytes()
    verdicts = try_all(
        [
            mutation("n * 2", "n * 3"),
            mutation("and that is all", "or so"),
            mutation("def twice", "def thrice"),
            mutation("no such text", ""),
            mutation("n * 2", "n * 3", test="test_never"),
        ],
        tree,
    )
    assert [verdict.outcome for verdict in verdicts] == [
        Outcome.KILLED,
        Outcome.SURVIVED,
        Outcome.BROKEN,  # cannot be imported: no test failed
        Outcome.BROKEN,
        Outcome.BROKEN,
    ]
    assert (tree / "tierkv/x.py").read_bytes() == before


def test_a_name_that_nobody_knows_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["F99"])
    assert ended.value.code == 2
    assert "F99" in capsys.readouterr().err
