"""A vLLM that was told wrong things, or is not what it seems: its endpoint leads nowhere, to something else, to a node
of another protocol, to the node of another model; files change under it. It answers every request as it does without a
node, and gets nothing that is not its own."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from e2e.engines.harness import Answer, VllmServer, tierkv_at
from e2e.engines.questions import BLOCK_TOKENS, NEW_TOKENS, QUESTIONS, SMALL_CACHE, reusable
from e2e.engines.store import Checked, Store
from e2e.engines.weights import WEIGHTS, copy_model, negate_values
from e2e.harness import Node, wait_until
from e2e.test_cli import answer as report_of
from e2e.test_cli import tierkv
from tierkv.wire.messages import PROTOCOL_VERSION
from tierkv.wire.session import SESSION_SOCKET_NAME

QUESTION = "known"
OTHER_MODEL = "another-model"
OTHER_PROTOCOL = PROTOCOL_VERSION + 1
AGE_SECONDS = 3.0
"""Files of that age are taken for those that an engine which starts now loads."""

CONNECTING_TOKENS = BLOCK_TOKENS + 6
CLIENTS = 2
"""The scheduler's and the worker's: each says once what it sees."""


class Door:
    """The directory that the server was told to find its node's sockets in: a link, which leads anywhere or nowhere."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tkv"))
        self.path = self._folder / "door"

    def lead_to(self, target: Path) -> None:
        link = self._folder / "next"
        link.symlink_to(target)
        link.replace(self.path)

    def close(self) -> None:
        shutil.rmtree(self._folder)


class Impostor:
    """Something else where a node's session socket should be: says `words` to everyone, or nothing."""

    def __init__(self, words: bytes) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tkv"))
        self.visits = 0
        self._words = words
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.directory / SESSION_SOCKET_NAME))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="impostor")
        self._thread.start()

    def _serve(self) -> None:
        visitors: list[socket.socket] = []
        while True:
            try:
                visitor, _address = self._listener.accept()
            except OSError:  # shut down: that is the end
                break
            visitors.append(visitor)
            self.visits += 1
            with suppress(OSError):  # it has gone already
                visitor.send(self._words)
        for visitor in visitors:
            visitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self.directory)


@dataclass(frozen=True, slots=True)
class Stranger:
    """A server of another model, and what that says where no node ever was."""

    server: VllmServer
    model: Path
    door: Door
    answer: Answer

    def answers_alone(self) -> None:
        """As it must, with nothing from anywhere."""
        self.server.reset_prefix_cache()
        misses = self.num_misses()
        with self.server.counted(1) as tokens:
            answer = self.server.chat(QUESTIONS[QUESTION].messages, new_tokens=NEW_TOKENS)
        assert answer.tokens == self.answer.tokens
        assert tokens.external == 0
        assert self.num_misses() == misses + 1

    def compute_afresh(self) -> Answer:
        """What the weights in its memory say: a request that wants the prompt's own probabilities reads no cache."""
        with self.server.counted(1) as tokens:
            answer = self.server.complete(self.answer.prompt, new_tokens=NEW_TOKENS, prompt_logprobs=1)
        assert tokens.by_source == {}
        return answer

    def num_misses(self) -> float:
        """Requests that got nothing: not found, or not asked for, as no node has said yet with which codec."""
        now = self.server.metrics()
        return now.total("vllm:tierkv_misses_total") + now.total("vllm:tierkv_bypassed_total")

    def at(self, store: Store, weights: str = OTHER_MODEL) -> Checked:
        """Connected to this node, in both its clients. `weights` is what the books call its weights."""
        self.door.lead_to(store.node.endpoint)

        def loads() -> Answer | None:
            self.server.reset_prefix_cache()
            with self.server.counted(1) as tokens:
                said = self.server.complete(range(1_000, 1_000 + CONNECTING_TOKENS), new_tokens=1)
            return said if tokens.by_source == {"host": BLOCK_TOKENS} else None

        store.note(self.server, wait_until(loads, "vLLM loads from the node behind the door", 120.0), weights)
        return self.checked(store)

    def checked(self, store: Store) -> Checked:
        return Checked(self.server, store, {QUESTION: self.answer}, weights=OTHER_MODEL)


def wait_until_old(model: Path) -> None:
    changed = max(path.stat().st_ctime for path in (model, *model.iterdir()))
    wait_until(lambda: time.time() > changed + AGE_SECONDS, "the model's files are older than what starts now")


@pytest.fixture(scope="module")
def stranger(folder: Path, model: Path, plain_server: object) -> Iterator[Stranger]:
    other = copy_model(model, folder / OTHER_MODEL, negated=range(8, 14))
    wait_until_old(other)
    door = Door()
    with VllmServer(folder, other, "stranger", kv_transfer=tierkv_at(door.path), arguments=SMALL_CACHE) as server:
        server.start()
        with server.counted(1) as tokens:
            answer = server.chat(QUESTIONS[QUESTION].messages, new_tokens=NEW_TOKENS)
        assert tokens.external == 0
        wait_until(lambda: ": the cache is in use" in server.log(), "the weights are read")
        yield Stranger(server, other, door, answer)
    door.close()


@pytest.fixture(scope="module")
def kept(folder: Path, stranger: Stranger) -> Iterator[Store]:
    """A node of its own, to which the stranger is connected, with its answer on disk."""
    (folder / "kept").mkdir()
    with Node(folder / "kept", host_bytes="256MiB", nvme_bytes="1GiB", slab_bytes=None, extent_bytes=None) as node:
        node.start()
        store = Store(node)
        stranger.at(store).ask_and_store(QUESTION)
        store.wait_flushed()
        yield store


