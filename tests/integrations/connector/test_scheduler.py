"""The scheduler's side before a living node, with workers that are sessions of their own: the table of its docstring,
phase by event, and what must hold whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.integrations.connector.kit import BLOCK_TOKENS, Engine, Gate, make_spec
from tests.integrations.connector.living_node import LivingNode, wait_for
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.plan import NO_PAGE, NotStored, Pages, Plan, Report, SealJob, Stored
from tierkv.integrations.connector.prefix import MOST_TRIES
from tierkv.integrations.connector.scheduler import (
    LINE_SECONDS,
    MOST_GROUPS,
    MOST_HALF_STORED,
    Answer,
    Phase,
    Prompt,
    Scheduled,
)
from tierkv.wire.messages import Acquire, Release, Reserve

pytestmark = pytest.mark.timeout(240)  # beyond what is waited for within a test, however busy the machine is

TOKENS = list(range(100, 118))  # four blocks, and half a block
CACHED = 3 * BLOCK_TOKENS
UNKNOWN = list(range(900, 918))
FIRST_PAGE = 20


def phase_of(engine: Engine, request: str = "r") -> Phase | None:
    state = engine.scheduler._requests.get(request)
    return None if state is None else state.phase


@pytest.fixture
def ready(engine: Engine) -> Engine:
    """The node has the first three blocks of TOKENS, and the workers' sessions are known."""
    engine.introduce()
    engine.run("before", TOKENS[: CACHED + 1])
    engine.poison()
    return engine


# ---- the table


@dataclass
class Story:
    """A request "r" that was brought into a phase, and what has to be let go in the end."""

    engine: Engine
    owned: ExitStack
    gate: Gate = field(default_factory=Gate)

    @property
    def matched(self) -> int | None:
        return self.engine.matched("r")

    def let_go(self) -> None:
        self.gate.opened.set()
        self.owned.close()


@pytest.fixture
def story(ready: Engine) -> Iterator[Story]:
    with ExitStack() as owned:
        made = Story(ready, owned)
        yield made
        made.let_go()


def make_new(story: Story) -> None:
    story.engine.add("r", TOKENS)


def make_asked(story: Story) -> None:
    make_new(story)
    story.owned.enter_context(story.engine.node.keep_back(Acquire))
    assert story.matched is None
    story.engine.node.wait_for_kept()


def make_granted(story: Story) -> None:
    make_new(story)
    assert story.engine.wait_matched("r") == CACHED


def make_missed(story: Story) -> None:
    story.engine.add("r", UNKNOWN)
    assert story.engine.wait_matched("r") == 0


def make_loading(story: Story) -> None:
    """A worker has the job, and its first copy waits."""
    make_granted(story)
    story.engine.pages[0].before_write = story.gate
    story.engine.allot("r", CACHED, first_page=FIRST_PAGE)
    story.engine.step((), is_idle=False)
    assert story.gate.reached.wait(60)


def make_running(story: Story) -> None:
    make_granted(story)
    story.engine.allot("r", CACHED, first_page=FIRST_PAGE)
    story.engine.until(lambda: "r" in story.engine.ended_loads, "the load is over")
    story.engine.allot("r", 0, first_page=FIRST_PAGE)


PHASES: dict[Phase, Callable[[Story], None]] = {
    Phase.NEW: make_new,
    Phase.ASKED: make_asked,
    Phase.GRANTED: make_granted,
    Phase.MISSED: make_missed,
    Phase.LOADING: make_loading,
    Phase.RUNNING: make_running,
}


@dataclass(frozen=True)
class Outcome:
    """`phase` None: the request is gone. `answer`: what `matched` says, once it knows."""

    phase: Phase | None
    answer: int | None = None
    loads: int = 0
    broken: int = 0
    seals: int = 0


def check(story: Story, outcome: Outcome, answer: int | None = None) -> None:
    assert (phase_of(story.engine), answer) == (outcome.phase, outcome.answer)
    plan = story.engine.scheduler.step((), is_idle=False)
    assert (len(plan.loads), len(plan.broken_loads), len(plan.seals)) == (outcome.loads, outcome.broken, outcome.seals)
    assert all(job.blocks * BLOCK_TOKENS == CACHED for job in plan.loads)
    assert set(plan.broken_loads) <= {"r"}
    for worker in story.engine.workers:
        worker.begin_step(plan)
    story.engine.plan = plan
    finish(story)


