"""The worker's side before a living node: when the engine's pages are looked at, and what is told of it.

Wherever a store is when the engine's next step begins, the page may hold something else from then on; what the node has
then must be right, or not be there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from tests.integrations.connector.kit import (
    BLOCK_TOKENS,
    PAGE_BYTES,
    POISON,
    ArrayPages,
    Gate,
    count_stored,
    make_spec,
    page_of,
)
from tests.integrations.connector.living_node import LivingNode, wait_for
from tierkv.client import connect
from tierkv.core.identity import Identity
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.reasons import Reason
from tierkv.errors import LayoutMismatch
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import (
    NO_PAGE,
    GroupSpec,
    HeldPart,
    LoadJob,
    NotStored,
    Pages,
    Plan,
    Report,
    SealJob,
    Stored,
    StoreJob,
)
from tierkv.integrations.connector.worker import Finished, PrefixWorker
from tierkv.wire.messages import Commit, Holder, LeasePart, Request, Reserve, Seal

pytestmark = pytest.mark.timeout(240)  # beyond what is waited for within a test, however busy the machine is

TOKENS = list(range(100, 118))
BLOCKS = 4
FIRST_PAGE = 8
IDLE = Plan(is_idle=True)


class Bench:
    """A worker, and plans made by hand. Block i of a store lies on page i, of a load on FIRST_PAGE + i."""

    def __init__(self, node: LivingNode, *, page_groups: int = 1) -> None:
        self.node = node
        self.page_groups = page_groups
        self.spec = make_spec(page_groups=page_groups)
        self.keys = chain_keys(self.spec.identity.group_key(), pack_tokens(TOKENS), BLOCK_TOKENS)
        self.client = connect(node.directory, timeout_seconds=20)
        self.asker = connect(node.directory, timeout_seconds=20)
        self.pages = ArrayPages(16, page_groups)
        self.fence = Fence()
        self.checked: list[Identity] = []
        self.worker = PrefixWorker(self.client, self.pages, self.fence, check=self.checked.append)
        self.tell(self.spec)
        self.stored: list[Stored] = []
        self.not_stored: list[NotStored] = []
        self.failed: set[str] = set()

    def tell(self, spec: GroupSpec, number: int = 0) -> None:
        self.worker.begin_step(Plan(groups={number: spec}))

    def compute(self, blocks: int = BLOCKS) -> None:
        engine_pages = self.pages.memory
        for group in range(self.page_groups):
            for block in range(blocks):
                engine_pages[group, block] = page_of(self.spec, TOKENS, block, group=group)

    def store_job(self, first: int = 0, end: int = BLOCKS, *, group: int = 0) -> StoreJob:
        return StoreJob(
            request="r",
            group=group,
            keys=self.keys[: end * 32],
            first_block=first,
            tokens=pack_tokens(TOKENS[first * BLOCK_TOKENS : end * BLOCK_TOKENS]),
            extras={},
            pages=(tuple(range(first, end)),) * self.page_groups,
        )

    def store(self, first: int = 0, end: int = BLOCKS) -> None:
        self.worker.end_step(Plan(stores=(self.store_job(first, end),)))

    def seed(self) -> None:
        """The node has all blocks."""
        self.compute()
        self.store()
        self.wait_told()
        assert len(self.stored) == 1
        self.pages.memory[:] = POISON

    def load_job(
        self, first: int = 0, end: int = BLOCKS, *, change: Callable[[LeasePart], LeasePart] = lambda part: part
    ) -> LoadJob:
        token = self.client.session_token()
        group = self.asker.open(self.spec.identity)
        lease = group.acquire(keys=self.keys, holders=(Holder(0, token),))
        assert lease.blocks == BLOCKS
        (part,) = lease.parts
        self.lease = lease
        return LoadJob(
            request="r",
            group=0,
            grant=lease.grant,
            parts={0: HeldPart(token=token, part=change(part))},
            first_block=first,
            pages=(tuple(range(FIRST_PAGE + first, FIRST_PAGE + end)),) * self.page_groups,
        )

    def hear(self) -> None:
        report = self.worker.take_report()
        if report is not None:
            self.stored += report.stored
            self.not_stored += report.not_stored
            self.failed |= report.failed_loads

    @property
    def num_ended(self) -> int:
        """Stores of which something was told."""
        self.hear()
        return len(self.stored) + len(self.not_stored)

    def wait_told(self) -> None:
        wait_for(lambda: self.num_ended > 0, "the store has ended")

    def count_stored(self) -> int:
        return count_stored(self.node, self.spec, TOKENS, page_groups=self.page_groups)

    def is_loaded(self, first: int, end: int) -> bool:
        return all(
            (self.pages.memory[group, FIRST_PAGE + block] == page_of(self.spec, TOKENS, block, group=group)).all()
            for group in range(self.page_groups)
            for block in range(first, end)
        )

    def close(self) -> None:
        for waits in (self.pages.before_read, self.pages.before_write):
            if isinstance(waits, Gate):
                waits.opened.set()
        self.worker.close()
        self.client.close()
        self.asker.close()


@pytest.fixture
def bench(node: LivingNode) -> Iterator[Bench]:
    made = Bench(node)
    yield made
    made.close()


def reuse(bench: Bench) -> None:
    """The engine's next step begins, and writes over all pages."""
    bench.worker.begin_step(Plan())
    bench.pages.memory[:] = POISON


