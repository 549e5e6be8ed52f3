"""Who comes and goes, politely or not, leaves nothing behind, takes nothing along and changes nothing of others."""

from __future__ import annotations

import hashlib
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from e2e.harness import EngineProcess, Node, StampedEngine, environment, wait_until
from tierkv.torture.barriers import FOLDER, Barriers
from tierkv.torture.stamped import Loaded
from tierkv.wire.socket_directory import default_socket_dir

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL


def census(node: Node) -> dict[str, tuple[int, int]]:
    """Of each process: open descriptors, and bytes of arenas that are mapped."""
    found = {}
    for name in ("supervisor", "front", "storage"):
        pid = node.pid(name)
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        assert not any("/dev/shm/" in line for line in maps), "memory that has a name can be left behind"
        ranges = [line.split()[0].split("-") for line in maps if "memfd:" in line]
        found[name] = (node.descriptors(name), sum(int(end, 16) - int(start, 16) for start, end in ranges))
    return found


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file below, with its time and content. What a running node removes meanwhile is not there."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            content = hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path.relative_to(folder))] = (status.st_ino, status.st_mtime_ns, content)
    return found


# ---- engines


@pytest.mark.scenario("B138", then="after a hundred killed engines descriptors and mapped bytes are what they were")
def test_a_hundred_killed_engines_leave_nothing(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
    node.wait_status(lambda told: told.sessions == 1, "nobody else is there")
    before = census(node)
    command = [sys.executable, "-m", "e2e.mortal_engines", str(node.endpoint)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as engines:
        assert engines.stdin is not None
        assert engines.stdout is not None
        alive: list[int] = []
        for number in range(100):
            engines.stdin.write("come\n")
            engines.stdin.flush()
            pid, leased, granted = map(int, engines.stdout.readline().split())
            assert (leased, granted) == (4, 4), f"engine {number} finds the room that the dead have left"
            alive.append(pid)
            if len(alive) > 3:
                os.kill(alive.pop(0), signal.SIGKILL)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        engines.stdin.close()
    told = node.wait_status(
        lambda told: (told.sessions, told.leases, told.tickets) == (1, 0, 0), "what the dead held is free"
    )
    assert told.state == "ready"
    wait_until(lambda: all(now <= then for now, then in _pairs(before, census(node))), f"it is again {before}")


def _pairs(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for name, (descriptors, mapped) in before.items():
        yield now[name][0], descriptors + 2  # whoever asks for the status has a connection
        yield now[name][1], mapped


EXITS = {
    "returns": "",
    "raises": "1 / 0",
    "is killed": "os.kill(os.getpid(), 9)",
    "leaves at once": "os._exit(3)",
}


@pytest.mark.scenario("B141", then="however an attached process ends, memory stays, others read on, and nobody warns")
def test_attaching_is_not_owning(node: Node) -> None:
    node.start()
    program = (
        "import os, sys\n"
        "from tierkv.torture.stamped import StampedEngine\n"
        "engine = StampedEngine(sys.argv[1])\n"
        "assert engine.load(1, 8).right == 8\n"
    )
    with StampedEngine(node.endpoint) as engine:
        engine.store(1, BLOCKS)
        with engine.group.acquire(keys=engine.keys(1, BLOCKS)) as lease:
            for how, last in EXITS.items():
                done = subprocess.run(
                    [sys.executable, "-c", program + last, str(node.endpoint)],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    env=environment(),
                )
                assert "AssertionError" not in done.stderr, how
                assert "resource_tracker" not in done.stderr, how
                assert lease.count_valid() == BLOCKS
                assert engine.load(1, BLOCKS).right == BLOCKS
        with StampedEngine(node.endpoint) as late:
            assert late.load(1, BLOCKS).right == BLOCKS


@pytest.mark.scenario(
    "B162", then="a stopped engine with ten thousand replies due loses them and its session, and comes back by itself"
)
def test_a_stopped_engine_that_asked_too_much_is_cut_off_and_comes_back(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as other, EngineProcess(node.endpoint) as greedy:
        other.store(1, BLOCKS)
        memory = psutil.Process(node.pid("front")).memory_info().rss
        greedy.ask("flood", count=10_000)
        greedy.pause()
        told = node.wait_status(lambda told: told.counters["slow_sessions"] == 1, "its session has ended")
        assert told.counters["dropped_replies"] > 0
        for _ in range(200):
            assert other.load(1, BLOCKS, deadline_seconds=20.0).right == BLOCKS
        assert psutil.Process(node.pid("front")).memory_info().rss - memory < 64 * 2**20
        greedy.resume()
        loaded = greedy.ask("load", prompt=1, blocks=BLOCKS, deadline_seconds=20.0)
        assert (loaded["right"], loaded["reason"]) == (BLOCKS, "")
        node.wait_status(lambda told: told.leases == 0, "nothing is left of it")
    assert node.log().count("slow_consumer") == 1


# ---- the node


@pytest.mark.scenario("B143", then="a node whose terminal is closed leaves no process, no socket and no lock")
def test_a_terminal_that_is_closed_ends_its_node(node: Node, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, node.command(), environment())
    try:
        wait_until(lambda: node.status() is not None, "it answers")
        children = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert len(children) == 3
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    wait_until(lambda: not any(child.is_running() for child in children), "its processes are gone")
    assert node.sockets() == []
    node.start()
    assert node.stop().exit_code == 0


def test_whatever_a_node_makes_is_its_users_alone(node: Node, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(3):
                engine.store_flushed(prompt, BLOCKS)
            engine.group.report_bad(engine.keys(2, BLOCKS), 0)
            assert node.data_dir is not None
            modes: dict[str, int] = {}
            for root in (node.data_dir, node.endpoint):
                for folder, _, names in os.walk(root):
                    for path in (folder, *(os.path.join(folder, name) for name in names)):
                        with suppress(FileNotFoundError):  # gone meanwhile, as what is set aside is
                            modes[path] = os.stat(path).st_mode
            assert len(modes) > 15
            open_to_others = {
                path: oct(mode & 0o777)
                for path, mode in modes.items()
                if mode & 0o777 != (0o700 if stat.S_ISDIR(mode) else 0o600)
            }
            assert open_to_others == {}
    finally:
        os.umask(before)


@pytest.mark.scenario(
    "B260", then="a second start takes nothing from a writer that is held, and what it writes is published"
)
@pytest.mark.scenario("B261", then="beside a held store a loser changes no file and exits with 3")
def test_losers_change_nothing_while_a_store_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = Barriers(tmp_path / "barriers")
    monkeypatch.setenv(FOLDER, str(tmp_path / "barriers"))
    with Node(tmp_path, lock_wait_seconds="0", replaced=("files=e2e.held_files:HeldFiles",)) as node:
        node.start()
        assert node.data_dir is not None
        with StampedEngine(node.endpoint) as engine:
            barriers.arm("temp_written")
            assert engine.store(1, BLOCKS) == BLOCKS
            wait_until(lambda: barriers.is_reached("temp_written"), "a store is held")
            tmp = node.data_dir / "tmp"
            wait_until(lambda: len(list(tmp.iterdir())) == 1, "its file alone is being written")
            before = snapshot(node.data_dir)
            losers = [node.spawn(log=tmp_path / f"loser {number}.log") for number in range(3)]
            for loser in losers:
                loser.communicate(timeout=60)
            assert [loser.returncode for loser in losers] == [3, 3, 3]
            after = snapshot(node.data_dir)
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            of_the_node = ("index", "journal", "starts", "tmp")  # what it goes on to write by itself
            assert {name for name in changed if not name.startswith(of_the_node)} == set()
            barriers.clear()
            assert engine.seal(1, BLOCKS).flushed_blocks == BLOCKS
            assert engine.load(1, BLOCKS).right == BLOCKS


@pytest.mark.scenario("B262", then="without a node engines miss, warmup and du are exit code 5, and no file is changed")
def test_without_a_node_nobody_touches_its_files(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store_flushed(1, BLOCKS)
    node.stop()
    assert node.data_dir is not None
    before = snapshot(node.data_dir)
    with ExitStack() as owned:
        engines = [owned.enter_context(StampedEngine(node.endpoint)) for _ in range(8)]
        for engine in engines:
            assert (engine.match(1, BLOCKS), engine.store(2, BLOCKS)) == (0, 0)
        for command in ("warmup", "du"):
            tool = [sys.executable, "-m", "tierkv_cli.main", command, "--endpoint", str(node.endpoint)]
            done = subprocess.run(tool, check=False, capture_output=True, timeout=60, env=environment())
            assert done.returncode == 5
        assert snapshot(node.data_dir) == before
        node.start()
        for engine in engines:
            wait_until(lambda engine=engine: engine.match(1, BLOCKS) == BLOCKS, "it has found the node")  # type: ignore[misc]
            assert engine.load(1, BLOCKS).right == BLOCKS


@pytest.mark.scenario("B167", then="two nodes of one user with default sockets serve each their own engines alone")
def test_two_nodes_with_default_settings_do_not_meet(tmp_path: Path, runtime_dir: Path) -> None:
    places = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as owned:
        for place in places:
            log = owned.enter_context((tmp_path / f"{place.name}.log").open("w"))
            options = [
                "--data-dir",
                str(place),
                "--host-bytes",
                "16MiB",
                "--slab-bytes",
                "1MiB",
                "--nvme-bytes",
                "64MiB",
            ]
            process = owned.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tierkv_cli.main", "serve", *options],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(),
                )
            )
            owned.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: "), (tmp_path / f"{place.name}.log").read_text()
        assert len({default_socket_dir(place) for place in places}) == 2
        for number, place in enumerate(places):
            with StampedEngine(default_socket_dir(place)) as engine:
                assert engine.match(7, BLOCKS) == 0, f"node {number} knows nothing of the other"
                engine.store_flushed(7, BLOCKS)
                assert engine.load(7, BLOCKS).right == BLOCKS


@pytest.mark.scenario("B170", then="an engine that comes behind a full queue of strangers is served in its turn")
def test_an_engine_behind_a_full_queue_of_strangers_is_served(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint) as engine:
        engine.store(1, BLOCKS)

    def load() -> Loaded:
        with StampedEngine(node.endpoint, timeout_seconds=60.0) as newcomer:
            return newcomer.load(1, BLOCKS, deadline_seconds=60.0)

    with ExitStack() as owned, ThreadPoolExecutor(1) as threads:
        with node.paused("supervisor"):
            with suppress(BlockingIOError):
                while True:  # until the queue is full
                    stranger = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    stranger.setblocking(False)
                    stranger.connect(str(node.endpoint / "session.sock"))
            loaded = threads.submit(load)
            wait_until(loaded.running, "it has set out")
        assert loaded.result(120.0).right == BLOCKS


@pytest.mark.scenario(
    "B170", then="half-open, silent and talking strangers on each socket harm nobody and keep no descriptor"
)
def test_a_thousand_strangers_on_each_socket_harm_nobody(node: Node) -> None:
    node.start()
    node.status()
    before = {name: node.descriptors(name) for name in ("supervisor", "front")}
    says: list[Callable[[socket.socket], object]] = [
        lambda peer: peer.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        lambda peer: peer.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
        lambda peer: peer.send(os.urandom(50_000)),
        lambda peer: peer.send(b"\xff"),  # half of a greeting
        lambda peer: peer.shutdown(socket.SHUT_WR),
        lambda peer: None,
    ]
    with StampedEngine(node.endpoint) as engine:
        engine.store(1, BLOCKS)
        for name, kind in (("session.sock", socket.SOCK_SEQPACKET), ("node.sock", socket.SOCK_STREAM)):
            with ExitStack() as owned:
                for number in range(1_000):
                    peer = owned.enter_context(socket.socket(socket.AF_UNIX, kind))
                    peer.connect(str(node.endpoint / name))  # waits for its turn: with a timeout it would not
                    peer.settimeout(20.0)
                    try:
                        says[number % len(says)](peer)
                    except OSError:
                        continue  # turned away already
                    if number % 100 == 0:
                        assert engine.load(1, BLOCKS, deadline_seconds=20.0).right == BLOCKS
                assert engine.load(1, BLOCKS, deadline_seconds=20.0).right == BLOCKS
                with StampedEngine(node.endpoint, timeout_seconds=20.0) as newcomer:
                    assert newcomer.load(1, BLOCKS, deadline_seconds=20.0).right == BLOCKS
    wait_until(
        lambda: all(node.descriptors(name) <= count + 2 for name, count in before.items()),
        f"descriptors are back at {before}",
    )
    told = node.status()
    assert told is not None
    assert told.workers[1].restarts == 0
    assert "Traceback" not in node.log()
