"""docs/protocol.md, made from the declarations: `python -m tierkv.wire.document > docs/protocol.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from tierkv.core.reasons import Reason
from tierkv.wire import messages, session
from tierkv.wire.frames import MAX_PROBLEM

Struct = type[msgspec.Struct]

_HEAD = f"""# The wire protocol

Made by `python -m tierkv.wire.document` from `tierkv/wire/messages.py` and `session.py` beside it; don't edit it here.

Protocol version {messages.PROTOCOL_VERSION}. Two sockets lie in a node's socket directory:

| socket | kind | carries |
|---|---|---|
| `{session.SESSION_SOCKET_NAME}` | Unix, SOCK_SEQPACKET | a message a packet: sessions, descriptors of the memory |
| `{session.NODE_SOCKET_NAME}` | ZeroMQ over ipc, ROUTER at the node, DEALER at a client | a message a frame: requests |

A message is a MessagePack map whose `type` names it. A frame has at most {messages.MAX_FRAME_BYTES} bytes, a packet
{session.MAX_PACKET_BYTES}. Fields that have a default may be left out; fields that aren't known are ignored. So fields
are added with defaults, and nothing is renamed. Bytes of blocks never travel here: they are in shared memory. (Tenants
that must not map it get them in frames, from a gateway that speaks the same messages: `Fetch` and `Put`.)

**Every request is answered**: by the reply named with it, by `NotReady` while the node is recovering, or by `Error`,
with the request's `id`. Every request carries the `session` token that came with `SessionGrant`; a node that doesn't
know it answers `session_gone`, and the client asks the session socket for a new one. `deadline_ms` is how long the node
may take; a client waits a little longer, then the answer is a miss. Grant ids are chosen by the client and every verb
is idempotent by id: a request whose reply was lost may be sent again, and a `Release` or `Abort` may overtake what it
ends. A client that does not read its replies loses those beyond a few hundred, and with the first of them its session:
all but `Commit`, `Abort` and `Release` is answered `session_gone` then (slow_consumer), and a new session is to be had.

**What is no message** is answered with an `Error`, whatever the bytes; its `id` is 0 where the frame's can't be read.

| frame | code |
|---|---|
| longer than the limit | `too_large` |
| not a MessagePack map, cut short | `malformed` |
| no `type`, or one that isn't known | `unknown_message` |
| a field is missing, of a wrong type, outside of its limits | `invalid`, `field` names it |

`problem` is for people, and at most {MAX_PROBLEM} characters for frames like these.

