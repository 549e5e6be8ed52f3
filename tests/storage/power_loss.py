"""A storage worker's life under a crash recorder, and what must hold in every state that a power loss may leave of it.

`Life` runs the real worker: stores, removals, extents that grow under their key, bit rot, set-asides, a restart.
`Aftermath` is one start after a power loss, as the worker does it, with the first read of everything that it found.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.crash import CrashRecorder, CrashState, Noted
from tests.storage.samples import BLOCK_TOKENS, Sample
from tests.workers.desk import Desk, remove_order
from tierkv.core.identity import Identity
from tierkv.core.instructions import (
    ExtentRow,
    GroupFound,
    Read,
    Recovered,
    RemoveDone,
    Report,
    Rows,
    SetAside,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.keys import KEY_BYTES, count_keys
from tierkv.core.reasons import Reason
from tierkv.node.lock import lock_data_directory
from tierkv.storage.catalog import Applied, Catalog, Change, IndexFailed, PutRow
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import read_blocks
from tierkv.storage.format import stored_bytes
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import recover
from tierkv.workers.channel import BlockingChannel

PAGE_BYTES = 4096
QUARANTINE_BYTES = 40_000  # two files and no more, so that it is pruned
MAX_BLOCKS_READ = 16


# ---------------------------------------------------------------- what is noted


@dataclass(frozen=True)
class Flushed:
    """WriteDone is about to be sent."""

    sample: Sample


@dataclass(frozen=True)
class GivenUp:
    """From here on the file may be absent, or damaged by somebody else."""

    sample: Sample


@dataclass(frozen=True)
class Found:
    """Recovered is about to be sent: what was told before it counts as flushed."""

    names: tuple[ExtentName, ...]


@dataclass(frozen=True)
class StopBegan:
    """The worker is about to be told to stop."""


@dataclass(frozen=True)
class IndexAge:
    """The index after a commit: rows with the recorder's numbers of the files that they describe, and the raw file."""

    rows: dict[bytes, tuple[IndexedFile, int | None]] = field(repr=False)
    raw: bytes = field(repr=False)


# ---------------------------------------------------------------- a life


