"""The disk tier: what leaves NVMe goes there, is read from there, and shares the directory with other nodes."""

from __future__ import annotations

import pytest

from tests.core.disk_simulation import DiskBench
from tests.core.simulation import PAGE, Disk, Prompt
from tierkv.core import found_on_disk
from tierkv.core.explain import Question
from tierkv.core.grants import Evicted, Lease, Waiting
from tierkv.core.instructions import DamageFound, Demote, PurgeSwept, Read, Remove, SetAside, Swept, TierHealth
from tierkv.core.pins import PinPhase, PinState
from tierkv.core.purge_scope import OfModel
from tierkv.core.purges import PurgePhase, PurgeState
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState
from tierkv.core.warmup import WarmupScope


def evictions(bench: DiskBench) -> list[tuple[str, str]]:
    return [(e.tier, e.to) for e in bench.notices if isinstance(e, Evicted)]


def healthy(**changes: object) -> TierHealth:
    return TierHealth(**{"writable": True, "overhead_bytes": 0, "free_bytes": 1 << 40, **changes})  # type: ignore[arg-type]


def test_what_has_to_leave_nvme_is_copied_to_disk_and_found_there() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    assert bench.where(first) == "d"
    assert bench.state.counts.demoted_extents == 2
    assert ("nvme", "disk") in evictions(bench)
    lease = bench.load(first)
    assert (lease.blocks, lease.disk_blocks, lease.nvme_blocks) == (2, 2, 0)
    assert bench.state.counts.hit_tokens["disk"] == 2
    bench.release(lease)
    bench.work()
    assert bench.where(first) == "hnd", "brought back, and worth a place on NVMe again; the copy below stays"


def test_the_file_on_nvme_stays_until_the_copy_is_flushed() -> None:
    bench = DiskBench(nvme_extents=2)
    bench.store_several(2)
    bench.store(third := bench.prompt(3, 103))
    bench.seal(third)
    bench.work_on_nvme()
    first = bench.prompt(1, 101)
    demote, _ = [op for op in bench.disk_worker.waiting if isinstance(op, Demote)]
    assert bench.where(first) == "hn"
    assert bench.state.num_writes_waiting == 1, "the third one waits for the room"
    bench.disk_worker.run(demote)
    bench.hear_disk()
    assert bench.where(first) == "hd"
    bench.work()
    assert bench.where(third) == "hn"


def test_a_victim_that_has_a_copy_below_goes_at_once() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(3)
    bench.release(bench.load(first))
    bench.work()
    assert "n" in bench.where(first)
    demoted = bench.state.counts.demoted_extents
    bench.store_several(2, start=10)
    assert bench.where(first) == "d"
    assert bench.state.counts.demoted_extents - demoted < 3, "it was not copied a second time"


def test_what_was_hit_while_it_was_copied_stays_on_nvme() -> None:
    bench = DiskBench(host_slots=16, nvme_extents=4)
    first, *_ = bench.store_several(4)
    bench.store(fifth := bench.prompt(5, 105))
    bench.seal(fifth)
    bench.work_on_nvme()
    bench.tick(1.0)
    lease = bench.acquire(first)
    assert isinstance(lease, Lease)
    bench.release(lease)
    bench.work()
    assert bench.where(first) == "hnd"
    assert bench.where(fifth) == "hn", "others have gone for it"


def test_a_dead_disk_worker_loses_nothing_and_nvme_goes_on() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, second = bench.store_several(2)
    bench.store(third := bench.prompt(3, 103))
    bench.seal(third)
    bench.work_on_nvme()
    bench.disk_worker_dies(done=1)
    assert bench.where(first) == "n"
    assert bench.load(second).blocks == 2
    bench.start_disk_worker()
    bench.work()
    assert bench.where(first) == "d"
    assert bench.where(third) in ("n", "hn")


def test_reads_from_disk_are_asked_again_of_the_next_worker() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    assert isinstance(bench.acquire(first), Waiting)
    bench.disk_worker_dies()
    bench.start_disk_worker()
    bench.work()
    lease = bench.ready()
    bench.check_lease(first, lease)
    assert lease.blocks == 2


def test_while_the_storage_worker_is_away_the_disk_tier_answers() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    bench.worker.die(0)
    bench.absorb(bench.state.worker_died(bench.now))
    assert isinstance(bench.acquire(first), Waiting)
    bench.disk_worker.run_all()
    bench.hear_disk()
    assert bench.ready().blocks == 2
    bench.absorb(bench.state.worker_started(bench.now))
    bench.work()


