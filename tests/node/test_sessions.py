"""Real sockets and real processes; the clock is ours."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from tierkv.node import sessions as sessions_module
from tierkv.node.arena import PAGE_BYTES, make_arena, make_generations, open_read_only
from tierkv.node.sessions import Asked, AskedDevice, Ended, Event, HungUp, Memory, Session, Sessions
from tierkv.node.socket_folder import claim_socket_folder, listen_for_sessions
from tierkv.wire.messages import PROTOCOL_VERSION
from tierkv.wire.session import (
    AnySessionMessage,
    Detach,
    DeviceGrant,
    DeviceRefused,
    IncarnationEnded,
    InlineGrant,
    MapDevice,
    PoolEnded,
    SessionGrant,
    SessionHello,
    SessionMessage,
    SessionRefused,
)

INCARNATION = 7
PATIENCE_SECONDS = 20.0
E = TypeVar("E", bound=Event)

CONNECT_AND_WAIT = """
import msgspec, os, select, socket, sys
from tierkv.wire.session import SessionHello
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1])
s.send(msgspec.msgpack.encode(SessionHello(protocol=1, client="engine")))
s.recv(65536)
print("in", flush=True)
if sys.argv[2] == "close":
    s.close()
if sys.argv[2] == "fork" and os.fork() == 0:
    hung_up = select.poll()  # of the pipe, which it must not read: the line there is for its parent
    hung_up.register(0, 0)
    hung_up.poll(60_000)
    os._exit(0)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A session socket with the supervisor's part played: every hello is granted."""

    def __init__(self, folder: Path) -> None:
        claim_socket_folder(folder)
        self.path = str(folder / "session.sock")
        self.folder = folder
        self.clock = Clock()
        self.sessions = Sessions(listen_for_sessions(folder), clock=self.clock)
        self.arena = make_arena(2**20)
        self.generations = make_generations(2**20)
        self.read_only = open_read_only(self.generations.fd)
        self.memory = Memory(
            incarnation=INCARNATION,
            endpoint="ipc://x",
            data_dir="/data",
            arena_fd=self.arena.fd,
            arena_bytes=self.arena.num_bytes,
            generations_fd=self.read_only,
            page_bytes=PAGE_BYTES,
        )
        self.events: list[Event] = []

    def close(self) -> None:
        self.sessions.close()
        self.arena.close()
        self.generations.close()
        os.close(self.read_only)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.settimeout(PATIENCE_SECONDS)
        client.connect(self.path)
        return client

    def until(self, kind: type[E], *, grants: bool = True) -> E:
        """The next event of this kind, granting what asks on the way."""
        poll = select.poll()
        poll.register(self.sessions.fileno(), select.POLLIN)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1_000):
            for event in self.sessions.poll():
                self.events.append(event)
                if grants and isinstance(event, Asked):
                    self.sessions.grant(event.knock, self.sessions.new_token(), self.memory)
            for event in self.events:
                if isinstance(event, kind):
                    self.events.remove(event)
                    return event
        raise AssertionError(f"no {kind.__name__} came")

    def is_quiet(self) -> bool:
        return not self.sessions.poll() and not self.events


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "node")
    yield served
    served.close()