class Life:
    """What the worker is told to do, and what it says that it has done."""

    def __init__(self, disk: Path) -> None:
        self.root = disk / "data"
        self.recorder = CrashRecorder(disk)
        self.samples: list[Sample] = []
        self._ops: dict[int, tuple[str, Sample]] = {}
        self._next_op = 1

    def sample(self, seed: int, num_blocks: int = 2, block_bytes: int = PAGE_BYTES) -> Sample:
        made = Sample(seed=seed, num_blocks=num_blocks, block_bytes=block_bytes)
        self.samples.append(made)
        return made

    def run(self) -> None:
        with self.recorder, self._watched():
            self._first_run()
            self._second_run()

    def run_short(self) -> None:
        """Two stores and no more."""
        with self.recorder, self._watched(), Desk(self.root, health_seconds=20) as desk:
            self._store(desk, self.sample(1_000))
            self._store(desk, self.sample(2_000, num_blocks=3))

    def run_stop(self, num_files: int) -> None:
        """Many files, and a stop while some of them are being written."""
        with self.recorder, self._watched(), Desk(self.root, health_seconds=20) as desk:
            samples = [self.sample(100 * number, num_blocks=1) for number in range(1, num_files + 1)]
            late = num_files // 10
            self._store(desk, *samples[:-late])
            desk.load(samples[0], self._op("load", samples[0]))
            self._touch(desk, samples[:late])
            for sample in samples[-late:]:
                desk.send(desk.arena.write_order(sample, self._op("store", sample)))
            self.recorder.note(StopBegan())
            desk.stop()

    @property
    def stop_began(self) -> int:
        """After how many events."""
        return self._first(StopBegan)

    @property
    def first_flushed(self) -> int:
        """After how many events."""
        return self._first(Flushed)

    def _first(self, kind: type[object]) -> int:
        events = enumerate(self.recorder.events)
        return next(at for at, event in events if isinstance(event, Noted) and isinstance(event.note, kind))

    @property
    def num_flushed(self) -> int:
        return sum(isinstance(event, Noted) and isinstance(event.note, Flushed) for event in self.recorder.events)

    def _first_run(self) -> None:
        with Desk(self.root, health_seconds=20, quarantine_bytes=QUARANTINE_BYTES) as desk:
            early = [self.sample(1_000 * number) for number in range(1, 7)]
            self._store(desk, *early)  # all at a time
            for number in range(7, 10):
                self._store(desk, self.sample(1_000 * number, num_blocks=3, block_bytes=1000))
            self._remove(desk, early[0], early[1])
            self._store(desk, self.sample(1_000, num_blocks=3))  # a longer extent under the key of a removed one
            self._store(desk, self.sample(3_000, num_blocks=3))  # and of one that is there
            self._touch(desk, early[4:])
            self._rot(early[3])
            desk.load(early[3], self._op("load", early[3]))  # finds the damage and sets it aside
            self._set_aside(desk, early[4])
            self._store(desk, early[3])
            desk.stop()

    def _second_run(self) -> None:
        """Starts with what a writer that was killed has left: in tmp/, and files whose folders were not flushed."""
        with DataDirectory.open(self.root) as directory:
            for number in (21, 22):
                self.sample(1_000 * number).write(directory)
        fd = os.open(self.root / "tmp" / "99-0123abcd-0.tmp", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(fd, bytes(6000), 0)
        os.close(fd)
        with Desk(self.root, health_seconds=20, quarantine_bytes=QUARANTINE_BYTES) as desk:
            desk.recovered()
            late = [self.sample(1_000 * number, num_blocks=1 + number % 4) for number in range(11, 17)]
            for sample in late[:3]:
                self._rotten_store(desk, sample)  # the third one makes the quarantine too large
            self._store(desk, *late)
            self._remove(desk, *late[3:5], self.samples[7])
            self._store(desk, self.samples[1], late[3])

    # ---- what it is told

    def _op(self, what: str, sample: Sample) -> int:
        op, self._next_op = self._next_op, self._next_op + 1
        self._ops[op] = (what, sample)
        return op

    def _store(self, desk: Desk, *samples: Sample) -> None:
        ops = []
        for sample in samples:
            desk.open(sample)
            ops.append(self._op("store", sample))
            desk.send(desk.arena.write_order(sample, ops[-1]))
        for op in ops:
            assert isinstance(desk.answer(op), WriteDone)

    def _remove(self, desk: Desk, *samples: Sample) -> None:
        ops = []
        for sample in samples:
            self.recorder.note(GivenUp(sample))
            ops.append(self._op("remove", sample))
            desk.send(remove_order(sample, ops[-1]))
        for op in ops:
            assert isinstance(desk.answer(op), RemoveDone)

    def _set_aside(self, desk: Desk, sample: Sample) -> None:
        self.recorder.note(GivenUp(sample))
        op, name = self._op("set aside", sample), sample.name
        desk.send(SetAside(op, name.fingerprint, name.group, name.rank, name.key, Reason.CHECKSUM))
        assert isinstance(desk.answer(op), RemoveDone)

    def _touch(self, desk: Desk, samples: Sequence[Sample]) -> None:
        names = [sample.name for sample in samples]
        rows = [TouchRow(name.fingerprint, name.group, name.rank, name.key, 1_700_000_900.0, 3) for name in names]
        desk.send(Touch(rows))

    def _rot(self, sample: Sample) -> None:
        """A disk that loses a bit does not ask for a flush: it is as durable as the rest."""
        self.recorder.note(GivenUp(sample))
        fd = os.open(self.root.joinpath(*sample.name.parts), os.O_WRONLY)
        os.pwrite(fd, b"rot", os.fstat(fd).st_size - 4096)
        os.fsync(fd)
        os.close(fd)

    def _rotten_store(self, desk: Desk, sample: Sample) -> None:
        self._store(desk, sample)
        self._rot(sample)
        desk.load(sample, self._op("load", sample))

    # ---- what it says

    @contextmanager
    def _watched(self) -> Iterator[None]:
        send, apply = BlockingChannel.send, Catalog.apply

        told: list[ExtentName] = []

        def noting_send(channel: Any, messages: Sequence[Any], **kwargs: Any) -> None:
            for message in messages:
                match message:
                    case WriteDone(op=op):
                        self.recorder.note(Flushed(self._ops[op][1]))
                    case Rows(fingerprint, group, rank, rows):
                        told.extend(ExtentName(fingerprint, group, rank, row.key) for row in rows)
                    case Recovered():
                        self.recorder.note(Found(tuple(told)))
                        told.clear()
            send(channel, messages, **kwargs)

        def noting_apply(catalog: Catalog, changes: Sequence[Change]) -> Applied | IndexFailed:
            answer = apply(catalog, changes)
            rows = catalog.read(b"")
            if isinstance(rows, dict):
                known = {name: (row, self._described(name, row)) for name, row in rows.items() if row is not None}
                self.recorder.note(IndexAge(known, (self.root / "index" / "data.mdb").read_bytes()))
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockingChannel, "send", noting_send)
            patch.setattr(Catalog, "apply", noting_apply)
            yield

    def _described(self, row_name: bytes, row: IndexedFile) -> int | None:
        name = Namespace.unpack(row_name).extent(row_name[-KEY_BYTES:])
        try:
            status = os.stat(self.root.joinpath(*name.parts))
        except FileNotFoundError:
            return None
        return self.recorder.identify(status) if row.describes(status) else None


