from __future__ import annotations

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage import transfer
from tierkv.storage.transfer import BlockHasher, cut, mapped_pages

PAGE = 4096


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=6), st.integers(1, 4))
def test_pieces_hold_every_byte_in_order_and_keep_to_their_size(blocks: list[list[int]], piece_pages: int) -> None:
    memory = memoryview(bytes(index % 251 for index in range(9 * 3 * PAGE)))
    views = [[memory[: pages * PAGE] for pages in block] for block in blocks]
    limit, transfer.PIECE_BYTES = transfer.PIECE_BYTES, piece_pages * PAGE
    try:
        pieces = list(cut(views))
    finally:
        transfer.PIECE_BYTES = limit
    sizes = [sum(len(chunk.view) for chunk in piece) for piece in pieces]
    assert all(size == piece_pages * PAGE for size in sizes[:-1])
    assert all(0 < size <= piece_pages * PAGE for size in sizes)
    assert all(len(chunk.view) % PAGE == 0 for piece in pieces for chunk in piece)
    hasher = BlockHasher()
    for piece in pieces:
        hasher.feed(piece)
    assert hasher.digests == [blake3(b"".join(block)).digest() for block in views]


def test_a_piece_fits_one_vectored_call() -> None:
    """The kernel takes at most 1,024 views at a time, and the shortest chunk is a page."""
    assert transfer.PIECE_BYTES // PAGE <= 1024


def test_a_block_counts_only_when_it_is_complete() -> None:
    hasher = BlockHasher()
    memory = memoryview(bytes(2 * transfer.PIECE_BYTES))
    first, second = cut([[memory]])
    hasher.feed(first)
    assert hasher.digests == []
    hasher.feed(second)
    assert hasher.digests == [blake3(memory).digest()]


def test_pages_of_our_own_are_zero_and_writable() -> None:
    pages = mapped_pages(2 * PAGE)
    assert bytes(pages) == bytes(2 * PAGE)
    pages[:3] = b"abc"
    assert len(pages) == 2 * PAGE
