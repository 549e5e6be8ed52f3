"""`tierkv warmup --prompts`: have an engine compute prompts, so that the cache has them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from tierkv_cli.engine_http import Address, Computed, Engine, EngineAway, EngineRefuses, PromptRefused, parse_address
from tierkv_cli.options import Where
from tierkv_cli.prompt_file import BadPrompt, Prompt, parse_prompt, read_lines

if TYPE_CHECKING:
    from tierkv.wire.messages import StatusReply
    from tierkv_cli.progress import Pace

INCOMPLETE = 4

LOOK_SECONDS = 0.1
END_SECONDS = 5.0
BUSY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""An engine that is busy is asked again after these pauses, and then the prompt has failed."""

SHOWN_ERRORS = 10
KEPT_ERRORS = 1_000


@dataclass(frozen=True, slots=True)
class Failed:
    line: int
    status: int
    problem: str


def send_prompts(
    *,
    where: Where,
    path: str,
    engine: str,
    model: str | None,
    concurrency: int,
    skip: int,
    api_key_env: str | None,
    as_json: bool,
) -> int:
    """The command; its exit code. Raises UsageError for what can't be sent, and NodeUnreachable."""
    from tierkv.errors import NodeUnreachable
    from tierkv_cli.output import print_json
    from tierkv_cli.progress import Meter, Pace
    from tierkv_cli.reach import operator, wait_ready

    address = address_of(engine, api_key_env)
    prompts = read_prompts(path, skip)
    begun = time.monotonic()
    with operator(where) as node, Meter("warmup", as_json=as_json) as meter:
        wait_ready(node, meter)
        before = node.status()
        crew = Crew(address, prompts, model or model_of(address), concurrency)
        pace = Pace()
        try:
            with crew.at_work():
                while crew.is_busy and crew.stopped_by is None:
                    crew.wait(LOOK_SECONDS)
                    pace.note(crew.num_over, len(prompts))
                    meter.tell(crew.num_over, len(prompts), _words(crew, pace), _progress(crew, pace))
        except KeyboardInterrupt:
            crew.interrupted = True
        try:
            seen = since(before, node.status())
        except NodeUnreachable as error:  # what the engine did is worth telling all the same
            seen = Seen(problem=str(error))
    outcome = Outcome(crew, skip, seen, time.monotonic() - begun)
    if as_json:
        print_json(outcome.as_object())
    else:
        outcome.tell()
    return 0 if outcome.is_complete else INCOMPLETE


def address_of(engine: str, api_key_env: str | None) -> Address:
    key = ""
    if api_key_env is not None:
        key = os.environ.get(api_key_env, "")
        if not key:
            raise _usage(f"--api-key-env: the environment has no {api_key_env}")
    try:
        return parse_address(engine, key)
    except ValueError as error:
        raise _usage(f"--engine: {error}") from None


def read_prompts(path: str, skip: int = 0) -> list[Prompt]:
    """All are looked at before the first is sent."""
    try:
        lines = read_lines(path)
    except (OSError, UnicodeError) as error:
        raise _usage(f"--prompts: {path} can't be read: {error}") from None
    prompts = []
    for number, line in lines:
        try:
            prompts.append(parse_prompt(number, line))
        except BadPrompt as error:
            raise _usage(f"--prompts: line {number}: {error}") from None
    return prompts[skip:]


def model_of(address: Address) -> str:
    engine = Engine(address)
    try:
        return engine.find_model()
    finally:
        engine.close()


def _usage(problem: str) -> click.UsageError:
    return click.UsageError(problem, click.get_current_context(silent=True))


# ---- sending


@dataclass(eq=False)
class Crew:
    """Threads that have the engine compute one prompt after the other. The first that finds it gone stops all."""

    address: Address
    prompts: list[Prompt]
    model: str
    concurrency: int
    failed: deque[Failed] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))
    num_failed: int = 0
    num_done: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    stopped_by: EngineAway | EngineRefuses | None = None
    interrupted: bool = False
    _next: int = 0
    _over: set[int] = field(default_factory=set)
    _leading: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _engines: list[Engine] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def num_over(self) -> int:
        return self.num_done + self.num_failed

    @property
    def num_leading(self) -> int:
        """Of the prompts from the first on: all of these are over."""
        return self._leading

    @property
    def is_busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Leaving it stops what is still being sent."""
        for _ in range(min(self.concurrency, len(self.prompts))):
            engine = Engine(self.address)
            self._engines.append(engine)
            self._threads.append(threading.Thread(target=self._work_off, args=(engine,), daemon=True))
        try:
            for thread in self._threads:
                thread.start()
            yield
        finally:
            self._stop.set()
            if self.is_busy:
                for engine in self._engines:
                    engine.end()
            deadline = time.monotonic() + END_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def wait(self, seconds: float) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(seconds)
                return

    def _work_off(self, engine: Engine) -> None:
        try:
            while (index := self._take()) is not None:
                self._send(engine, index)
        except (EngineAway, EngineRefuses) as error:
            with self._lock:
                if not self._stop.is_set():
                    self.stopped_by = error
            self._stop.set()
        finally:
            engine.close()

    def _take(self) -> int | None:
        with self._lock:
            if self._stop.is_set() or self._next >= len(self.prompts):
                return None
            self._next += 1
            return self._next - 1

    def _send(self, engine: Engine, index: int) -> None:
        prompt = self.prompts[index]
        body = {"model": self.model} | prompt.body
        for pause in (*BUSY_SECONDS, None):
            try:
                computed = engine.compute(prompt.path, body)
            except PromptRefused as error:
                if error.is_busy and pause is not None:
                    if self._stop.wait(pause):
                        return
                    continue
                self._note_failed(index, Failed(prompt.line, error.status, error.problem))
                return
            self._note_done(index, computed)
            return

    def _note_done(self, index: int, computed: Computed) -> None:
        with self._lock:
            self.num_done += 1
            self.prompt_tokens += computed.prompt_tokens
            if computed.cached_tokens is not None:
                self.cached_tokens = (self.cached_tokens or 0) + computed.cached_tokens
            self._note_over(index)

    def _note_failed(self, index: int, failed: Failed) -> None:
        with self._lock:
            self.num_failed += 1
            self.failed.append(failed)
            self._note_over(index)

    def _note_over(self, index: int) -> None:
        self._over.add(index)
        while self._leading in self._over:
            self._over.remove(self._leading)
            self._leading += 1


# ---- what the node saw of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Tokens of all requests that the node had meanwhile, of this engine and of others. `problem`: why it does not
    tell."""

    asked: int = 0
    hit: int = 0
    stored: int = 0
    was_restarted: bool = False
    problem: str = ""


