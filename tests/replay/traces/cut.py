"""How the traces in this folder were cut from the whole ones: `python -m tests.replay.traces.cut FOLDER`.

A cut keeps what a policy lives on: conversations and sessions whole, at the times they had, and fewer of them.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONVERSATIONS, SYNTHETIC, SESSIONS = 1 / 4, 1 / 6, 32
MOST_TOKENS, LAST_SECOND = 200_000, 5_400.0  # as the reader has it
SEED = 1


def main(folder: Path) -> None:
    for name, share in (("mooncake_conversation", CONVERSATIONS), ("mooncake_synthetic", SYNTHETIC)):
        _write(name, _of_some_openings(_read(folder / f"{name}.jsonl.xz"), share))
    _write("agent_sessions", _some_sessions(_read(folder / "agent_sessions.jsonl.xz")))


def _of_some_openings(requests: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """Requests that have their second block in common stay together or go together."""
    openings = sorted({_opening(request) for request in requests})
    chosen = set(random.Random(SEED).sample(openings, round(share * len(openings))))
    return [request for request in requests if _opening(request) in chosen]


def _opening(request: dict[str, Any]) -> int:
    ids: list[int] = request["hash_ids"]
    return ids[min(1, len(ids) - 1)]


def _some_sessions(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the reader would leave out anyway."""
    fitting = [session for session in sessions if max(request[1] for request in session["requests"]) <= MOST_TOKENS]
    chosen = random.Random(SEED).sample(fitting, SESSIONS)
    for session in chosen:
        session["requests"] = [request for request in session["requests"] if request[0] <= LAST_SECOND]
    return chosen


def _read(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def _write(name: str, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (HERE / f"{name}.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