def finish(story: Story) -> None:
    """Whatever happened: a load that the engine waits for ends, and nothing is left at the node."""
    story.let_go()
    engine = story.engine
    engine.end()
    engine.scheduler.finished("r")
    engine.until(lambda: not engine.scheduler._loading, "every load has ended")
    engine.node.wait_until_nothing_is_held()
    assert "r" not in engine.scheduler
    assert not engine.scheduler._failed_loads
    assert not engine.fence.faults.keys() - {"planning a load"}


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.GRANTED, CACHED)),
        (Phase.GRANTED, Outcome(Phase.GRANTED, CACHED)),
        (Phase.MISSED, Outcome(Phase.MISSED, 0)),
        (Phase.LOADING, Outcome(Phase.MISSED, 0)),
        (Phase.RUNNING, Outcome(Phase.GRANTED, CACHED)),
    ],
)
def test_a_request_is_asked_about_again(story: Story, phase: Phase, outcome: Outcome) -> None:
    PHASES[phase](story)
    check(story, outcome, story.engine.wait_matched("r"))


def test_an_answer_that_is_pending_stays_pending(story: Story) -> None:
    make_asked(story)
    assert [story.matched for _ in range(5)] == [None] * 5
    check(story, Outcome(Phase.ASKED))


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.RUNNING, broken=1)),
        (Phase.ASKED, Outcome(Phase.RUNNING, broken=1)),
        (Phase.GRANTED, Outcome(Phase.LOADING, loads=1)),
        (Phase.MISSED, Outcome(Phase.RUNNING, broken=1)),
        (Phase.LOADING, Outcome(Phase.RUNNING, broken=1)),
        (Phase.RUNNING, Outcome(Phase.RUNNING, broken=1)),
    ],
)
def test_the_engine_has_pages_and_wants_a_load(story: Story, phase: Phase, outcome: Outcome) -> None:
    """Where nothing was promised there is nothing to load, and the load that the engine waits for ends at once."""
    PHASES[phase](story)
    story.engine.allot("r", CACHED, first_page=FIRST_PAGE)
    check(story, outcome)
    assert "r" in story.engine.ended_loads
    assert ("r" in story.engine.failed_loads) == bool(outcome.broken)


@pytest.mark.parametrize("phase", PHASES)
def test_the_engine_has_pages_and_wants_no_load(story: Story, phase: Phase) -> None:
    PHASES[phase](story)
    story.engine.allot("r", 0, first_page=FIRST_PAGE)
    check(story, Outcome(Phase.RUNNING))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.scenario(
    "B072",
    then="a request may be aborted in every phase, and nothing is left at the node",
)
def test_a_request_ends_or_is_aborted(story: Story, phase: Phase) -> None:
    PHASES[phase](story)
    story.engine.scheduler.finished("r")
    check(story, Outcome(None, seals=1 if phase is Phase.RUNNING else 0))


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.GRANTED, CACHED)),
        (Phase.GRANTED, Outcome(Phase.GRANTED, CACHED)),
        (Phase.MISSED, Outcome(Phase.MISSED, 0)),
        (Phase.RUNNING, Outcome(Phase.GRANTED, CACHED)),
    ],
)
@pytest.mark.scenario(
    "B076",
    then="it is asked about as a new one, and gets a lease of its own",
)
def test_a_request_runs_is_preempted_and_asked_about_anew(story: Story, phase: Phase, outcome: Outcome) -> None:
    PHASES[phase](story)
    story.engine.allot("r", 0, first_page=FIRST_PAGE)
    check(story, outcome, story.engine.wait_matched("r"))


