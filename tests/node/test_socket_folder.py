from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.node.socket_folder import (
    claim_inline_folder,
    claim_socket_folder,
    listen_for_sessions,
    node_endpoint,
    remove_inline_sockets,
    remove_sockets,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    claim_socket_folder(tmp_path / "tierkv" / "node")
    return tmp_path / "tierkv" / "node"


def test_every_missing_directory_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        claim_socket_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    claim_socket_folder(tmp_path / "a" / "b")  # and is taken again


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused_with_the_remedy(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        claim_socket_folder(folder)


def test_a_symbolic_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(folder)
    with pytest.raises(ConfigError, match="symbolic link"):
        claim_socket_folder(tmp_path / "alias")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        claim_socket_folder(tmp_path / "file")


def test_a_parent_in_which_others_can_rename_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="lets others"):
        claim_socket_folder(shared / "node")


def test_a_parent_with_the_sticky_bit_like_tmp_is_fine(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    claim_socket_folder(shared / "node")


def test_another_users_directory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        claim_socket_folder(folder)


def test_a_stale_socket_file_is_replaced_by_one_that_listens(folder: Path) -> None:
    listen_for_sessions(folder).close()
    with listen_for_sessions(folder), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(folder / "session.sock"))
    assert (folder / "session.sock").stat().st_mode & 0o777 == 0o600


def test_what_keeps_the_socket_from_being_made_is_named(folder: Path) -> None:
    (folder / "session.sock").mkdir()
    with pytest.raises(ConfigError, match=r"session\.sock"):
        listen_for_sessions(folder)


def test_sockets_are_removed_at_the_end_and_nothing_else(folder: Path) -> None:
    listen_for_sessions(folder).close()
    (folder / "LOCK").touch()
    remove_sockets(folder)
    remove_sockets(folder)
    assert os.listdir(folder) == ["LOCK"]
    assert node_endpoint(folder) == f"ipc://{folder}/node.sock"


# ---- for tenants that are not trusted


@pytest.fixture
def open_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that others can reach, as far as the check looks: pytest's own parents are private."""
    monkeypatch.setattr("tierkv.node.socket_folder._require_passable", lambda folder: None)
    return tmp_path


def test_the_inline_directory_lets_others_through_but_not_look_whatever_the_umask(open_root: Path) -> None:
    before = os.umask(0o077)
    try:
        claim_inline_folder(open_root / "a" / "b")
    finally:
        os.umask(before)
    assert [(open_root / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o711, 0o711]
    (open_root / "a" / "b").chmod(0o710)  # the owner's choice: a group only
    claim_inline_folder(open_root / "a" / "b")
    assert (open_root / "a" / "b").stat().st_mode & 0o777 == 0o710


@pytest.mark.parametrize("mode", [0o722, 0o730, 0o777])
def test_an_inline_directory_that_others_can_write_in_is_refused_with_the_remedy(open_root: Path, mode: int) -> None:
    (open_root / "i").mkdir()
    (open_root / "i").chmod(mode)
    with pytest.raises(ConfigError, match=r"inline_dir: .*chmod go-w"):
        claim_inline_folder(open_root / "i")


def test_an_inline_directory_that_is_a_link_or_a_file_is_refused(open_root: Path) -> None:
    (open_root / "link").symlink_to(open_root)
    (open_root / "file").write_text("")
    for name, problem in (("link", "symbolic link"), ("file", "not a directory")):
        with pytest.raises(ConfigError, match=f"inline_dir: .*{problem}"):
            claim_inline_folder(open_root / name)


def test_an_inline_directory_behind_a_closed_door_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="closed is closed to them"):
        claim_inline_folder(tmp_path / "closed" / "i")


def test_sockets_for_tenants_are_removed_and_nothing_else(open_root: Path) -> None:
    claim_inline_folder(open_root / "i")
    with listen_for_sessions(open_root / "i", 0o666):
        assert (open_root / "i" / "session.sock").stat().st_mode & 0o777 == 0o666
    (open_root / "i" / "notes.txt").write_text("")
    remove_inline_sockets(open_root / "i")
    assert [path.name for path in (open_root / "i").iterdir()] == ["notes.txt"]
