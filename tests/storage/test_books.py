"""The books of a directory: what is booked is what is there, after any kill; a recount finds what others did, and no
more."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.system_calls import inject
from tests.storage.samples import FINGERPRINT, Sample, identity
from tierkv.core.instructions import Difference, PurgeScope, ScopeExtents, ScopeGroup
from tierkv.core.journal import NOBODY, Account
from tierkv.core.keys import KEY_BYTES, chain_keys
from tierkv.storage.books import Books
from tierkv.storage.differences import MAX_KEPT, Differences
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import remove_extent, write_extent
from tierkv.storage.journal import MACHINE_WENT_DOWN
from tierkv.storage.names import ExtentName
from tierkv.storage.recount import recount
from tierkv.storage.system_calls import Failure


def books(directory: DataDirectory) -> Books:
    return Books(directory, max_bytes=2**20, max_age_seconds=1e9, now=lambda: 100.0)


def counted(directory: DataDirectory, opened: Books) -> list[Difference]:
    return recount(directory, opened, 100.0).differences


def write(directory: DataDirectory, sample: Sample) -> int:
    write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    return path_of(directory, sample).stat().st_size


def path_of(directory: DataDirectory, sample: Sample) -> Path:
    return directory.path / str(sample.name)


def kill(opened: Books) -> None:
    """Its rows are where they are, and no more come, also when Python clears away what was begun."""
    assert opened.journal is not None
    opened.journal.close(0.0, in_order=False)
    opened._journal = None


@pytest.fixture
def used(directory: DataDirectory) -> Books:
    """Books that were counted once, with one file in them."""
    opened = books(directory)
    assert counted(directory, opened) == []
    sample = Sample(seed=50)
    with opened.writing(sample.name):
        write(directory, sample)
    return opened


def other_tenants(seed: int = 5, salt: str = "other") -> Sample:
    sample = Sample(seed=seed)
    sample.identity = identity(salt=salt)
    sample.group = sample.parent = sample.identity.group_key()
    sample.keys = chain_keys(sample.group, sample.tokens, 4)
    sample.name = ExtentName(FINGERPRINT, sample.group, 0, sample.keys[:KEY_BYTES])
    return sample


def test_a_look_of_the_books_that_fails_is_counted_and_harms_nothing(directory: DataDirectory) -> None:
    failures: list[Failure] = []
    opened = Books(directory, max_bytes=2**20, max_age_seconds=1e9, now=lambda: 100.0, failed=failures.append)
    sample = Sample()
    with inject(errno.EACCES, "open", times=1), opened.writing(sample.name):
        pass
    with opened.writing(sample.name):
        write(directory, sample)
    with inject(errno.EIO, "open", times=1):
        opened.flush()
    assert [(failure.operation, failure.errno_name) for failure in failures] == [("open", "EACCES"), ("open", "EIO")]
    assert counted(directory, opened) == []
    opened.close()


def test_files_that_come_and_go_are_booked_to_the_byte(directory: DataDirectory, used: Books) -> None:
    sample = Sample()
    with used.writing(sample.name):
        size = write(directory, sample)
    assert used.journal is not None
    balances = used.journal.balances
    assert balances.of(Account.NVME, sample.group) == 2 * size
    with used.removing(sample.name, Account.COPIED, "evicted"):
        assert remove_extent(directory, sample.name)
    assert balances.of(Account.NVME, sample.group) == size
    assert (balances.of(Account.COPIED, sample.group), balances.total, balances.begun) == (-size, 0, {})
    with used.removing(sample.name, Account.DROPPED, "evicted"):
        assert not remove_extent(directory, sample.name)
    assert balances.of(Account.NVME, sample.group) == size
    used.close(in_order=True)


@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("operation", ["write", "remove", "replace"])
def test_a_kill_between_the_file_and_its_row_leaves_no_difference(
    directory: DataDirectory, used: Books, operation: str, point: str
) -> None:
    sample = Sample()
    if operation != "write":
        with used.writing(sample.name):
            write(directory, sample)
    change: Callable[[], object] = (
        (lambda: remove_extent(directory, sample.name)) if operation == "remove" else (lambda: write(directory, sample))
    )
    begin = (
        used.removing(sample.name, Account.DROPPED, "evicted") if operation == "remove" else used.writing(sample.name)
    )
    begin.__enter__()  # and it is never left
    if point == "after":
        change()
    kill(used)
    again = books(directory)
    assert counted(directory, again) == []
    assert again.journal is not None
    booked = again.journal.balances.of(Account.NVME, sample.group)
    there = sum(path.stat().st_size for path in (directory.path / "models").rglob("*.kv"))
    assert booked == there
    assert again.table == ()
    again.close()


def test_a_file_that_somebody_removed_is_one_open_difference_and_only_once(
    directory: DataDirectory, used: Books
) -> None:
    sample = Sample()
    with used.writing(sample.name):
        size = write(directory, sample)
    path_of(directory, sample).unlink()
    (found,) = counted(directory, used)
    assert (found.what, found.booked_bytes, found.counted_bytes, found.group) == (
        "files", 2 * size, size, sample.group.hex(),
    )  # fmt: skip
    assert counted(directory, used) == []
    used.close(in_order=True)
    again = books(directory)
    assert counted(directory, again) == []
    (told,) = again.table
    assert (told.number, told.is_open) == (1, True)
    assert again.resolve(1, "a colleague cleaned up")
    assert not again.resolve(1, "said again")
    assert again.table[0].resolution == "a colleague cleaned up"
    assert not again.resolve(2, "no such thing")
    again.close()
    (told,) = Differences(directory).rows
    assert (told.is_open, told.resolution) == (False, "a colleague cleaned up")


def test_files_that_somebody_put_there_are_found_whatever_their_names(directory: DataDirectory, used: Books) -> None:
    sample = other_tenants()
    size = write(directory, sample)
    stray = path_of(directory, sample).with_name("notes.kv")
    stray.write_bytes(bytes(100))
    files, foreign = counted(directory, used)
    assert (files.what, files.counted_bytes - files.booked_bytes) == ("files", size)
    assert (foreign.what, foreign.path, foreign.counted_bytes) == (
        "foreign",
        str(stray.relative_to(directory.path)),
        100,
    )
    counted(directory, used)
    assert len(used.table) == 2
    used.resolve(2, "left there on purpose")
    counted(directory, used)
    assert len(used.table) == 2
    used.close()


def test_files_that_move_while_they_are_counted_are_no_difference(
    directory: DataDirectory, used: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them at the worst time: the folders are listed, nothing is compared yet."""
    leaving, coming, replaced, stuck = (Sample(seed=n) for n in (1, 2, 3, 4))
    for sample in (leaving, replaced):
        with used.writing(sample.name):
            write(directory, sample)
    half_done = used.writing(stuck.name)
    half_done.__enter__()
    unwatch = used.unwatch

    def move_then_unwatch(watched: object) -> bool:
        with used.removing(leaving.name, Account.DROPPED, "evicted"):
            remove_extent(directory, leaving.name)
        for sample in (coming, replaced):
            with used.writing(sample.name):
                write(directory, sample)
        write(directory, stuck)
        return unwatch(watched)  # type: ignore[arg-type]

    monkeypatch.setattr(used, "unwatch", move_then_unwatch)
    assert counted(directory, used) == []
    monkeypatch.setattr(used, "unwatch", unwatch)
    half_done.__exit__(None, None, None)
    assert counted(directory, used) == []
    path_of(directory, coming).unlink()
    monkeypatch.setattr(used, "unwatch", move_then_unwatch)
    assert len(counted(directory, used)) == 1  # though it is written again meanwhile: it was gone
    monkeypatch.setattr(used, "unwatch", unwatch)
    assert counted(directory, used) == []
    used.close()


