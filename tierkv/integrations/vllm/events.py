"""vLLM's own cache events for blocks that this engine gave to the node: BlockStored, with `ownership` "tierkv".

Only what was stored is told: the node evicts on its own, and tells nobody here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tierkv.integrations.connector.plan import Plan, StoreJob

OWNERSHIP = "tierkv"
MOST_PENDING = 4_096
"""Stores whose end was not told yet; of more the oldest are forgotten, and no event tells of them."""


class StoredEvents:
    """Empty unless the engine's events are on."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        events = vllm_config.kv_events_config
        self._is_on = events is not None and events.enable_kv_cache_events
        self._block_size: int = vllm_config.cache_config.block_size
        self._units = self._block_size // (kv_cache_config.hash_block_size or self._block_size)
        self._pending: dict[tuple[str, int, int], BlockStored] = {}
        self._events: list[BlockStored] = []

    def planned(self, plan: Plan, requests: Mapping[str, Any]) -> None:
        """Remember what there will be to tell when these stores have ended: the requests may be gone by then."""
        if not self._is_on:
            return
        for job in plan.stores:
            request = requests.get(job.request)
            if request is not None:
                self._pending[job.request, job.first_block, job.blocks] = self._event(job, request)
        while len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]

    def stored(self, request: str, first_block: int, blocks: int) -> None:
        event = self._pending.pop((request, first_block, blocks), None)
        if event is not None:
            self._events.append(event)

    def take(self) -> list[BlockStored]:
        events, self._events = self._events, []
        return events

    def _event(self, job: StoreJob, request: Any) -> BlockStored:
        first, end, size = job.first_block, job.first_block + job.blocks, self._block_size
        hashes = _block_hashes(request, end, self._units)
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes[first:],
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=list(request.all_token_ids[first * size : end * size]),
            block_size=size,
            lora_id=None if lora is None else lora.lora_int_id,
            lora_name=None if lora is None else lora.lora_name,
            medium=MEDIUM_CPU,
            ownership=OWNERSHIP,
        )


def _block_hashes(request: Any, blocks: int, units: int) -> list[Any]:
    """Of the first `blocks` blocks. The engine may hash in smaller units: a block's hash is that of its last one."""
    return [maybe_convert_block_hash(one) for one in request.block_hashes[units - 1 : blocks * units : units]]
