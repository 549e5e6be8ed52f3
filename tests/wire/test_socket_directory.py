"""Node, clients and operators derive the same directory from the same data directory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tierkv.wire.socket_directory import default_socket_dir, excess_bytes, find_socket_dir


def test_it_is_below_the_runtime_directory_and_named_by_the_data_directory(tmp_path):
    found = default_socket_dir(tmp_path, environ={"XDG_RUNTIME_DIR": "/run/user/7"})
    assert found.parent == Path("/run/user/7/tierkv")
    assert len(found.name) == 16


def test_without_a_runtime_directory_it_is_below_tmp_and_the_users_own():
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}):
        assert default_socket_dir(None, environ=environ) == Path(f"/tmp/tierkv-{os.getuid()}/tierkv/memory")


def test_an_alias_of_the_data_directory_leads_to_the_same_place(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    assert default_socket_dir(tmp_path / "real") == default_socket_dir(tmp_path / "alias")


def test_a_name_tells_memory_only_nodes_apart():
    assert default_socket_dir(None, "blue").name == "memory-blue"


def test_a_client_looks_where_a_node_without_its_runtime_directory_would_be(runtime_dir, monkeypatch):
    elsewhere = runtime_dir / "other-user-session"
    monkeypatch.setattr("tierkv.wire.socket_directory._fallback", lambda: runtime_dir / "fallback")
    environ = {"XDG_RUNTIME_DIR": str(elsewhere)}
    assert find_socket_dir(None, environ=environ) == elsewhere / "tierkv" / "memory"
    place = runtime_dir / "fallback" / "tierkv" / "memory"
    place.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "session.sock"))
        assert find_socket_dir(None, environ=environ) == place
    (place / "session.sock").unlink()


def test_the_excess_counts_encoded_bytes():
    assert excess_bytes(Path("/run")) == 0
    room = 107 - len("/session.sock")
    assert excess_bytes(Path("/" + "x" * (room - 1))) == 0
    assert excess_bytes(Path("/" + "x" * room)) == 1
    assert excess_bytes(Path("/" + "x" * (room - 2) + "ä")) == 1
