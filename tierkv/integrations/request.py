"""One prompt between the model and the node: load what is cached, store what is new.

The rules are the connector's; the one who asks also copies, so there is nobody to plan for. Every use of the node is
fenced: a fault of the cache can cost time, and never the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.client import DevicePool, Group
from tierkv.core.reasons import DAMAGE, Reason
from tierkv.errors import BrokenInvariant
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.prefill_clock import LEAST_TOKENS
from tierkv.integrations.connector.prefix import Prefix
from tierkv.integrations.connector.transfer import load_blocks, store_blocks
from tierkv.integrations.kv_blocks import CPU, BlockShape, CacheDestination, CacheSource


@dataclass(slots=True, kw_only=True)
class CacheUse:
    """What the cache did for one request.

    `reused_tokens` = `device_tokens` + `host_tokens` + `nvme_tokens`: by the tier they lay in when the request came, of
    which a GPU's pool is one. `cached_tokens` is what the node had: more than was reused if time or room was short,
    which `reason` names. `stored_blocks` are those this request gave to the node (others were there already);
    `store_reason` says why not all. Bytes are those in the node: of coded blocks, where the group has a codec. `fault`
    is the text of an exception of ours that was set aside so that the request could go on.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    reused_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    nvme_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    reason: Reason | None = None
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    store_reason: Reason | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """What all requests of one model have in common. `device` is the model's, `pool` the node's on it, if used."""

    group: Group
    shape: BlockShape
    config: Any
    fence: Fence
    load_deadline_seconds: float
    store_deadline_seconds: float
    device: torch.device = CPU
    pool: DevicePool | None = None


