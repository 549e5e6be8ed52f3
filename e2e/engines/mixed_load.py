"""Mixed load on a real vLLM with tierkv, for as long as one likes: chats that grow, shared system prompts, code,
aborts, resets of vLLM's own cache, several users at a time, on a node whose memory is too small for all of it.

    python -m e2e.engines.mixed_load --minutes 60 --dir D [--seed N] [--users N] [--think SECONDS]
                                     [--kill-node-every SECONDS]

Prints a verdict (JSON), and exits with 1 when a request was not answered, or when vLLM's log has an exception or a
warning of ours. With --kill-node-every the node is killed (SIGKILL) and started again in between; then the warning that
says that it is away is allowed, and no other. Answers that differ from the first one to the same prompt are counted: in
a batch of other requests vLLM itself may round differently, so they are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo_lib.fetch_model import fetch

from e2e.engines.harness import ServerFailed, VllmServer, tierkv_at
from e2e.engines.questions import QUESTIONS
from e2e.harness import Node

SERIOUS = re.compile(r"(Traceback|(WARNING|ERROR).*(tierkv|\[(connector|scheduler|worker|fence|state)\.py))")
AWAY = "is away, every call is a miss until it is back"
LONGEST_PROMPT = 1_600
SMALL_MEMORY = ("--num-gpu-blocks-override", "110")
"""7,040 tokens: for four or five of the users' prompts, so that vLLM forgets, and preempts."""


@dataclass(slots=True)
class Verdict:
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    node_kills: int = 0
    tokens: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    log_lines: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.failed and not self.log_lines

    def as_object(self) -> dict[str, Any]:
        return {
            "clean": self.is_clean,
            "seconds": round(self.seconds),
            "requests": dict(self.requests),
            "node_kills": self.node_kills,
            "failed": self.failed[:20],
            "differing": len(self.differing),
            "tokens": self.tokens,
            "counters": self.counters,
            "log_lines": self.log_lines[:20],
        }


class Load:
    """Threads, each with a conversation of its own that it drops now and then, and that it thinks about for up to twice
    `think_seconds` between requests."""

    def __init__(
        self, server: VllmServer, starts: list[list[int]], *, seed: int, users: int, think_seconds: float
    ) -> None:
        self.verdict = Verdict()
        self._server = server
        self._starts = starts
        self._seed = seed
        self._users = users
        self._think_seconds = think_seconds
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._first_answers: dict[tuple[int, ...], tuple[int, ...]] = {}

    def run(self, seconds: float, meanwhile: Callable[[float], None]) -> Verdict:
        """`meanwhile(seconds left)` is called every second."""
        began = time.monotonic()
        users = [threading.Thread(target=self._user, args=(number,)) for number in range(self._users)]
        for user in users:
            user.start()
        try:
            while (left := seconds - (time.monotonic() - began)) > 0 and self._server.is_running:
                meanwhile(left)
                self._ending.wait(1.0)
        finally:
            self._ending.set()
            for user in users:
                user.join()
        self.verdict.seconds = time.monotonic() - began
        return self.verdict

    def _user(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        prompt = list(chance.choice(self._starts))
        while not self._ending.is_set():
            kind = chance.choices(("turn", "again", "abort", "new", "reset"), (8, 4, 3, 3, 1))[0]
            try:
                if kind == "reset":
                    self._server.try_reset_prefix_cache()
                elif kind == "abort":
                    self._abort(prompt, chance)
                elif kind == "again":
                    self._ask(list(chance.choice(self._starts)), 8)
                else:
                    if kind == "new" or len(prompt) > LONGEST_PROMPT:
                        prompt = list(chance.choice(self._starts))
                    prompt += self._ask(prompt, chance.randrange(4, 24))
                    prompt += chance.choice(self._starts)[: chance.randrange(8, 200)]
            except ServerFailed as failure:
                with self._lock:
                    self.verdict.failed.append(f"{kind}: {failure}"[:500])
                self._ending.wait(1.0)
            with self._lock:
                self.verdict.requests[kind] += 1
            self._ending.wait(chance.random() * 2 * self._think_seconds)

    def _ask(self, prompt: list[int], new_tokens: int) -> list[int]:
        tokens = self._server.complete(prompt, new_tokens=new_tokens).tokens
        with self._lock:
            first = self._first_answers.setdefault(tuple(prompt), tokens)
            both = min(len(first), len(tokens))
            if first[:both] != tokens[:both]:
                self.verdict.differing.append(f"{len(prompt)} tokens: {first[:both]} then {tokens[:both]}")
        return list(tokens)

    def _abort(self, prompt: list[int], chance: random.Random) -> None:
        with self._server.stream(prompt, new_tokens=64) as stream:
            for _ in zip(range(chance.randrange(0, 12)), stream, strict=False):
                pass


def starts_of(server: VllmServer) -> list[list[int]]:
    """Prompts as vLLM's chat template makes them."""
    return [list(server.chat(question.messages, new_tokens=1).prompt) for question in QUESTIONS.values()]


def look_through(log: str, *, node_is_killed: bool) -> list[str]:
    lines = [line for line in log.splitlines() if SERIOUS.search(line)]
    return [line for line in lines if not (node_is_killed and AWAY in line)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--think", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--kill-node-every", type=float, default=0.0, metavar="SECONDS")
    given = parser.parse_args()
    model = fetch(Path(os.environ.get("TIERKV_CACHE", Path(__file__).parents[2] / ".cache")))
    given.dir.mkdir(parents=True, exist_ok=True)
    with (
        Node(given.dir, host_bytes="384MiB", nvme_bytes="4GiB", slab_bytes=None, extent_bytes=None) as node,
        VllmServer(given.dir, model, "load", kv_transfer=tierkv_at(node.endpoint), arguments=SMALL_MEMORY) as server,
    ):
        node.start()
        server.start()
        load = Load(server, starts_of(server), seed=given.seed, users=given.users, think_seconds=given.think)
        next_kill = given.minutes * 60 - given.kill_node_every

        def meanwhile(left: float) -> None:
            nonlocal next_kill
            if given.kill_node_every and left < next_kill:
                next_kill -= given.kill_node_every
                node.kill("supervisor")
                load.verdict.node_kills += 1
                node.start()

        verdict = load.run(given.minutes * 60, meanwhile)
        metrics = server.metrics()
        verdict.tokens = metrics.labelled("vllm:prompt_tokens_cached_by_source_total", "source")
        verdict.counters = {
            name.removeprefix("vllm:tierkv_").removesuffix("_total"): round(metrics.total(name), 3)
            for name in sorted(metrics.names)
            if name.startswith("vllm:tierkv_")
        }
        verdict.log_lines = look_through(server.log(), node_is_killed=bool(given.kill_node_every))
    print(json.dumps(verdict.as_object(), indent=1))
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
