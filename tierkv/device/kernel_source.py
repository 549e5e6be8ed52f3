"""The CUDA kernel that moves blocks between an engine's pages and slots: its source, and the table that it reads.

One launch for all layers and blocks. A thread block of 256 moves one chunk of 16 KiB of one piece of one block, in
words of 16 bytes, four a thread, all loaded before the first is stored; what is left behind the last word is moved byte
by byte. Where source and target don't begin at multiples of 16 bytes, words of 4 bytes are used, or bytes.

    table   | Piece, 24 bytes each | pages, int64 each | slots, addresses of 8 bytes each |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.device.layouts import PagedLayout

NAME = "move_blocks"
THREADS = 256
CHUNK_BYTES = THREADS * 16 * 4
OPTIONS = ("--std=c++14",)

SOURCE = r"""
struct Piece {
    unsigned long long address;
    long long page_stride;
    unsigned int num_bytes;
    unsigned int offset;
};

template <typename Word>
__device__ __forceinline__ unsigned int copy_words(
    unsigned char* target, const unsigned char* source, unsigned int num_bytes)
{
    const unsigned int num_words = num_bytes / sizeof(Word);
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(target);
    unsigned int first = threadIdx.x;
    for (; first + 3 * blockDim.x < num_words; first += 4 * blockDim.x) {
        const Word a = from[first];
        const Word b = from[first + blockDim.x];
        const Word c = from[first + 2 * blockDim.x];
        const Word d = from[first + 3 * blockDim.x];
        to[first] = a;
        to[first + blockDim.x] = b;
        to[first + 2 * blockDim.x] = c;
        to[first + 3 * blockDim.x] = d;
    }
    for (; first < num_words; first += blockDim.x) {
        to[first] = from[first];
    }
    return num_words * sizeof(Word);
}

extern "C" __global__ void move_blocks(
    const Piece* __restrict__ pieces,
    const unsigned int num_pieces,
    const long long* __restrict__ pages,
    const unsigned long long* __restrict__ slots,
    const unsigned int num_chunks,
    const unsigned int chunk_bytes,
    const int to_slots)
{
    const unsigned int chunk = blockIdx.x % num_chunks;
    const unsigned int rest = blockIdx.x / num_chunks;
    const Piece piece = pieces[rest % num_pieces];
    const unsigned int block = rest / num_pieces;

    const unsigned int begin = chunk * chunk_bytes;
    if (begin >= piece.num_bytes) {
        return;
    }
    const unsigned int left = piece.num_bytes - begin;
    const unsigned int num_bytes = left < chunk_bytes ? left : chunk_bytes;

    unsigned char* page = reinterpret_cast<unsigned char*>(piece.address + pages[block] * piece.page_stride) + begin;
    unsigned char* slot = reinterpret_cast<unsigned char*>(slots[block]) + piece.offset + begin;
    unsigned char* target = to_slots ? slot : page;
    const unsigned char* source = to_slots ? page : slot;

    const unsigned long long both = reinterpret_cast<unsigned long long>(target)
        | reinterpret_cast<unsigned long long>(source);
    unsigned int done = 0;
    if (both % sizeof(uint4) == 0) {
        done = copy_words<uint4>(target, source, num_bytes);
    } else if (both % sizeof(unsigned int) == 0) {
        done = copy_words<unsigned int>(target, source, num_bytes);
    }
    for (unsigned int place = done + threadIdx.x; place < num_bytes; place += blockDim.x) {
        target[place] = source[place];
    }
}
"""

_PIECE = np.dtype([("address", "<u8"), ("page_stride", "<i8"), ("num_bytes", "<u4"), ("offset", "<u4")])
MOST_PIECE_BYTES = MOST_THREAD_BLOCKS = 2**31 - 1


class Table:
    """What one launch reads, as the bytes to put on the device, and where its parts begin there."""

    def __init__(self, layout: PagedLayout, pages: Sequence[int], slots: np.ndarray) -> None:
        """`slots` are addresses on the device, uint64. Raises ValueError for a layout beyond what the kernel counts."""
        if layout.block_bytes > MOST_PIECE_BYTES:
            raise ValueError(f"blocks of {layout.block_bytes} bytes, of which {MOST_PIECE_BYTES} are possible")
        pieces = np.array(
            [(piece.address, piece.page_stride, piece.num_bytes, piece.offset) for piece in layout.pieces], _PIECE
        )
        parts = [pieces, np.asarray(pages, "<i8"), slots.astype("<u8", copy=False)]
        self.bytes = np.concatenate([part.view(np.uint8) for part in parts])
        self.num_pieces = len(layout.pieces)
        self.pages_begin = pieces.nbytes
        self.slots_begin = pieces.nbytes + parts[1].nbytes
        longest = max(piece.num_bytes for piece in layout.pieces)
        self.num_chunks = -(-longest // CHUNK_BYTES)
        self.num_thread_blocks = len(pages) * self.num_pieces * self.num_chunks
        if self.num_thread_blocks > MOST_THREAD_BLOCKS:
            raise ValueError(f"{len(pages)} blocks of {self.num_pieces} pieces are more than one launch can move")
