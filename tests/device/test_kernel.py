"""The CUDA kernel without a GPU: it compiles for the GPUs there are, and its own source, run by a C++ compiler on the
CPU one thread after the other, does what the numpy reference does. So does the fallback by torch."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.device import kernel_source, reference
from tierkv.device.kernel_source import CHUNK_BYTES, NAME, OPTIONS, SOURCE, THREADS, Table
from tierkv.device.layouts import PagedArray, PagedLayout
from tierkv.device.runs import find_copies

Move = Callable[[PagedLayout, Sequence[int], np.ndarray, Sequence[int], bool], None]
"""layout, pages, slots, offsets, to_slots"""

# -------------------------------------------------------------------- compiled for GPUs


def nvrtc_library() -> Path | None:
    """libnvrtc of the wheel nvidia-cuda-nvrtc, which torch with CUDA brings along, or of the system."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    places += [Path("/usr/local/cuda/lib64"), Path(sysconfig.get_paths()["purelib"])]
    for place in places:
        for path in sorted(place.rglob("libnvrtc.so.1*")):
            return path
    return None


def compile_for(library: Any, architecture: str, source: str, options: Sequence[str] = OPTIONS) -> tuple[int, str]:
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    encoded = [option.encode() for option in (*options, f"--gpu-architecture={architecture}")]
    result = int(library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    text = log.value.decode()
    if result == 0:
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, ptx)
        text = ptx.value.decode()
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, text


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_the_kernel_compiles_and_moves_words_of_16_bytes(architecture: str) -> None:
    path = nvrtc_library()
    if path is None:
        pytest.skip("no libnvrtc here: pip install nvidia-cuda-nvrtc-cu12")
    library = ctypes.CDLL(str(path))
    result, text = compile_for(library, architecture, SOURCE)
    assert result == 0, text
    assert f".entry {NAME}(" in text
    assert text.count("ld.v4.u32") + text.count("ld.global.v4.u32") >= 5
    assert text.count("st.v4.u32") + text.count("st.global.v4.u32") >= 5
    result, text = compile_for(library, architecture, SOURCE.replace("uint4", "no_such_type"))
    assert result != 0
    assert "no_such_type" in text


# -------------------------------------------------------------------- run on the CPU

