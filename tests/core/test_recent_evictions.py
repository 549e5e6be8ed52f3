from __future__ import annotations

from tierkv.core.grants import Evicted
from tierkv.core.reasons import Reason
from tierkv.core.recent_evictions import RecentEvictions


def evicted(**changes: object) -> Evicted:
    values: dict[str, object] = {
        "group": b"g",
        "key": b"k",
        "tier": "host",
        "to": "nvme",
        "blocks": 2,
        "num_bytes": 8192,
        "reason": Reason.EVICTED,
        "first_token": 0,
        "tokens": 32,
        "created": 0.0,
        "last_used": 0.0,
        "hits": 0,
    }
    return Evicted(**(values | changes))  # type: ignore[arg-type]


def test_evictions_of_one_kind_within_ten_seconds_are_one_row() -> None:
    recent = RecentEvictions()
    for at in (10.0, 14.0, 19.0):
        recent.note(evicted(), at)
    recent.note(evicted(to="dropped"), 19.5)
    recent.note(evicted(group=b"other"), 19.5)
    dropped, other, (*_, first) = *recent.latest(2), recent.latest(9)
    assert {dropped.last.to, other.last.group} == {"dropped", b"other"}
    assert (first.count, first.tokens, first.num_bytes, first.since, first.at) == (3, 96, 3 * 8192, 10.0, 19.0)


def test_after_ten_seconds_a_new_row_begins_and_the_latest_comes_first() -> None:
    recent = RecentEvictions()
    for at in (10.0, 15.0, 20.0, 25.0):
        recent.note(evicted(), at)
    assert [(row.count, row.at) for row in recent.latest(9)] == [(2, 25.0), (2, 15.0)]


def test_the_oldest_rows_go_first() -> None:
    recent = RecentEvictions(capacity=2)
    for at in (10.0, 30.0, 50.0):
        recent.note(evicted(), at)
    assert [row.at for row in recent.latest(9)] == [50.0, 30.0]
