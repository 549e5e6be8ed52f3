"""Size: what room would have been worth, asked by operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.node.core_calls import CoreCalls
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Reply, Request, Size, SizedTier, SizeReply


class Sizing:
    def __init__(self, core: CoreCalls) -> None:
        self._core = core
        self._state = core.state
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {Size: self._size}

    def _size(self, request: Size, _asker: Asker, now: float) -> Reply:
        state = self._state
        report = self._core.look(lambda: state.size_report(request.seconds, now))
        read_bytes, read_seconds = state.counts.nvme_read_bytes, state.counts.nvme_read_seconds
        return SizeReply(
            id=request.id,
            since=report.since,
            until=report.until,
            requests=report.requests,
            asked_tokens=report.asked_tokens,
            asked_seconds=report.asked_seconds,
            sample_began=report.sample_began,
            samples=report.samples,
            sampled_uses=report.sampled_uses,
            rate=report.rate,
            seen_bytes=report.seen_bytes,
            file_factor=report.file_factor,
            first_tokens=report.first_tokens,
            gains=report.gains,
            policy=state.limits.policy,
            tiers=tuple(
                SizedTier(tier.tier, tier.capacity_bytes, report.hit_tokens.get(tier.tier, 0)) for tier in state.tiers()
            ),
            saved_seconds=report.saved_seconds,
            regretted_tokens=report.regretted_tokens,
            regretted_seconds=report.regretted_seconds,
            more_gains=report.more_gains,
            prefill_tokens_per_second=state.limits.prefill_tokens_per_second,
            load_bytes_per_second=read_bytes / read_seconds if read_seconds else 0.0,
        )
