"""An engine that streams its answers and can be restarted, of which only what is said is real; on a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StreamingEngine:
    """`status` and `body` replace every answer when set; `lines` what a completion streams. `delay` is asked for each
    completion's seconds before the first token. `asked` holds the bodies. `stop` and `start` are a restart."""

    def __init__(self) -> None:
        self.models = ["little"]
        self.status = 200
        self.body: bytes | None = None
        self.lines: list[bytes] | None = None
        self.delay: Callable[[dict[str, Any]], float] = lambda body: 0.0
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self, json.dumps({"data": [{"id": name} for name in owner.models]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.asked.append((self.path, body, self.headers.get("Authorization", "")))
                time.sleep(owner.delay(body))
                owner.answer(self, b"".join(owner.stream(self.path)))

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        content = content if self.body is None else self.body
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def stream(self, path: str) -> list[bytes]:
        if self.lines is not None:
            return self.lines
        if "chat" in path:
            role, word = {"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "yes"}}
            return [event({"choices": [role]}), event({"choices": [word]}), b"data: [DONE]\n\n"]
        return [event({"choices": [{"text": "yes"}]}), b"data: [DONE]\n\n"]


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