class Request:
    """`cache` is the library's own, and holds after `load` what was reused. At least one token is left to compute.
    `name` is the caller's id of the request: `tierkv why` finds it by that."""

    def __init__(self, settings: RequestSettings, tokens: torch.Tensor, name: str = "") -> None:
        self._settings = settings
        self._name = name
        self._shape = settings.shape
        self._known = tokens[0].cpu().numpy()
        self._prefix = Prefix(settings.group.key, self._shape.block_tokens, lambda begin, end: self._known[begin:end])
        self._bypassed = False
        self.tokens = tokens.to(settings.device)
        self.loaded_at = 0.0
        self.cache = DynamicCache(config=settings.config)
        self.use = CacheUse(prompt_tokens=tokens.shape[1])

    def bypass(self, fault: str) -> None:
        """From here on without the node."""
        self._bypassed = True
        self.use.fault = self.use.fault or fault

    def load(self) -> None:
        started = time.perf_counter()
        if not self._bypassed and not self._fenced("loading", self._load):
            self.cache = DynamicCache(config=self._settings.config)  # who knows how far the copy came
        self.loaded_at = time.perf_counter()
        self.use.load_seconds = self.loaded_at - started

    def _load(self) -> None:
        use, block_tokens = self.use, self._shape.block_tokens
        keys = self._prefix.keys(self._prefix.loadable_blocks(use.prompt_tokens))
        if not keys:
            return
        deadline, pool = self._settings.load_deadline_seconds, self._settings.pool
        with self._settings.group.acquire(keys=keys, deadline_seconds=deadline, name=self._name, device=pool) as lease:
            use.reason = lease.reason
            use.cached_tokens = lease.cached_blocks * block_tokens
            self._prefix.found(lease.cached_blocks)
            if lease.reason in DAMAGE:
                self._prefix.lost(lease.blocks)
            if lease.blocks == 0:
                return
            destination = CacheDestination(self._shape, lease.blocks, self._settings.device)
            loaded = load_blocks(lease, destination if pool is None else destination.on_device(pool))
        use.reason = loaded.reason
        if loaded.blocks < lease.blocks:
            self._prefix.lost(loaded.blocks)
        if loaded.blocks:
            destination.hand_to(self.cache, loaded.blocks)
        use.reused_tokens = loaded.blocks * block_tokens
        use.nvme_tokens = loaded.nvme_blocks * block_tokens
        use.device_tokens = loaded.device_blocks * block_tokens
        use.host_tokens = use.reused_tokens - use.nvme_tokens - use.device_tokens
        use.loaded_bytes = loaded.blocks * self._settings.group.block_bytes

    def computed(self, seconds: float) -> None:
        """What of the prompt was not reused has been computed, in `seconds`: the node reckons with that."""
        first_token = self.use.reused_tokens
        tokens = self.use.prompt_tokens - first_token
        if self._bypassed or tokens < LEAST_TOKENS:
            return
        report = self._settings.group.report_prefill
        self._settings.fence.run(
            "reporting", lambda: report(tokens=tokens, first_token=first_token, seconds=seconds), None
        )

    def add_token(self, token: int) -> None:
        """The next one of the answer, whose KV the cache gets with the token behind it."""
        self._known = np.append(self._known, token)

    def check_length(self) -> None:
        """The cache must hold all tokens but the last."""
        held, expected = self.cache.get_seq_length(), len(self._known) - 1
        if held != expected:
            raise BrokenInvariant(f"the library's cache holds {held} tokens, not {expected}: its answer is not usable")

    @property
    def waiting_blocks(self) -> int:
        """Full blocks that the cache holds and that are still to be given to the node."""
        return len(self._prefix.to_offer(self.cache.get_seq_length()))

    def store(self) -> None:
        if self._bypassed or not self.waiting_blocks:
            return
        started = time.perf_counter()
        self._fenced("storing", self._store)
        self.use.store_seconds += time.perf_counter() - started

    def _store(self) -> None:
        use, prefix = self.use, self._prefix
        waiting = prefix.to_offer(self.cache.get_seq_length())
        source, pool = CacheSource(self.cache, self._shape), self._settings.pool
        given = store_blocks(
            self._settings.group,
            source if pool is None else source.on_device(pool),
            keys=prefix.keys(waiting.stop),
            first_block=waiting.start,
            tokens=prefix.packed_tokens(waiting.start, waiting.stop),
            deadline_seconds=self._settings.store_deadline_seconds,
            device=pool,
        )
        use.stored_blocks += given.stored_blocks
        use.stored_bytes += given.stored_blocks * self._settings.group.block_bytes
        use.store_reason = given.reason
        prefix.give(waiting.stop)
        if not given.is_whole:
            prefix.end()

    def seal(self) -> None:
        """The request is finished: nothing will be appended to its blocks, they may go to NVMe."""
        if self._bypassed or self.use.stored_blocks == 0:
            return
        started = time.perf_counter()
        self._fenced("sealing", lambda: self._settings.group.seal(keys=self._prefix.keys(self._prefix.offered)))
        self.use.store_seconds += time.perf_counter() - started

    def _fenced(self, what: str, action: Callable[[], object]) -> bool:
        def whole() -> bool:
            action()
            return True

        def tell(fault: Exception) -> None:
            self.bypass(f"{what}: {type(fault).__name__}: {fault}")

        return self._settings.fence.run(what, whole, False, tell=tell)


class TokenWatch:
    """A streamer for the library: hands each token to the caller's streamer, then stores what has become full.

    The prompt's blocks are stored as soon as the first token is out, those of the answer `store_every_blocks` at a
    time. BrokenInvariant, before anything is stored, if the library computed the prompt behind what was loaded.
    """

    def __init__(self, request: Request, inner: Any, store_every_blocks: int) -> None:
        self._request = request
        self._inner = inner
        self._store_every_blocks = store_every_blocks
        self._prompt_seen = False
        self.first_token_at: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if self._inner is not None:
            self._inner.put(value)
        if not self._prompt_seen:  # the library puts the prompt first
            self._prompt_seen = True
            return
        self._request.add_token(int(value))
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
            self._request.check_length()
            self._request.computed(self.first_token_at - self._request.loaded_at)
            self._request.store()
        elif self._request.waiting_blocks >= self._store_every_blocks:
            self._request.store()

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()
