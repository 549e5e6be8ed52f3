from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from tierkv.node import control as control_module
from tierkv.node.control import (
    Control,
    ControlFull,
    HostLimit,
    Ready,
    SessionEnded,
    WorkerDied,
    WorkerStarted,
    control_pair,
)


@pytest.fixture
def pair() -> Iterator[tuple[Control, Control]]:
    supervisor, theirs = control_pair()
    front = Control(theirs)
    yield supervisor, front
    supervisor.close()
    front.close()


def test_messages_arrive_whole_and_in_order_in_both_directions(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    supervisor.send(HostLimit(num_bytes=5))
    supervisor.send(SessionEnded(token=b"t" * 16))
    front.send(Ready())
    assert front.receive() == (HostLimit(num_bytes=5), [])
    assert front.receive() == (SessionEnded(token=b"t" * 16), [])
    assert front.receive() is None
    assert not front.ended
    assert supervisor.receive() == (Ready(), [])


def test_a_descriptor_travels_with_its_message_and_is_not_inherited_further(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    reading, writing = os.pipe()
    supervisor.send(WorkerStarted(pid=7, restarts=0, sends_rows=True), [writing])
    os.close(writing)
    found = front.receive()
    assert found is not None
    assert isinstance(found[0], WorkerStarted)
    (received,) = found[1]
    assert os.get_inheritable(received) is False
    os.write(received, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(received)
    os.close(reading)


def fill(supervisor: Control) -> int:
    sent = 0
    while supervisor.send_now(HostLimit(num_bytes=sent, problem="x" * 4000)):
        sent += 1
    return sent


def test_what_a_stuck_peer_does_not_read_is_queued_in_order_with_its_descriptors(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    sent = fill(supervisor)
    reading, writing = os.pipe()
    supervisor.send(WorkerStarted(pid=7, restarts=0, sends_rows=True), [writing])
    supervisor.send(HostLimit(num_bytes=99))
    os.close(writing)
    assert supervisor.wants_write
    assert supervisor.send_now(HostLimit(num_bytes=1)) is False  # would overtake
    for _ in range(sent):
        assert front.receive() is not None
    supervisor.flush()
    assert not supervisor.wants_write
    found = front.receive()
    assert found is not None
    assert isinstance(found[0], WorkerStarted)
    os.write(found[1][0], b"x")
    os.close(found[1][0])
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    assert front.receive() == (HostLimit(num_bytes=99), [])


def test_the_queue_for_a_stuck_peer_is_bounded_and_closed_with_its_descriptors(
    pair: tuple[Control, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "MAX_QUEUED", 2)
    supervisor, _ = pair
    fill(supervisor)
    reading, writing = os.pipe()
    supervisor.send(WorkerStarted(pid=7, restarts=0, sends_rows=True), [writing])
    supervisor.send(HostLimit(num_bytes=1))
    with pytest.raises(ControlFull):
        supervisor.send(HostLimit(num_bytes=2))
    os.close(writing)
    os.close(reading)


def test_the_end_of_the_peer_is_seen_after_what_it_said(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    front.send(Ready())
    front.close()
    assert supervisor.receive() == (Ready(), [])
    assert supervisor.receive() is None
    assert supervisor.ended
    supervisor.send(HostLimit(num_bytes=1))
    assert not supervisor.wants_write


def test_last_words_are_heard_from_a_peer_that_has_not_read_all_it_was_told(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    supervisor.send(HostLimit(num_bytes=1))
    front.send(Ready())
    front.close()
    assert supervisor.receive() == (Ready(), [])
    assert supervisor.receive() is None
    assert supervisor.ended


def test_sending_to_a_peer_that_has_just_gone_is_no_error(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    front.close()
    supervisor.send(HostLimit(num_bytes=1))
    assert supervisor.receive() is None
    assert supervisor.ended


def test_waiting_ends_at_its_deadline_at_a_message_and_at_the_end(pair: tuple[Control, Control]) -> None:
    supervisor, front = pair
    assert supervisor.wait(0.0) is None
    front.send(WorkerDied(pid=1, problem=""))
    assert supervisor.wait(5.0) == (WorkerDied(pid=1, problem=""), [])
    front.close()
    assert supervisor.wait(5.0) is None
    assert supervisor.ended


def test_the_fronts_end_is_a_seqpacket_socket_not_inheritable_by_accident() -> None:
    supervisor, theirs = control_pair()
    assert theirs.type == socket.SOCK_SEQPACKET
    assert theirs.get_inheritable() is False
    supervisor.close()
    theirs.close()