def test_a_source_that_is_damaged_is_kept_for_a_look_and_lost() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, _ = bench.store_several(2)
    bench.disk.damage(bench.name(first), 0)
    bench.store(third := bench.prompt(3, 103))
    bench.seal(third)
    bench.work_on_nvme()
    bench.disk_worker.run_all()
    bench.hear_disk()
    assert any(isinstance(op, SetAside) for op in bench.worker.waiting)
    assert bench.match(first) == (0, 0)
    assert bench.state.counts.damaged_extents[Reason.CHECKSUM] == 1
    bench.work()
    assert bench.where(third) in ("n", "hn")


def test_damage_that_the_worker_finds_by_itself_is_counted_by_reason() -> None:
    bench = DiskBench()
    bench.absorb(bench.state.disk_report(DamageFound(Reason.SHORT_FILE), bench.now))
    bench.absorb(bench.state.disk_report(DamageFound(Reason.SHORT_FILE), bench.now))
    assert bench.state.counts.damaged_extents == {Reason.SHORT_FILE: 2}


def test_what_another_node_has_used_stays_and_is_offered_again() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=1, disk_extents=3)
    first, second, *_ = bench.store_several(4)
    assert (bench.where(first), bench.where(second)) == ("d", "d")
    bench.disk_worker.use(bench.name(first), bench.now)
    bench.store_several(1, start=10)
    assert bench.name(first) in bench.tier.files
    assert bench.match(first) == (2, 0), "it is there, and found again"
    assert bench.where(second) == "", "the other one went"
    bench.store_several(4, start=20)
    assert bench.name(first) not in bench.tier.files, "nobody used it any more"


def test_a_name_that_another_node_has_taken_stays_its_own() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, _ = bench.store_several(2)
    bench.disk_worker.put(bench.prompt(1, 999), 0, 2, bench.now)
    bench.disk_worker.unheard.clear()
    theirs = bench.tier.files[bench.name(first)]
    bench.store_several(2, start=10)
    assert bench.tier.files[bench.name(first)] is theirs
    assert bench.where(first) == ""
    assert bench.state.counts.dropped_demotions[Reason.NAME_TAKEN] == 1


def test_a_file_that_another_node_has_put_in_its_place_is_no_damage() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(5)
    assert bench.where(first) == "d"
    bench.disk_worker.put(bench.prompt(1, 999), 0, 2, bench.now)
    bench.disk_worker.unheard.clear()
    bench.load(first)
    assert bench.where(first) == ""
    assert not bench.state.counts.damaged_extents


def test_extents_of_another_node_join_the_tree_while_this_one_runs() -> None:
    bench = DiskBench()
    (parent,) = bench.store_several(1)
    longer = bench.prompt(1, 101, 7, 8)
    bench.disk_worker.put(longer, 2, 4, bench.now)
    bench.hear_disk()
    assert bench.match(longer) == (4, 2)
    assert not bench.state._ledger.tree.heads[longer.key(2)].is_orphan
    lease = bench.load(longer)
    assert (lease.blocks, lease.disk_blocks) == (4, 2)
    assert bench.match(parent) == (2, 2)


def test_rows_that_come_before_nvme_is_recovered_wait_for_it() -> None:
    earlier = DiskBench(host_slots=4, nvme_extents=2)
    earlier.store_several(4)
    bench = DiskBench(disk=earlier.disk, tier=earlier.tier, host_slots=4, is_recovered=False)
    assert bench.state.is_disk_recovering
    assert bench.match(bench.prompt(1, 101)) == (0, 0)
    assert bench.match(bench.prompt(4, 104)) == (2, 0)
    bench.recover_disk()
    assert not bench.state.is_disk_recovering
    assert all(bench.match(bench.prompt(number, 100 + number)) == (2, 0) for number in range(1, 5))


def test_a_copy_that_another_node_removed_is_gone_and_nothing_else() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(3)
    bench.release(bench.load(first))
    bench.work()
    assert bench.where(first) == "hnd"
    bench.disk_worker.lose(bench.name(first))
    bench.hear_disk()
    assert bench.where(first) == "hn"


