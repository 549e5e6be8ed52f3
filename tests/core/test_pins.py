"""Pins as stories: what is pinned stays, on which tier, how far, for how long, and what it may take of a tier."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.core.simulation import PAGE, Bench, Prompt, make_group
from tierkv.core.instructions import ForgetPin, PinRecord, RecordPin, TierHealth
from tierkv.core.pins import RETRY_SECONDS, PinPhase, PinRefused, PinState
from tierkv.core.purge_scope import OfModel, OfPrefix, OfTenant, What
from tierkv.core.reasons import Reason

FILE = 3 * PAGE  # of one block

Roomy = {"host_slots": 8, "extent_blocks": 2, "pinned_share": 0.5}


def roomy(**changes: object) -> Bench:
    return Bench(**(Roomy | changes))  # type: ignore[arg-type]


def pin(bench: Bench, prompt: Prompt, **how: object) -> PinState:
    answer = bench.pin(prompt, **how)  # type: ignore[arg-type]
    assert isinstance(answer, PinState), answer
    return answer


def replace_record(state: PinState, **changes: object) -> PinRecord:
    return msgspec.structs.replace(state.record, **changes)


def now_of(bench: Bench, made: PinState) -> PinState:
    (found,) = [state for state in bench.state.pins() if state.record.pin == made.record.pin]
    return found


def fill_nvme(bench: Bench) -> None:
    """Other, newer prompts take all the room on NVMe that may be taken."""
    for _ in range(2 * bench.limits.nvme_bytes // FILE):
        bench.tick(1.0)
        bench.numbers += 1
        bench.store_durably(bench.prompt(5_000 + bench.numbers))


def test_a_pinned_prefix_stays_in_memory_while_others_fill_it() -> None:
    bench = roomy()
    prompt = bench.prompt(1, 2, 3)
    bench.store_durably(prompt)
    made = pin(bench, prompt)
    assert (made.phase, made.cached_blocks, made.host_blocks, made.host_bytes) == (PinPhase.HOLDS, 3, 3, 3 * PAGE)
    bench.fill_host()
    assert bench.match(prompt) == (3, 3)
    bench.unpin(made.record.pin)
    bench.fill_host()
    assert bench.match(prompt) == (3, 0)


def test_a_pin_for_nvme_keeps_the_files_and_lets_memory_go() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    made = pin(bench, prompt, tier="nvme")
    fill_nvme(bench)
    assert bench.match(prompt) == (2, 0)
    assert now_of(bench, made).nvme_bytes == 4 * PAGE
    bench.unpin(made.record.pin)
    fill_nvme(bench)
    assert bench.match(prompt) == (0, 0)


def test_a_pin_that_is_asked_for_again_is_the_same_one_with_another_end() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    made = pin(bench, prompt, seconds=60.0)
    bench.tick(10.0)
    again, asked = bench.grant(), bench.now
    renewed = pin(bench, prompt, seconds=60.0, pin=again)
    assert renewed.record == replace_record(made, until=asked + 60.0)
    bench.work()
    assert now_of(bench, made).recorded
    bench.tick(1.0)
    assert pin(bench, prompt, seconds=60.0, pin=again).record.until == asked + 60.0  # the same request, sent again
    assert now_of(bench, made).recorded
    other = bench.grant()
    assert pin(bench, prompt, pin=other).record == replace_record(made, until=0.0)
    assert len(bench.state.pins()) == 1
    bench.work()
    bench.start()
    (found,) = bench.state.pins()
    assert found.record == replace_record(made, until=0.0)


def test_pins_of_other_owners_tiers_and_prefixes_are_others() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    made = [
        pin(bench, prompt),
        pin(bench, prompt, owner="bob"),
        pin(bench, prompt, tier="nvme"),
        pin(bench, prompt.first(1)),
    ]
    assert len({one.record.pin for one in made}) == len(bench.state.pins()) == 4


def test_what_a_purge_ended_is_not_renewed() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    ended = pin(bench, prompt)
    _, effects = bench.state.start_purge(b"job", OfPrefix(prompt.key(0).hex()), bench.now)
    bench.absorb(effects)
    bench.work()
    assert now_of(bench, ended).phase is PinPhase.PURGED
    assert pin(bench, prompt).record.pin != ended.record.pin


def test_an_extent_is_pinned_up_to_a_depth_and_the_cold_tail_behind_it_may_go_from_memory() -> None:
    bench = roomy(extent_blocks=4)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    pin(bench, prompt.first(2))
    bench.fill_host()
    assert bench.match(prompt) == (4, 2)


def test_a_pin_of_what_is_not_cached_yet_holds_once_it_is() -> None:
    bench = roomy()
    prompt = bench.prompt(1, 2, 3)
    made = pin(bench, prompt)
    assert made.phase is PinPhase.WAITING
    bench.store_durably(prompt.first(2))
    assert now_of(bench, made).phase is PinPhase.PARTLY
    bench.fill_host()
    assert bench.match(prompt) == (2, 2)
    bench.store_durably(prompt)
    bench.fill_host()
    assert (now_of(bench, made).phase, bench.match(prompt)) == (PinPhase.HOLDS, (3, 3))


def test_what_can_not_be_written_is_kept_in_memory_by_a_pin_for_nvme() -> None:
    bench = roomy()
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.DISK_FULL), bench.now))
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    pin(bench, prompt, tier="nvme")
    bench.fill_host()
    assert bench.match(prompt) == (2, 2)
    bench.absorb(bench.state.report(TierHealth(True, 0, 1 << 30), bench.now))
    bench.work()
    bench.fill_host()
    assert bench.match(prompt) == (2, 0)


def test_all_ranks_of_a_group_are_pinned_together() -> None:
    bench = roomy(host_slots=12, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    assert pin(bench, prompt).host_bytes == 4 * PAGE
    bench.fill_host()
    assert bench.match(prompt) == (2, 2)
    for rank in range(2):
        assert bench.load(prompt, ranks=(0, 1)).parts[rank].offsets


def test_a_pin_is_written_down_and_holds_after_a_restart_where_memory_is_filled_again() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    made = pin(bench, prompt, owner="bob")
    assert not made.recorded
    bench.work()
    assert now_of(bench, made).recorded
    fill_nvme(bench)
    bench.start()
    bench.work()
    found = now_of(bench, made)
    assert (found.record, found.phase, found.recorded) == (made.record, PinPhase.HOLDS, True)
    assert bench.match(prompt) == (2, 2), "what is pinned in memory is brought back there"
    fill_nvme(bench)
    assert bench.match(prompt) == (2, 2)


def test_what_is_pinned_is_not_evicted_by_a_start_with_less_room() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    old = bench.prompt(1)
    bench.store_durably(old)
    made = pin(bench, old, tier="nvme")
    for number in range(10, 14):
        bench.tick(1.0)
        bench.store_durably(bench.prompt(number))
    bench.limits = replace(bench.limits, nvme_bytes=2 * FILE)
    bench.start()
    bench.work()
    assert now_of(bench, made).phase is PinPhase.HOLDS
    assert bench.match(old)[0] == 1
    assert bench.nvme_used() <= 2 * FILE


def test_the_same_request_again_makes_no_second_pin() -> None:
    bench = roomy()
    made = pin(bench, bench.prompt(1), pin=b"one")
    assert pin(bench, bench.prompt(1), pin=b"one").record == made.record
    assert bench.state.num_pins == 1


def test_pins_can_not_fill_a_tier_and_the_refusal_says_who_has_what() -> None:
    bench = roomy()  # four blocks of memory
    pin(bench, bench.prompt(1, 2), owner="ann")
    pin(bench, bench.prompt(1, 2, 3), owner="bob")
    assert bench.pin(bench.prompt(7, 8)) == PinRefused(
        Reason.PINNED_SHARE,
        "host",
        wanted_bytes=2 * PAGE,
        cap_bytes=4 * PAGE,
        booked_bytes=3 * PAGE,
        owners=(("bob", 3 * PAGE), ("ann", 2 * PAGE)),
    )
    assert isinstance(bench.pin(bench.prompt(1, 2, 4)), PinState), "what is pinned already costs nothing"
    assert isinstance(bench.pin(bench.prompt(7, 8), tier="nvme"), PinState)


def test_a_share_of_nothing_pins_nothing() -> None:
    bench = roomy(pinned_share=0.0)
    assert isinstance(bench.pin(bench.prompt(1)), PinRefused)


def test_files_that_are_longer_than_what_is_pinned_of_them_never_take_more_than_the_share() -> None:
    bench = roomy(nvme_bytes=4 * 6 * PAGE, extent_blocks=4)  # four files, two of which may be pinned
    prompts = [bench.prompt(number, 2, 3, 4) for number in (10, 20, 30)]
    for prompt in prompts:
        bench.store_durably(prompt)
    made = [pin(bench, prompt.first(1), tier="nvme") for prompt in prompts]
    assert [now_of(bench, one).phase for one in made] == [PinPhase.HOLDS, PinPhase.HOLDS, PinPhase.SHORT]
    bench.unpin(made[0].record.pin)
    assert [now_of(bench, one).phase for one in made[1:]] == [PinPhase.HOLDS, PinPhase.HOLDS]


def test_when_the_disk_has_less_room_the_newest_pins_give_way_and_hold_again_when_it_is_back() -> None:
    bench = roomy(nvme_bytes=8 * FILE)
    made = []
    for number in (1, 2, 3):
        bench.store_durably(bench.prompt(number))
        made.append(pin(bench, bench.prompt(number), tier="nvme"))
    bench.absorb(bench.state.nvme_limit(4 * FILE, bench.now))
    bench.work()
    assert [now_of(bench, one).phase for one in made] == [PinPhase.HOLDS, PinPhase.HOLDS, PinPhase.SHORT]
    bench.absorb(bench.state.nvme_limit(8 * FILE, bench.now))
    assert [now_of(bench, one).phase for one in made] == [PinPhase.HOLDS] * 3


def test_a_pin_ends_at_its_time_and_its_record_with_it() -> None:
    bench = roomy()
    prompt = bench.prompt(1)
    bench.store_durably(prompt)
    pin(bench, prompt, seconds=60.0)
    bench.work()
    bench.tick(59.0)
    assert bench.state.num_pins == 1
    assert bench.state.next_wakeup() <= bench.now + 1.0
    bench.tick(1.0)
    bench.work()
    assert (bench.state.num_pins, bench.disk.pins) == (0, {})
    bench.fill_host()
    assert bench.match(prompt)[1] == 0


def test_one_whose_time_was_over_while_the_node_was_down_is_not_found_again() -> None:
    bench = roomy()
    pin(bench, bench.prompt(1), seconds=60.0)
    bench.work()
    bench.now += 61.0
    bench.start()
    bench.work()
    assert (bench.state.num_pins, bench.disk.pins) == (0, {})


def test_an_unpin_says_so_while_the_record_is_still_there() -> None:
    bench = roomy()
    made = pin(bench, bench.prompt(1))
    bench.work()
    over = bench.unpin(made.record.pin)
    assert over is not None
    assert over.recorded
    assert bench.state.num_pins == 0
    bench.work()
    assert bench.unpin(made.record.pin) is None


def test_a_record_that_could_not_be_written_or_removed_is_tried_again() -> None:
    bench = roomy()
    bench.worker.pin_failure = Reason.DISK_FULL
    made = pin(bench, bench.prompt(1))
    bench.work()
    assert (now_of(bench, made).recorded, now_of(bench, made).reason) == (False, Reason.DISK_FULL)
    bench.worker.pin_failure = None
    assert bench.state.next_wakeup() == bench.now + RETRY_SECONDS
    bench.tick(RETRY_SECONDS)
    bench.work()
    assert now_of(bench, made).recorded
    bench.worker.pin_failure = Reason.IO_ERROR
    bench.unpin(made.record.pin)
    bench.work()
    over = bench.unpin(made.record.pin)
    assert over is not None
    assert (over.recorded, over.reason) == (True, Reason.IO_ERROR)
    bench.worker.pin_failure = None
    bench.tick(RETRY_SECONDS)
    bench.work()
    assert bench.disk.pins == {}


def test_what_a_dead_worker_was_told_is_told_to_the_next_one() -> None:
    bench = roomy()
    kept, ended = pin(bench, bench.prompt(1)), pin(bench, bench.prompt(2))
    bench.work()
    bench.absorb(bench.state.worker_died(bench.now))
    bench.unpin(ended.record.pin)
    late = pin(bench, bench.prompt(3))
    told = bench.state.worker_started(bench.now)
    assert [type(one) for one in told if isinstance(one, (RecordPin, ForgetPin))] == [RecordPin, ForgetPin]
    bench.absorb(told)
    bench.work()
    assert set(bench.disk.pins) == {kept.record.pin, late.record.pin}


@pytest.mark.parametrize("what", [OfTenant(""), OfModel("f" * 64), "prefix", "prefix behind"])
def test_a_pin_whose_prefix_was_purged_says_so_and_holds_nothing_that_is_stored_anew(what: What | str) -> None:
    bench = roomy(extent_blocks=1)
    prompt, other = bench.prompt(1, 2, 3), Prompt(make_group(salt="other"), (1, 2))
    bench.disk.specs[other.group] = other.spec
    bench.absorb(bench.state.open_group(other.spec, bench.now))
    bench.store_durably(prompt)
    made = pin(bench, prompt)
    unharmed = pin(bench, other, tier="nvme")
    bench.work()
    if isinstance(what, str):
        what = OfPrefix(prompt.key(1 if what == "prefix" else 2).hex())
    _, effects = bench.state.start_purge(b"job", what, bench.now)
    bench.absorb(effects)
    bench.work()
    assert (now_of(bench, made).phase, now_of(bench, made).booked_bytes) == (PinPhase.PURGED, 0)
    assert (now_of(bench, unharmed).phase is PinPhase.PURGED) == isinstance(what, OfModel)
    bench.absorb(bench.state.open_group(bench.spec, bench.now))
    bench.store_durably(prompt)
    bench.fill_host()
    assert bench.match(prompt)[1] == 0
    recorded = bench.disk.pins[made.record.pin]
    assert (recorded.purged > 0, recorded.keys) == (True, prompt.key(2))
    bench.start()
    assert now_of(bench, made).phase is PinPhase.PURGED


def test_a_purge_of_what_only_a_pin_knows_ends_the_pin() -> None:
    bench = roomy()
    prompt = bench.prompt(1, 2)
    made = pin(bench, prompt)
    bench.state.start_purge(b"job", OfPrefix(prompt.key(0).hex()), bench.now)
    assert now_of(bench, made).phase is PinPhase.PURGED


def test_a_purge_that_was_cut_off_before_it_came_to_the_pins_ends_them_at_the_next_start() -> None:
    bench = roomy()
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    made = pin(bench, prompt)
    bench.work()
    before = dict(bench.disk.pins)
    _, effects = bench.state.start_purge(b"job", OfPrefix(prompt.key(0).hex()), bench.now)
    bench.worker.take(effects[0])
    bench.disk.pins = before
    bench.start()
    assert now_of(bench, made).phase is PinPhase.PURGED
    bench.work()
    assert bench.disk.pins[made.record.pin].purged > 0


def test_a_prefix_is_named_by_its_last_block() -> None:
    bench = roomy(extent_blocks=2)
    prompt = bench.prompt(1, 2, 3)
    bench.store_durably(prompt)

    def ask(digits: str) -> PinState | PinRefused:
        answer, effects = bench.state.pin_block(
            pin=bench.grant(), digits=digits, owner="ann", tier="host", seconds=0.0, now=bench.now
        )
        bench.absorb(effects)
        return answer

    made = ask(prompt.key(2).hex()[:17])
    assert isinstance(made, PinState)
    assert made.record.keys == prompt.keys
    assert bench.state.pins_ending_with(prompt.key(2).hex()[:16]) == [made.record.pin]
    assert bench.state.pins_ending_with(prompt.key(1).hex()[:16]) == []
    assert ask("ab" * 32) == PinRefused(Reason.NOT_FOUND, found=0)


def test_a_block_behind_a_hole_can_not_be_pinned() -> None:
    bench = roomy(extent_blocks=1)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.disk.lose((prompt.group, 0, prompt.key(0)))
    bench.start()
    answer, _ = bench.state.pin_block(
        pin=b"one", digits=prompt.key(1).hex(), owner="ann", tier="host", seconds=0.0, now=bench.now
    )
    assert answer == PinRefused(Reason.NOT_FOUND, found=1)


def test_where_there_is_no_such_tier_a_pin_is_refused_and_one_for_memory_lasts_as_long_as_the_node() -> None:
    bench = roomy(nvme_bytes=0)
    assert bench.pin(bench.prompt(1), tier="nvme") == PinRefused(Reason.NVME_OFF, "nvme")
    made = pin(bench, bench.prompt(1))
    assert (made.recorded, made.reason) == (False, Reason.NVME_OFF)
    assert bench.unpin(made.record.pin) is not None
    assert bench.state.num_pins == 0
    fleeting = Prompt(make_group(persistent=False, salt="fleeting"), (1,))
    bench = roomy()
    bench.absorb(bench.state.open_group(fleeting.spec, bench.now))
    assert bench.pin(fleeting, tier="nvme") == PinRefused(Reason.NOT_PERSISTENT, "nvme")
    assert bench.pin(Prompt(make_group(salt="nobody"), (1,))) == PinRefused(Reason.NOT_FOUND)


def test_the_tiers_say_what_is_pinned_in_them() -> None:
    bench = roomy(nvme_bytes=16 * FILE)
    prompt = bench.prompt(1, 2, 3)
    bench.store_durably(prompt.first(2))
    pin(bench, prompt)
    host, nvme = bench.state.pinned_tiers()
    assert (host.cap_bytes, host.held_bytes, host.booked_bytes) == (4 * PAGE, 2 * PAGE, 3 * PAGE)
    assert (nvme.cap_bytes, nvme.held_bytes, nvme.booked_bytes) == (8 * FILE, 4 * PAGE, 3 * PAGE)


def favourites(**shape: object) -> Bench:
    """Every tier is full of what is used all the time, and that is known."""
    bench = roomy(**({"policy": "density", "extent_blocks": 1, "host_slots": 4} | shape))
    for number in range(4):
        bench.store_durably(bench.prompt(100 + number))
    for turn in range(40):
        bench.tick(1.0)
        bench.release(bench.load(bench.prompt(100 + turn % 4)))
    return bench


def test_what_is_pinned_is_never_refused_for_being_worth_less_than_what_would_go_for_it() -> None:
    wish = favourites().prompt(7, 8)
    for is_pinned in (False, True):
        bench = favourites()
        if is_pinned:
            pin(bench, wish)
        bench.store_durably(wish)
        assert bench.match(wish) == ((2, 2) if is_pinned else (0, 0))


def test_what_is_pinned_gets_its_file_whatever_has_to_go_for_it() -> None:
    wish = favourites().prompt(7)
    for is_pinned in (False, True):
        bench = favourites(nvme_bytes=4 * FILE, host_slots=40)
        if is_pinned:
            pin(bench, wish, tier="nvme")
        bench.store_durably(wish)
        bench.work()
        assert ((wish.group, 0, wish.key(0)) in bench.disk.files) == is_pinned


def test_what_is_pinned_is_written_though_the_budget_of_writes_is_spent() -> None:
    for is_pinned in (False, True):
        bench = roomy()
        bench.limits = replace(bench.limits, nvme_write_bytes_per_day=24)
        bench.start()
        wish = bench.prompt(7)
        if is_pinned:
            pin(bench, wish, tier="nvme")
        bench.store_durably(bench.prompt(6))
        bench.store_durably(wish)
        assert ((wish.group, 0, wish.key(0)) in bench.disk.files) == is_pinned
        pin(bench, wish, tier="nvme")
        bench.work()
        assert (wish.group, 0, wish.key(0)) in bench.disk.files, "one that comes later has it written as well"
