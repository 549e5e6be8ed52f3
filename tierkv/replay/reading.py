"""Which format a trace file has, and its lines. Files ending in .xz are unpacked as they are read."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tierkv.errors import TraceUnreadable

TOKEN_BYTES_OF_KV = 320 * 1024
"""KV of one token where the trace does not say: a 70B model with 80 layers, 8 KV heads of 128, in 16 bits."""

SESSIONS = 150
SEED = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """`token_bytes` of KV, where the trace does not say. `sessions` and `seed` are for traces of separate sessions,
    which have to be laid over each other; see agent_sessions.py."""

    token_bytes: int = TOKEN_BYTES_OF_KV
    sessions: int = SESSIONS
    seed: int = SEED


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    text: bytes


def read_lines(path: Path) -> Iterator[Line]:
    """Raises TraceUnreadable where the file can't be read to its end."""
    try:
        with _open(path) as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield Line(number, text)
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TraceUnreadable(path, f"it can't be read: {reason}") from error


@contextmanager
def _open(path: Path) -> Iterator[Iterator[bytes]]:
    with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as file:
        yield file


def decode(path: Path, line: Line, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(line.text)
    except msgspec.MsgspecError as error:
        raise TraceUnreadable(path, f"line {line.number}: {error}") from error
