from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.errors import ConfigError, DataDirectoryError, DataDirectoryInUse
from tierkv.node.lock import lock_data_directory, lock_socket_directory


@pytest.mark.scenario("B256", then="without a lock file a start makes one")
def test_an_absent_directory_is_made_private_with_nothing_but_the_lock_in_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "store"
    with lock_data_directory(root, 0.0):
        assert os.listdir(root) == ["LOCK"]
        assert root.stat().st_mode & 0o777 == 0o700
        assert (root / "LOCK").stat().st_mode & 0o777 == 0o600


def test_a_second_node_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    with lock_data_directory(tmp_path, 0.0), pytest.raises(DataDirectoryInUse, match=rf"process {os.getpid()}"):
        lock_data_directory(tmp_path, 0.0)


def test_a_start_waits_for_the_lock_and_takes_it_when_it_comes_free(tmp_path: Path) -> None:
    first = lock_data_directory(tmp_path, 0.0)
    pauses: list[float] = []

    def release_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        first.close()

    with lock_data_directory(tmp_path, 5.0, pause=release_meanwhile):
        assert len(pauses) == 1


@pytest.mark.scenario(
    "B256", then="whatever stands in the lock file, a start takes it where the kernel says that nobody holds it"
)
@pytest.mark.parametrize(
    "content",
    [b"", b"garbage\x00\xff", b"1", b"4194304", str(os.getpid()).encode(), str(os.getppid()).encode()],
    ids=["empty", "garbage", "pid 1", "no pid", "own pid", "pid of somebody else who lives"],
)
def test_what_is_written_in_the_lock_file_decides_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "LOCK").write_bytes(content)
    lock_data_directory(tmp_path, 0.0).close()


def test_a_lock_that_is_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "LOCK").mkdir()
    with pytest.raises(DataDirectoryError, match="LOCK") as raised:
        lock_data_directory(tmp_path, 0.0)
    assert raised.value.exit_code == 2


def test_a_symbolic_link_is_refused_as_data_directory_and_as_lock(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "alias").symlink_to(real)
    with pytest.raises(DataDirectoryError, match="symbolic link"):
        lock_data_directory(tmp_path / "alias", 0.0)
    (real / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataDirectoryError, match="LOCK"):
        lock_data_directory(real, 0.0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirectoryError, match="file"):
        lock_data_directory(tmp_path / "file", 0.0)


def test_a_foreign_directory_is_left_exactly_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DataDirectoryError, match="not empty"):
        lock_data_directory(tmp_path, 0.0)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_data_directory_whose_lock_was_deleted_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text("x")
    lock_data_directory(tmp_path, 0.0).close()


def test_a_child_that_inherited_the_open_file_keeps_the_directory_locked(tmp_path: Path) -> None:
    lock = lock_data_directory(tmp_path, 0.0)
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        pass_fds=[lock.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.readline()
    lock.close()
    with pytest.raises(DataDirectoryInUse):
        lock_data_directory(tmp_path, 0.0)
    child.communicate()
    lock_data_directory(tmp_path, 0.0).close()


def test_a_lock_on_a_file_that_was_deleted_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_flock = fcntl.flock
    deleted: list[Path] = []

    def delete_then_lock(fd: int, operation: int) -> None:
        if not deleted:
            deleted.append(tmp_path / "LOCK")
            (tmp_path / "LOCK").unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", delete_then_lock)
    with lock_data_directory(tmp_path, 5.0, pause=lambda _: None) as lock:
        assert os.fstat(lock.fd).st_ino == (tmp_path / "LOCK").stat().st_ino


def test_one_node_per_socket_directory(tmp_path: Path) -> None:
    with lock_socket_directory(tmp_path), pytest.raises(DataDirectoryInUse) as raised:
        lock_socket_directory(tmp_path)
    assert raised.value.exit_code == 3


def test_an_absent_socket_directory_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="socket_dir"):
        lock_socket_directory(tmp_path / "absent")


def test_what_a_power_loss_left_of_a_set_up_counts_as_empty(tmp_path: Path) -> None:
    """The name LOCK was not flushed yet, and that of the stamp to be came to the disk before it."""
    (tmp_path / "FORMAT.new").write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    with lock_data_directory(tmp_path, 0.0):
        assert (tmp_path / "LOCK").exists()


@pytest.mark.scenario("B256", then="a lock file that can't be opened for writing is named, exit code 2")
def test_a_lock_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: str, flags: int, *arguments: int, **more: int | None) -> int:
        if path == "LOCK":
            raise PermissionError(13, "Permission denied")
        return real_open(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataDirectoryError, match="LOCK: Permission denied") as raised:
        lock_data_directory(tmp_path, 0.0)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("alias", ["relative", "dotted", "doubled", "through a linked parent", "through /proc"])
def test_a_directory_is_locked_by_whatever_name_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    root = tmp_path / "parent" / "store"
    (tmp_path / "linked").symlink_to("parent")
    with lock_data_directory(root, 0.0):
        monkeypatch.chdir(root.parent)
        names = {
            "relative": Path("store"),
            "dotted": root.parent / ".." / "parent" / "store",
            "doubled": Path(str(root).replace("/store", "//store/")),
            "through a linked parent": tmp_path / "linked" / "store",
            "through /proc": Path(f"/proc/{os.getpid()}/cwd/store"),
        }
        with pytest.raises(DataDirectoryInUse):
            lock_data_directory(names[alias], 0.0)
    lock_data_directory(names[alias], 0.0).close()


def test_a_directory_that_is_mounted_twice_is_locked_once(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with lock_data_directory(root, 0.0):
        bound = subprocess.run(["mount", "--bind", root, elsewhere], check=False, capture_output=True)
        if bound.returncode:
            pytest.skip(f"mounting is not allowed here: {bound.stderr.decode().strip()}")
        try:
            with pytest.raises(DataDirectoryInUse):
                lock_data_directory(elsewhere, 0.0)
        finally:
            subprocess.run(["umount", elsewhere], check=True)


def test_two_directories_of_one_lock_file_are_two_directories_for_one_node(tmp_path: Path) -> None:
    """A hard link: whoever made it gets less than he wished for, and never two writers."""
    with lock_data_directory(tmp_path / "one", 0.0):
        (tmp_path / "two").mkdir()
        os.link(tmp_path / "one" / "LOCK", tmp_path / "two" / "LOCK")
        with pytest.raises(DataDirectoryInUse):
            lock_data_directory(tmp_path / "two", 0.0)


def test_the_loser_of_a_race_leaves_every_byte_and_every_time_as_they_were(tmp_path: Path) -> None:
    def look() -> list[tuple[str, bytes, os.stat_result]]:
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return [(path.name, path.read_bytes(), path.stat()) for path in files]

    with lock_data_directory(tmp_path, 0.0):
        (tmp_path / "FORMAT").write_text("x")
        (tmp_path / "tmp").mkdir()
        (tmp_path / "tmp" / "1-aa-0.tmp").write_bytes(b"half")
        before = [(name, content, found.st_mtime_ns, found.st_ctime_ns) for name, content, found in look()]
        for _ in range(3):
            with pytest.raises(DataDirectoryInUse):
                lock_data_directory(tmp_path, 0.0)
        assert [(name, content, found.st_mtime_ns, found.st_ctime_ns) for name, content, found in look()] == before
