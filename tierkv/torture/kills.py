"""Kills: of whom, at which barrier or between which two steps, and what must hold then."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from tierkv.torture.node import said_until_end
from tierkv.torture.scenarios import Scenario

if TYPE_CHECKING:
    from tierkv.torture.round import Round

COMMAND_SECONDS = 240.0


def anytime(round_: Round, scenario: Scenario) -> None:
    round_.anytime()
    if scenario.victim == "engine":
        round_.kill_one_that_runs()
        return
    round_.kill(scenario.victim, scenario.stage, held=False)
    round_.wait_back(scenario.victim)


def one_after_the_other(round_: Round, scenario: Scenario) -> None:
    """Two at nearly the same moment: the one that the stage names, then the victim, before anybody has come back."""
    round_.anytime()
    round_.kill(scenario.stage, "first of two", held=False)
    round_.anytime(0.1)
    round_.kill(scenario.victim, f"after {scenario.stage}", held=False)
    round_.wait_back(scenario.victim)


def beside_one_that_stands_still(round_: Round, scenario: Scenario) -> None:
    """The one that the stage names is stopped; another one is killed meanwhile."""
    with round_.stopped(scenario.stage):
        round_.anytime()
        round_.kill(scenario.victim, f"beside a stopped {scenario.stage}")
    round_.wait_back(scenario.victim)


def while_storing(round_: Round, scenario: Scenario) -> None:
    """Somebody of the node's own processes is held on the way of an extent to its file."""

    def store() -> None:
        fresh = round_.fresh()
        round_.doer.send("store", **fresh)
        round_.doer.send("start_seal", **fresh)

    round_.hold(scenario.stage, store)
    round_.kill(scenario.victim, scenario.stage)
    round_.wait_back(scenario.victim)
    if scenario.victim != "engine":
        round_.doer.last_reply()


def while_promoting(round_: Round, scenario: Scenario) -> None:
    round_.hold(scenario.stage, lambda: round_.doer.send("load", **round_.flushed()))
    round_.kill(scenario.victim, scenario.stage)
    round_.wait_back(scenario.victim)
    round_.doer.last_reply()


def while_recovering(round_: Round, scenario: Scenario) -> None:
    """The first to die is the front; the second dies while what comes after it is not there yet."""
    round_.hold(scenario.stage, once(lambda: round_.kill("front", "anytime", held=False)))
    round_.node.wait_status(lambda s: s.state == "recovering", "it recovers")
    round_.kill(scenario.victim, scenario.stage)
    round_.wait_back(scenario.victim)


def once(act: Callable[[], None]) -> Callable[[], None]:
    left = [act]

    def act_once() -> None:
        while left:
            left.pop()()

    return act_once


def commit_answered_to_nobody(round_: Round, scenario: Scenario) -> None:
    """The front has decided on a commit and is held before it says so; who asked dies."""
    with round_.alone() as doer:
        round_.hold(scenario.stage, lambda: doer.send("store", **round_.fresh()))
        round_.kill("engine", scenario.stage)
        round_.let_go()
        round_.wait_back("engine")


def ticket_not_committed(round_: Round, scenario: Scenario) -> None:
    with round_.alone():
        prompt = round_.fresh()
        blocks = round_.until_granted("hold_ticket", **prompt)
        round_.kill("engine", scenario.stage)
        round_.wait_back("engine")
        again = round_.until_granted("hold_ticket", **prompt)
        # There may be more room than at first, when much still waited for the disk.
        round_.require(again >= blocks, f"slots and keys of a dead engine are free again: {again} of {blocks}")
        round_.doer.ask("fill", name="held")
        round_.require(round_.doer.ask("commit", name="held") == again, "what was granted can be committed")


def commit_not_read(round_: Round, scenario: Scenario) -> None:
    """The commit lies in the front's socket when one of the two dies."""
    with round_.alone() as doer:
        round_.until_granted("hold_ticket", **round_.fresh())
        doer.ask("fill", name="held")
        with round_.stopped("front"):
            doer.ask("send_commit", name="held")
            round_.kill(scenario.victim, scenario.stage)
        round_.wait_back(scenario.victim)
        if scenario.victim == "front":
            round_.require(doer.ask("commit", name="held") == 0, "a commit of a session that is over does nothing")


def inside_a_lease(round_: Round, scenario: Scenario) -> None:
    with round_.alone():
        round_.until_granted("hold_lease")
        round_.kill("engine", scenario.stage)
        round_.wait_back("engine")


def while_copying(round_: Round, scenario: Scenario) -> None:
    """An engine is in the middle of a copy out of a lease, and of one into a ticket."""
    with round_.alone() as doer:
        blocks = round_.until_granted("hold_lease")
        doer.ask("begin_copy", name="held")
        round_.until_granted("hold_ticket", **round_.fresh())
        round_.kill(scenario.victim, scenario.stage)
        round_.wait_back(scenario.victim)
        if scenario.victim == "engine":
            return
        round_.look(loads_too=False)  # there is no memory to load into while the old arena is in use
        doer.ask("scribble", name="held")
        round_.require(doer.ask("end_copy", name="held") == blocks, "an old arena stays as it was for who copies")
        doer.ask("scribble", name="held")
        round_.require(doer.ask("commit", name="held") == 0, "a late commit publishes nothing")


def while_scrubbing(round_: Round, scenario: Scenario) -> None:
    """An operator has every file checked."""
    with round_.operator("verify", "--repair", "--json") as verify:
        round_.hold(scenario.stage, lambda: None)
        round_.kill(scenario.victim, scenario.stage)
        round_.wait_back(scenario.victim)
        said = said_until_end(verify, COMMAND_SECONDS)
        round_.require(verify.returncode in (0, 4, 5), f"verify ends in order, not with {verify.returncode}")
        round_.require(not (said and json.loads(said)["damaged"]), f"no kill damages a file: {said}")


def while_warming_up(round_: Round, scenario: Scenario) -> None:
    with round_.operator("warmup", "--json") as warmup:
        round_.hold(scenario.stage, lambda: None)
        round_.kill(scenario.victim, scenario.stage)
        round_.wait_back(scenario.victim)
        said_until_end(warmup, COMMAND_SECONDS)
        round_.require(warmup.returncode in (0, 4, 5), f"warmup ends in order, not with {warmup.returncode}")


def while_stopping(round_: Round, scenario: Scenario) -> None:
    """The node was told to stop, and is writing what is dirty."""
    round_.doer.ask("store", **round_.fresh())
    round_.hold(scenario.stage, once(lambda: round_.node.signal("supervisor", signal.SIGTERM)))
    round_.kill(scenario.victim, scenario.stage)
    if scenario.victim != "supervisor":
        round_.let_go()
        code = round_.node.wait_ended().exit_code
        round_.require(code in (0, 4), f"a node that is stopping ends in order, not with {code}")
    round_.wait_back("supervisor")


def stopped_and_started(round_: Round, _: Scenario) -> None:
    """Nobody is killed: what was visible is on disk when the node has ended."""
    with round_.alone():
        seen = round_.see()
        round_.stop_politely()
        round_.start_again()
        round_.claim(seen)
        round_.verdict.episodes["polite restart"] += 1
