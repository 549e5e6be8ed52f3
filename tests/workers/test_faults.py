"""Every errno at every system call that a worker makes, once and for a while: it lives, answers, and comes back."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import ALL_ERRNOS
from tests.storage.samples import Sample
from tests.workers.desk import Desk, remove_order
from tierkv.core.instructions import OpFailed, ReadDone, RemoveDone, WriteDone

CALLS = [
    "open",
    "pwritev",
    "preadv",
    "pread",
    "write",
    "fsync",
    "fdatasync",
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
    "stat",
    "fstat",
    "fstatvfs",
    "scandir",
    "listdir",
]
_WORKERS_THREADS = ("io-", "flusher", "health", "index-writer")


class Injector:
    """Fails one function of `os`, in the worker's threads only, a given number of times."""

    def __init__(self) -> None:
        self.number = 0
        self.left = 0
        self._lock = threading.Lock()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith(_WORKERS_THREADS):
                with self._lock:
                    fails, self.left = self.left > 0, self.left - 1
                if fails:
                    raise OSError(self.number, os.strerror(self.number))
            return function(*args, **kwargs)

        return call


@pytest.fixture
def injector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    made = Injector()
    monkeypatch.setattr(os, request.param, made.wrap(getattr(os, request.param)))
    yield made
    made.left = 0


@pytest.mark.parametrize("injector", CALLS, indirect=True)
def test_the_worker_outlives_every_error_and_writes_again(injector: Injector, tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        kept = Sample()
        desk.store(kept, 1)
        op = 10
        for turn, number in enumerate(ALL_ERRNOS * 2):
            sample = Sample(seed=100 * turn + 50, num_blocks=1)
            injector.number, injector.left = number, 1 if turn < len(ALL_ERRNOS) else 10_000
            desk.send(
                desk.arena.write_order(sample, op),
                desk.arena.read_order(sample, op + 1),
                desk.arena.read_order(kept, op + 2),
                remove_order(sample, op + 3),
            )
            assert isinstance(desk.answer(op), WriteDone | OpFailed)
            assert isinstance(desk.answer(op + 1), ReadDone)
            assert isinstance(desk.answer(op + 2), ReadDone)
            assert isinstance(desk.answer(op + 3), RemoveDone | OpFailed)
            injector.left = 0
            desk.health(lambda health: health.writable)
            desk.store(sample, op + 4)
            assert desk.load(sample, op + 5).valid == 1
            survivor = desk.load(kept, op + 6)
            if survivor.gone:  # told to be gone by the system itself: then it is stored again
                assert number == errno.ENOENT
                desk.store(kept, op + 7)
            else:
                assert survivor.valid == 3
            op += 10
        assert desk.dead_threads == []
