"""A store and servers that tests share, because a server takes half a minute to start; and the answers without tierkv.

The whole folder is for the environment of `scripts/setup --engines`: elsewhere nothing of it is collected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.harness import Node
from tests.ledger import Holdings, left_over

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from e2e.engines.adapters import write_adapter
    from e2e.engines.events import Subscriber, published_at
    from e2e.engines.harness import Answer, VllmServer, running, tierkv_at
    from e2e.engines.questions import QUESTIONS, RETRAINED, SMALL_CACHE, TUNED, TURNS, ask, take_turn
    from e2e.engines.store import Checked, Store

REPOSITORY = Path(__file__).parents[2]
SERVER_SECONDS = 900
"""For a test, with the servers that it is the first to need."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(SERVER_SECONDS))
            item.add_marker(pytest.mark.engine)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what its servers had to say."""
    report = yield
    if report.failed:
        report.sections += [(f"vLLM {server.name}", server.tail()) for server in running]
    return report


@pytest.fixture(scope="session", autouse=True)
def ledger(runtime_dir: Path, own_surroundings: None) -> Iterator[None]:
    """Servers outlive tests here, so that the ledger is closed after all of them."""
    before = Holdings.now(runtime_dir)
    yield
    assert left_over(before, runtime_dir) == [], "the tests left something behind"


@dataclass(frozen=True, slots=True)
class References:
    """What a vLLM without tierkv says, in float32: to each question, and turn by turn in the chat."""

    answers: dict[str, Answer]
    chat: list[Answer]


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M, fetched once and kept in TIERKV_CACHE (or .cache)."""
    from demo_lib.fetch_model import fetch

    return fetch(Path(os.environ.get("TIERKV_CACHE", REPOSITORY / ".cache")))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def tuned(folder: Path, model: Path) -> Path:
    return write_adapter(folder / "adapters" / "before", model, seed=1)


@pytest.fixture(scope="session")
def retrained(folder: Path, model: Path) -> Path:
    return write_adapter(folder / "adapters" / "after", model, seed=2)


@pytest.fixture(scope="session")
def plain_server(folder: Path, model: Path, tuned: Path, retrained: Path) -> Iterator[VllmServer]:
    """A vLLM without tierkv. Begun and not waited for: another one may start beside it, each on a core."""
    adapters = {TUNED: tuned, RETRAINED: retrained}
    with VllmServer(folder, model, "plain", adapters=adapters, arguments=SMALL_CACHE) as plain:
        plain.begin()
        yield plain


@pytest.fixture(scope="session")
def references(plain_server: VllmServer) -> References:
    plain_server.wait_ready()
    chat: list[Answer] = []
    for _ in TURNS:
        chat.append(take_turn(plain_server, chat))
    answers = {name: ask(plain_server, name) for name in QUESTIONS}
    plain_server.close()
    return References(answers, chat)


@pytest.fixture(scope="session")
def store(folder: Path) -> Iterator[Store]:
    """A node in its own folder, running."""
    (folder / "node").mkdir()
    with Node(folder / "node", host_bytes="640MiB", nvme_bytes="4GiB", slab_bytes=None, extent_bytes=None) as node:
        node.start()
        yield Store(node)


@pytest.fixture(scope="session")
def subscriber() -> Iterator[Subscriber]:
    """Of the first server's events."""
    sockets = Path(tempfile.mkdtemp(prefix="tkv"))
    with Subscriber(sockets) as subscriber:
        yield subscriber
    shutil.rmtree(sockets)


@pytest.fixture(scope="session")
def first_server(
    folder: Path, model: Path, store: Store, tuned: Path, references: References, subscriber: Subscriber
) -> Iterator[VllmServer]:
    """A vLLM on that node, which has the adapter as it was first, and tells its events. The tests of the crash kill it
    for good."""
    connector = tierkv_at(store.node.endpoint)
    events = ("--kv-events-config", json.dumps(published_at(subscriber.endpoint)))
    with VllmServer(
        folder, model, "one", kv_transfer=connector, adapters={TUNED: tuned}, arguments=(*SMALL_CACHE, *events)
    ) as server:
        server.start()
        yield server


@pytest.fixture
def first(first_server: VllmServer, store: Store, references: References) -> Checked:
    """With nothing in its own prefix cache, and the node running."""
    assert first_server.is_running, "it was killed by the tests of the crash, which come last"
    first_server.reset_prefix_cache()
    return Checked(first_server, store, references.answers, "before")
