from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import hold
from tierkv.errors import BrokenInvariant, DataDirectoryError, DataDirectoryNewer, StorageError
from tierkv.storage import directory as module
from tierkv.storage.directory import FOLDERS, DataDirectory
from tierkv.storage.names import TEMP

SHELF = ("models", "ab" * 32, "cd" * 32, "0", "ee")


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a path, links not followed: mode and content."""
    found = {}
    for one in sorted(path.rglob("*")):
        mode = one.lstat().st_mode
        found[str(one.relative_to(path))] = (mode, one.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


def failing(number: int) -> Callable[..., int]:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# ---- made, opened, refused


@pytest.mark.scenario("B226", then="directories are 0700 and files 0600 whatever the umask")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_an_absent_directory_is_made_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with DataDirectory.open(tmp_path / "data") as directory, directory.folder(SHELF, create=True):
            name, fd = directory.create_temp(direct=True)
            os.close(fd)
    finally:
        os.umask(before)
    made = {path: path.stat().st_mode for path in [tmp_path / "data", *(tmp_path / "data").rglob("*")]}
    assert len(made) > len(FOLDERS) + len(SHELF)
    assert {stat.S_IMODE(mode) for mode in made.values() if stat.S_ISDIR(mode)} == {0o700}
    assert {stat.S_IMODE(mode) for mode in made.values() if stat.S_ISREG(mode)} == {0o600}
    assert (tmp_path / "data" / TEMP / name) in made


def test_an_empty_directory_is_made_a_data_directory_and_opened_again(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path) as first:
        store_id = first.store_id
    with DataDirectory.open(tmp_path) as second:
        assert second.store_id == store_id
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["FORMAT", *FOLDERS])


def test_a_lock_and_what_a_killed_set_up_leaves_count_as_empty(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("1\n")
    (tmp_path / "FORMAT.new").write_text("{")
    (tmp_path / "lost+found").mkdir()
    with DataDirectory.open(tmp_path) as directory:
        assert directory.store_id
    assert not (tmp_path / "FORMAT.new").exists()


@pytest.mark.scenario("B114", then="files and no FORMAT: refused, exit 2, and nothing is touched")
def test_a_directory_with_foreign_files_is_refused_and_nothing_made_in_it(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "LOCK").write_text("another program's")
    before = tree(tmp_path)
    with pytest.raises(DataDirectoryError, match=r"not empty \(it has '\.git'\)"):
        DataDirectory.open(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("path", ["/", "/usr"])
def test_directories_of_the_system_are_refused(path: str) -> None:
    with pytest.raises(DataDirectoryError, match=r"not empty|belongs to uid"):
        DataDirectory.open(path)


@pytest.mark.scenario("B114", then="a directory of a newer format is left untouched")
def test_a_newer_format_is_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text('{"format": 2, "store": "x", "other": [1]}')
    before = tree(tmp_path)
    with pytest.raises(DataDirectoryNewer, match=r"format 2, made by a newer tierkv"):
        DataDirectory.open(tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", b"{}", b'{"format": "1", "store": "x"}', b"[1]"])
def test_a_damaged_stamp_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "FORMAT").write_bytes(content)
    with pytest.raises(DataDirectoryError, match=r"FORMAT is damaged"):
        DataDirectory.open(tmp_path)
    assert (tmp_path / "FORMAT").read_bytes() == content


@pytest.mark.parametrize("number", [0, -3])
def test_a_format_that_never_was_is_refused(tmp_path: Path, number: int) -> None:
    (tmp_path / "FORMAT").write_text(f'{{"format": {number}, "store": "x"}}')
    with pytest.raises(DataDirectoryError, match="never was"):
        DataDirectory.open(tmp_path)


def test_a_stamp_that_is_no_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "FORMAT")
    with pytest.raises(DataDirectoryError, match="not a regular file"):
        DataDirectory.open(tmp_path)


def test_a_symbolic_link_to_a_data_directory_is_refused(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "real").close()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DataDirectoryError, match="symbolic link"):
        DataDirectory.open(tmp_path / "link")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_symbolic_link_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    DataDirectory.open(tmp_path / "data").close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / name).rmdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataDirectoryError, match=f"{name} is not a directory"):
        DataDirectory.open(tmp_path / "data")


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(DataDirectoryError, match="is not a directory"):
        DataDirectory.open(tmp_path / "data")


def test_a_file_on_the_way_to_the_directory_is_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryError, match=f"^{tmp_path}/file is not a directory$"):
        DataDirectory.open(tmp_path / "file" / "x" / "y")


def test_nothing_is_made_where_only_opening_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryError, match="does not exist"):
        DataDirectory.open(tmp_path / "absent", create=False)
    with pytest.raises(DataDirectoryError, match="is empty"):
        DataDirectory.open(tmp_path, create=False)
    assert tree(tmp_path) == {}


def test_a_reader_opens_it_without_the_folders_that_may_be_deleted(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path).close()
    (tmp_path / "index").rmdir()
    before = tree(tmp_path)
    DataDirectory.open(tmp_path, create=False, writable=False).close()
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.scenario("B226", then="whoever is not the owner is refused with exit 2 before anything is made")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "data").close()
    os.chown(tmp_path / "data", 12_345, 12_345)
    before = tree(tmp_path)
    with pytest.raises(DataDirectoryError, match="belongs to uid 12345") as refused:
        DataDirectory.open(tmp_path / "data")
    assert refused.value.exit_code == 2
    assert tree(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_what_can_not_be_written_to_is_refused_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    DataDirectory.open(tmp_path).close()
    monkeypatch.setattr(os, "pwrite", failing(number))
    with pytest.raises(DataDirectoryError, match=errno.errorcode[number]):
        DataDirectory.open(tmp_path)
    monkeypatch.undo()
    assert list((tmp_path / TEMP).iterdir()) == []


def test_a_full_disk_is_no_reason_to_refuse_a_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DataDirectory.open(tmp_path).close()
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    DataDirectory.open(tmp_path).close()


@pytest.mark.scenario(
    "B148",
    then="a direct path that does not come back is noticed at the start, said once, and gone round by the buffered one",
)
def test_a_direct_write_that_does_not_come_back_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    comes_back = threading.Event()
    real = os.pwrite

    def stuck(fd: int, *arguments: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            comes_back.wait(20.0)
        return real(fd, *arguments)

    monkeypatch.setattr(os, "pwrite", stuck)
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.05)
    with DataDirectory.open(tmp_path) as directory:
        assert not directory.direct_io
        assert "took more than 0.05 s" in directory.direct_problem
        name, fd = directory.create_temp(direct=True)
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        os.close(fd)
        directory.remove_temp(name)
        comes_back.set()
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1
    monkeypatch.undo()
    with DataDirectory.open(tmp_path) as directory:
        assert directory.direct_problem == ""
        assert directory.clear_temp().files == 1, "what the stuck writer left"


def test_a_full_disk_is_a_reason_to_refuse_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(errno.ENOSPC))
        with pytest.raises(DataDirectoryError, match="ENOSPC"):
            DataDirectory.open(tmp_path / "data")
    DataDirectory.open(tmp_path / "data").close()  # what was left is no obstacle


@pytest.mark.scenario("B225", then="models/ or quarantine/ on another file system than tmp/ is refused at the start")
@pytest.mark.parametrize("name", ["models", "quarantine"])
def test_a_folder_on_another_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    DataDirectory.open(tmp_path).close()
    real = os.fstat
    elsewhere = (tmp_path / name).stat().st_ino

    def fstat(fd: int) -> os.stat_result:
        found = real(fd)
        return os.stat_result((*found[:2], 99, *found[3:])) if found.st_ino == elsewhere else found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(DataDirectoryError, match=f"{name} is on another file system"):
        DataDirectory.open(tmp_path)


# ---- reaching things


def test_folders_are_made_on_the_way_and_only_when_asked_for(directory: DataDirectory) -> None:
    with pytest.raises(StorageError) as caught, directory.folder(SHELF):
        pass
    assert caught.value.reason == "not_found"
    with directory.folder(SHELF, create=True) as fd:
        assert os.fstat(fd).st_ino == directory.path.joinpath(*SHELF).stat().st_ino


def test_a_symbolic_link_below_is_not_followed(directory: DataDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.joinpath(*SHELF[2:]).mkdir(parents=True)
    (directory.path / "models" / SHELF[1]).symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic links are not followed"), directory.folder(SHELF, create=True):
        pass
    assert tree(outside) == {"/".join(SHELF[2:][:depth]): (0o40755, b"") for depth in (1, 2, 3)}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_component_that_leads_elsewhere_is_a_bug(directory: DataDirectory, name: str) -> None:
    with pytest.raises(BrokenInvariant), directory.folder(("models", name), create=True):
        pass


def test_two_threads_make_the_same_folder(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def late(name: str, mode: int, *, dir_fd: int) -> None:
        real(name, mode, dir_fd=dir_fd)
        real(name, mode, dir_fd=dir_fd)  # the second one finds it there

    monkeypatch.setattr(os, "mkdir", late)
    with directory.folder(SHELF, create=True):
        pass


def test_a_removed_or_replaced_directory_is_noticed(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as directory:
        assert directory.is_present()
        (tmp_path / "data").rename(tmp_path / "moved")
        assert not directory.is_present()
        (tmp_path / "data").mkdir()
        assert not directory.is_present()
        (tmp_path / "data").rmdir()
        (tmp_path / "moved").rename(tmp_path / "data")
        assert directory.is_present()
        (tmp_path / "data" / "FORMAT").unlink()
        assert not directory.is_present()


def test_space_is_what_the_file_system_says(directory: DataDirectory) -> None:
    found, space = os.statvfs(directory.path), directory.space()
    assert space.total_bytes == found.f_blocks * found.f_frsize
    assert 0 < space.free_bytes <= space.total_bytes
    assert space.total_inodes == found.f_files


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    directory = DataDirectory.open(tmp_path)
    directory.hashers.submit(int).result()
    directory.close()
    directory.close()


# ---- temp files


def test_temp_files_have_names_of_their_own(directory: DataDirectory) -> None:
    names = []
    for _ in range(3):
        name, fd = directory.create_temp(direct=False)
        os.close(fd)
        names.append(name)
    assert len(set(names)) == 3
    assert all(name.startswith(f"{os.getpid()}-") for name in names)
    for name in names:
        directory.remove_temp(name)
    directory.remove_temp(names[0])  # gone already: fine
    assert list((directory.path / TEMP).iterdir()) == []


def test_clearing_removes_what_dead_writers_left_and_nothing_else(directory: DataDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    temp = directory.path / TEMP
    (temp / "77-0123abcd-0.tmp").write_bytes(b"x" * 5000)
    (temp / "77-0123abcd-1.tmp").write_bytes(b"")
    (temp / "77-0123abcd-2.tmp").symlink_to(outside)
    (temp / "notes.txt").write_text("mine too")
    (temp / "77-0123abcd-3.tmp").mkdir()
    cleared = directory.clear_temp()
    assert (cleared.files, cleared.foreign) == (2, 3)
    assert cleared.num_bytes >= 5000
    assert sorted(entry.name for entry in temp.iterdir()) == ["77-0123abcd-2.tmp", "77-0123abcd-3.tmp", "notes.txt"]
    assert outside.read_text() == "mine"


@pytest.mark.scenario("B118", then="the temp file of a writer that lives is kept, and goes once its writer is dead")
def test_clearing_keeps_what_somebody_is_writing(directory: DataDirectory) -> None:
    with DataDirectory.open(directory.path) as other:  # an engine that remembers a digest, for example
        name, fd = other.create_temp(direct=False)
        cleared = directory.clear_temp()
        assert (cleared.files, cleared.kept) == (0, 1)
        assert os.listdir(directory.path / TEMP) == [name]
        os.close(fd)
    cleared = directory.clear_temp()
    assert (cleared.files, cleared.kept) == (1, 0)


def test_a_temp_file_that_could_not_be_set_up_is_removed(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchmod", failing(errno.EIO))
    with pytest.raises(StorageError):
        directory.create_temp(direct=True)
    assert list((directory.path / TEMP).iterdir()) == []


# ---- O_DIRECT


@pytest.mark.scenario("B222", then="a file system without O_DIRECT is used buffered, with one warning")
def test_a_file_system_that_refuses_direct_transfers_is_used_buffered_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(module.fcntl, "fcntl", refuse)
    with caplog.at_level(logging.WARNING), DataDirectory.open(tmp_path) as directory:
        assert not directory.direct_io
        directory.refuse_direct("pwritev")
    assert len([record for record in caplog.records if "O_DIRECT is refused" in record.getMessage()]) == 1


def test_direct_transfers_can_be_switched_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), DataDirectory.open(tmp_path, direct_io=False) as directory:
        name, fd = directory.create_temp(direct=True)
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        os.close(fd)
        directory.remove_temp(name)
    assert caplog.records == []


def test_another_error_of_switching_is_not_taken_for_a_refusal(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.fcntl, "fcntl", failing(errno.EIO))
        with pytest.raises(StorageError):
            directory.create_temp(direct=True)
    assert directory.direct_io


# ---- durability of directories


def test_every_folder_on_the_way_is_to_be_flushed_once(directory: DataDirectory) -> None:
    with directory.folder(SHELF, create=True):
        needed = directory.unflushed(SHELF)
    assert set(needed) == {SHELF[:depth] for depth in range(len(SHELF) + 1)}
    for folder in needed:
        directory.flush(folder)
    assert directory.unflushed(SHELF) == (SHELF,)
    sibling = (*SHELF[:-1], "ff")
    with directory.folder(sibling, create=True):
        assert set(directory.unflushed(sibling)) == {sibling, SHELF[:-1]}


def test_a_folder_of_another_process_counts_as_unflushed(directory: DataDirectory) -> None:
    directory.path.joinpath(*SHELF).mkdir(parents=True)
    with directory.folder(SHELF):
        assert SHELF[:-1] in directory.unflushed(SHELF)


def test_a_folder_that_was_removed_and_made_again_is_to_be_flushed_again(directory: DataDirectory) -> None:
    with directory.folder(SHELF, create=True):
        for folder in directory.unflushed(SHELF):
            directory.flush(folder)
    directory.path.joinpath(*SHELF).rmdir()
    with directory.folder(SHELF, create=True):
        assert set(directory.unflushed(SHELF)) == {SHELF, SHELF[:-1]}


def test_a_flush_covers_only_folders_that_were_there_when_it_began(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that appears while fsync runs may miss it."""
    namespace, sibling = SHELF[:-1], (*SHELF[:-1], "ff")
    with directory.folder(SHELF, create=True):
        directory.unflushed(SHELF)
    real = os.fsync

    def fsync(fd: int) -> None:
        with directory.folder(sibling, create=True):
            directory.unflushed(sibling)
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        directory.flush(namespace)
    assert namespace not in directory.unflushed(SHELF)[1:]
    assert namespace in directory.unflushed(sibling)


