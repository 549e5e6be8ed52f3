"""Kill everything of ours under load, again and again, and see that nothing is ever wrong and nothing flushed is lost.

    python -m e2e.chaos_run [--kills N] [--seed N] [--keep FOLDER]

A run is a node with little memory, engines that store and load without end, and a plan: who is killed, and when. Half
of the kills and more come while somebody is held at a barrier (chaos_barriers), or an engine is caught between two
steps; the others come at any moment. After each kill the node must come back by itself (when its supervisor was killed,
by being started), what was reported flushed must be found at once, and whatever is loaded must be right to the byte.
Two runs: in one NVMe has room for all, so that all that was flushed must be there; in the other it has not, so that
extents are evicted and files removed all the time.

A plan follows from its seed; how the processes interleave doesn't.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from e2e.chaos_barriers import FOLDER, Barriers
from e2e.chaos_bytes import DOERS_PROMPTS, MAX_BLOCKS, PERSISTENT, shared_blocks
from e2e.chaos_engine import Engine
from e2e.harness import Node, NodeLeftover, environment, wait_until
from tierkv.wire.messages import StatusReply

REPLACED = ("files=e2e.chaos_barriers:HeldFiles", "worker=e2e.chaos_worker", "front=e2e.chaos_front")
BACK_SECONDS = 20.0
HELD_SECONDS = 15.0
ANSWER_SECONDS = 20.0
LOADS_OF_A_LOOK = 25
MATCHES_OF_A_LOOK = 150
SIGNS_OF_BUGS = ("Traceback", "can't be trusted", "BrokenInvariant", "a bug in the node")

Claim = tuple[str, int]
"""Kind and prompt, of which so many blocks were reported flushed."""


class EngineProcess:
    """e2e.chaos_engine as a process. `take_events` gives what it has said by itself since the last time."""

    def __init__(self, endpoint: Path, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.chaos_engine", str(endpoint), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it died of it says on stdout
            text=True,
            env=environment(),
        )
        self.pid = self._process.pid
        self._replies: queue.Queue[Any] = queue.Queue()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._owed = 1
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # it was killed while it spoke
            said = json.loads(line)
            if "event" in said:
                self._events.put(said)
            else:
                self._replies.put(said["reply"])

    def take_events(self) -> Iterator[dict[str, Any]]:
        while not self._events.empty():
            yield self._events.get()

    def send(self, do: str, **arguments: Any) -> None:
        """Its reply comes before those to what follows."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        self._owed += 1

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.last_reply()

    def last_reply(self) -> Any:
        """To what was sent last; those before are let go."""
        reply = None
        while self._owed:
            try:
                reply = self._replies.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                raise AssertionError(f"engine {self.pid} gave no answer: {[*self.take_events()]}") from None
            self._owed -= 1
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass
class Verdict:
    """What came of a run. `absent` counts what was flushed and evicted since, `slowest` is the longest time in seconds
    from a kill until everybody was served again."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    held: int = 0
    flushed: int = 0
    checked: int = 0
    absent: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    slowest: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        victims: Counter[str] = Counter()
        for what, count in self.kills.items():
            victims[what.split()[0]] += count
        return (
            f"seed {self.seed}: {self.kills.total()} kills, {self.held} of them held "
            f"({', '.join(f'{count} {victim}' for victim, count in sorted(victims.items()))}); "
            f"{self.flushed} prefixes flushed, {self.checked} blocks checked, {len(self.wrong)} wrong, "
            f"{len(self.lost)} lost, {self.absent} evicted; back within {self.slowest:.1f} s; {self.seconds:.0f} s"
        )


class Chaos:
    """One run. `evicts`: NVMe is too small for what is stored, so that what was flushed may be gone, never wrong."""

    def __init__(self, folder: Path, *, seed: int, evicts: bool = False) -> None:
        self.verdict = Verdict(seed)
        self.evicts = evicts
        self._random = random.Random(seed)
        self._barriers = Barriers(folder / "barriers")
        os.environ[FOLDER] = str(folder / "barriers")
        self.node = Node(
            folder,
            replaced=REPLACED,
            host_bytes="8MiB",
            nvme_bytes="6MiB" if evicts else "1GiB",
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
        self._killed_at = time.monotonic()
        if victim == "engine":
            self._end_engine(self._doer)
        elif victim == "supervisor":
            with suppress(NodeLeftover):  # its sockets, which the next start replaces; children end a moment later
                self.node.stop(signal.SIGKILL)
            wait_until(lambda: not self.node.survivors(), "all processes of a killed supervisor are gone", 10.0)
            self._deaths.clear()
        else:
            self._dead = self.node.pid(victim)
            os.kill(self._dead, signal.SIGKILL)
            self._deaths[victim] += 1
        self.verdict.kills[f"{victim} {where}"] += 1
        self.verdict.held += held

    def wait_back(self, victim: str) -> None:
        """Until the node serves again, by itself, or started where nobody is left to do that."""
        if victim == "supervisor":
            self._barriers.clear()
            self.node.start()
        self.node.wait_status(self._is_back, f"the node is back after a kill of its {victim}", BACK_SECONDS)
        self._barriers.clear()
        if victim == "engine":
            self._doer = self._add_engine(runs=False)
        self.verdict.slowest = max(self.verdict.slowest, time.monotonic() - self._killed_at)

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
            if self.evicts:
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
        self._killed_at = time.monotonic()
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
        for _ in range(20):
            fresh = self.fresh()
            self._doer.ask("store", **fresh)
            self._doer.ask("seal", **fresh)
        self.node.wait_status(self._is_back, "the node works", BACK_SECONDS)
        self._take_events()
        assert len(self._claims) >= 15, f"{len(self._claims)} of 20 prompts were flushed"

    def _take_events(self) -> None:
        for engine in self._engines:
            self._take_events_of(engine)

    def _take_events_of(self, engine: EngineProcess) -> None:
        for said in engine.take_events():
            match said["event"]:
                case "flushed":
                    claim = said["kind"], said["prompt"]
                    self._claims[claim] = max(said["blocks"], self._claims.get(claim, 0))
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
            if loaded.valid >= wanted or (self.evicts and not self._is_there(engine, claim)):
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
        self.node.wait_status(
            lambda s: (s.sessions, s.tickets, s.leases) == (1, 0, 0), "only the one who asks is left", 5.0
        )
        assert self.node.stop().exit_code == 0
        assert self.node.data_dir is not None
        left = [path for folder in ("tmp", "quarantine") for path in (self.node.data_dir / folder).iterdir()]
        assert not left, left
        assert not (held := _who_maps(self._arenas)), f"processes {held} still map an arena"
        self.node.start()
        self.look(everything=True)
        assert self.node.stop().exit_code == 0


@dataclass(frozen=True)
class Scenario:
    """One kill and what leads to it. `stage` is a barrier, or a point at which an engine is caught."""

    victim: str
    stage: str
    act: Callable[[Chaos, Scenario], None]

    def play(self, chaos: Chaos) -> None:
        self.act(chaos, self)
        chaos.look(everything=self.victim == "supervisor")


def anytime(chaos: Chaos, scenario: Scenario) -> None:
    chaos.anytime()
    if scenario.victim == "engine":
        chaos.kill_one_that_runs()
        return
    chaos.kill(scenario.victim, scenario.stage, held=False)
    chaos.wait_back(scenario.victim)


def while_storing(chaos: Chaos, scenario: Scenario) -> None:
    """Somebody of the node's own processes is held on the way of an extent to its file."""

    def store() -> None:
        fresh = chaos.fresh()
        chaos.doer.send("store", **fresh)
        chaos.doer.send("start_seal", **fresh)

    chaos.hold(scenario.stage, store)
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)
    if scenario.victim != "engine":
        chaos.doer.last_reply()


