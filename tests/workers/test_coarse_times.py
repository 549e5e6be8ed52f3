from __future__ import annotations

from tierkv.storage.names import ExtentName
from tierkv.workers.coarse_times import CoarseTimes


def name(number: int) -> ExtentName:
    return ExtentName("ab" * 32, b"g" * 32, 0, number.to_bytes(32, "big"))


def test_a_file_is_due_once_in_ten_minutes() -> None:
    times = CoarseTimes()
    assert times.is_due(name(1), 100.0)
    times.was_set(name(1), 100.0)
    assert not times.is_due(name(1), 699.9)
    assert times.is_due(name(1), 700.0)
    assert times.is_due(name(2), 100.0)


def test_it_remembers_a_bounded_number_of_files_the_latest_ones() -> None:
    times = CoarseTimes(max_files=2)
    for number in (1, 2, 1, 3):
        times.was_set(name(number), 0.0)
    assert [times.is_due(name(number), 1.0) for number in (1, 2, 3)] == [False, True, False]
