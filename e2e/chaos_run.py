"""Kill everything of ours under load, again and again, and see that nothing is ever wrong and nothing flushed is lost.

    python -m e2e.chaos_run [--kills N] [--seed N] [--only CONDITIONS] [--keep FOLDER]

A run is a node with little memory, engines that store and load without end, and a plan: who is killed, and when. Half
of the kills and more come while somebody is held at a barrier (chaos_barriers), or an engine is caught between two
steps; the others come at any moment. After each kill the node must come back by itself (when its supervisor was killed,
by being started), what was reported flushed must be found at once, and whatever is loaded must be right to the byte.
Conditions differ: NVMe has room for all, so that all that was flushed must be there; or it has not, so that extents are
evicted and files removed all the time; or the disk fails now and then; or both.

A plan follows from its seed; how the processes interleave doesn't.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from e2e.chaos_barriers import FOLDER, Barriers
from e2e.chaos_bytes import COMMON_PROMPTS, DOERS_PROMPTS, MAX_BLOCKS, PERSISTENT, shared_blocks
from e2e.chaos_engine import Engine
from e2e.chaos_process import EngineProcess
from e2e.chaos_scenarios import (
    BACK_SECONDS,
    ROUND,
    ROUND_OF_EVICTIONS,
    ROUND_OF_FAULTS,
    Scenario,
    make_plan,
)
from e2e.harness import Node, NodeLeftover, environment, wait_until
from tierkv.wire.messages import StatusReply

REPLACED = ("worker=e2e.chaos_worker", "front=e2e.chaos_front")
HELD_SECONDS = 60.0
FIRST_CLAIMS = 15
LOADS_OF_A_LOOK = 25
MATCHES_OF_A_LOOK = 150
SIGNS_OF_BUGS = ("Traceback", "can't be trusted", "BrokenInvariant", "a bug in the node")

Claim = tuple[str, int]
"""Kind and prompt, of which so many blocks were reported flushed."""


@dataclass(frozen=True)
class Conditions:
    """`evicts`: what was flushed may be gone, but never wrong."""

    name: str
    scenarios: list[Scenario]
    nvme_bytes: str = "1GiB"
    files: str = "e2e.chaos_barriers:HeldFiles"
    evicts: bool = False


ROOMY = Conditions("roomy", ROUND)
CRAMPED = Conditions("cramped", ROUND_OF_EVICTIONS, nvme_bytes="6MiB", evicts=True)
FAILING = Conditions("failing", ROUND_OF_FAULTS, files="e2e.chaos_faults:FaultyFiles")
WORST = Conditions("worst", ROUND_OF_EVICTIONS, nvme_bytes="6MiB", files="e2e.chaos_faults:FaultyFiles", evicts=True)
ALL_CONDITIONS = (ROOMY, CRAMPED, FAILING, WORST)


@dataclass
class Verdict:
    """What came of a run. `absent` counts what was flushed and evicted since; the `slowest` return took so many
    seconds from the kill, of whom and where it says."""

    conditions: str
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    held: int = 0
    flushed: int = 0
    checked: int = 0
    absent: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    seconds: float = 0.0

    def __str__(self) -> str:
        victims: Counter[str] = Counter()
        for what, count in self.kills.items():
            victims[what.split()[0]] += count
        return (
            f"{self.conditions}, seed {self.seed}: {self.kills.total()} kills, {self.held} of them held "
            f"({', '.join(f'{count} {victim}' for victim, count in sorted(victims.items()))}); "
            f"{self.flushed} prefixes flushed, {self.checked} blocks checked, {len(self.wrong)} wrong, "
            f"{len(self.lost)} lost, {self.absent} evicted; back within {self.slowest[0]:.1f} s "
            f"({self.slowest[1]}); {self.seconds:.0f} s"
        )


class Chaos:
    """One run."""

    def __init__(self, folder: Path, conditions: Conditions, seed: int) -> None:
        self.verdict = Verdict(conditions.name, seed)
        self._conditions = conditions
        self._random = random.Random(seed)
        self._barriers = Barriers(folder / "barriers")
        os.environ[FOLDER] = str(folder / "barriers")
        self.node = Node(
            folder,
            replaced=(f"files={conditions.files}", *REPLACED),
            host_bytes="8MiB",
            nvme_bytes=conditions.nvme_bytes,
            seal_after_seconds="1",
            lock_wait_seconds="10",
        )
        self._engines: list[EngineProcess] = []
        self._next_engine = 1
        self._claims: dict[Claim, int] = {}
        self._recent: list[Claim] = []
        self._deaths: Counter[str] = Counter()  # since the node was started
        self._dead = 0  # the pid of the last of these
        self._arenas: set[str] = set()  # inodes of the memory that the node has had
        self._log_read = 0
        self._next_prompt = DOERS_PROMPTS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.kill()
        self.node.__exit__(None, None, None)
        del os.environ[FOLDER]

    def run(self, plan: list[Scenario]) -> Verdict:
        began = time.monotonic()
        self.node.start()
        for _ in range(2):
            self._add_engine(runs=True)
        self._doer = self._add_engine(runs=False)
        self._store_some()
        for scenario in plan:
            scenario.play(self)
        self._end()
        self.verdict.seconds = time.monotonic() - began
        return self.verdict

    # ---- what scenarios are made of

    def kill(self, victim: str, where: str, *, held: bool = True) -> None:
        """SIGKILL; of an engine, the one that does what it is told."""
        self._take_events()
        self._killed_at, self._killed = time.monotonic(), f"{victim} {where}"
        if victim == "engine":
            self._end_engine(self._doer)
        elif victim == "supervisor":
            with suppress(NodeLeftover):  # its sockets, which the next start replaces; children end a moment later
                self.node.stop(signal.SIGKILL)
            wait_until(lambda: not self.node.survivors(), "all processes of a killed supervisor are gone", 10.0)
        else:
            self._dead = self.node.pid(victim)
            os.kill(self._dead, signal.SIGKILL)
            self._deaths[victim] += 1
        self.verdict.kills[self._killed] += 1
        self.verdict.held += held

    def wait_back(self, victim: str) -> None:
        """Until the node serves again, by itself, or started where nobody is left to do that."""
        if victim == "supervisor":
            self.start_again()
        self.node.wait_status(self._is_back, f"the node is back after a kill of its {victim}", BACK_SECONDS)
        self._barriers.clear()
        if victim == "engine":
            self._doer = self._add_engine(runs=False)
        self.verdict.slowest = max(self.verdict.slowest, (time.monotonic() - self._killed_at, self._killed))

    def start_again(self) -> None:
        self._barriers.clear()
        self._deaths.clear()
        self.node.start()

    def look(self, *, everything: bool = False, loads_too: bool = True) -> None:
        """What was flushed is there, and what is loaded is right."""
        self._take_events()
        self._read_log()
        claims = list(self._claims)
        matches = claims if everything else self._sample(claims, MATCHES_OF_A_LOOK)
        loads = matches if everything else self._sample(matches, LOADS_OF_A_LOOK if loads_too else 0)
        with Engine(self.node.endpoint, timeout_seconds=5.0) as engine:
            self._arenas |= _arenas_of("self")
            gone = {claim for claim in matches if not self._is_there(engine, claim)}
            for claim in loads:
                if claim not in gone:
                    self._load(engine, claim)
        for claim in gone:
            if self._conditions.evicts:
                self.verdict.absent += 1
                del self._claims[claim]
            else:
                self.verdict.lost.append(f"{claim}: {self._claims[claim]} blocks were flushed")
        assert not self.verdict.wrong, self.verdict.wrong
        assert not self.verdict.lost, self.verdict.lost

    @contextmanager
    def alone(self) -> Iterator[EngineProcess]:
        """Nobody but the one engine that does what it is told asks the node for anything."""
        others = [engine for engine in self._engines if engine is not self._doer]
        for engine in others:
            engine.ask("run", on=False)
        self._wait_let_go()
        yield self._doer
        self._wait_let_go()
        for engine in others:
            engine.ask("run", on=True)

    def _wait_let_go(self) -> None:
        self.node.wait_status(lambda s: not s.tickets and not s.leases, "nobody holds any slot", 5.0)

    @property
    def doer(self) -> EngineProcess:
        return self._doer

    def fresh(self) -> dict[str, Any]:
        """A prompt that nobody has stored, and more of it than it shares with others."""
        self._next_prompt += 1
        return {
            "kind": self._random.choice(PERSISTENT),
            "prompt": self._next_prompt,
            "blocks": self._random.randint(shared_blocks(self._next_prompt) + 1, MAX_BLOCKS),
        }

    def flushed(self) -> dict[str, Any]:
        """A prompt of which something is flushed. One that was not used of late is not in memory, as a rule."""
        kind, prompt = self._random.choice(list(self._claims))
        return {"kind": kind, "prompt": prompt, "blocks": self._claims[kind, prompt]}

    def until_granted(self, do: str, **prompt: Any) -> int:
        """Blocks that the doer holds, as "held". Right after a restart there may be no room: its memory, and what is
        on its way to disk, comes back within seconds. Without a prompt, of one that is flushed."""
        return wait_until(
            lambda: int(self._doer.ask(do, name="held", **(prompt or self.flushed()))), f"{do} is granted", 10.0
        )

    def see(self) -> dict[Claim, int]:
        """What is visible of prompts that may be on disk."""
        prompts = [*range(COMMON_PROMPTS), *range(DOERS_PROMPTS, self._next_prompt + 1)]
        with Engine(self.node.endpoint, timeout_seconds=5.0) as engine:
            seen = {(kind, prompt): engine.match(kind, prompt, MAX_BLOCKS) for kind in PERSISTENT for prompt in prompts}
        return {claim: blocks for claim, blocks in seen.items() if blocks}

    def claim(self, seen: dict[Claim, int]) -> None:
        """This much must be there from now on."""
        for claim, blocks in seen.items():
            self._claims[claim] = max(blocks, self._claims.get(claim, 0))

    @contextmanager
    def operator(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Somebody types a command. Its end is awaited in the block."""
        typed = [sys.executable, "-m", "tierkv_cli.main", *arguments, "--endpoint", str(self.node.endpoint)]
        with subprocess.Popen(
            typed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()
        ) as command:
            try:
                yield command
            finally:
                command.kill()

    def hold(self, stage: str, cause: Callable[[], None]) -> None:
        """Until somebody is held at `stage`, which `cause` brings about, at last when it is repeated."""
        self._barriers.arm(stage)
        deadline = time.monotonic() + HELD_SECONDS
        while not self._barriers.is_reached(stage):
            cause()
            due = time.monotonic() + 1.0
            while not self._barriers.is_reached(stage) and time.monotonic() < due:
                time.sleep(0.005)  # between two looks at a condition that has a deadline
            assert time.monotonic() < deadline, f"nobody has come to {stage}; the node's log:\n{self.node.log()}"

    def let_go(self) -> None:
        self._barriers.clear()

    def anytime(self) -> None:
        time.sleep(self._random.uniform(0.0, 0.3))  # any moment is as good as another: this one is in the plan

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        with self.node.paused(name):
            yield

    # ---- the processes

    def _add_engine(self, *, runs: bool) -> EngineProcess:
        engine = EngineProcess(self.node.endpoint, self._next_engine)
        self._next_engine += 1
        self._engines.append(engine)
        engine.ask("run", on=runs)
        return engine

    def _end_engine(self, engine: EngineProcess) -> None:
        engine.kill()
        self._engines.remove(engine)
        self._take_events_of(engine)

    def kill_one_that_runs(self) -> None:
        """At any moment, and another one in its place."""
        self._end_engine(self._random.choice([engine for engine in self._engines if engine is not self._doer]))
        self.verdict.kills["engine anytime"] += 1
        self._add_engine(runs=True)
        known = len(self._engines) + 1  # and who asks for the status
        self.node.wait_status(lambda s: s.sessions <= known, "the session of a dead engine has ended", 5.0)

    def _is_back(self, status: StatusReply) -> bool:
        """Everybody runs, and nobody has died but those that were killed. (A worker whose front is killed may be seen
        to end first, which counts as a death of its own.)"""
        followed = self._read_log().count("exited with 0")
        self._deaths["storage followed"] += followed
        restarts = {worker.name: worker.restarts for worker in status.workers}
        is_up = status.state in ("ready", "degraded") and all(w.state == "running" for w in status.workers)
        for victim in ("front", "storage"):
            expected = self._deaths[victim]
            most = expected + self._deaths[f"{victim} followed"]
            assert restarts[victim] <= most, f"{victim} died by itself; the log:\n{self.node.log()[-5_000:]}"
        return is_up and all(worker.pid != self._dead for worker in status.workers)

    # ---- what is known to be flushed

    def _store_some(self) -> None:
        def are_enough() -> bool:
            fresh = self.fresh()
            self._doer.ask("store", **fresh)
            self._doer.ask("seal", **fresh)
            self._take_events()
            return len(self._claims) >= FIRST_CLAIMS

        wait_until(are_enough, f"{FIRST_CLAIMS} prompts are flushed", 120.0)

    def _take_events(self) -> None:
        for engine in self._engines:
            self._take_events_of(engine)

    def _take_events_of(self, engine: EngineProcess) -> None:
        for said in engine.take_events():
            match said["event"]:
                case "flushed":
                    claim = said["kind"], said["prompt"]
                    self.claim({claim: said["blocks"]})
                    self._recent.append(claim)
                    self.verdict.flushed += 1
                case "checked":
                    self.verdict.checked += said["blocks"]
                case "wrong":
                    self.verdict.wrong.append(said["what"])
                case "fault":
                    raise AssertionError(f"engine {engine.pid} ended by itself: {said['what']}")

    def _sample(self, claims: list[Claim], count: int) -> list[Claim]:
        """The latest, and some of the others."""
        latest = [claim for claim in dict.fromkeys(reversed(self._recent)) if claim in claims][: count // 2]
        rest = sorted(set(claims) - set(latest))
        return latest + self._random.sample(rest, min(len(rest), count - len(latest)))

    def _is_there(self, engine: Engine, claim: Claim) -> bool:
        kind, prompt = claim
        keys = engine.keys(kind, prompt, self._claims[claim])
        found = wait_until(
            lambda: (m := engine.groups[kind][0].match(keys=keys)).reason is None and m, f"{claim} is matched", 5.0
        )
        return bool(found.blocks >= self._claims[claim])

    def _load(self, engine: Engine, claim: Claim) -> None:
        """All that is claimed; where memory is short (old arenas, others' leases), what there is room for, and again.
        Evicted is as good as loaded where NVMe is short."""
        kind, prompt = claim

        wanted = self._claims[claim]
        deadline = time.monotonic() + BACK_SECONDS
        while True:
            loaded = engine.load(kind, prompt, wanted, deadline_seconds=5.0)
            self.verdict.checked += loaded.valid
            if loaded.wrong:
                self.verdict.wrong.append(loaded.wrong)
            if loaded.valid >= wanted or (self._conditions.evicts and not self._is_there(engine, claim)):
                return
            assert time.monotonic() < deadline, (
                f"{claim} can't be loaded: {loaded}, not {wanted} blocks; {self.node.status()}"
            )
            time.sleep(0.02)  # between two looks at a condition that has a deadline

    def _read_log(self) -> str:
        """What has come since the last time."""
        log = self.node.log()
        new, self._log_read = log[self._log_read :], len(log)
        assert not any(sign in new for sign in SIGNS_OF_BUGS), new[-8_000:]
        return new

    # ---- the end

    def _end(self) -> None:
        """Nothing is held, nothing is left; and all that was flushed is there once more after a start from disk."""
        with self.alone():
            self.look(everything=True)
        for engine in list(self._engines):
            engine.ask("run", on=False)
            self._end_engine(engine)
        used = self._descriptors()
        assert self.node.stop().exit_code == 0
        assert self.node.data_dir is not None
        left = [path for folder in ("tmp", "quarantine") for path in (self.node.data_dir / folder).iterdir()]
        assert not left, left
        assert not (held := _who_maps(self._arenas)), f"processes {held} still map an arena"
        self.start_again()
        fresh = self._descriptors()
        assert all(used[name] <= fresh[name] + 2 for name in used), f"descriptors: {used}, after a fresh start {fresh}"
        self.look(everything=True)
        assert self.node.stop().exit_code == 0

    def _descriptors(self) -> dict[str, int]:
        """Open in each process when nobody but the one who asks is there."""
        self.node.wait_status(
            lambda s: (s.sessions, s.tickets, s.leases) == (1, 0, 0), "only the one who asks is left", 5.0
        )
        return {name: self.node.descriptors(name) for name in ("supervisor", "front", "storage")}


def run(folder: Path, conditions: Conditions, seed: int, num_kills: int | None = None) -> Verdict:
    """`num_kills` None: each scenario once."""
    scenarios = conditions.scenarios
    with Chaos(folder, conditions, seed) as chaos:
        return chaos.run(make_plan(seed, scenarios, len(scenarios) if num_kills is None else num_kills))


def _arenas_of(pid: int | str) -> set[str]:
    """The inodes of arenas and generations that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has just ended, or is not ours
        return set()
    return {line.split()[4] for line in maps if "memfd:tierkv" in line}


def _who_maps(arenas: set[str]) -> list[int]:
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _arenas_of(pid) & arenas]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.chaos_run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--kills", type=int, help="scenarios under each of the conditions; each of them once by default"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=[conditions.name for conditions in ALL_CONDITIONS])
    parser.add_argument("--keep", type=Path, help="keep the data directories and logs there")
    options = parser.parse_args(arguments)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos"))
    for conditions in ALL_CONDITIONS:
        if options.only in (None, conditions.name):
            (folder / conditions.name).mkdir(parents=True)
            print(run(folder / conditions.name, conditions, options.seed, options.kills), flush=True)
    if options.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
