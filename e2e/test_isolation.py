"""Tenants share nothing without a salt in common, nobody from outside gets in, and nothing that isn't ours is opened as
code, followed, changed or deleted."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest
from blake3 import blake3

from e2e.harness import Node, StampedEngine, data_of, environment, free_port, wait_until
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError
from tierkv.storage.directory import FOLDERS
from tierkv.torture.stamped import identity, stamps, tokens_of

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL
SALTS = ("tenant-one", "tenant-two", "")


@pytest.fixture
def node(node: Node) -> Node:
    node.start()
    return node


def tierkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierkv_cli.main", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment())


# ---- tenants


def expect_nothing_of(owner: StampedEngine, other: StampedEngine, prompt: int) -> None:
    """`other` tries every verb on what `owner` has, with its own keys and with the owner's, and gets nothing."""
    theirs = owner.keys(prompt, BLOCKS)
    tokens = tokens_of(prompt, BLOCKS)
    assert other.match(prompt, BLOCKS) == 0
    assert other.load(prompt, BLOCKS).blocks == 0
    assert other.group.match(keys=theirs).blocks == 0
    with other.group.acquire(keys=theirs) as lease:
        assert lease.blocks == 0
    sealed = other.group.seal(keys=theirs, wait="flushed", deadline_seconds=5.0)
    assert (sealed.blocks, sealed.flushed_blocks) == (0, 0)
    other.group.report_bad(theirs, 0)
    with other.group.reserve(tokens, keys=theirs) as ticket:
        ticket.copy_from(stamps(theirs)[: len(ticket.granted)])
        assert ticket.commit().reason is Reason.KEY_MISMATCH
    assert other.group.match(keys=theirs).blocks == 0
    loaded = owner.load(prompt, BLOCKS)
    assert (loaded.valid, loaded.right) == (BLOCKS, BLOCKS), "what the other did has changed nothing of the owner's"


@pytest.mark.scenario(
    "B229", then="for each pair of three tenants every verb finds nothing and changes nothing, in memory and from disk"
)
def test_tenants_find_and_touch_nothing_of_each_other(node: Node) -> None:
    def try_all() -> None:
        engines = {salt: StampedEngine(node.endpoint, salt=salt) for salt in SALTS}
        try:
            for number, (salt, owner) in enumerate(engines.items(), 1):
                for other in engines.values():
                    if other is not owner:
                        expect_nothing_of(owner, other, number)
                assert owner.load(number, BLOCKS).right == BLOCKS, salt
        finally:
            for engine in engines.values():
                engine.close()

    for number, salt in enumerate(SALTS, 1):
        with StampedEngine(node.endpoint, salt=salt) as engine:
            engine.store_flushed(number, BLOCKS)
    try_all()
    node.stop()
    node.start()
    try_all()
    node.stop()
    node.start()
    purged = tierkv("purge", "--tenant", "tenant-two", "--yes", "--endpoint", str(node.endpoint))
    assert purged.returncode == 0, purged.stderr
    for number, salt in enumerate(SALTS, 1):
        with StampedEngine(node.endpoint, salt=salt) as engine:
            assert engine.load(number, BLOCKS).nvme_blocks == (0 if salt == "tenant-two" else BLOCKS)


