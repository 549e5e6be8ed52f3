"""The disk tier outside the core: a directory that other nodes use too, and a worker for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from tests.core.simulation import Arena, Bench, Disk, FileName, FileOp, KvFile, Prompt, Worker, file_of, stamps
from tierkv.core.instructions import (
    Demote,
    ExtentRow,
    FileLost,
    GroupFound,
    OnDisk,
    OpenNamespace,
    OpFailed,
    Read,
    ReadDone,
    Remove,
    Report,
    Rows,
    SetAside,
    StillUsed,
    Touch,
    WriteDone,
)
from tierkv.core.journal import Account, Balances
from tierkv.core.keys import KEY_BYTES, key_at
from tierkv.core.reasons import Reason

PAGE = 4096


class DiskWorker(Worker):
    """Copies from `nvme`, the data directory, to `disk`."""

    def __init__(self, arena: Arena, nvme: Disk, disk: Disk) -> None:
        super().__init__(arena, disk)
        self.nvme = nvme

    def take(self, instruction: object) -> None:
        if isinstance(instruction, Demote):
            self.waiting.append(instruction)
        elif isinstance(instruction, OpenNamespace):
            self.disk.specs[instruction.group] = self.nvme.specs[instruction.group]
        elif isinstance(instruction, Touch):
            for row in instruction.rows:
                self.use((row.group, row.rank, row.key), row.last_used)
        else:
            super().take(instruction)

    def run(self, op: FileOp, failure: Reason | None = None, *, leaves_file: bool = False, valid: int = 0) -> None:
        if isinstance(op, Demote):
            self.waiting.remove(op)
            self.unheard.append((op, self._demote(op, failure)))
        else:
            super().run(op, failure, leaves_file=leaves_file, valid=valid)

    def _demote(self, op: Demote, failure: Reason | None) -> Report:
        name = file_of(op)
        source, there = self.nvme.files.get(name), self.disk.files.get(name)
        if failure is not None:
            return OpFailed(op.op, failure)
        if source is None:
            return OpFailed(op.op, Reason.NOT_FOUND)
        if not source.keys.startswith(op.keys):
            return OpFailed(op.op, Reason.KEY_MISMATCH)
        if None in source.content:
            return OpFailed(op.op, Reason.CHECKSUM)
        if there is not None and None in there.content and there.keys.startswith(source.keys):
            there = None  # it is read, and replaced
        if there is not None and there.keys.startswith(source.keys):
            return WriteDone(op.op, there.row.file_bytes, 0.01)
        if there is not None and not source.keys.startswith(there.keys):
            return OpFailed(op.op, Reason.NAME_TAKEN)
        row = msgspec.structs.replace(source.row, last_used=op.last_used, hits=op.hits)
        self.disk.put(name, replace(source, row=row))
        return WriteDone(op.op, row.file_bytes, 0.01)

    def _read(self, op: Read, failure: Reason | None, valid: int) -> Report:
        file = self.disk.files.get(file_of(op))
        if file is not None and not file.keys.startswith(op.keys):
            return ReadDone(op.op, 0, 0.01, Reason.KEY_MISMATCH, gone=True)  # somebody's, and right
        return super()._read(op, failure, valid)

    def _remove(self, op: Remove | SetAside, failure: Reason | None) -> Report:
        file = self.disk.files.get(file_of(op))
        is_used = (
            isinstance(op, Remove)
            and failure is None
            and file is not None
            and file.row.last_used > op.unless_used_since
        )
        if is_used and file is not None:
            return StillUsed(op.op, file.row.last_used)
        return super()._remove(op, failure)

    # ---- what other nodes do

    def use(self, name: FileName, last_used: float) -> None:
        file = self.disk.files.get(name)
        if file is not None and file.row.last_used < last_used:
            row = msgspec.structs.replace(file.row, last_used=last_used)
            self.disk.files[name] = replace(file, row=row)

    def put(self, prompt: Prompt, first: int, end: int, now: float, *, ranks: int = 1) -> None:
        """Another node puts blocks [first, end) of a prompt there, as one extent."""
        for rank in range(ranks):
            self.put_rank(prompt, first, end, rank, now)

    def put_rank(self, prompt: Prompt, first: int, end: int, rank: int, now: float) -> None:
        keys = prompt.keys[first * KEY_BYTES : end * KEY_BYTES]
        block_bytes = prompt.spec.identity.layout.total_block_bytes
        row = ExtentRow(
            key=key_at(keys, 0),
            parent=prompt.key(first - 1) if first else prompt.group,
            first_token=first * prompt.block_tokens,
            keys=keys,
            block_bytes=block_bytes,
            file_bytes=2 * PAGE + (end - first) * -(-block_bytes // PAGE) * PAGE,
            created=now,
            last_used=now,
            hits=0,
        )
        name = (prompt.group, rank, row.key)
        self.disk.specs[prompt.group] = prompt.spec
        tokens = prompt.first(end).tokens_from(first)
        self.disk.put(name, KvFile(row, tokens, tuple(stamps(keys, rank)), {}))
        self.tell(GroupFound(prompt.group, prompt.spec.identity))
        self.tell(Rows(prompt.spec.identity.weights, prompt.group, rank, [row]))

    def lose(self, name: FileName) -> None:
        """Another node removes it."""
        self.disk.lose(name)
        self.tell(FileLost(*name))


class DiskBench(Bench):
    """A Bench with a disk tier. So many extents of two blocks fit on NVMe, and there. Storage worker and worker of the
    disk tier do all there is in turn, see `work`."""

    def __init__(
        self,
        *,
        host_slots: int = 8,
        nvme_extents: int = 2,
        disk_extents: int = 100,
        ranks: int = 1,
        disk: Disk | None = None,
        tier: Disk | None = None,
        policy: str = "lru",
        ttl: tuple[tuple[str, float], ...] = (),
        is_recovered: bool = True,
    ) -> None:
        self.tier = tier if tier is not None else Disk()
        self.is_recovered = is_recovered
        self._more = {"disk_bytes": disk_extents * ranks * 4 * PAGE, "disk_inflight": 2, "ttl": ttl}
        super().__init__(
            host_slots=host_slots,
            nvme_bytes=nvme_extents * ranks * 4 * PAGE,
            ranks=ranks,
            disk=disk,
            policy=policy,
            pinned_share=0.5,
        )

    def start(self, order: Sequence[FileName] | None = None, *, resume_failure: Reason | None = None) -> None:
        self.limits = replace(self.limits, **self._more)  # type: ignore[arg-type]
        self.balances = Balances()
        self.disk_worker = DiskWorker(Arena(), self.disk, self.tier)
        super().start(order, resume_failure=resume_failure)
        self.disk_worker.arena = self.arena
        self.worker.disk_tier = self.tier
        self.start_disk_worker()
        if self.is_recovered:
            self.recover_disk()

    def start_disk_worker(self) -> None:
        self.absorb(self.state.disk_worker_started(self.now))

    def recover_disk(self) -> None:
        for report in [*self.tier.resume(), *self.tier.recovery()]:
            self.absorb(self.state.disk_report(report, self.now))

    def absorb(self, effects: Iterable[object]) -> None:
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, OnDisk):
                self.disk_worker.take(effect.instruction)
        super().absorb(effect for effect in effects if not isinstance(effect, OnDisk))
        for posting in self.state.take_postings(self.now):
            self.balances.fold(posting)
        there = {group: num_bytes for group, num_bytes in self.state.disk_balances() if num_bytes}
        assert self.balances.of_account(Account.DISK) == there

    def work(self) -> None:
        while self.worker.waiting or self.worker.unheard or self.disk_worker.waiting or self.disk_worker.unheard:
            super().work()
            self.disk_worker.run_all()
            self.hear_disk()

    def work_on_nvme(self) -> None:
        super().work()

    def hear_disk(self) -> None:
        while self.disk_worker.unheard:
            self.absorb(self.state.disk_report(self.disk_worker.deliver(), self.now))

    def disk_worker_dies(self, done: int = 0) -> None:
        self.disk_worker.die(done)
        self.absorb(self.state.disk_worker_died(self.now))

    def name(self, prompt: Prompt, rank: int = 0) -> FileName:
        return prompt.group, rank, prompt.key(0)

    def where(self, prompt: Prompt) -> str:
        """In which tiers the extent is that begins a prompt: h, n, d."""
        extent = self.state._ledger.tree.heads.get(prompt.key(0))
        if extent is None:
            return ""
        return "".join(
            letter
            for letter, is_there in (
                ("h", extent.host_blocks == extent.num_blocks),
                ("n", extent.nvme == "present"),
                ("d", extent.disk == "present"),
            )
            if is_there
        )

    def store_several(self, count: int, start: int = 1) -> list[Prompt]:
        """Extents of two blocks, one after the other, flushed."""
        prompts = [self.prompt(number, 100 + number) for number in range(start, start + count)]
        for prompt in prompts:
            self.tick(1.0)
            self.store_durably(prompt)
        return prompts
