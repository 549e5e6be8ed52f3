"""Sums of the core against journal and files: what is new, and what the table has already."""

from __future__ import annotations

from tierkv.core.instructions import Difference, GroupCount
from tierkv.node.tier_audit import core_differences, seen_twice

A, B, C, D = (bytes([number]) * 32 for number in range(4))


def of_files(group: bytes, booked: int, counted: int) -> Difference:
    return Difference(
        tier="nvme", what="files", booked_bytes=booked, counted_bytes=counted, found_at=1.0, group=group.hex()
    )


def test_only_what_agrees_with_neither_journal_nor_files_is_a_difference() -> None:
    counted = [GroupCount(A, 1, 10, 10), GroupCount(B, 1, 10, 20), GroupCount(C, 1, 10, 10), GroupCount(D, 1, 7, 7)]
    found = core_differences("nvme", {A: 10, B: 20, C: 30}, counted, [], 5.0)
    assert [(one.group, one.booked_bytes, one.counted_bytes, one.what) for one in found] == [(C.hex(), 30, 10, "core")]


def test_what_an_earlier_count_has_told_of_is_not_told_again_while_the_core_does_not_know_it_yet() -> None:
    table = [of_files(A, 100, 90), of_files(B, 1, 2), of_files(A, 90, 70)]
    counted = [GroupCount(A, 1, 70, 70)]
    for known, is_told in ((90, True), (100, True), (80, False)):
        assert (core_differences("nvme", {A: known}, counted, table, 5.0) == []) == is_told
    assert core_differences("disk", {A: 90}, counted, table, 5.0), "of another tier"


def test_what_a_second_count_does_not_have_was_moving() -> None:
    first = [of_files(A, 1, 2), of_files(B, 1, 2)]
    assert seen_twice(first, [of_files(A, 5, 6), of_files(B, 1, 3), of_files(C, 1, 2)]) == [of_files(A, 5, 6)]