@contextmanager
def going_on(action: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=action)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()


# ---- the next step begins, and a store is ...


@pytest.mark.scenario(
    "B038",
    then="the step that may reuse the pages gives up a store that has not begun, and nothing of it is published",
)
def test_not_begun_so_it_never_looks_at_the_pages(bench: Bench) -> None:
    """Another job's reservation is in its way."""
    bench.compute()
    with bench.node.keep_back(Reserve):
        bench.worker.end_step(Plan(stores=(bench.store_job(0, 2), bench.store_job(2, 4))))
        bench.node.wait_for_kept()
        reuse(bench)
    wait_for(lambda: bench.num_ended == 2, "both have ended")
    assert [(late.first_block, late.reason) for late in bench.not_stored] == [(0, None), (2, None)]
    assert bench.pages.reads == 0
    assert bench.count_stored() == 0


def test_reserving_so_it_is_given_up_when_the_patience_is_over(bench: Bench) -> None:
    bench.compute()
    with bench.node.keep_back(Reserve):
        bench.store()
        bench.node.wait_for_kept()
        reuse(bench)
    bench.wait_told()
    assert bench.not_stored == [NotStored(request="r", first_block=0, reason=None)]
    assert bench.pages.reads == 0
    assert bench.count_stored() == 0
    bench.node.wait_until_nothing_is_held()


@pytest.mark.scenario(
    "B038",
    then="the step that may reuse the pages waits for a copy that has begun",
)
def test_copying_so_the_step_waits_for_the_end_of_the_copy(bench: Bench) -> None:
    gate = Gate()
    bench.compute()
    bench.pages.before_read = gate
    bench.store()
    assert gate.reached.wait(60)
    with going_on(lambda: reuse(bench)) as step:
        step.join(4 * 0.05)  # beyond STORE_PATIENCE_SECONDS: what has begun isn't given up
        assert step.is_alive()
        gate.opened.set()
    bench.wait_told()
    assert bench.stored == [Stored(rank=0, request="r", first_block=0, blocks=BLOCKS)]
    assert bench.count_stored() == BLOCKS


def test_committing_so_the_pages_are_free_already(bench: Bench) -> None:
    bench.compute()
    with bench.node.keep_back(Commit):
        bench.store()
        bench.node.wait_for_kept()
        reuse(bench)
        bench.hear()
        assert not bench.stored
    bench.wait_told()
    assert bench.count_stored() == BLOCKS


def test_over(bench: Bench) -> None:
    bench.compute()
    bench.store()
    bench.wait_told()
    reuse(bench)
    assert bench.count_stored() == BLOCKS


@pytest.mark.parametrize("kept_back", [(Commit,), (Reserve,), (Commit, Reserve)])
def test_between_two_tickets_so_the_rest_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kept_back: tuple[type[Request], ...]
) -> None:
    """A job with more than a request can hold takes several: what is there stays, and is right."""
    monkeypatch.setattr("tierkv.client.verbs._room_in_frame", lambda first_block, step, extras: first_block + 2)
    bench.compute()
    gate = Gate()
    bench.pages.before_read = gate
    bench.worker.end_step(Plan(stores=(bench.store_job(),)))
    assert gate.reached.wait(60)
    with bench.node.keep_back(*kept_back):
        gate.opened.set()
        bench.node.wait_for_kept()
        reuse(bench)
    bench.wait_told()
    assert bench.not_stored == [NotStored(request="r", first_block=0, reason=None)]
    assert bench.pages.reads == 1
    monkeypatch.undo()
    assert bench.count_stored() == 2
    bench.node.wait_until_nothing_is_held()


