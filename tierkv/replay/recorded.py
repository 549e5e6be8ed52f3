"""Recordings of a node (`tierkv serve --record`): what engines asked for and what they stored, as it happened.

The lines are declared in tierkv/core/recording.py. Requests that the recording says are missing are gaps of the trace.
What an engine stored is stored again in a replay, generated tokens included, and whatever of its prompt is missing
there with it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tierkv.core import recording
from tierkv.core.recording import AnyLine, Asked, Begun, Group, Missing, Stored, split_short
from tierkv.errors import TraceUnreadable
from tierkv.replay.reading import Line, ReadOptions, decode, read_lines
from tierkv.replay.trace import Gap, Trace, TraceBuilder, TraceGroup, Verb

_DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def read(path: Path, lines: list[Line], _options: ReadOptions) -> Trace:
    """The older of the two files that a recording has is read first, where it is there."""
    recorded = _Recorded(path)
    older = path.with_name(path.name + ".1")
    if older.exists():
        for line in read_lines(older):
            recorded.take(older, line)
    for line in lines:
        recorded.take(path, line)
    return recorded.trace()


class _Recorded:
    def __init__(self, path: Path) -> None:
        self._path = self._file = self._torn_file = path
        self._builder = TraceBuilder()
        self._groups: dict[bytes, int] = {}
        self._before: dict[tuple[bytes, bytes], bytes] = {}  # of a group's block, the key of the one before; or empty
        self._torn: TraceUnreadable | None = None

    def take(self, path: Path, line: Line) -> None:
        """A line that a crash has torn is the last of the file, or of what was written before the next start."""
        self._file = path
        try:
            found = decode(path, line, _DECODER)
        except TraceUnreadable as error:
            if self._torn is None:
                self._torn, self._torn_file = error, path
            return
        if self._torn is not None and not isinstance(found, Begun):
            raise TraceUnreadable(
                self._torn_file,
                f"{self._torn.problem}; what follows builds on it: remove it and all behind it up to the next line "
                'with "line":"begun", or to the end, and the rest can be read',
            )
        self._torn = None
        match found:
            case Begun(format=version):
                if version != recording.FORMAT:
                    raise TraceUnreadable(self._file, f"line {line.number}: format {version} is of another release")
                self._before.clear()
            case Group() as group:
                if group.group not in self._groups:
                    shape = TraceGroup(group.name or group.group[:4].hex(), group.block_tokens, group.block_bytes)
                    self._groups[group.group] = self._builder.add_group(shape)
            case Missing(since=since, requests=requests, reason=reason):
                self._builder.add_gap(Gap(since, requests, reason))
            case Asked() | Stored() as happened:
                self._happened(line, happened)

    def _happened(self, line: Line, happened: Asked | Stored) -> None:
        number = self._groups.get(happened.group)
        if number is None:
            raise TraceUnreadable(self._file, f"line {line.number}: its group was not told of before")
        ids = self._chain(line, happened)
        verb = Verb.ASK if isinstance(happened, Asked) else Verb.STORE
        tokens = happened.blocks * self._builder.groups[number].block_tokens
        self._builder.add(happened.time, verb, number, self._builder.path(number, ids), tokens)

    def _chain(self, line: Line, happened: Asked | Stored) -> list[bytes]:
        """The keys of all blocks of the prompt."""
        known: list[bytes] = []
        key = happened.after
        while key:
            known.append(key)
            before = self._before.get((happened.group, key))
            if before is None:
                raise TraceUnreadable(self._file, f"line {line.number}: block {key.hex()} was not told of before")
            key = before
        known.reverse()
        key = happened.after
        for following in split_short(happened.keys):
            self._before.setdefault((happened.group, following), key)
            key = following
            known.append(key)
        if len(known) != happened.blocks:
            raise TraceUnreadable(self._file, f"line {line.number}: {happened.blocks} blocks, keys of {len(known)}")
        return known

    def trace(self) -> Trace:
        names = ", ".join(f"{group.name} ({group.block_tokens} tokens a block)" for group in self._builder.groups)
        return self._builder.build(self._path.name, f"recorded; {names}")
