"""The CUDA kernels of the codec fp8: from an engine's pages to coded slots, and back, in one launch each.

One thread block for each block and run (a head of one layer's keys or values): it finds the largest magnitude, makes
the scale, and codes the run's numbers, reading the pages twice and writing only coded bytes. What makes the bytes is
`tierkv.core.fp8`, step by step the same: no step rounds but the division and the conversions, which are IEEE's; so
slots are equal to the bit to those that a CPU fills. The options forbid what would make them differ.

    table     | Run, 64 bytes each | pages, int64 each | slots, addresses of 8 bytes each |
    verdicts  one byte a block, zero before the launch: 1 where it holds a number that is not finite (coding), a scale
              or a number that no coding makes (decoding)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from tierkv.core.codec import NUMBERS_ALIGNMENT, SCALE_BYTES, Fp8, Piece
from tierkv.core.fp8 import ITEM_BYTES, MAX_SCALES
from tierkv.device.layouts import PagedLayout
from tierkv.device.layouts import Piece as PagedPiece

ENCODE_NAME, DECODE_NAME = "encode_runs", "decode_runs"
THREADS = 256
OPTIONS = ("--std=c++14", "--fmad=false", "--ftz=false", "--prec-div=true")
MOST_THREAD_BLOCKS = 2**31 - 1

_ELEMENTS = {"bfloat16": "Bfloat16", "float16": "Float16", "float32": "Float32"}

_COMMON = r"""
struct Run {
    unsigned long long address;
    long long page_stride;
    long long token_stride;
    unsigned long long scale;
    unsigned long long numbers;
    unsigned int tokens;
    unsigned int dim;
    unsigned int gap;
    unsigned int gap_bytes;
    float max_scale;
    unsigned int unused;
};

struct Bfloat16 {
    typedef unsigned short Word;
    static const unsigned int infinite = 0x7F80u;
    static __device__ float widen(Word word) { return __uint_as_float((unsigned int)word << 16); }
    static __device__ Word narrow(float value) {
        const unsigned int bits = __float_as_uint(value);
        return (Word)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    }
};

struct Float16 {
    typedef unsigned short Word;
    static const unsigned int infinite = 0x7C00u;
    static __device__ float widen(Word word) {
        const unsigned int sign = (unsigned int)(word & 0x8000u) << 16;
        const unsigned int rest = word & 0x7FFFu;
        if (rest < 0x0400u) {  /* zero, or below the normal numbers: so many steps of 2**-24, which is exact */
            return __uint_as_float(sign | __float_as_uint((float)rest * 5.9604644775390625e-08f));
        }
        return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
    }
    static __device__ Word narrow(float value) {
        const unsigned int bits = __float_as_uint(value);
        const unsigned int sign = (bits >> 16) & 0x8000u;
        const unsigned int rest = bits & 0x7FFFFFFFu;
        if (rest < 0x38800000u) {  /* below 2**-14: float32 has the steps of 2**-24 next to 0.5 */
            const unsigned int steps = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000u;
            return (Word)(sign | steps);
        }
        return (Word)(sign | ((rest - 0x38000000u + 0x0FFFu + ((rest >> 13) & 1u)) >> 13));
    }
};

struct Float32 {
    typedef unsigned int Word;
    static const unsigned int infinite = 0x7F800000u;
    static __device__ float widen(Word word) { return __uint_as_float(word); }
    static __device__ Word narrow(float value) { return __float_as_uint(value); }
};

static __device__ float scale_of(float amax, float max_scale) {
    if (amax == 0.0f) {
        return 1.0f;
    }
    const float scale = __uint_as_float((__float_as_uint(amax / 448.0f) + 0xFFu) & 0xFFFFFF00u);
    const float least = 7.888609052210118e-31f;  /* 2**-100 */
    return scale < least ? least : (scale > max_scale ? max_scale : scale);
}

static __device__ unsigned char to_code(float value) {
    const unsigned int bits = __float_as_uint(value);
    unsigned int magnitude = bits & 0x7FFFFFFFu;
    magnitude = magnitude < 0x43E00000u ? magnitude : 0x43E00000u;
    unsigned int exponent = magnitude & 0x7F800000u;
    exponent = exponent > 0x3C800000u ? exponent : 0x3C800000u;
    const unsigned int anchor = exponent + 0x0A000000u;
    const unsigned int steps = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(anchor)) - anchor;
    return (unsigned char)((steps + (exponent >> 20) - 0x3C8u) | ((bits >> 24) & 0x80u));
}

