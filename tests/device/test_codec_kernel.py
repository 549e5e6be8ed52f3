"""The kernels of fp8 without a GPU: they compile for the GPUs there are, and their own source, run by a C++ compiler on
the CPU with a thread for each of the GPU's, makes the bytes of the numpy reference, every one of them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.device.test_kernel import compile_for, nvrtc_library
from tierkv.core.codec import Fp8, Kind, KVShape, Piece
from tierkv.core.fp8 import ITEM_BYTES
from tierkv.device.codec_source import DECODE_NAME, ENCODE_NAME, OPTIONS, CodecTable, source
from tierkv.device.layouts import PagedLayout

ELEMENTS = sorted(ITEM_BYTES)
LAYERS, HEADS, TOKENS, DIM, PAGES = 2, 3, 4, 24, 5
THREADS = 8
"""On the CPU. A power of two, as on the GPU."""

_ON_CPU = """
#include <cstring>
#include <pthread.h>
#define __global__
#define __device__
#define __restrict__
#define __shared__ static
struct Place { unsigned int x; };
static Place blockIdx;
static thread_local Place threadIdx;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
static unsigned int __float_as_uint(float value) { unsigned int bits; std::memcpy(&bits, &value, 4); return bits; }
static float __uint_as_float(unsigned int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
%s
struct Call {
    const Run* runs; unsigned int num_runs; const long long* pages; const unsigned long long* slots;
    unsigned char* verdicts; unsigned int thread_blocks; int encodes; unsigned int thread;
};
static void* one_thread(void* given)
{
    const Call& call = *static_cast<Call*>(given);
    threadIdx.x = call.thread;
    for (unsigned int block = 0; block < call.thread_blocks; block++) {
        pthread_barrier_wait(&barrier);
        if (call.thread == 0) { blockIdx.x = block; }
        pthread_barrier_wait(&barrier);
        (call.encodes ? encode_runs : decode_runs)(call.runs, call.num_runs, call.pages, call.slots, call.verdicts);
    }
    return nullptr;
}
extern "C" void run(const Run* runs, unsigned int num_runs, const long long* pages, const unsigned long long* slots,
    unsigned char* verdicts, unsigned int thread_blocks, int encodes)
{
    pthread_t threads[THREADS];
    Call calls[THREADS];
    pthread_barrier_init(&barrier, nullptr, THREADS);
    for (unsigned int thread = 0; thread < THREADS; thread++) {
        calls[thread] = Call{runs, num_runs, pages, slots, verdicts, thread_blocks, encodes, thread};
        pthread_create(&threads[thread], nullptr, one_thread, &calls[thread]);
    }
    for (unsigned int thread = 0; thread < THREADS; thread++) { pthread_join(threads[thread], nullptr); }
    pthread_barrier_destroy(&barrier);
}
"""

Launch = Callable[[CodecTable, bool], list[int]]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launch]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    return {element: compiled(compiler, tmp_path_factory.mktemp(element), element) for element in ELEMENTS}


def load_kernels(compiler: str, folder: Path, element: str) -> Callable[..., None]:
    """Both, as one function: runs, their number, pages, slots, verdicts, thread blocks, whether to encode."""
    of_few_threads = source(element).replace("#define THREADS 256u", f"#define THREADS {THREADS}u")
    (folder / "kernel.cpp").write_text(_ON_CPU % of_few_threads)
    command = [compiler, "-std=c++14", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
    subprocess.run([*command, "-shared", "-fPIC", "-o", "kernel.so", "kernel.cpp"], cwd=folder, check=True, timeout=50)
    run = ctypes.CDLL(str(folder / "kernel.so")).run
    number, address = ctypes.c_uint, ctypes.c_void_p
    run.argtypes = [address, number, address, address, address, number, ctypes.c_int]
    return run  # type: ignore[no-any-return]


def compiled(compiler: str, folder: Path, element: str) -> Launch:
    run = load_kernels(compiler, folder, element)

    def launch(table: CodecTable, encodes: bool) -> list[int]:
        verdicts = np.zeros(table.num_blocks, np.uint8)
        begin = table.bytes.ctypes.data
        run(
            begin,
            table.num_runs,
            begin + table.pages_begin,
            begin + table.slots_begin,
            verdicts.ctypes.data,
            table.num_thread_blocks,
            int(encodes),
        )
        return verdicts.tolist()

    return launch


class Engine:
    """Pages of LAYERS arrays, each [pages, kv, token, head, dim] or [pages, head, kv, token, dim], and as blocks."""

    def __init__(self, element: str, order: str, seed: int = 1) -> None:
        self.element, item = element, ITEM_BYTES[element]
        axes = {"kv,token,head": (2, TOKENS, HEADS), "head,kv,token": (HEADS, 2, TOKENS)}[order]
        self.arrays = [np.zeros((PAGES, *axes, DIM), f"u{item}") for _ in range(LAYERS)]
        token_first = order == "kv,token,head"
        layer = 2 * TOKENS * HEADS * DIM
        pieces = tuple(
            Piece(
                layer=number // 2,
                kind=(Kind.KEYS, Kind.VALUES)[number % 2],
                heads=HEADS,
                tokens=TOKENS,
                dim=DIM,
                start=number // 2 * layer + number % 2 * TOKENS * DIM * (HEADS if token_first else 1),
                head_stride=DIM if token_first else 2 * TOKENS * DIM,
                token_stride=HEADS * DIM if token_first else DIM,
            )
            for number in range(2 * LAYERS)
        )
        self.codec = Fp8(KVShape(element=element, raw_bytes=(LAYERS * layer * item,), pieces=(pieces,)))  # type: ignore[arg-type]
        self.layout = PagedLayout.of(self.arrays)
        self.slot_bytes = -(-self.codec.block_bytes[0] // 4096) * 4096
        self.slots = np.full((PAGES, self.slot_bytes), 0x5A, np.uint8)
        self._random = np.random.default_rng(seed)

    def table(self, pages: list[int], slots: list[int]) -> CodecTable:
        places = np.array([self.slots.ctypes.data + slot * self.slot_bytes for slot in slots], np.uint64)
        return CodecTable(self.codec, self.layout, pages, places)

    def fill(self, words: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        for array in self.arrays:
            array[:] = words(array.shape)

    def block(self, page: int) -> np.ndarray:
        return np.concatenate([array[page].reshape(-1) for array in self.arrays]).view(np.uint8)[None]

    def reference(self, page: int) -> np.ndarray:
        coded = np.zeros((1, self.codec.block_bytes[0]), np.uint8)
        assert self.codec.encode(self.block(page), coded) == 1
        return coded[0]

    def coded(self, slot: int) -> np.ndarray:
        return self.slots[slot, : self.codec.block_bytes[0]]

    def finite(self, shape: tuple[int, ...]) -> np.ndarray:
        """Any finite bits, heads of zeros, and heads of one size among them."""
        largest = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7F_FFFF}[self.element]
        bits = 8 * ITEM_BYTES[self.element]
        words = self._random.integers(0, largest + 1, shape, np.uint64)
        near = largest // 2 + self._random.integers(0, largest // 16, shape, np.uint64)
        size = self._random.integers(0, 4, (*shape[:-1], 1))
        words = np.where(size == 0, np.where(self._random.random(shape) < 0.5, 0, 1), np.where(size == 1, words, near))
        return words.astype(np.uint64) | (self._random.integers(0, 2, shape, np.uint64) << np.uint64(bits - 1))


@pytest.mark.parametrize("order", ["kv,token,head", "head,kv,token"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_it_makes_every_byte_that_the_reference_makes_and_brings_back_the_same(
    launches: dict[str, Launch], element: str, order: str
) -> None:
    for seed in range(4):
        engine = Engine(element, order, seed)
        engine.fill(engine.finite)
        assert launches[element](engine.table([4, 0, 2], [1, 3, 0]), True) == [0, 0, 0]
        for page, slot in ((4, 1), (0, 3), (2, 0)):
            assert engine.coded(slot).tobytes() == engine.reference(page).tobytes()
        assert (engine.slots[:, engine.codec.block_bytes[0] :] == 0x5A).all(), "nothing beside a block"
        assert (engine.slots[[2, 4]] == 0x5A).all()

        expected = np.empty((1, engine.codec.raw_bytes[0]), np.uint8)
        assert engine.codec.decode(engine.coded(1)[None], expected) == 1
        before = engine.block(0)
        assert launches[element](engine.table([3], [1]), False) == [0]
        assert engine.block(3).tobytes() == expected.tobytes()
        assert engine.block(0).tobytes() == before.tobytes()


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_word_is_coded_as_the_reference_codes_it(launches: dict[str, Launch], element: str) -> None:
    """Every number of 16 bits, and those of 32 whose lower half is at a border, next to one that sets the scale."""
    bits = 8 * ITEM_BYTES[element]
    low = {16: [0], 32: [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]}[bits]
    infinite = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80}[element]
    high = np.concatenate([np.arange(infinite), 0x8000 + np.arange(infinite)])
    words = np.concatenate([(high << (bits - 16)) + one for one in low]).astype(f"u{bits // 8}")
    engine = Engine(element, "head,kv,token")
    per_page = engine.block(0).view(words.dtype).size
    step = per_page * PAGES
    for begin in range(0, len(words), step):
        part = np.resize(words[begin : begin + step], step).reshape(PAGES, LAYERS, *engine.arrays[0].shape[1:])
        for layer, array in enumerate(engine.arrays):
            array[:] = part[:, layer]
        every = list(range(PAGES))
        assert launches[element](engine.table(every, every), True) == [0] * PAGES
        for page in every:
            assert engine.coded(page).tobytes() == engine.reference(page).tobytes()


@pytest.mark.scenario("B216", then="on a GPU too a block with inf or NaN is refused, and only that one")
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("above", [0, 1])
def test_a_block_that_is_not_finite_is_told(launches: dict[str, Launch], element: str, above: int) -> None:
    infinite = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[element]
    engine = Engine(element, "kv,token,head")
    engine.fill(engine.finite)
    engine.arrays[1][2, 1, 3, 1, DIM - 1] = infinite + above
    assert launches[element](engine.table([1, 2, 3], [0, 1, 2]), True) == [0, 1, 0]
    assert engine.coded(2).tobytes() == engine.reference(3).tobytes()


@pytest.mark.scenario("B217", then="on a GPU too a bad scale is damage, and only that block's")
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_a_scale_that_no_coding_makes_is_told(launches: dict[str, Launch], element: str, scale: float) -> None:
    engine = Engine(element, "kv,token,head")
    engine.fill(engine.finite)
    every = list(range(PAGES))
    launches[element](engine.table(every, every), True)
    engine.coded(3)[8:12].view("<f4")[:] = scale
    assert launches[element](engine.table(every, every), False) == [0, 0, 0, 1, 0]


def test_a_number_that_no_coding_makes_is_told(launches: dict[str, Launch]) -> None:
    engine = Engine("bfloat16", "kv,token,head")
    engine.fill(engine.finite)
    launches["bfloat16"](engine.table([0, 1], [0, 1]), True)
    engine.coded(1)[-1] = 0xFF
    assert launches["bfloat16"](engine.table([0, 1], [0, 1]), False) == [0, 1]


def test_what_the_kernel_can_not_do_is_refused_so_that_the_host_does_it() -> None:
    engine = Engine("bfloat16", "kv,token,head")
    with pytest.raises(ValueError, match="bytes a block"):
        CodecTable(engine.codec, PagedLayout.of(engine.arrays[:1]), [0], np.zeros(1, np.uint64))
    scattered = [array.transpose(0, 3, 1, 2, 4) for array in engine.arrays]
    with pytest.raises(ValueError, match="not one run"):
        CodecTable(engine.codec, PagedLayout.of(scattered), [0], np.zeros(1, np.uint64))


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_the_kernels_compile(element: str, architecture: str) -> None:
    path = nvrtc_library()
    if path is None:
        pytest.skip("no libnvrtc here: pip install nvidia-cuda-nvrtc-cu12")
    result, text = compile_for(ctypes.CDLL(str(path)), architecture, source(element), OPTIONS)
    assert result == 0, text
    assert f".entry {ENCODE_NAME}(" in text
    assert f".entry {DECODE_NAME}(" in text
    assert "div.rn.f32" in text
    assert ".ftz" not in text
    assert "fma.rn.f32" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["kv,token,head", "head,kv,token"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_gpu_makes_every_byte_that_the_reference_makes(element: str, order: str) -> None:
    cupy = pytest.importorskip("cupy")
    from tierkv.device import cupy_codec

    engine = Engine(element, order)
    engine.fill(engine.finite)
    there = [cupy.asarray(array) for array in engine.arrays]
    slots, verdicts = cupy.zeros((PAGES, engine.slot_bytes), cupy.uint8), cupy.zeros(3, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()

    def run(pages: list[int], places: list[int], *, to_slots: bool) -> list[int]:
        addresses = np.array([slots.data.ptr + place * engine.slot_bytes for place in places], np.uint64)
        table = CodecTable(engine.codec, PagedLayout.of(there), pages, addresses)
        held = cupy.asarray(table.bytes)
        verdicts[:] = 0
        cupy.cuda.Device().synchronize()
        cupy_codec.launch(
            cupy.cuda.Device().id, stream.ptr, element, table, held.data.ptr, verdicts.data.ptr, to_slots=to_slots
        )
        stream.synchronize()
        told: list[int] = cupy.asnumpy(verdicts)[: len(pages)].tolist()
        return told

    assert run([4, 0, 2], [1, 3, 0], to_slots=True) == [0, 0, 0]
    found = cupy.asnumpy(slots)[:, : engine.codec.block_bytes[0]]
    for page, slot in ((4, 1), (0, 3), (2, 0)):
        assert found[slot].tobytes() == engine.reference(page).tobytes()
    assert not found[[2, 4]].any()
    expected = np.empty((1, engine.codec.raw_bytes[0]), np.uint8)
    assert engine.codec.decode(found[1:2], expected) == 1
    assert run([3], [1], to_slots=False) == [0]
    back = np.concatenate([cupy.asnumpy(array[3]).reshape(-1) for array in there]).view(np.uint8)
    assert back.tobytes() == expected.tobytes()
    infinite = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[element]
    there[1][2, 1, 1, 1, DIM - 1] = infinite
    assert run([4, 2], [1, 0], to_slots=True) == [0, 1]