def while_promoting(chaos: Chaos, scenario: Scenario) -> None:
    chaos.hold(scenario.stage, lambda: chaos.doer.send("load", **chaos.flushed()))
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)
    chaos.doer.last_reply()


def while_recovering(chaos: Chaos, scenario: Scenario) -> None:
    """The first to die is the front; the second dies while what comes after it is not there yet."""
    chaos.hold(scenario.stage, lambda: _kill_front_once(chaos))
    chaos.node.wait_status(lambda s: s.state == "recovering", "it recovers")
    chaos.kill(scenario.victim, scenario.stage)
    chaos.wait_back(scenario.victim)


def _kill_front_once(chaos: Chaos) -> None:
    if not chaos.node.status() or chaos.node.status().state != "recovering":  # type: ignore[union-attr]
        chaos.kill("front", "anytime", held=False)


def commit_answered_to_nobody(chaos: Chaos, scenario: Scenario) -> None:
    """The front has decided on a commit and is held before it says so; who asked dies."""
    with chaos.alone() as doer:
        chaos.hold(scenario.stage, lambda: doer.send("store", **chaos.fresh()))
        chaos.kill("engine", scenario.stage)
        chaos.let_go()
        chaos.wait_back("engine")


def ticket_not_committed(chaos: Chaos, scenario: Scenario) -> None:
    with chaos.alone():
        prompt = chaos.fresh()
        blocks = chaos.until_granted("hold_ticket", **prompt)
        chaos.kill("engine", scenario.stage)
        chaos.wait_back("engine")
        assert chaos.until_granted("hold_ticket", **prompt) == blocks, "slots and keys are free again"
        chaos.doer.ask("fill", name="held")
        assert chaos.doer.ask("commit", name="held") == blocks