# ---------------------------------------------------------------- what must hold


class Promises:
    """What the notes of a state come to."""

    def __init__(self, samples: Sequence[Sample], notes: Sequence[Any]) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.identities: dict[bytes, Identity] = {}
        for sample in samples:
            self.identities[sample.group] = sample.identity
            for index, block in enumerate(sample.blocks):
                key = sample.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
                assert self.blocks.setdefault(key, block) == block
        self.kept: dict[ExtentName, int] = {}  # blocks that were reported flushed and are still wanted
        self.ages: list[IndexAge] = []
        for note in notes:
            match note:
                case Flushed(sample):
                    self.kept[sample.name] = sample.num_blocks
                case GivenUp(sample):
                    self.kept.pop(sample.name, None)
                case Found(names):
                    self.kept |= {name: max(1, self.kept.get(name, 0)) for name in names}
                case IndexAge():
                    self.ages.append(note)


@dataclass
class Aftermath:
    """One start, and the first read of all that it found."""

    recovered: Recovered
    rows: dict[ExtentName, ExtentRow]
    valid: dict[ExtentName, int]

    @classmethod
    def of(cls, root: Path, promises: Promises) -> Aftermath:
        """Raises AssertionError when a block that is called valid is not what was stored under its key."""
        with (
            lock_data_directory(root, 0.0),
            DataDirectory.open(root) as directory,
            directory.folder(("index",), create=True) as index_fd,
            Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
        ):
            quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
            reports: list[Report] = []
            recovered = recover(directory, catalog, quarantine, emit=reports.append, now=time.time())
            groups = {report.group: report.identity for report in reports if isinstance(report, GroupFound)}
            rows = {
                ExtentName(report.fingerprint, report.group, report.rank, row.key): row
                for report in reports
                if isinstance(report, Rows)
                for row in report.rows
            }
            reading = _FirstReads(directory, quarantine, promises, groups)
            valid = {name: reading.read(name, row) for name, row in rows.items()}
        return cls(recovered, rows, valid)


class _FirstReads:
    def __init__(
        self, directory: DataDirectory, quarantine: Quarantine, promises: Promises, groups: dict[bytes, Identity]
    ) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._promises = promises
        self._groups = groups
        self._arena = _ARENA

    def read(self, name: ExtentName, row: ExtentRow) -> int:
        """Blocks that are valid, compared with what was stored; a damaged file is set aside, as the worker does it."""
        assert self._groups[name.group] == self._promises.identities[name.group]
        size, count = stored_bytes(row.block_bytes), count_keys(row.keys)
        self._arena[: count * size] = b"\xee" * (count * size)
        order = Read(
            op=1,
            fingerprint=name.fingerprint,
            group=name.group,
            rank=name.rank,
            key=name.key,
            parent=row.parent,
            first_token=row.first_token,
            block_tokens=BLOCK_TOKENS,
            block_bytes=row.block_bytes,
            keys=row.keys,
            first=0,
            slots=[index * size for index in range(count)],
        )
        outcome = read_blocks(self._directory, self._arena, order, identity=self._groups[name.group])
        for index in range(outcome.valid):
            key = row.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            found = bytes(self._arena[index * size : index * size + row.block_bytes])
            assert found == self._promises.blocks[key], f"block {index} of {name} is wrong"
        assert outcome.failure is None, outcome
        if outcome.damaged:
            assert self._quarantine.set_aside(name, outcome.reason or Reason.BAD_HEADER, time.time())
        return outcome.valid


_ARENA = memoryview(mmap.mmap(-1, MAX_BLOCKS_READ * PAGE_BYTES))


def check_state(root: Path, state: CrashState, samples: Sequence[Sample], source: random.Random) -> str:
    """Build a state in `root`, an empty directory, start on it twice, and assert what was promised. What had become of
    the index, in a word."""
    promises = Promises(samples, state.notes)
    state.build(root)
    data = root / "data"
    index = spoil_index(data, state, promises, source)
    first = Aftermath.of(data, promises)
    for name, num_blocks in promises.kept.items():
        assert first.valid.get(name, 0) >= num_blocks, f"{name} was reported flushed and is lost"
    assert os.listdir(data / "tmp") == []
    left = {
        name: row for name, row in first.rows.items() if first.valid[name] == count_keys(row.keys)
    }  # the others are in quarantine by now
    _check_torn_are_in_quarantine(data, state, first, left)
    if source.random() < 0.25:
        (data / "index" / "data.mdb").unlink()
    second = Aftermath.of(data, promises)
    assert second.recovered.quarantined == second.recovered.temp_removed == second.recovered.unreadable == 0
    assert {name: (row.keys, row.file_bytes) for name, row in second.rows.items()} == {
        name: (row.keys, row.file_bytes) for name, row in left.items()
    }
    assert all(second.valid[name] == count_keys(row.keys) for name, row in second.rows.items())
    if not second.recovered.index_rebuilt:
        assert second.recovered.headers_read == 0
    return index


