"""Every request, and every reply to it, lost, doubled, late, out of order, or cut off with its connection: between a
real client, blocking or asyncio, and a real node. What was not lost is answered; what was is a miss by its deadline;
nothing that was granted stays behind; and what is loaded afterwards is right.

Each cell of the table is a request type, a way, a fault. `SCENES` has a row for each request type that there is.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from e2e.either_client import KINDS, EitherEngine
from e2e.harness import Node, wait_until
from tests.faults.proxy import Fault, Proxy, Way
from tierkv.client import Operator, connect_operator
from tierkv.client.operators import (
    PinWish,
    audit_step,
    cancel_job,
    evict_step,
    evictions_step,
    explain,
    new_job,
    pin_step,
    pins,
    purge_step,
    shares,
    size,
    starts,
    status,
    top,
    unpin_step,
    usage,
    verify_step,
    warmup_step,
)
from tierkv.core.reasons import Reason
from tierkv.errors import NodeSilent
from tierkv.torture.stamped import count_right, identity, poisoned, tokens_of
from tierkv.wire.messages import AnyRequest, StatusReply, Verify, Warmup

pytestmark = pytest.mark.timeout(180)

BLOCKS = 4
BASE = 1
"""The prompt that is always there."""

LOST_SECONDS = 0.05
"""What a call is given whose answer never comes."""

_prompts = itertools.count(10)


@dataclass
class World:
    node: Node
    proxy: Proxy
    operator: Operator

    def status(self) -> StatusReply:
        return self.operator.status()


@contextmanager
def make_world(folder: Path) -> Iterator[World]:
    with Node(folder) as node:
        node.start()
        sockets = Path(tempfile.mkdtemp(prefix="tkv"))
        with Proxy(node.endpoint, sockets) as proxy, connect_operator(node.endpoint) as operator:
            with EitherEngine("blocking", node.endpoint) as engine:
                assert engine.store(BASE, BLOCKS) == BLOCKS
            operator.status()
            yield World(node, proxy, operator)
        shutil.rmtree(sockets)
        assert "Traceback" not in node.log()


@pytest.fixture(scope="module")
def world(own_surroundings: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with make_world(tmp_path_factory.mktemp("node")) as world:
        yield world


# ---- what is asked


class Scene:
    """One request of a type. `prepare` is done in peace, `act` is what the fault meets, `check` is told whether the
    request had its effect, and asserts what the world must look like then."""

    waits = True
    """Whether the caller waits for the reply; who does not is never told that it was lost."""

    def __init__(self, engine: EitherEngine, patience_seconds: float) -> None:
        self.engine = engine
        self.patience_seconds = patience_seconds
        self.prompt = next(_prompts)

    def prepare(self) -> None:
        pass

    def act(self) -> Any:
        raise NotImplementedError

    def check(self, had_effect: bool) -> None:
        pass


class AskHello(Scene):
    def act(self) -> Any:
        return self.engine.client.is_connected()


class AskOpenGroup(Scene):
    def act(self) -> Any:
        return self.engine.client.open(identity(f"salt {self.prompt}"))


class AskAskCodec(Scene):
    def act(self) -> Any:
        return self.engine.client.ask_codec("ab" * 32)


class AskMatch(Scene):
    def act(self) -> Any:
        return self.engine.group.match(keys=self.engine.keys(BASE, BLOCKS))


class AskAcquire(Scene):
    def act(self) -> Any:
        return self.engine.group.acquire(keys=self.engine.keys(BASE, BLOCKS), deadline_seconds=self.patience_seconds)


class AskRelease(Scene):
    waits = False

    def prepare(self) -> None:
        self.lease = self.engine.do(self.engine.group.acquire(keys=self.engine.keys(BASE, BLOCKS)))
        assert self.lease.blocks == BLOCKS

    def act(self) -> Any:
        return self.lease.release()


class AskReportBad(Scene):
    def prepare(self) -> None:
        assert self.engine.store(self.prompt, BLOCKS) == BLOCKS

    def act(self) -> Any:
        return self.engine.group.report_bad(self.engine.keys(self.prompt, BLOCKS), 1)

    def check(self, had_effect: bool) -> None:
        assert self.engine.match(self.prompt, BLOCKS) == (1 if had_effect else BLOCKS)


class AskReportPrefill(Scene):
    """It goes along with another call, and may be lost for good."""

    waits = False

    def act(self) -> Any:
        self.engine.group.report_prefill(tokens=2_048, first_token=0, seconds=0.5)
        return self.engine.group.match(keys=self.engine.keys(BASE, BLOCKS))


class AskReserve(Scene):
    def act(self) -> Any:
        return self.engine.group.reserve(tokens_of(self.prompt, BLOCKS), deadline_seconds=self.patience_seconds)

    def check(self, had_effect: bool) -> None:
        assert self.engine.match(self.prompt, BLOCKS) == 0
        assert self.engine.store(self.prompt, BLOCKS) == BLOCKS, "no slot and no key is kept by what was given up"


class AskCommit(Scene):
    def prepare(self) -> None:
        self.ticket = self.engine.reserve(self.prompt, BLOCKS)
        self.engine.fill(self.ticket, self.prompt, BLOCKS)

    def act(self) -> Any:
        return self.ticket.commit()

    def check(self, had_effect: bool) -> None:
        assert self.engine.load(self.prompt, BLOCKS).right == BLOCKS, "sent again until it is confirmed"


class AskAbort(AskCommit):
    waits = False

    def act(self) -> Any:
        return self.ticket.abort()

    def check(self, had_effect: bool) -> None:
        assert self.engine.match(self.prompt, BLOCKS) == 0
        assert self.engine.store(self.prompt, BLOCKS) == BLOCKS


class AskSeal(Scene):
    def prepare(self) -> None:
        assert self.engine.store(self.prompt, BLOCKS) == BLOCKS

    def act(self) -> Any:
        keys = self.engine.keys(self.prompt, BLOCKS)
        return self.engine.group.seal(keys=keys, deadline_seconds=self.patience_seconds)


class AskUsage(Scene):
    def act(self) -> Any:
        return self.engine.client._run(usage(self.engine.client._verbs))


class AskStatus(Scene):
    def act(self) -> Any:
        return self.engine.client._run(status(self.engine.client._verbs))


class AskWarmup(Scene):
    kind: type[Warmup] | type[Verify] = Warmup

    def prepare(self) -> None:
        self.job = new_job()

    def act(self) -> Any:
        return self.engine.client._run(warmup_step(self.engine.client._verbs, self.job, 0, "", None, 0.0))

    def check(self, had_effect: bool) -> None:
        self.engine.do(self.engine.client._run(cancel_job(self.engine.client._verbs, self.kind, self.job)))


class AskVerify(AskWarmup):
    kind = Verify

    def act(self) -> Any:
        return self.engine.client._run(verify_step(self.engine.client._verbs, self.job, False))


class AskPurge(Scene):
    """Of a tenant that has nothing: what is asked for in vain is asked for all the same."""

    def prepare(self) -> None:
        self.job = new_job()

    def act(self) -> Any:
        verbs = self.engine.client._verbs
        return self.engine.client._run(purge_step(verbs, self.job, f"salt {self.prompt}", None, None, False))

    def check(self, had_effect: bool) -> None:
        """Asked again under its id it is the same one."""
        told = self.engine.do(self.act())
        wait_until(lambda: self.engine.do(self.act()).finished, f"the purge is over: {told}")


class AskExplain(Scene):
    def act(self) -> Any:
        keys = self.engine.keys(BASE, BLOCKS)
        group = self.engine.group.key
        return self.engine.client._run(explain(self.engine.client._verbs, None, group, keys, b"", "", 0))


class AskTop(Scene):
    def act(self) -> Any:
        return self.engine.client._run(top(self.engine.client._verbs, 5))


class AskShares(Scene):
    def act(self) -> Any:
        return self.engine.client._run(shares(self.engine.client._verbs))


class AskSize(Scene):
    def act(self) -> Any:
        return self.engine.client._run(size(self.engine.client._verbs, 3_600.0))


class AskStarts(Scene):
    def act(self) -> Any:
        return self.engine.client._run(starts(self.engine.client._verbs))


class AskPins(Scene):
    def act(self) -> Any:
        return self.engine.client._run(pins(self.engine.client._verbs))


class AskPin(Scene):
    """A wish for a prefix that nobody has cached."""

    def prepare(self) -> None:
        self.pin = new_job()

    def act(self) -> Any:
        keys = self.engine.keys(self.prompt, BLOCKS)
        wish = PinWish(pin=self.pin, group=self.engine.group.key, keys=keys, owner="e2e", seconds=600.0)
        return self.engine.client._run(pin_step(self.engine.client._verbs, wish))

    def check(self, had_effect: bool) -> None:
        assert self.is_pinned() == had_effect
        self.engine.do(self.engine.client._run(unpin_step(self.engine.client._verbs, self.pin, None)))
        assert not self.is_pinned()

    def is_pinned(self) -> bool:
        told = self.engine.do(self.engine.client._run(pins(self.engine.client._verbs)))
        return self.pin in [row.pin for row in told.rows]


class AskUnpin(AskPin):
    def prepare(self) -> None:
        super().prepare()
        self.engine.do(AskPin.act(self))
        assert self.is_pinned()

    def act(self) -> Any:
        return self.engine.client._run(unpin_step(self.engine.client._verbs, self.pin, None))

    def check(self, had_effect: bool) -> None:
        assert self.is_pinned() == (not had_effect)
        self.engine.do(self.act())
        assert not self.is_pinned()


class AskEvict(Scene):
    """What would be evicted."""

    def act(self) -> Any:
        return self.engine.client._run(evict_step(self.engine.client._verbs, "host", 0, "", True))

    def check(self, had_effect: bool) -> None:
        assert self.engine.match(BASE, BLOCKS) == BLOCKS


class AskEvictions(Scene):
    def prepare(self) -> None:
        self.job = new_job()

    def act(self) -> Any:
        return self.engine.client._run(evictions_step(self.engine.client._verbs, self.job, 0.0, False))

    def check(self, had_effect: bool) -> None:
        """Asked again under its id it ends."""
        wait_until(lambda: self.engine.do(self.act()).finished, "there is a report")


class AskAudit(AskEvictions):
    def act(self) -> Any:
        return self.engine.client._run(audit_step(self.engine.client._verbs, self.job, 0, ""))


SCENES: dict[str, type[Scene]] = {
    scene.__name__.removeprefix("Ask"): scene
    for scene in (*Scene.__subclasses__(), AskAbort, AskVerify, AskUnpin, AskAudit)
}


ELSEWHERE = {"Fetch", "Put"}
"""What only a gateway is asked for: below."""


def test_every_request_type_has_a_row() -> None:
    assert SCENES.keys() | ELSEWHERE == {kind.__name__ for kind in get_args(AnyRequest)}


# ---- what becomes of it

FAULTS = [fault for fault in Fault if fault is not Fault.PASS]


def is_answered(client: str, fault: Fault, scene: type[Scene]) -> bool:
    """Swapped with the next message: a blocking client says nothing more before it has its answer, so that to it what
    is swapped is late."""
    if fault in (Fault.DROP, Fault.HOLD):
        return False
    return fault is not Fault.SWAP or client == "asyncio" or not scene.waits


@pytest.mark.scenario("B157", then="each client gets its own replies only, whatever happens to the messages")
@pytest.mark.scenario(
    "B158", then="what was unanswered when its connection was cut is asked again, has its effect once, in time"
)
@pytest.mark.parametrize("client", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", list(Way))
def test_a_message_that_meets_a_fault(
    world: World, client: str, way: Way, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.asking.GRACE_SECONDS", LOST_SECONDS)
    for name, scene in SCENES.items():
        try:
            run_cell(world, client, name, scene, way, fault)
        except AssertionError as error:
            error.add_note(f"in the cell {name} {way}, {fault}, {client} client")
            raise


def run_cell(world: World, client: str, name: str, make: type[Scene], way: Way, fault: Fault) -> None:
    answered = is_answered(client, fault, make)
    patience = 20.0 if answered else LOST_SECONDS
    with EitherEngine(client, world.proxy.directory) as engine:
        assert engine.match(BASE, BLOCKS) == BLOCKS
        scene = make(engine, patience)
        scene.prepare()
        engine.state.timeout_seconds = patience
        before = engine.client.counters
        rule = world.proxy.add(name, way, fault)
        began = time.monotonic()
        reason = act(scene, fault)
        took = time.monotonic() - began
        expected = None if answered or not scene.waits else Reason.DEADLINE
        assert reason == expected
        assert took < 20.0, "a call ends by its deadline"
        if not scene.waits and way is Way.REPLY:
            engine.state.timeout_seconds = 20.0
            engine.match(BASE, BLOCKS)  # who does not wait reads with the next call
        rule.wait()
        world.proxy.calm()
        settle(world, engine)
        scene.check(had_effect=answered or way is Way.REPLY or fault in (Fault.HOLD, Fault.SWAP))
        assert engine.load(BASE, BLOCKS, deadline_seconds=20.0).right == BLOCKS
        settle(world, engine)
        after = engine.client.counters
        assert after.sessions_opened == before.sessions_opened, "nobody had to register again"
        assert after.unreadable_replies == 0
    assert after.in_doubt == after.doubts_dropped == after.open_grants == 0


def act(scene: Scene, fault: Fault) -> Reason | None:
    """Why it was no success."""
    engine = scene.engine
    before = dict(engine.client.counters.by_reason)
    calls: list[Callable[[], Any]] = [scene.act]
    if fault is Fault.SWAP and engine.kind == "asyncio":
        calls.append(lambda: engine.group.match(keys=engine.keys(BASE, BLOCKS)))
    try:
        value = engine.together(*calls)[0]
    except NodeSilent:
        return Reason.DEADLINE
    if hasattr(value, "abort") or hasattr(value, "release"):
        engine.do(value.abort() if hasattr(value, "abort") else value.release())
    after = engine.client.counters.by_reason
    more = [reason for reason, count in after.items() if count > before.get(reason, 0)]
    assert len(more) <= 1, more
    return more[0] if more else None


def settle(world: World, engine: EitherEngine) -> None:
    """Until the client owes nothing and the node keeps nothing for it, while it is still there: its end would hide what
    it leaks."""
    engine.state.timeout_seconds = 20.0

    def is_settled() -> bool:
        engine.skip(3.0)
        engine.match(BASE, BLOCKS)
        told = world.status()
        return (engine.client.counters.in_doubt, told.leases, told.tickets) == (0, 0, 0)

    wait_until(is_settled, "nothing is in doubt, leased or reserved")


# ---- payload in frames


@pytest.fixture(scope="module")
def inline(own_surroundings: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Through the gateway, as a user that is not trusted (which is ours)."""
    sockets = Path(tempfile.mkdtemp(prefix="tkv"))
    sockets.chmod(0o711)
    (sockets / "proxy").mkdir()
    options = {"inline_users": str(os.getuid()), "inline_dir": str(sockets / "i"), "host_bytes": "16MiB"}
    with Node(tmp_path_factory.mktemp("node"), **options) as node:
        node.start()
        node.wait_status(lambda told: any(one.name == "gateway" and one.state == "running" for one in told.workers), "")
        with Proxy(sockets / "i", sockets / "proxy") as proxy, connect_operator(node.endpoint) as operator:
            with EitherEngine("blocking", sockets / "i") as engine:
                assert engine.store(BASE, BLOCKS) == BLOCKS
            operator.status()
            yield World(node, proxy, operator)
        assert "Traceback" not in node.log()
    shutil.rmtree(sockets)


