from __future__ import annotations

import threading
from typing import Any

import pytest

from tierkv.integrations.connector.threads import start_threads


def test_all_threads_are_there_from_the_start() -> None:
    before = threading.active_count()
    threads = start_threads(5, "several")
    assert threading.active_count() == before + 5
    assert sum(thread.name.startswith("several") for thread in threading.enumerate()) == 5
    assert threads.submit(lambda: 7).result(60) == 7
    threads.shutdown()


def test_a_process_that_has_no_thread_left_says_so_at_the_start_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def start_few(thread: threading.Thread, *given: Any) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread, *given)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_threads(5, "several")
    assert len(started) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("several")]