def test_a_request_whose_answer_came_too_late_is_asked_about_anew_when_it_is_preempted(story: Story) -> None:
    make_asked(story)
    story.engine.allot("r", 0)
    story.let_go()
    check(story, Outcome(Phase.GRANTED, CACHED), story.engine.wait_matched("r"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_load_is_said_to_have_failed(story: Story, phase: Phase) -> None:
    """What the report does to the phase: nothing. Behind it the request is not asked about again."""
    PHASES[phase](story)
    story.engine.scheduler.report(Report(failed_loads=frozenset({"r"})))
    assert phase_of(story.engine) is phase
    story.engine.allot("r", 0)
    assert story.matched == 0
    story.engine.scheduler.loaded({"r"})
    check(story, Outcome(Phase.MISSED))


@pytest.mark.parametrize("phase", PHASES)
def test_a_store_is_said_to_have_come_too_late(story: Story, phase: Phase) -> None:
    PHASES[phase](story)
    late = NotStored(request="r", first_block=0, reason=None)
    story.engine.scheduler.report(Report(not_stored=(late,)))
    check(story, Outcome(phase))


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.MISSED, 0)),
        (Phase.GRANTED, Outcome(Phase.MISSED, 0)),
        (Phase.MISSED, Outcome(Phase.MISSED, 0)),
        (Phase.LOADING, Outcome(Phase.MISSED, 0)),
        (Phase.RUNNING, Outcome(Phase.MISSED, 0)),
    ],
)
@pytest.mark.parametrize("comes_back", [False, True], ids=["away", "restarted"])
def test_the_node_goes_away(story: Story, phase: Phase, outcome: Outcome, *, comes_back: bool) -> None:
    """Also where it is back at once, with nothing in memory and without the sessions that were to copy."""
    PHASES[phase](story)
    engine, known = story.engine, dict(story.engine.scheduler._tokens)
    if comes_back:
        engine.node.restart_front()
    else:
        engine.node.go()
    engine.until(lambda: engine.scheduler._tokens != known, "the workers have noticed")
    answer = engine.wait_matched("r")
    if not comes_back:
        engine.node.come()
    check(story, outcome, answer)


@pytest.mark.parametrize("comes_back", [False, True], ids=["away", "restarted"])
def test_the_node_goes_away_while_a_request_waits_for_its_answer(story: Story, *, comes_back: bool) -> None:
    make_asked(story)
    if comes_back:
        story.engine.node.restart_front()
        assert story.engine.wait_matched("r") == 0
    else:
        story.engine.node.go()
        assert story.engine.wait_matched("r") == 0
        story.engine.node.come()
    check(story, Outcome(Phase.MISSED))


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.MISSED, 0)),
        (Phase.ASKED, Outcome(Phase.MISSED, 0)),
        (Phase.GRANTED, Outcome(Phase.MISSED, 0)),
        (Phase.MISSED, Outcome(Phase.MISSED, 0)),
        (Phase.LOADING, Outcome(Phase.MISSED, 0)),
        (Phase.RUNNING, Outcome(Phase.MISSED, 0)),
    ],
)
@pytest.mark.scenario(
    "B078",
    then="nothing that was asked or stored before is used, in whatever phase a request is",
)
def test_the_cache_is_reset(story: Story, phase: Phase, outcome: Outcome) -> None:
    """Nothing that was stored before is used, and nothing that was computed before is stored."""
    PHASES[phase](story)
    story.engine.scheduler.reset()
    assert story.matched == 0
    assert story.engine.scheduler.step([story.engine.scheduled("r")], is_idle=False).stores == ()
    check(story, outcome, 0)


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.NEW, Outcome(Phase.GRANTED, CACHED)),
        (Phase.ASKED, Outcome(Phase.MISSED, 0)),
        (Phase.GRANTED, Outcome(Phase.GRANTED, CACHED)),
        (Phase.MISSED, Outcome(Phase.MISSED, 0)),
        (Phase.RUNNING, Outcome(Phase.GRANTED, CACHED)),
    ],
)
def test_the_deadline_passes(story: Story, phase: Phase, outcome: Outcome) -> None:
    """It is the question's: a lease that was granted in time is as good as before."""
    PHASES[phase](story)
    story.engine.clock.skip(61)
    answer = story.matched if phase is Phase.ASKED else story.engine.wait_matched("r")
    check(story, outcome, answer)


# ---- asking


def test_matched_says_the_same_however_often_it_is_asked_and_asks_the_node_once(ready: Engine) -> None:
    ready.add("r", TOKENS)
    assert ready.wait_matched("r") == CACHED
    assert [ready.matched("r") for _ in range(10)] == [CACHED] * 10
    assert ready.scheduler.counts.asked == 1
    assert ready.node.num_leases == 1
    ready.scheduler.finished("r")
    ready.node.wait_until_nothing_is_held()


@pytest.mark.parametrize(("tokens", "loadable"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (18, 12)])
def test_at_least_one_token_is_left_to_compute(ready: Engine, tokens: int, loadable: int) -> None:
    ready.add("r", TOKENS[:tokens])
    assert ready.wait_matched("r") == loadable


@pytest.mark.parametrize(("computed", "loadable"), [(0, 12), (4, 8), (8, 4), (12, 0), (16, 0)])
def test_what_the_engine_has_itself_is_not_loaded(ready: Engine, computed: int, loadable: int) -> None:
    ready.add("r", TOKENS)
    assert ready.wait_matched("r", computed) == loadable