def test_a_flush_that_failed_makes_nothing_durable(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with directory.folder(SHELF, create=True):
        needed = directory.unflushed(SHELF)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO))
        with pytest.raises(StorageError, match="fsync failed with EIO"):
            directory.flush(needed[-1])
    assert set(directory.unflushed(SHELF)) == set(needed)


def test_threads_may_ask_and_flush_side_by_side(directory: DataDirectory) -> None:
    shelves = [(*SHELF[:-1], f"{number:02x}") for number in range(16)]

    def work(shelf: tuple[str, ...]) -> None:
        with directory.folder(shelf, create=True):
            for folder in directory.unflushed(shelf):
                directory.flush(folder)

    threads = [threading.Thread(target=work, args=(shelf,)) for shelf in shelves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [directory.unflushed(shelf) for shelf in shelves] == [(shelf,) for shelf in shelves]


def test_a_folder_that_is_made_anew_while_its_parent_is_flushed_is_not_covered(directory: DataDirectory) -> None:
    """Another thread removed the last file, and with it the folder, and a third one writes into it again."""
    with directory.folder(SHELF, create=True):
        assert SHELF[:-1] in directory.unflushed(SHELF)
    parent = directory.path.joinpath(*SHELF[:-1])
    with hold("fsync") as barrier:
        flusher = threading.Thread(target=directory.flush, args=(SHELF[:-1],))
        flusher.start()
        barrier.wait_reached()
        (parent / SHELF[-1]).rmdir()
        with directory.folder(SHELF, create=True):
            barrier.release()
            flusher.join(20)
            assert SHELF[:-1] in directory.unflushed(SHELF)
    for folder in directory.unflushed(SHELF):
        directory.flush(folder)
    assert directory.unflushed(SHELF) == (SHELF,)