@pytest.mark.scenario(
    "B263",
    then="a step waits for stores that have not begun for 50 ms in all, and for copies in memory",
)
def test_a_frozen_node_holds_up_a_step_for_its_patience_only(bench: Bench) -> None:
    bench.compute()
    with bench.node.frozen():
        for _ in range(5):
            bench.store()
        reuse(bench)  # comes back while the node is still frozen
        assert bench.worker.take_counts().waited_seconds > 0
    wait_for(lambda: bench.num_ended == 5, "all have ended")
    assert bench.pages.reads == 0
    assert bench.count_stored() == 0


def test_stores_that_were_given_up_ask_nothing_of_the_node(bench: Bench) -> None:
    """Or a frozen node would have to answer for each step that it missed, one after the other."""
    bench.compute()
    with bench.node.keep_back(Reserve):
        bench.store()
        bench.node.wait_for_kept()
        for _ in range(20):
            bench.store()
            bench.worker.begin_step(Plan())
    wait_for(lambda: bench.num_ended == 21, "all have ended")
    assert bench.node.count_requests(Reserve) == 1


# ---- what a store becomes


def test_what_was_stored_is_told_once_and_counted(bench: Bench) -> None:
    bench.compute()
    bench.store()
    bench.wait_told()
    bench.hear()
    assert bench.stored == [Stored(rank=0, request="r", first_block=0, blocks=BLOCKS)]
    counts = bench.worker.take_counts()
    assert (counts.stored_blocks, counts.stored_bytes) == (BLOCKS, BLOCKS * PAGE_BYTES)
    assert bench.worker.take_counts().stored_blocks == 0


def test_what_the_node_has_is_not_looked_at(bench: Bench) -> None:
    bench.seed()
    reads = bench.pages.reads
    bench.stored.clear()
    bench.store()
    bench.wait_told()
    assert bench.stored
    assert bench.pages.reads == reads
    assert bench.count_stored() == BLOCKS


def test_what_another_engine_is_writing_counts_as_stored(bench: Bench) -> None:
    """It would be in the way of nobody but itself, and the other one's bytes are as good."""
    bench.compute()
    group = bench.asker.open(bench.spec.identity)
    with group.reserve(TOKENS) as ticket:
        bench.store()
        bench.wait_told()
        assert bench.stored
        assert bench.pages.reads == 0
        ticket.copy_from(bench.pages.memory[0, :BLOCKS])
        ticket.commit()
    assert bench.count_stored() == BLOCKS


def test_no_room_is_told_with_its_reason(bench: Bench) -> None:
    """Slots that somebody reads can't be had."""
    bench.compute()
    other = bench.asker.open(make_spec(weights="other").identity)
    tokens = list(range(64 * BLOCK_TOKENS))
    with other.reserve(tokens) as ticket:
        assert len(ticket.granted) == 64
        bench.store()
        bench.wait_told()
    assert bench.not_stored == [NotStored(request="r", first_block=0, reason=Reason.NO_ROOM)]
    assert bench.worker.take_counts().reasons == {Reason.NO_ROOM: 1}
    assert bench.count_stored() == 0


def test_a_node_that_is_away_is_told_as_such(bench: Bench) -> None:
    bench.compute()
    bench.node.go()
    bench.store()
    bench.wait_told()
    assert [one.reason for one in bench.not_stored] == [Reason.NODE_AWAY]
    assert bench.pages.reads == 0
    bench.node.come()


def test_a_node_that_dies_during_the_copy_has_nothing_of_it(bench: Bench) -> None:
    gate = Gate()
    bench.compute()
    bench.pages.before_read = gate
    bench.store()
    assert gate.reached.wait(60)
    bench.node.restart_front()
    gate.opened.set()
    bench.wait_told()
    (told,) = bench.not_stored
    assert told.reason in (Reason.SESSION_GONE, Reason.NODE_AWAY)
    assert bench.count_stored() == 0


