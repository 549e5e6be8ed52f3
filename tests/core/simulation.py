"""What lies outside the core, as small as can be: an arena, a disk, a storage worker. Shared by the tests of the core.

Blocks are owner-stamped: the one right content of the block with key k at rank r is the stamp (k, r). Whatever else is
found in a slot or a file was put there by somebody who had no right to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec

from tierkv.core.addresses import pool_bases
from tierkv.core.grants import (
    GRANTED,
    Committed,
    GroupSpec,
    Lease,
    LeaseReady,
    Refused,
    Reservation,
    SealAnswer,
    Waiting,
)
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.instructions import (
    CopyDone,
    Demote,
    Download,
    ExtentRow,
    ForgetPin,
    GroupFound,
    Instruction,
    OnDevice,
    OpenNamespace,
    OpFailed,
    PinForgotten,
    PinFound,
    PinRecord,
    PinRecorded,
    PurgeAbout,
    PurgeRecorded,
    PurgeResumed,
    PurgeScope,
    PurgeSwept,
    Read,
    ReadDone,
    RecordPin,
    RecordPurge,
    Recovered,
    Remove,
    RemoveDone,
    Report,
    Rows,
    SetAside,
    SweepPurge,
    Swept,
    Touch,
    Upload,
    Write,
    WriteDone,
    Zero,
    Zeroed,
)
from tierkv.core.keys import KEY_BYTES, chain_keys, count_keys, key_at, pack_tokens
from tierkv.core.pins import PinRefused, PinState
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState, Limits

PAGE = 4096
FILE_HEADER_BYTES = 2 * PAGE  # of the tiny extents here

Stamp = tuple[bytes, int]
FileName = tuple[bytes, int, bytes]  # group, rank, key
DeviceOp = Upload | Download | Zero
FileOp = Write | Read | Demote | Remove | SetAside | SweepPurge | Zero


def split(keys: bytes) -> list[bytes]:
    return [key_at(keys, index) for index in range(count_keys(keys))]


def stamps(keys: bytes, rank: int) -> list[Stamp]:
    return [(key, rank) for key in split(keys)]


def make_group(
    *, salt: str = "", block_tokens: int = 1, block_bytes: int = PAGE, ranks: int = 1, persistent: bool = True
) -> GroupSpec:
    identity = Identity(
        weights="f" * 64,
        config="",
        layout=Layout(dtype="u8", block_bytes=(block_bytes,), axes="x", block_tokens=block_tokens, engine="fake"),
        parallel=Parallel(tensor=ranks, shards=ranks),
        salt=salt,
    )
    return GroupSpec(group=identity.group_key(), identity=identity, model_name="fake", persistent=persistent)


@dataclass(frozen=True)
class Prompt:
    """The blocks of one prompt under one group."""

    spec: GroupSpec
    tokens: tuple[int, ...]

    @property
    def group(self) -> bytes:
        return self.spec.group

    @property
    def block_tokens(self) -> int:
        return self.spec.identity.layout.block_tokens

    @cached_property
    def keys(self) -> bytes:
        return chain_keys(self.group, pack_tokens(self.tokens), self.block_tokens)

    @cached_property
    def block_keys(self) -> list[bytes]:
        return split(self.keys)

    @property
    def blocks(self) -> int:
        return len(self.tokens) // self.block_tokens

    def first(self, blocks: int) -> Prompt:
        return Prompt(self.spec, self.tokens[: blocks * self.block_tokens])

    def key(self, index: int) -> bytes:
        return self.block_keys[index]

    def tokens_from(self, first: int) -> bytes:
        """Packed tokens of the full blocks from `first` on."""
        return pack_tokens(self.tokens[first * self.block_tokens : self.blocks * self.block_tokens])


class Arena(dict[int, object]):
    """Slot offset -> what is in it."""

    def write(self, slots: Iterable[int], content: Iterable[object]) -> None:
        self.update(zip(slots, content, strict=True))

    def zero(self, offset: int, num_bytes: int) -> None:
        for slot in [slot for slot in self if offset <= slot < offset + num_bytes]:
            del self[slot]

    def read(self, slots: Iterable[int]) -> list[object]:
        return [self.get(slot, "never written") for slot in slots]


@dataclass(frozen=True)
class KvFile:
    row: ExtentRow
    tokens: bytes
    content: tuple[Stamp | None, ...]  # None: damaged
    extras: Mapping[int, Sequence[bytes]]

    @property
    def keys(self) -> bytes:
        return self.row.keys


@dataclass
class Disk:
    """The data directory. Survives everything; `specs` stand for the identity.json files."""

    files: dict[FileName, KvFile] = field(default_factory=dict)
    specs: dict[bytes, GroupSpec] = field(default_factory=dict)
    purges: dict[bytes, tuple[PurgeScope, PurgeAbout]] = field(default_factory=dict)  # recorded, not yet swept
    pins: dict[bytes, PinRecord] = field(default_factory=dict)
    _harmed: dict[tuple[bytes, int], set[bytes]] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        return sum(file.row.file_bytes for file in self.files.values())

    def damage(self, name: FileName, index: int) -> None:
        """Bit rot. The whole file is set aside as soon as somebody reads that block."""
        self._harm(name)
        file = self.files[name]
        content = (*file.content[:index], None, *file.content[index + 1 :])
        self.files[name] = replace(file, content=content)

    def lose(self, name: FileName) -> None:
        """Somebody deletes it behind our back."""
        self._harm(name)
        del self.files[name]

    def shorten(self, name: FileName) -> None:
        """A file of before: its last block is not in it."""
        self._harm(name)
        file = self.files[name]
        row = msgspec.structs.replace(
            file.row, keys=file.keys[:-KEY_BYTES], file_bytes=max(0, file.row.file_bytes - PAGE)
        )
        self.files[name] = replace(file, row=row, content=file.content[:-1])

    def harmed_keys(self, group: bytes, rank: int) -> set[bytes]:
        """Blocks that are damaged or lost through no fault of ours, or will be with their file."""
        return self._harmed.get((group, rank), set())

    def _harm(self, name: FileName) -> None:
        self._harmed.setdefault(name[:2], set()).update(split(self.files[name].keys))

    def put(self, name: FileName, file: KvFile) -> None:
        self.files[name] = file
        self._harmed.get(name[:2], set()).difference_update(split(file.keys))

    def has_block(self, group: bytes, rank: int, head: bytes, index: int) -> bool:
        file = self.files.get((group, rank, head))
        return (
            file is not None and index < len(file.content) and file.content[index] == (key_at(file.keys, index), rank)
        )

    def keys_of(self, group: bytes, rank: int) -> set[bytes]:
        """Keys of blocks that some file says it holds."""
        return {key for name, file in self.files.items() if name[:2] == (group, rank) for key in split(file.keys)}

    def right_keys(self, group: bytes, rank: int) -> set[bytes]:
        """Keys of blocks that some file holds rightly."""
        return {
            key_at(file.keys, index)
            for (its_group, its_rank, _), file in self.files.items()
            if (its_group, its_rank) == (group, rank)
            for index, stamp in enumerate(file.content)
            if stamp == (key_at(file.keys, index), rank)
        }

    def in_scope(self, scope: PurgeScope) -> list[FileName]:
        groups = {named.group for named in scope.groups}
        heads = {(named.group, head) for named in scope.extents for head in split(named.heads)}
        return [
            name
            for name in self.files
            if name[0] in groups or (name[0], name[2]) in heads or self.specs[name[0]].identity.weights in scope.models
        ]

    def resume(self, failure: Reason | None = None) -> list[Report]:
        """What a worker that sends rows tells first: the pins, and what it did with purges that were recorded."""
        reports: list[Report] = [PinFound(record) for record in self.pins.values()]
        for purge, (scope, about) in list(self.purges.items()):
            if failure is None:
                for name in self.in_scope(scope):
                    del self.files[name]
                del self.purges[purge]
            reports.append(PurgeResumed(purge, scope, about, Swept(), failure))
        return reports

    def recovery(self, order: Sequence[FileName] | None = None) -> list[Report]:
        """What a worker reports at start, one row a report."""
        reports: list[Report] = [
            GroupFound(spec.group, spec.identity, spec.model_name) for spec in self.specs.values() if spec.persistent
        ]
        hidden = {name for scope, _ in self.purges.values() for name in self.in_scope(scope)}
        for name in order if order is not None else list(self.files):
            if name in hidden:
                continue
            group, rank, _ = name
            fingerprint = self.specs[group].identity.weights
            reports.append(Rows(fingerprint, group, rank, [self.files[name].row]))
        count = len(self.files)
        reports.append(
            Recovered(
                seconds=0.1,
                extents=count,
                index_rows=count,
                headers_read=0,
                quarantined=0,
                foreign=0,
                unknown_format=0,
                temp_removed=0,
                index_rebuilt=False,
                hidden_bytes=sum(self.files[name].row.file_bytes for name in hidden),
            )
        )
        return reports


class Worker:
    """A storage worker: keeps the order of what concerns one file, and no other.

    `run` does what an instruction says and queues its report; `deliver` hands over the oldest report.
    """

    def __init__(self, arena: Arena, disk: Disk) -> None:
        self.arena = arena
        self.disk = disk
        self.waiting: list[FileOp] = []
        self.unheard: list[tuple[FileOp | None, Report]] = []  # done, and the core doesn't know
        self.touched = 0
        self.pin_failure: Reason | None = None
        self.disk_tier: Disk | None = None  # purges are recorded for it too

    def take(self, instruction: object) -> None:
        if isinstance(instruction, RecordPurge):
            if instruction.nvme:
                self.disk.purges[instruction.purge] = (instruction.scope, instruction.about)
            if self.disk_tier is not None and instruction.disk:
                self.disk_tier.purges[instruction.purge] = (instruction.scope, instruction.about)
            self.unheard.append((None, PurgeRecorded(instruction.purge)))
        elif isinstance(instruction, RecordPin):
            if self.pin_failure is None:
                self.disk.pins[instruction.record.pin] = instruction.record
            self.unheard.append((None, PinRecorded(instruction.record.pin, self.pin_failure)))
        elif isinstance(instruction, ForgetPin):
            if self.pin_failure is None:
                self.disk.pins.pop(instruction.pin, None)
            self.unheard.append((None, PinForgotten(instruction.pin, self.pin_failure)))
        elif isinstance(instruction, (Write, Read, Remove, SetAside, SweepPurge, Zero)):
            self.waiting.append(instruction)
        elif isinstance(instruction, Touch):
            self.touched += len(instruction.rows)
        else:
            assert isinstance(instruction, OpenNamespace), f"the worker knows no {instruction!r}"

    def runnable(self) -> list[FileOp]:
        first: dict[FileName, FileOp] = {}
        for op in self.waiting:
            first.setdefault(file_of(op), op)
        return list(first.values())

    def slots_in_use(self) -> set[int]:
        """Slots that an operation may still touch, for all the core can know."""
        ops = [*self.waiting, *(op for op, _ in self.unheard if op is not None)]
        wiped = {
            page
            for op in ops
            if isinstance(op, Zero)
            for offset, size in op.ranges
            for page in range(offset, offset + size, PAGE)
        }
        return wiped | {slot for op in ops if isinstance(op, (Write, Read)) for slot in op.slots}

    def scribble(self) -> None:
        """Reads in progress have filled their slots with half of something."""
        for op in self.runnable():
            if isinstance(op, Read):
                self.arena.write(op.slots, ["half read"] * len(op.slots))

    def run(self, op: FileOp, failure: Reason | None = None, *, leaves_file: bool = False, valid: int = 0) -> None:
        """Do it, or fail: a failed write may leave its file all the same, a failed read `valid` blocks."""
        self.waiting.remove(op)
        if isinstance(op, Write):
            report = self._write(op, failure, leaves_file)
        elif isinstance(op, Read):
            report = self._read(op, failure, valid)
        elif isinstance(op, Zero):
            for offset, size in op.ranges:
                self.arena.zero(offset, size)
            report = Zeroed(op.op)
        elif isinstance(op, SweepPurge):
            report = self._sweep(op, failure, valid)
        else:
            report = self._remove(op, failure)
        self.unheard.append((op, report))

    def run_all(self) -> None:
        while self.waiting:
            self.run(self.waiting[0])

    def tell(self, report: Report) -> None:
        self.unheard.append((None, report))

    def deliver(self) -> Report:
        return self.unheard.pop(0)[1]

    def die(self, done: int) -> None:
        """Proven dead. Of what was waiting, the first `done` that could run did happen; nobody will hear of it."""
        for _ in range(done):
            if runnable := self.runnable():
                self.run(runnable[done % len(runnable)])
        self.waiting.clear()
        self.unheard.clear()

    def _write(self, op: Write, failure: Reason | None, leaves_file: bool) -> Report:
        content = self.arena.read(op.slots)
        assert content == stamps(op.keys, op.rank), f"a file would get blocks that are not its own: {content}"
        file_bytes = FILE_HEADER_BYTES + len(op.slots) * -(-op.block_bytes // PAGE) * PAGE
        if failure is None or leaves_file:
            row = ExtentRow(
                key=op.key,
                parent=op.parent,
                first_token=op.first_token,
                keys=op.keys,
                block_bytes=op.block_bytes,
                file_bytes=file_bytes,
                created=op.created,
                last_used=op.last_used,
                hits=op.hits,
            )
            self.disk.put(file_of(op), KvFile(row, op.tokens, tuple(stamps(op.keys, op.rank)), dict(op.extras)))
        return OpFailed(op.op, failure) if failure is not None else WriteDone(op.op, file_bytes, 0.01)

    def _read(self, op: Read, failure: Reason | None, valid: int) -> Report:
        file = self.disk.files.get(file_of(op))
        if file is None:
            return ReadDone(op.op, 0, 0.01, Reason.NOT_FOUND, gone=True)
        if not file.keys.startswith(op.keys):
            del self.disk.files[file_of(op)]
            return ReadDone(op.op, 0, 0.01, Reason.KEY_MISMATCH, gone=True)
        content = file.content[op.first : op.first + len(op.slots)]
        if failure is not None:
            valid = min(valid, len(content))
            self.arena.write(op.slots[:valid], content[:valid])
            return ReadDone(op.op, _whole(content[:valid]), 0.01, failure)
        self.arena.write(op.slots, [stamp or "damaged" for stamp in content])
        if None in content:
            del self.disk.files[file_of(op)]
            return ReadDone(op.op, _whole(content), 0.01, Reason.CHECKSUM, gone=True)
        return ReadDone(
            op.op, len(content), 0.01, tokens=file.tokens, extras={k: list(v) for k, v in file.extras.items()}
        )

    def _sweep(self, op: SweepPurge, failure: Reason | None, valid: int) -> Report:
        if op.purge not in self.disk.purges:
            return PurgeSwept(op.purge, Swept(), Reason.NOT_FOUND)
        scope, _ = self.disk.purges[op.purge]
        names = self.disk.in_scope(scope)
        for waiting in self.waiting:
            assert isinstance(waiting, (SweepPurge, Zero)) or file_of(waiting) not in names, "swept while it is in use"
        for name in names if failure is None else names[:valid]:
            del self.disk.files[name]
        if failure is None:
            del self.disk.purges[op.purge]
        return PurgeSwept(op.purge, Swept(files=len(names)), failure)

    def _remove(self, op: Remove | SetAside, failure: Reason | None) -> Report:
        if failure is not None:
            return OpFailed(op.op, failure)
        self.disk.files.pop(file_of(op), None)
        return RemoveDone(op.op)


class DeviceWorker:
    """Of one device: copies between the arena and its pool, whose slots are in the same dictionary by their address."""

    def __init__(self, memory: Arena, base: int, num_bytes: int) -> None:
        self.memory = memory
        self.base = base
        self.num_bytes = num_bytes
        self.is_up = False
        self.waiting: list[DeviceOp] = []
        self.unheard: list[tuple[DeviceOp, Report]] = []  # done, and the core doesn't know

    def take(self, instruction: object) -> None:
        assert self.is_up, f"nobody is there to take {instruction}"
        assert isinstance(instruction, (Upload, Download, Zero)), f"the worker of a device knows no {instruction!r}"
        if isinstance(instruction, (Upload, Download)):
            assert all(0 <= slot < self.num_bytes for slot in instruction.slots), "beyond the pool"
            assert len(instruction.slots) == len(instruction.host) > 0
        self.waiting.append(instruction)

    def run(self, op: DeviceOp, failure: Reason | None = None) -> None:
        """Do it, or fail: then what it was to write holds anything."""
        self.waiting.remove(op)
        self._do(op, "half copied" if failure is not None else None)
        report: Report = OpFailed(op.op, failure) if failure is not None else CopyDone(op.op, 0.01)
        self.unheard.append((op, Zeroed(op.op) if isinstance(op, Zero) else report))

    def run_all(self) -> None:
        while self.waiting:
            self.run(self.waiting[0])

    def scribble(self) -> None:
        """Copies in progress have filled their slots with half of something."""
        for op in self.waiting:
            if not isinstance(op, Zero):
                self._do(op, "half copied")

    def _do(self, op: DeviceOp, instead: str | None) -> None:
        if isinstance(op, Zero):
            for offset, size in op.ranges:
                self.memory.zero(self.base + offset, size)
            return
        pool = [self.base + slot for slot in op.slots]
        source, target = (op.host, pool) if isinstance(op, Upload) else (pool, op.host)
        content = self.memory.read(source) if instead is None else [instead] * len(source)
        self.memory.write(target, content)

    def slots_in_use(self) -> set[int]:
        """Addresses that a copy may still touch, for all the core can know."""
        pages: set[int] = set()
        for op in [*self.waiting, *(op for op, _ in self.unheard)]:
            if isinstance(op, Zero):
                pages.update(
                    self.base + page for offset, size in op.ranges for page in range(offset, offset + size, PAGE)
                )
            else:
                pages.update([*op.host, *(self.base + slot for slot in op.slots)])
        return pages

    def die(self) -> None:
        """Proven dead, and its memory with it."""
        self.waiting.clear()
        self.unheard.clear()
        self.memory.zero(self.base, self.num_bytes)
        self.is_up = False


class Bench:
    """A CacheState with everything around it, for tests that tell a story. Time stands still until `tick`."""

    def __init__(
        self,
        *,
        host_slots: int,
        nvme_bytes: int = 1 << 30,
        extent_blocks: int = 2,
        ranks: int = 1,
        block_tokens: int = 1,
        session_bytes: int = 1 << 30,
        disk: Disk | None = None,
        persistent: bool = True,
        pinned_share: float = 0.1,
        auto_pin_share: float = 0.0,
        shares: tuple[tuple[str, float], ...] = (),
        policy: str = "density",
        device_slots: tuple[int, ...] = (),
    ) -> None:
        self.now = 1_000.0
        self.limits = Limits(
            host_bytes=host_slots * PAGE,
            slab_bytes=PAGE,
            extent_bytes=extent_blocks * PAGE,
            nvme_bytes=nvme_bytes,
            seal_after_seconds=5.0,
            session_bytes=session_bytes,
            inflight_writes=4,
            inflight_reads=4,
            page_bytes=PAGE,
            pinned_share=pinned_share,
            auto_pin_share=auto_pin_share,
            shares=shares,
            policy=policy,
            device_bytes=tuple(slots * PAGE for slots in device_slots),
        )
        self.spec = make_group(ranks=ranks, block_tokens=block_tokens, persistent=persistent)
        self.disk = disk if disk is not None else Disk()
        self.disk.specs[self.spec.group] = self.spec
        self.numbers = 0
        self.start()

    def start(self, order: Sequence[FileName] | None = None, *, resume_failure: Reason | None = None) -> None:
        """A new incarnation on the same disk."""
        self.arena = Arena()
        limits = self.limits
        *bases, end = pool_bases(limits.host_bytes, limits.slab_bytes, limits.device_bytes)
        self.generations = [0] * (end // PAGE)
        self.state = CacheState(self.limits, self.generations)
        self.worker = Worker(self.arena, self.disk)
        self.devices = [
            DeviceWorker(self.arena, base, size) for base, size in zip(bases, limits.device_bytes, strict=True)
        ]
        self.notices: list[object] = []
        self.state.open_session(b"engine", self.now)
        for device, worker in enumerate(self.devices):
            self.absorb(self.state.device_worker_started(device, worker.num_bytes, self.now))
            worker.is_up = True
        self.absorb(self.state.open_group(self.spec, self.now))
        if self.limits.nvme_bytes:
            self.absorb(self.state.worker_started(self.now))
            for report in [*self.disk.resume(resume_failure), *self.disk.recovery(order)]:
                self.absorb(self.state.report(report, self.now))

    def absorb(self, effects: Iterable[object]) -> None:
        for effect in effects:
            if isinstance(effect, Instruction):
                self.worker.take(effect)
            elif isinstance(effect, OnDevice):
                self.devices[effect.device].take(effect.instruction)
            else:
                self.notices.append(effect)
        self.state.check()

    def work(self) -> None:
        """The worker does all there is, and is heard."""
        while self.worker.waiting or self.worker.unheard:
            self.worker.run_all()
            self.hear()

    def copy(self) -> None:
        """The workers of the devices do all there is, and are heard."""
        while any(worker.waiting or worker.unheard for worker in self.devices):
            for device, worker in enumerate(self.devices):
                worker.run_all()
                while worker.unheard:
                    self.absorb(self.state.device_report(device, worker.unheard.pop(0)[1], self.now))

    def lose_device(self, device: int = 0) -> None:
        """Its worker dies; what its pool held is lost."""
        self.devices[device].die()
        self.absorb(self.state.device_worker_died(device, self.now))

    def hear(self) -> None:
        while self.worker.unheard:
            self.absorb(self.state.report(self.worker.deliver(), self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.absorb(self.state.tick(self.now))

    def grant(self) -> bytes:
        self.numbers += 1
        return f"grant {self.numbers}".encode()

    def prompt(self, *tokens: int) -> Prompt:
        return Prompt(self.spec, tokens)

    def match(self, prompt: Prompt) -> tuple[int, int]:
        """(blocks, of them in host memory)"""
        match = self.state.match(prompt.group, prompt.keys)
        return match.blocks, match.host_blocks

    def reserve(
        self,
        prompt: Prompt,
        *,
        rank: int = 0,
        first: int = 0,
        session: bytes = b"engine",
        grant: bytes | None = None,
        on_device: bool = False,
    ) -> Reservation | Refused:
        answer, effects = self.state.reserve(
            grant=grant or self.grant(),
            session=session,
            holder=session,
            group=prompt.group,
            rank=rank,
            keys=prompt.keys,
            first=first,
            tokens=prompt.tokens_from(first),
            on_device=on_device,
            now=self.now,
        )
        self.absorb(effects)
        return answer

    def fill(self, prompt: Prompt, ticket: Reservation, *, rank: int = 0, first: int = 0) -> None:
        granted = [first + at for at, state in enumerate(ticket.states) if state == GRANTED]
        self.arena.write(ticket.offsets, [(prompt.key(index), rank) for index in granted])

    def commit(self, ticket: Reservation) -> Committed | Refused:
        answer, effects = self.state.commit(ticket.grant, self.now)
        self.absorb(effects)
        return answer

    def store(
        self, prompt: Prompt, *, rank: int = 0, first: int = 0, session: bytes = b"engine", on_device: bool = False
    ) -> Reservation:
        """Reserve, write, commit: what was granted is stored, on a device once it was copied from there."""
        ticket = self.reserve(prompt, rank=rank, first=first, session=session, on_device=on_device)
        assert isinstance(ticket, Reservation)
        self.fill(prompt, ticket, rank=rank, first=first)
        if ticket.offsets:
            assert isinstance(self.commit(ticket), Committed)
        return ticket

    def seal(self, prompt: Prompt) -> None:
        _, effects = self.state.seal(
            seal_id=0, group=prompt.group, keys=prompt.keys, wait_flushed=False, deadline=self.now, now=self.now
        )
        self.absorb(effects)

    def store_durably(self, prompt: Prompt) -> None:
        for rank in range(self.spec.identity.parallel.shards):
            self.store(prompt, rank=rank)
        self.seal(prompt)
        self.work()

    def flushed(self, prompt: Prompt) -> int:
        answer, effects = self.state.seal(
            seal_id=0, group=prompt.group, keys=prompt.keys, wait_flushed=False, deadline=self.now, now=self.now
        )
        self.absorb(effects)
        assert isinstance(answer, SealAnswer)
        return answer.flushed_blocks

    def acquire(
        self,
        prompt: Prompt,
        *,
        seconds: float = 10.0,
        ranks: Sequence[int] = (0,),
        max_blocks: int = 1 << 16,
        revocable: bool = False,
        session: bytes = b"engine",
        on_device: bool = False,
    ) -> Lease | Waiting | Refused:
        answer, effects = self.state.acquire(
            grant=self.grant(),
            session=session,
            group=prompt.group,
            keys=prompt.keys,
            holders=tuple((rank, session) for rank in ranks),
            max_blocks=max_blocks,
            deadline=self.now + seconds,
            revocable=revocable,
            on_device=on_device,
            now=self.now,
        )
        self.absorb(effects)
        return answer

    def load(self, prompt: Prompt, *, ranks: Sequence[int] = (0,), on_device: bool = False) -> Lease:
        """A lease, the workers having done what it waited for. Its blocks carry their stamps."""
        answer = self.acquire(prompt, ranks=ranks, on_device=on_device)
        if isinstance(answer, Waiting):
            self.copy()
            self.work()
            answer = self.ready()
        assert isinstance(answer, Lease)
        self.check_lease(prompt, answer)
        return answer

    def ready(self) -> Lease:
        """The answer that came as a notice."""
        (notice,) = [notice for notice in self.notices if isinstance(notice, LeaseReady)]
        self.notices.remove(notice)
        return notice.lease

    def check_lease(self, prompt: Prompt, lease: Lease) -> None:
        for part in lease.parts:
            assert self.arena.read(part.offsets) == stamps(prompt.keys, part.rank)[: lease.blocks]
            assert [self.generations[offset // PAGE] for offset in part.offsets] == part.generations

    def pin(
        self,
        prompt: Prompt,
        *,
        tier: str = "host",
        owner: str = "ann",
        seconds: float = 0.0,
        pin: bytes | None = None,
    ) -> PinState | PinRefused:
        answer, effects = self.state.pin(
            pin=pin or self.grant(),
            group=prompt.group,
            keys=prompt.keys,
            owner=owner,
            tier=tier,
            seconds=seconds,
            now=self.now,
        )
        self.absorb(effects)
        return answer

    def unpin(self, pin: bytes) -> PinState | None:
        answer, effects = self.state.unpin(pin, self.now)
        self.absorb(effects)
        return answer

    def release(self, lease: Lease, rank: int | None = None) -> None:
        self.absorb(self.state.release(lease.grant, rank, self.now))

    def fill_host(self) -> None:
        """Other, newer prompts take all the room that may be taken."""
        for _ in range(self.limits.host_bytes // PAGE):
            self.tick(1.0)
            self.numbers += 1
            prompt = self.prompt(1_000 + self.numbers)
            for rank in range(self.spec.identity.parallel.shards):
                self.store(prompt, rank=rank)
            self.seal(prompt)
            self.work()

    def host_used(self) -> int:
        """Slots in use."""
        (host,) = [tier for tier in self.state.tiers() if tier.tier == "host"]
        return (host.used_bytes + host.reserved_bytes) // PAGE

    def nvme_used(self) -> int:
        (nvme,) = [tier for tier in self.state.tiers() if tier.tier == "nvme"]
        return nvme.used_bytes + nvme.reserved_bytes


def file_of(op: FileOp) -> FileName:
    if isinstance(op, SweepPurge):
        return op.purge, 0, b"purge"
    if isinstance(op, Zero):
        return b"zero", op.op, b""
    return op.group, op.rank, op.key


def _whole(content: Sequence[Stamp | None]) -> int:
    return next((index for index, stamp in enumerate(content) if stamp is None), len(content))


__all__ = [
    "KEY_BYTES",
    "PAGE",
    "Arena",
    "Bench",
    "Disk",
    "FileName",
    "FileOp",
    "KvFile",
    "Prompt",
    "Stamp",
    "Worker",
    "file_of",
    "make_group",
    "split",
    "stamps",
]