def since(before: StatusReply, after: StatusReply) -> Seen:
    was_restarted = before.incarnation != after.incarnation

    def difference(*names: str) -> int:
        start = 0.0 if was_restarted else sum(before.counters.get(name, 0) for name in names)
        return round(sum(after.counters.get(name, 0) for name in names) - start)

    return Seen(
        asked=difference("asked_tokens"),
        hit=difference("hit_tokens.host", "hit_tokens.nvme"),
        stored=difference("stored_tokens"),
        was_restarted=was_restarted,
    )


# ---- what is said


def _words(crew: Crew, pace: Pace) -> str:
    from tierkv_cli.output import count, duration

    parts = [f"{crew.num_over:,} of {count(len(crew.prompts), 'prompt')}", f"{crew.prompt_tokens:,} tokens"]
    if crew.num_failed:
        parts.append(f"{crew.num_failed:,} failed")
    if pace.per_second:
        parts.append(f"{pace.per_second:.1f} prompts/s")
    if pace.seconds_left:
        parts.append(f"{duration(pace.seconds_left)} left")
    return ", ".join(parts)


def _progress(crew: Crew, pace: Pace) -> dict[str, object]:
    left = pace.seconds_left
    return {
        "state": "sending",
        "prompts": len(crew.prompts),
        "done": crew.num_done,
        "failed": crew.num_failed,
        "prompt_tokens": crew.prompt_tokens,
        "prompts_per_second": round(pace.per_second, 2),
        "seconds_left": None if left is None else round(left, 1),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    crew: Crew
    skip: int
    seen: Seen
    seconds: float

    @property
    def is_complete(self) -> bool:
        crew = self.crew
        return crew.num_done == len(crew.prompts) and not crew.interrupted and not self.seen.problem

    @property
    def _is_unseen(self) -> bool:
        """The engine computed something, and the node heard nothing of it: it need not be wrong, but may well be."""
        seen = self.seen
        return bool(self.crew.num_done) and not (seen.asked or seen.stored or seen.problem)

    @property
    def _next(self) -> int:
        """With what --skip the command goes on."""
        return self.skip + self.crew.num_leading

    def as_object(self) -> dict[str, object]:
        crew = self.crew
        return {
            "prompts": len(crew.prompts),
            "skipped": self.skip,
            "done": crew.num_done,
            "failed": crew.num_failed,
            "prompt_tokens": crew.prompt_tokens,
            "cached_tokens": crew.cached_tokens,
            "node": {"asked_tokens": self.seen.asked, "hit_tokens": self.seen.hit, "stored_tokens": self.seen.stored},
            "errors": [
                {"line": one.line, "status": one.status, "problem": one.problem}
                for one in sorted(crew.failed, key=lambda one: one.line)
            ],
            "problem": str(crew.stopped_by) if crew.stopped_by else self.seen.problem,
            "next_skip": self._next,
            "complete": self.is_complete,
            "interrupted": crew.interrupted,
            "seconds": round(self.seconds, 3),
        }

    def tell(self) -> None:
        from tierkv_cli.output import count, duration

        crew, seen = self.crew, self.seen
        cached = "" if crew.cached_tokens is None else f", of which it had {crew.cached_tokens:,} cached"
        click.echo(
            f"{crew.num_done:,} of {count(len(crew.prompts), 'prompt')} computed in {duration(self.seconds)}: "
            f"{crew.prompt_tokens:,} tokens{cached}"
        )
        if not seen.problem:
            click.echo(f"the node was asked for {seen.asked:,} tokens, had {seen.hit:,}, and stored {seen.stored:,}")
        for problem in self._problems():
            click.echo(f"tierkv: {problem}", err=True)

    def _problems(self) -> Iterator[str]:
        from tierkv_cli.output import count

        crew = self.crew
        for one in sorted(crew.failed, key=lambda one: one.line)[:SHOWN_ERRORS]:
            yield f"line {one.line}: {one.status}: {one.problem}"
        if crew.num_failed:
            more = f" ({crew.num_failed - SHOWN_ERRORS:,} not shown)" if crew.num_failed > SHOWN_ERRORS else ""
            yield f"{count(crew.num_failed, 'prompt')} failed{more}"
        if self.seen.problem:
            yield self.seen.problem
        if self.seen.was_restarted:
            yield "the node was started again meanwhile: what it had in memory only is gone"
        if self._is_unseen:
            yield "the node heard nothing of it: the engine had it in a cache of its own, or does not use this node"
        if crew.stopped_by is not None:
            yield str(crew.stopped_by)
        if crew.interrupted:
            yield "interrupted"
        if crew.interrupted or crew.stopped_by is not None:
            yield f"go on with --skip {self._next}, or run the same command again: what is cached costs little"