def test_a_page_that_cannot_be_read_is_not_stored(bench: Bench) -> None:
    bench.compute()
    bench.pages.before_read = fail
    bench.store()
    bench.wait_told()
    assert [one.reason for one in bench.not_stored] == [Reason.WIRE_ERROR]
    assert bench.fence.faults == {"storing": 1}
    assert bench.count_stored() == 0
    bench.node.wait_until_nothing_is_held()
    reuse(bench)  # does not wait for a copy that has failed


def test_a_job_of_a_group_that_nobody_told_is_a_fault_and_no_more(bench: Bench) -> None:
    bench.worker.end_step(Plan(stores=(bench.store_job(group=9),), seals=(SealJob(group=9, keys=bench.keys),)))
    bench.wait_told()
    assert [one.reason for one in bench.not_stored] == [Reason.WIRE_ERROR]
    wait_for(lambda: bench.fence.faults == {"storing": 1, "sealing": 1}, "both were caught")


def test_an_identity_that_is_not_the_pages_own_is_neither_stored_to_nor_loaded_from(node: LivingNode) -> None:
    bench = Bench(node)
    try:
        bench.seed()

        def refuse(identity: Identity) -> None:
            raise LayoutMismatch("dtype", "u8", "f32")

        bench.worker._check = refuse
        bench.tell(bench.spec, 0)
        bench.stored.clear()
        bench.compute()
        bench.store()
        bench.wait_told()
        assert [one.reason for one in bench.not_stored] == [Reason.WIRE_ERROR]
        bench.worker.begin_step(Plan(loads=(bench.load_job(),), is_idle=True))
        assert bench.worker.take_finished().failed == {"r"}
        bench.lease.release_all()
    finally:
        bench.close()


def test_a_dropped_group_still_has_the_jobs_of_its_last_plan(bench: Bench) -> None:
    bench.compute()
    bench.worker.end_step(Plan(stores=(bench.store_job(),), dropped_groups=(0,)))
    bench.wait_told()
    assert bench.stored
    bench.worker.begin_step(Plan(loads=(bench.load_job(),), is_idle=True))
    assert bench.worker.take_finished().failed == {"r"}
    bench.lease.release_all()


def test_sealing_goes_behind_what_is_to_be_sealed(bench: Bench) -> None:
    bench.compute()
    with bench.node.keep_back(Seal):
        bench.worker.end_step(Plan(stores=(bench.store_job(),), seals=(SealJob(group=0, keys=bench.keys),)))
        bench.node.wait_for_kept()
        assert bench.count_stored() == BLOCKS


# ---- what a load becomes


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_load_fills_its_pages_and_no_others(bench: Bench, *, is_idle: bool) -> None:
    bench.seed()
    bench.worker.begin_step(Plan(loads=(bench.load_job(1, 3),), is_idle=is_idle))
    finished = wait_finished(bench)
    assert (finished.requests, finished.failed, finished.failed_pages) == ({"r"}, set(), {})
    assert bench.is_loaded(1, 3)
    assert (bench.pages.memory[0, [*range(FIRST_PAGE + 1), *range(FIRST_PAGE + 3, 16)]] == POISON).all()
    assert bench.worker.take_finished().requests == set()
    counts = bench.worker.take_counts()
    assert (counts.loads, counts.loaded_blocks, counts.loaded_bytes) == (1, 2, 2 * PAGE_BYTES)
    bench.node.wait_until_nothing_is_held()


def wait_finished(bench: Bench) -> Finished:
    found: list[Finished] = []

    def is_over() -> bool:
        finished = bench.worker.take_finished()
        if finished.requests:
            found.append(finished)
        return bool(found)

    wait_for(is_over, "the load is over")
    return found[0]


def test_in_an_idle_step_a_load_is_over_when_the_step_has_begun(bench: Bench) -> None:
    bench.seed()
    bench.worker.begin_step(Plan(loads=(bench.load_job(),), is_idle=True))
    assert bench.worker.take_finished().requests == {"r"}


def test_a_step_that_computes_does_not_wait_for_a_load(bench: Bench) -> None:
    gate = Gate()
    bench.seed()
    bench.pages.before_write = gate
    bench.worker.begin_step(Plan(loads=(bench.load_job(),)))
    bench.worker.end_step(Plan())
    assert bench.worker.take_finished().requests == set()
    gate.opened.set()
    assert wait_finished(bench).requests == {"r"}
    assert bench.is_loaded(0, BLOCKS)


def fewer(part: LeasePart) -> LeasePart:
    return msgspec.structs.replace(part, offsets=part.offsets[:16], generations=part.generations[:16])


