"""Our copies and torch's of the same bytes, taken in turn: what is measured is the time that an engine's
thread waits, from asking for a copy to knowing that it is done."""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu_check.report import Copy
from tierkv.device.backends import Backend, Pending, PoolMap
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory

LARGE_AIM, SCATTERED_AIM = 0.9, 0.7
DONE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`large_bytes` of one large copy in pieces of `large_block_bytes`; `blocks` of 16 tokens of a model with so many
    layers, heads and numbers a head, of two bytes each."""

    large_bytes: int = 2**30
    large_block_bytes: int = 16 * 2**20
    layers: int = 32
    heads: int = 8
    dim: int = 128
    blocks: int = 256
    rounds: int = 9

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return (16, self.heads, self.dim)

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * 16 * self.heads * self.dim * 2

    @property
    def host_bytes(self) -> int:
        return max(self.large_bytes, 2 * self.blocks * self.slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // 4096) * 4096


class Bench:
    """Owns host memory and a pool; `close` it."""

    def __init__(self, backend: Backend, device: str, scale: Scale) -> None:
        self._backend = backend
        self._device = torch.device(device)
        self._scale = scale
        self._memory = mmap.mmap(-1, scale.host_bytes)
        self.host = HostMemory.of(self._memory)
        self.host.bytes[:] = 1
        self.pinning = backend.register_host(self.host)
        self.pool = backend.make_pool(scale.host_bytes)
        self._chance = random.Random(5)

    def close(self) -> None:
        self._backend.unregister_host(self.host)
        assert self.pool.close()
        del self.host
        self._memory.close()

    def run(self) -> Iterator[Copy]:
        yield from self._large()
        yield from self._scattered()

    def _large(self) -> Iterator[Copy]:
        scale, backend, pool, host = self._scale, self._backend, self.pool, self.host
        size = scale.large_block_bytes
        count = scale.large_bytes // size
        places = [place * size for place in range(count)]
        pages = torch.ones((count, size), dtype=torch.uint8, device=self._device)
        layout, chosen = PagedLayout.of([pages]), list(range(count))
        there = torch.empty_like(pages)
        pinned = torch.ones((count, size), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        yield self._take(
            "within the GPU, large: pages to the pool",
            count * size,
            LARGE_AIM,
            lambda: backend.gather(layout, chosen, pool, places),
            lambda: there.copy_(pages),
        )
        yield self._take(
            "within the GPU, large: the pool to pages",
            count * size,
            LARGE_AIM,
            lambda: backend.scatter(pool, places, layout, chosen),
            lambda: there.copy_(pages),
        )
        yield self._take(
            "host to the pool, large",
            count * size,
            LARGE_AIM,
            lambda: backend.upload(host, places, pool, places, size),
            lambda: there.copy_(pinned, non_blocking=True),
        )
        yield self._take(
            "the pool to host, large",
            count * size,
            LARGE_AIM,
            lambda: backend.download(pool, places, host, places, size),
            lambda: pinned.copy_(there, non_blocking=True),
        )

    def _scattered(self) -> Iterator[Copy]:
        scale, backend, pool, host = self._scale, self._backend, self.pool, self.host
        num_pages, size = 2 * scale.blocks, scale.block_bytes
        layers = [
            torch.ones((num_pages, *scale.layer_shape), dtype=torch.bfloat16, device=self._device)
            for _ in range(2 * scale.layers)
        ]
        layout = PagedLayout.of(layers)
        assert layout.block_bytes == size
        pages = self._chance.sample(range(num_pages), scale.blocks)
        slots = self._some_slots()
        others = self._some_slots()
        flat = torch.ones(scale.blocks * size, dtype=torch.uint8, device=self._device)
        there = torch.empty_like(flat)
        pinned = torch.ones(scale.blocks * size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        total = scale.blocks * size
        ways: list[tuple[str, Callable[[], Pending], Callable[[], Any]]] = [
            (
                "within the GPU: pages to the pool",
                lambda: backend.gather(layout, pages, pool, slots),
                lambda: there.copy_(flat),
            ),
            (
                "within the GPU: the pool to pages",
                lambda: backend.scatter(pool, slots, layout, pages),
                lambda: there.copy_(flat),
            ),
            (
                "host to the pool",
                lambda: backend.upload(host, others, pool, slots, size),
                lambda: there.copy_(pinned, non_blocking=True),
            ),
            (
                "the pool to host",
                lambda: backend.download(pool, slots, host, others, size),
                lambda: pinned.copy_(there, non_blocking=True),
            ),
            (
                "pages to host",
                lambda: backend.gather(layout, pages, host, others),
                lambda: pinned.copy_(there, non_blocking=True),
            ),
            (
                "host to pages",
                lambda: backend.scatter(host, others, layout, pages),
                lambda: there.copy_(pinned, non_blocking=True),
            ),
        ]
        for name, ours, theirs in ways:
            yield self._take(f"{name}, blocks of 16 tokens", total, SCATTERED_AIM, ours, theirs)

    def _some_slots(self) -> list[int]:
        places = self._chance.sample(range(2 * self._scale.blocks), self._scale.blocks)
        return [place * self._scale.slot_bytes for place in places]

    def _take(
        self, name: str, num_bytes: int, aim: float, ours: Callable[[], Pending], theirs: Callable[[], Any]
    ) -> Copy:
        """The first round of each isn't counted: it compiles, and touches memory."""

        def done() -> None:
            assert ours().wait(DONE_SECONDS), f"{name}: not done in {DONE_SECONDS:g} s"

        def copied() -> None:
            theirs()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self._scale.rounds + 1):
            for work, taken in zip((done, copied), times, strict=True):
                begin = time.perf_counter()
                work()
                taken.append(time.perf_counter() - begin)
        mine, torchs = (statistics.median(taken[1:]) for taken in times)
        return Copy(name=name, num_bytes=num_bytes, ours=num_bytes / mine, torch=num_bytes / torchs, aim=aim)


def describe_pool(pool: PoolMap) -> str:
    return {"vmm": "a descriptor", "ipc": "an IPC handle", "memfd": "host memory"}[pool.kind]
