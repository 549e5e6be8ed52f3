"""The ROUTER with real peers."""

from __future__ import annotations

import os
import select
import tempfile
import threading
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


def take(router: Router) -> tuple[bytes, bytes]:
    assert router.socket.poll(5_000), "nothing came"
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
    assert router.socket.poll(5_000)
    found = router.receive() or take(router)
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
    assert not router.socket.poll(200)
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
    router.socket.poll(100)
    assert router.send(sender, b"answer") is True


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
    assert select.select([scrape], [], [], 5.0)[0]
    scrape.serve(lambda: Snapshot(version="new"))
    endpoint.join(5.0)
    assert [one.version for one in found] == ["new"]
    scrape.close()


def test_a_scrape_of_a_loop_that_is_stuck_gets_the_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.node.scrape.WAIT_SECONDS", 0.01)
    scrape = Scrape(Snapshot(version="old"))
    assert scrape.read().version == "old"
    scrape.close()
