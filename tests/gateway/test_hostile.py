"""Whatever a tenant sends, it gets an answer or loses its own session; its neighbour does not notice."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client.conftest import TOKENS, make_identity, poisoned, store
from tests.client.fake_node import FakeNode
from tests.gateway.gateway_thread import GatewayThread
from tests.wire.samples import REQUESTS
from tierkv.client import Client, Group, connect
from tierkv.core.keys import pack_tokens
from tierkv.gateway import user_socket
from tierkv.wire.frames import Malformed, decode_reply, encode
from tierkv.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Acquire,
    Done,
    Error,
    ErrorCode,
    Fetch,
    FetchReply,
    Hello,
    HelloReply,
    Match,
    OpenGroup,
    Put,
    Reply,
    Request,
    Reserve,
)
from tierkv.wire.session import (
    SESSION_SOCKET_NAME,
    Detach,
    InlineGrant,
    SessionHello,
    SessionRefused,
    decode_packet,
    encode_packet,
)

ANSWER_SECONDS = 20.0


class Peer:
    """A session of its own on the session socket, and a DEALER that sends what it likes."""

    def __init__(self, gateway: GatewayThread, *, receive_queue: int = 1_000) -> None:
        self.sock = knock(gateway)
        self.sock.send(encode_packet(SessionHello(protocol=PROTOCOL_VERSION)))
        granted = decode_packet(self.sock.recv(65_536))
        assert isinstance(granted, InlineGrant)
        self.grant = granted
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.rcvhwm = receive_queue
        self.dealer.connect(granted.endpoint)

    def ask(self, request: Request) -> Reply:
        return self.ask_frame(encode(request))

    def ask_frame(self, frame: bytes) -> Reply:
        self.dealer.send(frame)
        return self.receive()

    def receive(self) -> Reply:
        assert self.dealer.poll(ANSWER_SECONDS * 1_000), "no answer"
        reply = decode_reply(self.dealer.recv())
        assert not isinstance(reply, Malformed), reply
        return reply

    def close(self) -> None:
        self.dealer.close()
        self.context.term()
        self.sock.close()


def knock(gateway: GatewayThread) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(ANSWER_SECONDS)
    sock.connect(os.fspath(gateway.directory / SESSION_SOCKET_NAME))
    return sock


@pytest.fixture
def peer(gateway: GatewayThread) -> Iterator[Peer]:
    made = Peer(gateway)
    yield made
    made.close()


@pytest.fixture
def rows(group: Group) -> np.ndarray:
    """What the neighbour has stored."""
    return store(group, TOKENS)


def require_well(group: Group, rows: np.ndarray) -> None:
    """The neighbour loads its blocks, byte for byte."""
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()


_texts = st.sampled_from([kind.__struct_config__.tag for kind in map(type, REQUESTS)] + ["Nonsense", ""])
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=64) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_field_names = st.sampled_from(sorted({name for one in REQUESTS for name in one.__struct_fields__}))


def _mutated(data: st.DataObject, token: bytes) -> bytes:
    """Bytes; a map of nonsense; or a real request with some fields replaced, under a token that is right or wrong."""
    kind = data.draw(st.integers(0, 3))
    if kind == 0:
        return data.draw(st.binary(max_size=200))
    if kind == 1:
        fields = data.draw(st.dictionaries(_field_names, _values, max_size=5))
        return msgspec.msgpack.encode({"type": data.draw(_texts), "id": 1, "session": token} | fields)
    request = msgspec.structs.replace(data.draw(st.sampled_from(REQUESTS)), session=token, deadline_ms=0)
    if kind == 2:
        fields = msgspec.msgpack.decode(encode(request))
        fields[data.draw(st.sampled_from(sorted(set(fields) - {"type"})))] = data.draw(_values)
        return msgspec.msgpack.encode(fields)
    frame = bytearray(encode(request))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(frame[: data.draw(st.integers(1, len(frame)))])


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_frame_is_answered_and_a_healthy_tenant_next_to_it_is_served(
    peer: Peer, group: Group, rows: np.ndarray, data: st.DataObject
) -> None:
    token = peer.grant.token if data.draw(st.booleans()) else data.draw(st.binary(min_size=0, max_size=16))
    peer.ask_frame(_mutated(data, token))
    require_well(group, rows)


@pytest.mark.scenario(
    "B168", then="a frame of the limit is answered, one byte more is refused as too large, and the session stays"
)
def test_frames_around_the_limit(peer: Peer, group: Group, rows: np.ndarray) -> None:
    for num_bytes, code in (
        (MAX_FRAME_BYTES - 1, ErrorCode.MALFORMED),
        (MAX_FRAME_BYTES, ErrorCode.MALFORMED),
        (MAX_FRAME_BYTES + 1, ErrorCode.TOO_LARGE),
        (MAX_FRAME_BYTES + 2**20, ErrorCode.TOO_LARGE),
    ):
        reply = peer.ask_frame(b"\xc1" * num_bytes)
        assert isinstance(reply, Error)
        assert reply.code == code
    assert isinstance(peer.ask(Hello(id=1, session=peer.grant.token, protocol=1)), HelloReply)
    require_well(group, rows)


def test_a_frame_far_beyond_the_limit_costs_its_sender_the_connection_and_nobody_else_anything(
    gateway: GatewayThread, group: Group, rows: np.ndarray
) -> None:
    peer = Peer(gateway)
    try:
        peer.ask(Hello(id=1, session=peer.grant.token, protocol=1))
        peer.dealer.send(bytes(MAX_FRAME_BYTES + 2**20 + 4096))
        require_well(group, rows)
        assert isinstance(
            peer.ask(Hello(id=2, session=peer.grant.token, protocol=1)), HelloReply
        )  # on a new connection
    finally:
        peer.close()


@pytest.mark.parametrize("payload_bytes", [MAX_PAYLOAD_BYTES + 1, MAX_FRAME_BYTES - 4096])
def test_more_payload_than_a_put_may_have_is_refused_before_it_is_looked_at(peer: Peer, payload_bytes: int) -> None:
    fields = {"type": "Put", "id": 4, "session": peer.grant.token, "grant": bytes(16), "start": 0}
    reply = peer.ask_frame(msgspec.msgpack.encode(fields | {"payload": bytes(payload_bytes)}))
    assert isinstance(reply, Error)
    assert (reply.id, reply.code, reply.field) == (4, ErrorCode.INVALID, "payload")


def test_a_length_that_is_a_lie_is_malformed(peer: Peer) -> None:
    put = encode(Put(id=4, session=peer.grant.token, grant=bytes(16), start=0, payload=b"x" * 64))
    header = put.index(b"\xc4\x40" + b"x" * 64)
    for lie in (b"\xc4\xff", b"\xc6\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        reply = peer.ask_frame(put[:header] + lie + b"x" * 64)
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.MALFORMED
    for num_bytes in (0, -1, MAX_PAYLOAD_BYTES + 1, 2**63):
        fields = {"type": "Fetch", "id": 5, "session": peer.grant.token, "grant": bytes(16), "start": 0}
        reply = peer.ask_frame(msgspec.msgpack.encode(fields | {"num_bytes": num_bytes}))
        assert isinstance(reply, Error)
        assert reply.field == "num_bytes"


def test_guessed_tokens_open_nothing(peer: Peer, group: Group) -> None:
    rng = np.random.default_rng(7)
    for number in range(200):
        token = rng.bytes(16)
        reply = peer.ask(Match(id=number, session=token, group=group.key, keys=group.keys(TOKENS)))
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.SESSION_GONE


@pytest.mark.scenario(
    "B171",
    then="another version is refused by name, an unknown type is answered with an error, an unknown field ignored",
)
def test_other_versions_are_told_so(peer: Peer, gateway: GatewayThread) -> None:
    token = peer.grant.token
    for protocol in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        with knock(gateway) as sock:
            sock.send(encode_packet(SessionHello(protocol=protocol)))
            refused = decode_packet(sock.recv(65_536))
            assert isinstance(refused, SessionRefused)
            assert refused.code == ErrorCode.PROTOCOL_VERSION
        answer = peer.ask(Hello(id=1, session=token, protocol=protocol))
        assert isinstance(answer, Error)
        assert (answer.code, answer.field) == (ErrorCode.PROTOCOL_VERSION, "protocol")
    unknown = peer.ask_frame(msgspec.msgpack.encode({"type": "Later", "id": 2, "session": token}))
    assert isinstance(unknown, Error)
    assert (unknown.id, unknown.code) == (2, ErrorCode.UNKNOWN_MESSAGE)
    hello = {"type": "Hello", "id": 3, "session": token, "protocol": PROTOCOL_VERSION, "added_later": [1]}
    assert isinstance(peer.ask_frame(msgspec.msgpack.encode(hello)), HelloReply)


def test_a_multipart_message_is_malformed(peer: Peer) -> None:
    peer.dealer.send_multipart([b"a", b"b", b"c"])
    reply = peer.receive()
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.MALFORMED


# ---- the session socket


@pytest.mark.parametrize("packet", [b"\x00" * 40, b"GET / HTTP/1.0\r\n\r\n", encode_packet(Detach(incarnation=1))])
def test_who_does_not_say_hello_is_refused(gateway: GatewayThread, packet: bytes) -> None:
    with knock(gateway) as sock:
        sock.send(packet)
        answer = decode_packet(sock.recv(65_536))
        assert isinstance(answer, SessionRefused)
        assert answer.code == "malformed"


def test_sessions_of_a_user_are_capped_and_come_back_with_their_end(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.gateway.process.MAX_SESSIONS", 2)
    peers = [Peer(gateway), Peer(gateway)]
    with knock(gateway) as third:
        third.send(encode_packet(SessionHello(protocol=PROTOCOL_VERSION)))
        answer = decode_packet(third.recv(65_536))
        assert isinstance(answer, SessionRefused)
        assert answer.code == "too_many_sessions"
    peers.pop().close()
    wait_until(lambda: len(gateway.look(lambda: gateway.sessions)) == 1)
    Peer(gateway).close()
    peers.pop().close()


def test_another_user_is_turned_away_at_both_doors(gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.look(lambda: monkeypatch.setattr(gateway._gateway._sessions, "_users", frozenset({4242})))
    with knock(gateway) as sock:
        answer = decode_packet(sock.recv(65_536))
        assert isinstance(answer, SessionRefused)
        assert answer.code == "wrong_user"
        assert answer.problem == f"user {os.geteuid()} is not served here: it is not named in inline_users"


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # between two looks at a condition that has a deadline


# ---- what waits is bounded


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(user_socket, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(user_socket, "HANDSHAKE_MILLISECONDS", 500)
    return 3


def test_connections_of_a_user_are_capped_and_come_back_when_they_close(
    few_connections: int, gateway: GatewayThread
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = Peer(gateway)
    hello = encode(Hello(id=1, session=peer.grant.token, protocol=1))
    try:
        assert isinstance(peer.ask_frame(hello), HelloReply)
        dealers = [_dealer(context, peer) for _ in range(few_connections - 1)]
        assert all(_is_served(dealer, hello) for dealer in dealers)
        wait_until(lambda: gateway.look(lambda: gateway.connections) == few_connections)
        one_too_many = _dealer(context, peer)
        one_too_many.send(hello)
        assert not one_too_many.poll(150)
        assert isinstance(peer.ask_frame(hello), HelloReply)
        dealers.pop().close()
        assert one_too_many.poll(ANSWER_SECONDS * 1_000), "there is room again"  # ZeroMQ connects again by itself
    finally:
        peer.close()
        context.destroy(linger=0)
    wait_until(lambda: gateway.look(lambda: gateway.connections) == 0)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], peer: Peer) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.reconnect_ivl = 20
    dealer.connect(peer.grant.endpoint)
    return dealer


def _is_served(dealer: zmq.Socket[bytes], hello: bytes) -> bool:
    dealer.send(hello)
    return bool(dealer.poll(ANSWER_SECONDS * 1_000))


@pytest.mark.scenario(
    "B170", then="what speaks no ZeroMQ is forgotten with its connection, and a tenant next to it is served meanwhile"
)
def test_connections_that_say_nothing_of_zeromq_are_counted_and_forgotten(
    gateway: GatewayThread, group: Group, rows: np.ndarray
) -> None:
    before = gateway.look(lambda: gateway.connections)
    path = gateway.look(lambda: gateway._gateway._sockets[os.geteuid()]._path)
    idle = []
    for greeting in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f" + bytes(60)):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(os.fspath(path))
        if greeting:
            sock.send(greeting)
        idle.append(sock)
    require_well(group, rows)
    for sock in idle:
        sock.close()
    wait_until(lambda: gateway.look(lambda: gateway.connections) == before)


def test_who_does_not_read_its_replies_loses_its_session_and_holds_up_nobody(
    gateway: GatewayThread, group: Group, rows: np.ndarray, node: FakeNode
) -> None:
    slow = Peer(gateway, receive_queue=1)
    try:
        with connect(gateway.directory, timeout_seconds=20) as client:
            big = client.open(make_identity(block_bytes=100 * 1024, weights="big"))
            store(big, [1, 2, 3, 4])
            grant, token = os.urandom(16), slow.grant.token
            opened = {"identity": big.identity, "block_bytes": big.block_bytes}
            slow.ask(_open_group(token, opened))
            slow.ask(Acquire(id=1, session=token, grant=grant, group=big.key, keys=big.keys([1, 2, 3, 4])))
            wait_until(lambda: gateway.look(lambda: gateway.user.held_bytes) > 0)
            fetch = encode(Fetch(id=2, session=token, grant=grant, start=0, num_bytes=100 * 1024))
            ended = threading.Event()
            sent = 0
            while not ended.is_set():
                try:
                    slow.dealer.send(fetch, zmq.NOBLOCK)
                    sent += 1
                except zmq.Again:
                    time.sleep(0.001)  # the gateway reads on: room comes
                if sent % 16 == 0 and token not in gateway.look(lambda: {one.token for one in gateway.sessions}):
                    ended.set()
                assert sent < 10_000
            require_well(group, rows)
            assert slow.sock.recv(1) == b"", "it is told by the end of its session socket"
    finally:
        slow.close()
    assert node.has_no_grants()


def _open_group(token: bytes, fields: dict[str, Any]) -> Request:
    return OpenGroup(id=1, session=token, **fields)


def test_a_burst_of_replies_on_one_connection_is_not_taken_for_not_reading(peer: Peer, client: Client) -> None:
    hello = encode(Hello(id=1, session=peer.grant.token, protocol=2))  # refused, so answered without the node
    for _ in range(500):
        peer.dealer.send(hello)
    for _ in range(500):
        assert isinstance(peer.receive(), Error)


# ---- the end of a tenant


def test_a_tenant_that_ends_in_mid_put_leaves_nothing(gateway: GatewayThread, node: FakeNode, group: Group) -> None:
    peer = Peer(gateway)
    token, grant = peer.grant.token, os.urandom(16)
    peer.ask(_open_group(token, {"identity": make_identity(), "block_bytes": 4096}))
    reserve = {"keys": group.keys(TOKENS), "first": 0, "tokens": pack_tokens(TOKENS[:16])}
    peer.ask(Reserve(id=2, session=token, grant=grant, group=group.key, **reserve))
    assert isinstance(peer.ask(Put(id=3, session=token, grant=grant, start=0, payload=bytes(5000))), Done)
    assert gateway.look(lambda: gateway.user.held_bytes) == 4 * 4096
    peer.close()
    assert node.has_no_grants()
    wait_until(lambda: gateway.look(lambda: gateway.user.held_bytes) == 0)
    assert group.match(TOKENS).blocks == 0


def test_sockets_are_made_anew_when_somebody_deletes_them(
    node: FakeNode, inline_dir: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr("tierkv.gateway.process.SOCKET_CHECK_SECONDS", 0.0)
    monkeypatch.setattr("tierkv.gateway.process.BEAT_SECONDS", 0.02)
    gateway = GatewayThread(node.directory, inline_dir)
    (inline_dir / f"{os.geteuid()}.sock").unlink()
    gateway._thread.join(ANSWER_SECONDS)
    assert "starting again" in str(gateway.problem)  # the process ends, and the supervisor starts another
    gateway.close()


def test_any_part_of_a_lease_may_be_fetched(peer: Peer, group: Group, rows: np.ndarray) -> None:
    opened = {"identity": make_identity(), "block_bytes": 4096}
    peer.ask(_open_group(peer.grant.token, opened))
    grant = os.urandom(16)
    peer.ask(Acquire(id=2, session=peer.grant.token, grant=grant, group=group.key, keys=group.keys(TOKENS)))
    fetched = peer.ask(Fetch(id=3, session=peer.grant.token, grant=grant, start=5, num_bytes=8192))
    assert isinstance(fetched, FetchReply)
    assert fetched.payload == rows.tobytes()[5 : 5 + 8192]
