"""The gateway as a child: started, heard, restarted, ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierkv.config import Settings
from tierkv.node.control import GatewayHeard
from tierkv.node.gateway_process import GatewayProcess
from tierkv.node.socket_folder import claim_inline_folder, claim_socket_folder
from tierkv.node.survey import GATEWAY_SILENT_SECONDS, NodeState
from tierkv.wire.messages import PROTOCOL_VERSION
from tierkv.wire.session import InlineGrant, SessionHello, decode_packet, encode_packet

PATIENCE_SECONDS = 30.0


@pytest.fixture
def settings() -> Iterator[Settings]:
    root = Path(tempfile.mkdtemp(prefix="tkv"))
    root.chmod(0o711)
    claim_socket_folder(root / "n")
    claim_inline_folder(root / "i")
    yield Settings(
        socket_dir=root / "n",
        inline_dir=root / "i",
        inline_users=str(os.geteuid()),
        host_bytes="4MiB",
        slab_bytes="1MiB",  # type: ignore[arg-type]
    )
    shutil.rmtree(root)


@pytest.fixture
def gateway(settings: Settings) -> Iterator[GatewayProcess]:
    made = GatewayProcess(settings)
    yield made
    made.kill()


def wait_for(gateway: GatewayProcess, condition: Callable[[GatewayHeard], bool]) -> GatewayHeard:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        gateway.start_if_due(time.monotonic())
        heard = gateway.look()
        if heard is not None and condition(heard):
            return heard
        assert time.monotonic() < deadline
        time.sleep(0.005)  # between two looks at a condition that has a deadline


def test_there_is_none_without_users(settings: Settings) -> None:
    none = GatewayProcess(settings.model_copy(update={"inline_users": ""}))
    none.start_if_due(time.monotonic())
    assert (none.due, none.filenos(), none.look()) == (None, [], None)
    none.end()


def test_it_is_heard_restarted_after_a_kill_and_ends_when_told(gateway: GatewayProcess, settings: Settings) -> None:
    first = wait_for(gateway, lambda heard: heard.is_running)
    assert (first.restarts, first.problem) == (0, "")
    assert len(gateway.filenos()) == 2
    os.kill(first.pid, signal.SIGKILL)
    dead = wait_for(gateway, lambda heard: not heard.is_running)
    assert (dead.pid, dead.restarts, dead.problem) == (first.pid, 1, "killed by SIGKILL")
    second = wait_for(gateway, lambda heard: heard.is_running)
    assert second.pid != first.pid
    assert (second.restarts, second.problem) == (1, "killed by SIGKILL")
    gateway.end()
    assert gateway.filenos() == []
    assert [path.name for path in settings.inline_dir.iterdir()] == []
    gateway.start_if_due(time.monotonic() + 60)
    assert gateway.filenos() == [], "none follows when the node is stopping"


def test_its_sockets_are_for_others_to_connect_to_and_its_directory_for_nobody_to_list(
    gateway: GatewayProcess, settings: Settings
) -> None:
    wait_for(gateway, lambda heard: heard.is_running)
    modes = {path.name: path.stat().st_mode & 0o777 for path in settings.inline_dir.iterdir()}
    assert modes == {"session.sock": 0o666, f"{os.geteuid()}.sock": 0o666}
    assert settings.inline_dir.stat().st_mode & 0o777 == 0o711


def test_one_that_is_stopped_is_killed_at_the_end(gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.node.gateway_process.END_SECONDS", 0.05)
    pid = wait_for(gateway, lambda heard: heard.is_running).pid
    os.kill(pid, signal.SIGSTOP)
    gateway.end()
    assert gateway.filenos() == []


@pytest.mark.scenario(
    "B168", then="parts of a message that never ends fill a bounded amount of memory, and others are served afterwards"
)
def test_a_message_that_never_ends_costs_its_sender_the_connection_and_the_machine_no_memory(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.node.gateway_process.MEMORY_BYTES", 160 * 2**20)
    monkeypatch.setattr("tierkv.node.gateway_process.MEMORY_BYTES_A_USER", 0)
    gateway = GatewayProcess(settings)
    try:
        wait_for(gateway, lambda heard: heard.is_running)
        sent = send_endless_message(settings.inline_dir / f"{os.geteuid()}.sock", at_most=600 * 2**20)
        assert 2**20 <= sent < 400 * 2**20, "cut off when there was no memory left for it"
        wait_for(gateway, lambda heard: heard.is_running)  # the same one, or the next
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            sock.connect(os.fspath(settings.inline_dir / "session.sock"))
            sock.send(encode_packet(SessionHello(protocol=PROTOCOL_VERSION)))
            assert isinstance(decode_packet(sock.recv(65_536)), InlineGrant)
    finally:
        gateway.kill()


def send_endless_message(path: Path, at_most: int) -> int:
    """A DEALER by hand, for ZeroMQ's own would keep the parts to itself: bytes sent until the other side hangs up."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    part = b"\x03" + (2**20).to_bytes(8, "big") + bytes(2**20)  # long, and more to come
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(os.fspath(path))
        sock.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        sock.sendall(b"\x04" + bytes([len(ready)]) + ready)
        sent = 0
        try:
            while sent < at_most:
                sock.sendall(part)
                sent += len(part)
        except OSError:
            pass  # that is what is waited for
        return sent


@pytest.mark.parametrize(
    ("heard", "at", "state"),
    [
        (None, 0.0, "starting"),
        (GatewayHeard(pid=1, restarts=0, is_running=True, problem=""), 99.0, "running"),
        (GatewayHeard(pid=1, restarts=0, is_running=True, problem=""), 99.0 - GATEWAY_SILENT_SECONDS, "silent"),
        (GatewayHeard(pid=1, restarts=1, is_running=False, problem="exited with 1"), 99.0, "dead"),
    ],
)
def test_status_tells_a_dead_or_silent_one_from_one_that_runs(
    heard: GatewayHeard | None, at: float, state: str
) -> None:
    node = NodeState(
        incarnation=1,
        data_dir="",
        has_nvme=False,
        supervisor_pid=1,
        front_restarts=0,
        started=0.0,
        has_gateway=True,
        gateway_heard=heard,
        gateway_heard_at=at,
    )
    assert node.describe_gateway(99.5) == state
