"""Real bytes through a whole node: an engine gets what was stored, layer by layer, or it gets less and is told."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.system_calls import FlippedBit, inject
from tests.node.whole_node import WholeNode
from tierkv.wire.messages import Abort, Commit

A = list(range(100, 108))  # four blocks of two tokens, one extent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[WholeNode]:
    with WholeNode(tmp_path / "data") as node:
        yield node


def is_payload(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """A read of one block's bytes: a piece is read again block by block where it failed."""
    views, offset = args[1], args[2]
    assert isinstance(views, list)
    return offset == 4096 + 2 * 4096 or (offset == 4096 and len(views) > 1)


@pytest.mark.scenario(
    "B013",
    then="the lease covers the two blocks before the one that could not be read, with the reason io_error; the pages "
    "behind them keep what they held, and one failed read is counted",
)
def test_an_io_error_in_the_third_block_leaves_two(node: WholeNode) -> None:
    node.store_flushed(A)
    node.restart()
    with inject(errno.EIO, "preadv", times=2, when=is_payload):
        loaded = node.load(A)
    assert (loaded.blocks, loaded.reason) == (2, "io_error")
    assert sum(node.kit.state.counts.failed_reads.values()) == 1
    again = node.load(A)
    assert (again.blocks, again.nvme_blocks, again.reason) == (4, 2, "")


@pytest.mark.scenario(
    "B016",
    then="a request after a failed load reads anew and is right, a hundred times over",
)
def test_a_request_after_a_failed_load_reads_again(node: WholeNode) -> None:
    node.store_flushed(A)
    random_numbers = random.Random(1)
    node.restart()
    for _ in range(100):
        with inject(errno.EIO, "preadv", nth=random_numbers.randrange(3), times=2):
            failed = node.load(A)
        assert failed.blocks < 4 or failed.reason == ""
        assert node.load(A).blocks == 4
        evict(node)


def evict(node: WholeNode) -> None:
    """Others take the host memory."""
    for number in range(4):
        node.kit.now += 1.0
        other = list(range(10_000 + 100 * number, 10_000 + 100 * number + 8))
        node.store_flushed(other)
        node.load(other)


@pytest.mark.scenario(
    "B019",
    then="blocks that an engine rejects are a miss for the next request, which stores them again, and a hit for the "
    "one after that; the file is in quarantine, alone, and nobody deletes anything by hand",
)
def test_what_an_engine_rejects_is_stored_again_and_kept_for_a_look(node: WholeNode) -> None:
    node.store_flushed(A)
    assert node.load(A).blocks == 4
    node.report_bad(A, 0)
    assert node.match(A) == 0
    node.settle()
    assert len(node.quarantined()) == 1
    assert node.store(A) == [0, 1, 2, 3]
    node.seal(A)
    node.settle()
    assert node.load(A).blocks == 4
    node.restart()
    assert node.load(A).blocks == 4
    assert len(node.quarantined()) == 1


@pytest.mark.scenario(
    "B020",
    then="the first load of a file that has vanished is empty with the reason not_found and the only one that looks "
    "for it: from then on it is a miss, and neither row nor bytes of it are left",
)
def test_a_file_that_vanished_fails_one_load(node: WholeNode) -> None:
    node.store_flushed(A)
    node.restart()
    assert node.match(A) == 4
    (path,) = node.files()
    path.unlink()
    assert node.load(A).reason == "not_found"
    for _ in range(5):
        assert node.match(A) == 0
        assert (node.load(A).blocks, node.load(A).reason) == (0, "")
    assert sum(node.kit.state.counts.failed_reads.values()) == 1
    node.settle()
    assert node.kit.state.tiers()[1].used_bytes == 0
    node.restart()
    assert (node.match(A), node.files()) == (0, [])


@pytest.mark.scenario(
    "B032",
    then="a page that comes wrong from the disk once fails its load with the reason checksum, is kept by no tier and "
    "put in quarantine; stored again it is right in every later load",
)
def test_a_block_that_came_wrong_from_disk_is_served_to_nobody(node: WholeNode) -> None:
    node.store_flushed(A)
    node.restart()
    with pytest.MonkeyPatch.context() as patch:
        flip = FlippedBit(patch, "preadv", at=4096 + 2 * 4096 + 17, times=2)  # a read that looks wrong is made twice
        loaded = node.load(A)
    assert flip.flipped == 2
    assert (loaded.blocks, loaded.reason) == (2, "checksum")
    assert node.match(A) == 2
    node.settle()
    assert len(node.quarantined()) == 1
    assert node.store(A) == [2, 3]
    for _ in range(2):
        assert node.load(A).blocks == 4
        node.seal(A)
        node.restart()
    assert node.load(A).blocks == 4


