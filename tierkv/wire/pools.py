"""What a device worker tells the supervisor of its pool: one packet of MessagePack on a Unix SOCK_SEQPACKET pair.

The descriptor of the pool, where its kind has one, travels with PoolOffer (SCM_RIGHTS). The supervisor hands it on to
engines, and closes it when the worker has died: memory of a dead pool lives on only where an engine still maps it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tierkv.errors import WireError


class PoolKind(StrEnum):
    MEMFD = "memfd"  # host memory: the device of tests, and of machines without a GPU
    VMM = "vmm"  # CUDA virtual memory, exported as a descriptor
    IPC = "ipc"  # a CUDA IPC handle: needs a shared IPC namespace, where descriptors can't be had


class PoolMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


class PoolOffer(PoolMessage, frozen=True, kw_only=True, tag=True):
    """`uuid` is the GPU's ("cpu" for a memfd); `cuda_version` the driver's, 0 for none; `handle` an IPC handle."""

    epoch: int
    kind: PoolKind
    uuid: str
    num_bytes: int
    cuda_version: int = 0
    handle: bytes = b""
    device_name: str = ""


class PoolFailed(PoolMessage, frozen=True, kw_only=True, tag=True):
    """There is no pool, and why, for people: the worker ends with exit code 2."""

    epoch: int
    problem: str


AnyPoolMessage = PoolOffer | PoolFailed

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyPoolMessage)


def encode_pool_message(message: AnyPoolMessage) -> bytes:
    return _encoder.encode(message)


def decode_pool_message(packet: bytes) -> AnyPoolMessage:
    """Raises WireError for bytes that are none."""
    try:
        return _decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError) as broken:
        raise WireError("malformed", f"a packet of a device worker: {broken}") from broken
