"""Automatic pins as stories: the hottest prefixes stay, within a share, and not for longer than they are hot."""

from __future__ import annotations

from tests.core.simulation import PAGE, Bench, Prompt
from tierkv.core.auto_pins import LIFETIME_SECONDS, MIN_HITS, ROUND_SECONDS
from tierkv.core.pins import AUTO, PinPhase, PinState
from tierkv.core.purge_scope import OfTenant


def warm(auto_pin_share: float = 0.25, **shape: object) -> Bench:
    settings = {"host_slots": 8, "extent_blocks": 1, "pinned_share": 0.5, "auto_pin_share": auto_pin_share}
    return Bench(**(settings | shape))  # type: ignore[arg-type]


def heat(bench: Bench, prompt: Prompt, hits: int = MIN_HITS + 2) -> None:
    for _ in range(hits):
        bench.release(bench.load(prompt))


def pinned(bench: Bench) -> list[bytes]:
    states = bench.state.pins()
    assert all(state.record.owner == AUTO and not state.recorded for state in states)
    return [state.record.keys for state in states]


def test_the_hottest_prefixes_are_pinned_within_their_share() -> None:
    bench = warm()  # two blocks of memory
    hot, warmer, cold = bench.prompt(1, 2), bench.prompt(7), bench.prompt(9)
    for prompt in (hot, warmer, cold):
        bench.store_durably(prompt)
    heat(bench, hot, 30)
    heat(bench, warmer, 20)
    heat(bench, cold, 2)
    bench.tick(ROUND_SECONDS)
    assert pinned(bench) == [hot.keys], "the next one would pass the share, and the cold one is not hot"
    assert [state.phase for state in bench.state.pins()] == [PinPhase.HOLDS]
    bench.fill_host()
    assert bench.match(hot) == (2, 2)
    assert bench.disk.pins == {}


def test_nothing_is_pinned_by_itself_unless_that_was_asked_for() -> None:
    bench = warm(0.0)
    bench.store_durably(bench.prompt(1))
    heat(bench, bench.prompt(1), 50)
    bench.tick(ROUND_SECONDS)
    assert bench.state.pins() == []
    assert bench.state.next_wakeup() is None


def test_one_that_stays_hot_is_pinned_on_and_one_that_cools_ends_by_itself() -> None:
    bench = warm()
    for number in (1, 2):
        bench.store_durably(bench.prompt(number))
        heat(bench, bench.prompt(number), 20)
    bench.tick(ROUND_SECONDS)
    assert len(pinned(bench)) == 2
    for _ in range(int(LIFETIME_SECONDS // ROUND_SECONDS) * 2 + 2):
        heat(bench, bench.prompt(1), 3)
        bench.tick(ROUND_SECONDS)
    assert pinned(bench) == [bench.prompt(1).keys]
    assert bench.state.next_wakeup() is not None
    bench.tick(LIFETIME_SECONDS)
    bench.tick(LIFETIME_SECONDS)
    assert pinned(bench) == []


def test_they_give_way_to_what_somebody_pins() -> None:
    bench = warm(0.5)
    hot = bench.prompt(1, 2, 3, 4)
    bench.store_durably(hot)
    heat(bench, hot, 20)
    bench.tick(ROUND_SECONDS)
    assert pinned(bench) == [hot.keys]
    made = bench.pin(bench.prompt(7, 8))
    assert isinstance(made, PinState)
    assert [state.record.owner for state in bench.state.pins()] == ["ann"]
    bench.tick(ROUND_SECONDS)
    assert [state.record.owner for state in bench.state.pins()] == ["ann"], "there is no room for it beside that"


def test_a_purge_ends_them_for_good_and_a_worker_is_told_of_none() -> None:
    bench = warm()
    bench.store_durably(bench.prompt(1))
    heat(bench, bench.prompt(1), 20)
    bench.tick(ROUND_SECONDS)
    assert len(pinned(bench)) == 1
    bench.absorb(bench.state.worker_died(bench.now))
    bench.absorb(bench.state.worker_started(bench.now))
    bench.work()
    assert bench.disk.pins == {}
    _, effects = bench.state.start_purge(b"job", OfTenant(""), bench.now)
    bench.absorb(effects)
    bench.work()
    assert (bench.state.pins(), bench.disk.pins) == ([], {})


def test_one_that_is_unpinned_leaves_no_record_to_remove() -> None:
    bench = warm()
    bench.store_durably(bench.prompt(1))
    heat(bench, bench.prompt(1), 20)
    bench.tick(ROUND_SECONDS)
    (state,) = bench.state.pins()
    assert state.host_bytes == PAGE
    over = bench.unpin(state.record.pin)
    assert over is not None
    assert not over.recorded