@pytest.mark.scenario(
    "B028",
    then="the caller guarantees that its pages are ready: nothing is read from the slots before the commit, and what "
    "is stored, in memory and on disk, is what they held then",
)
def test_what_is_in_the_slots_at_the_commit_is_what_is_stored(node: WholeNode) -> None:
    grant, reply = node.reserve(A)
    unfinished = node.stamps([token + 1_000 for token in A])
    node.write(reply, unfinished)
    while node.kit.service.has_idle_work:
        node.kit.service.do_idle_work(node.kit.now)
    node.kit.service.tick(node.kit.now)
    assert node.match(A) == 0
    node.write(reply, node.stamps(A))  # the kernels that fill the pages have finished
    node.kit.ask(Commit, grant=grant)
    node.seal(A)
    node.settle()
    assert node.load(A).blocks == 4
    node.restart()
    assert node.load(A).nvme_blocks == 4


LAYERS = (4096, 256, 16)


@pytest.mark.scenario(
    "B025",
    then="all three buffers of each block come back from memory and from disk; a file that lacks a part of one is no "
    "entry at all; an engine that declares one buffer fewer has another identity and finds nothing",
)
@pytest.mark.scenario(
    "B023",
    then="layer groups have one block size, so the valid length ends before the same block for all of them, and the "
    "engine goes on computing from there",
)
def test_side_buffers_belong_to_their_block(tmp_path: Path) -> None:
    with WholeNode(tmp_path / "data", layers=LAYERS) as node:
        tokens = A[:4]
        node.store_flushed(tokens)
        assert node.load(tokens).blocks == 2
        scribble(node)
        node.restart()
        scribble(node)
        assert node.load(tokens).nvme_blocks == 2
        node.restart()
        path = node.file(tokens)
        content = bytearray(path.read_bytes())
        content[4096 + 8192 + 4096 + 256 + 3] ^= 1  # the last buffer of the second block
        path.write_bytes(content)
        loaded = node.load(tokens)
        assert (loaded.blocks, loaded.reason) == (1, "checksum")
        node.store_flushed(tokens)
        node.restart()
        path = node.file(tokens)
        os.truncate(path, path.stat().st_size - 4096)
        loaded = node.load(tokens)
        assert loaded.blocks == 0
        assert loaded.reason in ("short_file", "bad_header")
        node.store_flushed(tokens)
    with WholeNode(tmp_path / "data", layers=LAYERS[:2]) as fewer:
        assert fewer.group != node.group
        assert fewer.load(tokens).blocks == 0


def scribble(node: WholeNode) -> None:
    """All slots are used by other requests in between."""
    for number in range(3):
        node.kit.now += 1.0
        node.store_flushed([50_000 + 10 * number + at for at in range(8)])


@pytest.mark.scenario(
    "B024",
    then="in 500 random stores, loads, evictions, aborts and restarts no loaded block holds the poison that memory "
    "and destinations are filled with",
)
def test_no_poison_is_ever_loaded(node: WholeNode) -> None:
    """Takes a second: each of the 500 moves real blocks."""
    numbers = random.Random(7)
    prompts = [[prompt, *numbers.sample(range(1_000), 7)] for prompt in range(6)]
    node.arena.view[:] = bytes([0xFF]) * len(node.arena.view)
    loaded = 0
    for step in range(500):
        node.kit.now += 0.5
        tokens = numbers.choice(prompts)[: numbers.choice([2, 4, 6, 8])]
        match numbers.randrange(8):
            case 0 | 1 | 2:
                node.store(tokens)
            case 3:
                grant, reply = node.reserve(tokens)
                node.write(reply, node.stamps(tokens) ^ 0xFF)  # of an engine that gives up
                node.kit.ask(Abort, grant=grant)
            case 4:
                node.seal(tokens)
            case 5 if step % 50 == 0:
                node.restart()
                node.arena.view[:] = bytes([0xFF]) * len(node.arena.view)
            case _:
                loaded += node.load(tokens).blocks
    assert loaded > 100


@pytest.mark.scenario(
    "B254",
    then="for every number of tokens from none to four blocks, and extents of one, two and four blocks, what is loaded "
    "from memory and from disk is the full blocks, and no byte beside them is written",
)
@pytest.mark.parametrize("block_bytes", [16_384, 8_192, 4_096 - 48])
def test_every_length_is_loaded_in_full_blocks_and_nothing_beside_them_is_touched(
    tmp_path: Path, block_bytes: int
) -> None:
    with WholeNode(tmp_path / "data", layers=(block_bytes,), block_tokens=3) as node:
        prompts = [[1_000 * length + at for at in range(length)] for length in range(4 * 3 + 1)]
        for tokens in prompts:
            full = len(tokens) // 3
            assert node.store(tokens) == list(range(full))
            assert node.match(tokens) == full
            assert node.load(tokens).blocks == full
            assert node.store(tokens) == []  # nothing is missing
            node.settle()
        node.restart()
        for tokens in prompts:
            loaded = node.load(tokens)
            assert (loaded.blocks, loaded.nvme_blocks) == (len(tokens) // 3, len(tokens) // 3)
            longer = [*tokens, 7]
            assert node.load(longer).blocks == len(tokens) // 3
