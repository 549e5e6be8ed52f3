"""Blocks of a coded group between pages and slots: every layout, on the CPU's backend and on CUDA's with the real
kernels run by the CPU, makes the bytes that a host makes, and every block has a verdict of its own."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.device.coded_pages import KINDS, SLOT, CodedPages
from tests.device.fake_cuda import FakeCuda
from tests.device.test_codec_kernel import load_kernels
from tests.device.test_cuda import opened
from tierkv.device import cuda_coding
from tierkv.device.codec_source import CodecTable, is_aligned
from tierkv.device.cpu import CpuBackend
from tierkv.device.cuda_coding import CudaCoder
from tierkv.device.late import LateCopies
from tierkv.device.memory import HostMemory
from tierkv.errors import DeviceError

FILL = 0x5A
SLOTS = 8
MIB = 2**20


class Device:
    """A backend with a pool. `complete` makes what was asked for happen, `memory` is the pool's bytes."""

    def __init__(self, backend: Any, complete: Callable[[], None], pool: Any, memory: np.ndarray) -> None:
        self.backend, self.complete, self.pool, self.memory = backend, complete, pool, memory


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None] | None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return load_kernels(compiler, tmp_path_factory.mktemp("kernels"), "float16") if compiler else None


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, kernels: Callable[..., None] | None) -> Iterator[Device]:
    if request.param == "cpu":
        late = LateCopies()
        backend = CpuBackend(late)
        pool = backend.make_pool(SLOTS * SLOT)
        pool.bytes[:] = FILL
        made = Device(backend, late.complete_all, pool, pool.bytes)
        yield made
        del made.memory  # or the pool stays mapped
        assert pool.close()
        return
    if kernels is None:
        pytest.skip("no C++ compiler here")
    fake = FakeCuda()
    run = kernels

    def launch(stream: int, element: str, table: CodecTable, address: int, verdicts: int, *, to_slots: bool) -> None:
        assert element == "float16"
        parts = address, table.num_runs, address + table.pages_begin, address + table.slots_begin
        fake.ask(stream, lambda: run(*parts, verdicts, table.num_thread_blocks, int(to_slots)))

    with opened(fake) as cuda:
        cuda._coder = CudaCoder(
            cuda._driver, cuda._streams, buffer=cuda._buffer, on_device=cuda._on_device, launch=launch
        )
        there = cuda.make_pool(64 * MIB)
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (SLOTS * SLOT)).from_address(there.address))
        memory[:] = FILL
        fake.is_held = True
        yield Device(cuda, fake.run_streams, there, memory)
        fake.is_held = False
        del memory
        assert there.close()


def host() -> HostMemory:
    return HostMemory(np.full(SLOTS * SLOT, FILL, np.uint8))


