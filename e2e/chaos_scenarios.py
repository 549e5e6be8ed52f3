"""What a chaos run does to a node: who is killed, and when, and what must hold then."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.chaos_run import Chaos

BACK_SECONDS = 60.0


@dataclass(frozen=True)
class Scenario:
    """One kill and what leads to it. `stage` is a barrier, or a point at which an engine is caught."""

    victim: str
    stage: str
    act: Callable[[Chaos, Scenario], None]

    def play(self, chaos: Chaos) -> None:
        self.act(chaos, self)
        chaos.look(everything=self.victim == "supervisor")


def anytime(chaos: Chaos, scenario: Scenario) -> None:
    chaos.anytime()
    if scenario.victim == "engine":
        chaos.kill_one_that_runs()
        return
    chaos.kill(scenario.victim, scenario.stage, held=False)
    chaos.wait_back(scenario.victim)


def while_storing(chaos: Chaos, scenario: Scenario) -> None:
    """Somebody of the node's own processes is held on the way of an extent to its file."""

    def store() -> None:
        fresh = chaos.fresh()
        chaos.doer.send("store", **fresh)
        chaos.doer.send("start_seal", **fresh)

    chaos.hold(scenario.stage, store)
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)
    if scenario.victim != "engine":
        chaos.doer.last_reply()


def while_promoting(chaos: Chaos, scenario: Scenario) -> None:
    chaos.hold(scenario.stage, lambda: chaos.doer.send("load", **chaos.flushed()))
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)
    chaos.doer.last_reply()


def while_recovering(chaos: Chaos, scenario: Scenario) -> None:
    """The first to die is the front; the second dies while what comes after it is not there yet."""
    chaos.hold(scenario.stage, once(lambda: chaos.kill("front", "anytime", held=False)))
    chaos.node.wait_status(lambda s: s.state == "recovering", "it recovers")
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)


def once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]

    def act_once() -> None:
        while left:
            left.pop()()

    return act_once


def commit_answered_to_nobody(chaos: Chaos, scenario: Scenario) -> None:
    """The front has decided on a commit and is held before it says so; who asked dies."""
    with chaos.alone() as doer:
        chaos.hold(scenario.stage, lambda: doer.send("store", **chaos.fresh()))
        chaos.kill("engine", scenario.stage)
        chaos.let_go()
        chaos.wait_back("engine")


def ticket_not_committed(chaos: Chaos, scenario: Scenario) -> None:
    with chaos.alone():
        prompt = chaos.fresh()
        blocks = chaos.until_granted("hold_ticket", **prompt)
        chaos.kill("engine", scenario.stage)
        chaos.wait_back("engine")
        assert chaos.until_granted("hold_ticket", **prompt) == blocks, "slots and keys are free again"
        chaos.doer.ask("fill", name="held")
        assert chaos.doer.ask("commit", name="held") == blocks


def commit_not_read(chaos: Chaos, scenario: Scenario) -> None:
    """The commit lies in the front's socket when one of the two dies."""
    with chaos.alone() as doer:
        chaos.until_granted("hold_ticket", **chaos.fresh())
        doer.ask("fill", name="held")
        with chaos.stopped("front"):
            doer.ask("send_commit", name="held")
            chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        if scenario.victim == "front":
            assert doer.ask("commit", name="held") == 0, "its session is over"


def inside_a_lease(chaos: Chaos, scenario: Scenario) -> None:
    with chaos.alone():
        chaos.until_granted("hold_lease")
        chaos.kill("engine", scenario.stage)
        chaos.wait_back("engine")


def while_copying(chaos: Chaos, scenario: Scenario) -> None:
    """An engine is in the middle of a copy out of a lease, and of one into a ticket."""
    with chaos.alone() as doer:
        blocks = chaos.until_granted("hold_lease")
        doer.ask("begin_copy", name="held")
        chaos.until_granted("hold_ticket", **chaos.fresh())
        chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        if scenario.victim == "engine":
            return
        chaos.look(loads_too=False)  # there is no memory to load into while the old arena is in use
        doer.ask("scribble", name="held")
        assert doer.ask("end_copy", name="held") == blocks, "the old arena stays as it was"
        doer.ask("scribble", name="held")
        assert doer.ask("commit", name="held") == 0, "a late commit publishes nothing"


def while_scrubbing(chaos: Chaos, scenario: Scenario) -> None:
    """An operator has every file checked."""
    with chaos.operator("verify", "--repair", "--json") as verify:
        chaos.hold(scenario.stage, lambda: None)
        chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        said, _ = verify.communicate(timeout=BACK_SECONDS)
        assert verify.returncode in (0, 4, 5), verify.returncode
        assert not (said and json.loads(said)["damaged"]), "no kill damages a file"


