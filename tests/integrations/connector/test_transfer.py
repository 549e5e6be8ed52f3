"""Against a node in a dictionary; whole nodes are in the tests of scheduler and worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.client.conftest import make_identity
from tests.integrations.stand_in import StandInClient, StandInGroup
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.plan import GroupSpec
from tierkv.integrations.connector.transfer import Given, load_blocks, open_group, store_blocks

BLOCKS = 5


class Memory:
    """An engine's: a row for each block."""

    def __init__(self, group: StandInGroup) -> None:
        self.rows = np.arange(BLOCKS * group.block_bytes, dtype=np.uint32).astype(np.uint8).reshape(BLOCKS, -1)
        self.steps: list[str] = []

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        self.steps.append("read")
        blocks[:] = self.rows[first_block : first_block + len(blocks)]

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        self.rows[first_block : first_block + len(blocks)] = blocks


class Door:
    """Says when the memory may be read, and notes what was said to it."""

    def __init__(self, memory: Memory, *, is_open: bool) -> None:
        self._steps = memory.steps
        self._is_open = is_open

    def begin(self) -> bool:
        self._steps.append("begin")
        return self._is_open

    def pause(self) -> None:
        self._steps.append("pause")

    def end(self) -> None:
        self._steps.append("end")


@pytest.fixture
def group() -> StandInGroup:
    opened: Any = open_group(StandInClient(), GroupSpec(identity=make_identity()))  # type: ignore[arg-type]
    assert isinstance(opened, StandInGroup)
    return opened


@pytest.fixture
def memory(group: StandInGroup) -> Memory:
    return Memory(group)


def tokens_of(group: StandInGroup) -> list[int]:
    return list(range(1, BLOCKS * group.identity.layout.block_tokens + 1))


def keys_of(group: StandInGroup, blocks: int = BLOCKS) -> bytes:
    step = group.identity.layout.block_tokens
    return chain_keys(group.key, pack_tokens(tokens_of(group)[: blocks * step]), step)


def give(group: StandInGroup, memory: Memory, *, first: int = 0, door: Door | None = None) -> Given:
    step = group.identity.layout.block_tokens
    return store_blocks(
        group,  # type: ignore[arg-type]
        memory,
        keys=keys_of(group),
        first_block=first,
        tokens=pack_tokens(tokens_of(group)[first * step :]),
        deadline_seconds=1.0,
        access=door,
    )


def test_what_was_stored_is_loaded_byte_for_byte(group: StandInGroup, memory: Memory) -> None:
    assert give(group, memory) == Given(stored_blocks=BLOCKS, is_whole=True)
    loaded = Memory(group)
    loaded.rows[:] = 0
    with group.acquire(keys=keys_of(group), deadline_seconds=1.0) as lease:
        found = load_blocks(lease, loaded)  # type: ignore[arg-type]
    assert (found.blocks, found.nvme_blocks, found.reason) == (BLOCKS, 0, None)
    assert (loaded.rows == memory.rows).all()


def test_what_is_there_is_not_read_again(group: StandInGroup, memory: Memory) -> None:
    give(group, memory)
    memory.steps.clear()
    assert give(group, memory, first=2) == Given(stored_blocks=0, is_whole=True)
    assert memory.steps == []


def test_without_room_for_all_it_says_so_and_is_not_whole(group: StandInGroup, memory: Memory) -> None:
    group.room_blocks = 2
    assert give(group, memory) == Given(stored_blocks=2, is_whole=False, reason=Reason.NO_ROOM)


def test_what_somebody_else_is_writing_is_no_gap(group: StandInGroup, memory: Memory) -> None:
    group.pending = frozenset({1, 2})
    assert give(group, memory) == Given(stored_blocks=BLOCKS - 2, is_whole=True, reason=Reason.PENDING)


def test_memory_is_read_only_while_the_engine_lets_it_and_is_free_before_the_commit(
    group: StandInGroup, memory: Memory
) -> None:
    door = Door(memory, is_open=True)
    group.failing["commit"] = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        give(group, memory, door=door)
    assert memory.steps == ["begin", *["read"] * BLOCKS, "pause", "end"]


def test_memory_that_the_engine_wants_back_is_not_read_and_nothing_is_published(
    group: StandInGroup, memory: Memory
) -> None:
    assert give(group, memory, door=Door(memory, is_open=False)) == Given(stored_blocks=0, is_whole=False)
    assert memory.steps == ["begin"]
    assert not group.stored


def test_blocks_that_were_taken_back_meanwhile_do_not_count(group: StandInGroup, memory: Memory) -> None:
    give(group, memory)
    group.valid_blocks, group.nvme_blocks = 3, 4
    with group.acquire(keys=keys_of(group), deadline_seconds=1.0) as lease:
        found = load_blocks(lease, memory)  # type: ignore[arg-type]
    assert (found.blocks, found.nvme_blocks, found.reason) == (3, 2, Reason.REVOKED)


def test_a_miss_touches_no_memory(group: StandInGroup) -> None:
    group.away = True
    with group.acquire(keys=keys_of(group), deadline_seconds=1.0) as lease:
        found = load_blocks(lease, None)  # type: ignore[arg-type]
    assert (found.blocks, found.reason) == (0, Reason.NODE_AWAY)
