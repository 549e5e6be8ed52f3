"""The session socket: where a process of an engine proves who it is and gets the memory.

A Unix socket of type SOCK_SEQPACKET beside the ZeroMQ endpoint, served by the supervisor. One packet is one MessagePack
message. The first exchange:

    client      SessionHello
    supervisor  SessionGrant, with two descriptors: arena (read and write), generations (read only)
            or  SessionRefused

Afterwards the client sends `Detach` when every copy that touches the arena has completed and its mapping is gone.
End of file only stops new requests; the end of a session is proven by its process's pidfd, or said by Detach.
"""

from __future__ import annotations

import msgspec

SESSION_SOCKET_NAME = "session.sock"
NODE_SOCKET_NAME = "node.sock"
MAX_PACKET_BYTES = 65_536


class SessionMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


class SessionHello(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`maps_arena` false: an operator's tool, which gets no descriptors."""

    protocol: int
    client: str = ""
    maps_arena: bool = True


class SessionGrant(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`token` goes into every request. `endpoint` is the ZeroMQ address. A slot's generation is the u64 at index
    offset / page_bytes of the generations memory."""

    token: bytes
    incarnation: int
    endpoint: str
    arena_bytes: int
    page_bytes: int
    data_dir: str


class SessionRefused(SessionMessage, frozen=True, kw_only=True, tag=True):
    code: str
    problem: str


class Detach(SessionMessage, frozen=True, kw_only=True, tag=True):
    incarnation: int


AnySessionMessage = SessionHello | SessionGrant | SessionRefused | Detach
