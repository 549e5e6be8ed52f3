"""With which codec the blocks of a model and adapter are stored: asked of the node once each, and not by the scheduler.

It is asked behind the reading of weight files and adapters, before those are known. If it is away then, it is asked
again until it answers, and meanwhile requests go without the cache, of which they would get nothing anyway: blocks that
were stored as they are would be found by nobody who was told to code them.
"""

from __future__ import annotations

import threading

from tierkv.client import Client
from tierkv.core.codec import KVShape
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.codec_choice import CodecChoice, ask_codec, tell
from tierkv.integrations.connector.fence import Fence

ASK_AGAIN_SECONDS = 0.25
"""A node that is away costs less than a microsecond of it: the client knows."""

_ANSWERS = (None, Reason.NO_VERDICT, Reason.NO_SHAPE, Reason.UNKNOWN_FORMAT, Reason.WIRE_ERROR)
"""What is no failure to ask. An older node knows no such question (WIRE_ERROR), and no codec either."""


class Codecs:
    """`find` is for one thread, the scheduler's; `prepare` for any. `close` joins the thread that asks."""

    def __init__(
        self,
        client: Client,
        kv_shape: KVShape | None,
        fence: Fence,
        *,
        ask_again_seconds: float = ASK_AGAIN_SECONDS,
    ) -> None:
        self._client = client
        self._kv_shape = kv_shape
        self._fence = fence
        self._ask_again_seconds = ask_again_seconds
        self._choices: dict[tuple[str, str], CodecChoice] = {}
        self._changed = threading.Condition()
        self._pending: set[tuple[str, str]] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tierkv-codec", daemon=True)
        self._thread.start()

    def find(self, weights: str, adapter: str) -> CodecChoice | None:
        """Of the model with these fingerprints. None while the node has not answered. Never waits."""
        choice = self._choices.get((weights, adapter))
        if choice is None:
            self._ask_for((weights, adapter))
        return choice

    def prepare(self, weights: str, adapter: str = "") -> None:
        """Ask now, and wait for what the node says: for a thread that may. What it says is there for `find` at once; if
        it says nothing, it is asked again behind this."""
        if not self._ask((weights, adapter)):
            self._ask_for((weights, adapter))

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _ask_for(self, key: tuple[str, str]) -> None:
        with self._changed:
            if key not in self._pending:
                self._pending.add(key)
                self._changed.notify_all()

    def _ask(self, key: tuple[str, str]) -> bool:
        """Whether the node has said something."""
        unknown: CodecChoice | None = None
        choice = self._fence.run("asking for the codec", lambda: ask_codec(self._client, *key, self._kv_shape), unknown)
        if choice is None or choice.reason not in _ANSWERS:
            return False
        if self._choices.setdefault(key, choice) is choice:
            tell(choice)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if self._is_closing:
                    return
                asked = set(self._pending)
            answered = {key for key in asked if self._ask(key)}
            with self._changed:
                self._pending -= answered
                if self._pending:
                    self._changed.wait_for(lambda: self._is_closing, self._ask_again_seconds)