@pytest.mark.parametrize("client", KINDS)
@pytest.mark.parametrize("way", list(Way))
def test_payload_that_meets_a_fault_is_right_or_a_miss(
    inline: World, client: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.asking.GRACE_SECONDS", LOST_SECONDS)
    for fault in FAULTS:
        lost = fault in (Fault.DROP, Fault.HOLD, Fault.SWAP)
        with EitherEngine(client, inline.proxy.directory) as engine:
            for kind in sorted(ELSEWHERE):
                prompt = next(_prompts)
                if kind == "Put":
                    ticket = engine.reserve(prompt, BLOCKS, deadline_seconds=20.0)
                    engine.fill(ticket, prompt, BLOCKS)
                else:
                    lease = engine.do(engine.group.acquire(keys=engine.keys(BASE, BLOCKS), deadline_seconds=20.0))
                rule = inline.proxy.add(kind, way, fault)
                engine.state.timeout_seconds = LOST_SECONDS if lost else 20.0
                if kind == "Put":
                    visible = engine.do(ticket.commit()).visible
                    assert visible == BLOCKS if not lost else visible in (0, BLOCKS), (kind, fault)
                    engine.do(ticket.abort())
                else:
                    destination = poisoned(BLOCKS)
                    valid = engine.do(lease.copy_into(destination))
                    assert count_right(destination, engine.keys(BASE, BLOCKS), valid) == valid, (kind, fault)
                    assert valid == BLOCKS or lost, (kind, fault)
                    engine.do(lease.release())
                rule.wait()
                inline.proxy.calm()
                settle(inline, engine)
                if kind == "Put":
                    assert not engine.load(prompt, BLOCKS, deadline_seconds=20.0).is_wrong
                    assert engine.store(prompt, BLOCKS, deadline_seconds=20.0) == BLOCKS
                    assert engine.load(prompt, BLOCKS, deadline_seconds=20.0).right == BLOCKS
                settle(inline, engine)


# ---- the session socket


@pytest.mark.parametrize("client", KINDS)
@pytest.mark.parametrize(
    ("packet", "way"), [("SessionHello", Way.REQUEST), ("SessionGrant", Way.REPLY), ("Detach", Way.REQUEST)]
)
def test_a_packet_of_the_session_socket_that_meets_a_fault(world: World, client: str, packet: str, way: Way) -> None:
    for fault in FAULTS:
        lost = fault in (Fault.DROP, Fault.HOLD, Fault.SWAP) and packet != "Detach"
        rule = world.proxy.add(packet, way, fault)
        with EitherEngine(client, world.proxy.directory, timeout_seconds=LOST_SECONDS if lost else 20.0) as engine:
            if packet != "Detach":
                rule.wait()
                world.proxy.calm()
            engine.state.timeout_seconds = 20.0
            engine.skip(3.0)
            assert engine.load(BASE, BLOCKS, deadline_seconds=20.0).right == BLOCKS, f"{packet}, {fault}"
            settle(world, engine)
        rule.wait()
        world.proxy.calm()
    assert world.status().state == "ready"


@pytest.mark.scenario("B130", then="the client registers again by itself with the first call, which no user sees fail")
@pytest.mark.parametrize("client", KINDS)
def test_a_new_front_is_found_with_the_first_call_whatever_becomes_of_the_news(tmp_path: Path, client: str) -> None:
    faults = (Fault.PASS, Fault.DROP, Fault.TWICE, Fault.HOLD)
    with make_world(tmp_path) as world, EitherEngine(client, world.proxy.directory) as engine:
        for number, fault in enumerate(faults, start=1):
            keys = engine.keys(BASE, BLOCKS)
            sealed = engine.do(engine.group.seal(keys=keys, wait="flushed", deadline_seconds=20.0))
            assert sealed.flushed_blocks == BLOCKS
            before = world.node.wait_ready().incarnation  # and has all of its memory: the one of before is let go
            world.proxy.add("IncarnationEnded", Way.REPLY, fault)
            world.node.kill("front")
            world.node.wait_status(
                lambda told, before=before: told.incarnation != before and told.state != "recovering",  # type: ignore[misc]
                "a new front",
            )
            answer = engine.do(engine.group.match(keys=keys))
            assert (answer.blocks, answer.reason) == (BLOCKS, None), fault
            assert engine.load(BASE, BLOCKS, deadline_seconds=20.0).right == BLOCKS
            assert engine.client.counters.sessions_opened == number + 1
            world.proxy.calm()
            settle(world, engine)


# ---- everything at once

UNRULY = {
    Fault.DROP: 0.01,
    Fault.TWICE: 0.05,
    Fault.HOLD: 0.08,
    Fault.SWAP: 0.04,
    Fault.CUT_BEFORE: 0.01,
    Fault.CUT_AFTER: 0.01,
}
CALLS = 100
PATIENCE_SECONDS = 0.15


def live(engine: EitherEngine, seed: int) -> list[str]:
    """What was wrong."""
    wrong = []
    chance = random.Random(seed)
    for number in range(CALLS):
        prompt = 10_000 + chance.randrange(30)
        began = time.monotonic()
        match chance.randrange(4):
            case 0:
                engine.store(prompt, BLOCKS, deadline_seconds=PATIENCE_SECONDS)
            case 1:
                engine.do(engine.reserve(prompt, BLOCKS, deadline_seconds=PATIENCE_SECONDS).abort())
            case _:
                if (loaded := engine.load(prompt, BLOCKS, deadline_seconds=PATIENCE_SECONDS)).is_wrong:
                    wrong.append(f"call {number}: {loaded}")
        if (took := time.monotonic() - began) > 60.0:
            wrong.append(f"call {number} took {took:.1f} s")
        engine.skip(0.5)
    return wrong


@pytest.mark.parametrize("seed", [1])
def test_among_unruly_messages_every_load_is_right_or_a_miss_and_nothing_leaks(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.asking.GRACE_SECONDS", LOST_SECONDS)
    with ExitStack() as owned:
        engines = [owned.enter_context(EitherEngine(kind, world.proxy.directory)) for kind in (*KINDS, *KINDS)]
        for engine in engines:
            assert engine.match(BASE, BLOCKS) == BLOCKS
            engine.state.timeout_seconds = PATIENCE_SECONDS
        world.proxy.unruly(seed, UNRULY)
        with ThreadPoolExecutor(len(engines)) as pool:
            wrong = list(pool.map(live, engines, range(seed, seed + len(engines))))
        world.proxy.calm()
        assert wrong == [[]] * len(engines)
        for engine in engines:
            settle(world, engine)
        for engine in engines:
            assert not any(engine.load(10_000 + number, BLOCKS).is_wrong for number in range(30))
            settle(world, engine)
        assert all(engine.client.counters.doubts_dropped == 0 for engine in engines)
