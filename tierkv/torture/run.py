"""A whole torture: rounds until the time is over, or until something is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tierkv.errors import ConfigError, TierkvError
from tierkv.torture.interruption import noted_signals, raise_if_interrupted
from tierkv.torture.node import NodeLeftover
from tierkv.torture.plan import PlannedRound
from tierkv.torture.round import Round
from tierkv.torture.verdict import Found, Verdict

DISK_BYTES = 2**30
"""At most so much lies in the folder; what is free must be more."""

VERDICT = "verdict.json"
TRACEBACK = "traceback.txt"

Progress = Callable[[Verdict, str], None]


def torture(
    folder: Path,
    rounds: Iterable[PlannedRound],
    seed: int,
    *,
    seconds: float | None = None,
    keep: bool = False,
    progress: Progress = lambda verdict, doing: None,
) -> Verdict:
    """Play rounds in `folder`, which must be empty or absent, for about so many `seconds`; None: to their end.

    Ends at the first finding, and keeps what a reader of it needs (the node's log, its data directory, the verdict) in
    the folder; without one nothing is left in it unless `keep`. A bug of the torture is a finding too. Ctrl-C, SIGTERM
    and SIGHUP end it at the next step or wait, with the verdict so far; a second one at once. Call it from the main
    thread: its processes die with that. Raises ConfigError where the folder can't be used.
    """
    was_there = folder.exists()
    _require_usable(folder)
    verdict = Verdict(seed)
    clock = _Clock(seconds)
    with noted_signals():
        try:
            for number, planned in enumerate(rounds, 1):
                raise_if_interrupted()
                if not clock.has_time_for_a_round():
                    break
                name = f"{number:03d}-{planned.conditions.name}"
                (folder / name).mkdir(parents=True)
                _play(folder / name, planned, verdict, clock, progress)
                if not keep:
                    shutil.rmtree(folder / name)
            raise_if_interrupted()
        except KeyboardInterrupt:
            verdict.interrupted = True
        except Found:
            pass  # it is in the verdict
        except Exception as error:  # noqa: BLE001 (whatever it is, somebody has waited for a verdict)
            with suppress(OSError):  # the verdict tells it as well, and may have to do without a disk
                (folder / TRACEBACK).write_text(traceback.format_exc())
            where = verdict.trail[-1] if verdict.trail else "start"
            verdict.broken.append(f"a bug of the torture itself, in {where}: {error!r}; see {TRACEBACK}")
        verdict.seconds = clock.seconds()
        if keep or verdict.findings:
            _write(folder / VERDICT, verdict)
        else:
            _clear(folder, and_itself=not was_there)
    return verdict


def _write(path: Path, verdict: Verdict) -> None:
    try:
        path.write_text(json.dumps(verdict.as_object(), indent=2) + "\n")
    except OSError as error:
        verdict.broken.append(f"{path} could not be written: {error.strerror}")


def _play(folder: Path, planned: PlannedRound, verdict: Verdict, clock: _Clock, progress: Progress) -> None:
    name = planned.conditions.name

    began = clock.seconds()
    steps_began: list[float] = []

    def go_on() -> bool:
        verdict.seconds = clock.seconds()
        steps_began.append(verdict.seconds)
        progress(verdict, name)
        raise_if_interrupted()
        return not clock.is_over()

    try:
        with Round(folder, planned, verdict) as round_:
            clock.reckoning_seconds = round_.play(go_on)
            clock.start_seconds = (steps_began or [began])[0] - began
    except Found:
        raise
    except NodeLeftover as error:
        verdict.find_leak("sockets" if "sockets" in str(error) else "processes", f"{name}: {error}")
        raise Found(str(error)) from error
    except (AssertionError, TierkvError, subprocess.TimeoutExpired) as error:
        verdict.broken.append(f"{name}: {error}")
        raise Found(str(error)) from error


class _Clock:
    """What the last round took for its start and for its end, so that the next one ends in time, or is not begun."""

    start_seconds = 0.0
    reckoning_seconds = 10.0

    def __init__(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether what is left is needed to end the round."""
        return self._seconds is not None and self.seconds() + self.reckoning_seconds >= self._seconds

    def has_time_for_a_round(self) -> bool:
        """Of one step at least; there is always time for a first one."""
        needed = self.start_seconds + self.reckoning_seconds if self.start_seconds else 0.0
        return self._seconds is None or self.seconds() + needed < self._seconds


def _require_usable(folder: Path) -> None:
    if folder.exists():
        if not folder.is_dir() or folder.is_symlink():
            raise ConfigError("dir", f"{folder} is no directory")
        if any(folder.iterdir()):
            raise ConfigError("dir", f"{folder} is not empty, and nothing in it may be touched; name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError("dir", f"{folder} can't be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("dir", f"{folder} can't be written to")
    if free < DISK_BYTES:
        raise ConfigError("dir", f"{folder} has {free // 2**20} MiB free, and a torture needs {DISK_BYTES // 2**20}")


def _clear(folder: Path, *, and_itself: bool) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path)
    if and_itself:
        folder.rmdir()
