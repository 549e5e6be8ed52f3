"""The session socket: where a process of an engine proves who it is and gets the memory.

A Unix socket of type SOCK_SEQPACKET beside the ZeroMQ endpoint, served by the supervisor. One packet is one MessagePack
message. The first exchange:

    client      SessionHello
    supervisor  SessionGrant, with two descriptors: arena (read and write), generations (opened read only)
            or  InlineGrant, without descriptors, from the gateway for tenants that must not be trusted
            or  SessionRefused

Then, as often as it likes:

    client      MapDevice
    supervisor  DeviceGrant, with one descriptor of the pool unless its `kind` is ipc
                or  DeviceRefused

Afterwards the client sends `Detach` when every copy that touches the arena has completed and its mapping is gone.
End of file only stops new requests; the end of a session is proven by its process's pidfd, or said by Detach.
The supervisor may send `IncarnationEnded` when a new front has taken over: it only saves the client a failed request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tierkv.errors import WireError

SESSION_SOCKET_NAME = "session.sock"
NODE_SOCKET_NAME = "node.sock"
MAX_PACKET_BYTES = 65_536


class SessionMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


class SessionHello(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`maps_arena` false: an operator's tool, which gets no descriptors."""

    protocol: int
    client: Annotated[str, Meta(max_length=4_096)] = ""
    maps_arena: bool = True


class SessionGrant(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`token` goes into every request. `endpoint` is the ZeroMQ address. A slot's generation is the u64 at index
    offset / page_bytes of the generations memory."""

    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    incarnation: Annotated[int, Meta(ge=0)]
    endpoint: str
    arena_bytes: Annotated[int, Meta(ge=0)]
    page_bytes: Annotated[int, Meta(ge=1)]
    data_dir: str


class InlineGrant(SessionMessage, frozen=True, kw_only=True, tag=True):
    """From the gateway for tenants that must not be trusted: the session gets no memory, the payload of blocks travels
    in Fetch and Put, and `tenant` is put before the salt of every identity that it opens."""

    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    incarnation: Annotated[int, Meta(ge=0)]
    endpoint: str
    tenant: Annotated[str, Meta(min_length=1, max_length=256)]


class SessionRefused(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`code` is an ErrorCode (protocol_version, shutting_down, malformed), wrong_user or too_many_sessions."""

    code: str
    problem: str


class Detach(SessionMessage, frozen=True, kw_only=True, tag=True):
    """This process touches the arena of this incarnation no more: its session is over."""

    incarnation: int


class IncarnationEnded(SessionMessage, frozen=True, kw_only=True, tag=True):
    """The front of this incarnation is gone; a new session is to be asked for. Grants of the old one end with it."""

    incarnation: int


class MapDevice(SessionMessage, frozen=True, kw_only=True, tag=True):
    """Asks for the node's pool on the GPU with this `uuid` ("cpu" for a pool in host memory). `cuda_version` is the
    driver's on the engine's side, 0 for none."""

    uuid: Annotated[str, Meta(max_length=64)]
    cuda_version: Annotated[int, Meta(ge=0)] = 0


class DeviceGrant(SessionMessage, frozen=True, kw_only=True, tag=True):
    """The pool of a device. A slot whose address is in [base, base + num_bytes) lies in it, at address - base; its
    generation is where those of the arena's slots are, at index address / page_bytes. `epoch` tells this pool from a
    later one of the same device. `kind`: memfd (map it), vmm (an allocation that the driver imports from the
    descriptor) or ipc (`handle` opens it, there is no descriptor)."""

    device: Annotated[int, Meta(ge=0)]
    epoch: int
    uuid: str
    base: Annotated[int, Meta(ge=0)]
    num_bytes: Annotated[int, Meta(ge=0)]
    kind: str
    handle: bytes = b""


class DeviceRefused(SessionMessage, frozen=True, kw_only=True, tag=True):
    """`code` is no_pool (this node has none on that GPU), pool_down (it has, and not now) or cuda_version."""

    code: str
    problem: str


class PoolEnded(SessionMessage, frozen=True, kw_only=True, tag=True):
    """The pool of this epoch is gone with the process that had it: unmap it, and ask for the next one."""

    device: Annotated[int, Meta(ge=0)]
    epoch: int


AnySessionMessage = (
    SessionHello
    | SessionGrant
    | InlineGrant
    | SessionRefused
    | Detach
    | IncarnationEnded
    | MapDevice
    | DeviceGrant
    | DeviceRefused
    | PoolEnded
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnySessionMessage)


def encode_packet(message: AnySessionMessage) -> bytes:
    return _encoder.encode(message)


def decode_packet(packet: bytes) -> AnySessionMessage:
    """Raises WireError for bytes that are no session message."""
    try:
        return _decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError) as broken:
        raise WireError("malformed", f"a packet on the session socket: {broken}") from broken
