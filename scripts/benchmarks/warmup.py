"""What requests pay while a warm-up is running: `acquire` of a client that asks continuously, with one and without.

Each round is a new life of a real node, whose memory is empty, on the same data, which is more than its memory holds.
One tenant's data is warmed up; the client is another tenant, so that nothing it asks for is brought by the warm-up: a
prompt that is in memory, then one from NVMe, and so on. Only what was asked while the warm-up was at work counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.measure import Plan
from benchmarks.node import Node, NodeFailed, running_node
from benchmarks.prompts import SMOLLM2_BLOCK_BYTES, blocks_of_extent, make_identity, make_tokens
from benchmarks.report import Figure, Remark, of_values, quantile
from tierkv.client import Group, connect, connect_operator
from tierkv.client.operators import PROGRESS_SECONDS

QUESTION = "how much longer do requests wait while a warm-up is running?"

MOST_RATIO = 2.0
DEADLINE_SECONDS = 60.0

HOST_BYTES = 2 * 2**30
WARMED_PROMPTS = 16
WARMED_BLOCKS = 12 * blocks_of_extent(SMOLLM2_BLOCK_BYTES)  # 190 MiB: with the others, more than memory holds

SHORT = blocks_of_extent(SMOLLM2_BLOCK_BYTES)  # one extent
MEDIAN = 150  # 2,400 tokens, the median of the reference workload
HOT = 0
SHORTS = range(1, 49)
MEDIANS = range(49, 65)
WARMED = range(100, 100 + WARMED_PROMPTS)

MEMORY, ONE_EXTENT, FOUR_EXTENTS = "in memory", "one extent from NVMe", "2,400 tokens from NVMe"
KINDS = (MEMORY, ONE_EXTENT, FOUR_EXTENTS)


@dataclass(slots=True)
class Asked:
    """Seconds of each `acquire` by kind, round by round; and what the warm-ups did meanwhile."""

    seconds: list[dict[str, list[float]]] = field(default_factory=list)
    warmed_bytes: int = 0
    warmed_seconds: float = 0.0

    def of(self, kinds: tuple[str, ...]) -> list[float]:
        return [second for one in self.seconds for kind in kinds for second in one[kind]]

    def p99s(self, kinds: tuple[str, ...]) -> list[float]:
        """Of each round."""
        rounds = [[second for kind in kinds for second in one[kind]] for one in self.seconds]
        return [quantile(seconds, 0.99) for seconds in rounds if seconds]

    @property
    def rate(self) -> float:
        return self.warmed_bytes / self.warmed_seconds


def measure(plan: Plan) -> Iterator[Figure | Remark]:
    data = plan.directory / "data"
    _fill(data)
    rounds = plan.rounds(12, 2)
    without, beside, alone = Asked(), Asked(), Asked()
    for number in range(rounds):
        for warms in (True, False) if number % 2 else (False, True):
            _round(data, beside if warms else without, warms=warms, asks=True)
        if number % 4 == 0:
            _round(data, alone, warms=True, asks=False)
    yield from _figures(without, beside)
    rates = [beside.rate / 1e9], [alone.rate / 1e9]
    yield of_values("warm-up beside such a client", rates[0], unit="GB/s", beside="alone", limit=rates[1])
    yield Remark(
        f"{WARMED_PROMPTS * WARMED_BLOCKS * SMOLLM2_BLOCK_BYTES / 2**30:.1f} GiB to warm up, memory of "
        f"{HOST_BYTES / 2**30:.0f} GiB; {rounds} lives of the node each way, alternately"
    )


def _figures(without: Asked, beside: Asked) -> Iterator[Figure]:
    for name, kinds in (("all", KINDS), *((kind, (kind,)) for kind in KINDS)):
        with_it, without_it = beside.of(kinds), without.of(kinds)
        for share, most_ratio in ((0.5, None), (0.99, MOST_RATIO)):
            ours, others = quantile(with_it, share), quantile(without_it, share)
            p99s = beside.p99s(kinds)
            yield Figure(
                name=f"acquire, {name}, p{share * 100:g}",
                unit="ms",
                value=ours * 1e3,
                low=quantile(p99s if most_ratio else with_it, 0.1) * 1e3,
                high=quantile(p99s if most_ratio else with_it, 0.9) * 1e3,
                rounds=len(with_it),
                beside="without one",
                limit=others * 1e3,
                ratio=ours / others,
                most_ratio=most_ratio,
                note=f"{len(without_it)} without",
            )


# ---- what lies on NVMe


def _fill(data: Path) -> None:
    source = np.random.default_rng(0).integers(0, 256, (WARMED_BLOCKS, SMOLLM2_BLOCK_BYTES), np.uint8)
    with (
        running_node(data_dir=data, host_bytes=HOST_BYTES, session_bytes=HOST_BYTES) as node,
        connect(node.endpoint, timeout_seconds=DEADLINE_SECONDS) as client,
    ):
        asked = client.open(make_identity(SMOLLM2_BLOCK_BYTES))
        warmed = client.open(make_identity(SMOLLM2_BLOCK_BYTES, salt="warmed up"))
        for number in WARMED:
            _store(warmed, number, source)
        for number in (HOT, *SHORTS):
            _store(asked, number, source[:SHORT])
        for number in MEDIANS:
            _store(asked, number, source[:MEDIAN])


def _store(group: Group, number: int, source: np.ndarray) -> None:
    tokens = make_tokens(number, len(source))
    with group.reserve(tokens, deadline_seconds=DEADLINE_SECONDS) as ticket:
        ticket.copy_from(source)
        committed = ticket.commit()
    sealed = group.seal(tokens, wait="flushed", deadline_seconds=DEADLINE_SECONDS)
    if committed.visible != len(source) or sealed.flushed_blocks != len(source):
        raise NodeFailed(f"prompt {number} was not stored: {committed}, {sealed}")


# ---- a round


class _WarmUp:
    """One that runs in a thread, for as long as the block lasts at most."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._thread = threading.Thread(target=self._run)
        self._begun = threading.Event()
        self._stop = threading.Event()
        self._problem: Exception | None = None
        self.promoted_bytes = 0
        self.began = 0.0
        self.ended: float | None = None

    def __enter__(self) -> _WarmUp:
        self._thread.start()
        self._begun.wait(DEADLINE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)
        if self._problem is not None:
            raise self._problem

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    def was_at_work(self, moment: float) -> bool:
        """Its end is seen when it is asked about the next time."""
        return self.ended is None or moment < self.ended - PROGRESS_SECONDS

    def wait(self) -> None:
        self._thread.join(DEADLINE_SECONDS)

    def _run(self) -> None:
        try:
            with connect_operator(self._node.endpoint, timeout_seconds=DEADLINE_SECONDS) as operator:
                self.began = time.perf_counter()
                for progress in operator.warmup(tenant="warmed up"):
                    self.promoted_bytes = progress.promoted_bytes
                    self._begun.set()
                    if self._stop.is_set():
                        break
        except Exception as error:  # noqa: BLE001  told by who waits for this thread
            self._problem = error
        self.ended = time.perf_counter()
        self._begun.set()


