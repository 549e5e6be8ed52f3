"""The end of a round: everybody lets go, the node ends, and nothing is left but what must be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tierkv.client import connect_operator
from tierkv.torture.breaking import extents_bytes, temp_files
from tierkv.torture.node import NodeLeftover
from tierkv.torture.processes import who_maps
from tierkv.torture.purges import EVERYBODY, purge_to_its_end
from tierkv.torture.waits import NeverCame, wait_until
from tierkv.wire.messages import StatusReply, UsageReply

if TYPE_CHECKING:
    from tierkv.torture.round import Round

IDLE_SECONDS = 120.0
SPARE_DESCRIPTORS = 2


class Reckoning:
    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._node = round_.node

    def make(self) -> None:
        """Raises Found at the first thing that is not as it must be."""
        with self._round.alone():
            self._round.look(everything=True)
        self._round.end_all_engines()
        self._require_idle()
        self._require_books()
        used = self._descriptors()
        self._stop()
        self._require_nothing_left()
        self._round.start_again()
        self._require_idle()
        fresh = self._descriptors()
        for name, count in used.items():
            if count > fresh[name] + SPARE_DESCRIPTORS:
                self._round.leak("descriptors", f"{name} has {count} open, after a fresh start {fresh[name]}")
        self._round.look(everything=True)
        self._purge_all()
        self._stop()
        self._require_nothing_left()

    def _purge_all(self) -> None:
        """With all of its data a node has given all of its room back."""
        for tenant in EVERYBODY:
            purge_to_its_end(self._round, tenant)

        def is_empty(status: StatusReply) -> bool:
            return not status.extents and not any(tier.used_bytes or tier.reserved_bytes for tier in status.tiers)

        try:
            self._node.wait_status(is_empty, "nothing is held when all was purged", IDLE_SECONDS)
        except NeverCame as error:
            self._round.leak("slots", str(error))
        self._require_books()

    def _require_idle(self) -> None:
        """Nobody is left but who asks, nothing is held or on its way, and the memory of old incarnations is back. (What
        grows slowly may not be sealed for a minute yet; the stop that follows writes it.)"""

        def is_idle(status: StatusReply) -> bool:
            host = next(tier for tier in status.tiers if tier.tier == "host")
            held = (status.tickets, status.leases, host.reserved_bytes, host.overhead_bytes)
            return status.sessions == 1 and not any(held)

        try:
            self._node.wait_status(is_idle, "nothing is held when all engines are gone", IDLE_SECONDS)
        except NeverCame as error:
            self._round.leak("slots", str(error))

    def _require_books(self) -> None:
        """What the tiers account for is what the groups hold, and what lies on disk."""
        assert self._node.data_dir is not None
        data_dir = self._node.data_dir

        def differences() -> list[str]:
            with connect_operator(self._node.endpoint) as operator:
                usage = operator.usage()
            found = dict(_sums(usage))
            on_disk = extents_bytes(data_dir)
            nvme = next(tier for tier in usage.tiers if tier.tier == "nvme")
            if nvme.used_bytes != on_disk:
                found["files"] = f"nvme accounts for {nvme.used_bytes} bytes of extents, the files take {on_disk}"
            return list(found.values())

        try:
            wait_until(lambda: not differences(), "the books agree", IDLE_SECONDS)
        except NeverCame:
            self._round.leak("slots", "; ".join(differences()))

    def _descriptors(self) -> dict[str, int]:
        names = ("supervisor", "front", "storage", *(["gpu0"] if self._round.device else []))
        return {name: self._node.descriptors(name) for name in names}

    def _stop(self) -> None:
        try:
            self._round.stop_politely()
        except NodeLeftover as error:
            self._round.leak("sockets" if "sockets" in str(error) else "processes", str(error))

    def _require_nothing_left(self) -> None:
        assert self._node.data_dir is not None
        if left := temp_files(self._node.data_dir):
            self._round.leak("temp files", f"in tmp/ of a node that has ended: {left}")
        quarantined = len(os.listdir(self._node.data_dir / "quarantine"))
        if quarantined > self._round.most_quarantined:
            self._round.broken(f"{quarantined} files in quarantine, of which {self._round.most_quarantined} may be")
        if held := who_maps(self._round.arenas):
            self._round.leak("memory", f"processes {held} still map an arena")


def _sums(usage: UsageReply) -> list[tuple[str, str]]:
    found = []
    for tier in usage.tiers:
        held = sum(getattr(row, f"{tier.tier}_bytes") for row in usage.rows)
        if held != tier.used_bytes:
            found.append((tier.tier, f"{tier.tier} accounts for {tier.used_bytes} bytes, its groups for {held}"))
    return found