def mangled(part: LeasePart) -> LeasePart:
    return msgspec.structs.replace(part, offsets=part.offsets[:-1])


def of_another_rank(part: LeasePart) -> LeasePart:
    return msgspec.structs.replace(part, rank=1)


def check_failed(bench: Bench, loaded: int) -> None:
    finished = bench.worker.take_finished()
    assert (finished.requests, finished.failed) == ({"r"}, {"r"})
    assert finished.failed_pages == {"r": tuple(range(FIRST_PAGE + loaded, FIRST_PAGE + BLOCKS))}
    assert bench.is_loaded(0, loaded)
    bench.hear()
    assert bench.failed == {"r"}
    report = bench.worker.take_report()
    assert report is None or not report.failed_loads
    assert bench.worker.take_counts().failed_blocks == BLOCKS - loaded
    bench.lease.release_all()
    bench.node.wait_until_nothing_is_held()


def test_a_load_whose_session_has_ended_fails_whole(bench: Bench) -> None:
    bench.seed()
    job = bench.load_job()
    bench.node.restart_front()
    wait_for(lambda: bench.client.session_token() not in (b"", job.parts[0].token), "a new session")
    bench.worker.begin_step(Plan(loads=(job,), is_idle=True))
    check_failed(bench, 0)
    assert (bench.pages.memory[0, FIRST_PAGE:] == POISON).all()


def test_a_load_goes_on_when_the_node_dies_under_it(bench: Bench) -> None:
    """Nobody writes to the memory of a dead one."""
    gate = Gate()
    bench.seed()
    job = bench.load_job()
    bench.pages.before_write = gate
    bench.worker.begin_step(Plan(loads=(job,)))
    assert gate.reached.wait(60)
    bench.node.restart_front()
    gate.opened.set()
    assert wait_finished(bench).failed == set()
    assert bench.is_loaded(0, BLOCKS)


def test_a_load_gets_what_its_lease_covers(bench: Bench) -> None:
    bench.seed()
    bench.worker.begin_step(Plan(loads=(bench.load_job(change=fewer),), is_idle=True))
    check_failed(bench, 2)


@pytest.mark.parametrize("change", [mangled, of_another_rank])
def test_a_part_that_cannot_be_right_is_a_failed_load(bench: Bench, change: Callable[[LeasePart], LeasePart]) -> None:
    bench.seed()
    bench.worker.begin_step(Plan(loads=(bench.load_job(change=change),), is_idle=True))
    check_failed(bench, 0)
    assert bench.fence.faults == {"loading": 1}


@pytest.mark.parametrize("revoked", range(BLOCKS))
@pytest.mark.parametrize("during", ["before the copy", "during the copy"])
@pytest.mark.scenario(
    "B031",
    then="the load says which pages it has not filled, and those before them are right",
)
def test_a_block_that_was_taken_back_fails_with_all_behind_it(bench: Bench, revoked: int, during: str) -> None:
    bench.seed()
    job = bench.load_job()
    offset = int.from_bytes(job.parts[0].part.offsets[8 * revoked : 8 * revoked + 8], "little")
    if during == "before the copy":
        bench.node.revoke(offset)
        bench.worker.begin_step(Plan(loads=(job,), is_idle=True))
    else:
        gate = Gate()
        bench.pages.before_write = gate
        with going_on(lambda: bench.worker.begin_step(Plan(loads=(job,), is_idle=True))):
            assert gate.reached.wait(60)
            bench.node.revoke(offset)
            gate.opened.set()
    check_failed(bench, revoked)


def test_a_page_that_cannot_be_written_is_a_failed_load(bench: Bench) -> None:
    bench.seed()
    job = bench.load_job()
    bench.pages.before_write = fail
    bench.worker.begin_step(Plan(loads=(job,), is_idle=True))
    check_failed(bench, 0)
    assert bench.fence.faults == {"loading": 1}


def fail() -> None:
    raise OSError("a fault to order")


def test_a_load_that_could_not_be_planned_fails_at_once(bench: Bench) -> None:
    bench.worker.begin_step(Plan(broken_loads=("one", "other")))
    finished = bench.worker.take_finished()
    assert finished.requests == finished.failed == {"one", "other"}
    assert finished.failed_pages == {}
    report = bench.worker.take_report()
    assert report is not None
    assert report.failed_loads == {"one", "other"}
    assert bench.worker.take_finished().requests == set()


