"""`tierkv warmup --prompts`: an engine computes what nobody has asked yet."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import FakeNode, status
from tests.cli.openai_engine import OpenAiEngine, completion
from tierkv.errors import NodeUnreachable
from tierkv_cli.engine_http import parse_address
from tierkv_cli.prompt_file import BadPrompt, parse_prompt

NO_TOKENS = {"asked_tokens": 0.0, "hit_tokens.host": 0.0, "stored_tokens": 0.0}
HEARD = {"asked_tokens": 500.0, "hit_tokens.host": 300.0, "stored_tokens": 200.0}


@pytest.fixture
def engine(node: FakeNode) -> Iterator[OpenAiEngine]:
    """One that uses the node, as far as the node can tell."""
    node.statuses = [status(counters=NO_TOKENS), status(counters=NO_TOKENS), status(counters=HEARD)]
    with OpenAiEngine() as engine:
        yield engine


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("\n".join(f"prompt {number}" for number in range(20)) + "\n")
    return path


# ---- lines


@pytest.mark.parametrize(
    ("line", "path", "sent"),
    [
        ("How are you?", "completions", {"prompt": "How are you?"}),
        (r'"two\nlines"', "completions", {"prompt": "two\nlines"}),
        ('{"prompt": "x", "cache_salt": "a"}', "completions", {"prompt": "x", "cache_salt": "a"}),
        ('{"prompt": [1, 2, 3]}', "completions", {"prompt": [1, 2, 3]}),
        (
            '{"messages": [{"role": "user"}], "tools": []}',
            "chat/completions",
            {"messages": [{"role": "user"}], "tools": []},
        ),
        ("[1, 2, 3]", "completions", {"prompt": "[1, 2, 3]"}),
    ],
)
def test_a_line_is_text_or_json_and_asks_for_one_token(line, path, sent):
    found = parse_prompt(7, line)
    assert (found.line, found.path) == (7, path)
    assert found.body == sent | {"max_tokens": 1, "stream": False, "n": 1}


def test_what_an_object_says_about_length_and_model_is_not_passed_on():
    body = parse_prompt(1, '{"prompt": "x", "max_tokens": 900, "stream": true, "n": 4, "model": "m"}').body
    assert body == {"prompt": "x", "max_tokens": 1, "stream": False, "n": 1}


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ',
        '"open',
        "{}",
        '{"prompt": "x", "messages": []}',
        '{"messages": []}',
        '{"prompt": ""}',
        '{"prompt": [1, "x"]}',
    ],
)
def test_what_begins_like_json_and_is_no_prompt_is_an_error(line):
    with pytest.raises(BadPrompt):
        parse_prompt(1, line)


def test_a_bad_line_is_named_before_anything_is_sent(tierkv, engine, prompts):
    prompts.write_text('fine\n\n{"prompt": \nfine too\n')
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url)
    assert outcome.code == 2
    assert "line 3" in outcome.err
    assert engine.asked == []


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1", "https://host/v1"),
        ("host:8000", "http://host:8000/v1"),
        ("http://host/proxy/v1/", "http://host/proxy/v1"),
    ],
)
def test_an_address_may_have_its_v1_or_not(said, url):
    assert parse_address(said).url == url


def test_what_is_no_address_is_exit_code_2(tierkv, node, prompts):
    for wrong in ("ftp://host", "http://", "foo", "foo/v1", "http://host:99999999"):
        assert tierkv("warmup", "--prompts", str(prompts), "--engine", wrong).code == 2


# ---- sending


def test_every_prompt_is_computed_once_with_the_served_model(tierkv, engine, prompts):
    engine.answer = lambda path, body: completion(100, 60)
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--concurrency", "3")
    assert outcome.code == 0
    assert sorted(body["prompt"] for _, body in engine.asked) == sorted(f"prompt {number}" for number in range(20))
    assert {body["model"] for _, body in engine.asked} == {"served"}
    assert "20 of 20 prompts computed" in outcome.out
    assert "2,000 tokens, of which it had 1,200 cached" in outcome.out
    assert "the node was asked for 500 tokens, had 300, and stored 200" in outcome.out


def test_the_model_and_the_key_are_those_that_were_said(tierkv, engine, prompts, monkeypatch):
    monkeypatch.setenv("ENGINE_KEY", "secret")
    wanted = ("--prompts", str(prompts), "--engine", engine.url, "--api-key-env", "ENGINE_KEY")
    assert tierkv("warmup", *wanted).code == 0
    assert engine.keys == {"Bearer secret"}
    assert tierkv("warmup", *wanted, "--model", "other").code == 0
    assert engine.asked[-1][1]["model"] == "other"
    assert tierkv("warmup", *wanted[:-1], "NOT_THERE").code == 2


def test_a_refused_prompt_is_told_by_its_line_and_the_others_go_on(tierkv, engine, prompts):
    def answer(path, body):
        if body["prompt"] in ("prompt 4", "prompt 9"):
            return 400, {"error": {"message": "this prompt is too long"}}
        return completion()

    engine.answer = answer
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url)
    assert outcome.code == 4
    assert "line 5: 400: this prompt is too long" in outcome.err
    assert "line 10: 400" in outcome.err
    assert "2 prompts failed" in outcome.err
    assert "18 of 20 prompts" in outcome.out


def test_an_engine_that_is_busy_is_asked_again(tierkv, engine, prompts, monkeypatch):
    monkeypatch.setattr("tierkv_cli.warmup_prompts.BUSY_SECONDS", (0.0, 0.0))
    asked: list[str] = []

    def answer(path, body):
        asked.append(body["prompt"])
        if body["prompt"] == "prompt 3" or asked.count(body["prompt"]) < 2:
            return 503, {"error": "busy"}
        return completion()

    engine.answer = answer
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--json")
    assert outcome.code == 4
    assert (outcome.json["done"], outcome.json["failed"]) == (19, 1)
    assert outcome.json["errors"] == [{"line": 4, "status": 503, "problem": "busy"}]
    assert asked.count("prompt 3") == 3


def test_an_engine_that_goes_away_ends_it_and_says_how_to_go_on(tierkv, engine, prompts):
    """Its connections are cut, those of whoever is in the middle as well."""
    engine.answer = lambda path, body: (0, None) if body["prompt"] == "prompt 12" else completion()
    wanted = ("--prompts", str(prompts), "--engine", engine.url, "--concurrency", "1")
    outcome = tierkv("warmup", *wanted)
    assert outcome.code == 4
    assert f"the engine at {engine.url}/v1 went away" in outcome.err
    assert "go on with --skip 12" in outcome.err
    engine.answer = lambda path, body: completion()
    engine.asked.clear()
    assert tierkv("warmup", *wanted, "--skip", "12").code == 0
    assert [body["prompt"] for _, body in engine.asked] == [f"prompt {number}" for number in range(12, 20)]


def test_an_engine_that_is_not_there_is_exit_code_4(tierkv, node, prompts):
    with OpenAiEngine() as engine:
        url = engine.url
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", url)
    assert outcome.code == 4
    assert f"the engine at {url}/v1 is not reached" in outcome.err


def test_an_engine_that_refuses_the_model_ends_it_at_the_first(tierkv, engine, prompts):
    engine.answer = lambda path, body: (404, {"message": "The model `x` does not exist."})
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--model", "x", "--concurrency", "1")
    assert outcome.code == 4
    assert "does not exist" in outcome.err
    assert len(engine.asked) == 1


def test_an_idle_connection_that_the_engine_has_closed_is_made_anew(tierkv, engine, prompts):
    asked: list[str] = []

    def answer(path, body):
        asked.append(body["prompt"])
        return (0, None) if asked.count(body["prompt"]) == 1 and len(asked) > 1 else completion()

    engine.answer = answer
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--concurrency", "1")
    assert outcome.code == 0
    assert len(asked) == 39


def test_an_interrupt_stops_at_once_though_the_engine_computes_on(tierkv, engine, prompts, monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def answer(path, body):
        if body["prompt"] == "prompt 5":
            begun.set()
            end.wait(60)
        return completion()

    def interrupted(self, seconds):
        if begun.wait(60):
            raise KeyboardInterrupt

    engine.answer = answer
    monkeypatch.setattr("tierkv_cli.warmup_prompts.Crew.wait", interrupted)
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--concurrency", "1", "--json")
    end.set()
    assert outcome.code == 4
    assert outcome.json["interrupted"] is True
    assert (outcome.json["done"], outcome.json["next_skip"]) == (5, 5)


# ---- the node


def test_an_engine_of_which_the_node_hears_nothing_is_told(tierkv, engine, node, prompts):
    node.statuses = [status(counters=NO_TOKENS)]
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url)
    assert outcome.code == 0  # it may have had all of it
    assert "the node heard nothing of it" in outcome.err


def test_without_a_node_nothing_is_sent(tierkv, engine, node, prompts):
    node.is_there = False
    assert tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url).code == 5
    assert engine.asked == []


def test_a_node_that_is_gone_afterwards_is_told_beside_what_was_computed(tierkv, engine, node, prompts):
    node.statuses = [status(), status(), NodeUnreachable("no node answers at /run/tierkv: gone")]
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url)
    assert outcome.code == 4
    assert "20 of 20 prompts" in outcome.out
    assert "no node answers" in outcome.err


def test_counters_of_a_node_that_was_started_again_begin_anew(tierkv, engine, node, prompts):
    node.statuses = [status(), status(), status(incarnation=2, counters=HEARD)]
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url)
    assert outcome.code == 0
    assert "asked for 500 tokens" in outcome.out
    assert "started again meanwhile" in outcome.err


@pytest.mark.parametrize("option", [("--budget", "1GiB"), ("--tenant", "x"), ("--no-tenant",), ("--since", "1h")])
def test_options_that_say_nothing_to_an_engine_are_exit_code_2(tierkv, engine, prompts, option):
    assert tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, *option).code == 2


def test_prompts_and_engine_go_together(tierkv, node, prompts):
    assert tierkv("warmup", "--prompts", str(prompts)).code == 2
    assert tierkv("warmup", "--engine", "http://x").code == 2
    assert tierkv("warmup", "--skip", "3").code == 2


def test_an_empty_file_is_done_at_once(tierkv, engine, prompts):
    prompts.write_text("\n\n")
    outcome = tierkv("warmup", "--prompts", str(prompts), "--engine", engine.url, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["prompts"] == 0
