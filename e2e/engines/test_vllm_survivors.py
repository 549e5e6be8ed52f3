"""After kill -9 of vLLM and node: two new servers share what the first one left on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.engines.conftest import References
from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import SMALL_CACHE, TUNED, reusable
from e2e.engines.store import Checked, Store

LEFT = ("help 1", "code 1")
"""What the first server computed, besides an adapter's."""


@pytest.fixture(scope="module")
def crash(first_server: VllmServer, store: Store, references: References) -> None:
    first = Checked(first_server, store, references.answers, "before")
    for name in LEFT:
        first.ask_and_store(name)
    first.ask_adapter("tuned")
    store.wait_flushed()
    first_server.kill()
    store.node.kill("supervisor")


@pytest.fixture(scope="module")
def servers(
    crash: None, folder: Path, model: Path, store: Store, tuned: Path, retrained: Path
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Started while there is no node. The second one has the adapter as it was before, the first one as it is now."""
    connector = tierkv_at(store.node.endpoint)
    with ExitStack() as stack:
        two, three = (
            stack.enter_context(
                VllmServer(folder, model, name, kv_transfer=connector, adapters={TUNED: adapter}, arguments=SMALL_CACHE)
            )
            for name, adapter in (("two", retrained), ("three", tuned))
        )
        two.begin()
        three.begin()
        two.wait_ready()
        three.wait_ready()
        yield two, three


@pytest.fixture
def alone(servers: tuple[VllmServer, VllmServer], store: Store, references: References) -> tuple[Checked, Checked]:
    """Both, with empty prefix caches."""
    for server in servers:
        server.reset_prefix_cache()
    two, three = servers
    return Checked(two, store, references.answers, "after"), Checked(three, store, references.answers, "before")


@pytest.fixture(scope="module")
def revived(servers: object, store: Store) -> None:
    store.node.start()


@pytest.fixture
def both(revived: None, alone: tuple[Checked, Checked]) -> tuple[Checked, Checked]:
    """With their node, which came later than they did."""
    for one in alone:
        one.wait_connected()
        one.server.reset_prefix_cache()
    return alone


def test_servers_answer_when_there_is_no_node(alone: tuple[Checked, Checked], store: Store) -> None:
    assert not store.node.is_running, "it is not away"
    for one in alone:
        for _ in range(2):
            assert one.ask_again("absent").external == 0


def test_what_was_computed_before_the_crash_comes_from_disk_once_and_then_from_memory(
    both: tuple[Checked, Checked], store: Store
) -> None:
    two, three = both
    for name in LEFT:
        wanted = reusable(two.references[name].prompt)
        with store.hits() as hits:
            assert two.ask(name).by_source == {"disk": wanted}
        assert (hits.host, hits.nvme) == (0, wanted)
        with store.hits() as hits:
            assert three.ask(name).by_source == {"host": wanted}
        assert (hits.host, hits.nvme) == (wanted, 0)


def test_two_servers_use_what_the_other_has_computed(both: tuple[Checked, Checked], store: Store) -> None:
    two, three = both
    for name, one, other in (("shared 1", two, three), ("shared 2", three, two)):
        assert one.ask_and_store(name).external == 0
        assert other.ask(name).by_source == {"host": reusable(one.references[name].prompt)}


def test_an_adapter_that_was_trained_again_under_its_name_is_another_one(
    both: tuple[Checked, Checked], store: Store
) -> None:
    two, three = both
    before, after = (two.references[name] for name in ("tuned", "retrained"))
    assert before.prompt == after.prompt
    assert before.tokens != after.tokens, "the training changed nothing, then it proves nothing"
    assert two.ask_adapter("retrained", model=TUNED).external == 0
    assert three.ask_adapter("tuned").by_source == {"disk": reusable(before.prompt)}
    assert two.ask_again("retrained", model=TUNED).by_source == {"host": reusable(before.prompt)}
