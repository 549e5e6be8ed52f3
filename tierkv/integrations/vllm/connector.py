"""vLLM's names for what `integrations.connector` does.

One instance lives in the scheduler's process and one in each worker's; they share nothing but the plan that goes out
with each step, and the report that comes back with its output.

    vLLM calls, in the scheduler            here
    on_new_request                          read the request: its identity, or why it goes without the cache
    get_num_new_matched_tokens              how much is cached (loads are always asynchronous)
    update_state_after_alloc                plan the load into the blocks it got
    build_connector_meta                    plan the stores, hand out the plan
    update_connector_output                 hear what workers loaded and stored
    request_finished_all_groups             seal, or give up; blocks are never held back

    in a worker, for each step
    handle_preemptions                      wait for copies out of blocks that may be overwritten now; begin loads
    wait_for_save                           begin stores
    get_transfer_results, ...               tell what ended
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.client import connect
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import NO_PAGE, GroupSpec, Pages, Plan, Report
from tierkv.integrations.connector.prefill_clock import CHUNK_TOKENS, LEAST_TOKENS, Chunk, PrefillClock
from tierkv.integrations.connector.scheduler import PrefixScheduler, Prompt, Scheduled, SchedulerSettings
from tierkv.integrations.connector.worker import PrefixWorker
from tierkv.integrations.vllm.adapters import Adapters
from tierkv.integrations.vllm.bypass import Bypass
from tierkv.integrations.vllm.codecs import Codecs
from tierkv.integrations.vllm.device import pages_on_device, uses_pools
from tierkv.integrations.vllm.events import StoredEvents
from tierkv.integrations.vllm.identity import EngineIdentity, owned_layers, shard_rank
from tierkv.integrations.vllm.options import Options
from tierkv.integrations.vllm.pages import EnginePages
from tierkv.integrations.vllm.requests import RequestReader
from tierkv.integrations.vllm.stats import (
    Differences,
    TierkvPromMetrics,
    TierkvStats,
    counted_events,
    numbers_of_scheduler,
    numbers_of_worker,
)
from tierkv.integrations.vllm.supported import check_engine
from tierkv.integrations.vllm.weights import ModelFingerprint, Weights

log = logging.getLogger(__name__)

T = TypeVar("T")

SECONDS_TOLD_EVERY = 1.0
"""The time that the connector takes of the scheduler changes with every step; alone it is told so often."""


class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: ReportMetadata) -> ReportMetadata:
        return ReportMetadata(self.report.merge(other.report))


class TierkvConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """What vLLM loads by `kv_connector_module_path`. ConfigError, UnsupportedEngine and UnsupportedModel at start say
    what can't be served rightly; behind that a fault of the cache is a miss."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_the_engine_does()
        options = Options.read(vllm_config.kv_transfer_config)
        check_engine(vllm_config, kv_cache_config, block_tokens=options.block_tokens)
        engine = EngineIdentity.of(vllm_config, kv_cache_config, salt=options.salt)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = SchedulerSide(vllm_config, kv_cache_config, options, engine)
        else:
            self._worker_side = WorkerSide(vllm_config, kv_cache_config, options, engine)

    # ---- what the class says of itself

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a later miss, and no more."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """It doesn't. vLLM asks before it loads the weights, with the options in hand: what is wrong in them is refused
        then, and not after a long load."""
        Options.of(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierkvStats:
        return TierkvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierkvPromMetrics:
        return TierkvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in the scheduler's process

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "called in a worker"
        return self._scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.null_block = gpu_block_pool.null_block.block_id

    def on_new_request(self, request: Any) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduling.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allotted(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        nvme = min(self._scheduling.nvme_tokens(request), num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - nvme, CacheHitSource.DISK: nvme}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> PlanMetadata:
        return PlanMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.hear(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._scheduling.events.take()

    def reset_cache(self) -> bool:
        """What was stored so far is never used again by this engine: its weights may be others now. Other engines keep
        what they have."""
        self._scheduling.reset()
        return True

    # ---- in a worker's process

    @property
    def _working(self) -> WorkerSide:
        assert self._worker_side is not None, "called in the scheduler"
        return self._worker_side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._working.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._working.begin(_plan_of(kv_connector_metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.begin(_plan_of(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: the engine computes nothing that waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are stored behind the step."""

    def wait_for_save(self) -> None:
        self._working.end(_plan_of(self._get_connector_metadata()))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._working.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_failed_blocks()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = self._working.report()
        return None if report is None else ReportMetadata(report)

    # ---- in both

    def get_kv_connector_stats(self) -> TierkvStats | None:
        numbers = (self._scheduler_side or self._working).take_numbers()
        if not numbers:
            return None
        stats = TierkvStats.of(numbers)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        (self._scheduler_side or self._working).close()


