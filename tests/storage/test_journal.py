"""The journal: what was appended is read again after any crash, folded to balances whose sum is zero, within bounds."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.system_calls import ALWAYS, inject
from tierkv.core.journal import (
    NOBODY,
    Account,
    Anonymizer,
    AnyRow,
    Begun,
    Checkpoint,
    EvictionRow,
    FileOf,
    Posting,
    RegretRow,
)
from tierkv.errors import StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal import (
    BEGINS_HERE,
    END_WAS_DAMAGED,
    MACHINE_WENT_DOWN,
    ROWS_WERE_DAMAGED,
    WAS_REMOVED,
    Journal,
)
from tierkv.storage.journal_segment import HEAD, Scan, encode_row, encode_segment, read_rows

GROUP, OTHER = b"g" * 32, b"o" * 32
KEY = b"k" * 32
DAY = 86_400.0


def opened(directory: DataDirectory, now: float = 1.0, **options: object) -> Journal:
    given = {"max_bytes": 2**20, "max_age_seconds": 30 * DAY, "now": now, "boot": "this boot"} | options
    return Journal(directory, **given)  # type: ignore[arg-type]


def stored(at: float, num_bytes: int, group: bytes = GROUP) -> Posting:
    return Posting(at, group, Account.COPIED, Account.NVME, num_bytes)


def evicted(at: float, group: bytes = GROUP, num_bytes: int = 4096) -> EvictionRow:
    return EvictionRow(at, group, KEY, 16, "nvme", "dropped", 1, 16, num_bytes, 0.0, 0.5, 2, 0.0, "evicted")


def segments(directory: DataDirectory) -> list[Path]:
    return sorted((directory.path / "journal").glob("*.log"))


def rows(journal: Journal, since: float = 0.0) -> list[AnyRow]:
    return [row for row in journal.rows(since, Scan()) if not isinstance(row, Checkpoint)]


def test_what_was_appended_is_there_after_a_kill(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100), evicted(3.0)])
    journal.append([Posting(4.0, GROUP, Account.NVME, Account.DROPPED, 40, "evicted")])
    again = opened(directory, now=5.0)  # nobody has closed the first one
    assert again.balances.of(Account.NVME, GROUP) == 60
    assert again.balances.of_account(Account.DROPPED) == {GROUP: 40}
    assert again.balances.total == 0
    assert rows(again) == [stored(2.0, 100), evicted(3.0), rows(journal)[2]]
    assert rows(again, since=3.0) == rows(again)[1:]
    journal.close(6.0, in_order=False)
    again.close(6.0, in_order=False)


def test_an_end_in_order_is_told_from_another(directory: DataDirectory) -> None:
    journal = opened(directory)
    assert (journal.is_new, journal.balances.excuse) == (True, BEGINS_HERE)
    journal.counted(1.5)
    journal.append([stored(2.0, 100)])
    journal.close(3.0, in_order=True)
    journal = opened(directory, boot="another boot")
    assert (journal.balances.is_closed, journal.balances.excuse) == (True, "")
    assert not journal.is_new
    journal.append([stored(4.0, 1)])
    journal.close(5.0, in_order=False)
    journal = opened(directory, boot="another boot")
    assert journal.balances.excuse == ""  # a process was killed: the rows are there
    journal.close(5.0, in_order=False)
    journal = opened(directory, boot="a third boot")
    assert journal.balances.excuse == MACHINE_WENT_DOWN
    journal.close(5.0, in_order=False)
    journal = opened(directory, boot="a third boot")
    assert journal.balances.excuse == MACHINE_WENT_DOWN  # until somebody has counted
    journal.counted(6.0)
    journal.close(7.0, in_order=False)
    journal = opened(directory, boot="a third boot")
    assert journal.balances.excuse == ""
    journal.close(8.0, in_order=False)


@pytest.mark.parametrize("cut", [1, 3, 10, 30, 100])
def test_a_torn_tail_is_cut_off_and_what_follows_is_read(directory: DataDirectory, cut: int) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100), evicted(3.0)])
    journal.close(4.0, in_order=False)
    (segment,) = segments(directory)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-cut])
    journal = opened(directory, now=5.0)
    torn = len(encode_row(evicted(3.0))) - cut
    assert (journal.torn_bytes, journal.damaged) == (torn, 0)
    assert segment.stat().st_size == len(whole) - torn - cut
    assert journal.balances.of(Account.NVME, GROUP) == 100
    journal.append([evicted(6.0)])
    assert [row.at for row in rows(journal)] == [2.0, 6.0]
    journal.close(7.0, in_order=False)


def test_a_damaged_row_is_skipped_and_counted_and_excuses_what_a_count_finds(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.counted(1.5)
    journal.append([stored(2.0, 100), stored(3.0, 10), evicted(4.0)])
    journal.close(5.0, in_order=False)
    (segment,) = segments(directory)
    raw = bytearray(segment.read_bytes())
    at = raw.index(encode_row(stored(2.0, 100)))
    for flipped in (at + 30, at + 5):  # in what it says, and in how long it is
        changed = bytearray(raw)
        changed[flipped] ^= 0x40
        segment.write_bytes(changed)
        journal = opened(directory, now=6.0, read_only=True)
        assert (journal.damaged, journal.torn_bytes) == (1, 0)
        assert journal.balances.of(Account.NVME, GROUP) == 10
        assert journal.balances.excuse == ROWS_WERE_DAMAGED
        scan = Scan()
        assert [row.at for row in journal.rows(2.5, scan)] == [3.0, 4.0]
        assert scan.damaged == 1


def test_any_byte_may_be_damaged_and_the_other_rows_are_read(directory: DataDirectory) -> None:
    written: list[AnyRow] = [
        stored(2.0, 100),
        evicted(3.0),
        RegretRow(4.0, GROUP, KEY, "nvme", 1, 16, 0.1, 3.0, "evicted"),
    ]
    raw = encode_segment(written)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 0x55
        scan = Scan()
        try:
            found = list(read_rows(bytes(changed), scan))
        except UnknownFormat:
            assert len(HEAD) - 4 <= at < len(HEAD)
            continue
        assert len(found) >= len(written) - 1
        assert all(row in written for row in found)


def test_a_segment_of_a_later_version_is_left_alone(directory: DataDirectory) -> None:
    opened(directory).close(1.0, in_order=True)
    (segment,) = segments(directory)
    raw = bytearray(segment.read_bytes())
    raw[len(HEAD) - 4] = 2
    segment.write_bytes(raw)
    with pytest.raises(UnknownFormat, match="version 2"):
        opened(directory)
    assert segment.read_bytes() == raw


def test_the_oldest_rows_go_when_there_is_too_much(directory: DataDirectory) -> None:
    journal = opened(directory, max_bytes=256 * 1024)
    for number in range(200):
        journal.append([evicted(2.0 + number)] * 20 + [stored(2.0 + number, 10)])
        assert journal.num_bytes <= 256 * 1024 + 40 * 1024
    assert sum(path.stat().st_size for path in segments(directory)) == journal.num_bytes <= 256 * 1024
    assert rows(journal)[-1] == stored(201.0, 10)
    assert journal.begins() > 100.0
    assert journal.balances.of(Account.NVME, GROUP) == 2_000  # though the rows are gone
    journal.close(300.0, in_order=False)
    again = opened(directory, now=301.0)
    assert again.balances.of(Account.NVME, GROUP) == 2_000
    again.close(302.0, in_order=False)


def test_rows_that_are_too_old_go(directory: DataDirectory) -> None:
    journal = opened(directory, max_age_seconds=8 * DAY)
    journal.append([stored(DAY, 10)])
    for day in range(2, 20):
        journal.append([evicted(day * DAY)])
        journal.keep_bounds(day * DAY + 1)
    assert 10 * DAY <= rows(journal)[0].at <= 12 * DAY
    for day in range(20, 40):
        journal.keep_bounds(day * DAY)
    assert rows(journal) == []
    assert len(segments(directory)) == 1
    assert journal.balances.of(Account.NVME, GROUP) == 10
    journal.close(41 * DAY, in_order=False)


def test_what_a_full_disk_did_not_take_is_in_the_next_checkpoint(directory: DataDirectory) -> None:
    journal = opened(directory)
    with inject(errno.ENOSPC, "write", times=ALWAYS), pytest.raises(StorageError, match="ENOSPC"):
        journal.append([stored(2.0, 100), evicted(2.0)])
    assert journal.balances.of(Account.NVME, GROUP) == 100
    journal.append([stored(3.0, 10)])
    journal.close(4.0, in_order=False)
    again = opened(directory, now=5.0)
    assert again.balances.of(Account.NVME, GROUP) == 110
    assert rows(again) == [stored(3.0, 10)]
    again.close(6.0, in_order=False)


@pytest.mark.parametrize(("operation", "number"), [("dup", errno.EMFILE), ("fdatasync", errno.EIO)])
def test_a_flush_that_failed_is_due_again(directory: DataDirectory, operation: str, number: int) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100)])
    with inject(number, operation), pytest.raises(StorageError):
        journal.flush()
    with inject(errno.EIO, "fdatasync") as again, pytest.raises(StorageError):
        journal.flush()
    assert again.failed == 1
    journal.flush()
    with inject(errno.EIO, "fdatasync") as clean:
        journal.flush()
    assert clean.calls == 0
    journal.close(3.0, in_order=True)


def test_what_was_begun_is_known_until_it_has_ended(directory: DataDirectory) -> None:
    journal = opened(directory)
    files = [FileOf("ab" * 32, GROUP, 0, bytes([n]) * 32) for n in range(3)]
    journal.append([Begun(2.0, file, 7, Account.DROPPED) for file in files])
    journal.append([Posting(3.0, GROUP, Account.NVME, Account.DROPPED, 7, "evicted", files[1])])
    again = opened(directory, now=4.0)
    assert list(again.balances.begun) == [files[0], files[2]]
    assert again.balances.of(Account.NVME, GROUP) == -7
    journal.close(5.0, in_order=False)
    again.close(5.0, in_order=False)


def test_a_segment_that_was_just_being_made_is_made_again(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100)])
    journal.close(3.0, in_order=False)
    (directory.path / "journal" / f"{2:016d}.log").write_bytes(HEAD + b"\xfaR")
    again = opened(directory, now=4.0)
    assert again.balances.of(Account.NVME, GROUP) == 100
    assert [path.name for path in segments(directory)] == [f"{n:016d}.log" for n in (1, 2)]
    again.append([stored(5.0, 1)])
    again.close(6.0, in_order=False)
    last = opened(directory, now=7.0)
    assert (last.balances.of(Account.NVME, GROUP), last.damaged) == (101, 0)
    last.close(8.0, in_order=False)


def test_a_purge_leaves_no_trace_of_a_group_and_the_sums_as_they_were(directory: DataDirectory) -> None:
    journal = opened(directory, max_bytes=128 * 1024)
    for number in range(60):
        at = 2.0 + number
        journal.append([stored(at, 100), stored(at, 5, OTHER), *[evicted(at)] * 10, evicted(at, OTHER)])
    assert len(segments(directory)) > 3
    before = [(row.at, type(row)) for row in rows(journal)]
    assert journal.rewrite(Anonymizer([GROUP], []), 100.0) > 600
    journal.append([evicted(101.0)])
    raw = b"".join(path.read_bytes() for path in segments(directory))
    assert raw.count(GROUP) == 1  # of what came afterwards
    assert OTHER in raw
    assert [(row.at, type(row)) for row in rows(journal)][:-1] == before
    sums = {(one.account, one.group): one.num_bytes for one in journal.balances.all()}
    assert sums == {
        (Account.NVME, NOBODY): 6_000, (Account.COPIED, NOBODY): -6_000,
        (Account.NVME, OTHER): 300, (Account.COPIED, OTHER): -300,
    }  # fmt: skip
    journal.close(102.0, in_order=False)
    again = opened(directory, now=103.0)
    assert again.balances.all() == journal.balances.all()
    again.close(104.0, in_order=False)


def test_a_purge_of_a_prefix_leaves_no_block_of_its_group_named(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([evicted(2.0), evicted(2.0, OTHER), RegretRow(4.0, GROUP, KEY, "nvme", 1, 16, 0.1, 3.0, "evicted")])
    journal.rewrite(Anonymizer([], [GROUP]), 5.0)
    found = rows(journal)
    assert [(row.group, row.key) for row in found if isinstance(row, EvictionRow | RegretRow)] == [
        (GROUP, b""), (OTHER, KEY), (GROUP, b""),
    ]  # fmt: skip
    journal.close(6.0, in_order=False)


def test_damage_does_not_survive_a_purge_for_nobody_can_say_whose_it_was(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([evicted(2.0), evicted(3.0, OTHER)])
    (segment,) = segments(directory)
    raw = bytearray(segment.read_bytes())
    raw[raw.index(encode_row(evicted(2.0))) + 10] ^= 1
    segment.write_bytes(raw)
    journal.rewrite(Anonymizer([GROUP], []), 4.0)
    assert GROUP not in segment.read_bytes()
    assert [row.at for row in rows(journal)] == [3.0]
    journal.close(5.0, in_order=False)


def test_nothing_is_changed_read_only(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as directory:
        journal = opened(directory)
        journal.append([stored(2.0, 100)])
        journal.close(3.0, in_order=True)
    before = {path: path.read_bytes() for path in (tmp_path / "data" / "journal").iterdir()}
    with DataDirectory.open(tmp_path / "data", read_only=True) as directory:
        journal = opened(directory, now=4.0)
        journal.append([stored(5.0, 1)])
        assert rows(journal) == [stored(2.0, 100)]
        journal.close(6.0, in_order=True)
    assert {path: path.read_bytes() for path in (tmp_path / "data" / "journal").iterdir()} == before


def test_a_journal_that_somebody_removed_begins_anew(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100)])
    journal.close(3.0, in_order=True)
    for path in segments(directory):
        os.unlink(path)
    journal = opened(directory, now=4.0)
    assert (journal.is_new, journal.balances.excuse) == (True, BEGINS_HERE)
    assert journal.balances.all() == []
    journal.close(5.0, in_order=False)


# ---- taken away or damaged


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _remove_segment(folder: Path) -> None:
    os.unlink(folder / f"{1:016d}.log")


def _replace_segment(folder: Path) -> None:
    other = folder / "other"
    other.write_bytes(b"")
    other.rename(folder / f"{1:016d}.log")


@pytest.mark.parametrize("take", [_remove_folder, _remove_segment, _replace_segment])
def test_a_segment_that_is_taken_away_is_missed_and_another_begins_with_the_balances(
    directory: DataDirectory, take: Callable[[Path], None]
) -> None:
    journal = opened(directory)
    journal.counted(1.5)
    journal.append([stored(2.0, 100), evicted(3.0)])
    before = journal.balances.all()
    assert (journal.look(3.5), journal.losses) == (0, ())
    take(directory.path / "journal")
    assert journal.look(4.0) == 3
    assert journal.look(4.5) == 0
    (words,) = journal.losses
    assert words.startswith(WAS_REMOVED)
    assert "1970-01-01 00:00:04 UTC" in words
    journal.append([stored(5.0, 1)])
    assert rows(journal) == [stored(5.0, 1)]
    assert journal.begins() == 4.0
    journal.close(6.0, in_order=True)
    again = opened(directory, now=7.0)
    assert (again.balances.of(Account.NVME, GROUP), again.balances.excuse) == (101, "")
    assert before == [one for one in before if one.num_bytes in (100, -100)]
    again.close(8.0, in_order=True)


def test_what_is_in_the_place_of_the_folder_is_told_until_it_is_gone(directory: DataDirectory) -> None:
    journal, folder = opened(directory), directory.path / "journal"
    journal.append([stored(2.0, 100)])
    shutil.rmtree(folder)
    folder.write_bytes(b"not yours")
    assert journal.look(3.0) == 1
    assert "can't be written" in journal.problem
    with pytest.raises(StorageError):
        journal.append([stored(4.0, 1)])
    assert (journal.look(4.5), journal.begins(), folder.read_bytes()) == (0, 0.0, b"not yours")
    folder.unlink()
    assert (journal.look(5.0), journal.problem) == (0, "")
    journal.append([stored(6.0, 1)])
    journal.close(7.0, in_order=False)
    again = opened(directory, now=8.0)
    assert again.balances.of(Account.NVME, GROUP) == 102
    again.close(9.0, in_order=False)


def test_a_folder_in_the_place_of_the_next_segment_is_passed_by(directory: DataDirectory) -> None:
    journal = opened(directory)
    journal.append([stored(2.0, 100)])
    journal.close(3.0, in_order=True)
    (directory.path / "journal" / f"{2:016d}.log").mkdir()
    journal = opened(directory, now=4.0)
    journal.append([stored(5.0, 1)])
    assert rows(journal) == [stored(2.0, 100), stored(5.0, 1)]
    journal.check()
    assert journal.losses == (
        f"{2:016d}.log of the journal is no file",
        f"segments are missing from the journal: 1, before {3:016d}.log",
    )
    journal.close(6.0, in_order=True)


@pytest.fixture
def long(directory: DataDirectory) -> list[Path]:
    """Segments of a journal that was closed."""
    journal = opened(directory, max_bytes=200_000)
    journal.counted(1.5)
    for at in range(600):
        journal.append([stored(2.0 + at, 100), evicted(2.0 + at)])
    journal.check()
    assert journal.losses == ()
    journal.close(1_000.0, in_order=True)
    found = segments(directory)
    assert len(found) >= 4
    return found


def _lose(path: Path) -> None:
    path.unlink()


def _halve(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def _halve_between_rows(path: Path) -> None:
    kept = list(read_rows(path.read_bytes(), Scan()))
    path.write_bytes(encode_segment(kept[: len(kept) // 2]))


def _scribble(path: Path) -> None:
    path.write_bytes(bytes(range(1, 256)) * (path.stat().st_size // 255))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lose, "segments are missing from the journal: 1, before {after}"),
        (_halve, "the end of {name} of the journal was cut off or damaged"),
        (_halve_between_rows, "rows are missing from the journal before {after}"),
        (_scribble, "{name} of the journal can't be read"),
    ],
)
@pytest.mark.parametrize("since", [0.0, 500.0])
def test_damage_in_the_middle_is_named_by_whoever_reads(
    directory: DataDirectory, long: list[Path], damage: Callable[[Path], None], words: str, since: float
) -> None:
    damage(long[1])
    journal = opened(directory, now=2_000.0, max_bytes=200_000)
    scan = Scan()
    assert list(journal.rows(since, scan))
    expected = words.format(name=long[1].name, after=long[2].name)
    assert scan.problems == [expected]
    journal.check()
    assert journal.losses == (expected,)
    journal.close(2_001.0, in_order=True)


@pytest.mark.parametrize(("damage", "excuse"), [(_halve, END_WAS_DAMAGED), (_scribble, ROWS_WERE_DAMAGED)])
def test_a_damaged_last_segment_is_told_and_excuses_what_a_count_finds(
    directory: DataDirectory, long: list[Path], damage: Callable[[Path], None], excuse: str
) -> None:
    damage(long[-1])
    journal = opened(directory, now=2_000.0, max_bytes=200_000)
    assert journal.balances.excuse == excuse
    journal.check()
    assert len(journal.losses) == 1
    journal.append([stored(2_001.0, 1)])
    journal.close(2_002.0, in_order=True)
    again = opened(directory, now=2_003.0, max_bytes=200_000)
    assert again.balances.excuse == excuse  # until somebody has counted
    assert rows(again)[-1] == stored(2_001.0, 1)
    again.close(2_004.0, in_order=True)
