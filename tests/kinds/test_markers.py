"""tests/kinds/markers.py: markers are read from the text of a test file, and one that nobody carries is an error."""

from __future__ import annotations

import pytest

from tests.kinds.markers import Marker, MarkerError, markers_of, names_of_tests

HEAD = "import pytest\n"
MARK = 'pytest.mark.scenario("B1", then="it is so")'


@pytest.mark.parametrize(
    ("text", "test"),
    [
        (f"@{MARK}\ndef test_one(): ...", "t.py::test_one"),
        (f"@{MARK}\nasync def test_one(): ...", "t.py::test_one"),
        (f"@{MARK}\nclass TestIt:\n    def test_one(self): ...", "t.py::TestIt"),
        (f"class TestIt:\n    @{MARK}\n    def test_one(self): ...", "t.py::TestIt::test_one"),
        (f'@pytest.mark.parametrize("n", [pytest.param(1, marks={MARK})])\ndef test_one(n): ...', "t.py::test_one"),
        (f"pytestmark = [{MARK}]", "t.py"),
        (f"TestIt = Machine.TestCase\nTestIt.pytestmark = [{MARK}]", "t.py"),
    ],
)
def test_a_marker_belongs_to_the_test_that_carries_it(text: str, test: str) -> None:
    assert markers_of(HEAD + text, "t.py") == [Marker("B1", "it is so", test)]


def test_a_text_over_several_lines_is_one_line() -> None:
    text = '@pytest.mark.scenario(\n    "B1",\n    then="it is "\n    "  so",\n)\ndef test_one(): ...'
    assert markers_of(HEAD + text, "t.py") == [Marker("B1", "it is so", "t.py::test_one")]


@pytest.mark.parametrize(
    "text",
    [
        f"@{MARK}\ndef check(): ...",
        f"x = {MARK}",
        '@pytest.mark.scenario("B1")\ndef test_one(): ...',
        '@pytest.mark.scenario("B1", then="")\ndef test_one(): ...',
        '@pytest.mark.scenario(B1, then="it is so")\ndef test_one(): ...',
    ],
)
def test_a_marker_that_says_nothing_or_that_nobody_carries_is_an_error(text: str) -> None:
    with pytest.raises(MarkerError):
        markers_of(HEAD + text, "t.py")


def test_the_tests_of_a_file_are_named_as_pytest_names_them() -> None:
    text = "def test_a(): ...\nclass TestB:\n    def test_c(self): ...\nTestD = Machine.TestCase"
    assert names_of_tests(text) == {"test_a", "TestB::test_c", "TestD::runTest"}
