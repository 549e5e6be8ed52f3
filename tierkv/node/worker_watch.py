"""The watch over one kind of worker: it is started, told of to the front, reaped, and started again when it has died.

    begin            an incarnation has begun: start one as soon as that of an earlier incarnation is proven dead
    start_if_due     with a channel to the front, the arena, and a pipe that ends when the supervisor does
    reap             waitpid: how it ended, and when the next one is due
    incarnation_ended   it is killed, and what is left of it is reaped like any other

One at a time, across incarnations too: only one process may have an index open.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Protocol

from tierkv.node.children import FIRST_DELAY_SECONDS, Backoff, Child, IndexSuspicion
from tierkv.node.control import Control, WorkerName, WorkerStarted, device_worker_name
from tierkv.node.worker_command import WorkerResources

UNUSABLE_DIRECTORY = 2
"""The exit code of a worker whose directory can't be used: nothing that its index could be blamed for."""

log = logging.getLogger(__name__)


class HasArena(Protocol):
    """Of an incarnation, what its workers need."""

    control: Control

    @property
    def arena_fd(self) -> int: ...

    @property
    def arena_bytes(self) -> int: ...


class Launch(Protocol):
    """Starts the process; it inherits the descriptors of the resources, ours stay open."""

    def __call__(self, resources: WorkerResources, *, sends_rows: bool, discard_index: bool) -> Child: ...


@dataclass(frozen=True, slots=True)
class Died:
    """`how` is for people; the next one is started after `pause_seconds`."""

    pid: int
    how: str
    pause_seconds: float = 0.0


class WorkerWatch:
    """Owns the process and its lifeline. `backoff` says when to start again what has died; `device` is whose worker it
    is, where it is one of a device."""

    def __init__(self, name: WorkerName, launch: Launch, backoff: Backoff, *, device: int = 0) -> None:
        self.name = name
        self.device = device
        self.label = device_worker_name(device) if name is WorkerName.DEVICE else name.value
        self.is_recovered = False
        """One has told this incarnation's front what is on disk: the next one need not."""
        self._launch = launch
        self._backoff = backoff
        self._suspicion = IndexSuspicion()
        self._has_index = name is not WorkerName.DEVICE
        self._child: Child | None = None
        self._leftover: Child | None = None  # of an incarnation that ended, still to be reaped
        self._lifeline: int | None = None
        self._due: float | None = None
        self._last_how = ""

    @property
    def has_leftover(self) -> bool:
        return self._leftover is not None

    def pidfds(self) -> list[int]:
        """Readable at an end that `reap` will tell."""
        return [child.pidfd for child in (self._leftover, self._child) if child is not None]

    def next_due(self) -> float | None:
        """When `start_if_due` is to be called; None also while one of an earlier incarnation is still there."""
        return None if self._leftover is not None else self._due

    def begin(self, now: float) -> None:
        self._due = now

    def start_if_due(self, incarnation: HasArena, now: float) -> None:
        due = self.next_due()
        if due is None or due > now or self._child is not None:
            return
        self._due = None
        self._backoff.started(now)
        if self._suspicion.is_strong:
            log.warning("setting the index aside: the %s worker died before it had recovered", self.label)
        self._start(incarnation)

    def _start(self, incarnation: HasArena) -> None:
        """Its channel goes to the front with the news."""
        front_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        reading, writing = os.pipe()
        sends_rows = not self.is_recovered
        with front_end, worker_end:
            try:
                resources = WorkerResources(
                    channel_fd=worker_end.fileno(),
                    arena_fd=incarnation.arena_fd,
                    arena_bytes=incarnation.arena_bytes,
                    lifeline_fd=reading,
                )
                child = self._launch(resources, sends_rows=sends_rows, discard_index=self._suspicion.is_strong)
            except BaseException:
                os.close(writing)
                raise
            finally:
                os.close(reading)
            self._child, self._lifeline = child, writing
            started = WorkerStarted(
                worker=self.name,
                device=self.device,
                pid=child.pid,
                restarts=self._backoff.restarts,
                sends_rows=sends_rows,
            )
            incarnation.control.send(started, [front_end.fileno()])

    def recovered(self, pid: int) -> None:
        """The front said so of `pid`, which may have died since: what it has told the front is told."""
        self.is_recovered = True
        self._suspicion.cleared()
        self._last_how = ""

    def replace(self, pid: int, problem: str) -> None:
        """Kill it, if it is still the one that was meant."""
        if self._child is not None and self._child.pid == pid:
            log.error("replacing %s worker %d: %s", self.label, pid, problem)
            self._child.kill()

    def reap(self, now: float, *, is_stopping: bool) -> Died | None:
        """Of this incarnation's. What is left of earlier ones nobody needs to be told of."""
        if self._leftover is not None and self._leftover.reap() is not None:
            self._leftover = None
        child = self._child
        if child is None or (how := child.reap()) is None:
            return None
        self._child = None
        self._close_lifeline()
        if not child.succeeded:
            how = self._why_dead() or how
            self._note_death(child, how)
            self._due = self._backoff.died(now, had_begun=self._had_begun())
        elif not is_stopping:  # it has seen the end of its channel: the front is about to be found dead, or let it go
            log.info("%s worker %d has ended: the front spoke to it no more", self.label, child.pid)
            self._due = now + FIRST_DELAY_SECONDS
        return Died(child.pid, how, 0.0 if self._due is None else max(0.0, self._due - now))

    def _had_begun(self) -> bool:
        """Asked at its death: whether it had been more than a try."""
        return True

    def _why_dead(self) -> str:
        """What it had said itself, where that says more than how it ended."""
        return ""

    def _note_death(self, child: Child, how: str) -> None:
        """One that can't begin is tried again for as long as the node lives, and told once."""
        level = logging.DEBUG if how == self._last_how and not child.was_killed else logging.ERROR
        log.log(level, "%s worker %d %s", self.label, child.pid, how)
        self._last_how = how
        if self._has_index and not self.is_recovered and child.process.returncode != UNUSABLE_DIRECTORY:
            self._suspicion.worker_died(was_killed=child.was_killed)

    def incarnation_ended(self) -> None:
        """What it writes to the old arena harms nobody; the next one begins when its death is proven."""
        self.kill()
        self._leftover = self._leftover or self._child
        self._child = self._due = None
        self.is_recovered = False
        self._close_lifeline()

    def kill(self) -> None:
        for child in (self._leftover, self._child):
            if child is not None:
                child.kill()

    def wait(self) -> None:
        """Of what was killed: until it is gone, or shows that it can't be."""
        for child in (self._leftover, self._child):
            if child is not None:
                child.wait()
        self._leftover = self._child = None
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
