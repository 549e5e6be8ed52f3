"""The CUDA device on a driver that has none: which calls it makes, in which order, and what each refusal becomes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from tests.device.fake_cuda import GRANULARITY, FakeCuda
from tierkv.device import cuda as cuda_device
from tierkv.device import cuda_driver as cuda
from tierkv.device import probe, reference
from tierkv.device.cuda import CudaBackend
from tierkv.device.cuda_driver import Driver
from tierkv.device.cuda_pool import LEAST_BYTES, LEFT_FREE_BYTES
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory
from tierkv.errors import DeviceError, DeviceLost
from tierkv.wire.pools import PoolKind

MIB = 2**20
SLOT = 4096
BLOCK = 100


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


def reference_mover(
    stream: int,
    layout: PagedLayout,
    pages: Sequence[int],
    slots: tuple[int, int],
    offsets: Sequence[int],
    *,
    to_slots: bool,
) -> list[object]:
    """In the place of the kernel: the numpy reference, on memory that only says that it is a GPU's."""
    address, num_bytes = slots
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    if to_slots:
        MOVED[0].ask(stream, lambda: reference.gather(layout, pages, memory, offsets))
    else:
        MOVED[0].ask(stream, lambda: reference.scatter(memory, offsets, layout, pages))
    return []


MOVED: list[FakeCuda] = []


@contextlib.contextmanager
def opened(fake: FakeCuda, index: int = 0) -> Iterator[CudaBackend]:
    backend = CudaBackend(Driver(fake.load), index)
    backend._mover = reference_mover
    MOVED[:] = [fake]
    yield backend
    backend.close()
    MOVED.clear()
    assert fake.held() == {}


def refused(fake: FakeCuda, index: int = 0) -> DeviceError:
    with pytest.raises(DeviceError) as error:
        CudaBackend(Driver(fake.load), index)
    assert fake.held() == {}
    return error.value


def at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


# -------------------------------------------------------------------- what the header says


def test_structures_are_as_large_as_those_of_the_header() -> None:
    sizes = {
        cuda.MemLocation: 8,
        cuda.MemAllocationProp: 32,
        cuda.MemAccessDesc: 12,
        cuda.IpcMemHandle: 64,
        cuda.Uuid: 16,
    }
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
    places = {name: getattr(cuda.MemAllocationProp, name).offset for name, *_ in cuda.MemAllocationProp._fields_}
    assert places == {
        "type": 0,
        "requested_handle_types": 4,
        "location": 8,
        "win32_handle_meta_data": 16,
        "flags": 24,
    }


# -------------------------------------------------------------------- which device


def test_a_gpu_is_described_without_a_context(fake: FakeCuda) -> None:
    fake.gpus = 2
    found = probe.find_gpus(Driver(fake.load))
    assert [gpu.index for gpu in found] == [0, 1]
    assert found[1] == probe.Gpu(
        index=1,
        ordinal=11,
        name="Fake GPU",
        uuid="GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b",
        total_bytes=2**30,
        pci_bus_id="0000:FF:00.0",
        numa_node=-1,
        compute_capability=(9, 0),
        has_descriptors=True,
    )
    assert fake.retained == 0


