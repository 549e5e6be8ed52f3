from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.node.socket_folder import claim_socket_folder, listen_for_sessions, node_endpoint, remove_sockets


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