def test_the_engine_may_have_more_itself_when_it_asks_again(ready: Engine) -> None:
    ready.add("r", TOKENS)
    assert ready.wait_matched("r") == CACHED
    assert ready.matched("r", 8) == 4
    ready.allot("r", 4, first_page=FIRST_PAGE)
    plan = ready.step(())
    assert [(job.first_block, job.blocks, job.pages) for job in plan.loads] == [(2, 1, ((FIRST_PAGE + 2,),))]
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert ready.is_right("r", 2, 3, first_page=FIRST_PAGE)


def test_what_was_loaded_is_what_was_stored(ready: Engine) -> None:
    ready.add("r", TOKENS)
    ready.allot("r", ready.wait_matched("r"), first_page=FIRST_PAGE)
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert not ready.failed_loads
    assert ready.is_right("r", 0, 3, first_page=FIRST_PAGE)
    assert ready.scheduler.counts.hit_requests == 1
    assert ready.scheduler.counts.host_tokens == CACHED


def test_the_node_is_told_what_the_engine_calls_the_request(ready: Engine) -> None:
    ready.add("cmpl-7", TOKENS)
    assert ready.wait_matched("cmpl-7") == CACHED
    assert ready.node.look(lambda state: next(iter(state.recent)).name) == "cmpl-7"
    ready.scheduler.finished("cmpl-7")
    ready.node.wait_until_nothing_is_held()


def test_a_request_that_may_not_load_is_not_asked_about(ready: Engine) -> None:
    ready.add("r", TOKENS, loads=False)
    assert ready.matched("r") == 0
    assert ready.scheduler.counts.asked == 0


def test_a_request_that_nobody_knows_has_nothing_and_its_load_fails_at_once(ready: Engine) -> None:
    assert "r" not in ready.scheduler
    assert ready.scheduler.matched("r", 0, 100) == 0
    ready.scheduler.allotted("r", 8, ready.places)
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert ready.failed_loads == {"r"}


def test_a_request_waits_no_longer_than_its_deadline_for_an_answer(ready: Engine) -> None:
    ready.add("r", TOKENS)
    with ready.node.keep_back(Acquire):
        assert ready.matched("r") is None
        ready.clock.skip(59)
        assert ready.matched("r") is None
        ready.clock.skip(1.1)
        assert ready.matched("r") == 0
        assert ready.scheduler.counts.misses == {Reason.DEADLINE: 1}
    ready.node.wait_until_nothing_is_held()


