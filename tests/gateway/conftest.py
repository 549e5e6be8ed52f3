"""A fake node, a gateway before it, and a client that must not map the arena."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.conftest import make_identity, node, node_dir, quick, skip_time
from tests.client.fake_node import FakeNode
from tests.gateway.gateway_thread import GatewayThread
from tierkv.client import Client, Group, connect

__all__ = ["node", "node_dir", "quick", "skip_time"]


@pytest.fixture
def long_pauses() -> None:
    """Not here: a gateway looks for its node in a thread of its own, and its pauses are real."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, an answer of the node that comes is not taken for one that doesn't."""
    monkeypatch.setattr("tierkv.gateway.upstream.TIMEOUT_SECONDS", 20.0)


@pytest.fixture
def inline_dir() -> Iterator[Path]:
    """Where others could reach it, as they can't reach the runtime directory of the tests."""
    root = Path(tempfile.mkdtemp(prefix="tkv"))
    root.chmod(0o711)
    yield root / "i"
    shutil.rmtree(root)


@pytest.fixture
def gateway(node: FakeNode, inline_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayThread]:
    monkeypatch.setattr("tierkv.gateway.process.BEAT_SECONDS", 0.05)
    with GatewayThread(node.directory, inline_dir) as made:
        yield made


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[Client]:
    with connect(gateway.directory, timeout_seconds=20) as made:
        yield made
        assert made.counters.open_grants == 0


@pytest.fixture
def group(client: Client) -> Group:
    return client.open(make_identity())
