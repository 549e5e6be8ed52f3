"""A node in this process whose blocks are stamped: the real service and core, and a storage worker that is held.

Three engine processes: one asks, one holds the slots and copies, one comes later. The worker does what it was told only
when a test says so, and is heard only when a test says so. `after_all` is the end of each story: every process ends,
time passes, and then nothing may be left of it but right blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.core.simulation import Arena, Disk, FileOp, Prompt, Worker, stamps
from tests.node.kit import BLOCK_BYTES, BLOCK_TOKENS, HEALTHY, HOST_BYTES, Kit
from tierkv.core.grants import GRANTED, GroupSpec
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.instructions import Report
from tierkv.wire.messages import (
    Acquire,
    AcquireReply,
    Commit,
    Error,
    ErrorCode,
    Holder,
    OpenGroupReply,
    Release,
    Reply,
    Request,
    Reserve,
    ReserveReply,
    Seal,
)

ASKER, HOLDER, LATER = b"asker-session--1", b"holder-session-2", b"later-session--3"
HOST_SLOTS = HOST_BYTES // BLOCK_BYTES
NVME_BYTES = 2**20


def make_spec(ranks: int = 1, salt: str = "") -> GroupSpec:
    layout = Layout(dtype="u8", block_bytes=(BLOCK_BYTES,), axes="x", block_tokens=BLOCK_TOKENS, engine="stamped")
    parallel = Parallel(tensor=ranks, shards=ranks)
    identity = Identity(weights="f" * 64, config="config", layout=layout, parallel=parallel, salt=salt)
    return GroupSpec(group=identity.group_key(), identity=identity, model_name="stamped")


@dataclass
class Copy:
    """A holder's copy out of its slots, in two halves, and what the generations say afterwards."""

    node: StampedNode
    prompt: Prompt
    reply: AcquireReply
    rank: int = 0
    seen: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        part = next(part for part in self.reply.parts if part.rank == self.rank)
        self.slots = unpack(part.offsets)
        self.generations = unpack(part.generations)

    def go_on(self, blocks: int = 1) -> None:
        self.seen += self.node.arena.read(self.slots[len(self.seen) : len(self.seen) + blocks])

    def finish(self) -> int:
        """Blocks, from the first, that the reader may use: they carry their stamps, or the cache was wrong."""
        self.go_on(len(self.slots))
        now = self.node.kit.state._ledger.pool.generations(self.slots)
        pairs = enumerate(zip(self.generations, now, strict=True))
        valid = next((index for index, (was, is_now) in pairs if was != is_now), len(now))
        assert self.seen[:valid] == stamps(self.prompt.keys, self.rank)[:valid], (
            "foreign bytes under a valid generation"
        )
        return valid


