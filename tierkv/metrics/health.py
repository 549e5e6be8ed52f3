"""What is answered to who asks over HTTP how the node is.

    /livez     is the process to be restarted? 503 when the front's loop does not turn, or the supervisor is silent.
               Nothing that mends itself counts: a dead storage worker is replaced, a full disk is waited for.
    /readyz    may engines be sent here? 503 while it recovers, or stops. A tier that is down is no reason: what is in
               the other tiers is served.
    /healthz   is all in order? 503 with a list of what is not: a process that is dead or silent, a tier that is down.
               For people and alarms.

The body is the same for all three, JSON: `state` as in `tierkv status`, `problems` in words, `processes`, and of each
tier whether it takes new data, why not, and its failed file operations.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tierkv.metrics.snapshot import Snapshot

SILENT_SECONDS = 2.0
"""A loop that was asked and has not answered for so long is named in /healthz."""

DEAD_SECONDS = 10.0
"""And after so long it does not live any more."""


class TierAnswer(msgspec.Struct, frozen=True):
    state: str
    reason: str
    errors: int
    last_error: str


class HealthAnswer(msgspec.Struct, frozen=True):
    """The body."""

    state: str
    problems: list[str]
    processes: dict[str, str]
    tiers: dict[str, TierAnswer]


def answer(snapshot: Snapshot, silence_seconds: float) -> HealthAnswer:
    """`silence_seconds`: for how long the loop that makes snapshots has not answered."""
    problems = list(snapshot.problems)
    processes = dict(snapshot.processes)
    if silence_seconds >= SILENT_SECONDS:
        problems.insert(0, f"front: its loop has not answered for {silence_seconds:.0f} s")
        processes["front"] = "silent"
    tiers = {}
    for tier in snapshot.tiers:
        errors, last_error = snapshot.tier_errors.get(tier.tier, (0, ""))
        state = "ok" if tier.is_writable else "degraded"
        tiers[tier.tier] = TierAnswer(state, tier.reason or "", errors, last_error)
    return HealthAnswer(snapshot.state, problems, processes, tiers)


def is_alive(snapshot: Snapshot, silence_seconds: float) -> bool:
    return silence_seconds < DEAD_SECONDS and snapshot.processes.get("supervisor") != "silent"


def is_serving(snapshot: Snapshot, silence_seconds: float) -> bool:
    return silence_seconds < DEAD_SECONDS and snapshot.state in ("ready", "degraded")


def is_in_order(snapshot: Snapshot, silence_seconds: float) -> bool:
    return silence_seconds < SILENT_SECONDS and snapshot.state == "ready" and not snapshot.problems


PAGES: dict[str, Callable[[Snapshot, float], bool]] = {
    "/livez": is_alive,
    "/readyz": is_serving,
    "/healthz": is_in_order,
}


def page(path: str, snapshot: Snapshot, silence_seconds: float) -> tuple[int, bytes]:
    """HTTP status and body of one of PAGES."""
    status = 200 if PAGES[path](snapshot, silence_seconds) else 503
    return status, msgspec.json.format(msgspec.json.encode(answer(snapshot, silence_seconds))) + b"\n"
