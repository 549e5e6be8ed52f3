"""vLLM with tierkv, with vLLM's own tiering, with LMCache, and alone: the same prompts, one request at a time, each
asked of all of them in turn before the next one, the order turning with the prompts. All four servers run at a time;
vLLM alone is started once.

    cold                        a prompt that nobody has seen
    prefix in memory            vLLM has emptied its own prefix cache, everything else is where it was
    after an engine restart     vLLM was killed and started again; what the cache runs outside of it went on
    everything restarted        the cache was stopped too, and the kernel has forgotten the pages of its files
    files overwritten           then also, for prompts whose files had been filled with random bytes of the same size

A started server is asked something short before it is measured. The prompts are random token ids. Each situation comes
with the number of tokens that vLLM counted as found in the cache. A cache that fails is left out, and why is said.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path

import msgspec
import psutil

from benchmarks.measure import Plan
from benchmarks.report import Figure, Remark, interval_of_median, of_seconds, of_values
from benchmarks.vllm_peers.caches import BLOCK_TOKENS, MEMORY_BYTES, Cache, CacheFailed, Lmcache, OwnTiering, Tierkv
from e2e.engines.harness import ServerFailed, VllmServer
from tierkv.torture.processes import look
from tierkv.torture.waits import NeverCame, wait_until

QUESTION = "what does a request to vLLM wait for, with which cache?"

PLAIN = "vLLM alone"
DTYPE = "bfloat16"
SHAPES = (2_000, 4_000)
"""Tokens of a prompt."""

NEW_TOKENS = 16
KV_BYTES_PER_TOKEN = 23_040
"""SmolLM2-135M in bf16: 30 layers x 2 x 3 heads x 64 x 2 bytes."""

COLD, MEMORY, ENGINE, EVERYTHING = (
    "cold",
    "prefix in memory",
    "after an engine restart",
    "everything restarted",
)
MOST_OVERHEAD_PERCENT = 5.0
MOST_SCHEDULER_MS = 1.0
MOST_RATIO_OF_COLD = 1 / 8
STORED_SECONDS = 120.0
UNCHANGED_SECONDS = 3.0
SERVER_BYTES = 2_500 * 2**20
SPARE_BYTES = 2**30
"""What a vLLM takes with 1 GiB of KV memory, and what is left to everybody else."""

VOCABULARY = range(1_000, 40_000)
"""Ids of ordinary words and parts of words."""


class Times(msgspec.Struct):
    """A line of vllm_peers.timed."""

    request_seconds: float
    request_cpu_seconds: float
    step_seconds: float
    step_cpu_seconds: float
    waiting_seconds: float
    waiting_cpu_seconds: float
    steps: int
    waits: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: seconds until its first token and until its last, what the processes of the vLLM ran meanwhile, the
    tokens it said, how many tokens of its prompt vLLM counted as from the cache."""

    first_token: float
    whole: float
    processor: float
    tokens: tuple[int, ...]
    from_cache: int