@pytest.mark.scenario(
    "B021", then="what another node has removed fails one load from the disk tier, and is known no more"
)
def test_a_file_that_goes_while_it_is_read_fails_one_load() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    assert isinstance(bench.acquire(first), Waiting)
    bench.tier.lose(bench.name(first))
    bench.work()
    lease = bench.ready()
    assert (lease.blocks, lease.reason) == (0, Reason.NOT_FOUND)
    assert bench.match(first) == (0, 0)


def test_a_file_of_another_continuation_is_left_alone_when_it_is_found_under_the_name() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    name = bench.name(first)
    bench.disk_worker.put(bench.prompt(1, 999), 0, 2, bench.now)
    bench.disk_worker.unheard.clear()
    assert isinstance(bench.acquire(first), Waiting)
    bench.work()
    assert bench.ready().blocks == 0
    assert name in bench.tier.files, "it is somebody's, and right"
    assert bench.match(first) == (0, 0)


def test_ranks_that_are_not_all_there_can_not_be_used_until_they_are() -> None:
    bench = DiskBench(ranks=2)
    prompt = bench.prompt(5, 6)
    bench.disk_worker.put_rank(prompt, 0, 2, 1, bench.now)
    bench.hear_disk()
    assert bench.match(prompt) == (0, 0)
    assert bench.state.tiers()[2].overhead_bytes > 0, "it takes room"
    bench.work()
    assert (prompt.group, 1, prompt.key(0)) in bench.tier.files, "and is not removed for that"
    bench.disk_worker.put_rank(prompt, 0, 2, 0, bench.now)
    bench.hear_disk()
    assert bench.match(prompt) == (2, 0)
    assert bench.state.tiers()[2].overhead_bytes == 0
    assert bench.load(prompt, ranks=(0, 1)).blocks == 2


def test_one_rank_that_another_node_removed_makes_the_others_of_no_use_and_they_stay() -> None:
    bench = DiskBench(ranks=2, host_slots=8)
    prompt = bench.prompt(5, 6)
    bench.disk_worker.put(prompt, 0, 2, bench.now, ranks=2)
    bench.hear_disk()
    bench.disk_worker.lose((prompt.group, 0, prompt.key(0)))
    bench.hear_disk()
    assert bench.match(prompt) == (0, 0)
    assert (prompt.group, 1, prompt.key(0)) in bench.tier.files
    assert bench.state.tiers()[2].overhead_bytes > 0
    bench.disk_worker.put_rank(prompt, 0, 2, 0, bench.now)
    bench.hear_disk()
    assert bench.match(prompt) == (2, 0)


def test_a_longer_file_of_another_node_is_a_copy_as_good() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=1)
    (mine,) = bench.store_several(1)
    bench.disk_worker.put(bench.prompt(1, 101, 7), 0, 3, bench.now)
    bench.hear_disk()
    assert bench.where(mine) == "hnd"
    bench.store_several(3, start=10)
    assert bench.where(mine) == "d"
    assert bench.load(mine).blocks == 2


def test_a_longer_file_does_not_hide_what_hangs_on_its_beginning() -> None:
    bench = DiskBench(host_slots=8, nvme_extents=4)
    mine = bench.prompt(1, 2, 3)
    bench.disk_worker.put(mine, 1, 3, bench.now)
    bench.hear_disk()
    bench.disk_worker.put(bench.prompt(1, 2, 9), 0, 3, bench.now)
    bench.hear_disk()
    assert bench.match(mine) == (3, 0)
    assert bench.load(mine).blocks == 3


def test_parents_stay_below_what_hangs_on_them() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=1, disk_extents=2)
    bench.store_durably(bench.prompt(1, 101))
    bench.tick(1.0)
    bench.store_durably(bench.prompt(1, 101, 7, 8))
    parent, child = bench.prompt(1, 101), bench.prompt(1, 101, 7, 8)
    bench.store_several(6, start=10)
    assert bench.match(child)[0] in (0, 2, 4)
    tree = bench.state._ledger.tree
    assert child.key(2) not in tree.heads or parent.key(0) in tree.heads


def test_a_disk_that_can_not_be_written_to_costs_what_would_have_gone_there() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.absorb(
        bench.state.disk_report(healthy(writable=False, reason=Reason.READ_ONLY, problem="read only"), bench.now)
    )
    first, *_ = bench.store_several(4)
    assert bench.where(first) == ""
    assert bench.state.counts.dropped_demotions[Reason.DISK_DEGRADED] == 2
    assert bench.state.tiers()[2].reason is Reason.READ_ONLY
    bench.absorb(bench.state.disk_report(healthy(), bench.now))
    bench.store_several(2, start=10)
    assert bench.where(bench.prompt(3, 103)) == "d"


