from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tierkv.core.instructions import ExtentRow
from tierkv.storage.catalog import Applied, Catalog, Change, DropRow, IndexFailed, PutRow
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.workers import index_writer
from tierkv.workers.index_writer import IndexWriter

SECONDS = 20.0
HOME = Namespace("ab" * 32, b"g" * 32, 0)


def put(number: int) -> PutRow:
    key = number.to_bytes(32, "big")
    return PutRow(HOME.row_name(key), IndexedFile(ExtentRow(key, bytes(32), 0, key, 64, 8192, 1.0, 2.0, 0), 1, 2))


class Spy(Catalog):
    """A real catalog that counts commits, can be held, and can fail."""

    def __init__(self, folder_fd: int) -> None:
        super().__init__(folder_fd, store_id="store", map_bytes=2**20)
        self.commits: list[int] = []
        self.problem_to_answer = ""
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()

    def apply(self, changes: Sequence[Change]) -> Applied | IndexFailed:
        self.entered.set()
        assert self.may_go.wait(SECONDS)
        self.commits.append(len(changes))
        if self.problem_to_answer:
            return IndexFailed(self.problem_to_answer)
        return super().apply(changes)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Spy]:
    folder_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with Spy(folder_fd) as opened:
        yield opened
    os.close(folder_fd)


def test_changes_are_committed_together_and_in_order(catalog: Spy) -> None:
    writer = IndexWriter(catalog, gather_seconds=SECONDS)
    for number in range(100):
        writer.add(put(number))
    writer.add(DropRow(put(7).name), put(7), DropRow(put(8).name))
    assert writer.drain(SECONDS)
    assert sum(catalog.commits) == 103
    assert len(catalog.commits) <= 2
    assert catalog.count() == 99
    assert writer.close(SECONDS)


def test_a_full_group_does_not_wait_for_more(catalog: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_writer, "CHANGES_OF_A_COMMIT", 3)
    writer = IndexWriter(catalog, gather_seconds=60.0)
    writer.add(put(1), put(2), put(3))
    assert catalog.entered.wait(SECONDS)
    assert writer.close(SECONDS)
    assert catalog.count() == 3


def test_closing_commits_what_waits(catalog: Spy) -> None:
    writer = IndexWriter(catalog, gather_seconds=60.0)
    writer.add(put(1))
    assert writer.close(SECONDS)
    assert catalog.count() == 1


def test_a_commit_that_fails_is_told_and_the_next_one_is_made(catalog: Spy) -> None:
    problems: list[str] = []
    writer = IndexWriter(catalog, failed=problems.append)
    catalog.problem_to_answer = "no space left"
    writer.add(put(1))
    assert writer.drain(SECONDS)
    catalog.problem_to_answer = ""
    writer.add(put(2))
    assert writer.close(SECONDS)
    assert problems == ["no space left"]
    assert catalog.count() == 1


def test_an_index_that_cannot_keep_up_loses_changes_and_not_memory(
    catalog: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "MAX_WAITING", 10)
    catalog.may_go.clear()
    writer = IndexWriter(catalog, gather_seconds=0.0)
    writer.add(put(0))
    assert catalog.entered.wait(SECONDS)
    for number in range(1, 100):
        writer.add(put(number))
    assert not writer.drain(0.01)
    catalog.may_go.set()
    assert writer.close(SECONDS)
    assert sum(catalog.commits) == 11
