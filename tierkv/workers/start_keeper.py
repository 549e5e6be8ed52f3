"""The worker's part of the records of starts: what earlier ones left is told at the start, what the front says is kept.

Nobody waits for either, and nothing depends on them: what can't be read or written is counted, and costs a line in the
log.
"""

from __future__ import annotations

from tierkv.core.starts import Start
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.start_records import prune_starts, read_starts, write_start
from tierkv.storage.system_calls import Failure
from tierkv.workers.quiet_log import QuietLog
from tierkv.workers.tier_gate import TierGate


class StartKeeper:
    def __init__(self, directory: DataDirectory, gate: TierGate, quiet: QuietLog) -> None:
        self._directory = directory
        self._gate = gate
        self._quiet = quiet
        self._seen: set[int] = set()

    def find(self) -> tuple[Start, ...]:
        """Those of a directory that is used read only are of other nodes, and tell nothing of this one's lives."""
        if self._directory.read_only:
            return ()
        try:
            return tuple(read_starts(self._directory))
        except StorageError as error:
            self._gate.count(Failure.of(error))
            self._quiet.warning("starts", f"records of earlier starts can't be read: {error}")
            return ()

    def keep(self, start: Start) -> None:
        """Nothing is tried while the tier takes no writes."""
        if self._gate.closed is not None:
            return
        try:
            write_start(self._directory, start)
            if start.number not in self._seen:
                self._seen.add(start.number)
                prune_starts(self._directory)
        except StorageError as error:
            self._gate.count(Failure.of(error))
            self._quiet.warning("starts", f"the record of a start is not written: {error}")
