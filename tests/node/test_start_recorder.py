"""The record of a start: windows close in time, lives follow each other, and engines that come back are starts too."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tierkv.core.starts import LATE_SECONDS, MAX_LATE, WINDOW_ENDS, LastEnd, Start, StartKind, Window
from tierkv.node.start_recorder import MAX_ENGINES, StartRecorder

GROUP, OTHER = b"g" * 32, b"o" * 32


@dataclass
class Desk:
    """A node whose clock and counts are ours. Each second 1,000 tokens are asked for, `share` of them hits."""

    now: float = 1_000.0
    share: float = 0.0
    boot: str = "this"
    last_end: LastEnd | None = None
    asked: int = 0
    hit: int = 0
    kept: list[Start] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = StartRecorder(
            number=int(self.now * 1_000),
            began=self.now,
            rate=12_000.0,
            keep=self.kept.append,
            boot=self.boot,
            last_end=self.last_end,
        )

    def so_far(self) -> Window:
        missed = float(self.asked - self.hit)
        return Window(
            asked_tokens=self.asked,
            hit_tokens={"host": self.hit},
            waits=[self.asked // 1_000],
            asked_prefill_seconds=float(self.asked),
            missed_prefill_seconds=missed,
        )

    def ready(self) -> None:
        self.recorder.ready(self.now, self.so_far())

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.asked += 1_000
            self.hit += int(1_000 * self.share)
            if self.recorder.next_due <= self.now:
                self.recorder.look(self.now, self.so_far())

    def open(self, group: bytes, pid: int, *, is_used: bool = False) -> None:
        self.recorder.opened(group, pid, is_used=is_used, now=self.now, so_far=self.so_far())

    @property
    def own(self) -> Start:
        return next(start for start in self.recorder.all(self.now, self.so_far()) if start.kind is not StartKind.ENGINE)

    @property
    def engines(self) -> list[Start]:
        return [start for start in self.recorder.all(self.now, self.so_far()) if start.kind is StartKind.ENGINE]


def test_nothing_is_due_before_the_node_is_ready() -> None:
    desk = Desk()
    assert desk.recorder.next_due == float("inf")
    desk.run(100.0)
    assert desk.kept == []
    assert not desk.own.is_ready


def test_windows_are_counted_from_ready_on_and_hold_what_happened_in_them() -> None:
    desk = Desk(share=0.25)
    desk.run(7.0)
    desk.ready()
    desk.run(12.0)
    own = desk.own
    assert (own.is_ready, own.ready_seconds) == (True, 7.0)
    assert [(window.begins, window.seconds) for window in own.windows] == [(0.0, 5.0), (5.0, 5.0), (10.0, 2.0)]
    assert [window.asked_tokens for window in own.windows] == [5_000, 5_000, 2_000]
    assert own.windows[0].hit_tokens == {"host": 1_250}
    assert own.windows[1].waits == [5]


def test_the_window_that_is_open_is_told_as_long_as_it_is_and_kept_when_it_ends() -> None:
    desk = Desk()
    desk.ready()
    desk.run(2)
    (open_one,) = desk.own.windows
    assert (open_one.begins, open_one.seconds, open_one.asked_tokens) == (0.0, 2.0, 2_000)
    assert desk.kept[-1].windows == ()
    desk.run(3)
    (closed,) = desk.own.windows
    assert (closed.seconds, closed.asked_tokens) == (5.0, 5_000)
    assert desk.kept[-1].windows == (closed,)


def test_after_ten_minutes_windows_are_long_and_the_last_half_hour_of_them_is_kept() -> None:
    desk = Desk()
    desk.ready()
    desk.run(600.0)
    assert [window.ends for window in desk.own.windows] == list(WINDOW_ENDS)
    desk.run(LATE_SECONDS * (MAX_LATE + 2))
    assert len(desk.own.windows) == len(WINDOW_ENDS)
    assert len(desk.own.late) == MAX_LATE
    assert desk.own.late[-1].ends == 600.0 + LATE_SECONDS * (MAX_LATE + 2)


def test_a_window_in_which_nobody_looked_in_time_says_how_long_it_was() -> None:
    desk = Desk()
    desk.ready()
    desk.now += 33.0
    desk.recorder.look(desk.now, desk.so_far())
    assert [(window.begins, window.seconds) for window in desk.own.windows] == [(0.0, 33.0)]
    assert desk.recorder.next_due == desk.now + 2.0


def test_each_window_is_given_away_to_be_kept_with_all_that_went_before() -> None:
    desk = Desk()
    desk.ready()
    desk.run(15.0)
    assert [len(start.windows) for start in desk.kept] == [0, 1, 2, 3]
    assert [start.heard for start in desk.kept] == [1_000.0, 1_005.0, 1_010.0, 1_015.0]
    assert not any(start.ended for start in desk.kept)


def test_the_end_closes_the_window_and_says_that_it_was_in_order() -> None:
    desk = Desk()
    desk.ready()
    desk.run(7.0)
    desk.recorder.end(desk.now, desk.so_far())
    last = desk.kept[-1]
    assert last.ended
    assert [window.seconds for window in last.windows] == [5.0, 2.0]


def test_a_worker_that_comes_back_does_not_begin_the_record_again() -> None:
    desk = Desk()
    desk.ready()
    desk.run(20.0)
    desk.ready()
    desk.run(5.0)
    assert len(desk.own.windows) == 5
    assert desk.own.ready_seconds == 0.0


def earlier(*, ended: bool, boot: str = "this", began: float = 500.0, kind: StartKind = StartKind.NODE) -> Start:
    windows = (
        Window(begins=60.0, seconds=300.0, asked_tokens=100, hit_tokens={"host": 90}, asked_prefill_seconds=100.0),
    )
    return Start(
        number=int(began * 1_000),
        kind=kind,
        began=began,
        last_end=LastEnd.FIRST,
        boot=boot,
        is_ready=True,
        windows=windows,
        heard=began + 400.0,
        ended=ended,
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (earlier(ended=True), LastEnd.CLEAN),
        (earlier(ended=True, boot="another"), LastEnd.CLEAN),
        (earlier(ended=False), LastEnd.KILLED),
        (earlier(ended=False, boot="another"), LastEnd.MACHINE),
        (earlier(ended=False, boot=""), LastEnd.KILLED),
    ],
)
def test_how_the_last_life_ended_is_told_from_its_record(record: Start, expected: LastEnd) -> None:
    desk = Desk()
    desk.recorder.found([record])
    own = desk.recorder.all(desk.now, desk.so_far())[-1]
    assert own.last_end is expected
    assert own.last_heard == record.heard
    assert own.before is not None
    assert own.before.all_hit_tokens == 90


def test_without_any_record_it_is_the_first_start() -> None:
    desk = Desk()
    desk.recorder.found([])
    assert desk.own.last_end is LastEnd.FIRST
    assert desk.own.before is None


def test_a_new_front_knows_from_the_supervisor_how_the_one_before_it_ended() -> None:
    desk = Desk(last_end=LastEnd.CRASHED)
    desk.recorder.found([earlier(ended=False, boot="another")])
    own = desk.recorder.all(desk.now, desk.so_far())[-1]
    assert (own.kind, own.last_end) == (StartKind.FRONT, LastEnd.CRASHED)
    assert own.before is not None


def test_records_told_twice_are_told_once_and_in_order() -> None:
    desk = Desk()
    one, two = earlier(ended=True, began=500.0), earlier(ended=True, began=700.0)
    desk.recorder.found([two, one])
    desk.recorder.found([one, two])
    assert [start.began for start in desk.recorder.all(desk.now, desk.so_far())] == [500.0, 700.0, 1_000.0]


def test_an_engine_that_comes_back_when_no_other_uses_its_group_is_a_start() -> None:
    desk = Desk(share=0.5)
    desk.ready()
    desk.open(GROUP, 1)
    desk.run(400.0)
    assert desk.engines == []
    desk.open(GROUP, 2)
    desk.run(12.0)
    (engine,) = desk.engines
    assert engine.group == GROUP.hex()[:12]
    assert [window.asked_tokens for window in engine.windows] == [5_000, 5_000, 2_000]
    assert engine.before is not None
    assert engine.before.begins >= 60.0


def test_another_session_of_a_process_or_beside_one_that_lives_is_no_start() -> None:
    desk = Desk()
    desk.ready()
    desk.open(GROUP, 1)
    desk.open(GROUP, 1)  # its session was lost, the process is the same
    desk.open(GROUP, 2, is_used=True)  # the second rank of one engine
    desk.open(OTHER, 3)
    assert desk.engines == []


def test_the_ranks_of_an_engine_that_comes_back_are_one_start() -> None:
    desk = Desk()
    desk.ready()
    desk.open(GROUP, 1)
    desk.open(GROUP, 2, is_used=True)
    desk.open(GROUP, 11)
    desk.open(GROUP, 12, is_used=True)
    assert len(desk.engines) == 1


def test_an_engines_record_ends_after_ten_minutes_and_is_still_told() -> None:
    desk = Desk()
    desk.ready()
    desk.open(GROUP, 1)
    desk.run(30.0)
    desk.open(GROUP, 2)
    desk.run(1_000.0)
    (engine,) = desk.engines
    assert engine.windows[-1].ends == 600.0
    assert engine.late == ()


def test_engines_that_start_over_and_over_are_recorded_up_to_a_number_at_one_time() -> None:
    desk = Desk()
    desk.ready()
    for pid in range(1, MAX_ENGINES + 10):
        desk.open(GROUP, pid)
    assert len(desk.engines) == MAX_ENGINES
    assert len({engine.number for engine in desk.engines}) == MAX_ENGINES