def test_pages_that_the_engine_does_not_keep_are_left_out(node: LivingNode) -> None:
    """As of a sliding window, in the second page group."""
    bench = Bench(node, page_groups=2)
    try:
        bench.seed()
        job = bench.load_job()
        window = (NO_PAGE, NO_PAGE, *job.pages[1][2:])
        whole = LoadJob(
            request="r",
            group=0,
            grant=job.grant,
            parts=job.parts,
            first_block=0,
            pages=(job.pages[0], window),
        )
        bench.worker.begin_step(Plan(loads=(whole,), is_idle=True))
        assert not bench.worker.take_finished().failed
        assert bench.is_loaded(2, BLOCKS)
        assert (bench.pages.memory[1, FIRST_PAGE : FIRST_PAGE + 2] == POISON).all()
    finally:
        bench.close()


@pytest.mark.parametrize(("window", "named"), [((NO_PAGE, NO_PAGE, 10, 11), (10, 11)), ((NO_PAGE,) * BLOCKS, None)])
def test_no_page_is_never_named_as_failed(bench: Bench, window: tuple[int, ...], named: tuple[int, ...] | None) -> None:
    """Where there is none to name the request has failed as a whole."""
    bench.seed()
    bench.pages.before_write = fail
    job = bench.load_job()
    pages: Pages = (window,)
    job = LoadJob(request="r", group=0, grant=job.grant, parts=job.parts, first_block=0, pages=pages)
    bench.worker.begin_step(Plan(loads=(job,), is_idle=True))
    finished = bench.worker.take_finished()
    assert finished.failed == {"r"}
    assert finished.failed_pages == ({} if named is None else {"r": named})


# ---- the session


def test_the_session_is_told_when_it_is_known_and_when_it_is_another_one(bench: Bench) -> None:
    told: list[bytes] = []

    def look() -> bytes | None:
        bench.worker.begin_step(IDLE)
        report: Report | None = bench.worker.take_report()
        if report is not None:
            told.extend(report.tokens.values())
        return told[-1] if told else None

    wait_for(lambda: look() == bench.client.session_token(), "the first")
    (first,) = told
    bench.node.restart_front()
    wait_for(lambda: first != look() == bench.client.session_token(), "the second")
    bench.node.go()
    wait_for(lambda: look() == b"", "that there is none")
    bench.node.come()
    wait_for(lambda: b"" != look() == bench.client.session_token(), "the third")
    assert len(told) == len(set(told)) <= 4


def test_a_node_that_does_not_answer_is_looked_for_by_one_look_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, looks = Gate(), []

    def look() -> bytes:
        looks.append(1)
        gate()
        return b""

    wait_for(lambda: bench.worker._looking is None or bench.worker._looking.done(), "no look is under way")
    monkeypatch.setattr(bench.client, "session_token", look)
    monkeypatch.setattr("tierkv.integrations.connector.worker.LOOK_SECONDS", 0.0)
    bench.worker._look_at = 0.0
    for _ in range(10):
        bench.worker.begin_step(IDLE)
    assert gate.reached.wait(60)
    gate.opened.set()
    wait_for(lambda: bench.worker._looking is not None and bench.worker._looking.done(), "the look is over")
    assert looks == [1]


# ---- the end


def test_closing_waits_for_a_copy_and_gives_up_what_has_not_begun(node: LivingNode) -> None:
    bench = Bench(node)
    bench.compute()
    gate = Gate()
    bench.pages.before_read = gate
    bench.worker.end_step(Plan(stores=(bench.store_job(0, 2), bench.store_job(2, 4))))
    assert gate.reached.wait(60)
    with going_on(bench.worker.close) as closing:
        closing.join(4 * 0.05)
        assert closing.is_alive()
        gate.opened.set()
    assert bench.pages.reads <= 2
    bench.pages.memory[:] = POISON
    assert bench.count_stored() in (2, 4)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv-")]
    bench.close()


def test_closing_with_a_frozen_node_ends(node: LivingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.integrations.connector.worker.STORE_DEADLINE_SECONDS", 0.1)
    bench = Bench(node)
    bench.compute()
    bench.client._state.timeout_seconds = 0.1
    with node.frozen():
        bench.store()
        bench.worker.close()
    assert bench.pages.reads == 0
    bench.close()
    node.wait_until_nothing_is_held()
