"""A fake node, a client of it, and a group whose blocks are 4 tokens and one page."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.client.fake_node import FakeNode
from tierkv.client import Client, Group, breaker, connect, doubts, prefill_reports
from tierkv.core.identity import Identity, Layout, Parallel

BLOCK_TOKENS = 4
BLOCK_BYTES = 4096
TOKENS = list(range(100, 118))  # four blocks, and half a block


def make_identity(block_bytes: int = BLOCK_BYTES, weights: str = "w", shards: int = 1) -> Identity:
    layout = Layout(dtype="uint8", block_bytes=(block_bytes,), axes="byte", block_tokens=BLOCK_TOKENS, engine="test")
    weights = weights.encode().hex().ljust(64, "0")
    return Identity(weights=weights, config="c", layout=layout, parallel=Parallel(tensor=shards, shards=shards))


def stamped(group: Group, num_blocks: int, *, first: int = 0) -> np.ndarray:
    """Rows that can be told apart: every byte of block i comes from the group and from i."""
    seed = int.from_bytes(group.key[:4], "little")
    rows = [_row(seed + i, group.block_bytes) for i in range(first, first + num_blocks)]
    return np.array(rows, np.uint8).reshape(num_blocks, group.block_bytes)


def _row(seed: int, num_bytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def store(group: Group, tokens: list[int]) -> np.ndarray:
    """Store all full blocks of `tokens`; what was stored."""
    rows = stamped(group, len(tokens) // group.block_tokens)
    with group.reserve(tokens) as ticket:
        ticket.copy_from(rows)
        ticket.commit()
    return rows


def poisoned(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.full((num_blocks, block_bytes), 0xFF, np.uint8)


@pytest.fixture
def node_dir(runtime_dir: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=runtime_dir))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(node_dir: Path) -> Iterator[FakeNode]:
    fake = FakeNode(node_dir)
    yield fake
    fake.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that doesn't come is given up after 0.1 s."""
    monkeypatch.setattr("tierkv.client.asking.GRACE_SECONDS", 0.05)


PAUSE_FACTOR = 100
"""By what pauses are longer here than in life: a machine that is busy elsewhere does not get past one by itself."""


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a node counts as away, and what is in doubt as under way: over only when a test says so (skip_time)."""
    for module, name in (
        (breaker, "FIRST_PAUSE_SECONDS"),
        (breaker, "LONGEST_PAUSE_SECONDS"),
        (breaker, "PROBE_SECONDS"),
        (doubts, "RESEND_SECONDS"),
        (prefill_reports, "EVERY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, PAUSE_FACTOR * getattr(module, name))


@pytest.fixture
def client(node: FakeNode, quick: None, long_pauses: None) -> Iterator[Client]:
    with connect(node.directory, timeout_seconds=20) as made:
        yield made
        assert made.counters.open_grants == 0


@contextmanager
def impatient(client: Client) -> Iterator[None]:
    """For calls whose reply never comes: they give up after a tenth of a second."""
    before = client._state.timeout_seconds
    client._state.timeout_seconds = 0.05
    yield
    client._state.timeout_seconds = before


@pytest.fixture
def group(client: Client) -> Group:
    return client.open(make_identity())


class Skip:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.seconds


@pytest.fixture
def skip_time(long_pauses: None) -> Callable[[Client, float], None]:
    """Seconds as a pause of the product counts them."""

    def skip(client: Client, seconds: float) -> None:
        clock = client._state.clock
        if not isinstance(clock, Skip):
            clock = client._state.clock = Skip()
        clock.seconds += PAUSE_FACTOR * seconds

    return skip
