"""What only the worker of the disk tier does: several nodes in one directory, and a directory that comes and goes."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import ALWAYS, Fault, hold, inject
from tests.storage.samples import FINGERPRINT, Sample
from tests.workers.desk import SECONDS, DiskDesk, demote_order, put_on_nvme, remove_order
from tierkv.core.identity import Identity
from tierkv.core.instructions import (
    CountFiles,
    DamageFound,
    Demote,
    FileLost,
    FilesCounted,
    GroupFound,
    ManifestEntry,
    OpenNamespace,
    OpFailed,
    PurgeAbout,
    PurgeResumed,
    PurgeScope,
    PurgeSwept,
    ReadDone,
    Recovered,
    Remove,
    RemoveDone,
    Rows,
    ScopeGroup,
    StillUsed,
    SweepPurge,
    TierHealth,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import WrittenFile
from tierkv.storage.format import frame_header
from tierkv.storage.namespace import write_namespace
from tierkv.storage.purge_record import PurgeRecord, write_record
from tierkv.storage.system_calls import Failure
from tierkv.torture.waits import wait_until
from tierkv.workers import disk as disk_worker
from tierkv.workers.files import Files

PURGE = b"purge number one"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def path_of(root: Path, sample: Sample) -> Path:
    return root.joinpath(*sample.name.parts)


def unless_used(sample: Sample, op: int, since: float) -> Remove:
    name = sample.name
    return Remove(op, name.fingerprint, name.group, name.rank, name.key, unless_used_since=since)


def write_purge(data: Path, *samples: Sample) -> None:
    """As the storage worker does it."""
    scope = PurgeScope(groups=tuple(ScopeGroup(FINGERPRINT, sample.group) for sample in samples))
    with DataDirectory.open(data, create=False, writable=False) as directory:
        write_record(directory, PurgeRecord(PURGE, scope, PurgeAbout(1.0)))


# -------------------------------------------------------------------- two nodes


def test_a_file_of_one_node_is_told_to_the_other_and_read_there(tmp_path: Path, disk: Path) -> None:
    sample, later = Sample(), Sample(seed=60)
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.01) as b:
        a.recovered()
        b.recovered()
        for op, one in enumerate((sample, later), 1):
            a.store(one, op)
            b.wait(lambda _, key=one.name.key: key in b.rows)
        assert [report.group for report in b.reports if isinstance(report, GroupFound)][:1] == [sample.group]
        assert b.load(later, 9).valid == 3
        assert [b.arena.read_back(later, index) for index in range(3)] == later.blocks
        told = [row.key for report in b.reports if isinstance(report, Rows) for row in report.rows]
        rounds = b.worker._rescanner.rounds
        wait_until(lambda: b.worker._rescanner.rounds >= rounds + 3, "the directory is looked through three times more")
        b.load(later, 10)
        assert told == [row.key for report in b.reports if isinstance(report, Rows) for row in report.rows]


def test_a_file_that_one_node_removes_is_lost_to_the_other_once(tmp_path: Path, disk: Path) -> None:
    gone, kept = Sample(), Sample(seed=60)
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.01) as b:
        for op, one in enumerate((gone, kept), 1):
            a.store(one, op)
            b.wait(lambda _, key=one.name.key: key in b.rows)
        a.send(remove_order(gone, 3))
        assert a.answer(3) == RemoveDone(3)
        lost = b.wait_type(FileLost)
        assert (lost.group, lost.rank, lost.key) == (gone.group, 0, gone.name.key)
        rounds = b.worker._rescanner.rounds
        wait_until(lambda: b.worker._rescanner.rounds >= rounds + 3, "the directory is looked through three times more")
        assert b.load(kept, 9).valid == 3
        assert len([report for report in b.reports if isinstance(report, FileLost)]) == 1


@pytest.mark.parametrize("was_known", [True, False])
def test_a_damaged_file_that_is_found_by_looking_is_counted_once(tmp_path: Path, disk: Path, was_known: bool) -> None:
    bad = Sample()
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.01) as b:
        a.recovered()
        b.recovered()
        a.store(bad, 1)
        b.wait(lambda _: bad.name.key in b.rows)
        if not was_known:
            a.send(remove_order(bad, 2))
            a.answer(2)
            b.wait_type(FileLost)
            seen = len(b.reports)
            raw = path_of(a.data, bad).read_bytes()
            (path_of(disk, bad).parent).mkdir(exist_ok=True)
            (disk / "tmp" / "half").write_bytes(raw[:-4096])
            os.rename(disk / "tmp" / "half", path_of(disk, bad))
        else:
            seen = len(b.reports)
            os.truncate(path_of(disk, bad), 8192)
        assert b.wait(lambda report: isinstance(report, DamageFound), seen=seen) == DamageFound(Reason.SHORT_FILE)
        rounds = b.worker._rescanner.rounds
        wait_until(lambda: b.worker._rescanner.rounds >= rounds + 3, "the directory is looked through three times more")
        b.load(bad, 9)
        assert len([report for report in b.reports if isinstance(report, DamageFound)]) == 1
        assert len([report for report in b.reports if isinstance(report, FileLost)]) == 1
        assert len(os.listdir(disk / "quarantine")) == 1


def test_a_damaged_file_that_cannot_be_set_aside_is_counted_once(tmp_path: Path, disk: Path) -> None:
    bad = Sample()
    with DiskDesk(disk, data=tmp_path / "a") as a:
        a.store(bad, 1)
        with DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.01) as b, pytest.MonkeyPatch.context() as patch:
            b.recovered()
            Fault(patch, "rename", errno.EIO, when=lambda args, _: bad.name.file in args)
            os.truncate(path_of(disk, bad), 8192)
            b.wait_type(DamageFound)
            rounds = b.worker._rescanner.rounds
            wait_until(lambda: b.worker._rescanner.rounds >= rounds + 3, "it is looked through three times more")
            errors = b.health(lambda health: bool(health.errors)).errors
            assert len([report for report in b.reports if isinstance(report, DamageFound)]) == 1
            assert errors == {"rename EIO": 1}


def test_a_damaged_file_that_a_copy_has_replaced_is_counted(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.store(sample, 1)
        os.truncate(path_of(disk, sample), 8192)
        desk.store(sample, 2)
        assert desk.wait_type(DamageFound) == DamageFound(Reason.SHORT_FILE)
        assert desk.load(sample, 3).valid == 3


def test_a_file_that_another_node_has_removed_is_no_file_error(tmp_path: Path, disk: Path) -> None:
    shared, kept = Sample(), Sample(seed=60)
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b") as b:
        a.recovered()
        b.recovered()
        b.store(shared, 1)
        b.store(kept, 2)
        a.send(remove_order(shared, 1))
        a.answer(1)
        report = b.load(shared, 3)
        assert (report.valid, report.reason, report.gone) == (0, Reason.NOT_FOUND, True)
        b.send(remove_order(shared, 4))
        assert b.answer(4) == RemoveDone(4)
        assert b.load(kept, 5).valid == 3
        assert b.health(lambda _: True).errors == {}


def test_what_a_node_puts_there_itself_is_no_news_to_it(disk: Path) -> None:
    with DiskDesk(disk, rescan_seconds=0.0) as desk:
        desk.recovered()
        for number in range(20):
            desk.store(Sample(seed=30 * number + 1, num_blocks=1), number + 1)
        rounds = desk.worker._rescanner.rounds
        wait_until(lambda: desk.worker._rescanner.rounds > rounds, "the directory is looked through once more")
        desk.load(Sample(seed=1, num_blocks=1), 99)
        assert desk.rows == {}
        assert not any(isinstance(report, FileLost) for report in desk.reports)


@pytest.mark.parametrize(("there", "wanted", "left"), [(5, 3, 5), (3, 3, 3), (2, 4, 4)])
def test_of_two_extents_that_begin_alike_the_longer_one_stays(
    tmp_path: Path, disk: Path, there: int, wanted: int, left: int
) -> None:
    first, second = Sample(num_blocks=there), Sample(num_blocks=wanted)
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b") as b:
        a.store(first, 1)
        inode = path_of(disk, first).stat().st_ino
        done = b.store(second, 1)
        longer = first if there >= wanted else second
        assert done.file_bytes == path_of(disk, longer).stat().st_size
        assert (path_of(disk, first).stat().st_ino == inode) == (there >= wanted)
        assert b.load(second, 2).valid == wanted
        assert a.load(longer, 3).valid == left
        b.stop()
    with DiskDesk(disk, data=tmp_path / "b") as b:
        assert b.recovered().index_rows == 1  # what was taken over is known by its own keys
        assert b.rows[first.name.key].keys == longer.keys


def test_an_extent_that_goes_on_otherwise_keeps_its_name(tmp_path: Path, disk: Path) -> None:
    mine, other = Sample(num_blocks=2), branch(Sample(num_blocks=2))
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b") as b:
        a.store(other, 1)
        b.open(mine)
        b.send(b.put_order(mine, 1))
        refused = b.answer(1)
        assert isinstance(refused, OpFailed)
        assert refused.reason == Reason.NAME_TAKEN
        assert b.health(lambda _: True).writable
        report = b.load(mine, 2)
        assert (report.valid, report.reason, report.gone) == (0, Reason.KEY_MISMATCH, True)
        assert os.listdir(disk / "quarantine") == []
        assert a.load(other, 3).valid == 2


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to("elsewhere")


def make_newer_file(path: Path) -> None:
    path.write_bytes(frame_header(b"of tomorrow", 9))


@pytest.mark.parametrize("make", [make_folder, make_link, make_newer_file, os.mkfifo])
def test_something_foreign_under_a_name_costs_that_name_alone(disk: Path, make: Callable[[Path], None]) -> None:
    first, mine = Sample(num_blocks=2), Sample(seed=60)
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(first, 1)
        path_of(disk, mine).parent.mkdir(exist_ok=True)
        make(path_of(disk, mine))
        require_taken(desk, mine)


@pytest.mark.parametrize("depth", [1, 2, 3, 4], ids=["shelf", "rank", "group", "model"])
@pytest.mark.parametrize("make", [Path.touch, make_link])
def test_something_foreign_in_place_of_a_folder_costs_what_would_lie_in_it(
    disk: Path, make: Callable[[Path], None], depth: int
) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        taken = path_of(disk, sample).parents[depth - 1]
        taken.parent.mkdir(parents=True, exist_ok=True)
        make(taken)
        require_taken(desk, sample)
        assert not taken.is_dir()


def test_a_name_that_is_no_longer_ours_to_use_costs_that_name_alone(disk: Path) -> None:
    first, mine = Sample(num_blocks=2), Sample(seed=60)
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(first, 1)
        path_of(disk, mine).parent.mkdir(exist_ok=True)

        def is_of_it(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if mine.name.file not in args:
                return False
            return os.readlink(f"/proc/self/fd/{kwargs['dir_fd']}").startswith(str(disk))

        with inject(errno.EACCES, "open", times=ALWAYS, when=is_of_it):
            require_taken(desk, mine)


def test_a_tier_where_nothing_may_be_named_is_not_well(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.open(sample)
        order = desk.put_order(sample, 1)
        with inject(errno.EACCES, "link", times=ALWAYS), inject(errno.EACCES, "rename", times=ALWAYS):
            desk.send(order)
            refused = desk.answer(1)
        assert isinstance(refused, OpFailed)
        assert refused.reason == Reason.NO_ACCESS
        desk.wait(lambda report: isinstance(report, TierHealth) and not report.writable)


def test_a_folder_of_all_names_that_is_none_is_not_the_fault_of_one(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        (disk / "models").rmdir()
        (disk / "models").touch()
        desk.open(sample)
        desk.send(desk.put_order(sample, 1))
        refused = desk.answer(1)
        assert isinstance(refused, OpFailed)
        assert refused.reason == Reason.IO_ERROR


def require_taken(desk: DiskDesk, sample: Sample) -> None:
    """A demotion is refused because of its name, and the tier is well."""
    desk.open(sample)
    desk.send(desk.put_order(sample, 90))
    refused = desk.answer(90)
    assert isinstance(refused, OpFailed)
    assert refused.reason == Reason.NAME_TAKEN
    looks = len(desk.reports)
    desk.wait(lambda report: isinstance(report, TierHealth), seen=looks)
    assert all(report.writable for report in desk.reports if isinstance(report, TierHealth))


def branch(sample: Sample) -> Sample:
    """One that has its first block, and another second one."""
    sample.tokens = pack_tokens([1, 2, 3, 4, 900, 901, 902, 903])
    sample.keys = chain_keys(sample.parent, sample.tokens, 4)
    assert sample.keys[:KEY_BYTES] == sample.name.key
    return sample


def test_two_nodes_that_take_a_free_name_at_the_same_moment_leave_one_whole_file(tmp_path: Path, disk: Path) -> None:
    sample = Sample(num_blocks=4)
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b") as b:
        for desk in (a, b):
            desk.recovered()
            desk.open(sample)
        orders = [(desk, desk.put_order(sample, 1)) for desk in (a, b)]
        with hold("link") as barrier:  # the first that comes waits with its file written
            a.send(orders[0][1])
            barrier.wait_reached()
            b.send(orders[1][1])
            assert isinstance(b.answer(1), WriteDone)
            barrier.release()
            assert isinstance(a.answer(1), WriteDone)
        assert a.load(sample, 2).valid == b.load(sample, 2).valid == 4
        assert os.listdir(disk / "tmp") == []


def test_nodes_that_put_and_remove_the_same_extents_at_once_never_read_anything_wrong(
    tmp_path: Path, disk: Path
) -> None:
    samples = [Sample(seed=100 * number, num_blocks=1 + number % 3) for number in range(1, 5)]
    with (
        DiskDesk(disk, data=tmp_path / "a", rescan_seconds=0.0) as a,
        DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.0) as b,
    ):
        for desk in (a, b):
            desk.recovered()
            for sample in samples:
                desk.open(sample)
                put_on_nvme(desk.data, sample)
        op = 0
        for turn in range(12):
            asked: list[tuple[DiskDesk, Sample, int]] = []
            for desk in (a, b):
                for sample in samples:
                    op += 3
                    desk.arena.poison(sample)
                    orders = [
                        demote_order(sample, op),
                        desk.arena.read_order(sample, op + 1),
                        remove_order(sample, op + 2),
                    ]
                    desk.send(*(orders if turn % 2 else orders[::-1]))
                    asked.append((desk, sample, op))
            for desk, sample, first in asked:
                assert isinstance(desk.answer(first), WriteDone)
                done = desk.answer(first + 1)
                assert isinstance(done, ReadDone)
                found = [desk.arena.read_back(sample, index) for index in range(done.valid)]
                assert found == sample.blocks[: done.valid]
                assert done.reason in (None, Reason.NOT_FOUND)
                assert desk.answer(first + 2) == RemoveDone(first + 2)
        assert os.listdir(disk / "quarantine") == []
        assert os.listdir(disk / "tmp") == []


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system to write to")
def test_the_disk_may_be_another_file_system_than_nvme(tmp_path: Path) -> None:
    sample, gone = Sample(num_blocks=3, block_bytes=70_000), Sample(seed=60)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tkv") as folder:
        disk = Path(folder) / "disk"
        assert os.stat(folder).st_dev != os.stat(tmp_path).st_dev
        with DiskDesk(disk, data=tmp_path / "a") as desk:
            desk.recovered()
            for op, one in enumerate((sample, gone), 1):
                desk.store(one, op)
            desk.send(unless_used(gone, 3, 2e9))
            assert desk.answer(3) == RemoveDone(3)
            assert desk.load(sample, 4).valid == 3
            desk.stop()
        with DiskDesk(disk, data=tmp_path / "a") as desk:
            assert (desk.recovered().extents, desk.recovered().index_rows) == (1, 1)
            assert desk.load(sample, 1).valid == 3
            assert [desk.arena.read_back(sample, index) for index in range(3)] == sample.blocks


# -------------------------------------------------------------------- uses


def test_a_file_that_the_other_node_has_used_since_stays(tmp_path: Path, disk: Path) -> None:
    sample, now = Sample(), time.time()
    name = sample.name
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b") as b:
        a.store(sample, 1)
        os.utime(path_of(disk, sample), (now - 5000, now - 5000))
        b.recovered()
        b.send(Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, now - 100, 1)]))
        b.load(sample, 2)
        wait_until(lambda: path_of(disk, sample).stat().st_mtime > now - 4000, "its use is written down")
        a.send(unless_used(sample, 3, now - 4900))
        answer = a.answer(3)
        assert isinstance(answer, StillUsed)
        assert answer.last_used == pytest.approx(now - 100)
        assert a.load(sample, 4).valid == 3
        a.send(unless_used(sample, 5, answer.last_used + 1e-3))
        assert a.answer(5) == RemoveDone(5)
        assert not path_of(disk, sample).exists()


def test_a_use_never_takes_an_older_one_s_place(tmp_path: Path, disk: Path) -> None:
    sample, now = Sample(), time.time()
    name = sample.name
    with DiskDesk(disk) as desk:
        desk.store(sample, 1)
        desk.stop()
    os.utime(path_of(disk, sample), (now - 10, now - 10))
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.send(Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, now - 500, 1)]))
        desk.stop()
    assert path_of(disk, sample).stat().st_mtime == pytest.approx(now - 10)


def test_the_use_of_a_file_is_that_of_the_extent_that_was_demoted(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.open(sample)
        put_on_nvme(desk.data, sample)
        desk.send(demote_order(sample, 1, last_used=1_600_000_000.0))
        assert isinstance(desk.answer(1), WriteDone)
    assert path_of(disk, sample).stat().st_mtime == pytest.approx(1_600_000_000.0)


# -------------------------------------------------------------------- the file that is copied


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.unlink(), Reason.NOT_FOUND),
        (lambda path: os.truncate(path, 8192), Reason.SHORT_FILE),
        (lambda path: flip(path, 100), Reason.BAD_HEADER),
        (lambda path: flip(path, -1), Reason.CHECKSUM),
    ],
)
def test_a_file_on_nvme_that_is_not_right_is_not_copied_and_the_disk_is_well(
    disk: Path, spoil: object, reason: Reason
) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.open(sample)
        order = desk.put_order(sample, 1)
        spoil(path_of(desk.data, sample))  # type: ignore[operator]
        desk.send(order)
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert failed.reason == reason
        assert not path_of(disk, sample).exists()
        wait_until(lambda: not os.listdir(disk / "tmp"), "no temp file is left")
        assert desk.health(lambda _: True).writable
        desk.store(Sample(seed=60), 2)


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_an_extent_of_a_group_that_nobody_knows_is_not_copied(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.send(desk.put_order(sample, 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.IO_ERROR  # which says nothing against the file
        assert desk.health(lambda _: True).writable


def test_a_group_that_was_opened_in_an_earlier_life_is_known_from_nvme(tmp_path: Path, disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        manifest = (ManifestEntry("model.safetensors", 123, "cd" * 32),)
        with DataDirectory.open(desk.data, create=False, writable=False) as data:
            write_namespace(data, OpenNamespace(sample.group, sample.identity, "small", manifest))
        desk.send(desk.put_order(sample, 1))
        assert isinstance(desk.answer(1), WriteDone)
        for name in ("model.json", f"{sample.group.hex()}/identity.json"):
            there, above = (root / "models" / FINGERPRINT / name for root in (disk, desk.data))
            assert there.read_bytes() == above.read_bytes()


def test_a_folder_that_is_taken_away_again_and_again_says_nothing_against_the_file_on_nvme(disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(Sample(seed=60), 1)
        order = desk.put_order(sample, 2)
        with inject(errno.ENOENT, "link", times=10), inject(errno.ENOENT, "rename", times=10):
            desk.send(order)
            failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.IO_ERROR
        desk.health(lambda health: health.writable)
        desk.store(sample, 3)


def test_a_group_that_another_node_has_purged_is_made_again(tmp_path: Path, disk: Path) -> None:
    one, two = Sample(), Sample(seed=60)
    with DiskDesk(disk) as desk:
        desk.store(one, 1)
        shutil.rmtree(disk / "models" / FINGERPRINT)
        desk.send(desk.put_order(two, 2))
        assert isinstance(desk.answer(2), WriteDone)
        desk.stop()
    with DiskDesk(disk, data=tmp_path / "b") as other:
        assert other.recovered().extents == 1


# -------------------------------------------------------------------- purges


def test_a_purge_that_was_not_seen_through_is_before_anything_is_told(tmp_path: Path, disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.stop()
    write_purge(desk.data, sample)
    with DiskDesk(disk) as desk:
        assert desk.recovered().extents == 0
        resumed = desk.wait_type(PurgeResumed)
        assert (resumed.purge, resumed.reason, resumed.swept.files) == (PURGE, None, 1)
        assert os.listdir(desk.data / "disk-purges") == []
        assert os.listdir(desk.data / "purges") == [PURGE.hex()]  # which is for the storage worker to sweep by


def test_what_is_being_purged_is_not_told_as_another_node_s(tmp_path: Path, disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk, data=tmp_path / "a") as a, DiskDesk(disk, data=tmp_path / "b", rescan_seconds=0.01) as b:
        b.recovered()
        write_purge(b.data, sample)
        a.store(sample, 1)
        rounds = b.worker._rescanner.rounds
        wait_until(lambda: b.worker._rescanner.rounds >= rounds + 2, "the directory is looked through twice")
        b.send(SweepPurge(PURGE))
        assert b.wait_type(PurgeSwept).swept.files == 1
        assert b.rows == {}
        a.store(sample, 2)  # it is not for one node to say what others keep
        b.wait(lambda _: sample.name.key in b.rows)


def test_a_purge_that_nobody_wrote_down_is_not_called_swept(disk: Path) -> None:
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.send(SweepPurge(PURGE))
        assert desk.wait_type(PurgeSwept).reason == Reason.NOT_FOUND


# -------------------------------------------------------------------- counting


def test_files_are_counted_group_by_group(disk: Path) -> None:
    samples = [Sample(seed=50 * number + 1, num_blocks=number) for number in range(1, 4)]
    with DiskDesk(disk) as desk:
        sizes = [desk.store(sample, op).file_bytes for op, sample in enumerate(samples)]
        desk.send(CountFiles(50))
        counted = desk.wait(lambda report: isinstance(report, FilesCounted) and report.finished)
        assert isinstance(counted, FilesCounted)
        (group,) = counted.groups
        assert (group.group, group.files, group.counted_bytes) == (samples[0].group, 3, sum(sizes))
        assert (counted.done, counted.total, counted.problem) == (1, 1, "")


# -------------------------------------------------------------------- a directory that comes and goes


def test_a_directory_that_is_replaced_while_in_use_ends_the_worker_and_gets_nothing(tmp_path: Path, disk: Path) -> None:
    sample = Sample()
    with DiskDesk(disk) as desk:
        desk.store(sample, 1)
        os.rename(disk, tmp_path / "away")
        disk.mkdir()
        gone = desk.health(lambda health: health.reason == Reason.DATA_DIR_GONE)
        assert not gone.writable
        wait_until(lambda: desk.worker.failure is not None, "the worker ends")
        assert os.listdir(disk) == []
    with DiskDesk(disk) as desk:
        wait_until(lambda: desk.worker.failure is not None, "an empty mount point is refused")
        assert "is the disk mounted?" in str(desk.worker.failure)
        assert os.listdir(disk) == []
        told = desk.wait_type(TierHealth)
        assert (told.writable, told.readable) == (False, False)
        assert "is the disk mounted?" in told.problem
    disk.rmdir()
    os.rename(tmp_path / "away", disk)
    with DiskDesk(disk) as desk:
        assert desk.recovered().extents == 1
        assert desk.load(sample, 1).valid == 3


def test_another_disk_directory_in_its_place_is_looked_at_anew(tmp_path: Path, disk: Path) -> None:
    mine, others = Sample(), Sample(seed=60)
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(mine, 1)
        desk.stop()
    with DiskDesk(tmp_path / "other", data=tmp_path / "c") as other:
        other.recovered()
        other.store(others, 1)
        other.stop()
    os.rename(disk, tmp_path / "away")
    os.rename(tmp_path / "other", disk)
    with DiskDesk(disk) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.index_rebuilt) == (1, True)
        assert set(desk.rows) == {others.name.key}


def test_a_data_directory_is_no_disk_directory(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "nodes"):
        pass
    before = sorted(os.listdir(tmp_path / "nodes"))
    with DiskDesk(tmp_path / "nodes", data=tmp_path / "mine") as desk:
        wait_until(lambda: desk.worker.failure is not None, "it is refused")
        assert "is the data directory of a node" in str(desk.worker.failure)
    assert sorted(os.listdir(tmp_path / "nodes")) == before


def test_a_second_worker_of_one_node_is_refused_while_the_first_lives(tmp_path: Path, disk: Path) -> None:
    with DiskDesk(disk) as first:
        first.recovered()
        with DiskDesk(disk) as second:
            wait_until(lambda: second.worker.failure is not None, "it is refused")
            assert "has not ended yet" in str(second.worker.failure)
        assert first.store(Sample(), 1)


def test_a_directory_that_cannot_be_listed_loses_nothing(disk: Path) -> None:
    samples = [Sample(seed=50 * number + 1) for number in range(4)]
    with DiskDesk(disk, rescan_seconds=0.0) as desk:
        desk.recovered()
        for op, sample in enumerate(samples):
            desk.store(sample, op)
        with inject(errno.EIO, "scandir", times=10**6):
            rounds = desk.worker._rescanner.rounds
            wait_until(lambda: desk.worker._rescanner.rounds >= rounds + 3, "it is tried three times")
        assert [desk.load(sample, 10 + op).valid for op, sample in enumerate(samples)] == [3] * 4
        assert not any(isinstance(report, FileLost) for report in desk.reports)
        desk.stop()
    with inject(errno.EIO, "scandir", nth=2, times=10**6), DiskDesk(disk) as desk:
        assert desk.recovered().unreadable > 0
        desk.stop()
    with DiskDesk(disk) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.index_rows) == (4, 4)


# -------------------------------------------------------------------- recovery beside everything else


def test_while_the_directory_does_not_answer_it_says_so_and_stops_when_told(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_well = threading.Event()

    def slow(*_: object, **__: object) -> DataDirectory:
        assert is_well.wait(SECONDS)
        raise DataDirectoryError("too late")

    monkeypatch.setattr(disk_worker, "open_disk_directory", slow)
    with DiskDesk(disk, stuck_seconds=0.02) as desk:
        told = desk.wait_type(TierHealth)
        assert (told.writable, told.readable, told.reason) == (False, False, Reason.IO_STUCK)
        desk.stop(budget_seconds=0.1)
        is_well.set()


def test_what_is_asked_while_it_is_still_recovered_is_done(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, other, gate = Sample(), Sample(seed=60), threading.Event()
    real = disk_worker.recover
    with DiskDesk(disk) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.stop()

    def held(*args: object, **options: object) -> Recovered:
        assert gate.wait(SECONDS)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_worker, "recover", held)
    with DiskDesk(disk) as desk:
        assert desk.load(sample, 1).valid == 3
        desk.store(other, 2)
        write_purge(desk.data, sample)
        desk.send(SweepPurge(PURGE))
        assert not any(isinstance(report, Recovered) for report in desk.reports)
        gate.set()
        assert desk.recovered().extents == 0  # as of now it is under a purge, and swept by the start already
        assert desk.wait_type(PurgeResumed).swept.files == 2


def test_an_exception_while_the_directory_is_recovered_ends_the_worker(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Recovered:
        raise KeyError("nobody foresaw this")

    monkeypatch.setattr(disk_worker, "recover", broken)
    desk = DiskDesk(disk)
    with desk:
        wait_until(lambda: desk.dead_threads == ["recovery"], "it is told as dead")
        desk.dead_threads.clear()


class CopyFails(Files):
    def copy(
        self, source: DataDirectory, directory: DataDirectory, demote: Demote, identity: Identity
    ) -> WrittenFile | Failure:
        raise KeyError("nobody foresaw this")


def test_a_bug_in_a_copy_costs_that_copy_alone(disk: Path) -> None:
    with DiskDesk(disk, files=CopyFails()) as desk:
        sample = Sample()
        desk.open(sample)
        desk.send(desk.put_order(sample, 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert "KeyError" in failed.problem
        assert desk.load(sample, 2).reason == Reason.NOT_FOUND
