"""Files that are smaller without loss, with whole nodes: the same bytes from less disk, whoever dies, and what is
counted are the bytes that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from e2e.harness import Node, data_of
from e2e.test_cli import answer, extent_files, flip_a_byte, tierkv
from e2e.test_disk_tier import counter, disk_files, disk_node, tier
from tests.storage.samples import numbers
from tierkv.client import Client, Group, connect
from tierkv.storage.format import decode_header, decode_prefix
from tierkv.torture.stamped import identity, tokens_of

pytestmark = pytest.mark.timeout(240)

BLOCKS = 4
PROMPTS = 40
BLOCK_BYTES = 48 * 1024


class Engine:
    """One whose blocks are numbers in bfloat16, other ones for each block of each prompt."""

    def __init__(self, node: Node) -> None:
        self.client: Client = connect(node.endpoint, timeout_seconds=5.0)
        plain = identity(block_bytes=BLOCK_BYTES)
        layout = msgspec.structs.replace(plain.layout, dtype="bfloat16", engine="numbers")
        self.group: Group = self.client.open(msgspec.structs.replace(plain, layout=layout), model_name="numbers")

    def blocks_of(self, prompt: int) -> np.ndarray:
        rows = [np.frombuffer(numbers(f"{prompt} {index}", BLOCK_BYTES), np.uint8) for index in range(BLOCKS)]
        return np.stack(rows)

    def store_flushed(self, prompt: int) -> None:
        tokens = tokens_of(prompt, BLOCKS)
        with self.group.reserve(tokens, deadline_seconds=20.0) as ticket:
            ticket.copy_from(self.blocks_of(prompt))
            ticket.commit()
        sealed = self.group.seal(keys=bytes(self.group.keys(tokens)), wait="flushed", deadline_seconds=30.0)
        assert sealed.flushed_blocks == BLOCKS, sealed

    def load(self, prompt: int) -> tuple[int, int]:
        """Right blocks, and those of them that came from the disk tier. A wrong one fails."""
        tokens = tokens_of(prompt, BLOCKS)
        with self.group.acquire(keys=bytes(self.group.keys(tokens)), deadline_seconds=20.0) as lease:
            found = np.zeros((lease.blocks, BLOCK_BYTES), np.uint8)
            valid = lease.copy_into(found)
            assert np.array_equal(found[:valid], self.blocks_of(prompt)[:valid]), f"prompt {prompt}"
            return valid, lease.disk_blocks

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


SMALL = {"host_bytes": "4MiB", "slab_bytes": "1MiB", "extent_bytes": "256KiB", "prefill_tokens_per_second": "10"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, **SMALL, nvme_codec="zstd") as node:
        yield node


def test_a_node_that_compresses_gives_back_the_same_bytes_from_less_disk(node: Node) -> None:
    node.start()
    with Engine(node) as engine:
        for prompt in range(PROMPTS):
            engine.store_flushed(prompt)
    files = extent_files(node)
    size = sum(path.stat().st_size for path in files)
    assert len(files) == PROMPTS
    assert size < 0.8 * PROMPTS * BLOCKS * BLOCK_BYTES
    used = node.wait_status(lambda status: tier(status, "nvme").reserved_bytes == 0, "nothing is being written")
    assert tier(used, "nvme").used_bytes == size
    node.kill("supervisor")
    node.start()
    with Engine(node) as engine:
        assert [engine.load(prompt)[0] for prompt in range(PROMPTS)] == [BLOCKS] * PROMPTS
    told = node.wait_status(lambda status: status.state == "ready", "nothing is wrong with it")
    assert tier(told, "nvme").used_bytes == size
    assert answer(node, "du")["total"]["nvme_bytes"] == size
    assert answer(node, "audit")["nvme_bytes"] == size
    assert node.stop().exit_code == 0


def test_what_is_damaged_is_a_miss_and_goes_to_quarantine(node: Node) -> None:
    node.start()
    with Engine(node) as engine:
        engine.store_flushed(1)
        engine.store_flushed(2)
    assert node.stop().exit_code == 0
    flip_a_byte(extent_files(node)[0])
    node.start()
    with Engine(node) as engine:
        loaded = [engine.load(prompt)[0] for prompt in (1, 2)]
    assert sorted(loaded)[-1] == BLOCKS
    assert sorted(loaded)[0] < BLOCKS
    assert len(list((data_of(node) / "quarantine").iterdir())) == 1


def test_a_node_reads_what_another_setting_has_written(tmp_path: Path) -> None:
    for number, codec in enumerate(("raw", "zstd", "raw")):
        with Node(tmp_path, **SMALL, nvme_codec=codec) as node:
            node.start()
            with Engine(node) as engine:
                engine.store_flushed(number)
                assert [engine.load(prompt)[0] for prompt in range(number + 1)] == [BLOCKS] * (number + 1)
            assert node.stop().exit_code == 0
            versions = [decode_prefix(path.read_bytes()).version for path in extent_files(node)]
    assert sorted(versions) == [1, 1, 2]
    offline = tierkv("verify", "--json", f"--data-dir={tmp_path / 'data'}")
    assert offline.returncode == 0, offline.stdout + offline.stderr


@pytest.mark.parametrize(("above", "below"), [("raw", "zstd"), ("zstd", "raw")])
def test_what_leaves_nvme_is_written_anew_in_the_codec_of_the_disk_tier(tmp_path: Path, above: str, below: str) -> None:
    with disk_node(tmp_path / "one", **SMALL, nvme_bytes="4MiB", nvme_codec=above, disk_codec=below) as node:
        node.start()
        with Engine(node) as engine:
            for prompt in range(PROMPTS):
                engine.store_flushed(prompt)
            status = node.wait_status(
                lambda status: (
                    status.counters.get("demoted_extents", 0) >= 3 and tier(status, "disk").reserved_bytes == 0
                ),
                "extents are in the disk tier",
            )
            files = disk_files(node.folder / "disk")
            codecs = {decode_header(path.read_bytes()).codec for path in files}
            assert codecs == {"planes2+zstd" if below == "zstd" else ""}
            assert tier(status, "disk").used_bytes > 0
            from_disk = 0
            for prompt in range(PROMPTS):
                from_disk += engine.load(prompt)[1]
            assert from_disk > 0
        node.kill("supervisor")
        node.start()
        node.wait_status(lambda status: tier(status, "disk").used_bytes > 0, "it knows what is on disk")
        with Engine(node) as engine:
            for prompt in range(PROMPTS):
                engine.load(prompt)
        assert counter(node, "damaged_extents") == 0
        answer(node, "audit")
        assert node.stop().exit_code == 0
