"""How an engine's process speaks with whoever directs it: JSON, one object a line.

in      {"do": verb, ...}
out     {"reply": ...}                          to each that came in, in order
        {"event": "flushed", "kind": ..., "prompt": ..., "blocks": ...}
        {"event": "checked", "blocks": ...}     so many blocks were loaded and looked at
        {"event": "did", "what": ...}           an operation has come to its end
        {"event": "wrong" | "fault", "what": ...}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_saying = threading.Lock()


def say(what: dict[str, Any]) -> None:
    with _saying:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def did(what: str) -> None:
    say({"event": "did", "what": what})


def listen(tell: Callable[[dict[str, Any]], object]) -> None:
    """Tell, on a thread of its own, of everything that comes in. The process ends with whoever directs it."""

    def read() -> None:
        for line in sys.stdin:
            tell(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
