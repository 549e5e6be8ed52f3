"""vLLM's own offloading (its tiering manager, memory and files) on a CPU.

vLLM refuses that in one method, since its worker copies by CUDA streams. Everything else of it, the manager, the shared
region that is the memory tier, and the `fs` tier, needs no GPU. So the spec below is vLLM's with another worker: one
thread that copies pages between the engine's cache and the region in the order in which it was told to, which is what a
stream does. Loaded by `spec_name` and `spec_module_path` of the OffloadingConnector's extra config.

Only whole chunks of one block each, and one cache group: what the benchmark configures.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnCpu(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> PageCopier:
        if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1 or self.config.canonical_layout:
            raise ValueError("this spec copies chunks of one block, of one cache group, as they are")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return PageCopier(kv_caches, region)


@dataclass(frozen=True, slots=True)
class Layer:
    """The pages of one layer on both sides, each a row of whole words: (blocks, words) and (chunks, words)."""

    engine: torch.Tensor
    region: torch.Tensor


class PageCopier(OffloadingWorker):
    """Owns the region, and the thread that copies."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._layers = [
            Layer(
                engine=canonical.tensor.view(torch.int8)[:, : canonical.page_size_bytes].view(torch.int64),
                region=region.create_next_worker_view(canonical.page_size_bytes).view(torch.int64),
            )
            for canonical in kv_caches.tensors
        ]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="page-copier")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, is_store: bool) -> bool:
        assert isinstance(chunks, CPULoadStoreSpec)
        rows = (_indices(blocks.block_ids), _indices(chunks.chunk_ids))
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, *rows, is_store)
        return True

    def _copy(self, job_id: int, blocks: torch.Tensor, chunks: torch.Tensor, is_store: bool) -> TransferResult:
        """Few and large copies, each of which lets go of the interpreter's lock."""
        start = time.perf_counter()
        moved = 0
        for layer in self._layers:
            if is_store:
                pages = layer.engine.index_select(0, blocks)
                layer.region.index_copy_(0, chunks, pages)
            else:
                pages = layer.region.index_select(0, chunks)
                layer.engine.index_copy_(0, blocks, pages)
            moved += pages.nbytes
        return TransferResult(
            job_id=job_id, success=True, transfer_size=moved, transfer_time=time.perf_counter() - start
        )

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        self._layers.clear()  # they hold the region open
        self._region.cleanup()


def _indices(ids: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))