def test_who_waits_for_a_stuck_disk_gets_what_host_memory_has() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    assert isinstance(bench.acquire(first), Waiting)
    bench.absorb(bench.state.disk_report(healthy(readable=False), bench.now))
    assert (lease := bench.ready()).blocks == 0
    assert lease.reason is Reason.IO_STUCK
    fourth = bench.prompt(4, 104)
    assert bench.load(fourth).blocks == 2, "NVMe goes on"
    bench.absorb(bench.state.disk_report(healthy(), bench.now))
    bench.work()


def test_who_wants_what_a_disk_tier_has_that_is_away_is_told_so_and_not_that_it_is_stuck() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    away = healthy(writable=False, readable=False, reason=Reason.DISK_DEGRADED, problem="not mounted")
    bench.absorb(bench.state.disk_report(away, bench.now))
    assert (lease := bench.load(first)).blocks == 0
    assert lease.reason is Reason.DISK_DEGRADED
    bench.absorb(bench.state.disk_report(healthy(), bench.now))
    assert bench.load(first).blocks == 2


def test_a_disk_that_does_not_keep_up_does_not_hold_up_what_is_new() -> None:
    bench = DiskBench(host_slots=32, nvme_extents=4)
    bench.store_several(4)
    for number in range(10, 18):
        bench.store(prompt := bench.prompt(number, 100 + number))
        bench.seal(prompt)
        bench.work_on_nvme()
    assert bench.state.counts.dropped_demotions[Reason.DISK_BEHIND] > 0
    assert ("nvme", "host") in evictions(bench) or ("nvme", "dropped") in evictions(bench)
    bench.work()


def test_room_that_is_taken_away_is_made_by_the_oldest() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=1, disk_extents=10)
    prompts = bench.store_several(6)
    bench.absorb(bench.state.disk_limit(3 * 4 * PAGE, bench.now))
    bench.work()
    assert [bench.where(prompt) for prompt in prompts[:3]] == ["", "", "d"]
    tier = bench.state.tiers()[2]
    assert tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes <= tier.capacity_bytes


@pytest.mark.parametrize("when", ["queued", "copied", "there"])
def test_what_is_bad_is_bad_in_the_disk_tier_too(when: str) -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, _ = bench.store_several(2)
    bench.store(third := bench.prompt(3, 103))
    bench.seal(third)
    bench.work_on_nvme()
    if when == "copied":
        bench.disk_worker.run_all()
    elif when == "there":
        bench.work()
    bench.absorb(bench.state.report_bad(first.group, first.keys, 0, bench.now))
    bench.work()
    assert bench.match(first) == (0, 0)
    assert bench.name(first) not in bench.tier.files


def test_what_is_purged_leaves_both_tiers_before_the_purge_is_over() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    assert bench.match(bench.prompt(1, 101)) == (0, 0)
    bench.work_on_nvme()
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert progress.phase is PurgePhase.REMOVING, "the disk tier is not swept yet"
    bench.work()
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert progress.phase is PurgePhase.GONE
    assert not bench.tier.files
    assert not bench.disk.files


def test_a_purge_says_that_it_waits_for_a_disk_tier_that_does_not_answer() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    bench.disk_worker_dies()
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    bench.work_on_nvme()
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert (progress.phase, progress.reason) == (PurgePhase.REMOVING, Reason.DISK_DEGRADED)
    bench.start_disk_worker()
    bench.absorb(bench.state.disk_report(healthy(readable=False), bench.now))
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert progress.reason is Reason.DISK_DEGRADED, "it hangs"
    bench.absorb(bench.state.disk_report(healthy(), bench.now))
    bench.work()
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert (progress.phase, progress.reason) == (PurgePhase.GONE, None)