@pytest.mark.scenario("B229", then="reports, metrics and logs know a tenant by eight digits of its salt's digest")
def test_no_report_log_or_metric_has_a_salt(tmp_path: Path) -> None:
    salt = "s3cr3t-salt-of-a-tenant"
    port = free_port()
    with Node(tmp_path, log_level="debug", metrics_port=str(port)) as node:
        node.start()
        with StampedEngine(node.endpoint, salt=salt) as engine:
            engine.store_flushed(1, BLOCKS)
            engine.group.report_bad(engine.keys(1, BLOCKS), 2)
            engine.store_flushed(1, BLOCKS)
            where = ("--endpoint", str(node.endpoint))
            commands = (
                ("status",),
                ("status", "--json"),
                ("du", "--by", "group"),
                ("du", "--by", "group", "--json"),
                ("du", "--by", "tenant"),
                ("purge", "--tenant", salt, "--dry-run"),
                ("purge", "--tenant", "another tenant's s3cr3t", "--yes"),
            )
            told = [tierkv(*command, *where) for command in commands]
            assert [done.returncode for done in told] == [0] * len(told)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
                metrics = reply.read().decode()
        ended = node.stop()
        everything = [done.stdout + done.stderr for done in told] + [metrics, ended.output, node.log()]
        assert not [text for text in everything if "s3cr3t" in text]
        assert blake3(salt.encode()).hexdigest()[:8] in told[4].stdout
        holding = [path for path in data_of(node).rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()]
        assert [path.name for path in holding] == ["identity.json"], "the identity itself, for its owner's eyes only"
        assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600


# ---- from outside


@pytest.mark.scenario("B234", then="nothing listens but private Unix sockets, and metrics on loopback where asked for")
@pytest.mark.parametrize("with_metrics", [False, True])
def test_nothing_listens_but_private_unix_sockets_and_metrics_on_loopback(tmp_path: Path, with_metrics: bool) -> None:
    port = free_port()
    previous = os.umask(0)
    try:
        with Node(tmp_path, metrics_port=str(port) if with_metrics else None) as node:
            node.start()
            with StampedEngine(node.endpoint) as engine:
                engine.store_flushed(1, BLOCKS)
            listening = [
                one.laddr
                for name in ("supervisor", "front", "storage")
                for one in psutil.Process(node.pid(name)).net_connections("inet")
            ]
            assert [(one.ip, one.port) for one in listening] == ([("127.0.0.1", port)] if with_metrics else [])
            sockets = node.sockets()
            assert len(sockets) == 2
            assert {stat.S_IMODE(path.parent.stat().st_mode) for path in sockets} == {0o700}
            assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets} == {0}
            node.stop()
            paths = [data_of(node), *data_of(node).rglob("*")]
            modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in paths}
            assert modes == {(True, 0o700), (False, 0o600)}
    finally:
        os.umask(previous)


# ---- what isn't ours


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.canary), "w")


def digests_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.scenario("B235", then="links are not followed, pickles not opened, and what they lead to is as it was")
def test_links_out_of_the_directory_and_pickles_in_it_harm_nobody(node: Node, tmp_path: Path) -> None:
    """Under the names of extents and of all our small files; then everything that reads or removes is done."""
    outside, canary = tmp_path / "outside", tmp_path / "canary"
    (outside / "folder").mkdir(parents=True)
    bomb = pickle.dumps(Bomb(canary))
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(8):
            engine.store_flushed(prompt, BLOCKS)
    node.stop()
    files = sorted(data_of(node).glob("models/*/*/0/*/*.kv"))
    for number, name in enumerate(("file", "hard", "folder/inside.kv")):
        (outside / name).write_bytes(files[number].read_bytes() if number else b"somebody's\n" * 1_000)
    before = digests_of(outside)
    files[0].unlink()
    files[0].symlink_to(outside / "file")
    files[1].unlink()
    os.link(outside / "hard", files[1])
    shutil.rmtree(files[2].parent)
    files[2].parent.symlink_to(outside / "folder")
    files[3].write_bytes(bomb)
    files[4].unlink()
    files[4].symlink_to("/etc/passwd")
    for folder in ("tmp", "quarantine", "digests"):
        (data_of(node) / folder).mkdir(exist_ok=True)
        (data_of(node) / folder / "link").symlink_to(outside / "file")
        (data_of(node) / folder / "bomb").write_bytes(bomb)
    (data_of(node) / "index" / "data.mdb").write_bytes(bomb)
    (node.folder / "data" / "models" / "model.json").write_bytes(bomb)
    next(data_of(node).glob("models/*/model.json")).write_bytes(bomb)
    node.start()
    where = ("--endpoint", str(node.endpoint))
    with StampedEngine(node.endpoint) as engine:
        rights = [engine.load(prompt, BLOCKS) for prompt in range(8)]
        assert all(loaded.right == loaded.valid for loaded in rights)
        assert sum(loaded.right == BLOCKS for loaded in rights) >= 3
        assert tierkv("verify", "--repair", *where).returncode in (0, 4)
        assert tierkv("warmup", *where).returncode in (0, 4)
        for prompt in range(8):
            engine.group.report_bad(engine.keys(prompt, BLOCKS), 0)
            engine.store(prompt, BLOCKS)
    assert node.stop().exit_code == 0
    assert digests_of(outside) == before
    assert not canary.exists()