def test_a_long_queue_does_not_take_all_memory_with_leases(ready: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stands in line is asked about when there is a place, with the whole of its deadline before it; and doesn't
    stand there for ever."""
    monkeypatch.setattr("tierkv.integrations.connector.scheduler.MOST_OPEN", 2)
    for name in ("one", "two", "three", "four"):
        ready.add(name, TOKENS)
    assert [ready.wait_matched(name) for name in ("one", "two")] == [CACHED] * 2
    assert [ready.matched(name) for name in ("three", "four")] == [None] * 2
    assert ready.scheduler.counts.asked == ready.node.num_leases == 2
    ready.allot("one", CACHED, first_page=FIRST_PAGE)
    assert ready.wait_matched("three") == CACHED
    assert ready.matched("four") is None
    ready.clock.skip(LINE_SECONDS - 1)
    assert ready.matched("four") is None
    ready.clock.skip(2)
    assert ready.matched("four") == 0
    assert ready.matched("three") == CACHED


def test_a_request_that_stood_in_line_has_its_whole_deadline_for_the_answer(
    ready: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.integrations.connector.scheduler.MOST_OPEN", 1)
    for name in ("one", "two"):
        ready.add(name, TOKENS)
    assert ready.wait_matched("one") == CACHED
    assert ready.matched("two") is None
    ready.clock.skip(LINE_SECONDS - 1)
    ready.allot("one", CACHED, first_page=FIRST_PAGE)
    with ready.node.keep_back(Acquire):
        assert ready.matched("two") is None
        ready.clock.skip(59)
        assert ready.matched("two") is None
        ready.clock.skip(1.1)
        assert ready.matched("two") == 0


def test_all_first_questions_of_a_step_share_its_patience(node: LivingNode) -> None:
    engine = Engine(node, patience_seconds=0.5)
    try:
        engine.introduce()
        with node.keep_back(Acquire):
            for number in range(20):
                engine.add(f"r{number}", TOKENS)
                assert engine.matched(f"r{number}") is None
            assert engine.scheduler._patience_left == 0
        engine.step(())
        assert engine.scheduler._patience_left == 0.5
    finally:
        engine.close()


def test_an_engine_with_nobody_else_to_compute_for_is_not_kept_waiting(node: LivingNode) -> None:
    engine = Engine(node, patience_seconds=60)
    try:
        engine.introduce()
        with node.keep_back(Acquire):
            engine.add("r", TOKENS)
            assert engine.scheduler.matched("r", 0, len(TOKENS), others_compute=False) is None
        assert engine.scheduler._patience_left == 60
        assert engine.wait_matched("r") == 0
    finally:
        engine.close()


@pytest.mark.parametrize("computed", range(4 * BLOCK_TOKENS + 2))
def test_a_step_has_to_be_told_of_a_request_when_it_has_something_to_store(ready: Engine, computed: int) -> None:
    ready.add("r", TOKENS[: 4 * BLOCK_TOKENS + 1])
    ready.wait_matched("r")
    ready.allot("r", 0)
    prefix = ready.scheduler._requests["r"].prefix
    assert ready.scheduler.is_due("r", computed) == bool(prefix.to_offer(computed))
    prefix.end()
    assert not ready.scheduler.is_due("r", computed)
    assert not ready.scheduler.is_due("another", computed)


def test_a_request_does_not_wait_for_a_node_that_is_away(node: LivingNode) -> None:
    engine = Engine(node, patience_seconds=60)
    try:
        engine.introduce()
        node.go()
        engine.until(lambda: not all(engine.scheduler._tokens.values()), "the worker has noticed")
        engine.add("r", TOKENS)
        assert engine.matched("r") == 0
        assert engine.scheduler.counts.misses == {Reason.NODE_AWAY: 1}
        node.come()
    finally:
        engine.close()


def test_a_fault_of_a_question_that_was_given_up_is_counted_all_the_same(ready: Engine) -> None:
    asking: Future[Answer] = Future()
    asking.set_exception(OSError("the node's sockets are gone"))
    ready.scheduler._discard(asking)
    assert ready.scheduler._fence.faults == {"asking the node": 1}


def test_the_first_request_after_the_node_came_back_uses_it(node: LivingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has said that the node is away, and nothing since, for an idle engine makes no steps."""
    monkeypatch.setattr("tierkv.integrations.connector.scheduler.HOLDER_SECONDS", 60.0)  # however busy the machine is
    engine = Engine(node)
    try:
        engine.introduce()
        node.go()
        engine.until(lambda: not all(engine.scheduler._tokens.values()), "the worker has noticed")
        node.come()
        wait_for(lambda: bool(engine.scheduler._client.session_token()), "the scheduler's own session is there")
        engine.add("r", TOKENS)
        assert engine.wait_matched("r") == 0
        assert engine.scheduler.counts.misses == {}
        assert all(engine.scheduler._tokens.values())
    finally:
        engine.close()


def test_a_request_that_came_before_the_workers_sessions_were_known_waits_for_them(engine: Engine) -> None:
    engine.add("r", TOKENS)
    assert engine.matched("r") is None
    assert engine.wait_matched("r") == 0
    assert engine.scheduler.counts.misses == {}


def test_a_request_does_not_wait_long_for_workers_that_say_nothing(engine: Engine) -> None:
    engine.add("r", TOKENS)
    assert engine.matched("r") is None
    engine.clock.skip(1)
    wait_for(lambda: engine.matched("r") == 0, "it is not waited for")
    assert engine.scheduler.counts.misses == {Reason.SESSION_GONE: 1}


def test_a_holder_that_has_ended_is_asked_for_under_its_next_session(ready: Engine) -> None:
    """As with a worker that was restarted: the node doesn't know its session any more."""
    before = ready.scheduler._tokens[0]
    ready.node.end_session(before)
    ready.add("r", TOKENS)
    assert ready.matched("r") is None
    ready.clock.skip(1)
    wait_for(lambda: ready.matched("r") == 0, "nobody can copy")


@pytest.mark.scenario(
    "B199",
    then="the scheduler makes the keys once, and an answer is what all ranks have",
)
def test_all_ranks_are_asked_for_together(node: LivingNode) -> None:
    engine = Engine(node, ranks=2)
    try:
        engine.introduce()
        engine.run("before", TOKENS)
        engine.poison()
        engine.add("r", TOKENS)
        engine.allot("r", engine.wait_matched("r"), first_page=FIRST_PAGE)
        plan = engine.step(())
        (job,) = plan.loads
        assert set(job.parts) == {0, 1}
        engine.until(lambda: "r" in engine.ended_loads, "the load is over")
        assert engine.is_right("r", 0, 4, first_page=FIRST_PAGE)
        node.wait_until_nothing_is_held()
    finally:
        engine.close()


def test_a_rank_that_fails_a_load_fails_it_for_all_and_what_it_held_is_given_back(node: LivingNode) -> None:
    engine = Engine(node, ranks=2)
    try:
        engine.introduce()
        engine.run("before", TOKENS)
        engine.add("r", TOKENS)
        engine.allot("r", engine.wait_matched("r"), first_page=FIRST_PAGE)
        engine.pages[1].before_write = fail
        engine.until(lambda: "r" in engine.ended_loads, "the load is over")
        assert engine.failed_loads == {"r"}
        assert engine.scheduler.counts.failed_loads == 1
        node.wait_until_nothing_is_held()
        assert engine.matched("r") == 0
    finally:
        engine.close()


def fail() -> None:
    raise OSError("a fault to order")


def test_what_cannot_be_read_of_a_request_is_a_miss(ready: Engine) -> None:
    """The engine's fence answers 0 for it; it is then computed, and nothing of it is stored."""

    def tokens(begin: int, end: int) -> list[int]:
        raise RuntimeError("a fault to order")

    ready.scheduler.add(Prompt(request="r", spec=ready.spec, tokens=tokens))
    with pytest.raises(RuntimeError, match="to order"):
        ready.scheduler.matched("r", 0, len(TOKENS))
    ready.tokens["r"] = TOKENS
    ready.allot("r", 0)
    assert phase_of(ready) is Phase.RUNNING
    assert ready.step([ready.scheduled("r")]).stores == ()
    assert ready.fence.faults == {"planning a store": 1}


def test_a_fault_while_asking_is_a_miss(ready: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.integrations.connector.scheduler.open_group", lambda *_, **__: fail())
    ready.add("r", TOKENS, spec=make_spec(salt="new"))
    wait_for(lambda: ready.matched("r") == 0, "an answer")
    assert ready.scheduler.counts.misses == {Reason.WIRE_ERROR: 1}
    assert ready.fence.faults == {"asking the node": 1}


# ---- planning a load


@pytest.mark.parametrize("tokens", [3, 10, 16])
def test_a_load_of_what_was_not_promised_is_planned_to_fail(ready: Engine, tokens: int) -> None:
    ready.add("r", TOKENS)
    assert ready.wait_matched("r") == CACHED
    ready.allot("r", tokens, first_page=FIRST_PAGE)
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert ready.failed_loads == {"r"}
    ready.node.wait_until_nothing_is_held()


def test_a_load_whose_pages_cannot_be_told_is_planned_to_fail(ready: Engine) -> None:
    def pages(first: int, end: int) -> Pages:
        raise RuntimeError("a fault to order")

    ready.add("r", TOKENS)
    assert ready.wait_matched("r") == CACHED
    ready.scheduler.allotted("r", CACHED, pages)
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert ready.failed_loads == {"r"}
    assert ready.fence.faults == {"planning a load": 1}
    ready.node.wait_until_nothing_is_held()


@pytest.mark.scenario(
    "B074",
    then="the load goes on into pages that the engine keeps for it, ends, and is given back",
)
def test_a_load_goes_on_when_its_request_was_aborted_and_ends(ready: Engine) -> None:
    """The engine keeps the pages for so long."""
    gate = Gate()
    ready.add("r", TOKENS)
    ready.wait_matched("r")
    ready.pages[0].before_write = gate
    ready.allot("r", CACHED, first_page=FIRST_PAGE)
    ready.step((), is_idle=False)
    assert gate.reached.wait(60)
    ready.scheduler.finished("r")
    ready.step((), is_idle=False)
    assert "r" not in ready.ended_loads
    gate.opened.set()
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    ready.node.wait_until_nothing_is_held()


# ---- planning stores


def test_only_whole_blocks_whose_tokens_are_final_are_stored(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    one = Scheduled(request="r", computed_tokens=18, known_tokens=11, pages=ready.places)
    (job,) = ready.step([one]).stores
    assert (job.first_block, job.blocks) == (0, 2)
    one = Scheduled(request="r", computed_tokens=15, known_tokens=18, pages=ready.places)
    (job,) = ready.step([one]).stores
    assert (job.first_block, job.blocks) == (2, 1)
    assert ready.step([one]).stores == ()


def test_what_the_node_has_is_not_offered(ready: Engine) -> None:
    ready.add("r", TOKENS)
    ready.wait_matched("r")
    ready.allot("r", 0)
    (job,) = ready.step([ready.scheduled("r")]).stores
    assert (job.first_block, job.blocks) == (3, 1)


def test_blocks_are_stored_from_the_first_that_lacks_no_page(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    one = Scheduled(
        request="r",
        computed_tokens=18,
        known_tokens=18,
        pages=lambda first, end: ((NO_PAGE, NO_PAGE, 7, 8)[first:end],),
    )
    (job,) = ready.scheduler.step([one], is_idle=False).stores
    assert (job.first_block, job.pages) == (2, ((7, 8),))


def test_late_blocks_are_offered_again_but_not_for_ever(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    late = Report(not_stored=(NotStored(request="r", first_block=0, reason=None),))
    for _ in range(MOST_TRIES):
        (job,) = ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores
        assert (job.first_block, job.blocks) == (0, 4)
        ready.scheduler.report(late)
    assert ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores == ()
    assert ready.scheduler.counts.late_stores == MOST_TRIES


def test_ranks_that_are_late_together_count_as_one_try(node: LivingNode) -> None:
    engine = Engine(node, ranks=2)
    try:
        engine.introduce()
        engine.add("r", UNKNOWN)
        engine.allot("r", 0)
        late = NotStored(request="r", first_block=0, reason=None)
        for _ in range(MOST_TRIES - 1):
            assert engine.scheduler.step([engine.scheduled("r")], is_idle=False).stores
            engine.scheduler.report(Report(not_stored=(late, late)))
        assert engine.scheduler.step([engine.scheduled("r")], is_idle=False).stores
    finally:
        engine.close()


def test_tries_count_in_a_row(ready: Engine) -> None:
    """A long answer isn't left out for a handful of late stores in an hour."""
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    for _ in range(2 * MOST_TRIES):
        (job,) = ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores
        ready.scheduler.report(Report(not_stored=(NotStored(request="r", first_block=0, reason=None),)))
        ready.scheduler.report(Report(stored=(Stored(rank=0, request="r", first_block=0, blocks=job.blocks),)))


def test_behind_a_block_that_was_refused_nothing_is_stored(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    assert ready.scheduler.step([ready.scheduled("r", computed=8)], is_idle=False).stores
    ready.scheduler.report(Report(not_stored=(NotStored(request="r", first_block=0, reason=Reason.NO_ROOM),)))
    assert ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores == ()


def test_a_running_request_is_offered_from_its_first_block_when_the_node_has_restarted(ready: Engine) -> None:
    ready.add("r", TOKENS)
    ready.wait_matched("r")
    ready.allot("r", 0)
    ready.compute("r", 0, 4)
    before = ready.scheduler._tokens[0]
    ready.node.restart_front()
    ready.until(lambda: ready.scheduler._tokens[0] not in (before, b""), "the worker has a new session")
    ready.step([ready.scheduled("r")])
    wait_for(lambda: ready._hears({("r", 0, 4)}), "it is stored")
    assert ready.node.used_blocks == 4


def test_nothing_is_offered_while_the_node_is_away(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    ready.node.go()
    ready.until(lambda: not all(ready.scheduler._tokens.values()), "the worker has noticed")
    assert ready.step([ready.scheduled("r")]).stores == ()
    ready.node.come()
    ready.until(lambda: all(ready.scheduler._tokens.values()), "the worker has a new session")
    (job,) = ready.step([ready.scheduled("r")]).stores
    assert (job.first_block, job.blocks) == (0, 4)


def test_what_is_found_damaged_is_offered_by_the_request_that_computes_it(
    ready: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = Answer(cached_blocks=3, reason=Reason.CHECKSUM)
    monkeypatch.setattr(ready.scheduler, "_acquire", lambda *_: damaged)
    ready.add("r", TOKENS)
    wait_for(lambda: ready.matched("r") == 0, "an answer")
    ready.allot("r", 0)
    (job,) = ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores
    assert (job.first_block, job.blocks) == (0, 4)


def test_what_was_promised_and_could_not_be_loaded_is_offered_again(ready: Engine) -> None:
    ready.add("r", TOKENS)
    ready.pages[0].before_write = fail
    ready.allot("r", ready.wait_matched("r"), first_page=FIRST_PAGE)
    ready.until(lambda: "r" in ready.ended_loads, "the load is over")
    assert ready.matched("r") == 0
    ready.allot("r", 0)
    (job,) = ready.scheduler.step([ready.scheduled("r")], is_idle=False).stores
    assert job.first_block == 0


def test_a_finished_request_is_sealed_as_far_as_it_was_offered(ready: Engine) -> None:
    ready.add("r", UNKNOWN)
    ready.allot("r", 0)
    (job,) = ready.step([ready.scheduled("r")]).stores
    ready.scheduler.finished("r")
    assert ready.step(()).seals == (SealJob(group=job.group, keys=job.keys),)
    assert ready.step(()).seals == ()


def test_blocks_are_stored_when_every_rank_has_said_so(node: LivingNode) -> None:
    engine = Engine(node, ranks=2)
    try:
        one, other = (Stored(rank=rank, request="r", first_block=0, blocks=4) for rank in (0, 1))
        assert engine.scheduler.report(Report(stored=(one,))) == []
        assert engine.scheduler.report(Report(stored=(one,))) == []  # the same rank, for blocks offered again
        assert engine.scheduler.report(Report(stored=(other,))) == [("r", 0, 4)]
        for number in range(2 * MOST_HALF_STORED):
            half = Stored(rank=0, request=f"r{number}", first_block=0, blocks=4)
            assert engine.scheduler.report(Report(stored=(half,))) == []
        assert len(engine.scheduler._half_stored) == MOST_HALF_STORED
    finally:
        engine.close()


# ---- groups


def test_workers_are_told_each_group_once_and_of_many_those_unused_are_forgotten(ready: Engine) -> None:
    told: set[int] = set()
    dropped: set[int] = set()

    def note(plan: Plan) -> None:
        assert not told & set(plan.groups)
        told.update(plan.groups)
        dropped.update(plan.dropped_groups)

    ready.add("kept", TOKENS)
    kept = ready.scheduler._requests["kept"].group
    for number in range(2 * MOST_GROUPS):
        ready.add("r", TOKENS, spec=make_spec(salt=f"tenant {number}"))
        ready.scheduler.finished("r")
        note(ready.scheduler.step((), is_idle=True))
    assert len(told - dropped) <= MOST_GROUPS + 2
    assert kept not in dropped
    assert ready.wait_matched("kept") == CACHED


def test_a_group_that_is_dropped_with_the_end_of_its_last_request_is_still_stored_to_and_sealed(
    ready: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that tells of its end has the last jobs for it."""
    monkeypatch.setattr("tierkv.integrations.connector.scheduler.MOST_GROUPS", 1)
    before, spec = ready.node.used_blocks, make_spec(salt="tenant")
    ready.add("r", UNKNOWN, spec=spec)
    ready.allot("r", 0)
    group = ready.scheduler._requests["r"].group
    with ready.node.keep_back(Reserve):
        ready.step([ready.scheduled("r")])
        ready.scheduler.finished("r")
        ready.add("next", TOKENS)
        ready.add("one more", TOKENS, spec=make_spec(salt="another tenant"))
        plan = ready.scheduler.step((), is_idle=True)
        assert plan.dropped_groups == (group,)
        assert [seal.group for seal in plan.seals] == [group]
        ready.node.wait_for_kept()
    ready.plan = plan
    ready.end()
    wait_for(lambda: ready._hears({("r", 0, 4)}), "it is stored")
    assert ready.node.used_blocks == before + 4
    assert ready.worker_fence.faults == {}


# ---- the end


def test_closing_gives_back_what_is_held_and_what_is_still_to_come(ready: Engine) -> None:
    ready.add("granted", TOKENS)
    assert ready.wait_matched("granted") == CACHED
    ready.add("asked", TOKENS)
    with ready.node.keep_back(Acquire):
        assert ready.matched("asked") is None
        ready.node.wait_for_kept()
        closing = threading.Thread(target=ready.scheduler.close)
        closing.start()
        wait_for(lambda: not ready.scheduler._requests, "closing has begun")
    closing.join(60)
    assert not closing.is_alive()
    ready.node.wait_until_nothing_is_held()


def test_a_release_that_is_lost_with_the_front_leaves_nothing(ready: Engine) -> None:
    ready.add("r", TOKENS)
    ready.wait_matched("r")
    with ready.node.keep_back(Release):
        ready.scheduler.finished("r")
        ready.node.wait_for_kept()
        ready.node.restart_front()
    assert ready.node.num_leases == 0
