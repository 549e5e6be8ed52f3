"""One round: a node, engines, and a plan of who is killed or troubled when; and what must hold after each step.

After each kill the node must come back by itself (when its supervisor was killed, by being started), what was reported
flushed must be found at once, and whatever is loaded must be right to the byte. At the end nothing may be left, and all
that was flushed must be there once more after a start from disk.

A plan follows from its seed; how the processes interleave doesn't.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tierkv.client import Match
from tierkv.torture.barriers import FOLDER, Barriers
from tierkv.torture.disk import Mood, set_mood
from tierkv.torture.engine import Engine
from tierkv.torture.engines import ASYNCIO, BLOCKING, EngineProcess
from tierkv.torture.interruption import raise_if_interrupted
from tierkv.torture.memory import MemoryWatch
from tierkv.torture.node import Node, environment
from tierkv.torture.processes import arenas_of
from tierkv.torture.prompts import COMMON_PROMPTS, DOERS_PROMPTS, MAX_BLOCKS, PERSISTENT, keys_of, shared_blocks
from tierkv.torture.reckoning import Reckoning
from tierkv.torture.verdict import Found, Verdict
from tierkv.torture.waits import NeverCame, wait_until
from tierkv.wire.messages import StatusReply, TierUsage

if TYPE_CHECKING:
    from tierkv.torture.plan import PlannedRound

FILES = "tierkv.torture.files:TorturedFiles"
REPLACED = ("worker=tierkv.torture.worker", "front=tierkv.torture.front")

PATIENCE_SECONDS = "180"
SETTINGS = {
    "host_bytes": "8MiB",
    "nvme_reserve_bytes": "16MiB",
    "seal_after_seconds": "1",
    "lock_wait_seconds": "60",
    "hang_seconds": PATIENCE_SECONDS,  # who is held on a busy machine is not hung
    "stuck_seconds": PATIENCE_SECONDS,
    "drain_seconds": PATIENCE_SECONDS,
}
DEVICE = "cpu"
DEVICE_COPIES = "device_copies=tierkv.torture.device:copies"
DISK_SETTINGS = {
    "disk_reserve_bytes": "16MiB",
    "disk_rescan_seconds": "2",
    "prefill_tokens_per_second": "10",  # so slow that a disk is always quicker
}
BACK_SECONDS = 240.0
HELD_SECONDS = 240.0
SOON_SECONDS = 120.0
FIRST_CLAIMS = 15
LOADS_OF_A_LOOK = 25
MATCHES_OF_A_LOOK = 150
FULL_PART = 0.7
"""So much of NVMe may be taken where nothing shall be evicted, before the round ends."""

SIGNS_OF_BUGS = ("Traceback", "can't be trusted", "BrokenInvariant", "a bug in the node")

Claim = tuple[str, int]
"""Kind and prompt, of which so many blocks were reported flushed."""


class Round:
    """Owns the node and the engines. What it finds goes to the verdict, and is raised as Found."""

    def __init__(self, folder: Path, planned: PlannedRound, verdict: Verdict) -> None:
        """Call it from the main thread: the node dies with that."""
        self.verdict = verdict
        self.planned = planned
        self.conditions = conditions = planned.conditions
        self.folder = folder
        self.random = random.Random(planned.seed)
        self.most_quarantined = 0
        self._barriers = Barriers(folder / "control")
        os.environ[FOLDER] = str(folder / "control")
        self.usual_mood = Mood(error_part=conditions.error_part)
        self.set_mood(self.usual_mood)
        options: dict[str, Any] = {**SETTINGS, "nvme_bytes": conditions.nvme_bytes, **planned.settings}
        if conditions.disk_bytes:
            options |= {"disk_dir": str(folder / "disk"), "disk_bytes": conditions.disk_bytes, **DISK_SETTINGS}
        self.device = DEVICE if conditions.gpu_bytes else ""
        if self.device:
            options |= {"gpu_devices": self.device, "gpu_bytes": conditions.gpu_bytes}
        self.node = Node(
            folder,
            replaced=(f"files={FILES}", *REPLACED, DEVICE_COPIES, f"parent={os.getpid()}"),
            **options,
        )
        self._engines: list[EngineProcess] = []
        self._next_engine = 1
        self.claims: dict[Claim, int] = {}
        self._recent: list[Claim] = []
        self._deaths: Counter[str] = Counter()  # since the node was started
        self._dead = 0  # the pid of the last of these
        self.arenas: set[str] = set()  # inodes of the memory that the node has had
        self._log_read = 0
        self._next_prompt = DOERS_PROMPTS
        self._memory = MemoryWatch()
        self._killed_at, self._killed = 0.0, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.kill()
        self.node.close()
        del os.environ[FOLDER]

    def play(self, go_on: Callable[[], bool]) -> float:
        """As much of the plan as there is time for, as `go_on` says before each step, and then the reckoning, which
        took the seconds that are returned."""
        self.verdict.trail[:] = [f"start: {self.conditions.name} {dict(self.planned.settings)}"]
        self.node.start()
        for _ in range(2):
            self._add_engine(runs=True)
        self.doer = self._add_engine(runs=False)
        self._store_some()
        for scenario in self.planned.steps:
            if not go_on() or not self._has_room():
                break
            self.verdict.trail.append(f"{scenario.act.__name__}: {scenario.victim} {scenario.stage}")
            began = time.monotonic()
            scenario.play(self)
            self.verdict.note_step(time.monotonic() - began)
            self._look_at_memory()
        began = time.monotonic()
        self.verdict.trail.append("reckoning")
        Reckoning(self).make()
        self.verdict.rounds[self.conditions.name] += 1
        self.verdict.note_step(time.monotonic() - began)
        return time.monotonic() - began

    # ---- what scenarios are made of

    def kill(self, victim: str, where: str, *, held: bool = True) -> None:
        """SIGKILL; of an engine, the one that does what it is told."""
        self.take_events()
        self._killed_at, self._killed = time.monotonic(), f"{victim} {where}"
        if victim == "engine":
            self.end_engine(self.doer)
        elif victim == "supervisor":
            self.node.signal("supervisor", signal.SIGKILL)
            self.node.wait_gone()
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
            self.doer = self._add_engine(runs=False)
        self.verdict.slowest_return = max(
            self.verdict.slowest_return, (time.monotonic() - self._killed_at, self._killed)
        )

    def wait_well(self) -> None:
        """After a trouble that kills nobody."""
        self.node.wait_status(self._is_back, "the node is as before", BACK_SECONDS)

    def start_again(self, *, deaths_of_storage: int = 0) -> None:
        """`deaths_of_storage`: so often its worker may die by itself, of an index that was damaged on purpose."""
        self._barriers.clear()
        self._deaths.clear()
        self._deaths["storage followed"] = deaths_of_storage
        self.node.start()

    def stop_politely(self) -> None:
        """What is dirty then is written, unless the disk is sick or has no room for it."""
        ended = self.node.stop()
        may_drop = self.conditions.error_part or self.conditions.evicts
        if (ended.exit_code, ended.dropped) != (0, 0) and not (may_drop and ended.exit_code in (0, 4)):
            self.broken(f"a node that was told to stop dropped something: {ended}")

    def look(self, *, everything: bool = False, loads_too: bool = True) -> None:
        """What was flushed is there, and what is loaded is right."""
        self.take_events()
        self.read_log()
        self._require_bounds()
        claims = list(self.claims)
        matches = claims if everything else self._sample(claims, MATCHES_OF_A_LOOK)
        loads = matches if everything else self._sample(matches, LOADS_OF_A_LOOK if loads_too else 0)
        with self.visitor() as engine:
            self.arenas |= arenas_of("self")
            gone = {claim for claim in matches if not self._is_there(engine, claim)}
            for claim in loads:
                if claim not in gone:
                    self._load(engine, claim)
        for claim in sorted(gone):
            if self.conditions.evicts:
                self.verdict.absent += 1
                del self.claims[claim]
            else:
                self._lose(claim, "they are not there")
        self._stop_at_findings()

    @contextmanager
    def visitor(self) -> Iterator[Engine]:
        """An engine in this process, for a look."""
        with Engine(self.node.endpoint, self._next_engine, timeout_seconds=5.0, device=self.device) as engine:
            yield engine

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        with self.node.paused(name):
            yield

    @contextmanager
    def alone(self) -> Iterator[EngineProcess]:
        """Nobody but the one engine that does what it is told asks the node for anything."""
        others = [engine for engine in self._engines if engine is not self.doer]
        for engine in others:
            engine.ask("run", on=False)
        self.wait_let_go()
        yield self.doer
        self.wait_let_go()
        for engine in others:
            engine.ask("run", on=True)

    def wait_let_go(self) -> None:
        try:
            self.node.wait_status(lambda s: not s.tickets and not s.leases, "nobody holds any slot", SOON_SECONDS)
        except NeverCame as error:
            self.leak("slots", str(error))

    def fresh(self) -> dict[str, Any]:
        """A prompt that nobody has stored, and more of it than it shares with others."""
        self._next_prompt += 1
        return {
            "kind": self.random.choice(PERSISTENT),
            "prompt": self._next_prompt,
            "blocks": self.random.randint(shared_blocks(self._next_prompt) + 1, MAX_BLOCKS),
        }

    def flushed(self) -> dict[str, Any]:
        """A prompt of which something is flushed. One that was not used of late is not in memory, as a rule.
        Where all were evicted, a new one."""
        if not self.claims:
            self.until_flushed()
            self.take_events()
        kind, prompt = self.random.choice(list(self.claims))
        return {"kind": kind, "prompt": prompt, "blocks": self.claims[kind, prompt]}

    def until_granted(self, do: str, **prompt: Any) -> int:
        """Blocks that the doer holds, as "held". Right after a restart there may be no room: its memory, and what is
        on its way to disk, comes back within seconds. Without a prompt, of one that is flushed."""
        return wait_until(
            lambda: int(self.doer.ask(do, name="held", **(prompt or self.flushed()))), f"{do} is granted", SOON_SECONDS
        )

    def until_flushed(self) -> None:
        """The doer stores a prompt, and is told that it is flushed. For so long no operation is made to fail: on a disk
        of which one in fifty does, a busy node flushes when it is lucky."""

        def is_flushed() -> bool:
            fresh = self.fresh()
            self.doer.ask("store", **fresh)
            return bool(self.doer.ask("seal", **fresh))

        self.set_mood(Mood())
        wait_until(is_flushed, "a prompt that is stored is flushed", SOON_SECONDS)
        self.set_mood(self.usual_mood)

    def see(self) -> dict[Claim, int]:
        """What is visible of prompts that may be on disk."""
        prompts = [*range(COMMON_PROMPTS), *range(DOERS_PROMPTS, self._next_prompt + 1)]
        with self.visitor() as engine:
            seen = {(kind, prompt): engine.match(kind, prompt, MAX_BLOCKS) for kind in PERSISTENT for prompt in prompts}
        return {claim: blocks for claim, blocks in seen.items() if blocks}

    def claim(self, seen: dict[Claim, int]) -> None:
        """This much must be there from now on."""
        for claim, blocks in seen.items():
            self.claims[claim] = max(blocks, self.claims.get(claim, 0))

    @contextmanager
    def operator(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Somebody types a command. Its end is awaited in the block."""
        typed = [sys.executable, "-P", "-m", "tierkv_cli.main", *arguments, "--endpoint", str(self.node.endpoint)]
        with subprocess.Popen(
            typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            start_new_session=True,
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
            raise_if_interrupted()
            cause()
            due = time.monotonic() + 1.0
            while not self._barriers.is_reached(stage) and time.monotonic() < due:
                time.sleep(0.005)  # between two looks at a condition that has a deadline
            if time.monotonic() > deadline:
                raise NeverCame(f"nobody has come to {stage}")

    def let_go(self) -> None:
        self._barriers.clear()

    def anytime(self, most_seconds: float = 0.3) -> None:
        time.sleep(self.random.uniform(0.0, most_seconds))  # any moment is as good as another: this one is in the plan
        raise_if_interrupted()

    def set_mood(self, mood: Mood) -> None:
        """Of the disk, from now on."""
        set_mood(self.folder / "control", mood)

    def wait(self, condition: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        wait_until(condition, what, timeout_seconds)

    def nvme(self) -> TierUsage:
        status = wait_until(self.node.status, "the node tells its status", SOON_SECONDS)
        return next(tier for tier in status.tiers if tier.tier == "nvme")

    # ---- the processes

    def _add_engine(self, *, runs: bool) -> EngineProcess:
        module = ASYNCIO if runs and self._next_engine % 2 else BLOCKING
        engine = EngineProcess(module, self.node.endpoint, self._next_engine, self.device)
        self._next_engine += 1
        self._engines.append(engine)
        engine.ask("run", on=runs)
        return engine

    def end_engine(self, engine: EngineProcess) -> None:
        engine.kill()
        self._engines.remove(engine)
        self._take_events_of(engine)

    def end_all_engines(self) -> None:
        for engine in list(self._engines):
            engine.ask("run", on=False)
            self.end_engine(engine)

    def one_that_runs(self) -> EngineProcess:
        return self.random.choice([engine for engine in self._engines if engine is not self.doer])

    def kill_one_that_runs(self) -> None:
        """At any moment, and another one in its place."""
        self.end_engine(self.one_that_runs())
        self.verdict.kills["engine anytime"] += 1
        self._add_engine(runs=True)
        known = len(self._engines) + 1  # and who asks for the status
        self.node.wait_status(lambda s: s.sessions <= known, "the session of a dead engine has ended", SOON_SECONDS)

    def _is_back(self, status: StatusReply) -> bool:
        """Everybody runs, and nobody has died but those that were killed. (A worker whose front is killed may be seen
        to end first, which counts as a death of its own.)"""
        followed = self.read_log().count("exited with 0")
        self._deaths["storage followed"] += followed
        restarts = {worker.name: worker.restarts for worker in status.workers}
        is_up = status.state in ("ready", "degraded") and all(w.state == "running" for w in status.workers)
        for victim in ("front", "storage"):
            most = self._deaths[victim] + self._deaths[f"{victim} followed"]
            if restarts[victim] > most:
                self.broken(f"{victim} died by itself, {restarts[victim] - most} times; see the node's log")
        return is_up and all(worker.pid != self._dead for worker in status.workers)

    def _look_at_memory(self) -> None:
        pids = {name: self.node.pid(name) for name in ("supervisor", "front", "storage")}
        pids |= {f"engine {engine.number}": engine.pid for engine in self._engines}
        for problem in self._memory.look(pids):
            self.leak("memory", problem)

    def _require_bounds(self) -> None:
        """Each tier keeps within its capacity, by its books and on disk."""
        status = wait_until(self.node.status, "the node tells its status", SOON_SECONDS)
        for tier in status.tiers:
            taken = tier.used_bytes + tier.reserved_bytes + tier.overhead_bytes
            self.require(taken <= tier.capacity_bytes, f"{tier.tier} keeps within its capacity: {tier}")

    def _has_room(self) -> bool:
        """Nothing shall be evicted where that would look like a loss."""
        nvme = self.nvme()
        return self.conditions.evicts or nvme.used_bytes < FULL_PART * nvme.capacity_bytes

    # ---- what is known to be flushed

    def _store_some(self) -> None:
        def are_enough() -> bool:
            fresh = self.fresh()
            self.doer.ask("store", **fresh)
            self.doer.ask("seal", **fresh)
            self.take_events()
            return len(self.claims) >= FIRST_CLAIMS

        wait_until(are_enough, f"{FIRST_CLAIMS} prompts are flushed", BACK_SECONDS)

    def take_events(self) -> None:
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
                    self.verdict.verified += said["blocks"]
                case "did":
                    self.verdict.operations[said["what"]] += 1
                case "wrong":
                    self.verdict.wrong.append(f"engine {engine.number}: {said['what']}")
                case "fault":
                    self.broken(f"engine {engine.number} ended by itself: {said['what']}")

    def _sample(self, claims: list[Claim], count: int) -> list[Claim]:
        """The latest, and some of the others."""
        known = set(claims)
        latest = [claim for claim in dict.fromkeys(reversed(self._recent)) if claim in known][: count // 2]
        rest = sorted(known - set(latest))
        return latest + self.random.sample(rest, min(len(rest), count - len(latest)))

    def matched(self, engine: Engine, claim: Claim) -> int:
        """Blocks that are there, by a node that answers."""
        kind, prompt = claim
        keys = keys_of(kind, prompt)

        def match() -> Match | None:
            found = engine.groups[kind][0].match(keys=keys)
            return found if found.reason is None else None

        return int(wait_until(match, f"{claim} is matched", SOON_SECONDS).blocks)

    def _is_there(self, engine: Engine, claim: Claim) -> bool:
        return self.matched(engine, claim) >= self.claims[claim]

    def _load(self, engine: Engine, claim: Claim) -> None:
        """All that is claimed; where memory is short (old arenas, others' leases), what there is room for, and again.
        Evicted is as good as loaded where NVMe is short."""
        wanted = self.claims[claim]
        deadline = time.monotonic() + BACK_SECONDS
        while (found := self.load_checked(engine, claim, wanted)) < wanted:
            if not self._is_there(engine, claim):
                if not self.conditions.evicts:
                    self._lose(claim, f"{found} could be loaded, and the rest is gone")
                return
            if time.monotonic() > deadline:
                self._lose(claim, f"only {found} can be loaded; {self.node.status()}")
                return
            time.sleep(0.02)  # between two looks at a condition that has a deadline
            raise_if_interrupted()

    def _lose(self, claim: Claim, how: str) -> None:
        kind, prompt = claim
        self.verdict.lost.append(f"{kind} prompt {prompt}: {self.claims[claim]} blocks were flushed, {how}")

    def load_checked(self, engine: Engine, claim: Claim, blocks: int) -> int:
        """Blocks that were proven, each of which is right, or a finding."""
        loaded = engine.load(*claim, blocks, deadline_seconds=5.0)
        self.verdict.verified += loaded.valid
        self.verdict.operations["load"] += 1
        if loaded.wrong:
            self.verdict.wrong.append(loaded.wrong)
        return loaded.valid

    # ---- findings

    def require(self, holds: bool, what: str) -> None:
        """Of a promise, in words; broken where it does not hold."""
        if not holds:
            self.broken(f"not so: {what}")

    def broken(self, what: str) -> None:
        self.verdict.broken.append(what)
        raise Found(what)

    def leak(self, name: str, what: str) -> None:
        self.verdict.find_leak(name, what)
        raise Found(what)

    def _stop_at_findings(self) -> None:
        if self.verdict.findings:
            raise Found(self.verdict.findings[0])

    def read_log(self) -> str:
        """What has come since the last time."""
        log = self.node.log()
        new, self._log_read = log[self._log_read :], len(log)
        for sign in SIGNS_OF_BUGS:
            if sign in new:
                at = new.index(sign)
                self.broken(f"the node's log says: {new[max(0, at - 500) : at + 3_000]}")
        return new
