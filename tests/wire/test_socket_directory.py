"""Node, clients and operators derive the same directory from the same data directory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

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


@pytest.mark.scenario("B167", then="two nodes of one user, and two users, share no name of a socket, lock or temp file")
def test_two_nodes_and_two_users_have_no_name_in_common(tmp_path, monkeypatch):
    directories = [tmp_path / "one", tmp_path / "two", None]
    found = [default_socket_dir(path, environ={}) for path in directories] + [default_socket_dir(None, "b", environ={})]
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    found += [default_socket_dir(path, environ={}) for path in directories]
    assert len(set(found)) == len(found)
    assert all(one not in other.parents for one in found for other in found)
    assert {path.parents[1].name for path in found[4:]} == {"tierkv-12345"}


@pytest.mark.scenario("B167", then="a data directory of any length has a socket path that fits")
def test_a_long_data_directory_has_a_short_endpoint(tmp_path):
    long = tmp_path / ("x" * 150) / ("y" * 150)
    assert excess_bytes(default_socket_dir(long, environ={})) == 0
    assert default_socket_dir(long, environ={}) != default_socket_dir(long.parent / ("y" * 149 + "z"), environ={})
