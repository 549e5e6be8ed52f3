"""Every loop that a node runs for as long as it lives, by process and thread: what must not die unnoticed.

The worker of the disk tier has the loops of a tier of files (io, flusher, index-writer, health, pulse, scrub, purge,
audit) as the storage worker has them, in the same code; they are listed, and tried, once.

A thread of one of our processes has a line here or is not started (workers/lifeline.py), and each line has its test:
an exception in that loop is followed by its running again, or by a health that names it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loop:
    """`thread` is its name; several of a kind have a number behind it, as io-0. `then` says what follows its death."""

    process: str
    thread: str
    does: str
    then: str


_WORKER_ENDS = "the storage worker ends, and the supervisor starts another"
_DEVICE_WORKER_ENDS = "the worker of that GPU ends with its pool, and the supervisor starts another"

LOOPS: tuple[Loop, ...] = (
    Loop(
        "supervisor", "MainThread", "starts, watches and restarts the others; session socket, signals",
        "the node ends, with all its processes, and the exit code says so; the service manager starts it again",
    ),
    Loop(
        "front", "MainThread", "requests, reports, timers; checks keys, runs what the core is due to do",
        "the front ends, and the supervisor starts a new incarnation",
    ),
    Loop(
        "gateway", "MainThread", "serves tenants that are not trusted, where there are any",
        "it ends, and the supervisor starts another; status calls it dead meanwhile",
    ),
    Loop(
        "recorder", "MainThread", "writes down what engines ask, where that is recorded",
        "it ends, and the supervisor starts another; what is sent meanwhile waits for it, as far as there is room",
    ),
    Loop("front", "metrics", "the HTTP endpoint of metrics and health", "it is started again, and counted in the log"),
    Loop("storage", "MainThread", "takes instructions from the channel", _WORKER_ENDS),
    Loop("storage", "io", "file operations, several threads", _WORKER_ENDS),
    Loop("storage", "flusher", "flushes directories, reports what is durable", _WORKER_ENDS),
    Loop("storage", "index-writer", "commits rows to the index", _WORKER_ENDS),
    Loop("storage", "journal", "writes rows of the journal, in groups", _WORKER_ENDS),
    Loop("storage", "audit", "reads the journal and counts files, while somebody asks, and at a start", _WORKER_ENDS),
    Loop("storage", "health", "looks at room and faults once a second", _WORKER_ENDS),
    Loop("storage", "pulse", "says once a second that the process lives, and what is stuck in it", _WORKER_ENDS),
    Loop("storage", "scrub", "verifies files, while there is a scrub", _WORKER_ENDS),
    Loop("storage", "purge", "removes what is purged from disk, while there is such work", _WORKER_ENDS),
    Loop(
        "disk", "recovery", "opens the directory of the disk tier, and finds what is in it",
        "the worker of the disk tier ends, and the supervisor starts another",
    ),
    Loop("device", "copies", "waits for copies of a GPU's worker, reports them", _DEVICE_WORKER_ENDS),
    Loop("device", "device-pulse", "says once a second how a GPU and its copies are", _DEVICE_WORKER_ENDS),
    Loop("device", "pinning", "has the arena's memory locked, at the start of a GPU's worker", _DEVICE_WORKER_ENDS),
    Loop("storage", "supervisor-watch", "ends the process when the supervisor is gone", _WORKER_ENDS),
)  # fmt: skip


def is_known(thread: str) -> bool:
    """Whether a thread's name, without its number, is that of a loop."""
    name, _, number = thread.rpartition("-")
    base = name if number.isdigit() else thread
    return any(loop.thread == base for loop in LOOPS)
