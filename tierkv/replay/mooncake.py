"""Traces of Mooncake: one request a line, its prompt as ids of blocks of 512 tokens.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2111]}

Timestamps are milliseconds of a clock that may tick every 3 s only. The last block may be partial, and is not cached
then; generated tokens have no ids.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierkv.errors import TraceUnreadable
from tierkv.replay.reading import Line, ReadOptions, decode
from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb, spread_ticks

BLOCK_TOKENS = 512
TICK_SECONDS = 3.0


class _Request(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    hash_ids: list[int]


_DECODER = msgspec.json.Decoder(_Request)


def read(path: Path, lines: list[Line], options: ReadOptions) -> Trace:
    builder = TraceBuilder()
    group = builder.add_group(TraceGroup("mooncake", BLOCK_TOKENS, BLOCK_TOKENS * options.token_bytes))
    requests = [_request(path, line) for line in lines]
    requests.sort(key=lambda request: request.timestamp)
    times = spread_ticks([request.timestamp / 1000 for request in requests], TICK_SECONDS)
    for time, request in zip(times, requests, strict=True):
        full = request.input_length // BLOCK_TOKENS
        builder.add(time, Verb.SERVE, group, builder.path(group, request.hash_ids[:full]), request.input_length)
    return builder.build(path.name, f"blocks of {BLOCK_TOKENS} tokens; requests of one tick laid over its 3 s")


def _request(path: Path, line: Line) -> _Request:
    request = decode(path, line, _DECODER)
    if len(request.hash_ids) < request.input_length // BLOCK_TOKENS:
        raise TraceUnreadable(path, f"line {line.number}: fewer ids than {request.input_length} tokens have blocks")
    return request