def check_crash_in_recovery(disk: Path, fresh: Path, state: CrashState, samples: Sequence[Sample], *, seed: int) -> int:
    """The power goes again while the start after a power loss is at work. How many states that may leave."""
    state.build(disk)
    promises = Promises(samples, state.notes)
    with CrashRecorder(disk) as recorder:
        Aftermath.of(disk / "data", promises)
    count = 0
    for again in recorder.states(per_point=1, seed=seed):
        again.notes = state.notes
        root = fresh / f"again-{count}"
        root.mkdir()
        check_state(root, again, samples, random.Random(seed + count))
        shutil.rmtree(root)
        count += 1
    return count


def _check_torn_are_in_quarantine(
    data: Path, state: CrashState, first: Aftermath, left: dict[ExtentName, ExtentRow]
) -> None:
    """Whatever stood under an extent's name is whole, or in quarantine: it is not looked at again at every start."""
    kept = len(os.listdir(data / "quarantine"))
    before = sum(path.startswith("data/quarantine/") for path in state.files)
    damaged = sum(first.valid[name] < count_keys(row.keys) for name, row in first.rows.items())
    assert kept == before + damaged + first.recovered.quarantined
    groups = {name.group for name in first.rows}
    for path in data.glob("models/*/*/*/*/*.kv"):
        name = ExtentName.parse(path.relative_to(data).parts)
        assert name is not None
        assert name in left or name.group not in groups


# ---------------------------------------------------------------- the index, of any age


def spoil_index(data: Path, state: CrashState, promises: Promises, source: random.Random) -> str:
    """LMDB's file is none of the recorder's: it is as old as chance will have it, torn in a commit, cut, or garbage."""
    if "data/FORMAT" not in state.files or not promises.ages:
        return "absent"
    (data / "index").mkdir(exist_ok=True)
    (data / "index" / "OPENING").unlink(missing_ok=True)
    kind = source.choice(["absent", "aged", "aged", "aged", "torn", "cut", "garbage"])
    raw = source.choice(promises.ages).raw
    match kind:
        case "aged":
            _write_aged(data, state, source.choice(promises.ages[-8:]), source)
        case "torn":
            _write(data, _tear(promises.ages, source))
        case "cut":
            _write(data, raw[: source.randrange(len(raw))])
        case "garbage":
            _write(data, source.randbytes(20_000))
    return kind


def _write(data: Path, content: bytes) -> None:
    (data / "index" / "data.mdb").write_bytes(content)


def _write_aged(data: Path, state: CrashState, age: IndexAge, source: random.Random) -> None:
    """Rows with the stamps that their files have now: a row that was right once is believed wherever its file came
    back, whatever became of the file's times."""
    changes: list[Change] = []
    for row_name, (row, inode) in age.rows.items():
        path = "/".join(Namespace.unpack(row_name).extent(row_name[-KEY_BYTES:]).parts)
        kept = state.files.get(f"data/{path}")
        if kept is not None and kept.inode == inode:
            status = os.stat(data / path)
            changes.append(PutRow(row_name, IndexedFile(row.row, status.st_ino, status.st_ctime_ns)))
        elif source.random() < 0.8:
            changes.append(PutRow(row_name, row))
    with (
        DataDirectory.open(data, create=False, writable=False) as directory,
        directory.folder(("index",)) as index_fd,
        Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
    ):
        assert isinstance(catalog.apply(changes), Applied)


def _tear(ages: Sequence[IndexAge], source: random.Random) -> bytes:
    """A commit of which some pages came to the disk and the two that say so did not: LMDB writes those last."""
    at = source.randrange(len(ages))
    before, after = ages[max(0, at - 1)].raw, ages[at].raw
    made = bytearray(before.ljust(len(after), b"\0"))
    for start in range(2 * PAGE_BYTES, len(after), PAGE_BYTES):
        if source.random() < 0.5:
            made[start : start + PAGE_BYTES] = after[start : start + PAGE_BYTES]
    return bytes(made)
