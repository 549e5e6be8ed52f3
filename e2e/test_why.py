"""Why was this a miss, and what goes on: `tierkv why` and `tierkv top` against a real node."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e.harness import Node, environment, wait_until
from e2e.test_cli import command, tierkv
from tierkv.client import Client, Group, connect
from tierkv.core.identity import Identity
from tierkv.torture.stamped import BLOCK_TOKENS, identity, stamps, tokens_of

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8
DEADLINE_SECONDS = 60.0


class Engine:
    """Stores and asks as an engine with this identity would."""

    def __init__(self, client: Client, identity: Identity) -> None:
        self.group: Group = client.open(identity, model_name="llama")

    def store(self, tokens: np.ndarray, *, flushed: bool = False) -> None:
        keys = self.group.keys(tokens)
        with self.group.reserve(tokens, deadline_seconds=5.0) as ticket:
            ticket.copy_from(stamps(keys))
            ticket.commit()
        if flushed:
            self.group.seal(keys=keys, wait="flushed", deadline_seconds=20.0)

    def ask(self, tokens: np.ndarray, name: str) -> int:
        with self.group.acquire(tokens, name=name, deadline_seconds=5.0) as lease:
            return lease.blocks


@pytest.fixture
def running(node: Node) -> Node:
    node.start()
    return node


@pytest.fixture
def client(running: Node) -> Any:
    with connect(running.endpoint, timeout_seconds=20.0) as made:
        yield made


def why(node: Node, tmp_path: Path, tokens: np.ndarray, *arguments: str) -> Any:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(tokens.tolist()))
    done = tierkv("why", "--token-file", str(path), *arguments, "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def with_layout(**changes: Any) -> Identity:
    base = identity()
    return msgspec.structs.replace(base, layout=msgspec.structs.replace(base.layout, **changes))


@pytest.mark.parametrize(
    ("stored_under", "said", "field"),
    [
        (with_layout(dtype="float16"), ("--field", "layout.dtype=uint8"), "layout.dtype"),
        (msgspec.structs.replace(identity(), adapter="ad" * 32), ("--adapter", "none"), "adapter"),
        (identity("acme"), ("--tenant", ""), "salt"),
        (with_layout(engine="stamped 2"), ("--field", "layout.engine=stamped"), "layout.engine"),
    ],
)
def test_a_prompt_that_another_identity_stored_is_told_by_the_field(
    running: Node, client: Client, tmp_path: Path, stored_under: Identity, said: tuple[str, str], field: str
) -> None:
    prompt = tokens_of(1, BLOCKS)
    Engine(client, stored_under).store(prompt)
    mine = Engine(client, identity())
    found = why(running, tmp_path, prompt, "--model", "llama", *said)
    assert found["cause"] == "identity"
    assert found["namespaces"][0]["group"] == mine.group.key.hex()
    others = [one for one in found["namespaces"] if one["group"] == stored_under.group_key().hex()]
    assert [one["name"] for one in others[0]["differences"]] == [field]
    assert others[0]["trace"]["cached_blocks"] == BLOCKS
    assert "acme" not in json.dumps(found)


def test_a_request_tells_the_field_once_its_prompt_was_stored(running: Node, client: Client) -> None:
    prompt = tokens_of(1, BLOCKS)
    Engine(client, with_layout(dtype="float16")).store(prompt)
    mine = Engine(client, identity())
    assert mine.ask(prompt, "cmpl-1") == 0
    mine.store(prompt)
    done = tierkv("why", "cmpl-1", "--json", "--endpoint", str(running.endpoint))
    found = json.loads(done.stdout)
    assert (found["request"]["name"], found["request"]["tokens"]) == ("cmpl-1", 0)
    assert any("layout.dtype (uint8 wanted, float16 there)" in detail for detail in found["details"])


def test_the_first_token_that_differs_is_told(running: Node, client: Client, tmp_path: Path) -> None:
    engine = Engine(client, identity())
    stored = tokens_of(1, BLOCKS)
    engine.store(stored)
    asked = stored.copy()
    asked[5 * BLOCK_TOKENS + 3] += 1
    found = why(running, tmp_path, asked, "--model", "llama")
    assert found["cause"] == "tokens"
    assert found["namespaces"][0]["trace"]["leaving"] == {
        "token": 5 * BLOCK_TOKENS + 3,
        "others": 1,
        "tokens_known": True,
        "asked": int(asked[5 * BLOCK_TOKENS + 3]),
        "cached": int(stored[5 * BLOCK_TOKENS + 3]),
        "same_tokens": False,
    }


def test_asking_by_hand_is_no_use(running: Node, client: Client, tmp_path: Path) -> None:
    engine = Engine(client, identity())
    prompt = tokens_of(1, BLOCKS)
    engine.store(prompt, flushed=True)
    before = why(running, tmp_path, prompt)["namespaces"][0]["trace"]["stretches"]
    assert before[0]["tiers"] == ["host", "nvme"]
    assert why(running, tmp_path, prompt)["namespaces"][0]["trace"]["stretches"] == before


def test_after_a_restart_it_lies_on_nvme(running: Node, tmp_path: Path) -> None:
    prompt = tokens_of(1, BLOCKS)
    with connect(running.endpoint, timeout_seconds=20.0) as client:
        Engine(client, identity()).store(prompt, flushed=True)
    running.stop()
    running.start()
    found = why(running, tmp_path, prompt, "--model", "llama")
    assert found["cause"] == "cached"
    assert {tuple(one["tiers"]) for one in found["namespaces"][0]["trace"]["stretches"]} == {("nvme",)}


def test_what_was_evicted_is_told_with_its_reason(tmp_path: Path) -> None:
    with Node(tmp_path, memory_only=True, host_bytes="4MiB", session_bytes="4MiB") as small:
        small.start()
        with connect(small.endpoint, timeout_seconds=20.0) as client:
            engine = Engine(client, identity())
            prompt = tokens_of(1, BLOCKS)
            engine.store(prompt)

            def is_gone() -> bool:
                engine.store(tokens_of(int(time.monotonic_ns() % 2**31), 32))
                return engine.group.match(prompt).blocks == 0

            wait_until(is_gone, "the prompt is evicted", DEADLINE_SECONDS)
            found = why(small, tmp_path, prompt, "--model", "llama")
            left = found["namespaces"][0]["trace"]["missing"]["left"]
            assert (found["cause"], left["tier"], left["reason"]) == ("evicted", "host", "evicted")
            assert engine.ask(prompt, "too-late") == 0
        done = tierkv("why", "too-late", "--endpoint", str(small.endpoint))
        assert "had left memory" in done.stdout
        assert "room was needed" in done.stdout


def test_what_waits_for_a_disk_that_is_closed_says_so(tmp_path: Path) -> None:
    almost_all = shutil.disk_usage(tmp_path).total - 2**20  # which no disk has free
    with Node(tmp_path, nvme_reserve_bytes=str(almost_all)) as closed:
        closed.start()
        with connect(closed.endpoint, timeout_seconds=20.0) as client:
            engine = Engine(client, identity())
            prompt = tokens_of(1, BLOCKS)
            engine.store(prompt)
            engine.group.seal(prompt, deadline_seconds=5.0)
            found = why(closed, tmp_path, prompt, "--model", "llama")
            stretch = found["namespaces"][0]["trace"]["stretches"][0]
            assert stretch["tiers"] == ["host"]
            assert stretch["why_not_there"] == "disk_full"
            assert any("the disk is full" in detail for detail in found["details"])


def test_what_still_grows_says_that_it_is_written_when_it_is_sealed(tmp_path: Path) -> None:
    with Node(tmp_path, seal_after_seconds="600") as node:
        node.start()
        with connect(node.endpoint, timeout_seconds=20.0) as client:
            prompt = tokens_of(1, 3)  # an extent has room for more
            Engine(client, identity()).store(prompt)
            found = why(node, tmp_path, prompt, "--model", "llama")
            assert any("still growing, written when sealed" in detail for detail in found["details"])


def test_what_waits_in_the_queue_of_writes_says_so(running: Node, client: Client, tmp_path: Path) -> None:
    engine = Engine(client, identity())
    status = running.status()
    assert status is not None
    (worker,) = [one.pid for one in status.workers if one.name == "storage"]
    prompts = [tokens_of(number, BLOCKS) for number in range(1, 21)]  # more than are written at once
    os.kill(worker, signal.SIGSTOP)
    try:
        for prompt in prompts:
            engine.store(prompt)
            engine.group.seal(prompt)
        first, last = (why(running, tmp_path, one, "--model", "llama") for one in (prompts[0], prompts[-1]))
    finally:
        os.kill(worker, signal.SIGCONT)
    assert [one["namespaces"][0]["trace"]["stretches"][0]["nvme"] for one in (first, last)] == ["writing", "queued"]
    assert any("in memory only: in the queue of writes" in detail for detail in last["details"])


def test_a_request_that_is_not_remembered_is_exit_code_4(running: Node) -> None:
    done = tierkv("why", "nobody-asked-this", "--endpoint", str(running.endpoint))
    assert (done.returncode, done.stdout) == (4, "")


# ---- top


def top(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    return tierkv("top", "--once", *arguments, "--endpoint", str(node.endpoint))


def test_top_of_an_empty_node_is_one_plain_frame(running: Node) -> None:
    done = top(running)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "none was hit twice yet" in done.stdout
    assert "ready, up" in done.stdout


def test_top_of_a_busy_node_names_its_hottest_prefix_with_what_it_saved(running: Node, client: Client) -> None:
    engine = Engine(client, identity())
    prompt = tokens_of(1, BLOCKS)
    engine.store(prompt, flushed=True)
    for number in range(6):
        assert engine.ask(prompt, f"cmpl-{number}") == BLOCKS
    found = json.loads(top(running, "--json").stdout)
    (hot,) = found["hottest"]
    assert (hot["tokens"], hot["hits"]) == (BLOCKS * BLOCK_TOKENS, 5)
    assert hot["saved_tokens"] == 5 * BLOCKS * BLOCK_TOKENS
    assert hot["saved_seconds"] == pytest.approx(hot["saved_tokens"] / 12_000, rel=0.01)
    assert found["hit_rate"]["since_start"] == 1.0
    assert hot["key"][:16] in top(running).stdout
    shown = tierkv("purge", "--prefix", hot["key"][:16], "--dry-run", "--endpoint", str(running.endpoint))
    assert shown.returncode == 0, shown.stderr  # the name that is shown is one that other commands take


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24) -> None:
        self.screen = b""
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (height, width))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        env = environment() | {"TERM": "xterm", "COLUMNS": "", "LINES": ""}
        self.process = subprocess.Popen(
            command(*arguments), stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )

    def read(self) -> bytes:
        """All that was written so far."""
        while select.select([self._master], [], [], 0.05)[0]:
            self.screen += os.read(self._master, 65_536)
        return self.screen

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words.encode() in self.read(), f"{words!r} is on the screen", DEADLINE_SECONDS)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def end(self) -> int:
        def has_ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_until(has_ended, "the command has ended", DEADLINE_SECONDS)
        self.read()
        return self.process.returncode

    def is_restored(self) -> bool:
        """The screen of before is shown again, with its cursor, and keys are seen as before."""
        left, shown = self.screen.rfind(b"\x1b[?1049l"), self.screen.rfind(b"\x1b[?25h")
        return (
            left > self.screen.rfind(b"\x1b[?1049h")
            and shown > self.screen.rfind(b"\x1b[?25l")
            and termios.tcgetattr(self._slave) == self.before
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for number in (self._master, self._slave):
            with suppress(OSError):
                os.close(number)


def _press_q(terminal: Terminal) -> None:
    terminal.press(b"q")


def _interrupt(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGINT)


def _terminate(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(("end", "code"), [(_press_q, 0), (_interrupt, 0), (_terminate, 128 + signal.SIGTERM)])
def test_top_on_a_terminal_ends_cleanly(running: Node, end: Callable[[Terminal], None], code: int) -> None:
    with Terminal("top", "--interval", "0.2", "--endpoint", str(running.endpoint)) as terminal:
        terminal.wait_for("Hottest prefixes")
        assert not terminal.is_restored()
        end(terminal)
        assert terminal.end() == code
        assert terminal.is_restored()


def test_top_says_that_the_node_went_away_and_goes_on_when_it_is_back(running: Node) -> None:
    with Terminal("top", "--interval", "0.2", "--endpoint", str(running.endpoint), width=120) as terminal:
        terminal.wait_for(", up ")
        running.stop()
        terminal.wait_for("asking again")
        running.start()
        seen = len(terminal.read())

        def is_back() -> bool:
            frames = terminal.read()[seen:].split(b"\x1b[H")  # each frame begins at the upper left corner
            return any(b", up " in one and b"asking again" not in one for one in frames)

        wait_until(is_back, "the node is shown again", DEADLINE_SECONDS)
        terminal.press(b"q")
        assert terminal.end() == 0
