"""The ROUTER with real peers."""

from __future__ import annotations

import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tierkv.errors import ConfigError
from tierkv.metrics import Snapshot
from tierkv.node.router import SEND_QUEUE, Router
from tierkv.node.scrape import Scrape
from tierkv.wire.frames import decode_reply
from tierkv.wire.messages import MAX_FRAME_BYTES, Error, ErrorCode


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tkv") as path:  # the path of a socket may have 107 bytes only
        yield Path(path)


@pytest.fixture
def router(folder: Path) -> Iterator[Router]:
    router = Router(folder)
    yield router
    router.close()


@pytest.fixture
def peer(folder: Path, router: Router) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"ipc://{folder}/node.sock")
        yield peer


def poll(router: Router, timeout_seconds: float = 20.0) -> bool:
    """Whether a request came in time; lets peers in meanwhile, as the front's loop does."""
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    poller.register(router.door, zmq.POLLIN)
    deadline = time.monotonic() + timeout_seconds
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(left * 1000))
        router.admit()
        if router.socket in ready:
            return True
    return False


def take(router: Router) -> tuple[bytes, bytes]:
    assert poll(router), "nothing came"
    found = router.receive()
    assert found is not None
    return found


def test_a_request_comes_with_where_its_answer_goes(router: Router, peer: zmq.Socket[bytes]) -> None:
    assert router.receive() is None
    peer.send(b"question")
    sender, frame = take(router)
    assert frame == b"question"
    assert router.send(sender, b"answer")
    assert peer.recv() == b"answer"


def test_a_message_of_several_frames_is_answered_with_an_error(router: Router, peer: zmq.Socket[bytes]) -> None:
    peer.send_multipart([b"", b"question"])
    peer.send(b"fine")
    found = take(router)
    assert found[1] == b"fine"
    error = decode_reply(peer.recv())
    assert isinstance(error, Error)
    assert error.code == ErrorCode.MALFORMED


def test_a_frame_somewhat_too_long_reaches_us_and_one_far_too_long_does_not(
    router: Router, peer: zmq.Socket[bytes]
) -> None:
    peer.send(bytes(MAX_FRAME_BYTES + 1))
    assert len(take(router)[1]) == MAX_FRAME_BYTES + 1
    peer.send(bytes(2 * MAX_FRAME_BYTES + 1))
    assert not poll(router, 0.2)
    peer.send(b"connected again")
    assert take(router)[1] == b"connected again"


def test_a_peer_that_does_not_read_loses_replies_and_nobody_waits(router: Router, peer: zmq.Socket[bytes]) -> None:
    peer.rcvhwm = 1
    peer.send(b"question")
    sender, _ = take(router)
    sent = [router.send(sender, bytes(64 * 1024)) for _ in range(4 * SEND_QUEUE)]
    assert sent[0] is True
    assert sent[-1] is False


def test_a_reply_to_a_peer_that_has_gone_is_no_error(router: Router, folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.connect(f"ipc://{folder}/node.sock")
        peer.send(b"question")
        sender, _ = take(router)
    poll(router, 0.1)
    assert router.send(sender, b"answer") is True


@pytest.mark.scenario("B170", then="what is no ZeroMQ is turned away and costs no descriptor")
@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x05ident" + b"\x02\x01x" * 20_000,  # the oldest dialect of ZeroMQ: parts of a message without an end
        b"\x05ident" + b"\x02\x00x" * 20_000,
        b"",
    ],
)
def test_whatever_is_not_zeromq_of_today_is_turned_away_and_costs_no_descriptor(
    router: Router, folder: Path, peer: zmq.Socket[bytes], rubbish: bytes
) -> None:
    peer.send(b"connected")
    take(router)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(25):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(folder / "node.sock"))
            if rubbish:
                other.send(rubbish)
    assert not poll(router, 0.1), "no rubbish passes for a request"
    deadline = time.monotonic() + 5.0
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        poll(router, 0.02)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.scenario("B166", then="a stale socket file is replaced at a start")
def test_a_stale_socket_file_does_not_keep_it_from_binding(folder: Path) -> None:
    Router(folder).close()
    (folder / "node.sock").touch()
    Router(folder).close()


