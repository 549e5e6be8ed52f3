"""The worker's part of pins: their records. By the main thread, in the order in which they are told: a pin that a purge
ends is written down after the purge."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tierkv.core.instructions import ForgetPin, PinForgotten, PinRecorded, RecordPin, Report
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.pin_record import remove_pin, write_pin
from tierkv.storage.system_calls import Failure
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)


class PinKeeper:
    def __init__(self, directory: DataDirectory, gate: TierGate, report: Callable[[Sequence[Report]], None]) -> None:
        self._directory = directory
        self._gate = gate
        self._report = report

    def record(self, order: RecordPin) -> None:
        pin = order.record.pin
        try:
            write_pin(self._directory, order.record)
        except StorageError as error:
            self._note(f"pin {pin.hex()} is not written down", error)
            self._report([PinRecorded(pin, Reason(error.reason), str(error))])
        else:
            self._report([PinRecorded(pin)])

    def forget(self, order: ForgetPin) -> None:
        try:
            remove_pin(self._directory, order.pin)
        except StorageError as error:
            self._note(f"the record of pin {order.pin.hex()} is still there", error)
            self._report([PinForgotten(order.pin, Reason(error.reason), str(error))])
        else:
            self._report([PinForgotten(order.pin)])

    def _note(self, what: str, error: StorageError) -> None:
        self._gate.count(Failure.of(error))
        log.warning("%s: %s", what, error)
