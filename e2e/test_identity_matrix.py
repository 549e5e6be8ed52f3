"""Each field of an identity changed alone is a miss, in memory and from disk; whatever is not in it changed is a hit.

The fields are read off the types: a new one without a row fails. The bytes of a block follow from its key, that is,
from the identity and the tokens, so that what is loaded proves whose it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e.harness import EngineProcess, Node, StampedEngine
from tests.identity_fields import BESIDE_THE_IDENTITY, others, paths_of
from tierkv.client import Group
from tierkv.client.groups import declare
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry
from tierkv.storage.manifest import fingerprint_adapter
from tierkv.torture.stamped import identity, stamps, tokens_of
from tierkv.wire.messages import UsageRow

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL
PROMPT = 1

BASE = identity()
OTHERS = others(BASE)
STORABLE = {path: other for path, other in OTHERS.items() if other.parallel.shards == 1 and not other.layout.codec}
"""Those of which one engine alone stores whole blocks, and stores them as they are: a lossy codec takes a verdict."""


@pytest.fixture
def node(node: Node) -> Node:
    node.start()
    return node


@contextmanager
def engine_as(node: Node, identity: Identity, **beside: Any) -> Iterator[StampedEngine]:
    with StampedEngine(node.endpoint) as engine:
        if identity.layout.codec:  # as one that knows no codec, and takes blocks as they lie in their slots
            record = declare(
                identity,
                rank=0,
                model_name="",
                adapter_name="",
                manifest=(),
                block_bytes=None,
                persistent=True,
                moves_coded=True,
            )
            engine.group = Group(record, engine.client)
        else:
            engine.group = engine.client.open(identity, **beside)
        yield engine


def blocks_of(identity: Identity) -> int:
    """How many blocks the same tokens make."""
    return BLOCKS * BASE.layout.block_tokens // identity.layout.block_tokens


def load(engine: StampedEngine, identity: Identity = BASE) -> tuple[int, int]:
    """(blocks leased, blocks that are this identity's own) of the tokens that every identity here uses."""
    count = blocks_of(identity)
    tokens = tokens_of(PROMPT, BLOCKS)
    keys = bytes(engine.group.keys(tokens))
    engine.keys = lambda prompt, blocks: keys  # type: ignore[method-assign]
    loaded = engine.load(PROMPT, count)
    assert not loaded.is_wrong, loaded
    return loaded.blocks, loaded.right


def store(engine: StampedEngine, identity: Identity = BASE) -> None:
    tokens = tokens_of(PROMPT, BLOCKS)
    keys = bytes(engine.group.keys(tokens))
    with engine.group.reserve(tokens) as ticket:
        ticket.copy_from(stamps(keys))
        assert ticket.commit().visible == blocks_of(identity)
    if identity.is_persistent:
        sealed = engine.group.seal(keys=keys, wait="flushed", deadline_seconds=20.0)
        assert sealed.flushed_blocks == blocks_of(identity)


def restart(node: Node) -> None:
    assert node.stop().exit_code == 0
    node.start()


# ---- what is in it


def test_every_field_is_tried() -> None:
    assert set(OTHERS) == set(paths_of(Identity))


@pytest.mark.scenario("B002", then="another layout of as many bytes is another group: it matches and leases nothing")
def test_a_field_that_differs_is_a_miss_in_memory_and_from_disk_and_each_keeps_its_own(node: Node) -> None:
    def expect_misses() -> None:
        for path, other in OTHERS.items():
            with engine_as(node, other) as engine:
                tokens = tokens_of(PROMPT, BLOCKS)
                assert engine.group.match(tokens).blocks == 0, path
                # Even the other group's own keys find nothing here.
                assert engine.group.match(keys=base_keys).blocks == 0, path
                with engine.group.acquire(keys=base_keys) as lease:
                    assert lease.blocks == 0, path
                assert load(engine, other) == (0, 0), path

    with engine_as(node, BASE) as engine:
        store(engine)
        base_keys = bytes(engine.group.keys(tokens_of(PROMPT, BLOCKS)))
    expect_misses()
    restart(node)
    expect_misses()
    for path, other in STORABLE.items():
        with engine_as(node, other) as engine:
            store(engine, other)
            assert load(engine, other) == (blocks_of(other), blocks_of(other)), path
    with engine_as(node, BASE) as engine:
        assert load(engine) == (BLOCKS, BLOCKS)
    restart(node)
    for path, other in STORABLE.items():
        with engine_as(node, other) as engine:
            expected = blocks_of(other) if other.is_persistent else 0
            assert load(engine, other) == (expected, expected), path
    with engine_as(node, BASE) as engine:
        assert load(engine) == (BLOCKS, BLOCKS)
    assert list((node.folder / "data" / "quarantine").iterdir()) == []


# ---- what is not

BESIDE: dict[str, Any] = {
    "model_name": "the same model by another name",
    "adapter_name": "an adapter's new name",
    "manifest": (ManifestEntry(name="/elsewhere/model.safetensors", size=7, digest="0f" * 32),),
    "persistent": False,
}


def test_everything_else_that_an_engine_says_is_tried() -> None:
    assert set(BESIDE) == BESIDE_THE_IDENTITY


@pytest.mark.parametrize("name", BESIDE)
def test_what_an_engine_says_beside_its_identity_does_not_matter(node: Node, name: str) -> None:
    with engine_as(node, BASE, model_name="stamped") as engine:
        store(engine)
    with engine_as(node, BASE, **{name: BESIDE[name]}) as engine:
        assert load(engine) == (BLOCKS, BLOCKS)
    restart(node)
    with engine_as(node, BASE, **{name: BESIDE[name]}) as engine:
        assert load(engine) == (BLOCKS, BLOCKS)


def move(node: Node) -> None:
    """The data directory to another place, and with it the path that sockets are found by."""
    assert node.data_dir is not None
    node.data_dir = node.data_dir.rename(node.folder / "moved")


def copy(node: Node) -> None:
    """Other inodes, and other times of everything."""
    assert node.data_dir is not None
    shutil.copytree(node.data_dir, node.folder / "copy", copy_function=shutil.copyfile)
    node.data_dir = node.folder / "copy"


def touch(node: Node) -> None:
    assert node.data_dir is not None
    for number, path in enumerate(sorted(node.data_dir.rglob("*"))):
        os.utime(path, (number, number))


def lose_the_index(node: Node) -> None:
    assert node.data_dir is not None
    shutil.rmtree(node.data_dir / "index")


SURROUNDINGS: dict[str, Callable[[Node], None]] = {
    "the path": move,
    "the inodes": copy,
    "the times of files": touch,
    "the index": lose_the_index,
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_where_the_files_lie_and_when_they_were_touched_does_not_matter(node: Node, what: str) -> None:
    with engine_as(node, BASE) as engine:
        store(engine)
    assert node.stop().exit_code == 0
    SURROUNDINGS[what](node)
    node.start()
    with engine_as(node, BASE) as engine:
        assert load(engine) == (BLOCKS, BLOCKS)


@pytest.mark.scenario(
    "B197",
    then="engines and nodes with other hash seeds, pids and host names find all of it, after a restart too",
)
def test_process_seed_and_host_do_not_matter(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, seed in enumerate(("0", "1", "4242")):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with EngineProcess(node.endpoint) as engine:
            if number == 0:
                assert engine.ask("store", prompt=PROMPT, blocks=10, flushed=True) == {"visible": 10, "flushed": 10}
            assert engine.ask("load", prompt=PROMPT, blocks=10)["right"] == 10
    assert node.stop().exit_code == 0
    node.start(wrapper=as_other_host())
    with EngineProcess(node.endpoint) as engine:
        assert engine.ask("load", prompt=PROMPT, blocks=10)["right"] == 10


def as_other_host() -> tuple[str, ...]:
    """Words before a command that give it another host name, where that is allowed."""
    may = subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode == 0
    return ("unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh") if may else ()


# ---- adapters, epochs, two models at once


def adapter(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 16, "r": 8}')
    return fingerprint_adapter(folder).fingerprint


@pytest.mark.scenario(
    "B007", then="the base model's blocks are a miss under A, A's under B; the base model's stay a hit"
)
@pytest.mark.scenario(
    "B008",
    then="other content under the same name is a miss; the same content under another name is a hit",
)
def test_adapters_are_told_apart_by_content_and_nothing_else(node: Node, tmp_path: Path) -> None:
    def with_adapter(fingerprint: str) -> Identity:
        return msgspec.structs.replace(BASE, adapter=fingerprint)

    one = with_adapter(adapter(tmp_path / "a", b"x" * 5_000))
    with engine_as(node, BASE) as engine:
        store(engine)
    with engine_as(node, one, adapter_name="a") as engine:
        assert load(engine) == (0, 0)
        store(engine)
    other = with_adapter(adapter(tmp_path / "b", b"y" * 5_000))
    with engine_as(node, other, adapter_name="b") as engine:
        assert load(engine) == (0, 0)
    replaced = with_adapter(adapter(tmp_path / "a", b"z" * 5_000))
    with engine_as(node, replaced, adapter_name="a") as engine:
        assert load(engine) == (0, 0)
    renamed = with_adapter(adapter(tmp_path / "seven", b"x" * 5_000))
    for _ in range(2):
        with engine_as(node, renamed, adapter_name="seven") as engine:
            assert load(engine) == (BLOCKS, BLOCKS)
        with engine_as(node, BASE) as engine:
            assert load(engine) == (BLOCKS, BLOCKS)
        restart(node)


@pytest.mark.scenario(
    "B011",
    then="new weights miss everything, a late store appears under the old ones alone, going back is a hit",
)
def test_weights_updated_in_a_running_engine_share_nothing_with_the_old_ones(node: Node) -> None:
    updated = msgspec.structs.replace(BASE, weights="", epoch="0f" * 16)
    with engine_as(node, BASE) as before, engine_as(node, updated) as after:
        store(before)
        tokens = tokens_of(2, BLOCKS)
        late = before.group.reserve(tokens)
        assert load(after) == (0, 0)
        late.copy_from(np.zeros((BLOCKS, before.block_bytes), np.uint8))
        assert late.commit().visible == BLOCKS
        assert after.group.match(tokens).blocks == 0
        store(after, updated)
        assert load(after, updated) == (BLOCKS, BLOCKS)
        assert not after.group.persistent
        assert before.group.match(tokens).blocks == BLOCKS
        assert load(before) == (BLOCKS, BLOCKS)
    restart(node)
    with engine_as(node, BASE) as before, engine_as(node, updated) as after:
        assert load(after, updated) == (0, 0)
        assert load(before) == (BLOCKS, BLOCKS)


@pytest.mark.scenario(
    "B012", then="in 200 interleaved rounds every load is its own, and the two rows of usage add up to the total"
)
def test_two_models_in_one_service_keep_their_books_apart(node: Node) -> None:
    windowed = msgspec.structs.replace(
        BASE, config="sliding window", layout=msgspec.structs.replace(BASE.layout, engine="windowed")
    )
    with engine_as(node, BASE) as plain, engine_as(node, windowed) as other:
        for number in range(200):
            prompt, blocks = number % 40, 5
            for engine in (plain, other) if number % 2 else (other, plain):
                assert engine.store(prompt, blocks) == blocks
                loaded = engine.load(prompt, blocks)
                assert (loaded.valid, loaded.right) == (blocks, blocks), loaded.wrong
        usage = plain.client.usage()
        rows: list[UsageRow] = [row for row in usage.rows if row.extents]
        host = next(tier for tier in usage.tiers if tier.tier == "host")
        assert len(rows) == 2
        assert [row.tokens for row in rows] == [40 * 5 * BASE.layout.block_tokens] * 2
        assert sum(row.host_bytes for row in rows) == host.used_bytes


# ---- names

NAMES = ["a/b", "a-SEP-b", "a_b", "a%2Fb", "A/B", "a/b.", "..", "../../x", "a\0b", "\u00e4\u4e2d\u6587", "n" * 300]


@pytest.mark.scenario("B205", then="tenants and models of any name have paths of their own and load their own blocks")
def test_no_two_names_share_a_path_or_a_block(node: Node) -> None:
    def named(name: str) -> Identity:
        return msgspec.structs.replace(BASE, salt=name)

    for name in NAMES:
        with engine_as(node, named(name), model_name=name, adapter_name=name) as engine:
            assert load(engine) == (0, 0), name
            store(engine)
    restart(node)
    for name in NAMES:
        with engine_as(node, named(name), model_name=name) as engine:
            assert load(engine) == (BLOCKS, BLOCKS), name
    assert node.data_dir is not None
    files = [path.relative_to(node.data_dir).as_posix() for path in node.data_dir.glob("models/**/*.kv")]
    assert len(files) == len(set(files)) == len(NAMES)
    assert all(re.fullmatch(r"models/[0-9a-f]{64}/[0-9a-f]{64}/0/[0-9a-f]{2}/[0-9a-f]{64}\.kv", name) for name in files)
