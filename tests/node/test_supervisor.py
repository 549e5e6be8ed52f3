"""`run` as the command line calls it, in this process: what it refuses, and its life from ready to stopped."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from tierkv.config import Settings
from tierkv.errors import ConfigError, DataDirectoryInUse, IncompleteError, TierkvError
from tierkv.node import incarnation as incarnation_module
from tierkv.node import session_socket
from tierkv.node import supervisor as supervisor_module
from tierkv.node.control import HostLimit
from tierkv.node.lock import lock_data_directory, lock_socket_directory
from tierkv.node.memory_room import MemoryRoom, require_memory
from tierkv.node.socket_folder import claim_inline_folder, claim_socket_folder
from tierkv.node.supervisor import run

FRONT_THAT_DIES_AT_THE_END = """
import sys
from tierkv.node import front
front.Front._drain = lambda self: sys.exit(9) if self._draining else None
sys.exit(front.main(sys.argv[1:]))
"""

FRONT_THAT_GOES_MAD_ONCE = """
import os, signal, socket, sys
from tierkv.node import front
if not os.path.exists({marker!r}):
    open({marker!r}, "w").close()
    socket.socket(fileno=int(sys.argv[1])).send({packet!r})
    signal.pause()
sys.exit(front.main(sys.argv[1:]))
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Callable[..., Settings]]:
    with tempfile.TemporaryDirectory(prefix="tkv") as short:  # the path of a socket may have 107 bytes only

        def settings(**given: object) -> Settings:
            small = {"host_bytes": "4MiB", "slab_bytes": "1MiB", "socket_dir": f"{short}/node", "lock_wait_seconds": 0}
            return Settings(**(small | given))  # type: ignore[arg-type]

        yield settings