_ON_CPU = """
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
struct uint4 { unsigned int x, y, z, w; };
struct Place { unsigned int x; };
static Place blockIdx, threadIdx, blockDim;
%s
extern "C" void run(unsigned int thread_blocks, unsigned int threads, const Piece* pieces, unsigned int num_pieces,
    const long long* pages, const unsigned long long* slots, unsigned int num_chunks, unsigned int chunk_bytes,
    int to_slots)
{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < thread_blocks; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
            move_blocks(pieces, num_pieces, pages, slots, num_chunks, chunk_bytes, to_slots);
        }
    }
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Move:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(_ON_CPU % SOURCE)
    command = [compiler, "-std=c++14", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", "kernel.so"]
    subprocess.run([*command, "kernel.cpp"], cwd=folder, check=True, timeout=50)
    run = ctypes.CDLL(str(folder / "kernel.so")).run
    number, address = ctypes.c_uint, ctypes.c_void_p
    run.argtypes = [number, number, address, number, address, address, number, number, ctypes.c_int]

    def move(
        layout: PagedLayout, pages: Sequence[int], slots: np.ndarray, offsets: Sequence[int], to_slots: bool
    ) -> None:
        places = np.asarray(offsets, np.uint64) + np.uint64(slots.ctypes.data)
        table = Table(layout, pages, places)
        begin = table.bytes.ctypes.data
        run(
            table.num_thread_blocks,
            THREADS,
            begin,
            table.num_pieces,
            begin + table.pages_begin,
            begin + table.slots_begin,
            table.num_chunks,
            CHUNK_BYTES,
            int(to_slots),
        )

    return move


@pytest.fixture(scope="module")
def by_torch() -> Move:
    torch = pytest.importorskip("torch")
    from tierkv.device import torch_mover

    def view(address: int, shape: tuple[int, int], strides: tuple[int, int]) -> Any:
        span = (shape[0] - 1) * strides[0] + shape[1]
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(address))
        return torch.from_numpy(np.lib.stride_tricks.as_strided(memory, shape, strides))

    def move(
        layout: PagedLayout, pages: Sequence[int], slots: np.ndarray, offsets: Sequence[int], to_slots: bool
    ) -> None:
        there = torch_mover.Slots(slots.ctypes.data, slots.nbytes)
        if to_slots:
            torch_mover.gather(view, layout, pages, there, offsets, "cpu")
        else:
            torch_mover.scatter(view, there, offsets, layout, pages, "cpu")

    return move


@pytest.fixture(scope="module", params=["the kernel", "torch"])
def move(request: pytest.FixtureRequest) -> Move:
    made: Move = request.getfixturevalue("kernel" if request.param == "the kernel" else "by_torch")
    return made


RANDOM = np.random.default_rng(4)


def random_bytes(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, np.uint8)


def aligned(num_bytes: int, shift: int = 0) -> np.ndarray:
    """Bytes that begin `shift` behind a multiple of 16."""
    memory = np.zeros(num_bytes + 32, np.uint8)
    begin = -memory.ctypes.data % 16 + shift
    return memory[begin : begin + num_bytes]


def layouts() -> dict[str, list[PagedArray | np.ndarray]]:
    """Of every kind that engines have, with pieces below and above a chunk."""
    unsplit = random_bytes(2, 6 * 16, 8)
    return {
        "K and V apart, NHD": [random_bytes(6, 16, 2, 64) for _ in range(4)],
        "HND as it lies": [PagedArray.of(random_bytes(6, 16, 2, 64).transpose(0, 2, 1, 3)).in_memory_order()],
        "HND in the order of its axes": [random_bytes(6, 16, 2, 64).transpose(0, 2, 1, 3)],
        "fused in the page": [random_bytes(6, 2, 2, 16, 64) for _ in range(3)],
        "latent, a width of no whole words": [random_bytes(6, 16, 73), random_bytes(6, 16, 73)],
        "large pages": [random_bytes(6, CHUNK_BYTES + 20)],
        "pages of one byte": [random_bytes(6, 1)],
        "padded pages": [random_bytes(6, 40)[:, :33]],
        "tokens in a row": [PagedArray.of(head).split_axis(0, 16) for head in unsplit],
    }


@pytest.mark.parametrize("kind", layouts())
@pytest.mark.parametrize("shift", [0, 4, 1])
def test_it_moves_what_the_reference_moves(move: Move, kind: str, shift: int) -> None:
    layout = PagedLayout.of(layouts()[kind])
    slot_bytes = -(-layout.block_bytes // 4096) * 4096
    pages, offsets = [5, 0, 3], [slot_bytes * 2 + shift, shift, slot_bytes + shift]
    found, expected = aligned(4 * slot_bytes), aligned(4 * slot_bytes)
    move(layout, pages, found, offsets, True)
    reference.gather(layout, pages, expected, offsets)
    assert expected.any()
    assert (found == expected).all()

    before = all_pages(layout)
    slots = aligned(4 * slot_bytes)
    slots[:] = random_bytes(slots.nbytes)
    move(layout, [4, 1, 2], slots, offsets, False)
    after = all_pages(layout)
    for page, offset in zip([4, 1, 2], offsets, strict=True):
        assert (after[page] == slots[offset : offset + layout.block_bytes]).all()
    assert (after[[0, 3, 5]] == before[[0, 3, 5]]).all()


def all_pages(layout: PagedLayout) -> np.ndarray:
    rows = np.zeros((layout.num_pages, layout.block_bytes), np.uint8)
    places = [page * layout.block_bytes for page in range(layout.num_pages)]
    reference.gather(layout, range(layout.num_pages), rows.reshape(-1), places)
    return rows


@settings(max_examples=60)
@given(num_bytes=st.integers(1, 3 * CHUNK_BYTES), shift=st.integers(0, 15), source_shift=st.integers(0, 15))
def test_no_byte_beside_a_piece_is_touched(kernel: Move, num_bytes: int, shift: int, source_shift: int) -> None:
    pages = aligned(2 * num_bytes + 64, source_shift)
    pages[:] = 1
    layout = PagedLayout.of([pages[16 : 16 + num_bytes].reshape(1, num_bytes)])
    slots = aligned(num_bytes + 64)
    kernel(layout, [0], slots, [16 + shift], True)
    assert (slots[16 + shift : 16 + shift + num_bytes] == 1).all()
    assert slots.sum() == num_bytes


def test_a_launch_has_a_thread_block_for_each_chunk_piece_and_block() -> None:
    layout = PagedLayout.of([np.zeros((3, CHUNK_BYTES + 1), np.uint8), np.zeros((3, 5), np.uint8)])
    table = Table(layout, [2, 0], np.array([4096, 2**40], np.uint64))
    assert (table.num_pieces, table.num_chunks, table.num_thread_blocks) == (2, 2, 8)
    assert (table.pages_begin, table.slots_begin, table.bytes.nbytes) == (48, 64, 80)
    assert table.bytes[48:].view("<u8").tolist() == [2, 0, 4096, 2**40]


def test_what_the_kernel_can_not_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PagedLayout.of([np.zeros((3, 50), np.uint8), np.zeros((3, 50), np.uint8)])
    monkeypatch.setattr(kernel_source, "MOST_THREAD_BLOCKS", 3)
    with pytest.raises(ValueError, match="more than one launch"):
        Table(layout, [0, 1], np.zeros(2, np.uint64))
    monkeypatch.setattr(kernel_source, "MOST_PIECE_BYTES", 99)
    with pytest.raises(ValueError, match="100 bytes"):
        Table(layout, [0], np.zeros(1, np.uint64))


# -------------------------------------------------------------------- joined copies


@pytest.mark.parametrize(
    ("sources", "targets", "block_bytes", "whole", "expected"),
    [
        ([], [], 100, True, []),
        ([0], [8192], 100, True, [(0, 8192, 100)]),
        ([0, 4096, 8192], [4096, 8192, 12288], 100, True, [(0, 4096, 8292)]),
        ([0, 4096], [0, 4096], 100, False, [(0, 0, 100), (4096, 4096, 100)]),
        ([0, 100], [50, 150], 100, False, [(0, 50, 200)]),
        ([0, 4096], [4096, 0], 4096, True, [(0, 4096, 4096), (4096, 0, 4096)]),
        ([0, 8192], [0, 4096], 4096, True, [(0, 0, 4096), (8192, 4096, 4096)]),
        ([0, 4096, 12288, 16384], [0, 4096, 8192, 12288], 4096, True, [(0, 0, 8192), (12288, 8192, 8192)]),
        ([0, 1], [0, 1], 0, True, []),
    ],
)
def test_neighbours_on_both_sides_are_one_copy(
    sources: list[int], targets: list[int], block_bytes: int, whole: bool, expected: list[tuple[int, int, int]]
) -> None:
    assert list(find_copies(sources, targets, block_bytes, whole_slots=whole)) == expected
