"""Sweeps of what is purged: what is in scope is gone for good when one returns, whatever happens to the machine, and
all else is as it was."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.faults.crash import CrashRecorder
from tests.faults.system_calls import ALWAYS, inject
from tests.storage.samples import BLOCK_TOKENS, FINGERPRINT, Sample, identity
from tierkv.core.instructions import (
    ExtentRow,
    OpenNamespace,
    PurgeAbout,
    PurgeResumed,
    PurgeScope,
    Recovered,
    Report,
    Rows,
    ScopeExtents,
    ScopeGroup,
)
from tierkv.core.keys import KEY_BYTES, chain_keys
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.catalog import Catalog, PutRow
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import FORMAT_VERSION, PREFIX_BYTES, decode_prefix, frame_header
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import INDEX, ExtentName
from tierkv.storage.namespace import write_namespace
from tierkv.storage.purge_record import PurgeRecord, read_records, remove_record, write_record
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import recover
from tierkv.storage.sweep import sweep

SALT = "tenant-with-a-name-to-look-for"
PURGE = b"purge number one"
NOW = 1_700_000_000.0
RECORD = PurgeRecord(PURGE, PurgeScope(), PurgeAbout(NOW))


def salted(salt: str, seed: int) -> Sample:
    sample = Sample(seed=seed)
    sample.identity = identity(salt=salt)
    sample.group = sample.parent = sample.identity.group_key()
    sample.keys = chain_keys(sample.group, sample.tokens, BLOCK_TOKENS)
    sample.name = ExtentName(FINGERPRINT, sample.group, 0, sample.keys[:KEY_BYTES])
    return sample


class Store:
    """A data directory with a tenant's files in every place that there is, and another's beside them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mine = [salted(SALT, seed) for seed in (1, 2, 3)]
        self.others = [salted("another", seed) for seed in (1, 2)]
        with DataDirectory.open(root) as directory, self.parts(directory) as (catalog, quarantine):
            for sample in (*self.mine, *self.others):
                write_namespace(directory, OpenNamespace(sample.group, sample.identity, "small"))
                sample.write(directory)
                row = _row(sample)
                name = Namespace.of(sample.name).row_name(sample.name.key)
                catalog.apply([PutRow(name, IndexedFile(row, 1, 1))])
            for sample in (self.mine[2], self.others[1]):
                assert quarantine.set_aside(sample.name, Reason.CHECKSUM, NOW)
        (root / "tmp" / "1-00000000-1.tmp").write_bytes(self.mine[0].blocks[0])
        self.whole = PurgeScope(groups=(ScopeGroup(FINGERPRINT, self.mine[0].group),), names_tenant=True)

    @contextmanager
    def parts(self, directory: DataDirectory) -> Iterator[tuple[Catalog, Quarantine]]:
        with (
            directory.folder((INDEX,)) as fd,
            Catalog(fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
        ):
            yield catalog, Quarantine(directory, max_bytes=2**30, max_age_seconds=1e12)

    def purge(self, scope: PurgeScope, reached: list[str] | None = None) -> object:
        with DataDirectory.open(self.root) as directory, self.parts(directory) as (catalog, quarantine):
            told = (reached if reached is not None else []).append
            return sweep(directory, catalog, quarantine, scope, reached=told)

    def start(self, root: Path | None = None) -> list[Report]:
        """What a worker that recovers tells."""
        reports: list[Report] = []
        with (
            DataDirectory.open(root or self.root) as directory,
            self.parts(directory) as (catalog, quarantine),
        ):
            recovered = recover(directory, catalog, quarantine, emit=reports.append, now=NOW)
        return [*reports, recovered]


def _row(sample: Sample) -> ExtentRow:
    return ExtentRow(sample.name.key, sample.parent, 0, sample.keys, sample.block_bytes, 16_384, NOW, NOW, 0)


def rows(reports: list[Report]) -> set[bytes]:
    return {row.key for report in reports if isinstance(report, Rows) for row in report.rows}


def names_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def traces(root: Path, samples: list[Sample], text: str) -> list[Path]:
    """Files that still hold a block of the samples, or the text."""
    found = []
    for path in root.rglob("*"):
        if path.is_file() and path.name != "data.mdb":
            raw = path.read_bytes()
            wanted = [block for sample in samples for block in sample.blocks]
            if text.encode() in raw or any(block in raw for block in wanted):
                found.append(path)
    return found


@pytest.fixture
def fast_root() -> Iterator[Path]:
    """Where flushing costs nothing: what survives a power loss is simulated."""
    root = Path(tempfile.mkdtemp(prefix="tkv", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def store(fast_root: Path) -> Store:
    return Store(fast_root / "data")


@pytest.mark.scenario(
    "B237",
    then="a purged tenant's files, quarantined copies, temp files, index rows and identity are gone; another's stay",
)
def test_a_group_goes_with_all_that_lies_anywhere_and_with_the_text_of_its_salt(store: Store) -> None:
    others = {path: (store.root / path).read_bytes() for path in map(str, _files_of(store, store.others))}
    swept = store.purge(store.whole)
    assert (swept.files, swept.quarantined_files, swept.temp_files) == (2, 1, 1)  # type: ignore[attr-defined]
    assert (swept.index_rows, swept.left_files) == (3, 0)  # type: ignore[attr-defined]
    assert traces(store.root, [], SALT) == []
    assert not [name for name in names_below(store.root) if store.mine[0].group.hex() in name]
    assert {path: (store.root / path).read_bytes() for path in others} == others
    assert rows(store.start()) == {store.others[0].name.key}


def _files_of(store: Store, samples: list[Sample]) -> list[Path]:
    mine = samples[0].group.hex()
    return [p.relative_to(store.root) for p in store.root.rglob("*") if mine in str(p) and p.is_file()]


def test_the_last_group_of_a_model_takes_the_models_folder_along(store: Store) -> None:
    store.purge(store.whole)
    assert (store.root / "models" / FINGERPRINT / "model.json").exists()
    store.purge(PurgeScope(models=(FINGERPRINT,)))
    assert list((store.root / "models").iterdir()) == []
    assert list((store.root / "quarantine").iterdir()) == []


def test_a_model_is_found_in_quarantine_by_header_where_its_group_has_no_folder(store: Store) -> None:
    store.purge(PurgeScope(groups=(ScopeGroup(FINGERPRINT, store.others[0].group),)))
    aside = next((store.root / "quarantine").iterdir())
    lost = aside.name.replace(store.mine[0].group.hex(), "77" * 32)
    aside.rename(aside.with_name(lost))
    store.purge(PurgeScope(models=(FINGERPRINT,)))
    assert list((store.root / "quarantine").iterdir()) == []


def test_single_extents_go_and_the_rest_of_their_group_stays(store: Store) -> None:
    gone, stays = store.mine[0], store.mine[1]
    scope = PurgeScope(extents=(ScopeExtents(FINGERPRINT, gone.group, gone.name.key),))
    swept = store.purge(scope)
    assert (swept.files, swept.index_rows) == (1, 1)  # type: ignore[attr-defined]
    assert swept.quarantined_files == 1  # type: ignore[attr-defined]
    assert not (store.root / str(gone.name)).exists()
    assert (store.root / str(stays.name)).exists()
    assert rows(store.start()) == {stays.name.key, store.others[0].name.key}


def test_what_is_not_ours_or_newer_is_left_and_counted_with_what_says_whose_it_is(store: Store) -> None:
    shelf = (store.root / str(store.mine[0].name)).parent
    (shelf / "notes.txt").write_text("mine")
    newer = store.root / str(store.mine[1].name)
    newer.write_bytes(_as_newer(newer.read_bytes()))
    os.symlink(store.root / str(store.others[0].name), shelf / f"{shelf.name}{'0' * 62}.kv")
    swept = store.purge(store.whole)
    assert swept.left_files == 3  # type: ignore[attr-defined]
    assert sorted(swept.left_paths) == sorted(  # type: ignore[attr-defined]
        map(str, (shelf / "notes.txt", newer, shelf / f"{shelf.name}{'0' * 62}.kv"))
    )
    assert sorted(path.name for path in shelf.iterdir()) == sorted([f"{shelf.name}{'0' * 62}.kv", "notes.txt"])
    assert (shelf.parent.parent / "identity.json").exists()
    assert (store.root / str(store.others[0].name)).exists()
    assert newer.exists()


def _as_newer(raw: bytes) -> bytes:
    body = raw[PREFIX_BYTES : PREFIX_BYTES + decode_prefix(raw).body_bytes]
    return frame_header(body, FORMAT_VERSION + 1) + raw[4096:]


def test_a_group_that_does_not_say_whose_it_is_is_told_of(store: Store) -> None:
    folder = store.root / "models" / FINGERPRINT / store.others[0].group.hex()
    (folder / "identity.json").write_text("{}")
    assert store.purge(store.whole).unknown_groups == 1  # type: ignore[attr-defined]
    assert (store.root / str(store.others[0].name)).exists()


@pytest.mark.parametrize("operation", ["unlink", "fsync", "rmdir", "listdir", "open"])
def test_what_fails_is_told_and_a_second_sweep_finishes_it(store: Store, operation: str) -> None:
    with DataDirectory.open(store.root) as directory, store.parts(directory) as (catalog, quarantine):
        with inject(errno.EIO, operation, times=ALWAYS), pytest.raises(StorageError):
            sweep(directory, catalog, quarantine, store.whole)
        sweep(directory, catalog, quarantine, store.whole)
    assert traces(store.root, [], SALT) == []
    assert rows(store.start()) == {store.others[0].name.key}


def test_a_sweep_that_was_cut_off_anywhere_is_finished_by_the_next_start_before_a_row_is_told(fast_root: Path) -> None:
    stages = ["files", "quarantine", "temp", "index", "flushed"]
    for number, stage in enumerate(stages):
        store = Store(fast_root / f"{number}")
        with DataDirectory.open(store.root) as directory, store.parts(directory) as (catalog, quarantine):
            write_record(directory, msgspec.structs.replace(RECORD, scope=store.whole))
            with pytest.raises(KeyboardInterrupt):
                sweep(directory, catalog, quarantine, store.whole, reached=_cut_off_at(stage))
        first, *rest = store.start()
        assert isinstance(first, PurgeResumed)
        assert (first.purge, first.reason) == (PURGE, None)
        assert rows(rest) == {store.others[0].name.key}
        assert traces(store.root, [], SALT) == []
        assert os.listdir(store.root / "purges") == []


def _cut_off_at(stage: str):  # type: ignore[no-untyped-def]
    def reached(now: str) -> None:
        if now == stage:
            raise KeyboardInterrupt

    return reached


def test_a_file_that_lay_under_anothers_name_is_known_in_quarantine_by_its_header(store: Store) -> None:
    mine, other = store.mine[0], store.others[0]
    shutil.copy(store.root / str(mine.name), store.root / str(other.name))
    with DataDirectory.open(store.root) as directory, store.parts(directory) as (_, quarantine):
        assert quarantine.set_aside(other.name, Reason.IDENTITY_MISMATCH, NOW)
    assert store.purge(store.whole).quarantined_files == 2  # type: ignore[attr-defined]
    assert traces(store.root, [mine], SALT) == []


def test_what_a_start_can_not_remove_it_hides_and_the_record_stays(store: Store) -> None:
    scope = msgspec.structs.replace(store.whole)
    with DataDirectory.open(store.root) as directory:
        write_record(directory, msgspec.structs.replace(RECORD, scope=scope))
    kept = store.mine[0].name.file
    with inject(errno.EIO, "unlink", when=lambda args, kwargs: args[0] == kept, times=ALWAYS):
        first, *rest = store.start()
    assert isinstance(first, PurgeResumed)
    assert first.reason == Reason.IO_ERROR
    assert rows(rest) == {store.others[0].name.key}
    left = [store.root / str(sample.name) for sample in store.mine if (store.root / str(sample.name)).exists()]
    assert hidden_bytes(rest) == sum(map(os.path.getsize, left)) > 0
    assert os.listdir(store.root / "purges") == [PURGE.hex()]
    again = store.start()[1:]
    assert rows(again) == {store.others[0].name.key}
    assert hidden_bytes(again) == 0
    assert os.listdir(store.root / "purges") == []


def test_single_extents_are_hidden_the_same_way(store: Store) -> None:
    scope = PurgeScope(extents=(ScopeExtents(FINGERPRINT, store.mine[0].group, store.mine[0].name.key),))
    with DataDirectory.open(store.root) as directory:
        write_record(directory, msgspec.structs.replace(RECORD, scope=scope))
    kept = store.mine[0].name.file
    with inject(errno.EIO, "unlink", when=lambda args, kwargs: args[0] == kept, times=ALWAYS):
        reports = store.start()
    assert rows(reports) == {store.mine[1].name.key, store.others[0].name.key}
    assert hidden_bytes(reports) == os.path.getsize(store.root / str(store.mine[0].name)) > 0


def test_records_that_can_not_be_listed_hide_everything_until_they_can(store: Store) -> None:
    with inject(errno.EIO, "listdir", when=lambda args, kwargs: _is_folder(args[0], "purges"), times=ALWAYS):
        assert rows(store.start()) == set()
    assert rows(store.start()) == {sample.name.key for sample in (*store.mine[:2], store.others[0])}


def hidden_bytes(reports: list[Report]) -> int:
    return next(report.hidden_bytes for report in reports if isinstance(report, Recovered))


def _is_folder(fd: int, name: str) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(f"/{name}")


# ---- records


def test_a_record_is_read_back_and_crossed_out(store: Store) -> None:
    record = msgspec.structs.replace(RECORD, scope=store.whole)
    with DataDirectory.open(store.root) as directory:
        write_record(directory, record)
        assert read_records(directory) == [record]
        assert (store.root / "purges" / PURGE.hex()).stat().st_mode & 0o777 == 0o600
        assert SALT.encode() not in (store.root / "purges" / PURGE.hex()).read_bytes()
        remove_record(directory, PURGE)
        remove_record(directory, PURGE)
        assert read_records(directory) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder", "link", "other name", "newer"])
def test_a_damaged_record_stops_everything_and_says_what_to_do(store: Store, damage: str) -> None:
    path = store.root / "purges" / PURGE.hex()
    with DataDirectory.open(store.root) as directory:
        newer = msgspec.structs.replace(RECORD, format=2 if damage == "newer" else 1)
        write_record(directory, newer)
        raw = path.read_bytes()
        path.unlink()
        match damage:
            case "flip":
                path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
            case "cut":
                path.write_bytes(raw[:-3])
            case "empty":
                path.touch()
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(store.root / "FORMAT")
            case "other name":
                (store.root / "purges" / ("0" * 32)).write_bytes(raw)
            case _:
                path.write_bytes(raw)
        with pytest.raises(DataDirectoryError, match="remove that file, start the node, and ask for the purge again"):
            read_records(directory)
    with pytest.raises(DataDirectoryError):
        store.start()


def test_what_has_not_a_name_of_ours_is_no_record(store: Store) -> None:
    (store.root / "purges" / "notes.txt").write_text("mine")
    with DataDirectory.open(store.root) as directory:
        assert read_records(directory) == []
    assert (store.root / "purges" / "notes.txt").exists()


# ---- power loss


def test_no_power_loss_brings_back_what_a_purge_has_answered_for_or_leaves_one_half_done(
    fast_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(fast_root / "data")
    with (
        DataDirectory.open(store.root) as directory,
        store.parts(directory) as (catalog, quarantine),
        CrashRecorder(store.root) as recorder,
    ):
        write_record(directory, msgspec.structs.replace(RECORD, scope=store.whole))
        recorder.note("recorded")
        sweep(directory, catalog, quarantine, store.whole)
        remove_record(directory, PURGE)
        recorder.note("answered")
    mine = {sample.name.key for sample in store.mine}
    count = resumed = 0
    for count, state in enumerate(recorder.states(per_point=200, seed=1), 1):
        fresh = fast_root / f"state-{count}"
        fresh.mkdir()
        state.build(fresh)
        if "answered" in state.notes:
            assert traces(fresh, [], SALT) == [], f"at {state.at}: it came back"
            assert not [name for name in names_below(fresh) if store.mine[0].group.hex() in name]
        reports = store.start(fresh)
        was_recorded = isinstance(reports[0], PurgeResumed)
        resumed += was_recorded
        assert was_recorded or "recorded" not in state.notes or not rows(reports) & mine, f"at {state.at}: forgotten"
        if was_recorded:
            assert not rows(reports) & mine, f"at {state.at}: told of what is to go"
            assert traces(fresh, [], SALT) == []
        assert store.others[0].name.key in rows(reports)
    with capsys.disabled():
        print(f" {count} states, {resumed} resumed", end="")
    assert count > 30
    assert resumed > 20