def test_what_was_left_on_nvme_is_told_beside_what_was_left_in_the_disk_tier() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    bench.hear()  # that it is written down
    nvme = PurgeSwept(b"purge", Swept(files=2, left_files=2, unknown_groups=1, left_paths=("/nvme/a", "/nvme/b")))
    disk = PurgeSwept(b"purge", Swept(files=1, left_files=1, left_paths=("/disk/c",)))
    bench.absorb(bench.state.disk_report(disk, bench.now))
    bench.absorb(bench.state.report(nvme, bench.now))
    for clean in (None, PurgeSwept(b"purge", Swept())):  # one that comes late changes nothing
        if clean is not None:
            bench.absorb(bench.state.disk_report(clean, bench.now))
        progress = bench.state.purge_progress(b"purge")
        assert progress is not None
        swept = progress.swept
        assert (swept.files, swept.left_files, swept.unknown_groups) == (3, 3, 1)
        assert swept.left_paths == ("/nvme/a", "/nvme/b", "/disk/c")


def pin(bench: DiskBench, prompt: Prompt, tier: str = "host") -> PinState:
    made = bench.pin(prompt, tier=tier)
    assert isinstance(made, PinState), made
    return made


def kill(bench: DiskBench) -> None:
    """The node, and start it again: host memory is empty."""
    bench.start()
    bench.work()


def test_what_is_pinned_and_only_on_disk_is_brought_to_memory_and_written_to_nvme_again() -> None:
    bench = DiskBench(host_slots=8, nvme_extents=4, disk_extents=3)
    first, *_ = bench.store_several(6)
    assert bench.where(first) == "d"
    pin(bench, first)
    bench.work()
    assert bench.where(first) == "hnd"
    bench.store_several(12, start=10)
    assert "n" in bench.where(first)
    kill(bench)
    assert bench.match(first)[0] == 2


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_is_pinned_keeps_its_file_on_disk_as_long_as_it_has_none_on_nvme(tier: str) -> None:
    bench = DiskBench(host_slots=8, nvme_extents=4)
    first, *_ = bench.store_several(6)
    lease = bench.acquire(first)
    assert isinstance(lease, Waiting)
    bench.disk_worker.run_all()
    bench.hear_disk()
    bench.release(bench.ready())
    assert bench.where(first) == "hd"
    made = pin(bench, first, tier)
    preview = bench.state.preview_eviction("disk", 0, "", bench.now)
    answer, effects = bench.state.evict("disk", 0, "", bench.now)
    bench.absorb(effects)
    assert answer.evictions == preview.evictions > 0
    bench.disk_worker.run_all()
    bench.hear_disk()
    assert bench.where(first) == "hd"
    (state,) = bench.state.pins()
    assert state.record == made.record
    assert (state.phase, state.host_blocks, state.nvme_blocks, state.disk_blocks) == (PinPhase.HOLDS, 2, 0, 2)
    bench.worker.die(0)
    kill(bench)
    assert bench.match(first)[0] == 2


def test_what_a_purge_has_swept_from_one_tier_is_not_written_down_for_it_again() -> None:
    """Or the next start would sweep it once more, and with it what was stored in between."""
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    bench.work_on_nvme()
    assert not bench.disk.purges, "swept, and crossed out; the disk tier is still to be swept"
    bench.absorb(bench.state.worker_died(bench.now))
    bench.absorb(bench.state.worker_started(bench.now))
    bench.work()
    assert not bench.disk.purges
    assert not bench.tier.purges
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert progress.phase is PurgePhase.GONE


def test_the_disk_tier_is_swept_once_what_is_to_go_is_written_down() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    assert not bench.disk_worker.waiting
    bench.work()
    assert not bench.tier.purges
    assert not bench.tier.files


def test_a_sweep_of_which_nobody_heard_is_over_when_it_is_asked_for_again() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    bench.work_on_nvme()
    bench.disk_worker.run_all()
    bench.disk_worker.die(0)
    bench.absorb(bench.state.disk_worker_died(bench.now))
    bench.start_disk_worker()
    bench.recover_disk()
    bench.work()
    bench.tick(1.0)
    bench.work()
    progress = bench.state.purge_progress(b"purge")
    assert progress is not None
    assert progress.phase is PurgePhase.GONE
    assert not bench.tier.purges


def test_a_purge_that_waits_for_the_disk_tier_keeps_nothing_from_nvme() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    (first, *_) = bench.store_several(4)
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    bench.work_on_nvme()
    assert not bench.disk.files
    bench.store(first)
    bench.tick(100.0)
    bench.work_on_nvme()
    assert bench.disk.files, "the disk tier may be away for days"
    assert bench.tier.files, "and is not swept yet"


