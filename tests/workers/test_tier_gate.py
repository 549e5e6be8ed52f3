from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.reasons import Reason
from tierkv.storage.directory import Space
from tierkv.storage.system_calls import Failure
from tierkv.workers.tier_gate import TierGate

MIB = 2**20


def space(free_bytes: int, *, free_inodes: int = 1_000, total_inodes: int = 2_000) -> Space:
    return Space(free_bytes, 1_000 * MIB, free_inodes, total_inodes)


def failure(reason: Reason, errno_name: str = "EIO", operation: str = "pwritev") -> Failure:
    return Failure(reason, operation, errno_name, "injected")


def reason_of(gate: TierGate) -> Reason | None:
    return None if gate.closed is None else gate.closed.reason


def test_it_is_open_while_there_is_room_and_nothing_failed() -> None:
    gate = TierGate(reserve_bytes=20 * MIB)
    gate.look(space(20 * MIB))
    assert gate.closed is None


def test_below_the_reserve_it_closes_and_opens_again_a_little_above_it() -> None:
    gate = TierGate(reserve_bytes=20 * MIB)
    gate.look(space(20 * MIB - 1))
    assert reason_of(gate) == Reason.DISK_FULL
    gate.look(space(20 * MIB))
    assert reason_of(gate) == Reason.DISK_FULL
    gate.look(space(21 * MIB))
    assert gate.closed is None


def test_a_file_that_would_reach_into_the_reserve_is_not_admitted() -> None:
    gate = TierGate(reserve_bytes=20 * MIB)
    assert gate.admit(5 * MIB, space(25 * MIB)) is None
    gate.finish(5 * MIB)
    refused = gate.admit(6 * MIB, space(25 * MIB))
    assert refused is not None
    assert refused.reason == Reason.DISK_FULL
    gate.look(space(25 * MIB))
    assert reason_of(gate) == Reason.DISK_FULL
    gate.look(space(27 * MIB))
    assert gate.closed is None


@given(
    reserve=st.integers(min_value=0, max_value=50),
    free=st.integers(min_value=0, max_value=200),
    files=st.lists(st.integers(min_value=1, max_value=30), max_size=20),
)
def test_files_being_written_never_reach_into_the_reserve_together(reserve: int, free: int, files: list[int]) -> None:
    """Nothing of them is on disk yet, so the file system says the same to all of them."""
    gate = TierGate(reserve_bytes=reserve)
    admitted = [size for size in files if gate.admit(size, space(free)) is None]
    assert sum(admitted) <= max(0, free - reserve)
    assert gate.writing_bytes == sum(admitted)
    for size in admitted:
        gate.finish(size)
    assert gate.writing_bytes == 0


def test_running_out_of_inodes_closes_it_and_says_so() -> None:
    gate = TierGate(reserve_bytes=0)
    gate.look(space(100 * MIB, free_inodes=19))
    assert gate.closed is not None
    assert gate.closed.reason == Reason.NO_INODES
    assert "inodes" in gate.closed.problem
    gate.look(space(100 * MIB, free_inodes=20))
    assert gate.closed is None


def test_a_file_system_without_a_count_of_inodes_is_not_short_of_them() -> None:
    gate = TierGate(reserve_bytes=0)
    gate.look(space(100 * MIB, free_inodes=0, total_inodes=0))
    assert gate.closed is None


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (Reason.READ_ONLY, Reason.READ_ONLY),
        (Reason.IO_ERROR, Reason.IO_ERROR),
        (Reason.NOT_FOUND, Reason.IO_ERROR),
        (Reason.DISK_FULL, Reason.DISK_FULL),
    ],
)
def test_a_failed_write_closes_it_until_a_probe_succeeds(told: Reason, shown: Reason) -> None:
    gate = TierGate(reserve_bytes=0)
    gate.write_failed(failure(told), 0)
    assert reason_of(gate) == shown
    assert gate.admit(1, space(100 * MIB)) is not None
    gate.look(space(100 * MIB))
    assert gate.has_fault
    gate.probe_succeeded()
    gate.look(space(100 * MIB))
    assert gate.closed is None


def test_after_a_full_disk_a_probe_alone_does_not_open_it() -> None:
    gate = TierGate(reserve_bytes=0)
    gate.write_failed(failure(Reason.DISK_FULL, "ENOSPC"), 16 * MIB)
    gate.probe_succeeded()
    gate.look(space(8 * MIB))
    assert reason_of(gate) == Reason.DISK_FULL
    gate.look(space(16 * MIB))
    assert gate.closed is None


def test_failures_are_counted_by_operation_and_errno() -> None:
    gate = TierGate(reserve_bytes=0)
    gate.write_failed(failure(Reason.IO_ERROR), 0)
    gate.count(failure(Reason.IO_ERROR))
    gate.count(failure(Reason.IO_ERROR, "EMFILE", "open"))
    assert gate.errors == {"pwritev EIO": 2, "open EMFILE": 1}
