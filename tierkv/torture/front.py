"""A front that checks all promises of its core while it works, with barriers where it has decided and not yet said so.

A broken promise ends it as the product's own front ends when its state can't be trusted, which a torture takes for
the failure that it is. Run in the place of tierkv.node.front (see node_with).
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

from tierkv.core.instructions import WriteDone
from tierkv.core.state import CacheState, Limits
from tierkv.node import front
from tierkv.node.control import FrontSettings
from tierkv.torture.barriers import reach

AUDIT_SHARE = 20
"""One part in so many of the time goes into audits."""

STAGED_SECONDS = 5.0
"""So long are blocks kept whose predecessor is missing: engines die all the time, and a reckoning waits for all room to
be back."""


class Audit:
    def __init__(self) -> None:
        self._due = 0.0

    def after(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def audited(state: CacheState, *arguments: Any, **keywords: Any) -> Any:
            answer = method(state, *arguments, **keywords)
            began = time.monotonic()
            if began >= self._due:
                state.check()
                ended = time.monotonic()
                self._due = ended + AUDIT_SHARE * (ended - began)
            return answer

        return audited


def held_commit(method: Callable[..., Any]) -> Callable[..., Any]:
    def commit(state: CacheState, *arguments: Any) -> Any:
        reach("before_commit")
        answer = method(state, *arguments)
        reach("committed")
        return answer

    return commit


def held_report(method: Callable[..., Any]) -> Callable[..., Any]:
    def report(state: CacheState, told: Any, now: float) -> Any:
        if isinstance(told, WriteDone):
            reach("before_report")
        answer = method(state, told, now)
        if isinstance(told, WriteDone):
            reach("reported")
        return answer

    return report


def limits_of(settings: FrontSettings, nvme_bytes: int, disk_bytes: int) -> Limits:
    return dataclasses.replace(_limits_of(settings, nvme_bytes, disk_bytes), staged_seconds=STAGED_SECONDS)


_limits_of = front.limits_of


def main() -> int:
    front.limits_of = limits_of
    CacheState.commit = held_commit(CacheState.commit)  # type: ignore[method-assign]
    CacheState.report = held_report(CacheState.report)  # type: ignore[method-assign]
    audit = Audit()
    of_engines = ("acquire", "release", "reserve", "commit", "abort", "seal", "end_session")
    of_devices = ("device_worker_started", "device_worker_died", "device_report")
    for name in (*of_engines, *of_devices, "report", "tick"):
        setattr(CacheState, name, audit.after(getattr(CacheState, name)))
    return front.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