def test_an_endpoint_that_does_not_exist_is_named_once_and_every_request_answered(stranger: Stranger) -> None:
    for _ in range(2):
        stranger.answers_alone()
    said = f"node at {stranger.door.path} is away, every call is a miss until it is back: {stranger.door.path}/"
    assert stranger.server.log().count(said) == CLIENTS


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request", b""], ids=["talks", "is silent"])
def test_something_else_behind_the_endpoint_is_as_good_as_nothing(stranger: Stranger, words: bytes) -> None:
    with Impostor(words) as impostor:
        stranger.door.lead_to(impostor.directory)

        def visited() -> bool:
            stranger.answers_alone()
            return impostor.visits >= CLIENTS

        wait_until(visited, "vLLM has knocked", 240.0)
        stranger.answers_alone()
    if words:
        assert stranger.server.log().count("malformed: a packet on the session socket") == CLIENTS


def test_a_node_of_another_protocol_is_told_once_with_both_versions(stranger: Stranger, tmp_path: Path) -> None:
    said = f"this node speaks protocol {OTHER_PROTOCOL}, and this client protocol {PROTOCOL_VERSION}"
    with Node(tmp_path, replaced=(f"protocol={OTHER_PROTOCOL}",)) as node:
        node.start(wait_ready=False)
        wait_until((node.endpoint / SESSION_SOCKET_NAME).is_socket, "the node listens")
        stranger.door.lead_to(node.endpoint)

        def is_told() -> bool:
            stranger.answers_alone()
            return stranger.server.log().count(said) >= CLIENTS

        wait_until(is_told, "vLLM's log names both versions", 240.0)
        for _ in range(2):
            stranger.answers_alone()
        assert stranger.server.log().count(said) == CLIENTS

        status = tierkv("status", "--endpoint", str(node.endpoint))
        assert status.returncode != 0
        assert said in status.stderr
        assert "Traceback" not in status.stderr
        node.stop()


def test_files_that_are_overwritten_under_a_running_engine_change_nothing_for_it(
    stranger: Stranger, kept: Store
) -> None:
    """It goes on with the weights that it has in memory, which are still those that it is known by."""
    path = stranger.model / WEIGHTS
    size = path.stat().st_size
    negate_values(stranger.model, [5])
    assert path.stat().st_size == size
    assert stranger.checked(kept).ask_again(QUESTION).by_source == {"host": reusable(stranger.answer.prompt)}
    assert stranger.compute_afresh().tokens == stranger.answer.tokens


def test_a_second_model_on_one_node_gets_nothing_of_the_first(
    first: Checked, stranger: Stranger, model: Path, store: Store, kept: Store
) -> None:
    """Of the same names and sizes throughout, and asked the same: its weights are all that tells it apart."""
    assert stranger.answer.prompt == first.references[QUESTION].prompt
    assert stranger.answer.tokens != first.references[QUESTION].tokens, "they say the same, then it proves nothing"
    first.ask_and_store(QUESTION)
    kept.node.kill("supervisor")  # or the stranger would stay with it
    other = stranger.at(store)
    assert other.ask_and_store(QUESTION).external == 0
    for one in (first, other):
        assert one.ask_again(QUESTION).by_source == {"host": reusable(stranger.answer.prompt)}

    lines = {line["model"]: line for line in report_of(store.node, "du")["lines"]}
    assert lines.keys() == {stranger.model.name, model.name}
    assert len({line["fingerprint"] for line in lines.values()}) == 2
    assert lines[stranger.model.name]["tokens"] == num_stored(stranger.answer)


def test_an_engine_whose_files_change_while_it_starts_keeps_what_it_computes_to_itself(
    stranger: Stranger, kept: Store
) -> None:
    """Nobody knows which of them it has loaded. The last one here: its engine says other things from now on."""
    server = stranger.server
    server.kill()
    if not kept.node.is_running:
        kept.node.start()
    stranger.door.lead_to(kept.node.endpoint)
    before = len(server.log())
    server.begin()
    wait_until(lambda: "(EngineCore" in server.log()[before:], "the engine's process runs", 240.0)
    negate_values(stranger.model, [20])
    server.wait_ready()
    wait_until(
        lambda: "this engine's cache is kept in memory only, and not shared" in server.log()[before:],
        "it says that it keeps to itself",
    )
    assert f"{stranger.model / WEIGHTS} changed at " in server.log()[before:]

    weights = "whichever it has loaded"
    given_up = stranger.at(kept, weights).num_given_up()
    server.reset_prefix_cache()
    with server.counted(1) as tokens:
        answer = server.chat(QUESTIONS[QUESTION].messages, new_tokens=NEW_TOKENS)
    assert tokens.external == 0
    assert answer.tokens == stranger.compute_afresh().tokens
    assert answer.tokens != stranger.answer.tokens
    kept.note(server, answer, weights)
    here = Checked(server, kept, {QUESTION: answer}, weights=weights)
    here.see_stored(given_up, lambda: here.ask_again(QUESTION))
    assert here.ask_again(QUESTION).by_source == {"host": reusable(answer.prompt)}

    kept.restart()
    report = report_of(kept.node, "du")
    assert [line["model"] for line in report["lines"]] == [OTHER_MODEL]
    assert report["total"]["tokens"] == num_stored(stranger.answer), "what was stored before, and nothing else"


def num_stored(answer: Answer) -> int:
    """Tokens of its whole blocks, and of what was asked to connect."""
    return len(answer.computed) // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS
