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
from tierkv.core.instructions import OpFailed, ReadDone, RemoveDone, TierHealth, WriteDone
from tierkv.core.reasons import Reason
from tierkv.storage.system_calls import Failure

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
        self._number = 0
        self._left = 0
        self._lock = threading.Lock()

    def fail(self, number: int, times: int) -> None:
        with self._lock:
            self._number, self._left = number, times

    def heal(self) -> None:
        self.fail(0, 0)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith(_WORKERS_THREADS):
                with self._lock:
                    number = self._number if self._left > 0 else 0
                    self._left -= 1
                if number:
                    raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        return call


@pytest.fixture
def injector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    made = Injector()
    monkeypatch.setattr(os, request.param, made.wrap(getattr(os, request.param)))
    yield made
    made.heal()


@pytest.mark.parametrize("injector", CALLS, indirect=True)
def test_the_worker_outlives_every_error_and_writes_again(injector: Injector, tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        kept = Sample()
        desk.store(kept, 1)
        op = 10
        for turn, number in enumerate(ALL_ERRNOS * 2):
            sample = Sample(seed=100 * turn + 50, num_blocks=1)
            injector.fail(number, 1 if turn < len(ALL_ERRNOS) else 10_000)
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
            injector.heal()
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


def test_what_is_told_of_the_tier_behind_a_failure_was_seen_behind_it(tmp_path: Path) -> None:
    """A look at the gate before the failure, told after it, would say that all is well."""
    with Desk(tmp_path / "data", health_seconds=3_600.0) as desk:
        desk.store(Sample(), 1)
        watch, gate = desk.worker._tier.health, desk.worker._tier.gate
        failed, is_looking = threading.Event(), threading.Event()

        def look_for_long() -> str:
            is_looking.set()
            failed.wait(0.5)  # where the failure can be told meanwhile, it is by then
            return ""

        watch._index_problem = look_for_long
        telling = threading.Thread(target=watch.tell)
        telling.start()
        assert is_looking.wait(30)
        gate.write_failed(Failure(Reason.IO_ERROR, "rename", "EIO", "Input/output error"), 4096)
        failing = threading.Thread(
            target=lambda: (desk.worker._tier.report([OpFailed(7, Reason.IO_ERROR)]), failed.set())
        )
        failing.start()
        desk.answer(7)
        failing.join(30)
        telling.join(30)
        desk.wait(lambda report: isinstance(report, TierHealth) and not report.writable)
        behind = desk.reports[[getattr(report, "op", 0) for report in desk.reports].index(7) :]
        assert not [one for one in behind if isinstance(one, TierHealth) and one.writable]
