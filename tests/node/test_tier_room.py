from __future__ import annotations

from tierkv.core.instructions import ExtentRow, Rows, TierHealth, WriteDone
from tierkv.node.tier_room import UNKNOWN, TierRoom

GIB = 2**30


def health(*, free: int, overhead: int = 0) -> TierHealth:
    return TierHealth(writable=True, overhead_bytes=overhead, free_bytes=free)


def rows(file_bytes: int) -> Rows:
    row = ExtentRow(b"k" * 32, b"p" * 32, 0, b"k" * 32, 4096, file_bytes, 0.0, 0.0, 0)
    return Rows(fingerprint="f", group=b"g" * 32, rank=0, rows=[row])


def test_what_was_asked_for_is_given_where_the_disk_has_it() -> None:
    room = TierRoom(10 * GIB, GIB)
    assert room.num_bytes == 10 * GIB
    room.note(health(free=20 * GIB))
    assert room.at_recovery() is None
    assert room.num_bytes == 10 * GIB


def test_files_that_are_there_already_count_as_room() -> None:
    room = TierRoom(10 * GIB, GIB)
    room.note(rows(8 * GIB))
    room.note(health(free=4 * GIB))
    assert room.at_recovery() is None  # 8 + 4 - 1 = 11 GiB, more than asked for
    room.begin_again()
    room.note(rows(2 * GIB))
    assert room.at_recovery() == 5 * GIB


def test_the_open_setting_takes_ours_and_four_fifths_of_what_is_free_once() -> None:
    room = TierRoom(None, 0)
    assert room.num_bytes == UNKNOWN
    room.note(rows(3 * GIB))
    room.note(health(free=10 * GIB, overhead=GIB))
    assert room.at_recovery() == 12 * GIB
    room.note(health(free=4 * GIB, overhead=GIB))
    assert room.at_health(9 * GIB) is None  # our own growth changes nothing


def test_other_data_takes_from_it_and_gives_back() -> None:
    room = TierRoom(8 * GIB, GIB)
    room.note(health(free=10 * GIB))
    assert room.at_recovery() is None
    room.note(health(free=2 * GIB))
    assert room.at_health(4 * GIB) == 5 * GIB
    room.note(health(free=2 * GIB + 4096))
    assert room.at_health(4 * GIB) is None  # not worth a word
    room.note(health(free=2 * GIB - 4096))
    assert room.at_health(4 * GIB) == 5 * GIB - 4096  # or the reserve would be used
    room.note(health(free=10 * GIB))
    assert room.at_health(4 * GIB) == 8 * GIB


def test_a_disk_full_of_other_data_leaves_no_room_but_never_none_at_all() -> None:
    room = TierRoom(8 * GIB, 2 * GIB)
    room.note(health(free=GIB))
    assert room.at_health(0) == 1  # 0 would mean that there is no such tier


def test_a_shortage_is_news_once_and_again_when_it_has_grown_by_an_eighth() -> None:
    room = TierRoom(8 * GIB, 0)
    news = []
    for free in (4 * GIB, 4 * GIB - 4096, GIB * 7 // 2 + 8192, GIB * 3, 9 * GIB, 4 * GIB):
        room.note(health(free=free))
        changed = room.at_health(0)
        news.append(changed is not None and room.is_news(changed))
    assert news == [True, False, False, True, False, True]


def test_of_a_tier_that_is_away_nothing_is_known_and_its_room_stays() -> None:
    room = TierRoom(200, 10, tier="disk")
    room.note(health(free=10 * GIB))
    assert room.at_health(15) is None
    away = TierHealth(writable=False, overhead_bytes=0, free_bytes=0, readable=False, read_problem="not mounted")
    room.note(away)
    assert (room.at_health(15), room.at_recovery()) == (None, None)
    assert (room.num_bytes, room.shortage) == (200, "")
    room.note(health(free=110))
    assert room.at_health(15) == 115
    assert "the disk has room for 115 B" in room.shortage


def test_what_came_or_went_while_the_worker_looked_is_not_counted_twice() -> None:
    mib = 2**20
    room = TierRoom(1000 * mib, 0)
    room.note(health(free=100 * mib))
    assert room.at_recovery() == 100 * mib
    room.note(WriteDone(op=1, file_bytes=4 * mib, seconds=0.1))
    room.note(health(free=100 * mib))  # it had looked before that file was written
    assert room.at_health(4 * mib) is None
    room.note(health(free=100 * mib))  # a file was removed, and its removal is not confirmed
    assert room.at_health(4 * mib, 4 * mib) is None
    room.note(health(free=96 * mib))
    assert room.at_health(4 * mib) is None
    room.note(health(free=50 * mib))  # but what others take is taken
    assert room.at_health(4 * mib, 4 * mib) == 54 * mib


def test_without_a_word_of_the_disk_nothing_changes() -> None:
    room = TierRoom(None, 0)
    room.note(rows(GIB))
    assert room.at_recovery() is None
    assert room.num_bytes == UNKNOWN


def test_less_room_than_was_asked_for_is_said_with_both_numbers() -> None:
    mib = 2**20
    room = TierRoom(150 * mib, 20 * mib)
    assert room.shortage == ""
    room.note(health(free=80 * mib))
    assert room.at_recovery() == 60 * mib
    assert "150.0 MiB" in room.shortage
    assert "60.0 MiB" in room.shortage
    assert TierRoom(None, 0).shortage == ""


def test_a_shortage_names_the_settings_of_its_own_tier() -> None:
    room = TierRoom(10 * GIB, GIB, tier="disk")
    room.note(TierHealth(writable=True, overhead_bytes=0, free_bytes=5 * GIB))
    room.at_recovery()
    assert "disk_bytes asks for 10.0 GiB" in room.shortage
    assert "disk_reserve_bytes" in room.shortage