def test_a_socket_file_that_was_deleted_is_bound_again(router: Router, folder: Path) -> None:
    router.rebind_if_deleted()
    os.unlink(folder / "node.sock")
    router.rebind_if_deleted()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.connect(f"ipc://{folder}/node.sock")
        peer.send(b"question")
        assert take(router)[1] == b"question"


def test_a_directory_that_is_not_there_names_the_setting(folder: Path) -> None:
    with pytest.raises(ConfigError, match="socket_dir"):
        Router(folder / "absent")


def test_a_scrape_gets_the_counts_of_the_moment_from_the_loop() -> None:
    scrape = Scrape(Snapshot(version="old"))
    found: list[Snapshot] = []
    endpoint = threading.Thread(target=lambda: found.append(scrape.read()))
    endpoint.start()
    assert select.select([scrape], [], [], 20.0)[0]
    scrape.serve(lambda: Snapshot(version="new"))
    endpoint.join(20.0)
    assert [one.version for one in found] == ["new"]
    scrape.close()


def test_a_scrape_of_a_loop_that_is_stuck_gets_the_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.node.scrape.WAIT_SECONDS", 0.01)
    scrape = Scrape(Snapshot(version="old"))
    assert scrape.read().version == "old"
    scrape.close()


@pytest.mark.scenario(
    "B157", then="a peer that restarts under its old name is answered each time, and no reply reaches another process"
)
def test_a_peer_that_restarts_under_its_name_is_answered_and_gets_nobody_elses_replies(
    router: Router, folder: Path
) -> None:
    def ask(peer: zmq.Socket[bytes], nonce: bytes) -> None:
        peer.send(nonce)
        sender, frame = take(router)
        assert router.send(sender, b"re " + frame)
        assert peer.poll(20_000)
        assert peer.recv() == b"re " + nonce
        assert not peer.poll(0), "one reply, its own"

    def come(context: zmq.Context[zmq.Socket[bytes]], name: bytes) -> zmq.Socket[bytes]:
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.setsockopt(zmq.IDENTITY, name)
        peer.connect(f"ipc://{folder}/node.sock")
        return peer

    with zmq.Context() as context, come(context, b"w1") as other:
        ask(other, b"other")
        for number in range(50):
            with come(context, b"w0") as peer:
                ask(peer, b"%d" % number)
                peer.send(b"whose answer nobody reads")
                sender, frame = take(router)
                assert frame == b"whose answer nobody reads"
                router.send(sender, b"late")
            ask(other, b"other %d" % number)


@pytest.mark.scenario("B157", then="two that live at once and name themselves nothing each get their own replies")
def test_two_peers_without_names_are_two(router: Router, folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as two:
        for peer in (one, two):
            peer.linger = 0
            peer.connect(f"ipc://{folder}/node.sock")
        senders = []
        for peer, nonce in ((one, b"1"), (two, b"2")):
            peer.send(nonce)
            senders.append(take(router))
        assert senders[0][0] != senders[1][0]
        for sender, nonce in senders:
            router.send(sender, b"re " + nonce)
        assert [peer.recv() for peer in (one, two) if peer.poll(20_000)] == [b"re 1", b"re 2"]


@pytest.mark.scenario(
    "B157", then="of two that live under one name the newer is answered at once, and the older not at all"
)
def test_a_peer_that_names_itself_like_one_that_lives_takes_over(router: Router, folder: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as older, context.socket(zmq.DEALER) as newer:
        for peer in (older, newer):
            peer.linger = 0
            peer.setsockopt(zmq.IDENTITY, b"w0")
            peer.connect(f"ipc://{folder}/node.sock")
            peer.send(b"who is it?")
            sender, _ = take(router)
        router.send(sender, b"you")
        assert newer.poll(20_000)
        assert newer.recv() == b"you"
        assert not older.poll(50)