def _log_as_the_engine_does() -> None:
    """What we say goes where vLLM's own lines go, and looks like them, unless somebody has arranged it otherwise."""
    ours, engine = logging.getLogger("tierkv"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not engine.handlers:
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    ours.setLevel(engine.getEffectiveLevel())
    ours.propagate = False


def _plan_of(metadata: KVConnectorMetadata) -> Plan:
    assert isinstance(metadata, PlanMetadata)
    return metadata.plan


class SchedulerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options, engine: EngineIdentity) -> None:
        self.null_block = 0
        self.events = StoredEvents(vllm_config, kv_cache_config)
        self._fence = Fence()
        self._engine = engine
        self._client = connect(options.endpoint, data_dir=options.data_dir, node_user=options.node_user)
        self._codecs = Codecs(self._client, engine.kv_shape, self._fence)
        self._fingerprint = ModelFingerprint(vllm_config, data_dir=options.data_dir, known=self._ask_codec)
        self._fingerprint.start()
        self._adapters = Adapters(
            policy=options.adapters,
            exchangeable=envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
            data_dir=options.data_dir,
            known=self._ask_codec_under,
        )
        self._reader = RequestReader(engine, self._fingerprint, self._adapters, self._codecs)
        self._scheduler = PrefixScheduler(
            self._client,
            SchedulerSettings(
                block_tokens=engine.layout.block_tokens,
                ranks=engine.parallel.shards,
                load_deadline_seconds=options.load_deadline_seconds,
                uses_pools=uses_pools(options.device, vllm_config.device_config.device_type),
            ),
            self._fence,
        )
        self._say_hello(engine)
        self._prefills = PrefillClock()
        self._requests: dict[str, Any] = {}  # those that use the cache, until they are finished
        self._bypassed: dict[str, int] = {}
        self._computing: set[str] = set()  # of the last step, until they are finished; also those without the cache
        self._differences = Differences()
        self._has_acted = True  # since vLLM last asked for numbers: only then something can have been counted
        self._told: tuple[int, ...] = ()
        self._seconds_told_at = 0.0

    def _ask_codec(self, weights: Weights) -> None:
        if not weights.epoch:
            self._codecs.prepare(weights.fingerprint)

    def _ask_codec_under(self, adapter: str) -> None:
        weights = self._fingerprint.result
        if weights is not None and not weights.epoch:
            self._codecs.prepare(weights.fingerprint, adapter)

    def _say_hello(self, engine: EngineIdentity) -> None:
        layout = engine.layout
        log.info(
            "tierkv: node at %s (%s), blocks of %d tokens and %d bytes a rank, %d ranks; used once the weights "
            "have been read",
            self._client.endpoint,
            self._client.problem or "connected",
            layout.block_tokens,
            layout.total_block_bytes,
            engine.parallel.shards,
        )

    def on_new_request(self, request: Any) -> None:
        self._timed("reading a request", lambda: self._add(request), None)

    def _add(self, request: Any) -> None:
        read = self._reader.read(request)
        if isinstance(read, Bypass):
            self._bypass(read)
            return
        spec = GroupSpec(
            identity=read.identity,
            model_name=read.model_name,
            adapter_name=read.adapter_name,
            manifest=read.manifest,
            kv_shape=read.kv_shape,
        )
        if read.uncoded is not None:
            self._scheduler.counts.uncoded[read.uncoded] += 1
        self._requests[request.request_id] = request
        self._scheduler.add(
            Prompt(
                request=request.request_id,
                spec=spec,
                tokens=lambda begin, end: read.tokens[begin:end],
                extras=read.extras,
                loads=read.may_load,
            )
        )

    def _bypass(self, bypass: Bypass) -> None:
        first_of_its_kind = bypass.reason not in self._bypassed
        self._bypassed[bypass.reason] = self._bypassed.get(bypass.reason, 0) + 1
        if first_of_its_kind:
            log.info("request without the cache (the first for this reason; metrics count them): %s", bypass)

    def matched(self, request: Any, num_computed_tokens: int) -> int | None:
        nothing: int | None = 0
        return self._timed(
            "asking the node",
            lambda: self._matched(request, num_computed_tokens),
            nothing,
        )

    def _matched(self, request: Any, num_computed_tokens: int) -> int | None:
        if not self._reader.still_holds(request):
            return 0
        return self._scheduler.matched(
            request.request_id, num_computed_tokens, request.num_tokens, others_compute=bool(self._computing)
        )

    def allotted(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._timed(
            "planning a load",
            lambda: self._scheduler.allotted(
                request.request_id,
                num_external_tokens,
                lambda first, end: self._pages(blocks.get_block_ids(), first, end),
            ),
            None,
        )

    def nvme_tokens(self, request: Any) -> int:
        return self._scheduler.nvme_tokens(request.request_id)

    def step(self, scheduler_output: Any) -> Plan:
        started = time.perf_counter()
        chunks: list[Chunk] = []
        added, total = scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        if total - len(added) >= LEAST_TOKENS - 1:  # in most steps there is a token for each request
            chunks = self._fence.run("timing a step", lambda: self._chunks(scheduler_output), chunks)
        self._prefills.begin(chunks, total)
        scheduled: list[Scheduled] = []
        try:  # and not by way of the fence's `run`: most steps end with what is found here
            scheduled = self._scheduled(scheduler_output)
        except Exception as fault:  # noqa: BLE001 - as behind every fence
            self._fence.caught("looking at a step", fault)
        plan = self._scheduler.step(scheduled, is_idle=total == 0)
        if plan.stores:
            self._has_acted = True
            self._fence.run("noting events", lambda: self.events.planned(plan, self._requests), None)
        self._scheduler.counts.seconds += time.perf_counter() - started
        return plan

    def hear(self, connector_output: Any) -> None:
        """Two things, so that a fault in the one leaves the other as it is."""
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._timed("hearing the workers", lambda: self._hear(metadata.report), None)
        ended = connector_output.finished_recving
        if ended:
            self._timed("hearing of loads", lambda: self._scheduler.loaded(ended), None)

    def _hear(self, report: Report) -> None:
        for request, first_block, blocks in self._scheduler.report(report):
            self.events.stored(request, first_block, blocks)

    def finished(self, request: Any) -> None:
        self._computing.discard(request.request_id)
        self._requests.pop(request.request_id, None)
        self._timed("ending a request", lambda: self._scheduler.finished(request.request_id), None)

    def reset(self) -> None:
        log.warning(
            "tierkv: the engine's caches were reset with the connector's. Its weights may be others now: until it is "
            "restarted it uses only what it computes from now on, and keeps that in the node's memory only"
        )
        self._engine = self._engine.renewed()
        self._reader = RequestReader(self._engine, self._fingerprint, self._adapters, self._codecs)
        self._scheduler.reset()

    def close(self) -> None:
        self._fingerprint.close()
        self._adapters.close()
        self._codecs.close()
        self._scheduler.close()
        self._client.close()

    def take_numbers(self) -> dict[str, Any]:
        """vLLM asks after every step, also an empty one, in the order in which they were planned. The time taken, which
        changes with each, is told with the rest or once a second."""
        try:
            self._prefills.end()
        except Exception as fault:  # noqa: BLE001 - as behind every fence
            self._fence.caught("timing a step", fault)
        if not self._has_acted:
            return {}
        self._has_acted = False
        counts, faults = self._scheduler.counts, self._fence.faults
        told, now = counted_events(counts, self._bypassed, faults), time.monotonic()
        if told == self._told and now < self._seconds_told_at + SECONDS_TOLD_EVERY:
            return {}
        self._told, self._seconds_told_at = told, now
        return self._differences.take(numbers_of_scheduler(counts, self._bypassed, faults))

    def _chunks(self, scheduler_output: Any) -> list[Chunk]:
        """Of prompts."""
        added, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return [
            Chunk(self._scheduler.group_of(name), before, added[name])
            for name, before in computed
            if added[name] >= CHUNK_TOKENS
        ]

    def _scheduled(self, scheduler_output: Any) -> list[Scheduled]:
        """Of the step's requests those of which something is to be stored, as they will be behind it."""
        added, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        if self._computing != added.keys():
            self._computing = set(added)
        is_due = self._scheduler.is_due
        due = [
            (name, computed + added[name])
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if is_due(name, computed + added[name])
        ]
        for new in scheduler_output.scheduled_new_reqs:
            computed = new.num_computed_tokens + added[new.req_id]
            if is_due(new.req_id, computed):
                due.append((new.req_id, computed))
        return [
            self._as_scheduled(scheduler_output, name, computed)
            for name, computed in due
            if self._reader.still_holds(self._requests[name])
        ]

    def _as_scheduled(self, scheduler_output: Any, name: str, computed_tokens: int) -> Scheduled:
        tables = scheduler_output.kv_connector_block_state
        return Scheduled(
            request=name,
            computed_tokens=computed_tokens,
            known_tokens=self._requests[name].num_tokens,
            pages=lambda first, end: self._pages(tables.get_block_ids(name), first, end),
        )

    def _pages(self, block_ids: tuple[list[int], ...], first: int, end: int) -> Pages:
        return tuple(
            tuple(NO_PAGE if block == self.null_block else block for block in group[first:end]) for group in block_ids
        )

    def _timed(self, what: str, action: Callable[[], T], otherwise: T) -> T:
        started = time.perf_counter()
        self._has_acted = True
        result = self._fence.run(what, action, otherwise)
        self._scheduler.counts.seconds += time.perf_counter() - started
        return result


class WorkerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options, engine: EngineIdentity) -> None:
        self._engine = engine
        self._layers = owned_layers(kv_cache_config)
        self._rank = shard_rank(vllm_config.parallel_config)
        self._fence = Fence()
        self._client = connect(options.endpoint, data_dir=options.data_dir, node_user=options.node_user)
        self._wanted_device = options.device
        self._pages: EnginePages | None = None
        self._worker: PrefixWorker | None = None
        self._begun: Plan | None = None
        self._failed_blocks: set[int] = set()
        self._differences = Differences()

    def register(self, kv_caches: dict[str, Any]) -> None:
        self._pages = EnginePages(kv_caches, self._layers, self._engine.layout.block_bytes)
        self._worker = PrefixWorker(
            self._client,
            self._pages,
            self._fence,
            rank=self._rank,
            check=self._engine.check_same,
            on_device=pages_on_device(self._pages, self._wanted_device),
        )

    def begin(self, plan: Plan) -> None:
        """Once for each plan, by whichever hook comes first."""
        if plan is self._begun:
            return
        self._begun = plan
        self._mark()
        self._working.begin_step(plan)

    def end(self, plan: Plan) -> None:
        self._mark()
        self._working.end_step(plan)

    def results(self) -> KVConnectorTransferResults:
        """Where it is known which blocks were not filled, vLLM keeps the others (it can tell blocks apart only while
        there is one page group); else the request begins anew."""
        finished = self._working.take_finished()
        failed = set(finished.failed)
        if len(self._layers) == 1:
            for request, blocks in finished.failed_pages.items():
                self._failed_blocks.update(blocks)
                failed.discard(request)
        return KVConnectorTransferResults(finished_recving=finished.requests, failed_recving=failed)

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> Report | None:
        return self._working.take_report()

    def take_numbers(self) -> dict[str, Any]:
        if self._worker is None:
            return {}
        numbers = numbers_of_worker(self._worker.take_counts(), {})
        return numbers | self._differences.take({"faults": dict(self._fence.faults)})

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._client.close()

    @property
    def _working(self) -> PrefixWorker:
        assert self._worker is not None, "no KV caches were registered"
        return self._worker

    def _mark(self) -> None:
        assert self._pages is not None, "no KV caches were registered"
        self._pages.computed()