def commit_not_read(chaos: Chaos, scenario: Scenario) -> None:
    """The commit lies in the front's socket when one of the two dies."""
    with chaos.alone() as doer:
        chaos.until_granted("hold_ticket", **chaos.fresh())
        doer.ask("fill", name="held")
        with chaos.stopped("front"):
            doer.ask("send_commit", name="held")
            chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        if scenario.victim == "front":
            assert doer.ask("commit", name="held") == 0, "its session is over"


def inside_a_lease(chaos: Chaos, scenario: Scenario) -> None:
    with chaos.alone():
        chaos.until_granted("hold_lease")
        chaos.kill("engine", scenario.stage)
        chaos.wait_back("engine")


def while_copying(chaos: Chaos, scenario: Scenario) -> None:
    """An engine is in the middle of a copy out of a lease, and of one into a ticket."""
    with chaos.alone() as doer:
        blocks = chaos.until_granted("hold_lease")
        doer.ask("begin_copy", name="held")
        chaos.until_granted("hold_ticket", **chaos.fresh())
        chaos.kill(scenario.victim, scenario.stage)
        chaos.wait_back(scenario.victim)
        if scenario.victim == "engine":
            return
        chaos.look(loads_too=False)  # there is no memory to load into while the old arena is in use
        doer.ask("scribble", name="held")
        assert doer.ask("end_copy", name="held") == blocks, "the old arena stays as it was"
        doer.ask("scribble", name="held")
        assert doer.ask("commit", name="held") == 0, "a late commit publishes nothing"


def _scenarios(act: Callable[[Chaos, Scenario], None], **victims: str) -> list[Scenario]:
    """`stage=victims`, separated by blanks."""
    return [Scenario(victim, stage, act) for stage, several in victims.items() for victim in several.split()]


ROUND = [
    *_scenarios(anytime, anytime="front front front storage storage storage supervisor supervisor supervisor"),
    *_scenarios(anytime, anytime="engine engine engine engine"),
    *_scenarios(
        while_storing,
        temp_written="storage front supervisor",
        before_rename="storage front supervisor",
        renamed="storage front supervisor",
        before_index="storage",
        indexed="front",
        before_flush="storage supervisor",
        flushed="storage front",
        before_commit="front",
        committed="front supervisor",
        before_report="front",
        reported="front supervisor",
    ),
    *_scenarios(while_promoting, read_half="storage front supervisor", read_done="storage front"),
    *_scenarios(while_recovering, recovering="storage supervisor"),
    *_scenarios(commit_answered_to_nobody, before_commit="engine", committed="engine"),
    *_scenarios(ticket_not_committed, reserved="engine"),
    *_scenarios(commit_not_read, commit_sent="engine front"),
    *_scenarios(inside_a_lease, leased="engine"),
    *_scenarios(while_copying, copying="engine front front"),
]
"""Where NVMe has room for all."""

ROUND_OF_EVICTIONS = [
    *_scenarios(anytime, anytime="front storage supervisor"),
    *_scenarios(while_storing, before_remove="storage front", removed="storage supervisor", renamed="storage"),
    *_scenarios(while_promoting, read_half="storage"),
    *_scenarios(while_copying, copying="front"),
]


def make_plan(seed: int, scenarios: list[Scenario], num_kills: int) -> list[Scenario]:
    """The scenarios in an order of the seed's, over and over until there are enough. Kills of the supervisor are spread
    evenly: with each the node forgets how often its children have died, and so how long it waits to restart them."""
    rng = random.Random(seed)
    plan: list[Scenario] = []
    while len(plan) < num_kills:
        starts = [s for s in scenarios if s.victim == "supervisor"]
        others = [s for s in scenarios if s.victim != "supervisor"]
        rng.shuffle(starts)
        rng.shuffle(others)
        share = -(-len(others) // max(1, len(starts)))
        while others or starts:
            plan += others[:share] + starts[:1]
            del others[:share], starts[:1]
    return plan[:num_kills]


def run(folder: Path, seed: int, num_kills: int, *, evicts: bool) -> Verdict:
    with Chaos(folder, seed=seed, evicts=evicts) as chaos:
        return chaos.run(make_plan(seed, ROUND_OF_EVICTIONS if evicts else ROUND, num_kills))


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
    parser.add_argument("--kills", type=int, default=len(ROUND) + len(ROUND_OF_EVICTIONS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the data directories and logs there")
    options = parser.parse_args(arguments)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="chaos"))
    evicting = max(1, options.kills * len(ROUND_OF_EVICTIONS) // (len(ROUND) + len(ROUND_OF_EVICTIONS)))
    for name, evicts, num_kills in (("roomy", False, options.kills - evicting), ("cramped", True, evicting)):
        (folder / name).mkdir(parents=True)
        print(name, run(folder / name, options.seed, num_kills, evicts=evicts), flush=True)
    if options.keep is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
