from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.instructions import AnyReport, ExtentRow, Remove, RemoveDone, Rows, Touch, TouchRow
from tierkv.errors import WireError
from tierkv.workers.channel import BlockingChannel, Channel, FrameReader, FrameWriter, front_end, worker_end

FINGERPRINT = "f" * 64


class Note(msgspec.Struct, frozen=True, tag=True):
    text: bytes


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


def remove(op: int) -> Remove:
    return Remove(op=op, fingerprint=FINGERPRINT, group=b"g" * 32, rank=0, key=b"k" * 32)


def frames(*texts: bytes) -> bytes:
    buffer = bytearray()
    for text in texts:
        FrameWriter().append(buffer, Note(text))
    return bytes(buffer)


def test_instructions_go_one_way_and_reports_the_other(pair: Pair) -> None:
    front, worker = front_end(pair[0]), worker_end(pair[1])
    touch = Touch([TouchRow(FINGERPRINT, b"g" * 32, 1, b"k" * 32, 12.5, 3)])
    front.send(remove(1))
    front.send(touch)
    front.flush()
    assert worker.receive(timeout_seconds=5) == [remove(1), touch]
    row = ExtentRow(b"k" * 32, b"p" * 32, 0, b"k" * 32, 64, 8192, 1.0, 2.0, 0)
    rows = Rows(FINGERPRINT, b"g" * 32, 1, [row])
    worker.send([RemoveDone(1), rows], timeout_seconds=5)
    assert front.receive() == [RemoveDone(1), rows]
    assert front.receive() == []
    assert not front.ended


@given(
    texts=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=30),
)
def test_messages_are_the_same_however_the_stream_is_cut(texts: list[bytes], cuts: list[int]) -> None:
    stream = frames(*texts)
    reader = FrameReader(Note)
    seen = []
    start = turn = 0
    while start < len(stream):
        step = cuts[turn % len(cuts)]
        seen += reader.feed(stream[start : start + step])
        start, turn = start + step, turn + 1
    assert [note.text for note in seen] == texts
    assert reader.is_between_messages


@given(noise=st.binary(max_size=200))
def test_noise_is_a_wire_error_or_an_unfinished_frame_and_nothing_else(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        FrameReader(AnyReport, max_frame_bytes=1_000).feed(noise)


def test_the_end_of_the_peer_is_seen_after_its_last_message(pair: Pair) -> None:
    channel: Channel[Note, Note] = Channel(pair[0], Note)
    pair[1].sendall(frames(b"last") + frames(b"cut off")[:-2])
    pair[1].close()
    assert channel.receive() == [Note(b"last")]
    assert channel.receive() == []
    assert channel.ended


def test_a_send_to_a_peer_that_has_ended_is_dropped(pair: Pair) -> None:
    channel: Channel[Note, Note] = Channel(pair[0], Note)
    pair[1].close()
    channel.send(Note(b"before anybody noticed"))
    channel.flush()
    assert not channel.wants_write
    assert channel.receive() == []
    assert channel.ended
    channel.send(Note(b"afterwards"))
    assert channel.buffered_bytes == 0


def test_a_frame_larger_than_the_limit_is_refused_by_both_ends(pair: Pair) -> None:
    channel: Channel[Note, Note] = Channel(pair[0], Note, max_frame_bytes=100)
    with pytest.raises(WireError, match="too_large"):
        channel.send(Note(bytes(200)))
    assert not channel.wants_write
    pair[1].sendall(struct.pack("<I", 101))
    with pytest.raises(WireError, match="too_large"):
        channel.receive()


def test_a_frame_that_does_not_decode_is_an_error(pair: Pair) -> None:
    channel: Channel[Note, Note] = Channel(pair[0], Note)
    pair[1].sendall(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
    with pytest.raises(WireError, match="malformed"):
        channel.receive()


def test_a_peer_that_reads_nothing_fills_the_buffer_to_its_bound(pair: Pair) -> None:
    channel: Channel[Note, Note] = Channel(pair[0], Note, max_buffered_bytes=100_000)

    def send_without_end() -> None:
        while True:
            channel.send(Note(bytes(50_000)))

    with pytest.raises(WireError, match="unread"):
        send_without_end()
    assert channel.buffered_bytes <= 200_000


def test_what_the_kernel_does_not_take_at_once_is_sent_when_writable(pair: Pair) -> None:
    front: Channel[Note, Note] = Channel(pair[0], Note)
    worker: BlockingChannel[Note, Note] = BlockingChannel(pair[1], Note)
    sent = [Note(bytes([number]) * 400_000) for number in range(30)]
    for note in sent:
        front.send(note)
    front.flush()
    assert front.wants_write
    received: list[Note] = []
    while len(received) < len(sent):
        front.flush()
        received += worker.receive(timeout_seconds=5)
    assert received == sent
    assert not front.wants_write


def test_receiving_gives_up_at_its_deadline(pair: Pair) -> None:
    channel: BlockingChannel[Note, Note] = BlockingChannel(pair[0], Note)
    assert channel.receive(timeout_seconds=0.01) == []
    assert not channel.ended


def test_sending_to_a_peer_that_reads_nothing_gives_up_at_its_deadline(pair: Pair) -> None:
    channel: BlockingChannel[Note, Note] = BlockingChannel(pair[0], Note)
    with pytest.raises(WireError, match="timeout"):
        channel.send([Note(bytes(30 * 2**20))], timeout_seconds=0.01)


def test_threads_may_send_at_once_without_mixing_their_frames(pair: Pair) -> None:
    worker: BlockingChannel[Note, Note] = BlockingChannel(pair[0], Note)
    front: Channel[Note, Note] = Channel(pair[1], Note)

    def send_many(mark: bytes) -> None:
        for _ in range(50):
            worker.send([Note(mark * 20_000), Note(mark)], timeout_seconds=20)

    threads = [threading.Thread(target=send_many, args=(bytes([number]),)) for number in range(4)]
    for thread in threads:
        thread.start()
    received: list[Note] = []
    reader: BlockingChannel[Note, Note] = BlockingChannel(pair[1], Note)
    while len(received) < 400:
        received += reader.receive(timeout_seconds=20)
    for thread in threads:
        thread.join()
    assert not front.receive()
    assert all(len(set(note.text)) == 1 for note in received)
    assert [len(note.text) for note in received] == [20_000, 1] * 200