class StampedNode:
    def __init__(self, disk: Disk | None = None, *, ranks: int = 1) -> None:
        self.disk = disk if disk is not None else Disk()
        self.spec = make_spec(ranks)
        self.disk.specs[self.spec.group] = self.spec
        self.arena = Arena()
        self.worker = Worker(self.arena, self.disk)
        self.kit = Kit(nvme_bytes=NVME_BYTES)
        self.answers: dict[int, list[Reply]] = {}
        self.asked: dict[int, bytes] = {}  # request -> session that waits for its answer
        self.heard: list[Report] = []
        self._grants = 0
        self.start_worker(self.disk.recovery())
        for session in (ASKER, HOLDER, LATER):
            self.join(session)

    def join(self, session: bytes) -> None:
        self.kit.join(session)
        opened = self.kit.open(self.spec.identity, session=session)
        assert isinstance(opened, OpenGroupReply), opened

    def restart(self) -> StampedNode:
        """The front has died, and its worker with it. Who still copies goes on in the old arena."""
        self.worker.die(0)
        self.kit.close()
        return StampedNode(self.disk, ranks=self.spec.identity.parallel.shards)

    # ---- the worker

    def start_worker(self, recovery: Sequence[Report] = ()) -> None:
        self.kit.start_worker(recovers=False)
        self.kit.report(*recovery, HEALTHY)
        self._hand_over()

    def kill_worker(self) -> None:
        self.worker.die(0)
        self.kit.kill_worker()

    def _hand_over(self) -> None:
        for instruction in self.kit.instructions():
            self.worker.take(instruction)

    def ops(self, prompt: Prompt) -> list[FileOp]:
        """What the worker was told about extents of this prompt and has not done."""
        self._hand_over()
        return [op for op in self.worker.waiting if op.key in prompt.block_keys]

    def run(self, *ops: FileOp) -> None:
        """Do it; nobody is told yet."""
        for op in ops:
            if op in self.worker.runnable():
                self.worker.run(op)

    def hear(self) -> None:
        while self.worker.unheard:
            self.heard.append(self.worker.deliver())
            self.kit.report(self.heard[-1])
        self._hand_over()
        self.collect()

    def hear_again(self) -> None:
        """Every report comes once more, long after the fact."""
        self.kit.report(*self.heard)
        self._hand_over()
        self.collect()

    def work(self, *, but: Prompt | None = None) -> None:
        """The worker does all there is, what concerns `but` aside, and is heard."""
        while True:
            self._hand_over()
            held = set(but.block_keys) if but is not None else set()
            ready = [op for op in self.worker.runnable() if op.key not in held]
            if not ready and not self.worker.unheard:
                return
            self.run(*ready)
            self.hear()

    def check_keys(self) -> None:
        """A slice of it."""
        assert self.kit.service.num_checks, "nothing is left to check, and somebody still waits for it"
        self.kit.service.check_keys(self.kit.now)
        self._hand_over()
        self.collect()

    # ---- engines

    def grant(self) -> bytes:
        self._grants += 1
        return b"grant%011d" % self._grants

    def prompt(self, *tokens: int) -> Prompt:
        return Prompt(self.spec, tokens)

    def send(self, kind: type[Request], session: bytes, **fields: Any) -> int:
        number = self.kit.send(kind, session=session, **fields)
        self.asked[number] = session
        self.collect()
        return number

    def ask(self, kind: type[Request], session: bytes, **fields: Any) -> Any:
        return self.answer(self.send(kind, session, **fields))

    def answer(self, number: int) -> Any:
        """The one reply to a request."""
        self.collect()
        (reply,) = self.answers[number]
        return reply

    def collect(self) -> None:
        for reply in self.kit.take_replies():
            self.answers.setdefault(reply.id, []).append(reply)

    def acquire(
        self,
        prompt: Prompt,
        grant: bytes,
        *,
        holder: bytes = HOLDER,
        seconds: float = 5.0,
        ranks: int = 1,
        revocable: bool = False,
    ) -> int:
        return self.send(
            Acquire,
            ASKER,
            grant=grant,
            group=prompt.group,
            keys=prompt.keys,
            holders=tuple(Holder(rank, holder) for rank in range(ranks)),
            deadline_ms=int(seconds * 1000),
            revocable=revocable,
        )

    def reserve(
        self,
        prompt: Prompt,
        grant: bytes,
        *,
        first: int = 0,
        rank: int = 0,
        session: bytes = ASKER,
        holder: bytes = HOLDER,
    ) -> int:
        return self.send(
            Reserve,
            session,
            grant=grant,
            group=prompt.group,
            rank=rank,
            keys=prompt.keys,
            first=first,
            tokens=prompt.tokens_from(first),
            holder=holder,
        )

    def slots(self, reserved: int) -> list[int]:
        reply: ReserveReply = self.answer(reserved)
        assert set(reply.states) <= {GRANTED}, reply
        return unpack(reply.offsets)

    def store(self, prompt: Prompt, *, rank: int = 0, session: bytes = LATER) -> int:
        """Blocks of it that got a slot, and are written and committed."""
        grant = self.grant()
        reply = self.answer(self.reserve(prompt, grant, rank=rank, session=session, holder=session))
        if isinstance(reply, Error):
            assert reply.code == ErrorCode.SHUTTING_DOWN, reply
            return 0
        granted = [index for index, state in enumerate(reply.states) if state == GRANTED]
        self.arena.write(unpack(reply.offsets), [(prompt.key(index), rank) for index in granted])
        if granted:
            number = self.send(Commit, session, grant=grant)
            while number not in self.answers:
                self.check_keys()
        return len(granted)

    def seal(self, prompt: Prompt, session: bytes = LATER) -> int:
        """Blocks of it that are flushed."""
        flushed: int = self.ask(Seal, session, group=prompt.group, keys=prompt.keys).flushed_blocks
        return flushed

    def cached(self, prompt: Prompt) -> int:
        return self.kit.state.match(prompt.group, prompt.keys).blocks

    def fill_host(self, *, but: Prompt | None = None) -> None:
        """Others store as much as there is room for, twice over."""
        for number in range(HOST_SLOTS):
            self.kit.tick(0.1)
            other = self.prompt(90_000 + number, 1, 90_000 + number, 2)
            self.store(other)
            self.seal(other)
            self.work(but=but)

    # ---- the end of a story

    def end_session(self, session: bytes) -> None:
        self.kit.service.end_session(session, self.kit.now)
        self.asked = {number: who for number, who in self.asked.items() if who != session}
        self._hand_over()
        self.collect()

    def after_all(self, prompt: Prompt) -> int:
        """All engines end, the worker works, time passes. Nothing is left but right blocks: how many of `prompt`; -1
        when the node is stopping, which grants nothing more."""
        kit = self.kit
        if not kit.mover.is_attached:
            self.start_worker()
        while kit.service.num_checks:
            self.check_keys()
        self.work()
        for _ in range(4):
            kit.tick(30.0)
            self.work()
        if kit.service.is_stopping:
            kit.service.answer_everybody(kit.now)
            self.collect()
        unanswered = {number: who for number, who in self.asked.items() if len(self.answers.get(number, ())) != 1}
        assert not unanswered, f"requests that were not answered, or twice: {unanswered}"
        for session in (ASKER, HOLDER, LATER):
            kit.service.end_session(session, kit.now)
        self.work()
        require_quiet(kit)
        return -1 if kit.service.is_stopping else self._load_all(prompt)

    def _load_all(self, prompt: Prompt) -> int:
        self.join(b"reader-session-4")
        cached = self.cached(prompt)
        for rank in range(self.spec.identity.parallel.shards):
            grant = self.grant()
            number = self.send(
                Acquire,
                b"reader-session-4",
                grant=grant,
                group=prompt.group,
                keys=prompt.keys,
                holders=(Holder(rank, b"reader-session-4"),),
            )
            self.work()
            reply = self.answer(number)
            assert reply.blocks == cached, f"{reply.blocks} loaded of {cached} matched: {reply.reason}"
            if cached:
                assert Copy(self, prompt, reply, rank).finish() == cached
                self.ask(Release, b"reader-session-4", grant=grant)
        require_quiet(self.kit)
        return cached

    def close(self) -> None:
        self.kit.close()


def require_quiet(kit: Kit) -> None:
    """No grant, no operation, no slot that is not an extent's, and the books agree with themselves."""
    state = kit.state
    ledger = state._ledger
    state.check()
    assert (state.num_leases, state.num_tickets, len(ledger.staged), ledger.doomed_bytes) == (0, 0, 0, 0)
    assert (state.num_reads_waiting, state.num_writes_waiting) == (0, 0)
    assert all(session.held_bytes == 0 for session in ledger.sessions.values())
    assert sum(group.host_slots * group.slot_bytes for group in ledger.groups.values()) == ledger.pool.used_bytes
    assert all(not extent.holds and not extent.reading and state._cascade.is_at_rest(extent) for extent in ledger.tree)


def unpack(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]


__all__ = ["ASKER", "HOLDER", "LATER", "Copy", "StampedNode", "require_quiet", "unpack"]
