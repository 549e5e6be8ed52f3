"""What a warm-up brings first is what is asked for next: on real traces, cut where a node is killed.

Every block of the trace's first part is an extent on NVMe, with the hits and the last use that it had. What is in
memory after a warm-up of a few percent is held against the requests that follow.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tierkv.core import warmup_plan
from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import ExtentRow, GroupFound, Read, ReadDone, Recovered, Rows
from tierkv.core.state import CacheState, Limits
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.warmup import WarmupScope
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.replay.trace import Step, Trace

TRACES = Path(__file__).parents[1] / "replay" / "traces"
PAGE = 4096
JOB = b"j" * 16
DOWNTIME_SECONDS = 900.0


@dataclass
class Known:
    """A block as it was when the node was killed."""

    parent: int | None
    index: int
    last_used: float
    hits: int


def history(steps: list[Step]) -> dict[int, Known]:
    found: dict[int, Known] = {}
    for step in steps:
        parent = None
        for index, block in enumerate(step.blocks):
            if block in found:
                found[block].hits += 1
                found[block].last_used = step.time
            else:
                found[block] = Known(parent, index, step.time, 0)
            parent = block
    return found


def started(blocks: dict[int, Known], keys: list[bytes], block_tokens: int, now: float) -> tuple[CacheState, bytes]:
    """A node that has found all of them on NVMe, and its group."""
    identity = Identity("ab" * 32, "", Layout("u8", (PAGE,), "x", block_tokens, "fake"))
    group = identity.group_key()
    slots = -(-len(blocks) // 64) * 64
    limits = Limits(
        host_bytes=slots * PAGE,
        slab_bytes=64 * PAGE,
        extent_bytes=PAGE,
        nvme_bytes=2**40,
        seal_after_seconds=10.0,
        session_bytes=2**40,
        inflight_writes=1,
        inflight_reads=16,
    )
    state = CacheState(limits, array("Q", bytes(8 * slots)))
    rows = []
    for block, known in blocks.items():
        parent = group if known.parent is None else keys[known.parent]
        first = known.index * block_tokens
        used = known.last_used
        rows.append(ExtentRow(keys[block], parent, first, keys[block], PAGE, 3 * PAGE, used, used, known.hits))
    state.worker_started(now)
    state.report(GroupFound(group, identity), now)
    state.report(Rows("ab" * 32, group, 0, rows), now)
    state.report(Recovered(0.0, 0, 0, 0, 0, 0, 0, 0, False), now)
    return state, group


def warm_up(state: CacheState, budget_bytes: int, now: float) -> None:
    effects = state.start_warmup(JOB, WarmupScope(budget_bytes=budget_bytes), now)
    while True:
        reads = [effect for effect in effects if isinstance(effect, Read)]
        effects = [done for read in reads for done in state.report(ReadDone(read.op, len(read.slots), 0.0), now)]
        if state.has_idle_work:
            effects += state.make_ready(now)
        elif not reads:
            break
    progress = state.warmup_progress(JOB)
    assert progress is not None
    assert progress.finished
    assert progress.promoted_bytes <= budget_bytes


def saved_seconds(trace: Trace, part: float, share: float) -> float:
    """Of prefill, of the next eighth of the requests, by a warm-up of `share` of the blocks after `part` of them."""
    steps = list(trace.steps)
    cut = round(len(steps) * part)
    blocks, keys = history(steps[:cut]), trace.block_keys()
    tokens = trace.groups[0].block_tokens
    now = steps[cut - 1].time + DOWNTIME_SECONDS
    state, group = started(blocks, keys, tokens, now)
    warm_up(state, round(share * len(blocks)) * PAGE, now)
    found = [state.match(group, b"".join(keys[b] for b in s.blocks)) for s in steps[cut : cut + len(steps) // 8]]
    return sum(prefill_seconds(match.host_blocks * tokens, 0, 12_000.0) for match in found)


@pytest.mark.parametrize(
    ("name", "least"), [("mooncake_conversation", 1.03), ("mooncake_synthetic", 1.5), ("agent_sessions", 0.95)]
)
def test_it_saves_more_of_what_follows_than_bringing_what_was_used_last(
    name: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few percent of what is on NVMe, cut at four points."""
    trace = read_trace(TRACES / f"{name}.jsonl.xz", ReadOptions())

    def saved(worth: Callable[..., float]) -> float:
        monkeypatch.setattr(warmup_plan, "worth", worth)
        return sum(saved_seconds(trace, part, share) for part in (0.25, 0.45, 0.65, 0.85) for share in (0.01, 0.03))

    ours, by_last_use = saved(warmup_plan.worth), saved(lambda extent, *_: extent.last_used)
    assert ours > least * by_last_use, f"{ours:.0f} s of prefill, by last use {by_last_use:.0f} s"
