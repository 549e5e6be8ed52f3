"""One prompt between the model and the node: load what is cached, store what is new.

Every use of the node is fenced. A fault of the cache is a miss: it can cost time, and never the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.client import Group, KeyChain
from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant
from tierkv.integrations.kv_blocks import BlockShape, CacheDestination, CacheSource

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CacheUse:
    """What the cache did for one request.

    `reused_tokens` = `host_tokens` + `nvme_tokens`: by the tier they lay in when the request came. `cached_tokens` is
    what the node had: more than was reused if time or room was short, which `reason` names. `stored_blocks` are
    those this request gave to the node (others were there already); `store_reason` says why not all. `fault` is
    the text of an exception of ours that was set aside so that the request could go on.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    reused_tokens: int = 0
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
    """What all requests of one model have in common."""

    group: Group
    shape: BlockShape
    config: Any
    load_deadline_seconds: float
    store_deadline_seconds: float


class Request:
    """`cache` is the library's own, and holds after `load` what was reused. At least one token is left to compute."""

    def __init__(self, settings: RequestSettings, tokens: torch.Tensor) -> None:
        self._settings = settings
        self._shape = settings.shape
        self._chain = KeyChain(settings.group.identity.group_key(), self._shape.block_tokens)
        self._known = tokens[0].numpy()
        self._next_block = 0  # the first one that hasn't been offered to the node
        self._bypassed = False
        self._stores = True
        self.tokens = tokens
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
        self.use.load_seconds = time.perf_counter() - started

    def _load(self) -> None:
        use, block_tokens = self.use, self._shape.block_tokens
        limit = (use.prompt_tokens - 1) // block_tokens
        keys = self._chain.extend(self._known)[: limit * KEY_BYTES]
        if not keys:
            return
        with self._settings.group.acquire(keys=keys, deadline_seconds=self._settings.load_deadline_seconds) as lease:
            use.reason = lease.reason
            use.cached_tokens = lease.cached_blocks * block_tokens
            if lease.blocks == 0:
                return
            destination = CacheDestination(self._shape, lease.blocks)
            valid = lease.copy_into(destination)
            if valid < lease.blocks:
                use.reason = lease.reason or Reason.REVOKED
            host_blocks = min(valid, lease.blocks - lease.nvme_blocks)
        if valid == 0:
            return
        destination.hand_to(self.cache, valid)
        use.reused_tokens = valid * block_tokens
        use.host_tokens = host_blocks * block_tokens
        use.nvme_tokens = use.reused_tokens - use.host_tokens
        use.loaded_bytes = valid * self._shape.block_bytes
        self._next_block = valid

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
        """Full blocks that the cache holds and the node hasn't been offered."""
        held: int = self.cache.get_seq_length()
        return held // self._shape.block_tokens - self._next_block

    def store(self) -> None:
        if self._bypassed or not self._stores or self.waiting_blocks <= 0:
            return
        started = time.perf_counter()
        self._fenced("storing", self._store)
        self.use.store_seconds += time.perf_counter() - started

    def _store(self) -> None:
        use, end = self.use, self._next_block + self.waiting_blocks
        tokens = self._known[: end * self._shape.block_tokens]
        keys = self._chain.extend(tokens[self._chain.num_tokens :])[: end * KEY_BYTES]
        with self._settings.group.reserve(
            tokens, first_block=self._next_block, keys=keys, deadline_seconds=self._settings.store_deadline_seconds
        ) as ticket:
            use.store_reason = ticket.reason
            if ticket.granted:
                ticket.copy_from(CacheSource(self.cache, self._shape))
                committed = ticket.commit()
                stored = committed.visible + committed.staged
                use.stored_blocks += stored
                use.stored_bytes += stored * self._shape.block_bytes
                use.store_reason = committed.reason or ticket.reason
            self._next_block += len(ticket.states)
        self._stores = use.store_reason is None  # what lies behind a gap would never be found

    def seal(self) -> None:
        """The request is finished: nothing will be appended to its blocks, they may go to NVMe."""
        if self._bypassed or self.use.stored_blocks == 0:
            return
        started = time.perf_counter()
        self._fenced("sealing", lambda: self._settings.group.seal(keys=self._chain.keys))
        self.use.store_seconds += time.perf_counter() - started

    def _fenced(self, what: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as fault:
            # A fault of the cache is a miss: whatever was raised here, the model can answer without it.
            log.warning("%s failed, the request goes on without the cache", what, exc_info=fault)
            self.bypass(f"{what}: {type(fault).__name__}: {fault}")
            return False
        return True


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
            self._request.store()
        elif self._request.waiting_blocks >= self._store_every_blocks:
            self._request.store()

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()
