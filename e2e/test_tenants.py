"""Tenants that must not be trusted, on a real node: other users of the machine, who share nothing and harm nobody."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from e2e.harness import EngineProcess, Node, StampedEngine, environment, free_port, wait_until
from tierkv.client import connect_operator
from tierkv.wire.messages import BlockState
from tierkv.wire.session import NODE_SOCKET_NAME, SESSION_SOCKET_NAME

pytestmark = pytest.mark.timeout(180)

ALICE, BOB = 65_533, 65_532  # numbers, no users of the machine
BLOCKS = 12
GRANTED = [BlockState.GRANTED] * BLOCKS

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes of other users")


class Tenant(EngineProcess):
    """A stamped engine that runs as another user."""

    def __init__(self, endpoint: Path, uid: int, salt: str = "") -> None:
        arguments = [sys.executable, "-m", "e2e.tenant_process", str(uid), str(endpoint), *([salt] if salt else [])]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.pid = self._process.pid
        self._answer(90.0)


@pytest.fixture
def inline_dir() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="tkv"))
    root.chmod(0o711)
    yield root / "i"
    shutil.rmtree(root)


@pytest.fixture
def node(tmp_path: Path, inline_dir: Path) -> Iterator[Node]:
    users = f"{ALICE},{BOB}"
    with Node(tmp_path, inline_users=users, inline_dir=str(inline_dir), host_bytes="16MiB") as node:
        node.start()
        wait_gateway(node)
        yield node


def wait_gateway(node: Node, *, instead_of: int = 0) -> None:
    def is_running() -> bool:
        status = node.status()
        workers = status.workers if status else ()
        return any(one.name == "gateway" and one.state == "running" and one.pid != instead_of for one in workers)

    wait_until(is_running, "the gateway runs")


def wait_connected(tenant: EngineProcess) -> None:
    wait_until(lambda: tenant.ask("connected")["connected"], "the tenant is served again")


# ---- what is another's


@needs_root
@pytest.mark.scenario(
    "B229",
    then="in host memory, on NVMe and after a restart no other tenant hits, waits for, drops or is refused for it",
)
def test_no_tenant_sees_or_harms_what_another_stored_in_any_tier(node: Node, inline_dir: Path) -> None:
    owner = Tenant(inline_dir, ALICE, "s1")
    others: dict[str, EngineProcess] = {
        "other salt": Tenant(inline_dir, ALICE, "s2"),
        "no salt": Tenant(inline_dir, ALICE),
        "other user, same salt": Tenant(inline_dir, BOB, "s1"),
        "other user that names the salt in effect": Tenant(inline_dir, BOB, f"inline:{ALICE}:s1"),
    }
    try:
        with StampedEngine(node.endpoint, salt="s1") as trusted, StampedEngine(node.endpoint) as trusted_without:
            assert owner.ask("store", prompt=1, blocks=BLOCKS, flushed=True) == {"visible": BLOCKS, "flushed": BLOCKS}
            assert owner.ask("hold_ticket", name="writing", prompt=2, blocks=BLOCKS)["granted"] == BLOCKS

            def look(tier: str, host_blocks: int) -> None:
                found = owner.ask("host_blocks", prompt=1, blocks=BLOCKS)
                assert found == {"blocks": BLOCKS, "host_blocks": host_blocks}, tier
                for name, other in others.items():
                    require_miss(other, f"{name}, {tier}")
                for engine in (trusted, trusted_without):
                    assert engine.match(1, BLOCKS) == 0, tier
                assert owner.ask("host_blocks", prompt=1, blocks=BLOCKS)["blocks"] == BLOCKS, tier

            look("host memory", BLOCKS)
            for prompt in range(100, 100 + 60):  # more than host memory has room for
                trusted_without.store(prompt, 32)
            node.wait_status(lambda now: not now.dirty_extents, "nothing waits for the disk, so there is room")
            look("NVMe", 0)
        for other in others.values():
            assert other.ask("operate") == {"codes": ["not_allowed"] * 4}
        node.stop()
        node.start()
        for tenant in (owner, *others.values()):
            wait_connected(tenant)
        assert owner.ask("hold_ticket", name="again", prompt=2, blocks=BLOCKS)["granted"] == BLOCKS
        found = owner.ask("host_blocks", prompt=1, blocks=BLOCKS)
        assert found == {"blocks": BLOCKS, "host_blocks": 0}
        for name, other in others.items():
            require_miss(other, f"{name}, after a restart")
        loaded = owner.ask("load", prompt=1, blocks=BLOCKS)
        assert (loaded["valid"], loaded["right"]) == (BLOCKS, BLOCKS)
    finally:
        for tenant in (owner, *others.values()):
            tenant.kill()
    require_no_raw_salts(node)


def require_miss(tenant: EngineProcess, who: str) -> None:
    """By every verb, what is cached (prompt 1) and what is just being written (prompt 2) is told from nothing that
    nobody ever had (prompt 3)."""

    def answers(prompt: int) -> list[dict[str, object]]:
        verbs = ("host_blocks", "acquire", "seal", "reserve", "report_bad")
        return [tenant.ask(verb, prompt=prompt, blocks=BLOCKS) for verb in verbs]

    nothing = [
        {"blocks": 0, "host_blocks": 0},
        {"blocks": 0, "cached": 0, "reason": ""},
        {"blocks": 0, "flushed": 0, "reason": "not_found"},
        {"states": GRANTED},
        {"reason": ""},
    ]
    assert [answers(prompt) for prompt in (1, 2, 3)] == [nothing] * 3, who


def require_no_raw_salts(node: Node) -> None:
    assert f"inline:{ALICE}" not in node.log()


@needs_root
@pytest.mark.scenario(
    "B231", then="the user that the kernel names decides; who names another's salt misses, and no log holds a raw salt"
)
def test_two_users_of_one_salt_store_beside_each_other(node: Node, inline_dir: Path) -> None:
    one, other = Tenant(inline_dir, ALICE, "shared-secret"), Tenant(inline_dir, BOB, "shared-secret")
    try:
        for tenant in (one, other):
            assert tenant.ask("match", prompt=1, blocks=BLOCKS) == {"blocks": 0}
            assert tenant.ask("store", prompt=1, blocks=BLOCKS)["visible"] == BLOCKS
        for tenant in (one, other):
            loaded = tenant.ask("load", prompt=1, blocks=BLOCKS)
            assert (loaded["valid"], loaded["right"]) == (BLOCKS, BLOCKS)  # its own stamps, not the other's
    finally:
        one.kill()
        other.kill()
    assert "shared-secret" not in node.log()
    require_no_raw_salts(node)


@needs_root
def test_a_purge_of_one_users_salt_leaves_the_other_users(node: Node, inline_dir: Path) -> None:
    one, other = Tenant(inline_dir, ALICE, "s"), Tenant(inline_dir, BOB, "s")
    try:
        for tenant in (one, other):
            assert tenant.ask("store", prompt=1, blocks=BLOCKS, flushed=True)["flushed"] == BLOCKS
        assert one.ask("hold_ticket", name="t", prompt=2, blocks=BLOCKS)["granted"] == BLOCKS
        with connect_operator(node.endpoint) as operator:
            receipt = operator.purge(tenant=f"inline:{ALICE}:s")
            assert receipt.blocks == BLOCKS
            assert one.ask("match", prompt=1, blocks=BLOCKS) == {"blocks": 0}
            one.ask("fill", name="t")
            assert one.ask("commit", name="t")["visible"] == 0, "what was reserved before can't be published"
            assert other.ask("load", prompt=1, blocks=BLOCKS)["right"] == BLOCKS
    finally:
        one.kill()
        other.kill()


# ---- ends


@needs_root
def test_a_tenant_that_is_killed_in_mid_put_leaves_nothing_of_it(node: Node, inline_dir: Path) -> None:
    blocks = 256
    healthy, victim = Tenant(inline_dir, BOB), Tenant(inline_dir, ALICE)
    try:
        assert healthy.ask("store", prompt=1, blocks=BLOCKS)["visible"] == BLOCKS
        assert victim.ask("hold_ticket", name="t", prompt=3, blocks=blocks)["granted"] == blocks
        victim.ask("fill", name="t")
        victim.ask("hold_lease", name="l", prompt=1, blocks=BLOCKS)
        victim.send("commit", name="t")  # four MiB to put, piece by piece
        victim.kill()
        node.wait_status(lambda now: not now.leases and not now.tickets, "what it held is free")
        loaded = healthy.ask("load", prompt=1, blocks=BLOCKS)
        assert (loaded["valid"], loaded["right"]) == (BLOCKS, BLOCKS)
        heir = Tenant(inline_dir, ALICE)
        found = heir.ask("load", prompt=3, blocks=blocks)
        assert found["blocks"] in (0, blocks), "all of a ticket or nothing"
        assert found["valid"] == found["right"] == found["blocks"]
        heir.kill()
    finally:
        healthy.kill()
        victim.kill()


@needs_root
def test_a_gateway_that_is_killed_is_replaced_and_its_tenants_go_on(node: Node, inline_dir: Path) -> None:
    with StampedEngine(node.endpoint) as trusted:
        trusted.store(1, BLOCKS)
        tenant = Tenant(inline_dir, ALICE)
        try:
            tenant.ask("store", prompt=1, blocks=BLOCKS)
            tenant.ask("hold_lease", name="l", prompt=1, blocks=BLOCKS)
            tenant.ask("hold_ticket", name="t", prompt=2, blocks=BLOCKS)
            node.wait_status(lambda now: (now.leases, now.tickets) == (1, 1), "the gateway holds both")
            killed = node.kill("gateway")
            node.wait_status(lambda now: not now.leases and not now.tickets, "the node has taken both back")
            assert tenant.ask("read_lease", name="l") == {"valid": 0, "right": 0}
            tenant.ask("fill", name="t")
            assert tenant.ask("commit", name="t")["visible"] == 0
            wait_gateway(node, instead_of=killed)
            wait_connected(tenant)
            loaded = tenant.ask("load", prompt=1, blocks=BLOCKS)
            assert (loaded["valid"], loaded["right"]) == (BLOCKS, BLOCKS)
            assert trusted.load(1, BLOCKS).right == BLOCKS
            status = node.wait_status(lambda now: now.state == "ready", "the node is well again")
            gateway = next(one for one in status.workers if one.name == "gateway")
            assert (gateway.restarts, gateway.problem) == (1, "killed by SIGKILL")
        finally:
            tenant.kill()


@needs_root
def test_a_front_that_is_killed_costs_tenants_a_miss_and_the_old_memory_is_free(node: Node, inline_dir: Path) -> None:
    tenant = Tenant(inline_dir, ALICE)
    try:
        tenant.ask("store", prompt=1, blocks=BLOCKS, flushed=True)
        tenant.ask("hold_lease", name="l", prompt=1, blocks=BLOCKS)
        node.kill("front")
        node.wait_ready()  # all of host memory is there: nobody holds on to the arena of before
        wait_connected(tenant)
        assert tenant.ask("read_lease", name="l") == {"valid": 0, "right": 0}
        wait_until(lambda: tenant.ask("match", prompt=1, blocks=BLOCKS)["blocks"] == BLOCKS, "it is matched again")
        loaded = tenant.ask("load", prompt=1, blocks=BLOCKS)
        assert (loaded["valid"], loaded["right"]) == (BLOCKS, BLOCKS)
    finally:
        tenant.kill()


def test_status_says_when_the_gateway_does_not_answer_and_the_node_ends_all_the_same(
    node: Node, inline_dir: Path
) -> None:
    with node.paused("gateway"):
        status = node.wait_status(lambda now: now.state == "degraded", "the silence is noticed")
        assert any("gateway" in problem and "silent" in problem for problem in status.problems)
    node.wait_status(lambda now: now.state == "ready", "it is heard again")
    assert node.stop(signal.SIGTERM).exit_code == 0
    assert [path.name for path in inline_dir.iterdir()] == ["LOCK"]


# ---- who comes in


def as_user(uid: int, act: Callable[[], int]) -> int:
    """What `act` returns in a forked child that has become another user."""
    child = os.fork()
    if not child:
        code = 99
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def errno_of_connecting(path: Path, kind: socket.SocketKind) -> int:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        try:
            sock.connect(os.fspath(path))
        except OSError as error:
            return error.errno or 98
        return 0


@needs_root
@pytest.mark.scenario(
    "B234",
    then="by default nothing listens but Unix sockets in a directory of mode 0700, which a stranger can't enter",
)
def test_by_default_nobody_else_reaches_a_node(tmp_path: Path) -> None:
    with Node(tmp_path, metrics_port=str(free_port())) as node:
        node.start()
        names = ("supervisor", "front", "storage")
        listening = {
            connection.laddr.ip
            for name in names
            for connection in psutil.Process(node.pid(name)).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}, "the metrics that were asked for, and nothing else"
        assert node.endpoint.stat().st_mode & 0o777 == 0o700
        node.endpoint.parent.chmod(0o711)  # the test's own folder
        sockets = {SESSION_SOCKET_NAME: socket.SOCK_SEQPACKET, NODE_SOCKET_NAME: socket.SOCK_STREAM}
        assert {path.name for path in node.sockets()} == set(sockets)
        for name, kind in sockets.items():
            assert as_user(ALICE, lambda name=name, kind=kind: errno_of_connecting(node.endpoint / name, kind)) == 13  # type: ignore[misc]


@needs_root
def test_a_user_that_was_not_named_gets_neither_a_session_nor_a_connection(node: Node, inline_dir: Path) -> None:
    def knock() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(os.fspath(inline_dir / SESSION_SOCKET_NAME))
            return 13 if b"wrong_user" in sock.recv(65_536) else 0

    def talk() -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(os.fspath(inline_dir / f"{ALICE}.sock"))
            try:
                return 13 if sock.recv(1) == b"" else 0  # a ZeroMQ that would talk to us says so first
            except ConnectionResetError:
                return 13

    def list_directory() -> int:
        try:
            os.listdir(inline_dir)
        except PermissionError:
            return 13
        return 0

    for act in (knock, talk, list_directory):
        assert as_user(12_345, act) == 13
    assert as_user(BOB, talk) == 13  # named, but this is another user's socket
    assert as_user(ALICE, talk) == 0
