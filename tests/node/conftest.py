"""Every test of the node ends with the ledger clean: no descriptor, child or thread left over."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def open_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def child_processes() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def ledger() -> Iterator[None]:
    descriptors, children, threads = open_descriptors(), child_processes(), set(threading.enumerate())
    yield
    gc.collect()
    left = {fd: target for fd, target in open_descriptors().items() if descriptors.get(fd) != target}
    assert left == {}, "descriptors left open"
    assert child_processes() - children == set(), "child processes left"
    assert set(threading.enumerate()) - threads == set(), "threads left"
