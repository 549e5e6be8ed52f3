"""Page tables are filled ahead of the first copy, holes are left alone."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierkv.client.prefault import Prefault

PAGE, NUM_PAGES = 4096, 64


@pytest.fixture
def memory() -> Iterator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("prefault")
    os.ftruncate(fd, NUM_PAGES * PAGE)
    mapping = mmap.mmap(fd, NUM_PAGES * PAGE)
    yield fd, mapping
    mapping.close()
    os.close(fd)


def address_of(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


def mapped_pages(mapping: mmap.mmap) -> int:
    """Pages of the mapping that this process can touch without a fault."""
    start = f"{address_of(mapping):x}-"
    entry = Path("/proc/self/smaps").read_text().split(start)[1]
    match = re.search(r"Rss: +(\d+) kB", entry)
    assert match is not None
    return int(match[1]) * 1024 // PAGE


def wait_mapped(mapping: mmap.mmap, pages: int) -> bool:
    deadline = time.monotonic() + 30
    while mapped_pages(mapping) < pages and time.monotonic() < deadline:
        time.sleep(0.005)  # between two looks at a condition that has a deadline
    return mapped_pages(mapping) == pages


def fill(fd: int, first: int, count: int) -> None:
    os.pwrite(fd, b"x" * count * PAGE, first * PAGE)


def test_pages_that_are_there_are_mapped(memory: tuple[int, mmap.mmap]) -> None:
    fd, mapping = memory
    fill(fd, 0, NUM_PAGES)
    assert mapped_pages(mapping) == 0
    prefault = Prefault(fd, address_of(mapping), NUM_PAGES * PAGE)
    assert wait_mapped(mapping, NUM_PAGES)
    prefault.stop()
    prefault.stop()


def test_holes_stay_holes_until_the_node_has_filled_them(memory: tuple[int, mmap.mmap]) -> None:
    """Who touches a hole first is charged for its page."""
    fd, mapping = memory
    fill(fd, 0, 16)
    prefault = Prefault(fd, address_of(mapping), NUM_PAGES * PAGE)
    try:
        assert wait_mapped(mapping, 16)
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 16 * PAGE
        fill(fd, 16, NUM_PAGES - 16)
        assert wait_mapped(mapping, NUM_PAGES)
    finally:
        prefault.stop()


def test_it_stops_while_it_waits_for_the_node(memory: tuple[int, mmap.mmap]) -> None:
    fd, mapping = memory
    Prefault(fd, address_of(mapping), NUM_PAGES * PAGE).stop()  # a wait for a node that never comes has no end