def test_what_another_node_has_under_the_name_of_what_is_purged_does_not_come_in_its_place() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    (mine,) = bench.store_several(1)
    bench.disk_worker.put(bench.prompt(1, 999), 0, 2, bench.now)
    bench.hear_disk()
    _, effects = bench.state.start_purge(b"purge", OfModel(fingerprint="f" * 64), bench.now)
    bench.absorb(effects)
    assert bench.match(bench.prompt(1, 999)) == (0, 0)
    bench.work()
    assert bench.match(bench.prompt(1, 999)) == (0, 0)
    assert bench.match(mine) == (0, 0)
    assert not bench.tier.files


def test_what_expires_leaves_the_disk_tier() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2, ttl=(("default", 100.0),))
    bench.store_several(4)
    for _ in range(5):
        bench.tick(60.0)
        bench.work()
    assert not bench.tier.files
    assert not bench.disk.files


def test_a_hit_refreshes_last_use_in_the_disk_tier() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    bench.tick(100.0)
    bench.release(bench.load(first))
    bench.tick(10.0)
    assert bench.tier.files[bench.name(first)].row.last_used >= bench.now - 10.0


def test_a_shutdown_does_not_wait_for_demotions() -> None:
    bench = DiskBench(nvme_extents=2)
    bench.store_several(2)
    bench.absorb(bench.state.nvme_limit(4 * PAGE, bench.now))
    assert bench.state.num_demotions == 1
    bench.absorb(bench.state.begin_shutdown(bench.now))
    assert bench.state.dirty().extents == 0
    bench.work()


def test_reads_are_asked_of_the_worker_that_has_the_tier() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    first, *_ = bench.store_several(4)
    bench.acquire(first)
    assert [type(op) for op in bench.disk_worker.waiting] == [Read]
    assert not bench.worker.waiting
    bench.work()


def test_an_eviction_from_disk_spares_what_was_used_meanwhile() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=1, disk_extents=1)
    bench.store_several(2)
    bench.store(third := bench.prompt(3, 103))
    bench.seal(third)
    bench.work_on_nvme()
    removes = [op for op in bench.disk_worker.waiting if isinstance(op, Remove)]
    assert all(op.unless_used_since < float("inf") for op in removes)
    bench.work()


def test_two_nodes_see_what_the_other_has_put_there() -> None:
    shared = Disk()
    one = DiskBench(host_slots=4, nvme_extents=1, tier=shared)
    one.store_several(3)
    two = DiskBench(host_slots=4, nvme_extents=1, tier=shared)
    first = two.prompt(1, 101)
    assert two.match(first) == (2, 0)
    assert two.load(first).blocks == 2


def store_on_disk(bench: DiskBench, seconds: float) -> None:
    """Two extents that only the disk tier has, of which one was read once, in so many seconds."""
    bench.store_several(5)
    bench.release(bench.load(bench.prompt(1, 101)))
    bench.work()
    bench.state._cascade.reads.disk_speed.note(1 << 40, seconds, 1, bench.now)


def test_what_is_slower_to_read_than_to_compute_is_not_read() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    store_on_disk(bench, seconds=1e9)
    bench.store_several(4, start=20)
    second = bench.prompt(2, 102)
    assert bench.where(second) == "d"
    answer = bench.acquire(second)
    assert isinstance(answer, Lease)
    assert (answer.blocks, answer.cached_blocks, answer.reason) == (0, 2, Reason.SLOWER_THAN_COMPUTE)
    assert bench.state.counts.shortened_leases[Reason.SLOWER_THAN_COMPUTE] == 1
    bench.tick(100.0)
    assert bench.load(second).blocks == 2, "now and then it is looked whether the disk is still so slow"


def test_what_is_quicker_to_read_than_to_compute_is_read() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    store_on_disk(bench, seconds=1e-9)
    bench.store_several(4, start=20)
    lease = bench.load(bench.prompt(2, 102))
    assert (lease.blocks, lease.reason) == (2, None)


