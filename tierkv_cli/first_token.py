"""When the first token of an answer comes, at an engine's OpenAI-compatible endpoint."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tierkv_cli.engine_http import Address, EngineAway, EngineRefuses, problem_in
from tierkv_cli.prompt_file import Prompt

ANSWER_SECONDS = 120.0
LOOK_SECONDS = 2.0


def first_token_seconds(
    address: Address, model: str, prompt: Prompt, *, timeout_seconds: float = ANSWER_SECONDS
) -> float:
    """From sending the request, over a connection of its own, until a first token has come; the answer is read to its
    end. Raises EngineAway when the connection can't be made, breaks, or brings nothing in time, EngineRefuses for any
    other answer than tokens."""
    first: float | None = None
    body = prompt.body | {"model": model, "stream": True, "temperature": 0.0}
    began = time.monotonic()
    with _asked(address, "POST", f"/{prompt.path}", body, timeout_seconds) as response:
        for event in _events(response):
            if first is None and _has_token(_parsed(event, address)):
                first = time.monotonic() - began
    if first is None:
        raise EngineRefuses(f"{address.url}/{prompt.path} ended its answer without a token")
    return first


def is_there(address: Address) -> bool:
    """Whether the endpoint answers, and is done with loading."""
    try:
        with _asked(address, "GET", "/models", None, LOOK_SECONDS) as response:
            return bool(_parsed(response.read(), address)["data"])
    except (EngineAway, EngineRefuses, KeyError, TypeError):
        return False


@contextmanager
def _asked(
    address: Address, method: str, path: str, body: dict[str, Any] | None, timeout_seconds: float
) -> Iterator[http.client.HTTPResponse]:
    connection = address.connection(timeout_seconds)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, address.base + path, payload, address.headers)
        response = connection.getresponse()
        if response.status != 200:
            problem = problem_in(response.read(), response.reason)
            raise EngineRefuses(f"{address.url}{path} answers {response.status}: {problem}")
        yield response
    except TimeoutError as error:
        raise EngineAway(f"the engine at {address.url} is not reached: no answer in time") from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineAway(f"the engine at {address.url} is not reached: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What server-sent events carry, until the endpoint says that it is done."""
    while line := response.readline():
        name, _, content = line.strip().partition(b":")
        if name != b"data":
            continue
        if content.strip() == b"[DONE]":
            return
        yield content.strip()


def _parsed(content: bytes, address: Address) -> Any:
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise EngineRefuses(f"{address.url} answers with what is not JSON: {content[:80]!r}") from error
    if isinstance(answer, dict) and answer.get("error"):
        raise EngineRefuses(f"{address.url} answers: {problem_in(content, 'an error')}")
    return answer


def _has_token(event: Any) -> bool:
    """A chat's first event may carry a role and nothing else."""
    for choice in event.get("choices", ()) if isinstance(event, dict) else ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            return True
    return False
