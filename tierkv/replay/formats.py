"""The formats of traces that can be replayed, told apart by their first line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tierkv.errors import TraceUnreadable
from tierkv.replay import agent_sessions, mooncake, recorded
from tierkv.replay.reading import Line, ReadOptions, read_lines
from tierkv.replay.trace import Trace

_Reader = Callable[[Path, list[Line], ReadOptions], Trace]

_READERS: dict[str, _Reader] = {
    "hash_ids": mooncake.read,
    "requests": agent_sessions.read,
    "line": recorded.read,
}
"""A field that only this format's first line has, and its reader."""


def read_trace(path: Path, options: ReadOptions) -> Trace:
    """Raises TraceUnreadable, with the line where it is not what its format promises."""
    lines = list(read_lines(path))
    if not lines:
        raise TraceUnreadable(path, "it is empty")
    trace = _reader(path, lines[0])(path, lines, options)
    if not trace.num_requests:
        raise TraceUnreadable(path, "nobody asks for anything in it")
    if not trace.num_blocks:
        raise TraceUnreadable(path, "no prompt in it fills a block")
    return trace


def _reader(path: Path, first: Line) -> _Reader:
    try:
        fields = msgspec.json.decode(first.text)
    except msgspec.DecodeError as error:
        raise TraceUnreadable(path, f"line {first.number} is no JSON: {error}") from error
    for name, reader in _READERS.items():
        if isinstance(fields, dict) and name in fields:
            return reader
    raise TraceUnreadable(path, "its first line is of no format that is known; docs/replay.md lists them")