@dataclass
class Candidate:
    """One of those that are compared. `asked` by situation and length of prompt, in the order of the prompts. `failed`:
    why it has left the comparison."""

    folder: Path
    model: Path
    cache: Cache | None = None
    server: VllmServer | None = None
    asked: defaultdict[tuple[str, int], list[Asked]] = field(default_factory=lambda: defaultdict(list))
    tokens_stored: int = 0
    earlier_files: set[Path] = field(default_factory=set)
    failed: str = ""

    @property
    def name(self) -> str:
        return self.cache.name if self.cache is not None else PLAIN

    @property
    def times(self) -> Path:
        return self.folder / "times.jsonl"

    def start(self, life: str, *, is_timed: bool = False) -> None:
        """A new vLLM. The cache runs already."""
        variables = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}  # its processes need not import everything again
        kv_transfer = None
        arguments: tuple[str, ...] = ()
        if self.cache is not None:
            connector = self.cache.connector
            arguments = connector.arguments
            variables |= connector.variables
            if is_timed:
                variables |= connector.timed_variables(self.times)
            kv_transfer = connector.kv_transfer_timed() if is_timed else connector.kv_transfer()
        self.server = VllmServer(
            self.folder,
            self.model,
            life,
            kv_transfer=kv_transfer,
            dtype=DTYPE,
            block_tokens=BLOCK_TOKENS,
            max_model_len=8_192,
            arguments=arguments,
            variables=variables,
        )
        seconds = self.server.start()
        print(f"vllm: {self.name}, {life} life: started in {seconds:.0f} s", file=sys.stderr)
        self.ask(_prompt(f"warm {life}", BLOCK_TOKENS // 2))

    def end(self) -> None:
        if self.server is not None:
            if self.cache is not None:
                self.cache.unname_memory()
            self.server.close()
            self.server = None

    def ask(self, prompt: Sequence[int]) -> Asked:
        assert self.server is not None
        with self.server.counted(1) as counted:
            processor = _processor_seconds(self.server)
            start = time.perf_counter()
            with self.server.stream(prompt, new_tokens=NEW_TOKENS) as stream:
                answer = stream.rest()
            whole = time.perf_counter() - start
        processor = _processor_seconds(self.server) - processor
        if answer.first_token_seconds is None or len(answer.tokens) != NEW_TOKENS:
            raise ServerFailed(f"{len(answer.tokens)} tokens came instead of {NEW_TOKENS}")
        return Asked(answer.first_token_seconds, whole, processor, answer.tokens, counted.external)

    def files(self) -> dict[Path, int]:
        """Bytes on disk of each."""
        assert self.cache is not None
        return {path: path.stat().st_blocks * 512 for path in self.cache.files()}


def _processor_seconds(server: VllmServer) -> float:
    """Of all its processes, since they were started."""
    return sum(stat.cpu_seconds for pid in server.pids() if (stat := look(pid)) is not None)


class Comparison:
    """Who still takes part, and what each of them has to be asked next."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = list(candidates)
        self.remarks: list[Remark] = []

    @property
    def plain(self) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.cache is None)

    @property
    def running(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.failed]

    @property
    def caches(self) -> list[Candidate]:
        return [candidate for candidate in self.running if candidate.cache is not None]

    def each(self, do: Callable[[Candidate], object], candidates: Sequence[Candidate] | None = None) -> None:
        """One after another. Another's cache that fails leaves the comparison; tierkv and vLLM alone may not."""
        for candidate in self.running if candidates is None else candidates:
            try:
                do(candidate)
            except (CacheFailed, ServerFailed, NeverCame, OSError, HTTPException) as error:
                if candidate.name in (PLAIN, Tierkv.name):
                    raise
                candidate.failed = str(error)
                self.remarks.append(Remark(f"{candidate.name} left: {error}"))
                candidate.end()

    def ask(self, situation: str, prompts: Sequence[list[int]], candidates: Sequence[Candidate]) -> None:
        print(f"vllm: {situation}", file=sys.stderr)
        for number, prompt in enumerate(prompts):

            def ask(candidate: Candidate, prompt: list[int] = prompt) -> None:
                candidate.asked[situation, len(prompt)].append(candidate.ask(prompt))

            still = [candidate for candidate in candidates if not candidate.failed]
            first = number % max(1, len(still))
            self.each(ask, still[first:] + still[:first])


@dataclass(frozen=True, slots=True)
class Prompts:
    """`main` are asked in every situation. `more` are asked once, for more pairs with and without tierkv. `spoiled` are
    those whose files are overwritten, `timed` those that are new while the connectors have clocks."""

    main: list[list[int]]
    more: list[list[int]]
    spoiled: list[list[int]]
    timed: list[list[int]]

    @classmethod
    def of(cls, rounds: int) -> Prompts:
        def make(name: str, shapes: Sequence[int]) -> list[list[int]]:
            return [_prompt(f"{name} {number}", tokens) for number in range(rounds) for tokens in shapes]

        return cls(
            main=make("main", SHAPES),
            more=make("more", SHAPES),
            spoiled=make("spoiled", (min(SHAPES),)),
            timed=make("timed", (max(SHAPES),)),
        )


def measure(plan: Plan) -> Iterator[Figure | Remark]:
    assert plan.model is not None, "scripts/bench vllm names the model"
    prompts = Prompts.of(plan.rounds(4, 2))
    yield _engine()
    with ExitStack() as opened:
        plain, caches = _candidates(plan, plan.model, opened)
        plain.start("only")
        groups = _together(caches)
        for group in groups:
            if len(group) < len(caches):
                names = ", ".join(candidate.name for candidate in group)
                yield Remark(f"{names}: measured beside {PLAIN} only, for want of memory")
            yield from _compare(Comparison([plain, *group]), prompts)
            if group is groups[0]:
                for tokens in SHAPES:
                    yield _first_token(PLAIN, COLD, tokens, plain.asked[COLD, tokens])


def _compare(compared: Comparison, prompts: Prompts) -> Iterator[Figure | Remark]:
    """vLLM alone has been started, and forgets what it was asked before."""
    compared.plain.asked.clear()
    _forget(compared.plain)
    for candidate in compared.caches:
        assert candidate.cache is not None
        yield Remark(candidate.cache.version)
    _first_life(compared, prompts)
    yield from _on_disk(compared)
    yield from _engines_restarted(compared, prompts)
    _everything_restarted(compared, prompts)
    for tokens in SHAPES:
        yield from _waits(compared, tokens)
        yield from _overhead(compared, tokens)
    yield from _wrong_answers(compared)
    yield from compared.remarks


def _candidates(plan: Plan, model: Path, opened: ExitStack) -> tuple[Candidate, list[Candidate]]:
    """vLLM alone, and with each cache."""
    makers: tuple[Callable[[Path], Cache] | None, ...] = (
        None,
        Tierkv,
        OwnTiering,
        partial(Lmcache, environment_dir=plan.directory.parent / "lmcache"),
    )
    candidates = []
    for number, make in enumerate(makers):
        folder = plan.directory / str(number)
        folder.mkdir()
        candidate = Candidate(folder, model)
        if make is not None:
            candidate.cache = make(folder / "cache")
            opened.callback(candidate.cache.close)
        opened.callback(candidate.end)
        candidates.append(candidate)
    return candidates[0], candidates[1:]


def _together(caches: list[Candidate]) -> list[list[Candidate]]:
    """Which are measured at a time, beside vLLM alone: all, if the machine has the memory; else each by itself."""
    wanted = SERVER_BYTES + len(caches) * (SERVER_BYTES + MEMORY_BYTES) + SPARE_BYTES
    if psutil.virtual_memory().available >= wanted:
        return [caches]
    return [[candidate] for candidate in caches]


def _engine() -> Remark:
    import torch  # noqa: PLC0415
    import vllm  # noqa: PLC0415

    return Remark(
        f"vLLM {vllm.__version__} for CPUs, torch {torch.__version__}, SmolLM2-135M-Instruct, {DTYPE}, blocks of "
        f"{BLOCK_TOKENS} tokens, one thread"
    )


# ---- the lives of the servers


def _first_life(compared: Comparison, prompts: Prompts) -> None:
    compared.each(_start_cache, compared.caches)
    compared.each(lambda candidate: candidate.start("first"), compared.caches)
    rehearsal = [_prompt("rehearsal", tokens) for tokens in SHAPES]
    compared.ask("rehearsal", rehearsal, compared.running)
    compared.ask(COLD, prompts.main, compared.running)
    _wait_stored(compared, rehearsal + prompts.main)
    compared.each(_forget, compared.caches)
    compared.ask(MEMORY, prompts.main, compared.caches)


def _engines_restarted(compared: Comparison, prompts: Prompts) -> Iterator[Figure]:
    """The connectors have clocks in them, which take a microsecond a call."""
    compared.each(lambda candidate: candidate.end(), compared.caches)
    compared.each(lambda candidate: candidate.start("second", is_timed=True), compared.caches)
    compared.each(_forget_times, compared.caches)
    compared.ask(ENGINE, [prompt for prompt in prompts.main if len(prompt) == min(SHAPES)], compared.caches)
    compared.each(_forget_times, compared.caches)
    compared.ask(ENGINE, [prompt for prompt in prompts.main if len(prompt) == max(SHAPES)], compared.caches)
    yield from _scheduler(compared, ENGINE)
    compared.each(_forget_times, compared.caches)
    compared.ask("timed", prompts.timed, compared.caches)
    yield from _scheduler(compared, COLD)


def _everything_restarted(compared: Comparison, prompts: Prompts) -> None:
    compared.each(_wait_quiet, compared.caches)
    compared.each(_note_files, compared.caches)
    compared.ask("right", prompts.spoiled, compared.caches)
    compared.each(_wait_quiet, compared.caches)
    _end_everything(compared)
    compared.each(_fill_new_files_with_noise, compared.caches)
    compared.each(_drop_pages, compared.caches)
    compared.each(_start_cache, compared.caches)
    compared.each(lambda candidate: candidate.start("third"), compared.caches)
    compared.ask(EVERYTHING, prompts.main, compared.caches)
    compared.ask("spoiled", prompts.spoiled, compared.caches)
    with_tierkv = [candidate for candidate in compared.running if candidate.name in (PLAIN, Tierkv.name)]
    if len(with_tierkv) > 1:
        compared.ask(COLD, prompts.more, with_tierkv)
    _end_everything(compared)


def _end_everything(compared: Comparison) -> None:
    compared.each(lambda candidate: candidate.end(), compared.caches)
    compared.each(_stop_cache, compared.caches)


def _start_cache(candidate: Candidate) -> None:
    assert candidate.cache is not None
    candidate.cache.start()


def _stop_cache(candidate: Candidate) -> None:
    assert candidate.cache is not None
    candidate.cache.stop()


def _forget(candidate: Candidate) -> None:
    assert candidate.server is not None
    candidate.server.reset_prefix_cache()


def _wait_stored(compared: Comparison, prompts: list[list[int]]) -> None:
    """Until all that was computed is on disk, and nothing is written any more; a cache that doesn't store everything is
    not waited for without end."""
    tokens = sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts)

    def wait(candidate: Candidate) -> None:
        candidate.tokens_stored = tokens
        wanted = tokens * KV_BYTES_PER_TOKEN
        try:
            _wait_quiet(candidate, least_bytes=wanted)
        except NeverCame:
            share = sum(candidate.files().values()) / wanted
            compared.remarks.append(
                Remark(f"{candidate.name} had written {share:.0%} of what was computed after {STORED_SECONDS:g} s")
            )

    compared.each(wait, compared.caches)


def _wait_quiet(candidate: Candidate, least_bytes: int = 0) -> None:
    """Until it has written so much, and writes no more."""
    seen: dict[Path, int] = {}
    since = time.monotonic()

    def is_quiet() -> bool:
        nonlocal seen, since
        now = candidate.files()
        if now != seen:
            seen, since = now, time.monotonic()
        return sum(now.values()) >= least_bytes and time.monotonic() - since > UNCHANGED_SECONDS

    wait_until(is_quiet, f"{candidate.name} has written {least_bytes} bytes", STORED_SECONDS)


def _note_files(candidate: Candidate) -> None:
    candidate.earlier_files = set(candidate.files())


def _fill_new_files_with_noise(candidate: Candidate) -> None:
    for path in candidate.files().keys() - candidate.earlier_files:
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
            os.fsync(file.fileno())


def _drop_pages(candidate: Candidate) -> None:
    os.sync()  # pages that are still to be written can't be dropped
    for path in candidate.files():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# ---- figures


def _on_disk(compared: Comparison) -> Iterator[Figure]:
    for candidate in compared.caches:
        sizes = candidate.files()
        plain = candidate.tokens_stored * KV_BYTES_PER_TOKEN
        yield of_values(
            f"on disk: {candidate.name}",
            [sum(sizes.values()) / 1e6],
            unit="MB",
            beside="MB of KV",
            limit=[plain / 1e6],
            note=f"{len(sizes)} files",
            labels={"what": "disk", "system": candidate.name},
        )


def _waits(compared: Comparison, tokens: int) -> Iterator[Figure]:
    for situation in (COLD, MEMORY, ENGINE, EVERYTHING):
        for candidate in compared.caches:
            asked = candidate.asked[situation, tokens]
            cold = candidate.asked[COLD, tokens][: len(asked)]
            is_promised = candidate.name == Tierkv.name and situation == EVERYTHING and tokens == max(SHAPES)
            yield _first_token(
                candidate.name,
                situation,
                tokens,
                asked,
                cold=None if situation == COLD else cold,
                most_ratio=MOST_RATIO_OF_COLD if is_promised else None,
            )


def _first_token(
    name: str,
    situation: str,
    tokens: int,
    asked: list[Asked],
    *,
    cold: list[Asked] | None = None,
    most_ratio: float | None = None,
) -> Figure:
    return of_seconds(
        f"{tokens:,} tokens, {situation}, first token: {name}",
        [one.first_token for one in asked],
        unit="s",
        beside="" if cold is None else "cold",
        limit=None if cold is None else [one.first_token for one in cold],
        most_ratio=most_ratio,
        note=f"{statistics.median(one.from_cache for one in asked):,.0f} tokens from the cache",
        labels={"what": "first token", "system": name, "situation": situation, "tokens": f"{tokens}"},
    )


def _overhead(compared: Comparison, tokens: int) -> Iterator[Figure]:
    """A cold request with a cache beside the same one without, pair by pair."""
    plain = compared.plain.asked[COLD, tokens]
    parts: tuple[tuple[str, Callable[[Asked], float]], ...] = (
        ("first token", lambda one: one.first_token),
        (f"all {NEW_TOKENS} tokens", lambda one: one.whole),
        ("processor time", lambda one: one.processor),
    )
    for part, seconds in parts:
        for candidate in compared.caches:
            pairs = list(zip(candidate.asked[COLD, tokens], plain, strict=False))
            percents = [100 * (seconds(one) / seconds(other) - 1) for one, other in pairs]
            low, high, confidence = interval_of_median(percents)
            yield of_values(
                f"{tokens:,} tokens, cold, {part}: {candidate.name} over {PLAIN}",
                percents,
                unit="%",
                most=MOST_OVERHEAD_PERCENT if candidate.name == Tierkv.name and part != "processor time" else None,
                note=f"the median lies in {low:.1f} .. {high:.1f} % with {confidence:.0%} confidence",
                labels={
                    "what": "overhead",
                    "system": candidate.name,
                    "part": part,
                    "tokens": f"{tokens}",
                    "least": f"{low}",
                    "most": f"{high}",
                    "confidence": f"{confidence}",
                },
            )


def _wrong_answers(compared: Comparison) -> Iterator[Figure]:
    """What each said when it computed the prompts itself is what is right."""
    tokens = min(SHAPES)
    for candidate in compared.caches:
        asked, right = candidate.asked["spoiled", tokens], candidate.asked["right", tokens]
        wrong = sum(one.tokens != other.tokens for one, other in zip(asked, right, strict=True))
        used = statistics.median(one.from_cache for one in asked)
        yield of_values(
            f"files overwritten, wrong answers of {len(asked)}: {candidate.name}",
            [wrong],
            unit="answers",
            most=0 if candidate.name == Tierkv.name else None,
            note=f"{used:,.0f} of {tokens:,} tokens counted as from the cache",
            labels={"what": "wrong answers", "system": candidate.name, "of": f"{len(asked)}"},
        )


def _forget_times(candidate: Candidate) -> None:
    candidate.times.unlink(missing_ok=True)


def _scheduler(compared: Comparison, situation: str) -> Iterator[Figure]:
    tokens = max(SHAPES)
    for candidate in compared.caches:
        times = [msgspec.json.decode(line, type=Times) for line in candidate.times.read_bytes().splitlines()]
        own = statistics.median(one.request_seconds for one in times)
        waits = statistics.median(one.waits for one in times)
        waiting = sum(one.waiting_seconds for one in times) / max(1, sum(one.waits for one in times))
        yield of_seconds(
            f"{tokens:,} tokens, {situation}, in the scheduler: {candidate.name}",
            [one.request_seconds + one.step_seconds for one in times],
            unit="ms",
            beside="of it processor time",
            limit=[one.request_cpu_seconds + one.step_cpu_seconds for one in times],
            most=MOST_SCHEDULER_MS if candidate.name == Tierkv.name else None,
            note=f"of it {own * 1e3:.2f} ms in the request's own calls; {waits:.0f} steps only waited, "
            f"{waiting * 1e6:.0f} us each",
            labels={"what": "scheduler", "system": candidate.name, "situation": situation, "tokens": f"{tokens}"},
        )


def _prompt(name: str, tokens: int) -> list[int]:
    """Random ids, the same ones for the same name and length in every run."""
    return random.Random(f"{name}, {tokens}").choices(VOCABULARY, k=tokens)