def while_warming_up(chaos: Chaos, scenario: Scenario) -> None:
    with chaos.operator("warmup", "--json") as warmup:
        chaos.hold(scenario.stage, lambda: None)
        chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        warmup.communicate(timeout=BACK_SECONDS)
        assert warmup.returncode in (0, 4, 5), warmup.returncode


def while_stopping(chaos: Chaos, scenario: Scenario) -> None:
    """The node was told to stop, and is writing what is dirty."""
    chaos.doer.ask("store", **chaos.fresh())
    chaos.hold(scenario.stage, once(lambda: chaos.node.signal("supervisor", signal.SIGTERM)))
    chaos.kill(scenario.victim, scenario.stage)
    if scenario.victim != "supervisor":
        chaos.let_go()
        assert chaos.node.wait_ended().exit_code in (0, 4)
    chaos.wait_back("supervisor")


def stopped_and_started(chaos: Chaos, _scenario: Scenario) -> None:
    """Nobody is killed: what was visible is on disk when the node has ended."""
    with chaos.alone():
        seen = chaos.see()
        ended = chaos.node.stop()
        assert (ended.exit_code, ended.dropped) == (0, 0), ended
        chaos.start_again()
        chaos.claim(seen)


def _scenarios(act: Callable[[Chaos, Scenario], None], **victims: str) -> list[Scenario]:
    """`stage=victims`, separated by blanks."""
    return [Scenario(victim, stage, act) for stage, several in victims.items() for victim in several.split()]


ROUND = [
    *_scenarios(anytime, anytime="front front front storage storage storage supervisor supervisor supervisor"),
    *_scenarios(anytime, anytime="engine engine engine engine"),
    *_scenarios(
        while_storing,
        temp_written="storage front supervisor",
        before_rename="storage front supervisor",
        renamed="storage front supervisor",
        before_index="storage",
        indexed="front",
        before_flush="storage supervisor",
        flushed="storage front",
        before_commit="front",
        committed="front supervisor",
        before_report="front",
        reported="front supervisor",
    ),
    *_scenarios(while_promoting, read_half="storage front supervisor", read_done="storage front"),
    *_scenarios(while_recovering, recovering="storage supervisor"),
    *_scenarios(while_scrubbing, scrubbing="storage front"),
    *_scenarios(while_warming_up, read_done="storage"),
    *_scenarios(while_stopping, temp_written="supervisor storage front"),
    *_scenarios(stopped_and_started, stopped="nobody"),
    *_scenarios(commit_answered_to_nobody, before_commit="engine", committed="engine"),
    *_scenarios(ticket_not_committed, reserved="engine"),
    *_scenarios(commit_not_read, commit_sent="engine front"),
    *_scenarios(inside_a_lease, leased="engine"),
    *_scenarios(while_copying, copying="engine front front"),
]
"""Where NVMe has room for all."""

ROUND_OF_EVICTIONS = [
    *_scenarios(anytime, anytime="front storage supervisor"),
    *_scenarios(while_storing, before_remove="storage front", removed="storage supervisor", renamed="storage"),
    *_scenarios(while_promoting, read_half="storage"),
    *_scenarios(while_copying, copying="front"),
]


ROUND_OF_FAULTS = [
    *_scenarios(anytime, anytime="front storage supervisor engine"),
    *_scenarios(while_storing, renamed="storage", flushed="front", before_remove="supervisor"),
    *_scenarios(while_promoting, read_half="storage front"),
    *_scenarios(while_copying, copying="front"),
]
"""Where the disk fails now and then."""


def make_plan(seed: int, scenarios: list[Scenario], num_kills: int) -> list[Scenario]:
    """The scenarios in an order of the seed's, over and over until there are enough. Kills of the supervisor are spread
    evenly: with each the node forgets how often its children have died, and so how long it waits to restart them."""
    rng = random.Random(seed)
    plan: list[Scenario] = []
    while len(plan) < num_kills:
        starts = [s for s in scenarios if s.victim == "supervisor"]
        others = [s for s in scenarios if s.victim != "supervisor"]
        rng.shuffle(starts)
        rng.shuffle(others)
        share = -(-len(others) // max(1, len(starts)))
        while others or starts:
            plan += others[:share] + starts[:1]
            del others[:share], starts[:1]
    return plan[:num_kills]
