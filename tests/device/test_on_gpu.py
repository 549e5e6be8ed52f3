"""What only a GPU shows. `scripts/gpu-check` runs these; elsewhere they are skipped.

TIERKV_TEST_GPU is the index of the GPU (0).
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.desk import SECONDS, Arena, FrontSide
from tierkv.core.instructions import CopyDone, DeviceHealth, Download, PoolReady, Stop, Stopped, Upload
from tierkv.device import cuda as cuda_device
from tierkv.device import reference
from tierkv.device.cuda import CudaBackend, Mover, choose_mover
from tierkv.device.cuda_driver import Driver
from tierkv.device.cuda_pool import CudaPool
from tierkv.device.layouts import PagedArray, PagedLayout
from tierkv.device.memory import HostMemory
from tierkv.device.probe import find_gpu, find_gpus
from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolFailed, PoolKind, PoolOffer, decode_pool_message
from tierkv.workers.channel import front_end
from tierkv.workers.device.config import DeviceWorkerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

GPU = int(os.environ.get("TIERKV_TEST_GPU", "0"))
REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 2**20
DONE_SECONDS = 30.0


@pytest.fixture(scope="module")
def backend() -> Iterator[CudaBackend]:
    try:
        made = CudaBackend(Driver(), GPU)
    except DeviceError as no_gpu:
        pytest.skip(f"{no_gpu.reason}: {no_gpu}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def torch(backend: CudaBackend) -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return found


@pytest.fixture
def pool(backend: CudaBackend) -> Iterator[CudaPool]:
    made = backend.make_pool(256 * MIB)
    yield made
    assert made.close()


@pytest.fixture
def host(backend: CudaBackend) -> Iterator[HostMemory]:
    """64 MiB, pinned where that can be."""
    memory = mmap.mmap(-1, 64 * MIB)
    made = HostMemory.of(memory)
    backend.register_host(made)
    yield made
    backend.unregister_host(made)


@pytest.fixture(params=["cupy", "torch"])
def mover(request: pytest.FixtureRequest, backend: CudaBackend, torch: Any, monkeypatch: pytest.MonkeyPatch) -> Mover:
    """Both that there are, each on its own."""
    if request.param == "cupy":
        pytest.importorskip("cupy")
    else:
        monkeypatch.setitem(sys.modules, "tierkv.device.cupy_mover", None)
        monkeypatch.delattr("tierkv.device.cupy_mover", raising=False)
    made = choose_mover(GPU, backend._on_device)
    assert made.__name__ == f"by_{request.param}"  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "_mover", made)
    return made


def random_bytes(num_bytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


# -------------------------------------------------------------------- the device


def test_a_gpu_is_the_one_that_torch_has_by_that_index(backend: CudaBackend, torch: Any) -> None:
    gpu = find_gpu(Driver(), GPU)
    properties = torch.cuda.get_device_properties(GPU)
    assert gpu.name == properties.name == backend.name
    assert gpu.total_bytes == properties.total_memory
    assert gpu.compute_capability == (properties.major, properties.minor)
    if hasattr(properties, "uuid"):
        assert gpu.uuid == f"GPU-{properties.uuid}" == backend.uuid


def test_a_gpu_that_does_not_exist_is_named(backend: CudaBackend) -> None:
    driver = Driver()
    with pytest.raises(DeviceError, match="does not exist") as error:
        CudaBackend(driver, len(find_gpus(driver)))
    assert error.value.reason == "no_such_device"


def test_pools_that_can_not_be_had_are_named(backend: CudaBackend) -> None:
    total = find_gpu(Driver(), GPU).total_bytes
    with pytest.raises(DeviceError) as error:
        backend.make_pool(total + 1)
    assert error.value.reason == "larger_than_memory"


def test_a_pool_is_smaller_where_others_have_the_memory(backend: CudaBackend) -> None:
    total = find_gpu(Driver(), GPU).total_bytes
    made = backend.make_pool(total)  # never all of it is free: there is a context
    assert 64 * MIB <= made.num_bytes < total
    assert made.problem.startswith(f"{total} bytes asked for")
    assert made.close()


def test_a_new_pool_holds_nothing_of_anybody_else(backend: CudaBackend, host: HostMemory) -> None:
    for _ in range(2):
        made = backend.make_pool(64 * MIB)
        host.bytes[:] = 7
        assert backend.download(made, [0], host, [0], 64 * MIB).wait(DONE_SECONDS)
        assert not host.bytes.any()
        host.bytes[:] = 9
        assert backend.upload(host, [0], made, [0], 64 * MIB).wait(DONE_SECONDS)
        assert made.close()


def test_host_memory_is_pinned_or_it_is_said_why_not(backend: CudaBackend, pool: CudaPool) -> None:
    memory = mmap.mmap(-1, 16 * MIB)
    made = HostMemory.of(memory)
    pinning = backend.register_host(made)
    assert pinning.is_pinned or pinning.why_not
    made.bytes[:] = random_bytes(16 * MIB)
    assert backend.upload(made, [0], pool, [0], 16 * MIB).wait(DONE_SECONDS)
    expected = made.bytes.copy()
    made.bytes[:] = 0
    assert backend.download(pool, [0], made, [0], 16 * MIB).wait(DONE_SECONDS)
    assert (made.bytes == expected).all()
    backend.unregister_host(made)


# -------------------------------------------------------------------- kernels against the reference


def arrays(torch: Any, device: str) -> dict[str, list[Any]]:
    """Of every kind that engines have."""
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int) -> Any:
        made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return made.to(device)

    unsplit = some(2, 6 * 16, 64)
    return {
        "K and V apart": [some(6, 16, 2, 64).view(torch.bfloat16) for _ in range(4)],
        "fused before the page": [some(2, 6, 16, 2, 64)[index] for index in range(2)],
        "HND as it lies": [PagedArray.of(some(6, 16, 2, 64).transpose(1, 2)).in_memory_order()],
        "HND in the order of its axes": [some(6, 16, 2, 64).transpose(1, 2)],
        "fused in the page": [some(6, 2, 2, 16, 64) for _ in range(3)],
        "latent, a width of no whole words": [some(6, 16, 73), some(6, 16, 73)],
        "large pages": [some(6, 70_001)],
        "padded pages": [some(6, 4096)[:, :4000]],
        "tokens in a row": [PagedArray.of(head).split_axis(0, 16) for head in unsplit],
    }


@pytest.mark.parametrize("shift", [0, 4, 1])
@pytest.mark.parametrize("place", ["the pool", "host memory"])
def test_pages_are_moved_as_the_reference_moves_them(
    backend: CudaBackend, torch: Any, pool: CudaPool, host: HostMemory, mover: Mover, place: str, shift: int
) -> None:
    here, there = arrays(torch, "cpu"), arrays(torch, f"cuda:{GPU}")
    torch.cuda.synchronize()
    for kind in here:
        layout, on_gpu = PagedLayout.of(here[kind]), PagedLayout.of(there[kind])
        slot_bytes = -(-layout.block_bytes // 4096) * 4096
        offsets = [2 * slot_bytes + shift, shift, slot_bytes + shift]
        expected = np.zeros(4 * slot_bytes, np.uint8)
        reference.gather(layout, [5, 0, 3], expected, offsets)
        slots: CudaPool | HostMemory = pool if place == "the pool" else host
        clear(backend, slots, 4 * slot_bytes)
        assert backend.gather(on_gpu, [5, 0, 3], slots, offsets).wait(DONE_SECONDS), kind
        assert (read(backend, slots, 4 * slot_bytes) == expected).all(), kind

        reference.scatter(expected, offsets, layout, [4, 1, 2])
        assert backend.scatter(slots, offsets, on_gpu, [4, 1, 2]).wait(DONE_SECONDS), kind
        pages, everything = list(range(6)), np.zeros(6 * slot_bytes, np.uint8)
        places = [page * slot_bytes for page in pages]
        reference.gather(layout, pages, everything, places)
        clear(backend, pool, 6 * slot_bytes)
        assert backend.gather(on_gpu, pages, pool, places).wait(DONE_SECONDS), kind
        assert (read(backend, pool, 6 * slot_bytes) == everything).all(), kind


def clear(backend: CudaBackend, slots: CudaPool | HostMemory, num_bytes: int) -> None:
    if isinstance(slots, HostMemory):
        slots.bytes[:num_bytes] = 0
    else:
        assert backend.zero(slots, [(0, num_bytes)]).wait(DONE_SECONDS)


def read(backend: CudaBackend, slots: CudaPool | HostMemory, num_bytes: int) -> np.ndarray:
    if isinstance(slots, HostMemory):
        return slots.bytes[:num_bytes].copy()
    target = HostMemory(np.full(num_bytes, 0xEE, np.uint8))  # of no pages of its own: it is not pinned
    assert backend.download(slots, [0], target, [0], num_bytes).wait(DONE_SECONDS)
    return target.bytes


def test_pages_in_host_memory_are_refused_before_a_kernel_touches_them(
    backend: CudaBackend, pool: CudaPool, mover: Mover
) -> None:
    layout = PagedLayout.of([np.zeros((2, 4096), np.uint8)])
    with pytest.raises(DeviceError, match="no GPU's memory"):
        backend.gather(layout, [0], pool, [0])
    assert backend.zero(pool, [(0, 4096)]).wait(DONE_SECONDS)  # the context is as it was


def test_many_blocks_and_pages_anywhere_are_all_moved(
    backend: CudaBackend, torch: Any, pool: CudaPool, mover: Mover
) -> None:
    layers = [torch.randint(0, 256, (400, 2048), dtype=torch.uint8, device=f"cuda:{GPU}") for _ in range(24)]
    torch.cuda.synchronize()
    layout = PagedLayout.of(layers)
    chance = random.Random(3)
    pages = chance.sample(range(400), 300)
    offsets = [slot * layout.block_bytes for slot in chance.sample(range(400), 300)]
    assert backend.gather(layout, pages, pool, offsets).wait(DONE_SECONDS)
    expected = torch.cat([layer[pages] for layer in layers], dim=1).cpu().numpy()
    found = read(backend, pool, 400 * layout.block_bytes).reshape(400, layout.block_bytes)
    assert (found[[offset // layout.block_bytes for offset in offsets]] == expected).all()


def test_staging_is_used_again_and_again(
    backend: CudaBackend, torch: Any, host: HostMemory, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "STAGING_BYTES", 8 * 4096)
    pages = torch.randint(0, 256, (500, 4096), dtype=torch.uint8, device=f"cuda:{GPU}")
    back = torch.zeros_like(pages)
    torch.cuda.synchronize()
    chosen = list(range(500))
    places = [place * 4096 for place in random.Random(1).sample(range(1000), 500)]
    assert backend.gather(PagedLayout.of([pages]), chosen, host, places).wait(DONE_SECONDS)
    assert backend.scatter(host, places, PagedLayout.of([back]), chosen).wait(DONE_SECONDS)
    assert torch.equal(back, pages)


# -------------------------------------------------------------------- order


def test_a_copy_comes_behind_what_the_engine_has_asked_for(
    backend: CudaBackend, torch: Any, pool: CudaPool, mover: Mover
) -> None:
    pages = torch.zeros((4, 4096), dtype=torch.uint8, device=f"cuda:{GPU}")
    layout = PagedLayout.of([pages])
    backend.gather(layout, [0], pool, [0]).wait(DONE_SECONDS)  # compiled by now
    torch.cuda.synchronize()
    stream, event = torch.cuda.Stream(GPU), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # some tenths of a second
        pages.fill_(5)
        event.record(stream)
    backend.wait_for(event)
    assert not event.query(), "the engine was done too early for this to show anything"
    assert backend.gather(layout, [2], pool, [0]).wait(DONE_SECONDS)
    assert (read(backend, pool, 4096) == 5).all()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        pages.fill_(6)
    backend.wait_for(backend.mark(stream.cuda_stream))
    assert backend.gather(layout, [2], pool, [0]).wait(DONE_SECONDS)
    assert (read(backend, pool, 4096) == 6).all()


def test_nothing_runs_on_the_default_stream(backend: CudaBackend, torch: Any, pool: CudaPool, host: HostMemory) -> None:
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # on it, a second or so
    done.record()
    assert backend.upload(host, [0], pool, [0], 4096).wait(DONE_SECONDS)
    assert backend.download(pool, [0], host, [0], 4096).wait(DONE_SECONDS)
    assert not done.query(), "the copies waited for the default stream"
    torch.cuda.synchronize()


def test_a_copy_that_is_under_way_is_not_done(backend: CudaBackend, torch: Any, pool: CudaPool) -> None:
    stream, event = torch.cuda.Stream(GPU), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        event.record(stream)
    backend.wait_for(event)
    pending = backend.zero(pool, [(0, 4096)])
    assert not pending.wait(0.001)
    assert pending.wait(DONE_SECONDS)
    assert pending.seconds > 0.0


# -------------------------------------------------------------------- between processes


class Worker(FrontSide):
    """A device worker as the supervisor starts it, with this process as its front and as an engine."""

    def __init__(self, num_bytes: int = 256 * MIB, device: str = str(GPU)) -> None:
        self.arena = Arena(64 * MIB)
        front, back = socket.socketpair()
        self.export, export = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.export.settimeout(60.0)  # a context takes seconds
        lifeline, self.lifeline_end = os.pipe()
        config = DeviceWorkerConfig(
            device=device,
            index=0,
            num_bytes=num_bytes,
            epoch=1,
            channel_fd=back.fileno(),
            export_fd=export.fileno(),
            arena_fd=self.arena.fd,
            arena_bytes=self.arena.num_bytes,
            lifeline_fd=lifeline,
            parent_pid=os.getpid(),
        )
        with back, export:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.workers.device.process", config.encode()],
                pass_fds=[back.fileno(), export.fileno(), self.arena.fd, lifeline],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        os.close(lifeline)
        super().__init__(front_end(front))

    def open(self, backend: CudaBackend) -> CudaPool:
        packet, fds, _flags, _address = socket.recv_fds(self.export, 65536, 4)
        offer = decode_pool_message(packet)
        assert isinstance(offer, PoolOffer), offer
        assert offer.uuid == backend.uuid
        fd = fds[0] if fds else -1
        mapped = backend.open_pool(PoolKind(offer.kind), offer.num_bytes, fd=fd, handle=offer.handle)
        for one in fds:
            os.close(one)
        return mapped

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS)

    def close(self) -> None:
        self.channel.close()
        os.close(self.lifeline_end)
        self.process.kill()
        self.process.wait(SECONDS)
        self.export.close()
        self.arena.close()


@pytest.fixture
def worker(backend: CudaBackend) -> Iterator[Worker]:
    made = Worker()
    yield made
    gc.collect()
    made.close()


def test_a_worker_hands_out_its_pool_and_copies_both_ways(backend: CudaBackend, worker: Worker) -> None:
    mapped = worker.open(backend)
    assert worker.wait_type(PoolReady).num_bytes == 256 * MIB
    expected = random_bytes(4 * MIB)
    worker.arena.view[: 4 * MIB] = expected.tobytes()
    worker.send(Upload(1, 4 * MIB, [0], [8 * MIB]))
    done = worker.answer(1)
    assert isinstance(done, CopyDone)
    assert done.seconds > 0.0
    target = HostMemory(np.zeros(4 * MIB, np.uint8))
    assert backend.download(mapped, [8 * MIB], target, [0], 4 * MIB).wait(DONE_SECONDS)
    assert (target.bytes == expected).all()

    target.bytes[:] = random_bytes(4 * MIB, seed=2)
    assert backend.upload(target, [0], mapped, [16 * MIB], 4 * MIB).wait(DONE_SECONDS)  # an engine stores
    worker.send(Download(2, 4 * MIB, [16 * MIB], [32 * MIB]))
    assert isinstance(worker.answer(2), CopyDone)
    assert bytes(worker.arena.view[32 * MIB : 36 * MIB]) == target.bytes.tobytes()
    health = worker.wait(lambda report: isinstance(report, DeviceHealth) and bool(report.device_name))
    assert isinstance(health, DeviceHealth)
    assert health.device_name == backend.name
    assert mapped.close()
    worker.send(Stop(SECONDS))
    worker.wait_type(Stopped)
    assert worker.process.wait(SECONDS) == 0


def test_a_worker_that_is_killed_in_the_middle_of_an_engines_copy_harms_neither_copy_nor_engine(
    backend: CudaBackend, torch: Any, worker: Worker, host: HostMemory, mover: Mover
) -> None:
    if host not in backend._registered:
        pytest.skip("memory can't be pinned here, so a copy to it is over when it was asked for")
    mapped = worker.open(backend)
    pages = torch.randint(0, 256, (64, 2 * MIB), dtype=torch.uint8, device=f"cuda:{GPU}")
    back = torch.zeros_like(pages)
    torch.cuda.synchronize()
    there, here = PagedLayout.of([pages]), PagedLayout.of([back])
    chosen, places = list(range(64)), [place * 2 * MIB for place in range(64)]
    assert backend.gather(there, chosen, mapped, places).wait(DONE_SECONDS)

    stream, event = torch.cuda.Stream(GPU), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000_000)  # seconds: as long as a process takes to die
        event.record(stream)
    backend.wait_for(event)
    pending = backend.download(mapped, [0], host, [0], 64 * MIB)
    assert not pending.is_done, "the copy was over before its pool's process was killed"
    worker.kill()
    assert not pending.is_done, "the process died too slowly for this to show anything"
    assert pending.wait(DONE_SECONDS)
    # The generations make it void; here it counts that it ended whole, and that the memory is still there.
    assert (host.bytes == pages[:32].cpu().numpy().reshape(-1)).all()
    assert backend.scatter(mapped, places, here, chosen).wait(DONE_SECONDS)
    assert torch.equal(back, pages)
    assert mapped.close()

    successor = Worker()
    again = successor.open(backend)
    assert backend.gather(there, chosen, again, places).wait(DONE_SECONDS)
    assert again.close()
    gc.collect()
    successor.close()


def test_a_pool_that_nobody_maps_any_more_is_given_back(backend: CudaBackend, torch: Any) -> None:
    free_before = torch.cuda.mem_get_info(GPU)[0]
    worker = Worker(num_bytes=1024 * MIB)
    mapped = worker.open(backend)
    worker.kill()
    assert mapped.close()
    worker.close()
    assert torch.cuda.mem_get_info(GPU)[0] > free_before - 512 * MIB


def test_a_worker_of_a_gpu_that_does_not_exist_says_so(backend: CudaBackend) -> None:
    worker = Worker(device="77")
    failed = decode_pool_message(worker.export.recv(65536))
    assert isinstance(failed, PoolFailed)
    assert "GPU 77 does not exist" in failed.problem
    assert worker.process.wait(SECONDS) == 2
    worker.close()


_OPENS_BY_HANDLE = """
import sys
import numpy as np
from tierkv.device.cuda import open_cuda_backend
from tierkv.device.memory import HostMemory
from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolKind
backend = open_cuda_backend(int(sys.argv[1]))
try:
    pool = backend.open_pool(PoolKind.IPC, int(sys.argv[2]), handle=bytes.fromhex(sys.argv[3]))
