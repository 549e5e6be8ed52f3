"""A node small enough to be obviously right: one thread, a dictionary, and the real messages.

It serves the session socket and the ROUTER, hands out a real memfd, can restart with a new incarnation, go away, and
do to any request what a network or a bad node would: drop, hold, duplicate or garble the reply.
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import zmq

from tierkv.core.keys import KEY_BYTES
from tierkv.wire.frames import Malformed, decode_request, encode
from tierkv.wire.messages import (
    Abort,
    Acquire,
    AcquireReply,
    AskCodec,
    BlockState,
    CodecReply,
    Commit,
    CommitReply,
    Done,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    LeasePart,
    Match,
    MatchReply,
    OpenGroup,
    OpenGroupReply,
    Release,
    Reply,
    ReportBad,
    ReportPrefill,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    Status,
    StatusReply,
    Usage,
    UsageReply,
    Verify,
    VerifyReply,
    Warmup,
    WarmupReply,
)
from tierkv.wire.session import (
    MAX_PACKET_BYTES,
    NODE_SOCKET_NAME,
    SESSION_SOCKET_NAME,
    Detach,
    DeviceRefused,
    IncarnationEnded,
    MapDevice,
    SessionGrant,
    SessionRefused,
    decode_packet,
    encode_packet,
)

PAGE = 4096

Behaviour = Callable[["FakeNode", Request, Reply], list[bytes]]


def drop(node: FakeNode, request: Request, reply: Reply) -> list[bytes]:
    return []


def twice(node: FakeNode, request: Request, reply: Reply) -> list[bytes]:
    return [encode(reply), encode(reply)]


def garbage(node: FakeNode, request: Request, reply: Reply) -> list[bytes]:
    return [b"\xc1 no message"]


def garbage_then_reply(node: FakeNode, request: Request, reply: Reply) -> list[bytes]:
    return [b"\xc1 no message", encode(reply)]


def answer(make: Callable[[Request], Reply]) -> Behaviour:
    return lambda node, request, reply: [encode(make(request))]


def hold(node: FakeNode, request: Request, reply: Reply) -> list[bytes]:
    node.held.append((node.client_of_request, encode(reply)))
    return []


class FakeNode:
    def __init__(self, directory: Path, *, pages: int = 128) -> None:
        self.directory = directory
        self.pages = pages
        self.incarnation = 0
        self.requests: list[Request] = []
        self.detached: list[int] = []
        self.hung_up: list[int] = []
        self.script: defaultdict[type[Request], deque[Behaviour]] = defaultdict(deque)
        self.held: list[tuple[bytes, bytes]] = []
        self.refuse_sessions: SessionRefused | None = None
        self.silent_sessions = False
        self.truncate_arena = False
        self.host_limit: int | None = None
        self.client_of_request = b""
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._sessions: dict[int, tuple[socket.socket, int]] = {}
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._listener: socket.socket | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._running = True
        self._old_memory: list[Memory] = []
        self.memory: Memory | None = None
        self._thread = threading.Thread(target=self._serve, name="fake node")
        self._thread.start()
        self.come()

    # ---- called by tests

    def come(self) -> None:
        """Start serving, as a new incarnation."""
        self._call(self._come)

    def restart_front(self, *, notice: bool) -> None:
        """A new front and arena under the same supervisor: the session sockets stay open. Without notice the ROUTER
        stays too, so that the client learns of it from a reply and from nothing else."""
        self._call(lambda: self._restart_front(notice))

    def lose_front(self) -> None:
        """As `restart_front`, but with neither notice nor reply: what is sent before the client's socket has seen the
        end of the connection is lost."""
        self._call(self._lose_front)

    def go(self) -> None:
        """Everything is gone at once, as after a kill -9 of all processes. The socket files stay."""
        self._call(self._go)

    def bump(self, offset: int) -> None:
        """Revoke a slot, as the node does before the first overwrite."""
        memory = self._memory
        self._call(lambda: memory.bump(offset))

    def release_held(self) -> None:
        self._call(self._send_held)

    def settle(self) -> None:
        """Until everything that was sent to the node before has been seen."""
        self._call(lambda: None)

    def saw(self, kind: type[Request], *, at_least: int = 0) -> list[Any]:
        """All requests of this kind so far. What nobody waited for may still be on its way: say how many come."""
        self.settle()
        with self._arrived:
            self._arrived.wait_for(lambda: len(self._of(kind)) >= at_least, 10)
            return self._of(kind)

    def _of(self, kind: type[Request]) -> list[Request]:
        return [request for request in self.requests if isinstance(request, kind)]

    def wait_for(self, kind: type[Request]) -> None:
        """Until a request of this kind has been seen."""
        assert self.saw(kind, at_least=1)

    @property
    def open_grants(self) -> int:
        self.settle()
        return len(self._memory.tickets) + len(self._memory.leases)

    def has_no_grants(self) -> bool:
        """Once what is on its way has arrived."""
        with self._arrived:
            return self._arrived.wait_for(lambda: not self._memory.tickets and not self._memory.leases, 10)

    @property
    def _memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    def close(self) -> None:
        self._call(self._go)
        self._running = False
        self._wake.send(b"x")
        self._thread.join()
        for memory in [*self._old_memory, self.memory]:
            if memory is not None:
                memory.close()
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _call(self, command: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._commands.put((command, done))
        self._wake.send(b"x")
        return done.result(30)

    # ---- the thread

    def _serve(self) -> None:
        while self._running:
            for ready, _event in self._poller.poll():
                if ready is self._router:
                    self._drain_router()
                elif ready == self._woken.fileno():
                    self._woken.recv(1)
                    self._drain_router()
                    self._drain_sessions()
                    if not self._commands.empty():
                        command, done = self._commands.get()
                        done.set_result(command())
                elif self._listener is not None and ready == self._listener.fileno():
                    self._accept()
                elif ready in self._sessions:
                    self._read_session(ready)

    def _come(self) -> None:
        self._new_memory()
        self._bind_router()
        path = self.directory / SESSION_SOCKET_NAME
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(path))
        self._listener.listen(16)
        self._poller.register(self._listener, zmq.POLLIN)

    def _bind_router(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.endpoint)
        self._poller.register(self._router, zmq.POLLIN)

    def _new_memory(self) -> None:
        self.incarnation += 1
        if self.memory is not None:
            self._old_memory.append(self.memory)
        self.memory = Memory(self.pages)

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.directory / NODE_SOCKET_NAME}"

    def _restart_front(self, notice: bool) -> None:
        before = self.incarnation
        if not notice:
            self._new_memory()
            return
        self._lose_front()
        for connection, incarnation in self._sessions.values():
            if incarnation == before:
                connection.send(encode_packet(IncarnationEnded(incarnation=before)))

    def _lose_front(self) -> None:
        self._close_router()
        self._new_memory()
        self._bind_router()

    def _close_router(self) -> None:
        if self._router is not None:
            self._poller.unregister(self._router)
            self._router.close()
            self._router = None

    def _go(self) -> None:
        self._close_router()
        if self._listener is not None:
            self._poller.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for connection, _incarnation in self._sessions.values():
            self._poller.unregister(connection)
            connection.close()
        self._sessions.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _address = self._listener.accept()
        self._sessions[connection.fileno()] = (connection, self.incarnation)
        self._poller.register(connection, zmq.POLLIN)

    def _read_session(self, descriptor: int) -> None:
        connection, incarnation = self._sessions[descriptor]
        try:
            packet = connection.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # it has been read since the poll, on the way to a command
        except ConnectionResetError:
            packet = b""
        if not packet:
            self.hung_up.append(incarnation)
            self._poller.unregister(connection)
            del self._sessions[descriptor]
            connection.close()
            return
        message = decode_packet(packet)
        if isinstance(message, Detach):
            self.detached.append(message.incarnation)
        elif isinstance(message, MapDevice):
            self._map_device(connection, message)
        elif self.refuse_sessions is not None:
            connection.send(encode_packet(self.refuse_sessions))
        elif not self.silent_sessions:
            self._grant(connection)

    def _map_device(self, connection: socket.socket, message: MapDevice) -> None:
        connection.send(encode_packet(DeviceRefused(code="no_pool", problem="this node has no pool")))

    def _drain_sessions(self) -> None:
        while ready := select.select(list(self._sessions), [], [], 0)[0]:
            for descriptor in ready:
                self._read_session(descriptor)

    def _grant(self, connection: socket.socket) -> None:
        memory = self._memory
        token = os.urandom(16)
        memory.tokens.add(token)
        self._sessions[connection.fileno()] = (connection, self.incarnation)
        arena_bytes = memory.arena_bytes * (2 if self.truncate_arena else 1)
        grant = SessionGrant(
            token=token,
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            arena_bytes=arena_bytes,
            page_bytes=PAGE,
            data_dir="",
        )
        socket.send_fds(connection, [encode_packet(grant)], [memory.arena_fd, memory.generations_fd])

    def _drain_router(self) -> None:
        while self._router is not None:
            try:
                client, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(client, frame)

    def _answer(self, client: bytes, frame: bytes) -> None:
        assert self._router is not None
        request = decode_request(frame)
        if isinstance(request, Malformed):
            self._router.send_multipart([client, encode(request.error)])
            return
        with self._arrived:
            self.requests.append(request)
            self.client_of_request = client
            reply = self._reply(request)
            self._arrived.notify_all()
        behaviours = self.script[type(request)]
        frames = behaviours.popleft()(self, request, reply) if behaviours else [encode(reply)]
        for reply_frame in frames:
            self._router.send_multipart([client, reply_frame])

    def _send_held(self) -> None:
        assert self._router is not None
        for client, frame in self.held:
            self._router.send_multipart([client, frame])
        self.held.clear()

    def _reply(self, request: Request) -> Reply:
        memory = self._memory
        if request.session not in memory.tokens:
            return Error(id=request.id, code=ErrorCode.SESSION_GONE, problem="register again")
        if isinstance(request, Hello):
            return HelloReply(
                id=request.id, protocol=1, incarnation=self.incarnation, version="fake", data_dir="", host_bytes=0
            )
        return memory.reply(request)


class Memory:
    """The arena of one incarnation, and what is cached in it: one slot a key."""

    def __init__(self, pages: int) -> None:
        self.arena_bytes = pages * PAGE
        self.arena_fd = os.memfd_create("arena")
        self.generations_fd = os.memfd_create("generations")
        os.ftruncate(self.arena_fd, self.arena_bytes)
        os.ftruncate(self.generations_fd, pages * 8)
        self.arena = mmap.mmap(self.arena_fd, self.arena_bytes)
        self.generations = mmap.mmap(self.generations_fd, pages * 8)
        self.tokens: set[bytes] = set()
        self.groups: dict[bytes, OpenGroup] = {}
        self.slots: dict[bytes, int] = {}
        self.leases: dict[bytes, list[int]] = {}
        self.tickets: dict[bytes, dict[bytes, int]] = {}
        self.ended: set[bytes] = set()
        self.next_page = 0
        self.steps = itertools.count()

    def close(self) -> None:
        self.arena.close()
        self.generations.close()
        os.close(self.arena_fd)
        os.close(self.generations_fd)

    def generation(self, offset: int) -> int:
        at = offset // PAGE * 8
        value: int = struct.unpack_from("<Q", self.generations, at)[0]
        return value

    def bump(self, offset: int) -> None:
        struct.pack_into("<Q", self.generations, offset // PAGE * 8, self.generation(offset) + 1)

    def reply(self, request: Request) -> Reply:
        if isinstance(request, OpenGroup):
            self.groups[request.identity.group_key()] = request
            return OpenGroupReply(id=request.id, group=request.identity.group_key(), persistent=True)
        about_group = isinstance(request, Match | Acquire | Reserve | Seal | ReportBad | ReportPrefill)
        if about_group and request.group not in self.groups:
            return Error(id=request.id, code=ErrorCode.UNKNOWN_GROUP, problem="open it first")
        verb: Callable[[Any], Reply] = {
            Match: self._match,
            Acquire: self._acquire,
            Release: self._release,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Seal: self._seal,
            ReportBad: self._report_bad,
            ReportPrefill: lambda request: Done(id=request.id),
            AskCodec: lambda request: CodecReply(id=request.id),
            Status: _status,
            Usage: lambda request: UsageReply(id=request.id, rows=(), tiers=()),
            Warmup: self._warmup,
            Verify: self._verify,
        }[type(request)]
        return verb(request)

    def _leading(self, keys: bytes) -> list[int]:
        offsets = []
        for start in range(0, len(keys), KEY_BYTES):
            offset = self.slots.get(keys[start : start + KEY_BYTES])
            if offset is None:
                break
            offsets.append(offset)
        return offsets

    def _match(self, request: Match) -> Reply:
        blocks = len(self._leading(request.keys))
        return MatchReply(id=request.id, blocks=blocks, host_blocks=blocks)

    def _acquire(self, request: Acquire) -> Reply:
        cached = self._leading(request.keys)
        offsets = [] if request.grant in self.ended else cached[: request.max_blocks]
        if offsets:
            self.leases[request.grant] = offsets
        packed = struct.pack(f"<{len(offsets)}Q", *offsets)
        generations = struct.pack(f"<{len(offsets)}Q", *map(self.generation, offsets))
        ranks = [holder.rank for holder in request.holders] or [0]
        return AcquireReply(
            id=request.id,
            blocks=len(offsets),
            nvme_blocks=0,
            cached_blocks=len(cached),
            parts=tuple(LeasePart(rank, packed, generations) for rank in ranks),
        )

    def _release(self, request: Release) -> Reply:
        self.leases.pop(request.grant, None)
        self.ended.add(request.grant)
        return Done(id=request.id)

    def _reserve(self, request: Reserve) -> Reply:
        step = -(-self.groups[request.group].block_bytes // PAGE) * PAGE
        writing = {key for ticket in self.tickets.values() for key in ticket}
        states, granted = [], {}
        for block in range(request.first, len(request.keys) // KEY_BYTES):
            key = request.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]
            if key in self.slots:
                states.append(BlockState.PRESENT)
            elif key in writing:
                states.append(BlockState.PENDING)
            elif self.next_page * PAGE + step > self.arena_bytes or request.grant in self.ended:
                states.append(BlockState.NO_ROOM)
            else:
                states.append(BlockState.GRANTED)
                granted[key] = self.next_page * PAGE
                self.next_page += step // PAGE
        if granted:
            self.tickets[request.grant] = granted
        count = len(granted)
        return ReserveReply(
            id=request.id,
            states=bytes(states),
            offsets=struct.pack(f"<{count}Q", *granted.values()),
            generations=struct.pack(f"<{count}Q", *map(self.generation, granted.values())),
            reason="no_room" if BlockState.NO_ROOM in states else "",
        )

    def _commit(self, request: Commit) -> Reply:
        granted = self.tickets.pop(request.grant, None)
        if granted is None:
            return Error(id=request.id, code=ErrorCode.UNKNOWN_GRANT, problem="no such ticket")
        self.slots.update(granted)
        return CommitReply(id=request.id, visible=len(granted), staged=0)

    def _abort(self, request: Abort) -> Reply:
        self.tickets.pop(request.grant, None)
        self.ended.add(request.grant)
        return Done(id=request.id)

    def _seal(self, request: Seal) -> Reply:
        blocks = len(self._leading(request.keys))
        return SealReply(id=request.id, blocks=blocks, flushed_blocks=blocks if request.wait == "flushed" else 0)

    def _report_bad(self, request: ReportBad) -> Reply:
        for start in range(request.first_bad * KEY_BYTES, len(request.keys), KEY_BYTES):
            self.slots.pop(request.keys[start : start + KEY_BYTES], None)
        return Done(id=request.id)

    def _warmup(self, request: Warmup) -> Reply:
        done = next(self.steps)
        return WarmupReply(
            id=request.id,
            done_extents=done,
            total_extents=1,
            promoted_bytes=0,
            already_bytes=0,
            budget_bytes=request.budget_bytes,
            finished=done == 1,
        )

    def _verify(self, request: Verify) -> Reply:
        done = next(self.steps)
        return VerifyReply(
            id=request.id,
            checked_files=done,
            total_files=1,
            checked_bytes=0,
            damaged_files=0,
            damaged=(),
            finished=done == 1,
        )


def _status(request: Status) -> Reply:
    return StatusReply(
        id=request.id,
        state="ready",
        problems=(),
        version="fake",
        incarnation=1,
        uptime_seconds=0.0,
        data_dir="",
        recovery_stage="",
        recovery_done=0,
        recovery_total=0,
        sessions=1,
        leases=0,
        tickets=0,
        extents=0,
        dirty_extents=0,
        counters={},
        tiers=(),
        workers=(),
    )
