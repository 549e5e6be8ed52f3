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


def test_evictions_of_one_kind_within_a_second_are_one_row() -> None:
    recent = RecentEvictions()
    for at in (10.0, 10.4, 10.9):
        recent.note(evicted(), at)
    recent.note(evicted(to="dropped"), 10.95)
    recent.note(evicted(group=b"other"), 10.95)
    dropped, other, (*_, first) = *recent.latest(2), recent.latest(9)
    assert {dropped.last.to, other.last.group} == {"dropped", b"other"}
    assert (first.count, first.tokens, first.num_bytes, first.since, first.at) == (3, 96, 3 * 8192, 10.0, 10.9)


def test_a_second_later_a_new_row_begins_and_the_latest_comes_first() -> None:
    recent = RecentEvictions()
    for at in (10.0, 10.5, 11.0, 11.5):
        recent.note(evicted(), at)
    assert [(row.count, row.at) for row in recent.latest(9)] == [(2, 11.5), (2, 10.5)]


def test_the_oldest_rows_go_first() -> None:
    recent = RecentEvictions(capacity=2)
    for at in (1.0, 3.0, 5.0):
        recent.note(evicted(), at)
    assert [row.at for row in recent.latest(9)] == [5.0, 3.0]