def test_no_driver_is_named() -> None:
    def load(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(DeviceError, match="NVIDIA container runtime") as error:
        Driver(load)
    assert error.value.reason == "no_driver"


def test_a_driver_that_lacks_a_function_is_too_old(fake: FakeCuda) -> None:
    fake.missing = {"cuMemCreate"}
    error = refused(fake)
    assert (error.reason, str(error)) == ("versions", "the NVIDIA driver is too old: it has no cuMemCreate")


def test_no_gpu_is_named(fake: FakeCuda) -> None:
    fake.gpus = 0
    error = refused(fake)
    assert error.reason == "no_device"
    assert "CUDA_VISIBLE_DEVICES" in str(error)


def test_library_and_module_of_different_versions_are_named(fake: FakeCuda) -> None:
    fake.fails["cuInit"] = [cuda.SYSTEM_DRIVER_MISMATCH]
    error = refused(fake)
    assert error.reason == "versions"
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in str(error)
    assert "reboot" in str(error)


def test_an_error_that_the_driver_has_no_name_for_has_its_number(fake: FakeCuda) -> None:
    fake.fails["cuInit"] = [987]
    assert str(refused(fake)) == "cuInit: error 987 (no text)"


@pytest.mark.parametrize(
    ("index", "gpus", "problem"), [(7, 2, "there are 0 to 1"), (-1, 2, "there are 0 to 1"), (1, 1, "there is only 0")]
)
def test_an_index_that_does_not_exist_says_which_do(
    fake: FakeCuda, index: int, gpus: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.gpus = gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    error = refused(fake, index)
    assert error.reason == "no_such_device"
    assert problem in str(error)
    assert "'3,4'" in str(error)


def test_a_busy_gpu_is_named(fake: FakeCuda) -> None:
    fake.fails["cuDevicePrimaryCtxRetain"] = [cuda.DEVICE_UNAVAILABLE]
    error = refused(fake)
    assert error.reason == "busy"
    assert "compute mode" in str(error)


def test_a_gpu_without_room_for_a_context_is_out_of_memory(fake: FakeCuda) -> None:
    fake.fails["cuDevicePrimaryCtxRetain"] = [cuda.OUT_OF_MEMORY]
    assert refused(fake).reason == "out_of_memory"


def test_a_context_is_given_back_where_streams_can_not_be_had(fake: FakeCuda) -> None:
    fake.fails["cuStreamCreate"] = [cuda.OUT_OF_MEMORY]
    assert refused(fake).reason == "out_of_memory"


# -------------------------------------------------------------------- pools


def test_a_pool_is_made_mapped_exported_cleared_and_freed_in_that_order(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        fake.calls.clear()
        pool = backend.make_pool(100 * MIB + 1)
        assert (pool.kind, pool.num_bytes, pool.problem) == (PoolKind.VMM, 100 * MIB + 1, "")
        assert not os.get_inheritable(pool.fd)
        assert fake.calls == [
            "cuMemGetAllocationGranularity",
            "cuMemCreate",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemExportToShareableHandle",
            "cuMemRelease",
            "cuStreamCreate",
            "cuMemsetD8Async",
            "cuStreamSynchronize",
            "cuStreamDestroy_v2",
        ]
        fake.calls.clear()
        assert pool.close()
        assert pool.close()
        assert fake.calls == [*["cuStreamSynchronize"] * 3, "cuMemUnmap", "cuMemAddressFree"]


def test_another_process_maps_the_same_bytes(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB + 1)
        fake.calls.clear()
        theirs = backend.open_pool(PoolKind.VMM, pool.num_bytes, fd=pool.fd)
        assert fake.calls == [
            "cuMemGetAllocationGranularity",
            "cuMemImportFromShareableHandle",
            "cuMemAddressReserve",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemRelease",
        ]
        assert theirs.address != pool.address
        ctypes.memset(pool.address + GRANULARITY, 7, 5)
        assert at(theirs.address + GRANULARITY, 6) == b"\x07" * 5 + b"\0"
        assert pool.close()
        assert at(theirs.address + GRANULARITY, 5) == b"\x07" * 5  # it outlives who made it
        assert theirs.close()


def test_a_pool_larger_than_the_gpu_is_refused(fake: FakeCuda) -> None:
    with opened(fake) as backend, pytest.raises(DeviceError, match="more than Fake GPU has") as error:
        backend.make_pool(2**30 + 1)
    assert error.value.reason == "larger_than_memory"


def test_a_pool_is_as_large_as_others_leave_room_for(fake: FakeCuda) -> None:
    fake.free_bytes = 600 * MIB
    with opened(fake) as backend:
        pool = backend.make_pool(2**30)
        assert pool.num_bytes == (600 * MIB - LEFT_FREE_BYTES) // LEAST_BYTES * LEAST_BYTES
        assert pool.problem == (
            f"{2**30} bytes asked for, {pool.num_bytes} had: other processes have the rest of the GPU"
        )
        assert pool.close()


def test_a_gpu_that_is_full_has_no_pool(fake: FakeCuda) -> None:
    fake.free_bytes = LEFT_FREE_BYTES + LEAST_BYTES - 1
    with opened(fake) as backend, pytest.raises(DeviceError, match="nvidia-smi") as error:
        backend.make_pool(2**30)
    assert error.value.reason == "out_of_memory"


@pytest.mark.parametrize(
    "call",
    ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle", "cuMemsetD8Async"],
)
def test_whatever_fails_while_a_pool_is_made_gives_back_the_rest(fake: FakeCuda, call: str) -> None:
    with opened(fake) as backend:
        before = sorted(os.listdir("/proc/self/fd"))
        fake.fails[call] = [cuda.INVALID_VALUE]
        with pytest.raises(DeviceError, match=call):
            backend.make_pool(64 * MIB)
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_lost_device_is_told_apart(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        fake.fails["cuMemCreate"] = [700]
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            backend.make_pool(64 * MIB)


@pytest.mark.parametrize("how", ["the device says so", "the driver refuses"])
def test_without_descriptors_a_pool_has_an_ipc_handle(fake: FakeCuda, how: str) -> None:
    if how == "the device says so":
        fake.has_descriptors = False
    else:
        fake.fails["cuMemCreate"] = [cuda.NOT_SUPPORTED]
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        assert (pool.kind, pool.fd, len(pool.handle)) == (PoolKind.IPC, -1, 64)
        theirs = backend.open_pool(PoolKind.IPC, pool.num_bytes, handle=pool.handle)
        assert theirs.close()
        assert pool.close()


def test_without_a_shared_namespace_the_fix_is_named(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        with pytest.raises(DeviceError, match="--ipc=host") as error:
            backend.open_pool(PoolKind.IPC, 64 * MIB, handle=bytes(64))
        assert error.value.reason == "no_ipc"
        with pytest.raises(DeviceError, match="same GPU and the same driver") as error:
            backend.open_pool(PoolKind.VMM, 64 * MIB, fd=12345)
        assert error.value.reason == "no_ipc"
        with pytest.raises(DeviceError, match="3 bytes"):
            backend.open_pool(PoolKind.IPC, 64 * MIB, handle=b"abc")
        with pytest.raises(DeviceError, match="kind memfd"):
            backend.open_pool(PoolKind.MEMFD, 64 * MIB, fd=0)


def test_memory_that_can_not_be_exported_at_all_is_no_ipc(fake: FakeCuda) -> None:
    fake.has_descriptors = False
    fake.fails["cuIpcGetMemHandle"] = [cuda.NOT_SUPPORTED]
    with opened(fake) as backend, pytest.raises(DeviceError, match="can't be shared") as error:
        backend.make_pool(64 * MIB)
    assert error.value.reason == "no_ipc"


# -------------------------------------------------------------------- pinning


def test_host_memory_is_pinned_once_and_let_go(fake: FakeCuda) -> None:
    memory, other = HostMemory(np.zeros(SLOT, np.uint8)), HostMemory(np.zeros(SLOT, np.uint8))
    with opened(fake) as backend:
        assert backend.register_host(memory).is_pinned
        assert backend.register_host(memory).is_pinned
        assert backend.register_host(other).is_pinned
        backend.unregister_host(memory)
        backend.unregister_host(memory)
        assert list(fake.registered) == [other.address]


def test_a_limit_of_locked_memory_is_named_with_the_fix(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(np.zeros(SLOT, np.uint8))
    with opened(fake) as backend:
        fake.fails["cuMemHostRegister_v2"] = [cuda.OUT_OF_MEMORY, cuda.NOT_PERMITTED]
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2048))
        pinning = backend.register_host(memory)
        assert not pinning.is_pinned
        assert "1024 bytes and 4096 are to be pinned" in pinning.why_not
        assert "LimitMEMLOCK=infinity" in pinning.why_not
        monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert backend.register_host(memory).why_not == (
            "cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED (operation not permitted)"
        )


# -------------------------------------------------------------------- copies


def host(fill: int = 0, slots: int = 8) -> HostMemory:
    return HostMemory(np.full(slots * SLOT, fill, np.uint8))


def test_what_is_uploaded_is_downloaded_and_neighbours_go_as_one(fake: FakeCuda) -> None:
    source, target = host(), host(fill=9)
    for slot in range(8):
        source.bytes[slot * SLOT : slot * SLOT + BLOCK] = slot + 1
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        places = [SLOT, 2 * SLOT, 3 * SLOT, 7 * SLOT]
        up = backend.upload(source, places, pool, [0, SLOT, 2 * SLOT, 3 * SLOT], BLOCK)
        assert fake.copies == [("upload", 2 * SLOT + BLOCK), ("upload", BLOCK)]
        assert up.wait(0)
        assert up.seconds == 0.25
        assert backend.download(pool, [3 * SLOT, 0], target, [0, SLOT], BLOCK).wait(0)
        assert (target.bytes[:BLOCK] == 8).all()
        assert (target.bytes[SLOT : SLOT + BLOCK] == 2).all()
        assert (target.bytes[BLOCK:SLOT] == 9).all()
        backend.zero(pool, [(0, 2 * SLOT), (0, 0)])
        assert at(pool.address, 2 * SLOT) == bytes(2 * SLOT)
        assert at(pool.address + 3 * SLOT, 1) == b"\x08"
        assert pool.close()


def test_a_copy_is_done_when_its_event_has_come(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        fake.is_held = True
        up = backend.upload(host(fill=3), [0], pool, [0], BLOCK)
        down = backend.download(pool, [SLOT], host(), [0], BLOCK)
        assert not up.wait(0)
        assert (up.is_done, up.seconds) == (False, 0.0)
        fake.run_stream(backend._streams.stream("download"))  # streams are in no order
        assert down.is_done
        assert not up.is_done
        fake.run_streams()
        assert up.is_done
        assert up.is_done
        assert at(pool.address, BLOCK) == b"\x03" * BLOCK
        fake.is_held = False
        assert pool.close()


def test_what_was_half_asked_for_when_it_failed_runs_no_more(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        fake.is_held = True
        fake.fails["cuMemcpyHtoDAsync_v2"] = [0, cuda.INVALID_VALUE]
        with pytest.raises(DeviceError, match="cuMemcpyHtoDAsync_v2"):
            backend.upload(host(fill=3), [0, 2 * SLOT], pool, [0, SLOT], BLOCK)
        assert not any(fake.streams.values())
        fake.is_held = False
        assert pool.close()


def test_what_can_not_be_proven_to_have_ended_is_a_lost_device(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        fake.fails["cuMemcpyHtoDAsync_v2"] = [cuda.INVALID_VALUE]
        fake.fails["cuStreamSynchronize"] = [cuda.INVALID_VALUE]
        with pytest.raises(DeviceLost):
            backend.upload(host(), [0], pool, [0], BLOCK)
        up = backend.upload(host(), [0], pool, [0], BLOCK)
        fake.fails["cuEventQuery"] = [700, 700]
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            up.wait(1)
        assert pool.close()


def test_events_are_used_again(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        for _ in range(10):
            assert backend.upload(host(), [0], pool, [0], BLOCK).wait(0)
        assert len(fake.events) == 2
        assert pool.close()


def test_pages_go_to_a_pool_and_back(fake: FakeCuda) -> None:
    pages = np.arange(8 * BLOCK, dtype=np.uint8).reshape(8, BLOCK)
    back = np.zeros_like(pages)
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        backend.gather(PagedLayout.of([pages]), [5, 1], pool, [SLOT, 0])
        assert at(pool.address, BLOCK) == pages[1].tobytes()
        backend.scatter(pool, [0, SLOT], PagedLayout.of([back]), [2, 3])
        assert (back[2] == pages[1]).all()
        assert (back[3] == pages[5]).all()
        assert backend.gather(PagedLayout.of([pages]), [], pool, []).wait(0)
        assert pool.close()


def test_pages_go_to_host_memory_by_way_of_the_device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "STAGING_BYTES", 1024)  # four blocks at once
    pages = np.arange(20 * BLOCK, dtype=np.uint8).reshape(20, BLOCK)
    back, arena = np.zeros_like(pages), host(fill=9, slots=20)
    chosen, places = list(range(10)), [SLOT * (19 - 2 * place) for place in range(10)]
    with opened(fake) as backend:
        assert backend.gather(PagedLayout.of([pages]), chosen, arena, places).wait(0)
        for page, place in zip(chosen, places, strict=True):
            assert (arena.bytes[place : place + BLOCK] == pages[page]).all()
            assert (arena.bytes[place + BLOCK : place + SLOT] == 9).all()
        assert backend.scatter(arena, places, PagedLayout.of([back]), chosen).wait(0)
        assert (back[:10] == pages[:10]).all()
        assert not back[10:].any()


def test_a_part_of_a_slot_does_not_take_its_neighbour_along(fake: FakeCuda) -> None:
    pages = np.full((4, BLOCK), 5, np.uint8)
    arena = host(fill=9)
    with opened(fake) as backend:
        backend.gather(PagedLayout.of([pages]), [0, 1, 2], arena, [0, SLOT, 2 * SLOT])
    for slot in range(3):
        assert (arena.bytes[slot * SLOT : slot * SLOT + BLOCK] == 5).all()
        assert (arena.bytes[slot * SLOT + BLOCK : (slot + 1) * SLOT] == 9).all()


@pytest.mark.parametrize(("where", "problem"), [(11, "memory of GPU 11"), (None, "no GPU's memory")])
def test_pages_that_are_not_on_this_gpu_are_refused_before_a_kernel_touches_them(
    fake: FakeCuda, where: int | None, problem: str
) -> None:
    layout = PagedLayout.of([np.zeros((2, BLOCK), np.uint8)])
    with opened(fake) as backend:
        fake.pages_on = where
        for move in (
            lambda: backend.gather(layout, [0], host(), [0]),
            lambda: backend.scatter(host(), [0], layout, [0]),
        ):
            with pytest.raises(DeviceError, match=problem):
                move()
        assert fake.copies == []
        fake.pages_on = 10
        assert backend.gather(layout, [0], host(), [0]).wait(0)


def test_buffers_grow_and_an_engine_that_has_no_memory_left_is_told(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        with backend._driver.current(backend._context):
            small = backend._on_device(backend._streams.stream("pages"), np.arange(64, dtype=np.uint8))
            assert at(small, 64) == bytes(range(64))
            large = backend._on_device(backend._streams.stream("pages"), np.ones(2**20, np.uint8))
            assert at(large, 3) == b"\x01\x01\x01"
        assert len(fake.allocated) == 1
        fake.fails["cuMemAlloc_v2"] = [cuda.OUT_OF_MEMORY]
        layout = PagedLayout.of([np.zeros((2, BLOCK), np.uint8)])
        with pytest.raises(DeviceError, match="out of memory") as error:
            backend.gather(layout, [0], host(), [0])
        assert error.value.reason == "out_of_memory"


def test_nothing_is_asked_of_the_device_for_what_is_not_in_memory(fake: FakeCuda) -> None:
    layout = PagedLayout.of([np.zeros((2, BLOCK), np.uint8)])
    with opened(fake) as backend:
        pool = backend.make_pool(64 * MIB)
        fake.calls.clear()
        for refuse in (
            lambda: backend.gather(layout, [2], pool, [0]),
            lambda: backend.scatter(pool, [pool.num_bytes], layout, [0]),
            lambda: backend.scatter(host(), [8 * SLOT], layout, [0]),
            lambda: backend.upload(host(), [-1], pool, [0], 1),
            lambda: backend.download(pool, [0], host(), [0, 1], 1),
            lambda: backend.zero(pool, [(-1, 2)]),
        ):
            with pytest.raises(ValueError, match=r"pages|slots|blocks|bytes"):
                refuse()
        assert fake.calls == []
        assert pool.close()


# -------------------------------------------------------------------- order


def test_later_work_waits_for_what_an_engine_has_asked_for(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        backend.wait_for(None)
        backend.wait_for(SimpleNamespace(cuda_event=0))  # of torch, never recorded
        assert fake.waits == []
        backend.wait_for(SimpleNamespace(cuda_event=77))
        assert {event for _, event in fake.waits} == {77}
        assert len({stream for stream, _ in fake.waits}) == len(fake.streams) == 3
        mark = backend.mark(0x55)
        backend.wait_for(mark)
        assert len(fake.events) == 1
        assert fake.waits[-1][1] in fake.events
        del mark
        assert fake.events == {}
        with pytest.raises(ValueError, match="is no event"):
            backend.wait_for("an event")


def test_a_mark_that_can_not_be_recorded_is_destroyed(fake: FakeCuda) -> None:
    with opened(fake) as backend:
        fake.fails["cuEventRecord"] = [cuda.INVALID_VALUE]
        with pytest.raises(DeviceError):
            backend.mark(0x55)
        assert fake.events == {}


def test_what_moves_pages_is_chosen_with_the_context_current(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int]] = []

    def choose(index: int, on_device: object) -> object:
        found.append(list(fake.contexts))
        return reference_mover

    monkeypatch.setattr(cuda_device, "choose_mover", choose)
    pages = PagedLayout.of([np.zeros((2, BLOCK), np.uint8)])
    with opened(fake) as backend:
        backend._mover = None
        pool = backend.make_pool(64 * MIB)
        for _ in range(2):
            assert backend.gather(pages, [1], pool, [0]).wait(0)
        assert pool.close()
    assert found == [[backend._context]]


def test_calls_take_part_in_no_capture_of_a_graph_and_the_thread_has_its_own_mode_again(fake: FakeCuda) -> None:
    fake.capture_mode = 1
    backend = CudaBackend(Driver(fake.load), 0)
    pool = backend.make_pool(64 * MIB)
    with backend._driver.current(backend._context):
        assert fake.capture_mode == cuda.CAPTURE_RELAXED
    assert fake.capture_mode == 1
    fake.fails["cuThreadExchangeStreamCaptureMode"] = [cuda.INVALID_VALUE]
    with pytest.raises(DeviceError, match="CaptureMode"):
        backend.upload(host(), [0], pool, [0], BLOCK)
    assert fake.contexts == []
    pool.close()
    backend.close()
    assert fake.capture_mode == 1
    assert fake.broken == []


def test_a_thread_finds_its_own_context_after_every_call(fake: FakeCuda) -> None:
    fake.contexts = [0xABC]
    backend = CudaBackend(Driver(fake.load), 0)
    pool = backend.make_pool(64 * MIB)
    backend.upload(host(), [0], pool, [0], BLOCK).wait(0)
    fake.fails["cuMemcpyDtoHAsync_v2"] = [cuda.INVALID_VALUE]
    with pytest.raises(DeviceError):
        backend.download(pool, [0], host(), [0], BLOCK)
    pool.close()
    backend.close()
    assert fake.contexts == [0xABC]
    assert fake.broken == []
