"""An engine's OpenAI-compatible endpoint, as far as it takes to have prompts computed."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tierkv.errors import TierkvError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""A long prompt takes minutes to compute where others are in front of it."""

_NONE_WILL_DO = (401, 403, 404)
_COME_BACK = (429, 503)


class EngineAway(TierkvError):
    """Nobody answers there, or no longer."""

    exit_code = 4


class EngineRefuses(TierkvError):
    """It would refuse every prompt: the key, the path or the model is not right."""

    exit_code = 4


class PromptRefused(Exception):
    """Of this prompt only. `is_busy`: the same prompt may be taken a moment later."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status
        self.problem = problem
        self.is_busy = status in _COME_BACK


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens of a prompt; how many of them came from a cache is None where the engine does not tell."""

    prompt_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Address:
    is_https: bool
    host: str
    port: int | None
    base: str
    url: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json"} | key

    def connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        """Not connected yet. Each operation on it may take so long."""
        kind = http.client.HTTPSConnection if self.is_https else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_seconds)


def parse_address(url: str, api_key: str = "") -> Address:
    """With or without the /v1 at its end; http where it says a port and nothing before the host. Raises ValueError that
    says what is wrong."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    is_a_word = "://" not in url and parts.netloc.endswith(parts.hostname or "")
    if parts.scheme not in ("http", "https") or not parts.hostname or is_a_word:
        raise ValueError(f"{url!r} is no address of an engine; write one like http://localhost:8000")
    port = parts.port  # ValueError when it is out of range
    base = parts.path.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    where = parts.netloc.rpartition("@")[2]
    return Address(parts.scheme == "https", parts.hostname, port, base, f"{parts.scheme}://{where}{base}", api_key)


class Engine:
    """One connection, for one thread; `end` may be called by another one, and whoever waits gets EngineAway."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None
        self._has_answered = False
        self._is_over = False

    def find_model(self) -> str:
        """The one that is served, by the name that requests use; of several the first. Raises EngineAway,
        EngineRefuses."""
        try:
            answer = self._ask("GET", "/models", None)
            return str(answer["data"][0]["id"])
        except PromptRefused as error:
            raise EngineRefuses(f"{self._address.url}/models answers {error.status}: {error.problem}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise EngineRefuses(f"{self._address.url}/models names no model; say which with --model") from error

    def compute(self, path: str, body: dict[str, Any]) -> Computed:
        """Raises PromptRefused, EngineAway, EngineRefuses."""
        try:
            answer = self._ask("POST", f"/{path}", body)
        except PromptRefused as error:
            if error.status in _NONE_WILL_DO:
                raise EngineRefuses(f"{self._address.url}/{path} answers {error.status}: {error.problem}") from error
            raise
        usage = answer.get("usage") if isinstance(answer, dict) else None
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Computed(_whole(usage.get("prompt_tokens")) or 0, _whole(cached))

    def end(self) -> None:
        self._is_over = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # it may be closing by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """One that is cut before it has answered anything is asked again over a new connection, once: engines close
        those that were idle."""
        payload = None if body is None else json.dumps(body).encode()
        while True:
            is_used = self._connection is not None
            try:
                connection = self._connect()
                connection.request(method, self._address.base + path, payload, self._address.headers)
                response = connection.getresponse()
                raw = response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                is_stale = is_used and isinstance(error, http.client.RemoteDisconnected | ConnectionError)
                if not is_stale or self._is_over:
                    raise EngineAway(f"the engine at {self._address.url} {self._describe(error)}") from error
        if response.will_close:
            self.close()
        if response.status >= 400:
            raise PromptRefused(response.status, problem_in(raw, response.reason))
        self._has_answered = True
        try:
            return json.loads(raw)
        except ValueError as error:
            raise PromptRefused(response.status, f"its answer is not JSON: {error}") from error

    def _connect(self) -> http.client.HTTPConnection:
        if self._is_over:
            raise ConnectionAbortedError("interrupted")
        if self._connection is None:
            connection = self._address.connection(CONNECT_SECONDS)
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            self._connection = connection
        return self._connection

    def _describe(self, error: Exception) -> str:
        verb = "went away" if self._has_answered else "is not reached"
        if isinstance(error, TimeoutError):
            return f"{verb}: no answer in time"
        return f"{verb}: {error or type(error).__name__}"


def problem_in(raw: bytes, reason: str) -> str:
    """In the engine's words, if it says any."""
    try:
        value = json.loads(raw)
    except ValueError:
        text = raw.decode(errors="replace").strip()
        return text.splitlines()[0][:300] if text else reason
    if isinstance(value, dict):
        error = value.get("error", value)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if message:
            return str(message)[:300]
    return reason


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
