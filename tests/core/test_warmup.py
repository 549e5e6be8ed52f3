"""What a warm-up brings, in which order, within what, and that it gives way to whoever waits for a read."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from blake3 import blake3

from tierkv.core import warmup, warmup_plan
from tierkv.core.grants import Evicted, GroupSpec, Lease, Waiting
from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import ExtentRow, GroupFound, Read, ReadDone, Recovered, Rows, TierHealth
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.ledger import Effect
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState, Limits
from tierkv.core.warmup import WarmupScope, WarmupState
from tierkv.core.warmup_plan import worth

PAGE = 4096
SESSION = b"s" * 16
JOB, OTHER_JOB = b"j" * 16, b"k" * 16
LEASE = b"l" * 16


def identity(*, weights: str = "ab" * 32, salt: str = "") -> Identity:
    layout = Layout("u8", (PAGE,), "x", 1, "fake")
    return Identity(weights, "", layout, salt=salt)


@dataclass
class Bench:
    """A cache that was started on what `put` laid on its disk: blocks of one page and one token, extents of two."""

    slots: int = 64
    now: float = 1e9
    state: CacheState = field(init=False)
    groups: dict[bytes, Identity] = field(default_factory=dict)
    rows: dict[bytes, list[ExtentRow]] = field(default_factory=dict)
    names: dict[bytes, str] = field(default_factory=dict)
    reading: list[Read] = field(default_factory=list)
    seen: list[Effect] = field(default_factory=list)

    def put(
        self,
        name: str,
        *,
        below: str = "",
        hits: int = 0,
        age: float = 100.0,
        of: Identity | None = None,
        blocks: int = 2,
    ) -> None:
        """Extent `name`, below the one of that name, of the same prompt, last used `age` seconds ago."""
        of = of or identity()
        group = of.group_key()
        self.groups[group] = of
        path = f"{below}/{name}" if below else name
        keys = self.keys(path, of, blocks)
        first = len(keys) // KEY_BYTES - blocks
        own = keys[first * KEY_BYTES :]
        parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else group
        self.names[own[:KEY_BYTES]] = name
        used = self.now - age
        row = ExtentRow(own[:KEY_BYTES], parent, first, own, PAGE, (2 + blocks) * PAGE, used, used, hits)
        self.rows.setdefault(group, []).append(row)

    def keys(self, path: str, of: Identity | None = None, blocks: int = 2) -> bytes:
        """Of all blocks down to the end of the extent at `path`, whose ancestors have two blocks each."""
        steps = path.split("/")
        tokens = [token for step in steps[:-1] for token in _tokens(step, 2)] + _tokens(steps[-1], blocks)
        return chain_keys((of or identity()).group_key(), pack_tokens(tokens), 1)

    def start(self, *, inflight_reads: int = 16) -> Bench:
        limits = Limits(
            host_bytes=self.slots * PAGE,
            slab_bytes=PAGE,
            extent_bytes=64 * PAGE,
            nvme_bytes=2**30,
            seal_after_seconds=10.0,
            session_bytes=2**40,
            inflight_writes=1,
            inflight_reads=inflight_reads,
        )
        self.state = CacheState(limits, array("Q", bytes(self.slots * 8)))
        self.state.open_session(SESSION, self.now)
        self.state.worker_started(self.now)
        for group, of in self.groups.items():
            self.state.report(GroupFound(group, of), self.now)
            self.state.report(Rows(of.weights, group, 0, self.rows[group]), self.now)
        self.state.report(Recovered(0.0, 0, 0, 0, 0, 0, 0, 0, False), self.now)
        return self

    def absorb(self, effects: list[Effect]) -> None:
        self.seen += effects
        self.reading += [effect for effect in effects if isinstance(effect, Read)]
        self.state.check()

    def warm_up(self, scope: WarmupScope | None = None, job: bytes = JOB) -> None:
        self.absorb(self.state.start_warmup(job, scope or WarmupScope(), self.now))

    def finish_read(self, *, valid: int | None = None, reason: Reason | None = None, gone: bool = False) -> None:
        read = self.reading.pop(0)
        done = ReadDone(read.op, len(read.slots) if valid is None else valid, 0.0, reason, gone)
        self.absorb(self.state.report(done, self.now))

    def finish_reads(self) -> None:
        while self.reading:
            self.finish_read()

    def names_read(self) -> list[str]:
        return [self.names[effect.key] for effect in self.seen if isinstance(effect, Read)]

    def warmed_up(self, scope: WarmupScope | None = None) -> list[str]:
        """The extents in the order in which the first of them was read."""
        self.warm_up(scope)
        self.finish_reads()
        return list(dict.fromkeys(self.names_read()))

    def progress(self, job: bytes = JOB) -> WarmupState:
        found = self.state.warmup_progress(job)
        assert found is not None
        return found

    def acquire(self, path: str, grant: bytes = LEASE, *, deadline: float = 60.0) -> Lease | Waiting:
        answer, effects = self.state.acquire(
            grant=grant,
            session=SESSION,
            group=identity().group_key(),
            keys=self.keys(path),
            max_blocks=2**16,
            deadline=self.now + deadline,
            now=self.now,
        )
        assert isinstance(answer, Lease | Waiting)
        self.absorb(effects)
        return answer


def with_extents(count: int, *, slots: int = 64) -> Bench:
    """On disk are "0", "1" and so on, each used a second before the one in front of it."""
    bench = Bench(slots)
    for number in range(count):
        bench.put(f"{number}", age=float(number))
    return bench


def _tokens(name: str, count: int) -> list[int]:
    first = int.from_bytes(blake3(name.encode()).digest()[:3], "little") * 100
    return list(range(first, first + count))


# ---- order


def test_what_was_hit_often_comes_before_what_was_used_last() -> None:
    bench = Bench()
    bench.put("once, just now", hits=0, age=10.0)
    bench.put("often, long ago", hits=500, age=2_000.0)
    bench.put("often, just now", hits=500, age=20.0)
    bench.put("once, long ago", hits=0, age=2_000.0)
    expected = ["often, just now", "often, long ago", "once, just now", "once, long ago"]
    assert bench.start().warmed_up() == expected


def test_of_equal_use_the_later_one_comes_first() -> None:
    bench = Bench()
    for age in (300.0, 100.0, 200.0):
        bench.put(f"{age:g}", age=age)
    assert bench.start().warmed_up() == ["100", "200", "300"]


def test_ages_count_from_the_last_use_of_anything_so_that_a_node_that_was_off_for_days_knows_the_order() -> None:
    bench = Bench()
    week = 7 * 86_400.0
    bench.put("twice, an hour before the end", hits=1, age=week + 3_600)
    bench.put("once, at the end", hits=0, age=week)
    assert bench.start().warmed_up() == ["once, at the end", "twice, an hour before the end"]


def test_ancestors_come_before_what_hangs_on_them_whatever_they_are_worth() -> None:
    bench = Bench()
    bench.put("system", hits=0, age=9_000.0)
    bench.put("hot", below="system", hits=90, age=1.0)
    bench.put("other", hits=3, age=1.0)
    assert bench.start().warmed_up() == ["system", "hot", "other"]


def test_tokens_deep_in_a_prompt_cost_more_to_compute_and_so_come_first() -> None:
    bench = Bench()
    bench.put("any")
    bench.start()
    (extent,) = bench.state._ledger.tree
    group = bench.state._ledger.group_of(extent)
    shallow = worth(extent, group, bench.now, 12_000.0)
    extent.first_token = 40_000
    assert worth(extent, group, bench.now, 12_000.0) == pytest.approx(2 * shallow, rel=0.01)


def test_orphans_are_left_where_they_are() -> None:
    bench = Bench()
    bench.put("there")
    bench.put("below nothing", below="was evicted")
    assert bench.start().warmed_up() == ["there"]
    assert bench.progress().finished
    assert bench.progress().total_extents == 1


# ---- what is asked for


def test_of_a_model_is_what_its_fingerprint_begins_with() -> None:
    bench = Bench()
    bench.put("mine", of=identity(weights="12" * 32))
    bench.put("other", of=identity(weights="ab" * 32))
    assert bench.start().warmed_up(WarmupScope(fingerprint="1212")) == ["mine"]


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        ("acme", ["acme's"]),
        (blake3(b"acme").hexdigest()[:8], ["acme's"]),
        ("", ["nobody's"]),
        ("nowhere", []),
        (None, ["acme's", "nobody's"]),
    ],
)
def test_of_a_tenant_is_what_has_its_salt_or_its_digest(tenant: str | None, expected: list[str]) -> None:
    bench = Bench()
    bench.put("acme's", of=identity(salt="acme"), age=1.0)
    bench.put("nobody's", age=2.0)
    assert bench.start().warmed_up(WarmupScope(tenant=tenant)) == expected
    assert bench.progress().finished


def test_since_takes_what_was_used_since_and_the_older_ancestors_that_it_needs() -> None:
    bench = Bench()
    bench.put("old root", age=900.0)
    bench.put("young", below="old root", age=50.0)
    bench.put("old", age=900.0)
    bench.put("just in time", age=100.0)
    found = bench.start().warmed_up(WarmupScope(used_since=bench.now - 100.0))
    assert found == ["old root", "young", "just in time"]
    assert (bench.progress().done_extents, bench.progress().total_extents) == (3, 3)


# ---- within what


def test_a_budget_is_kept_to_the_block_and_says_that_there_is_more() -> None:
    bench = with_extents(4)
    assert bench.start().warmed_up(WarmupScope(budget_bytes=5 * PAGE)) == ["0", "1", "2"]
    progress = bench.progress()
    assert (progress.finished, progress.reason) == (True, Reason.BUDGET)
    assert (progress.promoted_bytes, progress.total_bytes) == (5 * PAGE, 5 * PAGE)
    assert (progress.done_extents, progress.total_extents) == (3, 4)


def test_a_budget_that_ends_with_an_extent_says_so_as_well() -> None:
    bench = with_extents(4)
    assert bench.start().warmed_up(WarmupScope(budget_bytes=4 * PAGE)) == ["0", "1"]
    progress = bench.progress()
    assert (progress.finished, progress.reason) == (True, Reason.BUDGET)
    assert (progress.done_extents, progress.total_extents) == (2, 4)


def test_a_budget_that_all_fits_ends_without_a_reason() -> None:
    bench = with_extents(4)
    bench.start().warmed_up(WarmupScope(budget_bytes=8 * PAGE))
    assert (bench.progress().finished, bench.progress().reason) == (True, None)
    assert bench.progress().promoted_bytes == bench.progress().total_bytes == 8 * PAGE


def test_what_is_there_counts_against_the_budget_so_that_asking_again_brings_nothing() -> None:
    bench = with_extents(4)
    scope = WarmupScope(budget_bytes=4 * PAGE)
    bench.start().warmed_up(scope)
    bench.warm_up(scope, OTHER_JOB)
    assert bench.reading == []
    again = bench.progress(OTHER_JOB)
    assert (again.finished, again.promoted_bytes, again.already_bytes) == (True, 0, 4 * PAGE)


def test_an_interrupted_one_is_gone_on_with_by_asking_again() -> None:
    bench = with_extents(8)
    bench.start().warm_up()
    bench.finish_read()
    bench.absorb(bench.state.cancel_warmup(JOB, bench.now))
    bench.finish_reads()
    brought = len(bench.names_read())
    assert 1 < brought < 8
    bench.warm_up(job=OTHER_JOB)
    bench.finish_reads()
    assert bench.names_read() == [f"{number}" for number in range(8)]
    assert bench.progress(OTHER_JOB).already_bytes == 2 * PAGE * brought


def test_nothing_is_evicted_and_a_part_of_memory_stays_free() -> None:
    bench = with_extents(40, slots=64)
    bench.start().warmed_up()
    assert not any(isinstance(effect, Evicted) for effect in bench.seen)
    progress = bench.progress()
    assert (progress.finished, progress.reason) == (True, Reason.NO_ROOM)
    assert progress.promoted_bytes == (64 - 64 // warmup.SPARE_SHARE) * PAGE


def test_it_waits_for_an_arena_that_is_still_growing() -> None:
    bench = with_extents(4, slots=8)
    bench.start()
    bench.absorb(bench.state.host_limit(4 * PAGE, bench.now))
    bench.warmed_up()
    assert (bench.progress().done_extents, bench.progress().finished) == (2, False)
    bench.now += 2.0
    bench.absorb(bench.state.host_limit(8 * PAGE, bench.now))
    bench.finish_reads()
    progress = bench.progress()
    assert (progress.done_extents, progress.finished, progress.reason) == (4, True, None)


def test_it_ends_when_the_arena_has_stopped_growing_below_its_size() -> None:
    bench = with_extents(4, slots=8)
    bench.start()
    bench.absorb(bench.state.host_limit(4 * PAGE, bench.now))
    bench.warmed_up()
    bench.now += 5.5
    bench.warm_up()
    progress = bench.progress()
    assert (progress.done_extents, progress.finished, progress.reason) == (2, True, Reason.NO_ROOM)


def test_without_an_nvme_tier_there_is_nothing_to_do() -> None:
    limits = Limits(
        host_bytes=8 * PAGE,
        slab_bytes=PAGE,
        extent_bytes=PAGE,
        nvme_bytes=0,
        seal_after_seconds=10.0,
        session_bytes=2**40,
        inflight_writes=1,
        inflight_reads=1,
    )
    state = CacheState(limits, array("Q", bytes(8 * 8)))
    state.open_group(GroupSpec(group=identity().group_key(), identity=identity()), 0.0)
    state.start_warmup(JOB, WarmupScope(), 0.0)
    progress = state.warmup_progress(JOB)
    assert progress is not None
    assert (progress.finished, progress.total_extents, progress.reason) == (True, 0, None)


# ---- giving way


def test_while_a_lease_waits_no_read_is_begun_and_then_it_goes_on() -> None:
    bench = with_extents(12)
    bench.start().warm_up()
    assert bench.names_read() == ["0", "1", "2", "3"]
    assert isinstance(bench.acquire("11"), Waiting)
    assert bench.names_read()[4:] == ["11"]
    for _ in range(4):
        bench.finish_read()
        assert bench.names_read()[5:] == []
        assert bench.progress().is_yielding
        assert not bench.progress().finished
    bench.finish_read()  # and the lease is granted
    assert bench.names_read()[5:] == ["4"]
    assert not bench.progress().is_yielding
    bench.finish_reads()
    assert bench.progress().finished


def test_a_lease_that_gives_up_at_its_deadline_lets_it_go_on() -> None:
    bench = with_extents(4)
    bench.start()
    assert isinstance(bench.acquire("3", deadline=9.0), Waiting)
    bench.warm_up()
    assert bench.names_read() == ["3"]
    bench.now += 9.0
    bench.absorb(bench.state.tick(bench.now))
    assert bench.names_read() == ["3", "0", "1", "2"]  # beside the read that nobody waits for any more


def test_where_requests_come_one_piece_is_read_at_a_time_and_more_when_none_has_come_for_a_while() -> None:
    bench = with_extents(12)
    bench.start().warm_up()
    assert len(bench.reading) == warmup.READS_ALONE
    for _ in range(4):
        bench.finish_read()
    bench.now += 0.5
    assert isinstance(bench.acquire("0"), Lease)  # it is in memory: nobody waits
    while len(bench.reading) > 1:
        bench.finish_read()
    for _ in range(2):
        bench.finish_read()
        assert len(bench.reading) == warmup.READS_BESIDE
    bench.now += warmup.ALONE_SECONDS
    bench.finish_read()
    assert len(bench.reading) == 2  # the last ones
    bench.finish_reads()
    assert bench.progress().finished


def test_all_warmups_together_have_no_more_reads_under_way_than_one() -> None:
    bench = with_extents(12)
    bench.start().warm_up()
    bench.warm_up(job=OTHER_JOB)
    assert len(bench.reading) == warmup.READS_ALONE


def test_it_reads_in_pieces_so_that_nobody_waits_for_a_whole_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "PIECE_BYTES", 3 * PAGE)
    bench = Bench()
    bench.put("long", blocks=8)
    bench.start().warm_up()
    assert [len(read.slots) for read in bench.reading] == [3]
    bench.finish_read()
    assert [(read.first, len(read.slots)) for read in bench.reading] == [(3, 3)]
    assert bench.progress().promoted_bytes == 3 * PAGE
    bench.finish_reads()
    progress = bench.progress()
    assert (progress.finished, progress.done_extents, progress.promoted_bytes) == (True, 1, 8 * PAGE)


def test_a_lease_gets_the_rest_of_what_is_just_being_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "PIECE_BYTES", PAGE)
    bench = Bench()
    bench.put("0")
    bench.start().warm_up()
    assert isinstance(bench.acquire("0"), Waiting)
    bench.finish_read()
    assert [(read.first, len(read.slots)) for read in bench.reading] == [(1, 1)]
    bench.finish_reads()
    assert bench.progress().finished


def test_many_extents_are_planned_in_slices_between_which_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_plan, "SLICE", 3)
    monkeypatch.setattr(warmup, "SLICE", 3)
    bench = with_extents(20)
    bench.start().warm_up()
    slices = 0
    while bench.state.has_idle_work:
        assert bench.reading == []
        bench.absorb(bench.state.make_ready(bench.now))
        slices += 1
    assert slices >= 12
    bench.finish_reads()
    assert bench.names_read() == [f"{number}" for number in range(20)]
    bench.warm_up(job=OTHER_JOB)  # all of it is in memory: looked through in slices as well
    while bench.state.has_idle_work:
        bench.absorb(bench.state.make_ready(bench.now))
    assert (bench.progress(OTHER_JOB).finished, bench.progress(OTHER_JOB).already_bytes) == (True, 40 * PAGE)


def test_where_somebody_always_waits_a_slice_is_planned_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup_plan, "SLICE", 3)
    monkeypatch.setattr(warmup, "SLICE", 3)
    bench = with_extents(20)
    bench.start().warm_up()
    bench.absorb(bench.state.tick(bench.now))
    began = bench.now
    while bench.state.has_idle_work:  # and nobody does it
        due = bench.state.next_wakeup()
        assert due is not None
        assert due >= bench.now
        bench.now = due
        bench.absorb(bench.state.tick(bench.now))
    assert bench.now - began >= 10 * warmup.STEP_SECONDS
    bench.finish_reads()
    assert bench.progress().done_extents == 20


# ---- what goes wrong


def test_what_can_not_be_read_is_counted_and_what_hangs_on_it_is_not_begun() -> None:
    bench = Bench()
    bench.put("root", hits=9)
    bench.put("child", below="root", hits=8)
    bench.put("grandchild", below="root/child", hits=7)
    bench.put("other", age=900.0)
    bench.start()
    bench.acquire("nothing")  # somebody asks for something, so that one is read at a time
    bench.warm_up()
    assert bench.names_read() == ["root"]
    bench.finish_read(valid=0, reason=Reason.CHECKSUM, gone=True)
    bench.finish_reads()
    assert bench.names_read() == ["root", "other"]
    progress = bench.progress()
    assert (progress.finished, progress.failed_extents) == (True, 1)
    assert progress.done_extents == progress.total_extents


def test_what_hangs_on_something_that_could_not_be_read_and_is_still_there_is_left_out() -> None:
    bench = Bench()
    bench.put("root", hits=9)
    bench.put("child", below="root", hits=8)
    bench.put("grandchild", below="root/child", hits=7)
    bench.put("other", age=900.0)
    bench.start()
    bench.acquire("nothing")  # so that one is read at a time
    bench.warm_up()
    bench.finish_read(valid=0, reason=Reason.IO_ERROR)
    bench.finish_reads()
    assert bench.names_read() == ["root", "other"]
    progress = bench.progress()
    assert (progress.finished, progress.failed_extents, progress.done_extents) == (True, 1, 4)


def test_a_disk_that_does_not_answer_ends_it_at_once() -> None:
    bench = Bench()
    for number in range(8):
        bench.put(f"{number}")
    bench.start().warm_up()
    bench.absorb(bench.state.report(TierHealth(False, 0, 2**30, readable=False), bench.now))
    progress = bench.progress()
    assert (progress.finished, progress.reason, progress.failed_extents) == (True, Reason.IO_STUCK, 0)
    bench.finish_reads()


def test_it_goes_on_with_the_next_storage_worker() -> None:
    bench = with_extents(4)
    bench.start().warm_up()
    bench.reading.clear()
    bench.absorb(bench.state.worker_died(bench.now))
    assert not bench.progress().finished
    bench.absorb(bench.state.worker_started(bench.now))
    bench.finish_reads()
    assert bench.progress().finished
    assert bench.progress().promoted_bytes == 8 * PAGE


def test_what_was_purged_meanwhile_is_left_out() -> None:
    bench = with_extents(6)
    bench.start().warm_up()
    for extent in list(bench.state._ledger.tree):
        if bench.names[extent.key] in ("1", "4"):
            bench.state._cascade.purge(extent)
    bench.finish_reads()
    assert bench.names_read() == ["0", "1", "2", "3", "5"]
    progress = bench.progress()
    assert (progress.finished, progress.failed_extents, progress.done_extents) == (True, 0, 6)
