"""What every backend looks at before it touches memory: a copy beyond it would destroy what is somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.device.layouts import PagedLayout


class Memory(Protocol):
    @property
    def num_bytes(self) -> int: ...


def check_pages(layout: PagedLayout, pages: Sequence[int]) -> None:
    if len(pages) and not (min(pages) >= 0 and max(pages) < layout.num_pages):
        raise ValueError(f"pages {min(pages)} to {max(pages)} of memory that has {layout.num_pages}")


def check_slots(what: str, memory: Memory, offsets: Sequence[int], block_bytes: int) -> None:
    if block_bytes < 0:
        raise ValueError(f"{what}: blocks of {block_bytes} bytes")
    if len(offsets) and not (min(offsets) >= 0 and max(offsets) + block_bytes <= memory.num_bytes):
        raise ValueError(
            f"{what}: slots of {block_bytes} bytes at {min(offsets)} to {max(offsets)}, in {memory.num_bytes} bytes"
        )


def check_alike(first: Sequence[int], second: Sequence[int]) -> None:
    if len(first) != len(second):
        raise ValueError(f"{len(first)} blocks on one side, {len(second)} on the other")


def check_ranges(memory: Memory, ranges: Sequence[tuple[int, int]]) -> None:
    for offset, num_bytes in ranges:
        if offset < 0 or num_bytes < 0 or offset + num_bytes > memory.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset}, in {memory.num_bytes} bytes")
