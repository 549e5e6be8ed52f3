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
    """One line of the table. `reference` says what the answer was compared with; None where it is the reference."""

    dtype: str
    prompt: str
    name: str
    prompt_tokens: int
    first_token_seconds: float
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
    def __init__(
        self,
        node: Node,
        engine: EngineProcess,
        dtypes: list[str],
        *,
        pairs: int,
        new_tokens: int,
        tell: Callable[[str], None],
    ) -> None:
        self._node = node
        self._engine = engine
        self._dtypes = dtypes
        self._pairs = pairs
        self._new_tokens = new_tokens
        self._tell = tell
        self._cases: list[_Case] = []
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
        self._engine.kill()
        self._engine.start()
        self._all_again("engine killed -9", tier="host")

        self._tell("killing node and engine with -9, starting both again")
        self._kill_both()
        self._all_again("both killed -9", tier="nvme")

        self._tell("killing both once more, then tierkv warmup")
        self._kill_both()
        self.notes.append(f"tierkv warmup: {self._node.warm_up()}")
        self._all_again("both killed, warmup", tier="host")

    def _first_life(self, chat: _Case, code: _Case) -> None:
        """The code assistant comes first: it computes the system prompt, which the chat then finds."""
        self._cases += [chat, code]
        for case in (code, chat):
            self._tell(f"{case.dtype} {case.name}: cold, without and with tierkv")
            plain = self._ask("plain", case, case.tokens)
            case.cold_seconds, case.one_shot = plain["ttft"], plain["new"]
            self._note(case, "cold, without tierkv", case.tokens, plain)
            salt = "" if case is code else "cold"
            cold = self._ask("cached", case, case.tokens, salt=salt, keep="" if salt else case.name)
            self._note(case, "cold, with tierkv", case.tokens, cold, reference=ONE_SHOT, want=case.one_shot)
            self._measure_overhead(case, plain, cold)

        self._tell(f"{chat.dtype}: requests that share a prefix")
        shared = _floor(count_shared(chat.tokens, code.tokens))
        self._share(chat, "system prompt shared", chat.tokens, kept=code.name, shared=shared, keep=chat.name)
        shared = _floor(count_shared(code.tokens, code.second))
        self._share(code, "other question", code.second, kept=code.name, shared=shared)
        for case in (chat, code):
            at, name = case.reusable_tokens, case.name
            split = self._ask("split", case, case.tokens, kept=name, at=at)
            case.again = split["new"] if case.dtype != "float32" else case.one_shot
            case.kv = self._engine.ask("digest", dtype=case.dtype, kept=name, tokens=at)
            self._repeat(case, "the same again", tier="host")

    def _share(self, case: _Case, name: str, tokens: list[int], *, kept: str, shared: int, keep: str = "") -> None:
        if case.dtype == "float32":
            reference = ONE_SHOT
            want = case.one_shot if tokens is case.tokens else self._ask("plain", case, tokens)["new"]
        else:
            reference = SPLIT
            want = self._ask("split", case, tokens, kept=kept, at=shared)["new"]
        kv = self._engine.ask("digest", dtype=case.dtype, kept=kept, tokens=shared)
        found = self._ask("cached", case, tokens, keep=keep)
        self._note(case, name, tokens, found, reference=reference, want=want, kv=kv, reused=shared, tier="host")

    def _measure_overhead(self, case: _Case, plain: dict[str, Any], cold: dict[str, Any]) -> None:
        pairs = [(plain, cold)]
        for pair in range(1, self._pairs if case.name == "chat" else 1):
            again = self._ask("plain", case, case.tokens, new_tokens=1)
            pairs.append((again, self._ask("cached", case, case.tokens, new_tokens=1, salt=f"overhead {pair}")))
        self.overheads.append(
            Overhead(
                dtype=case.dtype,
                prompt=case.name,
                plain_seconds=[without["ttft"] for without, _ in pairs],
                cached_seconds=[found["ttft"] + found["store_seconds"] for _, found in pairs],
                own_seconds=[found["load_seconds"] + found["store_seconds"] for _, found in pairs],
            )
        )

    def _all_again(self, name: str, *, tier: str) -> None:
        for case in self._cases:
            self._repeat(case, name, tier=tier)

    def _repeat(self, case: _Case, name: str, *, tier: str) -> None:
        found = self._ask("cached", case, case.tokens)
        reference = ONE_SHOT if case.dtype == "float32" else SPLIT
        reused = case.reusable_tokens
        self._note(
            case, name, case.tokens, found, reference=reference, want=case.again, kv=case.kv, reused=reused, tier=tier
        )

    def _flush(self) -> None:
        for case in self._cases:
            answer = self._engine.ask("flush", dtype=case.dtype, tokens=case.tokens)
            if answer["flushed"] < len(case.tokens) // BLOCK_TOKENS:
                raise ProcessFailed(f"{case.dtype} {case.name}: not all blocks reached the disk: {answer}")

    def _kill_both(self) -> None:
        self._engine.kill()
        self._node.kill()
        seconds = self._node.start()
        self.notes.append(f"node ready again {seconds:.1f} s after kill -9")
        self._engine.start()

    def _ask(self, verb: str, case: _Case, tokens: list[int], **arguments: Any) -> dict[str, Any]:
        arguments.setdefault("new_tokens", self._new_tokens)
        answer: dict[str, Any] = self._engine.ask(verb, dtype=case.dtype, tokens=tokens, **arguments)
        return answer

    def _note(
        self,
        case: _Case,
        name: str,
        tokens: list[int],
        found: dict[str, Any],
        *,
        reference: str | None = None,
        want: list[int] | None = None,
        kv: str | None = None,
        reused: int = 0,
        tier: str = "",
    ) -> None:
        step = Step(
            dtype=case.dtype,
            prompt=case.name,
            name=name,
            prompt_tokens=len(tokens),
            first_token_seconds=found["ttft"],
            cold_seconds=case.cold_seconds,
            reused_tokens=found.get("reused_tokens", 0),
            host_tokens=found.get("host_tokens", 0),
            nvme_tokens=found.get("nvme_tokens", 0),
            loaded_bytes=found.get("loaded_bytes", 0),
            stored_bytes=found.get("stored_bytes", 0),
            reference=reference,
            same_tokens=want is None or found["new"] == want,
            same_bytes=None if kv is None else found["kv"] == kv,
            problem=problem_of(found, reused=reused, tier=tier),
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