@pytest.mark.parametrize("in_host", [False, True], ids=["pool", "arena"])
@pytest.mark.parametrize(("kind", "few"), [*((kind, False) for kind in KINDS), ("grouped", True), ("padded", True)])
def test_slots_and_pages_hold_what_a_host_makes_of_them(
    device: Device, kind: str, few: bool, in_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = CodedPages(kind)
    if few:
        monkeypatch.setattr(cuda_coding, "ROWS_BYTES", 2 * pages.raw_bytes + 512)
        monkeypatch.setattr("tierkv.device.coding.STAGED_BYTES", 2 * pages.raw_bytes)
    rows, places = pages.rows(5), [5 * SLOT, 0, 2 * SLOT, 3 * SLOT, 7 * SLOT]
    pages.put(rows, [4, 0, 5, 1, 3])
    arena = host()
    slots, memory = (arena, arena.bytes) if in_host else (device.pool, device.memory)

    asked = device.backend.encode(pages.codec, pages.parts([4, 0, 5, 1, 3]), slots, places)
    assert (memory == FILL).all(), "nothing has happened yet"
    assert not asked.is_done
    device.complete()
    assert asked.wait(0)
    assert asked.good.tolist() == [True] * 5
    expected = np.full(SLOTS * SLOT, FILL, np.uint8)
    for place, coded in zip(places, pages.coded(rows), strict=True):
        expected[place : place + pages.coded_bytes] = coded
    assert memory.tobytes() == expected.tobytes()

    pages.put(np.full_like(rows, 0x77), [4, 0, 5, 1, 3])
    back = device.backend.decode(pages.codec, slots, places, pages.parts([1, 3, 0, 4, 5]))
    assert (pages.get([1]) == 0x77).all()
    device.complete()
    assert back.wait(0)
    assert back.good.tolist() == [True] * 5
    assert pages.get([1, 3, 0, 4, 5]).tobytes() == pages.as_read(rows).tobytes()
    assert memory.tobytes() == expected.tobytes()


@pytest.mark.scenario("B216", then="on a device a block with inf or NaN is told, and only that one")
@pytest.mark.scenario("B217", then="on a device a bad scale is told, and only that block's")
@pytest.mark.parametrize("in_host", [False, True], ids=["pool", "arena"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_block_has_a_verdict_of_its_own(device: Device, kind: str, in_host: bool) -> None:
    pages = CodedPages(kind)
    rows, places = pages.rows(4), [0, SLOT, 2 * SLOT, 3 * SLOT]
    arena = host()
    slots, memory = (arena, arena.bytes) if in_host else (device.pool, device.memory)
    infinite = rows.copy()
    infinite.view(np.float16)[2, 5] = np.inf
    pages.put(infinite, range(4))
    refused = device.backend.encode(pages.codec, pages.parts(range(4)), slots, places)
    device.complete()
    assert refused.wait(0)
    assert refused.good.tolist() == [True, True, False, True]
    assert memory[3 * SLOT : 3 * SLOT + pages.coded_bytes].tobytes() == pages.coded(rows[3:]).tobytes()

    pages.put(rows, range(4))
    again = device.backend.encode(pages.codec, pages.parts(range(4)), slots, places)
    device.complete()
    assert again.good.all(), "what one copy was told is not the next one's"
    memory[SLOT : SLOT + 4] = 0
    pages.put(np.full_like(rows, 0x77), range(4))
    damaged = device.backend.decode(pages.codec, slots, places, pages.parts(range(4)))
    device.complete()
    assert damaged.wait(0)
    assert damaged.good.tolist() == [True, False, True, True]
    assert pages.get([0, 2, 3]).tobytes() == pages.as_read(rows)[[0, 2, 3]].tobytes()


def test_a_block_without_a_page_is_judged_and_written_nowhere(device: Device) -> None:
    pages = CodedPages("grouped")
    rows, places = pages.rows(3), [0, SLOT, 2 * SLOT]
    pages.put(rows, range(3))
    device.backend.encode(pages.codec, pages.parts(range(3)), device.pool, places)
    device.complete()
    device.memory[2 * SLOT : 2 * SLOT + 4] = 0xFF
    pages.put(np.full((6, pages.raw_bytes), 0x77, np.uint8), range(6))
    first, second = pages.layouts
    judged = device.backend.decode(pages.codec, device.pool, places, [(first, [-1, 4, -1]), (second, [5, -1, -1])])
    device.complete()
    assert judged.good.tolist() == [True, True, False]
    found, half = pages.get(range(6)), pages.codec.raw_bytes[0]
    assert found[4, :half].tobytes() == pages.as_read(rows[:2])[1, :half].tobytes()
    assert found[5, half:].tobytes() == pages.as_read(rows[:2])[0, half:].tobytes()
    assert (np.delete(found[:, :half], 4, axis=0) == 0x77).all()
    assert (found[:5, half:] == 0x77).all()


def test_what_is_not_in_memory_is_refused_before_anything_is_touched(device: Device) -> None:
    pages = CodedPages("fused")
    one, other = CodedPages("grouped"), pages.parts([0])
    for parts, offsets, problem in (
        (one.parts([0])[:1], [0], "bytes a block"),
        (other, [SLOT // 2 - 8], "multiples of 16"),
        (other, [device.pool.num_bytes], "in "),
        (other, [-SLOT], "in "),
        (pages.parts([-1]), [0], "pages -1"),
        (pages.parts([6]), [0], "of memory that has 6"),
        (pages.parts([0, 1]), [0], "on one side"),
    ):
        with pytest.raises(ValueError, match=problem):
            device.backend.encode(pages.codec, parts, device.pool, offsets)
    with pytest.raises(ValueError, match="of memory that has 6"):
        device.backend.decode(pages.codec, device.pool, [0], pages.parts([6]))
    nothing = device.backend.decode(pages.codec, device.pool, [], pages.parts([]))
    device.complete()
    assert (nothing.wait(0), nothing.good.tolist()) == (True, [])
    assert (device.memory == FILL).all()


def test_without_verdicts_nothing_is_good(kernels: Callable[..., None] | None) -> None:
    """A launch that fails leaves nothing that could be taken for a copy, and nothing of it runs on."""
    fake, pages = FakeCuda(), CodedPages("fused")

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("failed", "the kernels do not run")

    with opened(fake) as cuda:
        cuda._coder = CudaCoder(
            cuda._driver, cuda._streams, buffer=cuda._buffer, on_device=cuda._on_device, launch=fail
        )
        pool = cuda.make_pool(64 * MIB)
        fake.is_held = True
        with pytest.raises(DeviceError, match="do not run"):
            cuda.encode(pages.codec, pages.parts([0, 1]), pool, [0, SLOT])
        assert not any(fake.streams.values()), "what was asked for before has been waited for"
        cuda._coder = CudaCoder(
            cuda._driver,
            cuda._streams,
            buffer=cuda._buffer,
            on_device=cuda._on_device,
            launch=lambda *_, **__: None,
        )
        asked = cuda.encode(pages.codec, pages.parts([0, 1]), pool, [0, SLOT])
        assert (asked.is_done, asked.good.tolist()) == (False, [False, False])
        fake.run_streams()
        fake.is_held = False
        assert asked.wait(0)
        assert pool.close()


def test_where_the_kernels_can_not_be_had_the_host_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, asked = CodedPages("fused"), []

    def look(index: int, element: str) -> bool:
        asked.append((index, element))
        return False

    monkeypatch.setattr("tierkv.device.cuda.has_codec", look)
    with opened(FakeCuda()) as cuda:
        assert not cuda.codes(pages.codec)
        assert not cuda.codes(pages.codec)
        assert asked == [(0, "float16")], "it is looked for once"
    fake = FakeCuda()
    with opened(fake) as cuda:
        fake.fails["cuCtxPushCurrent_v2"] = [700]
        assert not cuda.codes(pages.codec), "of a device that is lost nobody is told by an exception"
    assert len(asked) == 1
    assert CpuBackend().codes(pages.codec)
    assert is_aligned(pages.codec)


@pytest.mark.parametrize("full", [[2], [0, 2]], ids=["none", "half of it"])
def test_where_an_engine_left_no_memory_on_the_gpu_the_host_codes(
    full: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out by a copy it would cost the copy's blocks, and the pool, again and again."""
    monkeypatch.setattr("tierkv.device.cuda.has_codec", lambda index, element: True)
    pages, fake = CodedPages("fused"), FakeCuda()
    with opened(fake) as cuda:
        fake.fails["cuMemAlloc_v2"] = list(full)
        assert not cuda.codes(pages.codec)
        assert (fake.calls.count("cuMemAlloc_v2"), fake.calls.count("cuMemFree_v2")) == (len(full), len(full) - 1)
        assert not cuda.codes(pages.codec)
        assert fake.calls.count("cuMemAlloc_v2") == len(full), "it is tried once"
        assert cuda.codes(CodedPages("grouped").codec), "which needs other memory, and gets it"
    assert not fake.broken


def test_what_coding_needs_is_there_before_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.device.cuda.has_codec", lambda index, element: True)
    pages, fake = CodedPages("apart"), FakeCuda()
    with opened(fake) as cuda:
        cuda._coder = CudaCoder(
            cuda._driver, cuda._streams, buffer=cuda._buffer, on_device=cuda._on_device, launch=lambda *_, **__: None
        )
        assert cuda.codes(pages.codec)
        large = {name: cuda._buffers[name] for name in ("raw", "coded")}
        arena = host()
        for asked in (
            cuda.encode(pages.codec, pages.parts([0, 1]), arena, [0, SLOT]),
            cuda.decode(pages.codec, arena, [0, SLOT], pages.parts([0, 1])),
        ):
            assert asked.wait(20)
        assert {name: cuda._buffers[name] for name in large} == large
