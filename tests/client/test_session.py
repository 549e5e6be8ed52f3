"""The first exchange, with servers that aren't ours."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tierkv.client import session as session_module
from tierkv.client.session import Refusal, open_session
from tierkv.core.reasons import Reason
from tierkv.wire.session import SESSION_SOCKET_NAME, Detach, SessionGrant, SessionRefused, encode_packet

GRANT = encode_packet(
    SessionGrant(token=bytes(16), incarnation=1, endpoint="ipc:///x", arena_bytes=4096, page_bytes=4096, data_dir="")
)


DETACH = encode_packet(Detach(incarnation=1))


@contextmanager
def server(
    directory: Path, packet: bytes, num_descriptors: int, *, answers: threading.Event | None = None
) -> Iterator[list[bytes]]:
    """Answers one hello with `packet` and so many descriptors (once `answers` is set). What it hears after that is in
    the list when the block has ended."""
    heard: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _address = listener.accept()
        with connection:
            connection.recv(65_536)
            if answers is not None:
                answers.wait(30)
            descriptors = [os.memfd_create("memory") for _ in range(num_descriptors)]
            try:
                if packet:
                    socket.send_fds(connection, [packet], descriptors)
                    while more := connection.recv(65_536):
                        heard.append(more)
            except (BrokenPipeError, ConnectionResetError):
                heard.append(b"gone")
            for descriptor in descriptors:
                os.close(descriptor)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SESSION_SOCKET_NAME))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield heard
        thread.join(30)


def attempt(directory: Path) -> Refusal:
    opened = open_session(directory, client="test", maps_arena=True, until=time.monotonic() + 30)
    assert isinstance(opened, Refusal)
    return opened


@pytest.mark.parametrize(
    ("packet", "num_descriptors", "reason", "problem"),
    [
        (b"", 0, Reason.NODE_AWAY, "closed before it answered"),
        (b"\xc1", 0, Reason.WIRE_ERROR, "malformed"),
        (encode_packet(Detach(incarnation=1)), 0, Reason.WIRE_ERROR, "no answer to SessionHello"),
        (GRANT, 0, Reason.WIRE_ERROR, "with 0 descriptors"),
        (GRANT, 1, Reason.WIRE_ERROR, "with 1 descriptors"),
        (GRANT, 2, Reason.NODE_AWAY, "promised 4096 bytes and handed out 0"),
    ],
)
def test_an_answer_that_gives_no_memory_is_refused_and_leaves_nothing_open(
    node_dir: Path, packet: bytes, num_descriptors: int, reason: Reason, problem: str
) -> None:
    with server(node_dir, packet, num_descriptors) as heard:
        refusal = attempt(node_dir)
    assert refusal.reason is reason
    assert problem in refusal.problem
    if packet == GRANT:
        assert heard == [DETACH], "what is not used is given back"


@pytest.mark.parametrize("before", ["_require_believed_peer", "_receive"], ids=["before the hello", "behind the hello"])
@pytest.mark.parametrize(
    ("packet", "problem"),
    [
        (encode_packet(SessionRefused(code="wrong_user", problem="who are you?")), "wrong_user: who are you?"),
        (b"", "closed before it answered"),
    ],
    ids=["with a word", "without"],
)
def test_a_server_that_closes_without_reading_the_hello_is_quoted(
    node_dir: Path, monkeypatch: pytest.MonkeyPatch, before: str, packet: bytes, problem: str
) -> None:
    goes_on = getattr(session_module, before)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(node_dir / SESSION_SOCKET_NAME))
        listener.listen()

        def refuse_first(*arguments: Any) -> Any:
            connection, _address = listener.accept()
            with connection:
                if packet:
                    connection.send(packet)
            return goes_on(*arguments)

        monkeypatch.setattr(session_module, before, refuse_first)
        refusal = attempt(node_dir)
    assert refusal.reason is Reason.NODE_AWAY
    assert problem in refusal.problem


@pytest.fixture
def full_listener(node_dir: Path) -> Iterator[socket.socket]:
    """One that has not accepted anybody yet, and lets nobody else queue."""
    with ExitStack() as owned:
        listener = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(node_dir / SESSION_SOCKET_NAME))
        listener.listen(1)
        listener.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                waiting = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                waiting.connect(str(node_dir / SESSION_SOCKET_NAME))
        yield listener


@pytest.mark.usefixtures("full_listener")
@pytest.mark.scenario("B170", then="a queue that is full is no node that is away: it is waited for until the deadline")
def test_a_turn_that_does_not_come_is_a_deadline(node_dir: Path) -> None:
    until = time.monotonic() + 0.1
    opened = open_session(node_dir, client="test", maps_arena=True, until=until)
    assert isinstance(opened, Refusal)
    assert opened.reason is Reason.DEADLINE
    assert time.monotonic() >= until


@pytest.mark.scenario("B170", then="an engine gets its turn where more are queueing than a node listens to")
def test_whoever_queues_gets_its_turn_whatever_signals_come_meanwhile(
    node_dir: Path, full_listener: socket.socket
) -> None:
    """The signals interrupt the wait, and it is they who let in one after the other."""

    def let_one_in(*_: object) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # nobody queues; those who came first have left
            connection, _address = full_listener.accept()
            with connection:
                connection.send(encode_packet(SessionRefused(code="wrong_user", problem="you have come in")))

    is_over = threading.Event()

    def interrupt() -> None:
        while not is_over.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, let_one_in)
    signals = threading.Thread(target=interrupt)
    signals.start()
    try:
        refusal = attempt(node_dir)
    finally:
        is_over.set()
        signals.join()
        signal.signal(signal.SIGUSR1, before)
    assert "you have come in" in refusal.problem


def test_descriptors_beyond_those_expected_are_not_kept(node_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with server(node_dir, GRANT, 5):
        attempt(node_dir)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_socket_of_another_user_is_not_believed(node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.client.session.TRUSTED_USERS", frozenset())
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with server(node_dir, b"", 0):
        refusal = attempt(node_dir)
    assert refusal.reason is Reason.NODE_AWAY
    assert "served by user" in refusal.problem


def test_a_time_that_is_up_is_a_refusal(node_dir: Path) -> None:
    opened = open_session(node_dir, client="", maps_arena=True, until=time.monotonic() - 1)
    assert isinstance(opened, Refusal)
    assert opened.reason is Reason.DEADLINE


def test_a_grant_that_comes_when_nobody_waits_any_more_is_not_kept(
    node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node would take this process for one that may touch the memory, for as long as it lives."""
    before = len(os.listdir("/proc/self/fd"))
    answers = threading.Event()
    receive = socket.recv_fds

    def too_late(connection: socket.socket, *arguments: int) -> object:
        if arguments[-1] & socket.MSG_DONTWAIT:
            return receive(connection, *arguments)
        answers.set()
        assert connection.recv(1, socket.MSG_PEEK)
        raise TimeoutError

    monkeypatch.setattr("socket.recv_fds", too_late)
    with server(node_dir, GRANT, 2, answers=answers) as heard:
        assert attempt(node_dir).reason is Reason.DEADLINE
    assert heard == [DETACH]
    assert len(os.listdir("/proc/self/fd")) == before
