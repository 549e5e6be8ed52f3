"""Bytes of one ZeroMQ frame <-> one message. Any bytes give a message or a typed error reply, never an exception.

    frame longer than MAX_FRAME_BYTES         TOO_LARGE          before anything is decoded
    not a MessagePack map, cut short          MALFORMED
    no `type`, or one that is not known       UNKNOWN_MESSAGE
    a field is missing, of a wrong type, or   INVALID            `field` names it
    outside of its limits

Memory stays bounded by the frame: MessagePack's declared lengths are compared with the bytes that are there and with
the limits of the field before anything is allocated for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from tierkv.errors import WireError
from tierkv.wire.messages import MAX_FRAME_BYTES, AnyReply, AnyRequest, Count, Error, ErrorCode, Reply, Request

MAX_PROBLEM = 500
"""Characters of an error reply's `problem`: what was received is quoted there, in part."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A frame that is no message of ours. `error` is the reply that says so; its id is the frame's where that could
    be read, else 0."""

    error: Error


class _IdOnly(msgspec.Struct):
    id: Count = 0


class _TypeOnly(msgspec.Struct):
    type: str = ""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(AnyReply)
_ids = msgspec.msgpack.Decoder(_IdOnly)
_types = msgspec.msgpack.Decoder(_TypeOnly)

_REQUEST_TYPES = {kind.__struct_config__.tag for kind in AnyRequest.__args__}
_REPLY_TYPES = {kind.__struct_config__.tag for kind in AnyReply.__args__}
_FIELDS = {name for kind in (*AnyRequest.__args__, *AnyReply.__args__) for name in kind.__struct_fields__}


def encode(message: Request | Reply) -> bytes:
    """The frame of `message`. A reply that is too large becomes an Error that says so, because every request gets an
    answer; a request that is too large raises WireError, for the caller can still ask for less."""
    frame = _encoder.encode(message)
    if len(frame) <= MAX_FRAME_BYTES:
        return frame
    problem = f"{type(message).__name__} takes {len(frame)} bytes, a frame holds {MAX_FRAME_BYTES}"
    if isinstance(message, Reply):
        return _encoder.encode(Error(id=message.id, code=ErrorCode.TOO_LARGE, problem=problem))
    raise WireError(ErrorCode.TOO_LARGE, problem)


def decode_request(frame: bytes | memoryview) -> AnyRequest | Malformed:
    request: AnyRequest | Malformed = _decode(_requests, _REQUEST_TYPES, frame)
    return request


def decode_reply(frame: bytes | memoryview) -> AnyReply | Malformed:
    reply: AnyReply | Malformed = _decode(_replies, _REPLY_TYPES, frame)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[Any], known: set[Any], frame: bytes | memoryview) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        problem = f"a frame holds at most {MAX_FRAME_BYTES} bytes, this one has {len(frame)}"
        return Malformed(Error(id=0, code=ErrorCode.TOO_LARGE, problem=problem))
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as refusal:
        return _refused(frame, known, str(refusal))
    except (msgspec.DecodeError, RecursionError) as broken:
        return _malformed(frame, ErrorCode.MALFORMED, str(broken))


def _refused(frame: bytes | memoryview, known: set[Any], problem: str) -> Malformed:
    name = _read_type(frame)
    if name is None:
        return _malformed(frame, ErrorCode.MALFORMED, problem)
    if name not in known:
        return _malformed(frame, ErrorCode.UNKNOWN_MESSAGE, f"no message of type {name[:64]!r} is known here")
    return _malformed(frame, ErrorCode.INVALID, problem, field=_field_of(problem))


def _malformed(frame: bytes | memoryview, code: ErrorCode, problem: str, *, field: str = "") -> Malformed:
    return Malformed(Error(id=_read_id(frame), code=code, problem=problem[:MAX_PROBLEM], field=field))


def _read_id(frame: bytes | memoryview) -> int:
    try:
        return _ids.decode(frame).id
    except (msgspec.DecodeError, RecursionError):
        return 0


def _read_type(frame: bytes | memoryview) -> str | None:
    """Empty where there is none; None where the frame is no map or its `type` no text."""
    try:
        return _types.decode(frame).type
    except (msgspec.DecodeError, RecursionError):
        return None


def _field_of(problem: str) -> str:
    """msgspec ends its message with the path of the value ("... - at `$.keys`"); where the whole message is meant it
    names the field in the text, as `__post_init__` checks of ours do."""
    path = re.search(r" - at `\$\.([^`]+)`$", problem)
    if path:
        return path[1]
    return next((name for name in re.findall(r"`(\w+)`", problem) if name in _FIELDS), "")