**Packed values**: keys are 32 bytes each, token ids little-endian u32, offsets and generations little-endian u64."""


def document() -> str:
    parts = [_HEAD, "## Requests", *_requests(), "## Replies to any request", *_common_replies()]
    parts += ["## Parts of messages", *_parts(), "## The session socket", *_session_messages()]
    parts += ["## Codes", _codes()]
    return "\n\n".join(parts) + "\n"


def _requests() -> Iterator[str]:
    shared = {field.name for field in _fields(messages.Request)}
    yield "All of them have:\n\n" + _table(_fields(messages.Request))
    for kind in get_args(messages.AnyRequest):
        own = [field for field in _fields(kind) if field.name not in shared]
        yield f"### {kind.__name__}\n\n{_prose(kind)}\n\n{_table(own)}\n\n{_reply_of(kind)}"


def _reply_of(kind: type[messages.Request]) -> str:
    reply = kind.reply
    if reply is messages.Done:
        return "Reply: `Done`."
    own = [field for field in _fields(reply) if field.name != "id"]
    return f"Reply: `{reply.__name__}`. {_prose(reply)}".rstrip() + f"\n\n{_table(own)}"


def _common_replies() -> Iterator[str]:
    for kind in (messages.Done, messages.NotReady, messages.Error):
        yield f"### {kind.__name__}\n\n{_prose(kind)}\n\n{_table(_fields(kind))}"


def _parts() -> Iterator[str]:
    """Types that messages are made of, in the order in which they are met."""
    top = [*get_args(messages.AnyRequest), *get_args(messages.AnyReply)]
    met: dict[Struct, None] = {}
    for kind in top:
        _meet(types.type_info(kind), met)
    for kind in met:
        if kind not in top:
            form = ", an array in this order" if kind.__struct_config__.array_like else ""
            yield f"### {kind.__name__}{form}\n\n{_prose(kind)}\n\n{_table(_fields(kind))}"


def _meet(kind: types.Type, met: dict[Struct, None]) -> None:
    if isinstance(kind, types.StructType):
        if kind.cls not in met:
            met[kind.cls] = None
            for field in kind.fields:
                _meet(field.type, met)
        return
    for name in ("item_type", "key_type", "value_type", "type"):
        inner = getattr(kind, name, None)
        if isinstance(inner, types.Type):
            _meet(inner, met)
    for inner in getattr(kind, "types", ()):
        _meet(inner, met)


def _session_messages() -> Iterator[str]:
    yield inspect.cleandoc(session.__doc__ or "").split("\n\n", 1)[1]
    for kind in get_args(session.AnySessionMessage):
        yield f"### {kind.__name__}\n\n{_prose(kind)}\n\n{_table(_fields(kind))}"


def _codes() -> str:
    errors = ", ".join(f"`{code}`" for code in messages.ErrorCode)
    reasons = ", ".join(f"`{reason}`" for reason in Reason)
    states = ", ".join(f"{name} {value}" for name, value in vars(messages.BlockState).items() if name.isupper())
    return (
        f"Error codes: {errors}.\n\nReasons, a closed list: {reasons}.\n\nStates of a block that is reserved: {states}."
    )


def _prose(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def _fields(kind: Struct) -> tuple[types.Field, ...]:
    described = types.type_info(kind)
    assert isinstance(described, types.StructType)
    return described.fields


def _table(fields: Any) -> str:
    rows = [f"| `{field.name}` | {_describe(field.type)} | {_default(field)} |" for field in fields]
    return "\n".join(["| field | what | default |", "|---|---|---|", *rows]) if rows else "No fields of its own."


def _default(field: types.Field) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if isinstance(field.default, msgspec.Struct):
        return f"{type(field.default).__name__} of defaults"
    return f"`{field.default.value!r}`" if isinstance(field.default, messages.SealWait) else f"`{field.default!r}`"


def _describe(kind: types.Type) -> str:
    if isinstance(kind, types.IntType):
        return "whole number" + _range(kind.ge, kind.le)
    if isinstance(kind, types.BytesType):
        return "bytes" + _range(kind.min_length, kind.max_length, "long")
    if isinstance(kind, types.StrType):
        return "text" + _range(kind.min_length, kind.max_length, "characters")
    if isinstance(kind, types.ListType | types.VarTupleType):
        return f"list of {_nested(kind.item_type)}" + _range(kind.min_length, kind.max_length, "items")
    if isinstance(kind, types.DictType):
        pair = f"{_nested(kind.key_type)} to {_nested(kind.value_type)}"
        return f"map of {pair}" + _range(kind.min_length, kind.max_length, "entries")
    if isinstance(kind, types.UnionType):
        return " or ".join(_describe(inner) for inner in kind.types)
    if isinstance(kind, types.StructType):
        return f"`{kind.cls.__name__}`"
    if isinstance(kind, types.EnumType):
        return "one of " + ", ".join(f"`{member.value}`" for member in kind.cls)
    if isinstance(kind, types.Metadata):
        return _describe(kind.type)
    return {types.FloatType: "number", types.BoolType: "true or false", types.NoneType: "nil"}[type(kind)]


def _nested(kind: types.Type) -> str:
    words = _describe(kind)
    return f"({words})" if "," in words else words


def _range(least: int | None, most: int | None, unit: str = "") -> str:
    if least is None and most is None:
        return ""
    if most is None:
        words = f"from {least} on"
    elif least == most:
        words = str(most)
    else:
        words = f"{least or 0} .. {'2^63 - 1' if most == 2**63 - 1 else most}"
    return f", {words} {unit}".rstrip()


if __name__ == "__main__":
    print(document(), end="")