@pytest.mark.scenario("B235", then="a name from outside never becomes a path: as fingerprint it is refused")
def test_no_name_becomes_a_path(node: Node, tmp_path: Path) -> None:
    with StampedEngine(node.endpoint) as engine:
        for name in ("../x", "/etc/x", "a/../../x", "a\0b", "..", "", "CON", "n" * 4_000):
            with pytest.raises(ConfigError, match=r"identity\.weights") as refused:
                engine.client.open(msgspec.structs.replace(identity(), weights=name))
            assert len(str(refused.value)) < 300
            named = msgspec.structs.replace(identity(), adapter=name, salt=name, config=name or "none")
            engine.group = engine.client.open(named, model_name=name, adapter_name=name)
            engine.store_flushed(1, BLOCKS)
            assert engine.load(1, BLOCKS).right == BLOCKS
    node.stop()
    made = [path.relative_to(data_of(node)).parts for path in data_of(node).rglob("*")]
    assert {parts[0] for parts in made} <= {"LOCK", "FORMAT", *FOLDERS}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "node.log"]


@pytest.mark.scenario("B236", then="a home-like folder is refused with 2; nothing in it is made, changed or deleted")
def test_a_home_like_directory_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    home = tmp_path / "home"
    plant(home)
    before, names = digests_of(home), sorted(path.name for path in home.iterdir())
    with Node(tmp_path) as node:
        node.data_dir = home
        node.start(wait_ready=False)
        assert node.wait_ended().exit_code == 2
        assert str(home) in node.log().splitlines()[-1]
    assert digests_of(home) == before
    assert sorted(path.name for path in home.iterdir()) == names


@pytest.mark.scenario("B236", then="foreign files in a directory of ours are left, through evictions and repairs")
def test_foreign_files_in_a_data_directory_are_left_alone(tmp_path: Path) -> None:
    with Node(tmp_path, nvme_bytes="2MiB") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(0, BLOCKS)
        node.stop()
        shelf = next(data_of(node).glob("models/*/*/0/*"))
        mine = {}
        for folder in (data_of(node), data_of(node) / "models", shelf, shelf.parent, data_of(node) / "quarantine"):
            plant(folder / "mine" if folder != shelf else folder)
            mine |= {str(folder / name): digest for name, digest in digests_of(folder).items() if "mine" in name}
        assert len(mine) >= 100
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in range(1, 40):  # far more than there is room for
                engine.store(prompt, BLOCKS)
                engine.seal(prompt, BLOCKS)
            assert tierkv("verify", "--repair", "--endpoint", str(node.endpoint)).returncode == 0
        node.kill("supervisor")
        node.start()
        wait_until(lambda: "foreign" in node.log(), "it says what it found")
        node.stop()
        now = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in mine}
        assert now == mine


def plant(folder: Path) -> None:
    """Files of somebody's own, and a repository."""
    for number in range(25):
        path = folder / f"mine-{number % 5}" / f"mine {number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"something of mine, {number}\n" * 100)
    for name in ("HEAD", "objects/aa/" + "b" * 38, "refs/heads/main"):
        path = folder / "mine.git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("ref\n")