@pytest.fixture
def start(served: Served) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started = []

    def start(what: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", CONNECT_AND_WAIT, served.path, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(child)
        served.until(Asked)
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def let_die(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.wait(PATIENCE_SECONDS)


def say(client: socket.socket, message: SessionMessage) -> None:
    client.send(msgspec.msgpack.encode(message))


def hear(client: socket.socket) -> tuple[AnySessionMessage, list[int]]:
    packet, descriptors, _, _ = socket.recv_fds(client, 65536, 4)
    return msgspec.msgpack.decode(packet, type=AnySessionMessage), list(descriptors)


def hello(**fields: object) -> SessionHello:
    return msgspec.structs.replace(SessionHello(protocol=PROTOCOL_VERSION, client="test"), **fields)


def test_a_process_of_ours_gets_a_token_and_both_memories(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        asked = served.until(Asked)
        assert asked.knock.pid == os.getpid()
        grant, descriptors = hear(client)
        assert isinstance(grant, SessionGrant)
        assert (grant.incarnation, len(grant.token), grant.arena_bytes) == (INCARNATION, 16, 2**20)
        assert [os.fstat(fd).st_ino for fd in descriptors] == [
            os.fstat(fd).st_ino for fd in (served.arena.fd, served.generations.fd)
        ]
        for fd in descriptors:
            os.close(fd)
    assert served.sessions.count(INCARNATION) == 1


def test_an_operators_tool_gets_no_memory_and_its_socket_is_its_session(served: Served) -> None:
    with served.connect() as client:
        say(client, hello(maps_arena=False))
        served.until(Asked)
        grant, descriptors = hear(client)
        assert isinstance(grant, SessionGrant)
        assert descriptors == []
        assert served.sessions.count(INCARNATION) == 0
    assert served.until(Ended).session.token == grant.token
    assert served.sessions.num_sessions == 0


def test_tokens_differ_between_sessions_of_one_process(served: Served) -> None:
    with served.connect() as one, served.connect() as two:
        for client in (one, two):
            say(client, hello(maps_arena=False))
            served.until(Asked)
        tokens = {hear(client)[0].token for client in (one, two)}  # type: ignore[union-attr]
    assert len(tokens) == 2


def test_the_end_of_the_socket_ends_no_session_whose_process_lives(
    served: Served, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    child = start("close")
    served.until(HungUp)
    assert served.is_quiet()
    assert served.sessions.count(INCARNATION) == 1
    let_die(child)
    assert served.until(Ended).session.pid == child.pid
    assert served.sessions.count(INCARNATION) == 0


def test_a_killed_process_has_ended_even_while_a_forked_child_holds_its_socket(
    served: Served, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    child = start("fork")
    let_die(child)
    assert served.until(Ended).session.pid == child.pid
    assert not any(isinstance(event, HungUp) for event in served.events)


def test_without_a_pidfd_a_session_stays_until_it_says_that_it_is_done(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "_open_pidfd", lambda _sock, _pid: None)
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
    served.until(HungUp)
    assert served.is_quiet()
    assert served.sessions.count(INCARNATION) == 1


def test_a_pidfd_is_had_by_number_where_the_socket_has_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_SO_PEERPIDFD", 9999)
    with served.connect() as client:
        say(client, hello())
        knock = served.until(Asked).knock
        assert knock.pidfd is not None
        fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{knock.pidfd}").read_text().splitlines())
        assert int(fields["Pid"]) == os.getpid()


def test_detach_ends_a_session_whose_process_goes_on(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
        say(client, Detach(incarnation=INCARNATION))
        assert served.until(Ended).session.pid == os.getpid()
        assert client.recv(1000)  # the grant
        assert client.recv(1000) == b""


def test_a_detach_is_heard_from_who_closes_without_having_read_all(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
        say(client, Detach(incarnation=INCARNATION))
    # The grant was never read: the kernel reports that before it delivers the packet.
    assert served.until(Ended).session.pid == os.getpid()
    assert served.is_quiet()


def test_a_detach_of_another_incarnation_ends_nothing(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
        say(client, Detach(incarnation=INCARNATION + 1))
        served.until(HungUp)
        assert served.sessions.count(INCARNATION) == 1


@pytest.mark.parametrize(
    "packet",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\0" * 500, b"\xc1", msgspec.msgpack.encode(Detach(incarnation=1))],
)
def test_anything_but_a_hello_is_refused_and_closed(served: Served, packet: bytes) -> None:
    with served.connect() as client:
        client.send(packet)
        served.sessions.poll()
        served.sessions.poll()
        refusal, _ = hear(client)
        assert isinstance(refusal, SessionRefused)
        assert refusal.code == "malformed"
        assert client.recv(1000) == b""


@pytest.mark.scenario("B171", then="other protocol versions are refused by name")
@pytest.mark.parametrize("protocol", [0, 2])
def test_another_protocol_version_is_refused_by_name(served: Served, protocol: int) -> None:
    with served.connect() as client:
        say(client, hello(protocol=protocol))
        served.sessions.poll()
        served.sessions.poll()
        refusal, _ = hear(client)
        assert isinstance(refusal, SessionRefused)
        assert refusal.code == "protocol_version"


def test_another_user_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.sessions, "_users", frozenset({os.getuid() + 1}))
    with served.connect() as client:
        served.sessions.poll()
        refusal, _ = hear(client)
        assert isinstance(refusal, SessionRefused)
        assert refusal.code == "wrong_user"
        assert refusal.problem.endswith(f"this node serves user {os.getuid() + 1} only")


def test_who_connects_and_says_nothing_is_dropped(served: Served) -> None:
    with served.connect() as client:
        served.sessions.poll()
        assert served.sessions.next_deadline() == 105.0
        served.clock.now = 104.9
        served.sessions.expire()
        served.clock.now = 105.0
        served.sessions.expire()
        assert client.recv(1000) == b""
        assert served.sessions.next_deadline() is None


@pytest.mark.scenario("B170", then="connections that say nothing lock nobody out")
def test_a_flood_of_silent_connections_locks_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_KNOCKS", 4)
    silent = [served.connect() for _ in range(20)]
    served.sessions.poll()
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
        assert isinstance(hear_grant(client), SessionGrant)
    for other in silent:
        other.close()


@pytest.mark.scenario("B170", then="who has said hello is heard, however many have connected behind it")
def test_a_hello_is_heard_before_its_place_is_given_to_another(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_KNOCKS", 4)
    with served.connect() as client, ExitStack() as owned:
        say(client, hello())
        for _ in range(20):
            owned.enter_context(served.connect())
        served.until(Asked)
        assert isinstance(hear_grant(client), SessionGrant)


@pytest.mark.scenario("B170", then="who waits for a front keeps its place before those who say nothing")
def test_who_waits_for_an_answer_keeps_its_place_before_silent_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_KNOCKS", 4)
    with served.connect() as client, ExitStack() as owned:
        say(client, hello())
        asked = served.until(Asked, grants=False)
        for _ in range(20):
            owned.enter_context(served.connect())
            served.sessions.poll()
        assert served.sessions.is_waiting(asked.knock)
        served.sessions.grant(asked.knock, served.sessions.new_token(), served.memory)
        assert isinstance(hear_grant(client), SessionGrant)


def hear_grant(client: socket.socket) -> AnySessionMessage:
    message, descriptors = hear(client)
    for fd in descriptors:
        os.close(fd)
    return message


def test_sessions_are_capped_with_a_named_refusal(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 1)
    with served.connect() as one, served.connect() as two:
        say(one, hello())
        served.until(Asked)
        hear_grant(one)
        say(two, hello())
        served.sessions.poll()
        served.sessions.poll()
        refusal, _ = hear(two)
        assert isinstance(refusal, SessionRefused)
        assert refusal.code == "too_many_sessions"


def test_without_a_descriptor_to_accept_with_it_waits_and_does_not_spin(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exhausted:
        def fileno(self) -> int:
            return listener.fileno()

        def accept(self) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        def close(self) -> None:
            listener.close()

    listener = served.sessions._listener
    assert listener is not None
    with served.connect() as client:
        monkeypatch.setattr(served.sessions, "_listener", Exhausted())
        served.sessions.poll()
        poll = select.poll()
        poll.register(served.sessions.fileno(), select.POLLIN)
        assert poll.poll(0) == []
        assert served.sessions.next_deadline() == 100.5
        monkeypatch.setattr(served.sessions, "_listener", listener)
        served.clock.now = 101.0
        served.sessions.expire()
        say(client, hello())
        served.until(Asked)


def test_a_stopping_node_answers_who_is_waiting_and_accepts_nobody(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        served.until(Asked, grants=False)
        served.sessions.stop_accepting()
        refusal, _ = hear(client)
        assert isinstance(refusal, SessionRefused)
        assert refusal.code == "shutting_down"
        with pytest.raises(ConnectionRefusedError):
            served.connect()


def test_a_listener_whose_file_was_deleted_is_replaced(served: Served) -> None:
    os.unlink(served.path)
    served.sessions.replace_listener(listen_for_sessions(served.folder))
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)


def test_sessions_of_a_front_that_died_are_told_and_stay(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        served.until(Asked)
        hear_grant(client)
        served.sessions.tell_ended(INCARNATION + 1)
        served.sessions.tell_ended(INCARNATION)
        assert hear(client)[0] == IncarnationEnded(incarnation=INCARNATION)
        assert served.is_quiet()
        assert served.sessions.count(INCARNATION) == 1


def test_who_left_before_the_answer_is_not_waiting_any_more(served: Served) -> None:
    with served.connect() as client:
        say(client, hello())
        knock = served.until(Asked, grants=False).knock
        assert served.sessions.is_waiting(knock)
    served.sessions.poll()
    assert not served.sessions.is_waiting(knock)
    assert served.sessions.num_sessions == 0


@pytest.mark.parametrize("how", [socket.SHUT_RD, socket.SHUT_RDWR])
def test_a_grant_that_finds_nobody_ends_with_the_socket(served: Served, how: int) -> None:
    with served.connect() as client:
        say(client, hello())
        knock = served.until(Asked, grants=False).knock
        client.shutdown(how)
        served.sessions.grant(knock, served.sessions.new_token(), served.memory)
        assert served.sessions.count(INCARNATION) == 0, "nobody has the memory"
    assert served.until(Ended).session.pid == os.getpid()
    assert served.sessions.num_sessions == 0


# ---- sessions without memory, of tenants that are not trusted


def grant_inline(served: Served, client: socket.socket) -> Session:
    say(client, hello())
    asked = served.until(Asked, grants=False)
    assert asked.knock.uid == os.geteuid()
    answer = InlineGrant(
        token=served.sessions.new_token(), incarnation=INCARNATION, endpoint="ipc://y", tenant="inline:1:"
    )
    return served.sessions.grant_inline(asked.knock, answer)


def test_an_inline_session_gets_no_memory_whatever_its_hello_says_and_ends_with_its_socket(served: Served) -> None:
    with served.connect() as client:
        session = grant_inline(served, client)
        grant, descriptors = hear(client)
        assert isinstance(grant, InlineGrant)
        assert (grant.token, descriptors, session.uid) == (session.token, [], os.geteuid())
        assert served.sessions.count(INCARNATION) == 0
    assert served.until(Ended).session is session
    assert served.sessions.num_sessions == 0


def test_an_inline_session_that_is_ended_here_hears_of_it(served: Served) -> None:
    with served.connect() as client:
        session = grant_inline(served, client)
        hear(client)
        served.sessions.end(session)
        assert client.recv(1) == b""
        served.sessions.end(session)  # twice is fine
    assert served.is_quiet()


def test_where_many_users_are_served_the_silence_of_one_does_not_crowd_out_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_KNOCKS", 4)
    monkeypatch.setattr(sessions_module, "KNOCKS_A_USER", 2)
    monkeypatch.setattr(served.sessions, "_users", frozenset({os.geteuid(), 4242}))
    with served.connect() as honest:
        served.sessions.poll()
        next(iter(served.sessions._watched.knocks.values())).uid = 4242  # as if another user had connected
        silent = [served.connect() for _ in range(5)]
        served.sessions.poll()
        assert sorted(knock.uid for knock in served.sessions._watched.knocks.values()) == [os.geteuid()] * 2 + [4242]
        for sock in silent:
            sock.close()
        say(honest, hello())
        assert served.until(Asked).knock.uid == 4242


POOL = DeviceGrant(device=1, epoch=3, uuid="cpu", base=2**20, num_bytes=4096, kind="memfd")


def a_session(served: Served, client: socket.socket, *, maps_arena: bool = True) -> None:
    say(client, hello(maps_arena=maps_arena))
    served.until(Asked)
    for fd in hear(client)[1]:
        os.close(fd)


def test_a_session_is_answered_how_to_map_a_pool_with_its_descriptor(served: Served) -> None:
    with served.connect() as client:
        a_session(served, client)
        say(client, MapDevice(uuid="cpu", cuda_version=12_040))
        event = served.until(AskedDevice)
        assert (event.asked.uuid, event.asked.cuda_version, event.session.pid) == ("cpu", 12_040, os.getpid())
        served.sessions.grant_pool(event.session, POOL, served.arena.fd)
        grant, (fd,) = hear(client)
        assert (grant, os.fstat(fd).st_ino) == (POOL, os.fstat(served.arena.fd).st_ino)
        os.close(fd)


def test_a_pool_without_a_descriptor_is_granted_by_its_handle(served: Served) -> None:
    with served.connect() as client:
        a_session(served, client)
        say(client, MapDevice(uuid="GPU-1"))
        grant = msgspec.structs.replace(POOL, kind="ipc", handle=b"h" * 64)
        served.sessions.grant_pool(served.until(AskedDevice).session, grant, -1)
        assert hear(client) == (grant, [])


def test_who_has_mapped_a_pool_is_told_of_its_end_and_nobody_else_nor_twice(served: Served) -> None:
    with served.connect() as maps, served.connect() as other:
        for client in (maps, other):
            a_session(served, client)
        say(maps, MapDevice(uuid="cpu"))
        served.sessions.grant_pool(served.until(AskedDevice).session, POOL, served.arena.fd)
        for fd in hear(maps)[1]:
            os.close(fd)
        for epoch in (2, 3, 3):
            served.sessions.tell_pool_ended(1, epoch)
        assert hear(maps) == (PoolEnded(device=1, epoch=3), [])
        for client in (maps, other):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)


def test_a_session_without_memory_maps_no_pool_and_goes_on(served: Served) -> None:
    with served.connect() as client:
        a_session(served, client, maps_arena=False)
        say(client, MapDevice(uuid="cpu"))
        assert select.select([served.sessions.fileno()], [], [], 5)[0]
        assert served.is_quiet()
        answer, _ = hear(client)
        assert isinstance(answer, DeviceRefused)
        assert answer.code == "no_pool"
        assert served.sessions.num_sessions == 1


def test_a_session_that_reads_no_answers_is_hung_up_on_and_still_ends_by_proof(served: Served) -> None:
    with served.connect() as client:
        a_session(served, client)
        say(client, MapDevice(uuid="cpu"))
        session = served.until(AskedDevice).session
        for _ in range(10_000):
            served.sessions.refuse_pool(session, "pool_down", "x" * 1_000)
        assert session.sock is None
        assert served.sessions.count(INCARNATION) == 1