def test_a_warm_up_brings_what_only_the_disk_tier_has_after_what_nvme_has() -> None:
    earlier = DiskBench(host_slots=12, nvme_extents=2)
    earlier.store_several(4)
    bench = DiskBench(host_slots=12, nvme_extents=2, disk=earlier.disk, tier=earlier.tier)
    bench.absorb(bench.state.start_warmup(b"job", WarmupScope(), bench.now))
    order = []
    for _ in range(20):
        order += [("nvme", op.key) for op in bench.worker.waiting if isinstance(op, Read)]
        order += [("disk", op.key) for op in bench.disk_worker.waiting if isinstance(op, Read)]
        bench.work()
        bench.tick(1.0)
    assert [tier for tier, _ in order] == sorted([tier for tier, _ in order], reverse=True)
    progress = bench.state.warmup_progress(b"job")
    assert progress is not None
    assert progress.finished
    assert progress.disk_bytes == 4 * PAGE
    assert progress.promoted_bytes == 8 * PAGE


def test_an_operator_empties_the_disk_tier_by_a_word() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(5)
    count = len(bench.tier.files)
    preview = bench.state.preview_eviction("disk", 0, "", bench.now)
    answer, effects = bench.state.evict("disk", 0, "", bench.now)
    bench.absorb(effects)
    bench.work()
    assert (answer.finished, answer.evictions, answer.lost_tokens) == (True, count, preview.lost_tokens)
    assert preview.evictions == count >= 3
    assert bench.match(bench.prompt(1, 101)) == (0, 0)
    assert not bench.tier.files


def test_an_operators_eviction_from_nvme_goes_to_disk() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=4)
    prompts = bench.store_several(4)
    preview = bench.state.preview_eviction("nvme", 0, "", bench.now)
    assert {victim.to for victim in preview.victims} == {"disk"}
    assert preview.lost_tokens == 0
    answer, effects = bench.state.evict("nvme", 0, "", bench.now)
    bench.absorb(effects)
    assert answer.finished
    bench.work()
    assert [bench.where(prompt) for prompt in prompts[:2]] == ["d", "d"]
    assert not bench.disk.files


def test_why_tells_what_only_the_disk_tier_has_and_what_was_too_slow_to_read() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    store_on_disk(bench, seconds=1e9)
    bench.store_several(4, start=20)
    second = bench.prompt(2, 102)
    bench.acquire(second)
    told = bench.state.explain(Question(of=second.group, keys=second.keys, last=1))
    assert told.trace is not None
    assert [(stretch.tiers, stretch.disk) for stretch in told.trace.stretches] == [(("disk",), "present")]
    assert told.asked[0].reason == Reason.SLOWER_THAN_COMPUTE


def test_a_purge_counts_what_it_finds_in_the_disk_tier() -> None:
    bench = DiskBench(host_slots=4, nvme_extents=2)
    bench.store_several(4)
    found = bench.state.preview_purge(OfModel(fingerprint="f" * 64), bench.now)
    assert isinstance(found, PurgeState)
    assert found.about.disk_bytes == 2 * 4 * PAGE


def test_what_is_found_before_nvme_is_recovered_is_taken_in_slices_while_nobody_waits() -> None:
    bench = DiskBench(disk_extents=1_300)
    prompts = [bench.prompt(number, 100 + number) for number in range(1, 1_203)]
    rows = []
    for prompt in prompts:
        bench.disk_worker.put(prompt, 0, 2, bench.now)
        rows.append(bench.disk_worker.unheard.pop()[1])
    state = CacheState(bench.limits, [0] * (bench.limits.host_bytes // PAGE))
    state.open_group(bench.spec, bench.now)
    state.worker_started(bench.now)
    state.disk_worker_started(bench.now)
    for report in [*rows, *bench.tier.recovery()[-1:]]:
        state.disk_report(report, bench.now)
    assert state.num_extents == 0
    state.report(Disk().recovery()[-1], bench.now)
    steps, seen = 0, state.num_extents
    while state.has_idle_work:
        state.make_ready(bench.now)
        assert state.num_extents - seen <= found_on_disk.ROWS_AT_A_TIME
        steps, seen = steps + 1, state.num_extents
    assert steps >= 2
    assert state.num_extents == len(prompts)
    assert not state.is_recovering
    state.check()


def test_a_disk_tier_that_has_more_than_it_may_is_cut_down_in_slices_after_a_start() -> None:
    tier = Disk()
    DiskBench(tier=tier, host_slots=4, nvme_extents=1, disk_extents=20).store_several(10)
    bench = DiskBench(tier=tier, disk_extents=3)
    bench.work()
    assert len(tier.files) <= 3
    assert bench.match(bench.prompt(9, 109))[0] == 2, "what was used last is still there"
