"""vLLM's own scheduler and the connector's two sides, around a model that is a hash: a block's bytes in each layer
follow from all tokens up to its end. The worker's hooks are called by vLLM's own code, in vLLM's order.

Before a step computes, all blocks that it would read are looked at; one wrong byte ends the test.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from tests.integrations.connector.living_node import wait_for
from tests.integrations.vllm.engine import BLOCK_TOKENS, full_attention, kv_config, transfer
from tierkv.integrations.vllm.connector import TierkvConnector

POISON = 0xA5
NULL_BLOCK = 0


def engine_kv_config(*specs: Any, num_blocks: int) -> Any:
    import tests.integrations.vllm.engine as made

    with patch.object(made, "NUM_BLOCKS", num_blocks):
        return kv_config(*specs)


class SmallEngine:
    def __init__(self, vllm_config: Any, endpoint: Path, *specs: Any, num_blocks: int = 16, **extra: Any) -> None:
        vllm_config.kv_transfer_config = transfer(
            kv_connector_extra_config={"endpoint": str(endpoint), "load_deadline_seconds": 60, **extra}
        )
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        self._owned = ExitStack()
        specs = specs or (full_attention(),)
        self.config = engine_kv_config(*specs, num_blocks=num_blocks)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = Scheduler(
            vllm_config,
            self.config,
            StructuredOutputManager(vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self._owned.callback(self.scheduler.shutdown)
        assert isinstance(self.scheduler.connector, TierkvConnector)
        self.connector = self.scheduler.connector
        self.worker = TierkvConnector(vllm_config, KVConnectorRole.WORKER, self.config)
        self._owned.callback(self.worker.shutdown)
        self._groups = [group.layer_names for group in self.config.kv_cache_groups]
        self.caches = {
            name: torch.full((num_blocks, 1, BLOCK_TOKENS, 64), 0, dtype=torch.float32)
            for names in self._groups
            for name in names
        }
        for cache in self.caches.values():
            cache.view(torch.uint8)[:] = POISON
        self.worker.register_kv_caches(self.caches)
        self.weights = "weights"
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Any] = {}
        self.computed: Counter[str] = Counter()  # tokens, by request
        self.stats: list[dict[str, Any]] = []
        self.events: list[Any] = []
        assert self.connector._scheduling._fingerprint.wait(60) is not None
        self.until(lambda: bool(self.connector._scheduling._scheduler._tokens), "the worker's session is known")

    # ---- requests

    def add(self, name: str, tokens: Sequence[int], *, answer: int = 1, **arguments: Any) -> Request:
        parameters = SamplingParams(max_tokens=answer, ignore_eos=True)
        parameters.update_from_generation_config({}, eos_token_id=127)
        request = Request(name, list(tokens), parameters, None, block_hasher=self._hasher, **arguments)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, name: str, tokens: Sequence[int], *, answer: int = 1, **arguments: Any) -> int:
        """How many tokens were computed for it."""
        self.add(name, tokens, answer=answer, **arguments)
        self.until(lambda: name in self.finished, f"{name} is answered")
        return self.computed[name]

    def until(self, condition: Any, what: str) -> None:
        def is_so() -> bool:
            self.step()
            return bool(condition())

        wait_for(is_so, what, 150)

    def wait_stored(self) -> None:
        """Until what was computed is stored, without a step, which would give up what has not begun."""
        self.worker._working._working._storer.submit(lambda: None).result(60)

    # ---- a step

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        output = self._execute(scheduled)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one

    def _execute(self, scheduled: Any) -> ModelRunnerOutput:
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        sampled: dict[str, list[int]] = {}
        with (
            patch.object(mixin, "get_kv_transfer_group", lambda: self.worker),
            patch.object(mixin, "get_forward_context", lambda: None),
            mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled) as told,
        ):
            for name, count in scheduled.num_scheduled_tokens.items():
                sampled[name] = self._compute(name, count)
        assert isinstance(told, KVConnectorOutput)
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=told,
        )

    def _compute(self, name: str, count: int) -> list[int]:
        """vLLM has counted the step's tokens as computed already."""
        self.computed[name] += count
        request = self.requests[name]
        end = request.num_computed_tokens
        first, full = (end - count) // BLOCK_TOKENS, end // BLOCK_TOKENS
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        self.check(name, first)
        for group, table in enumerate(tables):
            for block in range(first, full):
                if table[block] != NULL_BLOCK:
                    self._write(group, table[block], request.all_token_ids, block)
        return [(len(request.all_token_ids) * 7) % 100] if end == request.num_tokens else []

    def check(self, name: str, blocks: int) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for group, table in enumerate(tables):
            for block in range(blocks):
                if table[block] != NULL_BLOCK:
                    self._check_block(name, group, table[block], block)

    def _check_block(self, name: str, group: int, page: int, block: int) -> None:
        for layer in self._groups[group]:
            wanted = self._content(layer, self.requests[name].all_token_ids, block)
            found = self.caches[layer][page].view(torch.uint8).flatten()
            assert torch.equal(found, wanted), f"{name} computes with wrong bytes in block {block}, {layer}"

    def _write(self, group: int, page: int, tokens: Sequence[int], block: int) -> None:
        for layer in self._groups[group]:
            self.caches[layer][page].view(torch.uint8).flatten()[:] = self._content(layer, tokens, block)

    def _content(self, layer: str, tokens: Sequence[int], block: int) -> torch.Tensor:
        story = f"{self.weights} {layer} {list(tokens[: (block + 1) * BLOCK_TOKENS])}"
        size = self.caches[layer][0].nbytes
        return torch.frombuffer(bytearray(hashlib.shake_128(story.encode()).digest(size)), dtype=torch.uint8)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, and write over all of its memory."""
        assert self.scheduler.reset_prefix_cache()
        self.step()
        for cache in self.caches.values():
            cache.view(torch.uint8)[:] = POISON

    # ---- what was seen

    def count(self, name: str) -> float:
        """Of a statistic, since the start, in what vLLM was told."""
        return sum(stats.get(name, 0) for stats in self.stats)

    def close(self) -> None:
        self._owned.close()