def test_a_directory_from_before_the_journal_is_taken_as_it_is(directory: DataDirectory) -> None:
    size = write(directory, Sample())
    opened = books(directory)
    assert counted(directory, opened) == []
    assert opened.journal is not None
    assert opened.journal.balances.of(Account.FOUND, Sample().group) == -size
    os.unlink(path_of(directory, Sample()))
    assert len(counted(directory, opened)) == 1
    opened.close()


def test_what_a_power_loss_may_have_taken_is_told_and_is_no_open_difference(
    directory: DataDirectory, used: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, Sample())  # its rows were not on disk yet
    kill(used)
    monkeypatch.setattr("tierkv.storage.books.boot_id", lambda: "another")
    again = books(directory)
    assert len(counted(directory, again)) == 1
    (told,) = again.table
    assert (told.is_open, told.resolution) == (False, MACHINE_WENT_DOWN)
    os.unlink(path_of(directory, Sample()))
    counted(directory, again)
    assert [row.is_open for row in again.table] == [False, True]
    again.close()


def test_a_purge_is_booked_and_its_groups_are_nobody_from_then_on(directory: DataDirectory, used: Books) -> None:
    mine, other = Sample(seed=50), other_tenants()
    with used.writing(other.name):
        kept = write(directory, other)
    path_of(directory, Sample(seed=50)).unlink()
    counted(directory, used)
    size = write(directory, mine)
    counted(directory, used)
    remove_extent(directory, mine.name)
    used.purged(PurgeScope(groups=(ScopeGroup(FINGERPRINT, mine.group),)), {mine.group: size})
    assert used.journal is not None
    balances = used.journal.balances
    assert (balances.of(Account.NVME, mine.group), balances.of(Account.PURGED, NOBODY)) == (0, size)
    assert (balances.of(Account.NVME, other.group), balances.total) == (kept, 0)
    assert {row.group for row in used.table} == {""}
    everything = b"".join(path.read_bytes() for path in (directory.path / "journal").iterdir())
    assert mine.group not in everything
    assert mine.group.hex().encode() not in everything
    assert counted(directory, used) == []
    used.close()


def test_a_purge_of_a_prefix_names_no_block_of_its_group_any_more(directory: DataDirectory, used: Books) -> None:
    mine = Sample(seed=50)
    remove_extent(directory, mine.name)
    size = 4096 * 4
    used.purged(PurgeScope(extents=(ScopeExtents(FINGERPRINT, mine.group, mine.name.key),)), {mine.group: size})
    everything = b"".join(path.read_bytes() for path in (directory.path / "journal").iterdir())
    assert mine.group in everything
    assert mine.name.key not in everything
    used.close()


def test_the_table_is_bounded_and_keeps_what_is_open(directory: DataDirectory) -> None:
    table = Differences(directory)
    table.add([Difference(tier="nvme", what="files", booked_bytes=0, counted_bytes=1, found_at=1.0, group="aa")])
    many = [
        Difference(tier="nvme", what="files", booked_bytes=0, counted_bytes=n, found_at=1.0, resolution="seen")
        for n in range(MAX_KEPT + 10)
    ]
    table.add(many)
    assert len(table.rows) == MAX_KEPT
    assert table.num_open == 1
    (directory.path / "journal" / "differences.json").write_text("[{")
    assert Differences(directory).rows == ()
