"""What the demo does, step by step, and what must come out of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from demo_lib.processes import EngineProcess, Node, ProcessFailed
from demo_lib.prompts import count_shared

BLOCK_TOKENS = 16
ONE_SHOT, SPLIT = "one shot", "split"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the table, times being medians of `runs`. `reference` says what the answer was compared with; None
    where it is the reference."""

    dtype: str
    prompt: str
    name: str
    prompt_tokens: int
    first_token_seconds: float
    runs: int
    cold_seconds: float
    reused_tokens: int = 0
    host_tokens: int = 0
    nvme_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    reference: str | None = None
    same_tokens: bool = True
    same_bytes: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Cold requests without and with tierkv, in turns, each of the latter under a salt of its own: seconds to the first
    token, with tierkv plus those of storing. `own_seconds` of these were spent in calls of ours."""

    dtype: str
    prompt: str
    plain_seconds: list[float]
    cached_seconds: list[float]
    own_seconds: list[float]

    @property
    def pairs(self) -> int:
        return len(self.plain_seconds)

    @property
    def share(self) -> float:
        return statistics.median(self.cached_seconds) / statistics.median(self.plain_seconds) - 1

    @property
    def own_share(self) -> float:
        return statistics.median(self.own_seconds) / statistics.median(self.plain_seconds)


@dataclass(slots=True)
class _Case:
    """One prompt in one element type, and what is known about it from the engine's first life."""

    dtype: str
    name: str
    tokens: list[int]
    second: list[int]
    cold_seconds: float = 0.0
    one_shot: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # the answer when all but the last block is reused
    kv: str = ""

    @property
    def reusable_tokens(self) -> int:
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Story:
    """What is quick is done `rounds` times, and the chat runs cold `pairs` times; times are medians over them."""

    def __init__(
        self,
        node: Node,
        engine: EngineProcess,
        dtypes: list[str],
        *,
        rounds: int,
        pairs: int,
        new_tokens: int,
        tell: Callable[[str], None],
    ) -> None:
        self._node = node
        self._engine = engine
        self._dtypes = dtypes
        self._rounds = rounds
        self._pairs = pairs
        self._new_tokens = new_tokens
        self._tell = tell
        self._cases: list[_Case] = []
        self._ready_seconds: list[float] = []
        self.steps: list[Step] = []
        self.overheads: list[Overhead] = []
        self.notes: list[str] = []

    def run(self, *, code_tokens: int) -> None:
        self._tell("starting a node and an engine")
        self._node.start()
        self._engine.start()
        chat, code = self._engine.ask("prompts", code_tokens=code_tokens)
        for dtype in self._dtypes:
            self._first_life(_Case(dtype, **_texts(chat)), _Case(dtype, **_texts(code)))
        self._flush()

        self._tell("killing the engine with -9, starting another one")
        self._after(self._restart_engine, "engine killed -9", tier="host")
        self._tell("killing node and engine with -9, starting both again")
        self._after(self._restart_both, "both killed -9", tier="nvme")
        self._tell("the same, then tierkv warmup")
        self._after(self._restart_both_and_warm_up, "both killed, warmup", tier="host")
        self.notes.insert(0, f"node ready again {statistics.median(self._ready_seconds):.1f} s after kill -9")

    def _first_life(self, chat: _Case, code: _Case) -> None:
        """The code assistant comes first: it computes the system prompt, which the chat then finds."""
        self._cases += [chat, code]
        self._cold(code, pairs=1, keeps=True)
        self._cold(chat, pairs=self._pairs, keeps=False)

        self._tell(f"{chat.dtype}: requests that share a prefix")
        shared = _floor(count_shared(chat.tokens, code.tokens))
        self._share(chat, "system prompt shared", chat.tokens, kept=code.name, shared=shared, keep=chat.name)
        shared = _floor(count_shared(code.tokens, code.second))
        self._share(code, "other question", code.second, kept=code.name, shared=shared)
        for case in (chat, code):
            at = case.reusable_tokens
            split = self._ask("split", case, case.tokens, kept=case.name, at=at)
            case.again = split["new"] if case.dtype != "float32" else case.one_shot
            case.kv = self._engine.ask("digest", dtype=case.dtype, kept=case.name, tokens=at)
            again = [self._ask("cached", case, case.tokens, **self._length(turn)) for turn in range(self._rounds)]
            self._note_again(case, "the same again", again, tier="host")

    def _cold(self, case: _Case, *, pairs: int, keeps: bool) -> None:
        """Without and with tierkv in turns. Under a salt of its own a prompt is cold each time; one that `keeps` goes
        without, and later requests find it."""
        self._tell(f"{case.dtype} {case.name}: cold, without and with tierkv")
        plain, cached = [], []
        for turn in range(pairs):
            plain.append(self._ask("plain", case, case.tokens, **self._length(turn)))
            where = {"keep": case.name} if keeps else {"salt": f"cold {turn}"}
            cached.append(self._ask("cached", case, case.tokens, **self._length(turn), **where))
        case.one_shot = plain[0]["new"]
        case.cold_seconds = statistics.median(found["ttft"] for found in plain)
        self._note(case, "cold, without tierkv", case.tokens, plain)
        self._note(case, "cold, with tierkv", case.tokens, cached, reference=ONE_SHOT, want=case.one_shot)
        self.overheads.append(
            Overhead(
                dtype=case.dtype,
                prompt=case.name,
                plain_seconds=[found["ttft"] for found in plain],
                cached_seconds=[found["ttft"] + found["store_seconds"] for found in cached],
                own_seconds=[found["load_seconds"] + found["store_seconds"] for found in cached],
            )
        )

    def _share(self, case: _Case, name: str, tokens: list[int], *, kept: str, shared: int, keep: str = "") -> None:
        if case.dtype == "float32":
            reference = ONE_SHOT
            want = case.one_shot if tokens is case.tokens else self._ask("plain", case, tokens)["new"]
        else:
            reference = SPLIT
            want = self._ask("split", case, tokens, kept=kept, at=shared)["new"]
        kv = self._engine.ask("digest", dtype=case.dtype, kept=kept, tokens=shared)
        found = [self._ask("cached", case, tokens, keep=keep)]
        self._note(case, name, tokens, found, reference=reference, want=want, kv=kv, reused=shared, tier="host")

    def _after(self, restart: Callable[[], None], name: str, *, tier: str) -> None:
        """The first request for each prompt after a restart, `rounds` times."""
        found: list[list[dict[str, Any]]] = [[] for _ in self._cases]
        for turn in range(self._rounds):
            restart()
            for index, case in enumerate(self._cases):
                found[index].append(self._ask("cached", case, case.tokens, **self._length(turn)))
        for case, answers in zip(self._cases, found, strict=True):
            self._note_again(case, name, answers, tier=tier)

    def _restart_engine(self) -> None:
        self._engine.kill()
        self._engine.start()

    def _restart_both(self) -> None:
        self._engine.kill()
        self._node.kill()
        self._ready_seconds.append(self._node.start())
        self._engine.start()

    def _restart_both_and_warm_up(self) -> None:
        self._restart_both()
        self.notes = [f"tierkv warmup: {self._node.warm_up()}"]

    def _flush(self) -> None:
        for case in self._cases:
            answer = self._engine.ask("flush", dtype=case.dtype, tokens=case.tokens)
            if answer["flushed"] < len(case.tokens) // BLOCK_TOKENS:
                raise ProcessFailed(f"{case.dtype} {case.name}: not all blocks reached the disk: {answer}")

    def _length(self, turn: int) -> dict[str, int]:
        """The first time the whole answer is compared, then the time of the first token is what counts."""
        return {"new_tokens": self._new_tokens if turn == 0 else 1}

    def _ask(self, verb: str, case: _Case, tokens: list[int], **arguments: Any) -> dict[str, Any]:
        arguments.setdefault("new_tokens", self._new_tokens)
        answer: dict[str, Any] = self._engine.ask(verb, dtype=case.dtype, tokens=tokens, **arguments)
        return answer

    def _note_again(self, case: _Case, name: str, answers: list[dict[str, Any]], *, tier: str) -> None:
        """A request for the prompt as it was, of which all but the last block can be reused."""
        self._note(
            case,
            name,
            case.tokens,
            answers,
            reference=ONE_SHOT if case.dtype == "float32" else SPLIT,
            want=case.again,
            kv=case.kv,
            reused=case.reusable_tokens,
            tier=tier,
        )

    def _note(
        self,
        case: _Case,
        name: str,
        tokens: list[int],
        answers: list[dict[str, Any]],
        *,
        reference: str | None = None,
        want: list[int] | None = None,
        kv: str | None = None,
        reused: int = 0,
        tier: str = "",
    ) -> None:
        first = answers[0]
        problems = [problem_of(answer, reused=reused, tier=tier) for answer in answers]
        step = Step(
            dtype=case.dtype,
            prompt=case.name,
            name=name,
            prompt_tokens=len(tokens),
            first_token_seconds=statistics.median(answer["ttft"] for answer in answers),
            runs=len(answers),
            cold_seconds=case.cold_seconds,
            reused_tokens=first.get("reused_tokens", 0),
            host_tokens=first.get("host_tokens", 0),
            nvme_tokens=first.get("nvme_tokens", 0),
            loaded_bytes=first.get("loaded_bytes", 0),
            stored_bytes=first.get("stored_bytes", 0),
            reference=reference,
            same_tokens=want is None or all(answer["new"] == want[: len(answer["new"])] for answer in answers),
            same_bytes=None if kv is None else all(answer["kv"] == kv for answer in answers),
            problem=next(filter(None, problems), ""),
        )
        self.steps.append(step)


def problem_of(found: dict[str, Any], *, reused: int, tier: str) -> str:
    """Why a step did not do what it should; empty when it did."""
    if fault := found.get("fault"):
        return str(fault)
    if found.get("reused_tokens", 0) != reused:
        return f"reused {found.get('reused_tokens')} tokens, not {reused} ({found.get('reason') or 'not cached'})"
    if tier == "host" and found["nvme_tokens"]:
        return f"{found['nvme_tokens']} tokens came from NVMe and should have been in memory"
    if tier == "nvme" and not found["nvme_tokens"]:
        return "nothing came from NVMe"
    return ""


def _texts(prompt: dict[str, Any]) -> dict[str, Any]:
    return {name: prompt[name] for name in ("name", "tokens", "second")}


def _floor(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