except DeviceError as error:
    print(error.reason)
    sys.exit(3)
found = HostMemory(np.zeros(4096, np.uint8))
backend.download(pool, [0], found, [0], 4096).wait(30)
assert (found.bytes == 5).all()
found.bytes[:] = 6
backend.upload(found, [0], pool, [4096], 4096).wait(30)
pool.close()
backend.close()
"""


def test_without_descriptors_another_process_has_the_pool_by_its_handle(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = backend._pools
    monkeypatch.setattr(pools, "make", lambda num_bytes: made_by_handle(backend, num_bytes))
    made = backend.make_pool(64 * MIB)
    assert made.kind == PoolKind.IPC
    source = HostMemory(np.full(4096, 5, np.uint8))
    assert backend.upload(source, [0], made, [0], 4096).wait(DONE_SECONDS)

    def open_it(handle: bytes) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _OPENS_BY_HANDLE, str(GPU), str(made.num_bytes), handle.hex()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = open_it(made.handle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (read(backend, made, 8192)[4096:] == 6).all()
    refused = open_it(bytes(64))
    assert (refused.returncode, refused.stdout) == (3, "no_ipc\n")
    assert made.close()


def made_by_handle(backend: CudaBackend, num_bytes: int) -> CudaPool:
    with backend._driver.current(backend._context):
        return backend._pools._make_ipc(num_bytes)


def test_a_pool_on_another_gpu_is_mapped_where_the_gpus_reach_each_other_or_refused(backend: CudaBackend) -> None:
    others = [gpu for gpu in find_gpus(Driver()) if gpu.index != GPU]
    if not others:
        pytest.skip("one GPU only")
    worker = Worker(num_bytes=64 * MIB, device=str(others[0].index))
    packet, fds, _flags, _address = socket.recv_fds(worker.export, 65536, 4)
    offer = decode_pool_message(packet)
    assert isinstance(offer, PoolOffer)
    assert offer.uuid != backend.uuid  # so no client asks for it: a node's pool is found by its GPU's uuid
    for one in fds:
        os.close(one)
    worker.close()
