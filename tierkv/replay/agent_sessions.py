"""Recorded sessions of coding agents, one a line, laid over each other as one service would see them.

    {"session": "trace_0001", "parent": null, "tool_tokens": 12974, "system_tokens": 4243, "block_size": 64,
     "requests": [[t, input_tokens, output_tokens, api_seconds, keep, [[first_id, count], ...]], ...]}

A request's ids are the first `keep` of the request before it, then the runs. Each session begins at its own time 0 and
has its own ids, so that who merges them has to assume when they began and what they share:

* sessions that ever had more than MOST_TOKENS in a prompt are left out: they are of models with larger windows;
* of the rest `sessions` are drawn, each begins at a moment drawn from WINDOW_SECONDS, and what comes later is cut off;
* sessions whose tool and system parts have the same lengths open with the same blocks, as far as those parts reach; and
  a sub-agent shares its parent's blocks.

Eight ids of 64 tokens make one block of 512; what is over is partial, and not cached.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from pathlib import Path

import msgspec

from tierkv.errors import TraceUnreadable
from tierkv.replay.reading import Line, ReadOptions, decode
from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb

IDS_A_BLOCK = 8
MOST_TOKENS = 200_000
WINDOW_SECONDS = 5_400.0


class _Request(msgspec.Struct, frozen=True, array_like=True):
    t: float
    input_tokens: int
    output_tokens: int
    api_seconds: float
    keep: int
    runs: list[tuple[int, int]]


class _Session(msgspec.Struct, frozen=True):
    session: str
    parent: str | None
    tool_tokens: int
    system_tokens: int
    block_size: int
    requests: list[_Request]

    @property
    def most_tokens(self) -> int:
        return max((request.input_tokens for request in self.requests), default=0)


_DECODER = msgspec.json.Decoder(_Session)


def read(path: Path, lines: list[Line], options: ReadOptions) -> Trace:
    sessions = [decode(path, line, _DECODER) for line in lines]
    sizes = {session.block_size for session in sessions}
    if len(sizes) != 1 or min(sizes) <= 0:
        raise TraceUnreadable(path, f"sessions with blocks of {sorted(sizes)} tokens can't be laid over each other")
    block_tokens = sizes.pop() * IDS_A_BLOCK
    builder = TraceBuilder()
    group = builder.add_group(TraceGroup("agents", block_tokens, block_tokens * options.token_bytes))
    fitting = [session for session in sessions if session.most_tokens <= MOST_TOKENS]
    draw = random.Random(options.seed)
    drawn = draw.sample(fitting, min(options.sessions, len(fitting)))
    for session in drawn:
        begin = draw.uniform(0, WINDOW_SECONDS)
        for request, ids in _prompts(session):
            if begin + request.t > WINDOW_SECONDS:
                break
            blocks = builder.path(group, _blocks(session, ids, request.input_tokens // block_tokens))
            builder.add(begin + request.t, Verb.SERVE, group, blocks, request.input_tokens)
    about = f"{len(drawn)} of {len(sessions)} sessions over {WINDOW_SECONDS:.0f} s, seed {options.seed}; "
    return builder.build(path.name, about + f"blocks of {block_tokens} tokens")


def _prompts(session: _Session) -> Iterator[tuple[_Request, list[int]]]:
    ids: list[int] = []
    for request in session.requests:
        ids = ids[: request.keep]
        for first, count in request.runs:
            ids.extend(range(first, first + count))
        yield request, ids


def _blocks(session: _Session, ids: list[int], most: int) -> Iterator[Hashable]:
    """What tells each block of a prompt from others behind the same prefix."""
    opening = (session.tool_tokens + session.system_tokens) // (session.block_size * IDS_A_BLOCK)
    family = session.parent or session.session
    for index in range(min(most, len(ids) // IDS_A_BLOCK)):
        if index < opening:
            yield session.tool_tokens, session.system_tokens
        else:
            yield family, *ids[index * IDS_A_BLOCK : (index + 1) * IDS_A_BLOCK]
