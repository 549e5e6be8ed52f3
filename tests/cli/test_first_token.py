"""When a token counts, what is sent for it, and what each way of failing is called."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.cli.streaming_engine import StreamingEngine, event
from tierkv_cli.engine_http import EngineAway, EngineRefuses, parse_address
from tierkv_cli.first_token import first_token_seconds, is_there
from tierkv_cli.prompt_file import parse_prompt

TEXT = parse_prompt(1, "Good morning")


@pytest.fixture
def engine() -> Iterator[StreamingEngine]:
    made = StreamingEngine()
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("line", "path", "sent"),
    [
        ("Good morning", "/v1/completions", {"prompt": "Good morning"}),
        ('{"prompt": [1, 2, 3]}', "/v1/completions", {"prompt": [1, 2, 3]}),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}',
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
    ],
)
def test_text_tokens_and_chats_are_streamed_one_token_long_and_greedily(engine, line, path, sent):
    assert first_token_seconds(parse_address(engine.url, "secret"), "little", parse_prompt(1, line)) > 0
    ((asked_path, body, key),) = engine.asked
    assert asked_path == path
    assert body == {"model": "little", "max_tokens": 1, "temperature": 0.0, "stream": True, "n": 1} | sent
    assert key == "Bearer secret"


def test_the_time_is_until_the_first_token(engine):
    engine.delay = lambda body: 0.2
    assert first_token_seconds(parse_address(engine.url), "little", TEXT) >= 0.2


def test_an_answer_without_a_token_is_none(engine):
    engine.lines = [event({"choices": [{"delta": {"role": "assistant"}}]}), b"data: [DONE]\n\n"]
    with pytest.raises(EngineRefuses, match="without a token"):
        first_token_seconds(parse_address(engine.url), "little", TEXT)


@pytest.mark.parametrize("lines", [[b"data: {nonsense\n\n"], [event({"error": {"message": "out of memory"}})]])
def test_what_is_no_json_or_an_error_within_the_stream_is_told(engine, lines):
    engine.lines = lines
    with pytest.raises(EngineRefuses, match=r"not JSON|out of memory"):
        first_token_seconds(parse_address(engine.url), "little", TEXT)


def test_a_refusal_is_told_with_what_the_engine_said(engine):
    engine.status, engine.body = 404, b'{"message": "The model does not exist"}'
    with pytest.raises(EngineRefuses, match="404: The model does not exist"):
        first_token_seconds(parse_address(engine.url), "big", TEXT)


def test_nobody_there_is_away(engine):
    engine.stop()
    assert not is_there(parse_address(engine.url))
    with pytest.raises(EngineAway, match="is not reached"):
        first_token_seconds(parse_address(engine.url), "little", TEXT)


def test_one_that_is_still_loading_is_not_there(engine):
    assert is_there(parse_address(engine.url))
    engine.status = 503
    assert not is_there(parse_address(engine.url))


def test_a_page_that_is_no_list_of_models_is_no_engine(engine):
    engine.body = b'{"hello": 1}'
    assert not is_there(parse_address(engine.url))


def test_one_that_says_nothing_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = parse_address(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(EngineAway, match="no answer in time"):
            first_token_seconds(address, "little", TEXT, timeout_seconds=0.1)
