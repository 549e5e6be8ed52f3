"""How engines and operators talk to a node. Blocking verbs are here, the same for asyncio in `tierkv.client.aio`."""

from tierkv.client.answers import CodecAnswer, Committed, CommitWait, Counters, Match, Sealed
from tierkv.client.blocking import Client, Group, Lease, Operator, Ticket, connect, connect_operator
from tierkv.client.buffers import BlockReader, BlockWriter
from tierkv.client.device.pages import DevicePages
from tierkv.client.device.pool import HOLDERS, DevicePool
from tierkv.client.prompt import KeyChain
from tierkv.device.layouts import PagedArray, PagedLayout

__all__ = [
    "connect",
    "Client",
    "Group",
    "Match",
    "Lease",
    "BlockWriter",
    "Ticket",
    "BlockReader",
    "CommitWait",
    "Committed",
    "Sealed",
    "KeyChain",
    "Counters",
    "DevicePool",
    "DevicePages",
    "PagedArray",
    "PagedLayout",
    "HOLDERS",
    "CodecAnswer",
    "connect_operator",
    "Operator",
]
