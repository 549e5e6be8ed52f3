"""A fake node with a pool of a device, in a memfd: the epochs, the mapping of sessions, and slots beyond the arena.

What is committed there is kept in host memory as well, as the node's write-back does. `tell_host` and `tell_pool` say
which of both a block is granted in.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from tests.client.fake_node import PAGE, FakeNode, Memory
from tierkv.wire.messages import Acquire, AcquireReply, Commit, Reply, Request, Reserve, ReserveReply
from tierkv.wire.session import DeviceGrant, DeviceRefused, MapDevice, PoolEnded, encode_packet


class Pool:
    """One epoch."""

    def __init__(self, epoch: int, num_bytes: int) -> None:
        self.epoch = epoch
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("pool")
        os.ftruncate(self.fd, num_bytes)
        self.bytes = mmap.mmap(self.fd, num_bytes)
        self.next_page = 0

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)


class PoolMemory(Memory):
    """`mapped` is what the core knows: which epoch the processes of which session have mapped."""

    def __init__(self, pages: int, pool_pages: int) -> None:
        super().__init__(pages)
        self.base = 2 * self.arena_bytes
        self.pool_pages = pool_pages
        os.ftruncate(self.generations_fd, (self.base // PAGE + pool_pages) * 8)
        self.generations.close()
        self.generations = mmap.mmap(self.generations_fd, 0)
        self.pools = [Pool(1, pool_pages * PAGE)]
        self.mapped: dict[bytes, int] = {}
        self.device_slots: dict[bytes, int] = {}
        self.granted_on: dict[bytes, Pool] = {}

    @property
    def pool(self) -> Pool:
        return self.pools[-1]

    def close(self) -> None:
        super().close()
        for pool in self.pools:
            pool.close()

    def end_pool(self) -> None:
        """Its process is gone: generations first, then everything that is known of it."""
        for page in range(self.pool.next_page):
            self.bump(self.base + page * PAGE)
        self.device_slots.clear()
        self.mapped.clear()
        self.pools.append(Pool(self.pool.epoch + 1, self.pool_pages * PAGE))

    def reply(self, request: Request) -> Reply:
        reply = super().reply(request)
        if isinstance(request, Acquire) and isinstance(reply, AcquireReply) and request.on_device:
            return self._acquired(request, reply)
        if isinstance(request, Reserve) and isinstance(reply, ReserveReply) and request.on_device:
            return self._reserved(request, reply)
        return reply

    def _acquired(self, request: Acquire, reply: AcquireReply) -> Reply:
        host = list(self.leases.get(request.grant, []))
        holder = request.holders[0].session if request.holders else request.session
        if self.mapped.get(holder) != self.pool.epoch or not host:
            return reply
        keys = [request.keys[32 * block : 32 * block + 32] for block in range(len(host))]
        offsets = [self.device_slots.get(key, offset) for key, offset in zip(keys, host, strict=True)]
        part = msgspec.structs.replace(
            reply.parts[0],
            offsets=struct.pack(f"<{len(offsets)}Q", *offsets),
            generations=struct.pack(f"<{len(offsets)}Q", *map(self.generation, offsets)),
        )
        on_device = sum(offset >= self.base for offset in offsets)
        return msgspec.structs.replace(reply, parts=(part, *reply.parts[1:]), device_blocks=on_device)

    def _reserved(self, request: Reserve, reply: ReserveReply) -> Reply:
        granted = self.tickets.get(request.grant, {})
        if self.mapped.get(request.session) != self.pool.epoch:
            return reply
        step = -(-self.groups[request.group].block_bytes // PAGE)
        told = []
        for key, offset in granted.items():
            if self.pool.next_page + step > self.pool_pages:
                told.append(offset)
                continue
            self.device_slots[key] = self.base + self.pool.next_page * PAGE
            self.pool.next_page += step
            told.append(self.device_slots[key])
        self.granted_on[request.grant] = self.pool
        return msgspec.structs.replace(
            reply,
            offsets=struct.pack(f"<{len(told)}Q", *told),
            generations=struct.pack(f"<{len(told)}Q", *map(self.generation, told)),
        )

    def _commit(self, request: Commit) -> Reply:
        pool = self.granted_on.pop(request.grant, None)
        granted = dict(self.tickets.get(request.grant, {}))
        if pool is not None and pool is not self.pool:
            self.tickets.pop(request.grant, None)  # the blocks went down with their pool
        elif pool is not None:
            for key, offset in granted.items():
                if key in self.device_slots:
                    at = self.device_slots[key] - self.base
                    step = self._step(key, granted)
                    self.arena[offset : offset + step] = pool.bytes[at : at + step]
        return super()._commit(request)

    def _step(self, key: bytes, granted: dict[bytes, int]) -> int:
        offsets = sorted(granted.values())
        return PAGE if len(offsets) == 1 else offsets[1] - offsets[0]


class DeviceNode(FakeNode):
    def __init__(self, directory: Path, *, pages: int = 128, pool_pages: int = 64) -> None:
        self.pool_pages = pool_pages
        self.asked_for: list[MapDevice] = []
        self.refuse_pool: DeviceRefused | None = None
        self.changed_grant: dict[str, Any] = {}
        self.silent_pool = False
        self.unanswered: list[socket.socket] = []
        super().__init__(directory, pages=pages)

    @property
    def devices(self) -> PoolMemory:
        memory = self._memory
        assert isinstance(memory, PoolMemory)
        return memory

    def end_pool(self, *, notice: bool = True) -> None:
        """kill -9 of the device worker, and its successor. Without notice sessions hear of it later (`tell_ended`)."""

        def end() -> None:
            epoch = self.devices.pool.epoch
            self.devices.end_pool()
            if notice:
                self._tell_ended(epoch)

        self._call(end)

    def tell_ended(self, epoch: int) -> None:
        self._call(lambda: self._tell_ended(epoch))

    def only_in_host(self, keys: bytes, blocks: Iterable[int]) -> None:
        """These blocks of a prompt are in the pool no longer."""
        self._edit(lambda memory: [memory.device_slots.pop(keys[32 * block : 32 * block + 32]) for block in blocks])

    def bump_in_pool(self, keys: bytes, block: int) -> None:
        self._edit(lambda memory: memory.bump(memory.device_slots[keys[32 * block : 32 * block + 32]]))

    def spoil_arena(self) -> None:
        """So that what is read there is seen to be."""
        self._edit(lambda memory: memory.arena.__setitem__(slice(0, memory.arena_bytes), b"\xee" * memory.arena_bytes))

    def answer_late(self) -> None:
        """Those that were left without an answer."""

        def answer() -> None:
            for connection in self.unanswered:
                self._grant_pool(connection)
            self.unanswered.clear()

        self._call(answer)

    def _edit(self, change: Callable[[PoolMemory], object]) -> None:
        self._call(lambda: change(self.devices))

    def _tell_ended(self, epoch: int) -> None:
        for connection, _incarnation in self._sessions.values():
            connection.send(encode_packet(PoolEnded(device=0, epoch=epoch)))

    def _new_memory(self) -> None:
        self.incarnation += 1
        if self.memory is not None:
            self._old_memory.append(self.memory)
        self.memory = PoolMemory(self.pages, self.pool_pages)

    def _map_device(self, connection: socket.socket, message: MapDevice) -> None:
        self.asked_for.append(message)
        if self.refuse_pool is not None:
            connection.send(encode_packet(self.refuse_pool))
        elif self.silent_pool:
            self.unanswered.append(connection)
        else:
            self._grant_pool(connection)

    def _grant_pool(self, connection: socket.socket) -> None:
        memory, pool = self.devices, self.devices.pool
        for token in memory.tokens:  # the core is told first; one process in these tests
            memory.mapped[token] = pool.epoch
        grant = DeviceGrant(
            device=0, epoch=pool.epoch, uuid="cpu", base=memory.base, num_bytes=pool.num_bytes, kind="memfd"
        )
        packet = encode_packet(msgspec.structs.replace(grant, **self.changed_grant))
        socket.send_fds(connection, [packet], [pool.fd])