static __device__ float from_code(unsigned char code) {
    const unsigned int bits = ((unsigned int)(code & 0x80u) << 24) | ((unsigned int)(code & 0x7Fu) << 20);
    return __uint_as_float(bits) * 1.329227995784916e+36f;  /* 2**120 */
}
"""

_ENCODE = r"""
extern "C" __global__ void encode_runs(
    const Run* __restrict__ runs,
    const unsigned int num_runs,
    const long long* __restrict__ pages,
    const unsigned long long* __restrict__ slots,
    unsigned char* verdicts)
{
    typedef Element::Word Word;
    __shared__ unsigned int largest[THREADS];
    const Run run = runs[blockIdx.x % num_runs];
    const unsigned int block = blockIdx.x / num_runs;
    const unsigned char* page =
        reinterpret_cast<const unsigned char*>(run.address + pages[block] * run.page_stride);
    unsigned char* slot = reinterpret_cast<unsigned char*>(slots[block]);
    const unsigned int count = run.tokens * run.dim;
    const Word magnitude = (Word)((((Word)1) << (8 * sizeof(Word) - 1)) - 1);

    unsigned int mine = 0;
    for (unsigned int place = threadIdx.x; place < count; place += THREADS) {
        const Word* row = reinterpret_cast<const Word*>(page + (place / run.dim) * run.token_stride);
        const unsigned int word = row[place % run.dim] & magnitude;
        mine = word > mine ? word : mine;
    }
    largest[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half && largest[threadIdx.x + half] > largest[threadIdx.x]) {
            largest[threadIdx.x] = largest[threadIdx.x + half];
        }
        __syncthreads();
    }
    if (largest[0] >= Element::infinite) {
        verdicts[block] = 1;  /* whichever thread is first: they all say the same */
        return;
    }
    const float scale = scale_of(Element::widen((Word)largest[0]), run.max_scale);
    if (threadIdx.x == 0) {
        *reinterpret_cast<float*>(slot + run.scale) = scale;
    }
    for (unsigned int place = threadIdx.x; place < run.gap_bytes; place += THREADS) {
        slot[run.gap + place] = 0;
    }
    for (unsigned int place = threadIdx.x; place < count; place += THREADS) {
        const Word* row = reinterpret_cast<const Word*>(page + (place / run.dim) * run.token_stride);
        slot[run.numbers + place] = to_code(Element::widen(row[place % run.dim]) / scale);
    }
}
"""

_DECODE = r"""
extern "C" __global__ void decode_runs(
    const Run* __restrict__ runs,
    const unsigned int num_runs,
    const long long* __restrict__ pages,
    const unsigned long long* __restrict__ slots,
    unsigned char* verdicts)
{
    typedef Element::Word Word;
    const Run run = runs[blockIdx.x % num_runs];
    const unsigned int block = blockIdx.x / num_runs;
    unsigned char* page = reinterpret_cast<unsigned char*>(run.address + pages[block] * run.page_stride);
    const unsigned char* slot = reinterpret_cast<const unsigned char*>(slots[block]);
    const unsigned int count = run.tokens * run.dim;

    const float scale = *reinterpret_cast<const float*>(slot + run.scale);
    if (!(scale >= 7.888609052210118e-31f && scale <= run.max_scale)) {
        verdicts[block] = 1;
        return;
    }
    for (unsigned int place = threadIdx.x; place < count; place += THREADS) {
        const unsigned char code = slot[run.numbers + place];
        if ((code & 0x7Fu) == 0x7Fu) {
            verdicts[block] = 1;
        }
        Word* row = reinterpret_cast<Word*>(page + (place / run.dim) * run.token_stride);
        row[place % run.dim] = Element::narrow(from_code(code) * scale);
    }
}
"""


def is_aligned(codec: Fp8) -> bool:
    """Whether every scale of a block is at a multiple of its size, for a GPU reads no other."""
    return all(begin % SCALE_BYTES == 0 for begin in accumulate(codec.block_bytes[:-1]))


def source(element: str) -> str:
    """Both kernels, for pages of this element type."""
    return f"#define THREADS {THREADS}u\n{_COMMON}\ntypedef {_ELEMENTS[element]} Element;\n{_ENCODE}\n{_DECODE}"


_RUN = np.dtype(
    [
        ("address", "<u8"),
        ("page_stride", "<i8"),
        ("token_stride", "<i8"),
        ("scale", "<u8"),
        ("numbers", "<u8"),
        ("tokens", "<u4"),
        ("dim", "<u4"),
        ("gap", "<u4"),
        ("gap_bytes", "<u4"),
        ("max_scale", "<f4"),
        ("unused", "<u4"),
    ]
)


class CodecTable:
    """What one launch reads, as the bytes to put on the device, and where its parts begin there."""

    def __init__(
        self,
        codec: Fp8,
        layout: PagedLayout,
        pages: Sequence[int],
        slots: np.ndarray,
        *,
        has_zeros: bool = False,
    ) -> None:
        """`slots` are addresses on the device, uint64. Raises ValueError where the layout's blocks are not the codec's
        raw ones, where a head is scattered over several runs of memory, or where blocks have padding, unless the pages
        that are decoded to begin as zeros (`has_zeros`): the kernel does not touch padding."""
        runs = np.array([tuple(run) for run in _runs(codec, layout, has_zeros)], _RUN)
        parts = [runs, np.asarray(pages, "<i8"), slots.astype("<u8", copy=False)]
        self.bytes = np.concatenate([part.view(np.uint8) for part in parts])
        self.num_runs = len(runs)
        self.num_blocks = len(pages)
        self.pages_begin = runs.nbytes
        self.slots_begin = runs.nbytes + parts[1].nbytes
        self.num_thread_blocks = self.num_blocks * self.num_runs
        if self.num_thread_blocks > MOST_THREAD_BLOCKS:
            raise ValueError(f"{self.num_blocks} blocks of {self.num_runs} runs are more than one launch can code")


def _runs(codec: Fp8, layout: PagedLayout, has_zeros: bool) -> Iterator[tuple[int | float, ...]]:
    shape = codec.shape
    if layout.block_bytes != shape.total_raw_bytes:
        raise ValueError(
            f"the pages have {layout.block_bytes} bytes a block, the codec's raw ones {shape.total_raw_bytes}"
        )
    item, max_scale = ITEM_BYTES[shape.element], MAX_SCALES[shape.element]
    raw_begin = coded_begin = 0
    for raw_bytes, coded_bytes, pieces in zip(shape.raw_bytes, codec.block_bytes, shape.pieces, strict=True):
        count = sum(piece.heads * piece.tokens * piece.dim for piece in pieces)
        if count * item != raw_bytes and not has_zeros:
            raise ValueError("pages with padding, which is to come back as zeros")
        scale, numbers = coded_begin, coded_begin + coded_bytes - count
        scales_end = coded_begin + sum(piece.heads for piece in pieces) * SCALE_BYTES
        gap, gap_bytes = scales_end, numbers - scales_end
        assert 0 <= gap_bytes < NUMBERS_ALIGNMENT
        for piece in pieces:
            for head in range(piece.heads):
                first = raw_begin + (piece.start + head * piece.head_stride) * item
                page = _page_of(layout, first, _span(piece) * item)
                yield (
                    page.address + first - page.offset,
                    page.page_stride,
                    piece.token_stride * item,
                    scale,
                    numbers,
                    piece.tokens,
                    piece.dim,
                    gap,
                    gap_bytes,
                    max_scale,
                    0,
                )
                scale += SCALE_BYTES
                numbers += piece.tokens * piece.dim
                gap_bytes = 0  # by the group's first run alone
        raw_begin += raw_bytes
        coded_begin += coded_bytes


def _span(piece: Piece) -> int:
    return (piece.tokens - 1) * piece.token_stride + piece.dim


def _page_of(layout: PagedLayout, first: int, span: int) -> PagedPiece:
    for page in layout.pieces:
        if page.offset <= first and first + span <= page.offset + page.num_bytes:
            return page
    raise ValueError(f"the {span} bytes of a head from byte {first} of a block are not one run of memory")
