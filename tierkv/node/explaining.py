"""Questions of operators about single prompts and about what goes on: Explain, Top. They change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.core.explain import FIELD_NAMES, Question
from tierkv.core.hottest import HotPrefix
from tierkv.core.recent_evictions import Evictions
from tierkv.core.value.cost import DOUBLING_TOKENS
from tierkv.node.core_calls import CoreCalls
from tierkv.node.waiting import Asker
from tierkv.wire.messages import (
    Error,
    ErrorCode,
    EvictionRow,
    Explain,
    ExplainReply,
    HotPrefixRow,
    Reply,
    Request,
    Top,
    TopReply,
)


class Explaining:
    def __init__(self, core: CoreCalls) -> None:
        self._core = core
        self._state = core.state
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Explain: self._explain,
            Top: self._top,
        }

    def _explain(self, request: Explain, _asker: Asker, now: float) -> Reply:
        unknown = sorted(set(request.wanted) - set(FIELD_NAMES))
        if unknown:
            problem = f"an identity has no field {unknown[0]!r}; it has {', '.join(FIELD_NAMES)}"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="wanted")
        if request.of is not None and not self._state.knows_group(request.of):
            problem = "this node knows no such namespace (any more)"
            return Error(id=request.id, code=ErrorCode.UNKNOWN_GROUP, problem=problem, field="of")
        question = Question(
            wanted=request.wanted,
            of=request.of,
            keys=request.keys,
            tokens=request.tokens,
            request=request.request,
            last=request.last,
        )
        found = self._core.look(lambda: self._state.explain(question))
        return ExplainReply(
            id=request.id,
            now=now,
            namespaces=found.namespaces,
            trace=found.trace,
            asked=found.asked,
            tokens=found.tokens,
            remembered=found.remembered,
            remembered_since=found.remembered_since,
        )

    def _top(self, request: Top, _asker: Asker, now: float) -> Reply:
        return TopReply(
            id=request.id,
            now=now,
            queues=self._core.queues(),
            hottest=tuple(self._hot(one) for one in self._core.look(lambda: self._state.hottest(request.most, now))),
            evictions=tuple(self._evicted(row) for row in self._core.evictions.latest(request.most)),
            prefill_tokens_per_second=self._state.limits.prefill_tokens_per_second,
        )

    def _hot(self, prefix: HotPrefix) -> HotPrefixRow:
        at_the_start = prefix.saved_tokens / self._state.prefill_tokens_per_second(prefix.group)
        return HotPrefixRow(
            group=prefix.group,
            model_name=self._state.model_name(prefix.group),
            key=prefix.key,
            first_token=prefix.first_token,
            tokens=prefix.tokens,
            hits=prefix.hits,
            saved_tokens=prefix.saved_tokens,
            saved_seconds=at_the_start * (1 + prefix.mean_depth / DOUBLING_TOKENS),
            recent_tokens=prefix.recent_tokens,
            since=prefix.since,
            last_used=prefix.last_used,
        )

    def _evicted(self, row: Evictions) -> EvictionRow:
        return EvictionRow(
            at=row.at,
            group=row.last.group,
            model_name=self._state.model_name(row.last.group),
            tier=row.last.tier,
            to=row.last.to,
            reason=row.last.reason,
            evictions=row.count,
            tokens=row.tokens,
            num_bytes=row.num_bytes,
        )
