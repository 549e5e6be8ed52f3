"""An engine with an OpenAI-compatible endpoint, of which only what is said is real. On a port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = tuple[int, Any]
"""A status and what is sent as JSON; a status of 0 cuts the connection instead."""


def completion(prompt_tokens: int = 10, cached_tokens: int | None = None) -> Answer:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": 1}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return 200, {"id": "1", "choices": [{"text": "x"}], "usage": usage}


@dataclass(eq=False)
class OpenAiEngine:
    """`answer` is asked for each prompt: with the path and what was sent."""

    answer: Callable[[str, dict[str, Any]], Answer] = lambda path, body: completion()
    model: str = "served"
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine.keys.add(self.headers.get("Authorization", ""))
                self.reply((200, {"data": [{"id": engine.model}]}) if self.path == "/v1/models" else (404, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.asked.append((self.path, body))
                self.reply(engine.answer(self.path, body))

            def reply(self, answer: Answer) -> None:
                status, value = answer
                if not status:
                    self.close_connection = True
                    return
                raw = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # whoever asked has gone

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
