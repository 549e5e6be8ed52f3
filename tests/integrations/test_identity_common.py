from __future__ import annotations

import dataclasses
import enum
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv.errors import IdentityError
from tierkv.integrations.identity_common import digest_memory, digest_settings
from tierkv.storage.directory import DataDirectory

pytestmark = pytest.mark.engine

NOTHING_IGNORED: frozenset[str] = frozenset()


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass
class Place:
    x: int
    y: int = 0


VALUES: list[Any] = [
    None,
    1,
    1.0,
    True,
    "1",
    Level.LOW,
    Colour.RED,
    Colour.BLUE,
    "red",
    Point(1),
    Point(1, 2),
    Place(1),
    {"x": 1, "y": 0},
    [1],
    {1},
    [[1]],
    torch.float16,
    "torch.float16",
]


def test_no_two_values_look_alike() -> None:
    digests = [digest_settings({"setting": value}, NOTHING_IGNORED) for value in VALUES]
    for (one, left), (other, right) in itertools.combinations(zip(VALUES, digests, strict=True), 2):
        assert left != right, f"{one!r} and {other!r}"


def test_records_are_looked_into() -> None:
    def digest(value: Any) -> str:
        return digest_settings({"setting": value}, NOTHING_IGNORED)

    assert digest([Point(1, 2)]) == digest([Point(1, 2)])
    assert digest({"a": {"b": Point(1, 2)}}) != digest({"a": {"b": Point(1, 3)}})


def test_a_value_that_can_not_be_told_apart_is_named_with_its_place() -> None:
    with pytest.raises(IdentityError, match=r"config\.setting\.y holds a object"):
        digest_settings({"setting": Point(1, object())}, NOTHING_IGNORED)  # type: ignore[arg-type]


def test_a_class_is_no_record() -> None:
    with pytest.raises(IdentityError, match=r"config\.setting holds a type"):
        digest_settings({"setting": Point}, NOTHING_IGNORED)


def test_what_does_not_matter_is_left_out() -> None:
    assert digest_settings({"a": 1, "b": object()}, {"b"}) == digest_settings({"a": 1}, NOTHING_IGNORED)


def test_digests_are_remembered_where_there_is_a_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with digest_memory(None) as memory:
        assert memory is None
    with digest_memory(tmp_path / "nowhere") as memory:
        assert memory is None
    DataDirectory.open(tmp_path / "data", create=True, writable=True).close()
    with digest_memory(tmp_path / "data") as memory:
        assert memory is not None
    monkeypatch.setenv("TIERKV_DATA_DIR", str(tmp_path / "data"))
    with digest_memory(None) as memory:
        assert memory is not None