class Story:
    """What a node says; when it is ready, `then` is done and the node stopped."""

    def __init__(self, then: Callable[[], None] = lambda: None, number: signal.Signals = signal.SIGTERM) -> None:
        self.lines: list[str] = []
        self._then = then
        self._number = number
        self._thread: threading.Thread | None = None

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith("ready"):
            self._thread = threading.Thread(target=self._go_on)
            self._thread.start()
        elif self._thread is not None:
            self._thread.join(30)

    def _go_on(self) -> None:
        try:
            self._then()
        finally:
            os.kill(os.getpid(), self._number)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks at a condition that has a deadline


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_from_ready_to_stopped(settings: Callable[..., Settings], number: signal.Signals) -> None:
    chosen = settings()
    story = Story(number=number)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert run(chosen, say=story) == 0
    assert story.lines == [
        f"ready: {chosen.socket_dir}",
        "stopped: flushed=0 dropped=0 (bytes, of 0 and 0 extents)",
    ]
    assert os.listdir(chosen.socket_dir) == ["LOCK"]
    lock_socket_directory(chosen.socket_dir).close()
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_node_with_a_data_directory_is_ready_when_it_has_recovered(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    story = Story()
    assert run(settings(data_dir=str(tmp_path / "data")), say=story) == 0
    assert (tmp_path / "data" / "FORMAT").is_file()
    assert story.lines[-1].startswith("stopped: flushed=0 dropped=0")
    lock_data_directory(tmp_path / "data", 0.0).close()


def test_a_data_directory_that_is_in_use_is_refused_before_anything_else(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    chosen = settings(data_dir=str(tmp_path / "data"))
    with lock_data_directory(tmp_path / "data", 0.0), pytest.raises(DataDirectoryInUse):
        run(chosen)
    assert os.listdir(tmp_path / "data") == ["LOCK"]
    assert not chosen.socket_dir.exists()


def test_an_endpoint_that_is_in_use_is_refused(settings: Callable[..., Settings]) -> None:
    chosen = settings()
    claim_socket_folder(chosen.socket_dir)
    with lock_socket_directory(chosen.socket_dir), pytest.raises(DataDirectoryInUse):
        run(chosen)


@pytest.mark.scenario("B142", then="and it is said before anything is started")
def test_memory_that_is_not_there_is_said_before_anything_is_started(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "require_memory", partial(require_memory, room=lambda: MemoryRoom(0, "x")))
    with pytest.raises(ConfigError, match="host_bytes: 4 MiB are needed"):
        run(settings())


def test_a_metrics_address_that_can_not_be_had_names_the_setting(settings: Callable[..., Settings]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="metrics_port"):
        run(settings(metrics_port=taken.getsockname()[1]))


def test_metrics_are_served_where_a_port_is_given(settings: Callable[..., Settings]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pages: list[bytes] = []

    def scrape() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while part := client.recv(65536):
                pages.append(part)

    assert run(settings(metrics_port=port), say=Story(scrape)) == 0
    page = b"".join(pages).decode()
    assert "tierkv_ready 1.0" in page
    assert 'tierkv_capacity_bytes{tier="host"} 4.194304e+06' in page


@pytest.mark.scenario("B166", then="a deleted session socket is noticed and made again")
def test_an_inline_directory_that_no_tenant_could_reach_is_refused_before_anything_is_made(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    chosen = settings(inline_users=str(os.geteuid()), inline_dir=tmp_path / "closed" / "i")
    with pytest.raises(ConfigError, match="inline_dir: others can't reach"):
        run(chosen)
    assert not list((tmp_path / "closed").iterdir())


def test_two_nodes_do_not_share_an_inline_directory(settings: Callable[..., Settings]) -> None:
    chosen = settings(inline_users=str(os.geteuid()))
    root = chosen.socket_dir.parent
    root.chmod(0o711)
    chosen = settings(inline_users=str(os.geteuid()), inline_dir=root / "i")
    claim_inline_folder(root / "i")
    with lock_socket_directory(root / "i"), pytest.raises(DataDirectoryInUse):
        run(chosen)


def test_a_session_socket_that_was_deleted_is_made_again(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_socket, "CHECK_SECONDS", 0.05)
    chosen = settings()
    path = chosen.socket_dir / "session.sock"

    def delete() -> None:
        path.unlink()
        wait_until(path.exists)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))

    assert run(chosen, say=Story(delete)) == 0


def test_fronts_that_never_get_ready_end_the_node(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation_module, "FRONT_MODULE", "tierkv.no_such_front")
    monkeypatch.setattr(supervisor_module, "GIVE_UP_AFTER", 2)
    with pytest.raises(TierkvError, match="the front does not start"):
        run(settings())


def test_a_front_that_dies_while_draining_leaves_the_loss_unknown(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dying_front.py").write_text(FRONT_THAT_DIES_AT_THE_END)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(incarnation_module, "FRONT_MODULE", "dying_front")
    story = Story()
    assert run(settings(), say=story) == IncompleteError.exit_code
    assert story.lines[-1].startswith("stopped: flushed=unknown dropped=unknown")


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"\x91" * 60_000, b"GET / HTTP/1.1", msgspec.msgpack.encode(HostLimit(num_bytes=2**60))],
    ids=["no type", "nested", "text", "what only a supervisor says"],
)
def test_a_front_that_talks_nonsense_is_replaced_and_takes_nobody_with_it(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packet: bytes
) -> None:
    mad = FRONT_THAT_GOES_MAD_ONCE.format(marker=str(tmp_path / "was mad"), packet=packet)
    (tmp_path / "mad_front.py").write_text(mad)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(incarnation_module, "FRONT_MODULE", "mad_front")
    story = Story()
    assert run(settings(), say=story) == 0
    assert (tmp_path / "was mad").exists()
    assert story.lines[-1].startswith("stopped: flushed=0 dropped=0")


@pytest.mark.scenario("B153", then="a supervisor whose loop raises ends the node: no process of it is left")
def test_an_exception_in_the_supervisors_loop_ends_the_node_with_all_its_processes(
    settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children: list[int] = []

    def fail(line: str) -> None:
        if line.startswith("ready"):
            children.extend(child.pid for child in psutil.Process().children())
            monkeypatch.setattr(supervisor_module.Supervisor, "_do_what_is_due", boom)

    def boom(self: object) -> None:
        raise RuntimeError("nobody foresaw this")

    with pytest.raises(RuntimeError, match="nobody foresaw"):
        run(settings(data_dir=str(tmp_path / "data")), say=fail)
    assert len(children) >= 2
    assert not [pid for pid in children if psutil.pid_exists(pid)]
