"""A restart, measured at an endpoint: the engine's, the node's, one that does not come, one that is given up."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import click
import pytest

from tests.cli.conftest import status
from tests.cli.streaming_engine import StreamingEngine
from tierkv_cli.cliff_live import Measured, Sample, at_share
from tierkv_cli.engine_http import Address
from tierkv_cli.first_token import is_there

SECONDS = "2"
DEADLINE = 30.0


@pytest.fixture
def server() -> Iterator[StreamingEngine]:
    made = StreamingEngine()
    yield made
    made.stop()


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    return str(path)


@pytest.fixture
def when_waiting(monkeypatch) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Has something done, on a thread, once the command asks for the restart."""
    threads = []

    def have_done(what: Callable[[], None]) -> None:
        said = click.echo

        def echo(message: object = None, **more: object) -> None:
            said(message, **more)
            if "now restart the engine" in str(message):
                thread = threading.Thread(target=what)
                threads.append(thread)
                thread.start()

        monkeypatch.setattr("tierkv_cli.cliff_live.click.echo", echo)

    yield have_done
    for thread in threads:
        thread.join(DEADLINE)


@pytest.fixture
def restart(server: StreamingEngine, monkeypatch) -> Callable[[], None]:
    """Stops the engine until the command has seen that it is gone."""
    seen = threading.Event()

    def look(address: Address) -> bool:
        found = is_there(address)
        if not found:
            seen.set()
        return found

    monkeypatch.setattr("tierkv_cli.cliff_live.is_there", look)

    def run() -> None:
        server.stop()
        assert seen.wait(DEADLINE)
        server.start()

    return run


def measure(tierkv, server, prompts, *more: str):
    return tierkv("cliff", "--engine", server.url, "--prompts", prompts, "--seconds", SECONDS, "--wait", "25", *more)


def test_an_engine_that_goes_away_and_comes_back_is_measured_before_and_after(
    tierkv, node, server, prompts, restart, when_waiting, fonts, tmp_path
):
    when_waiting(restart)
    picture = tmp_path / "live.png"
    outcome = measure(tierkv, server, prompts, "--json", "--plot", str(picture))
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert (found["stage"], found["restarted"], found["model"], found["prompts"]) == ("done", "engine", "little", 2)
    assert found["away_seconds"] > 0
    assert found["before"]["requests"] > 2
    assert found["first_round"]["requests"] == 2
    assert found["after"]["requests"] >= 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_what_a_user_waited_before_and_after(tierkv, node, server, prompts, restart, when_waiting):
    slow = threading.Event()
    seen: set[str] = set()

    def delay(body) -> float:
        is_cold = slow.is_set() and body["prompt"] not in seen
        seen.add(body["prompt"])
        return 0.3 if is_cold else 0.0

    def restart_cold() -> None:
        seen.clear()
        slow.set()
        restart()

    server.delay = delay
    when_waiting(restart_cold)
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 0, outcome.err
    first = next(line for line in outcome.out.splitlines() if "each prompt's first" in line)
    assert min(map(int, re.findall(r"(\d+) ms", first) or [300])) >= 300, first
    assert "the endpoint was away for" in outcome.out
    assert "longer for their first tokens than before" in " ".join(outcome.out.split())


def test_a_node_that_is_another_afterwards_was_restarted_though_the_engine_went_on(
    tierkv, node, server, prompts, when_waiting
):
    when_waiting(lambda: node.statuses.__setitem__(0, status(incarnation=2)))
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 0, outcome.err
    assert "the node was restarted, the engine went on" in outcome.out


def test_a_restart_that_does_not_come_is_exit_code_4_with_what_was_measured(tierkv, node, server, prompts):
    outcome = tierkv(
        "cliff", "--engine", server.url, "--prompts", prompts, "--seconds", SECONDS, "--wait", "1", "--json"
    )
    assert outcome.code == 4
    assert outcome.json["stage"] == "waiting"
    assert outcome.json["problem"] == "nothing was restarted within 1 s (--wait)"
    assert outcome.json["before"]["requests"] > 0


def test_an_interrupt_tells_what_there_is(tierkv, node, server, prompts, monkeypatch):
    def interrupted(self, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("tierkv_cli.cliff_live.Measurement._wait_for_restart", interrupted)
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 4
    assert "before the restart" in outcome.out
    assert "interrupted in the stage 'waiting'" in outcome.err


def test_answers_that_do_not_come_after_the_restart_are_counted_and_asked_for_again(
    tierkv, node, server, prompts, restart, when_waiting
):
    left = [3]

    def restart_sick() -> None:
        server.lines = []

        def recovers(body) -> float:
            left[0] -= 1
            if left[0] == 0:
                server.lines = None
            return 0.0

        server.delay = recovers
        restart()

    when_waiting(restart_sick)
    outcome = measure(tierkv, server, prompts, "--json", "--seconds", "3")
    assert outcome.code == 0, outcome.err
    assert outcome.json["failed"] >= 1
    assert outcome.json["after"]["requests"] >= 1


def test_nobody_at_the_endpoint_is_exit_code_4(tierkv, node, server, prompts):
    server.stop()
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 4
    assert "is not reached" in outcome.err


def test_a_prompt_that_the_engine_refuses_is_told_before_anything_is_measured(tierkv, node, server, prompts):
    server.lines = []
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 4
    assert "without a token" in outcome.err


def test_an_engine_that_names_no_model_wants_one_named(tierkv, node, server, prompts):
    server.models = []
    outcome = measure(tierkv, server, prompts)
    assert outcome.code == 4
    assert "--model" in outcome.err


def test_without_prompts_it_says_why_they_are_needed(tierkv, node, server):
    outcome = tierkv("cliff", "--engine", server.url)
    assert outcome.code == 2
    assert "can't be made prompts again" in outcome.err


def test_shares_and_costs_are_of_the_samples():
    some = [Sample(at=float(i), prompt=i % 3, first_token_seconds=float(i)) for i in range(1, 11)]
    assert [at_share(some, share) for share in (0.5, 0.95, 1.0)] == [5.0, 10.0, 10.0]
    assert at_share([], 0.5) is None
    measured = Measured(url="", model="", prompts=3, before=some[:3], after=some)
    assert [one.prompt for one in measured.first_round] == [1, 2, 0]
    assert measured.cost_seconds == sum(max(0.0, i - 2.0) for i in range(1, 11))