def _round(data: Path, asked: Asked, *, warms: bool, asks: bool) -> None:
    with (
        running_node(data_dir=data, host_bytes=HOST_BYTES, session_bytes=HOST_BYTES) as node,
        connect(node.endpoint, timeout_seconds=DEADLINE_SECONDS) as client,
    ):
        group = client.open(make_identity(SMOLLM2_BLOCK_BYTES))
        keys = {number: group.keys(make_tokens(number, SHORT)) for number in (HOT, *SHORTS)}
        keys |= {number: group.keys(make_tokens(number, MEDIAN)) for number in MEDIANS}
        _acquire(group, keys[HOT])
        if not warms:
            asked.seconds.append(_ask(group, keys, None))
            return
        with _WarmUp(node) as warm_up:
            if asks:
                asked.seconds.append(_ask(group, keys, warm_up))
            else:
                warm_up.wait()
        assert warm_up.ended is not None
        asked.warmed_bytes += warm_up.promoted_bytes
        asked.warmed_seconds += warm_up.ended - warm_up.began


def _ask(group: Group, keys: dict[int, bytes], warm_up: _WarmUp | None) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    shorts = iter(SHORTS)
    for median in MEDIANS:
        turn = [(ONE_EXTENT, number) for number in islice(shorts, len(SHORTS) // len(MEDIANS))]
        for kind, number in (*turn, (FOUR_EXTENTS, median)):
            if warm_up is not None and warm_up.is_over:
                return seconds
            for each, keys_of in ((MEMORY, keys[HOT]), (kind, keys[number])):
                taken = _acquire(group, keys_of, from_nvme=each is not MEMORY)
                if warm_up is None or warm_up.was_at_work(time.perf_counter()):
                    seconds[each].append(taken)
    return seconds


def _acquire(group: Group, keys: bytes, *, from_nvme: bool | None = None) -> float:
    start = time.perf_counter()
    with group.acquire(keys=keys, deadline_seconds=DEADLINE_SECONDS) as lease:
        taken = time.perf_counter() - start
        wanted = len(keys) // 32
        if lease.blocks != wanted or (from_nvme is not None and (lease.nvme_blocks == wanted) != from_nvme):
            raise NodeFailed(
                f"{lease.nvme_blocks} of {lease.blocks} blocks came from NVMe, of {wanted}: {lease.reason}"
            )
        return taken
