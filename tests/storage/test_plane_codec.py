"""One block, smaller and back; and whatever else may stand in its place, decoded within its bounds or refused."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.storage.samples import identity, noise, numbers
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile
from tierkv.storage.codec_names import CHUNK_BYTES, WIDTHS, codec_name
from tierkv.storage.plane_codec import PlaneCodec

ANY_LENGTH = 2**40
POISON = 0xEE


def encoded(codec: PlaneCodec, block: bytes) -> bytes:
    stored = codec.encode(memoryview(block), ANY_LENGTH)
    assert stored is not None
    return stored


def decoded(codec: PlaneCodec, stored: bytes, num_bytes: int) -> bytes:
    """Into the middle of poison, none of which may be touched."""
    around = bytearray([POISON]) * (num_bytes + 128)
    codec.decode(memoryview(stored), memoryview(around)[64 : 64 + num_bytes])
    assert around[:64] == around[-64:] == bytes([POISON]) * 64
    return bytes(around[64 : 64 + num_bytes])


# ---- there and back


@settings(max_examples=60, deadline=None)
@given(width=st.sampled_from([1, 2, 4, 8]), elements=st.integers(1, 3_000), content=st.data())
def test_any_block_comes_back_as_it_was(width: int, elements: int, content: st.DataObject) -> None:
    kind = content.draw(st.sampled_from(["noise", "numbers", "zeros", "drawn"]))
    num_bytes = width * elements
    block = {
        "noise": lambda: noise(str(elements), num_bytes),
        "numbers": lambda: numbers(str(elements), num_bytes),
        "zeros": lambda: bytes(num_bytes),
        "drawn": lambda: (content.draw(st.binary(min_size=1, max_size=200)) * num_bytes)[:num_bytes],
    }[kind]()
    codec = PlaneCodec(width)
    assert decoded(codec, encoded(codec, block), num_bytes) == block


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES - 8, CHUNK_BYTES, CHUNK_BYTES + 8, 3 * CHUNK_BYTES + 4_096])
def test_blocks_of_several_chunks_come_back(width: int, num_bytes: int) -> None:
    codec = PlaneCodec(width)
    for block in (numbers("a", num_bytes), noise("a", num_bytes)):
        assert decoded(codec, encoded(codec, block), num_bytes) == block


def test_numbers_become_smaller_by_planes_and_noise_does_not() -> None:
    """Of 16 bits the 8 that hold sign and exponent have about 3 of entropy."""
    block = numbers("a", 2**18)
    by_planes, as_they_lie = len(encoded(PlaneCodec(2), block)), len(encoded(PlaneCodec(1), block))
    assert by_planes < 0.75 * len(block)
    assert by_planes < as_they_lie
    assert PlaneCodec(2).encode(memoryview(noise("a", 2**18)), 2**18) is None


def test_what_is_longer_than_it_may_be_is_no_answer() -> None:
    block = memoryview(numbers("a", 8_192))
    stored = PlaneCodec(2).encode(block, ANY_LENGTH)
    assert stored is not None
    assert PlaneCodec(2).encode(block, len(stored)) == stored
    assert PlaneCodec(2).encode(block, len(stored) - 1) is None


def test_the_codec_of_a_group_is_that_of_its_elements() -> None:
    def chosen(dtype: str, block_bytes: int, codec: str = "") -> str:
        return codec_name(identity(block_bytes, dtype=dtype, codec=codec).layout, block_bytes)

    assert chosen("bfloat16", 4096) == chosen("float16", 4096) == "planes2+zstd"
    assert chosen("float32", 4096) == "planes4+zstd"
    assert chosen("float64", 4096) == "planes8+zstd"
    assert chosen("uint8", 4096) == chosen("bfloat16+fp8_e4m3", 4096) == "zstd"  # of no element, or of several
    assert chosen("bfloat16", 4096, "fp8_e4m3") == "zstd"  # what is stored has one byte an element
    assert chosen("bfloat16", 4097) == "zstd"


def test_threads_share_a_codec_and_nothing_else() -> None:
    codec = PlaneCodec.of("planes2+zstd")
    wrong: list[int] = []

    def work(number: int) -> None:
        for round_ in range(20):
            block = numbers(f"{number} {round_}", 2**16)
            if decoded(codec, encoded(codec, block), len(block)) != block:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# ---- hostile


def frame_of(num_bytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(num_bytes))


def without_size(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def claiming(num_bytes: int) -> bytes:
    """A frame whose header says that its content is so long: descriptor with 8 bytes of size, one segment."""
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, num_bytes) + frame_of(100)[6:]


def stored_of(*pieces: bytes) -> bytes:
    return b"".join([*(struct.pack("<I", len(piece)) for piece in pieces), *pieces])


HOSTILE = {
    "nothing": b"",
    "half a length": b"\x01\x00",
    "a length beyond the end": struct.pack("<II", 10, 2**32 - 1) + bytes(10),
    "lengths that end too early": struct.pack("<II", 10, 10) + bytes(30),
    "no frames": stored_of(b"garbage", b"more of it"),
    "empty pieces": stored_of(b"", b""),
    "a frame that unfolds to a thousand times as much": stored_of(frame_of(2**26), frame_of(500)),
    "a frame that unfolds to a byte more": stored_of(frame_of(501), frame_of(500)),
    "a frame that unfolds to a byte less": stored_of(frame_of(500), frame_of(499)),
    "a frame that does not say how long it is": stored_of(without_size(bytes(500)), frame_of(500)),
    "a bomb that does not say how long it is": stored_of(without_size(bytes(2**28)), frame_of(500)),
    "a frame that says it is an exabyte": stored_of(claiming(2**60), frame_of(500)),
    "a frame that says it is right and is not": stored_of(claiming(500), frame_of(500)),
    "two frames for one piece": stored_of(frame_of(500) + frame_of(500), frame_of(500)),
    "something behind a frame": stored_of(frame_of(500) + b"x", frame_of(500)),
    "a frame cut short": stored_of(frame_of(500)[:-1], frame_of(500)),
    "a skippable frame": stored_of(struct.pack("<II", 0x184D2A50, 4) + b"abcd", frame_of(500)),
}


@pytest.mark.parametrize("stored", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_block_is_damage_and_costs_no_memory(stored: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile) as caught:
            decoded(PlaneCodec(2), stored, 1_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.reason == Reason.CHECKSUM
    assert peak < 2**20


@settings(max_examples=300, deadline=None)
@given(width=st.sampled_from([1, 2, 4, 8]), stored=st.binary(max_size=400), num_bytes=st.integers(1, 5_000))
@example(width=4, stored=b"", num_bytes=CHUNK_BYTES * 4)
def test_any_bytes_are_a_block_or_damage(width: int, stored: bytes, num_bytes: int) -> None:
    try:
        found = decoded(PlaneCodec(width), stored, num_bytes)
    except DamagedFile:
        return
    assert len(found) == num_bytes


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_block_with_any_change_is_decoded_within_its_bounds_or_damage(data: st.DataObject) -> None:
    block = numbers("fuzz", 6_000)
    stored = bytearray(encoded(PlaneCodec(2), block))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        found = decoded(PlaneCodec(2), bytes(stored), len(block))
    except DamagedFile:
        return
    assert len(found) == len(block)  # what it is worth, the block's own checksum tells


def test_every_width_has_its_name() -> None:
    for name, width in WIDTHS.items():
        codec = PlaneCodec.of(name)
        assert codec.width == width
        block = np.arange(width * 100, dtype=np.uint8).tobytes()
        assert decoded(codec, encoded(codec, block), len(block)) == block
