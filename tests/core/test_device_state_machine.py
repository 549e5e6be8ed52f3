"""The machine of test_cache_state_machine with devices above host memory: engines store in their pools and read from
them, copies end late, out of order or not at all, workers die with all that their pools held, and come back with less.

An engine of a pool that is no more has its old mapping: what it writes there nobody sees, and what it was granted there
it can tell to be gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.core.simulation import PAGE, DeviceOp, DeviceWorker, stamps
from tests.core.test_cache_state_machine import CacheMachine, Ticket
from tierkv.core.addresses import pool_bases
from tierkv.core.grants import Refused
from tierkv.core.instructions import CopyDone, Download, OpFailed, Report, Upload, Zero
from tierkv.core.reasons import Reason


@dataclass
class Device:
    worker: DeviceWorker
    size: int
    is_up: bool = False


class DeviceMachine(CacheMachine):
    def device_bytes(self, draw: st.DataObject, unit: int) -> tuple[int, ...]:
        return tuple(unit * slots for slots in draw.draw(st.sampled_from([(3,), (2, 3), (4,), (1, 1), (6,)])))

    def start_devices(self) -> None:
        limits = self.limits
        *bases, _ = pool_bases(limits.host_bytes, limits.slab_bytes, limits.device_bytes)
        self.devices = [
            Device(DeviceWorker(self.here.arena, base, size), size)
            for base, size in zip(bases, limits.device_bytes, strict=True)
        ]
        self.expected: dict[int, list[object]] = {}  # by op: what it is to copy
        self.stale: list[tuple[int, Report]] = []  # of workers that died before they were heard
        for device in range(len(self.devices)):
            self.start_device(device, self.devices[device].size)
        for at, session in enumerate(self.here.sessions):
            self.state.map_device(session, at % len(self.devices))

    def start_device(self, device: int, num_bytes: int) -> None:
        self.devices[device].is_up = self.devices[device].worker.is_up = True
        self.absorb(self.state.device_worker_started(device, num_bytes, self.now))

    def device_arguments(self) -> dict[str, object]:
        return {"on_device": self.number() % 4 > 0}

    def slots_of_devices(self) -> set[int]:
        return set().union(*(device.worker.slots_in_use() for device in self.devices))

    def slots_used_in_pools(self) -> set[int]:
        pools = [pool.slots for pool in self.state._ledger.devices.pools if pool.slots is not None]
        return set().union(*(pool.used_slots() for pool in pools))

    def keys_landing(self, rank: int) -> set[bytes]:
        landings = self.state._ledger.landings.values()
        return {key for one in landings if one.rank == rank and not one.purged for key in one.block_keys}

    # ---- what they are told

    def instruct_device(self, device: int, instruction: object) -> None:
        worker = self.devices[device].worker
        assert isinstance(instruction, (Upload, Download, Zero))
        if isinstance(instruction, Zero):
            pages = {worker.base + page for at, size in instruction.ranges for page in range(at, at + size, PAGE)}
            assert not self.slots_of_engines() & pages, "wiped under somebody"
        else:
            source, target = self.ends_of(worker, instruction)
            assert not self.slots_in_use() & set(target), "a copy would overwrite a slot that somebody uses"
            if set(target).isdisjoint(self.slots_landing()):  # those may hold what was purged since they were reserved
                assert not self.tainted.keys() & set(target), "memory is used that still holds what was purged"
            self.expected[instruction.op] = content = self.here.arena.read(source)
            assert all(isinstance(one, tuple) and one[0] in self.blocks for one in content), f"copies {content}"
        worker.take(instruction)

    @staticmethod
    def ends_of(worker: DeviceWorker, op: Upload | Download) -> tuple[list[int], list[int]]:
        pool = [worker.base + slot for slot in op.slots]
        return (op.host, pool) if isinstance(op, Upload) else (pool, op.host)

    def slots_landing(self) -> set[int]:
        return {slot for landing in self.state._ledger.landings.values() for slot in landing.offsets}

    # ---- what they do

    def run_op(self, device: int, op: DeviceOp, failure: Reason | None = None) -> None:
        worker = self.devices[device].worker
        if not isinstance(op, Zero):
            source, _ = self.ends_of(worker, op)
            assert self.here.arena.read(source) == self.expected.pop(op.op), "changed while it was copied"
        worker.run(op, None if isinstance(op, Zero) else failure)

    def hear(self, device: int, at: int) -> None:
        _, report = self.devices[device].worker.unheard.pop(at)
        self.absorb(self.state.device_report(device, report, self.now))

    @precondition(lambda self: any(device.worker.waiting for device in self.devices))
    @rule(draw=st.data(), fails=st.sampled_from([False, False, False, True]))
    def a_device_copies_something(self, draw: st.DataObject, fails: bool) -> None:
        device = draw.draw(st.sampled_from([at for at, one in enumerate(self.devices) if one.worker.waiting]))
        self.devices[device].worker.scribble()
        op = draw.draw(st.sampled_from(self.devices[device].worker.waiting))
        self.run_op(device, op, Reason.IO_ERROR if fails else None)

    @precondition(lambda self: any(device.worker.unheard for device in self.devices))
    @rule(draw=st.data())
    def a_device_is_heard(self, draw: st.DataObject) -> None:
        device = draw.draw(st.sampled_from([at for at, one in enumerate(self.devices) if one.worker.unheard]))
        self.hear(device, draw.draw(st.integers(0, len(self.devices[device].worker.unheard) - 1)))

    def devices_do_all(self) -> bool:
        was_busy = False
        for device, one in enumerate(self.devices):
            while one.worker.waiting or one.worker.unheard:
                was_busy = True
                for op in list(one.worker.waiting):
                    self.run_op(device, op)
                while one.worker.unheard:
                    self.hear(device, -1)
        return was_busy

    @rule(draw=st.data())
    def something_happens_to_a_device(self, draw: st.DataObject) -> None:
        device = draw.draw(st.integers(0, len(self.devices) - 1))
        one = self.devices[device]
        kinds = (
            ["map", "map", "map", "die", "hear late", "evict"]
            if one.is_up
            else ["start", "start", "start smaller", "map"]
        )
        what = draw.draw(st.sampled_from(kinds))
        if what == "map":
            self.state.map_device(draw.draw(st.sampled_from(self.here.sessions)), device)
        elif what.startswith("start"):
            self.start_device(device, one.size if what == "start" else one.size // 2)
        elif what == "hear late" and self.stale:
            whose, report = self.stale.pop()
            self.absorb(self.state.device_report(whose, report, self.now))
        elif what == "die":
            self.a_device_dies(device)
        elif what == "evict":
            self.an_operator_evicts_from_devices()

    def an_operator_evicts_from_devices(self) -> None:
        """Nothing is lost, nothing leaves host memory, and no more goes than was said."""
        in_host = {extent: extent.longest_host_blocks for extent in self.state._ledger.tree}
        preview = self.state.preview_eviction("gpu", 0, "", self.now)
        answer, effects = self.state.evict("gpu", 0, "", self.now)
        assert {extent: extent.longest_host_blocks for extent in self.state._ledger.tree} == in_host
        assert preview.used_bytes <= answer.used_bytes
        assert answer.lost_tokens == 0
        self.absorb(effects)

    def a_device_dies(self, device: int) -> None:
        one = self.devices[device]
        self.stale += [(device, report) for _, report in one.worker.unheard]
        self.stale += [(device, CopyDone(op.op, 0.1)) for op in one.worker.waiting if not isinstance(op, Zero)]
        self.stale += [(device, OpFailed(op.op, Reason.IO_ERROR)) for op in one.worker.waiting]
        pool = range(one.worker.base, one.worker.base + one.size)
        for ticket in self.here.tickets.values():
            ticket.lost.update(slot for slot in ticket.answer.offsets if slot in pool)
        for holding in self.here.holdings.values():
            for offsets, _, _ in holding.live_parts():
                holding.lost.update(slot for slot in offsets if slot in pool)
        one.worker.die()
        one.is_up = False
        self.others_did = self.others_took = True  # what only that pool had is gone, whatever hangs on it
        self.absorb(self.state.device_worker_died(device, self.now))

    # ---- engines

    def do_commit(self, ticket: Ticket, *, twice: bool = False) -> None:
        if not ticket.lost or ticket.purged:
            super().do_commit(ticket, twice=twice)
            return
        ticket.fill()  # as far as that pool is still mapped
        del self.here.tickets[ticket.grant]
        self.ended[ticket.grant] = "lost"
        for _ in range(2 if twice else 1):
            answer, effects = self.state.commit(ticket.grant, self.now)
            assert answer == Refused(Reason.DEVICE_DOWN)
            self.absorb(effects)

    def expect_gone(self, gone: set[bytes]) -> None:
        super().expect_gone(gone)
        for landing in self.state._ledger.landings.values():
            if gone & set(landing.block_keys):
                self.here.arena.write(landing.offsets, ["to be landed"] * len(landing.offsets))
                self.tainted |= dict.fromkeys(landing.offsets)

    # ---- promises

    def claim_beside(self, claim: Callable[[list[int], str], None]) -> None:
        ledger = self.state._ledger
        twins = ledger.devices.twins
        for ticket in ledger.tickets.values():
            model = self.here.tickets[ticket.grant]
            beside = [slot for slot in ticket.offsets if slot in twins]
            if not model.lost:
                told = [twins.get(slot, slot) for slot in ticket.offsets]
                assert told == model.answer.offsets, "told of other slots than the ticket has"
            hidden = [slot for slot in ticket.offsets if slot not in model.answer.offsets]
            assert set(beside) <= set(hidden)
            claim(hidden, f"beside what ticket {ticket.grant!r} was told of")
        for landing in ledger.landings.values():
            claim(landing.offsets, f"landing {landing.grant!r}")
            claim([twins[slot] for slot in landing.offsets if slot in twins], f"landing {landing.grant!r} on a device")
        for block in ledger.staged.values():
            for rank, slot in block.slots.items():
                if slot in twins:
                    claim([twins[slot]], "staged, on a device")
                    assert self.here.arena.read([twins[slot]]) == [(block.key, rank)]
        for extent, own in ledger.devices.copies.items():
            for (device, rank), slots in own.items():
                claim(list(slots), f"{extent} rank {rank} on device {device}")
                assert self.here.arena.read(slots) == stamps(extent.keys, rank)[: len(slots)], "a foreign block"
        for slot, owner in self.state._cascade.devices.slots():
            claim([slot], owner)
        for pool in ledger.devices.pools:
            for wipe in self.state._cascade.devices.wipes(pool.device):
                claim(wipe.slots, "a wipe")

    @invariant()
    def no_pool_holds_more_than_it_has(self) -> None:
        for tier, device in zip(self.state.device_tiers(), self.devices, strict=True):
            assert tier.used_bytes + tier.reserved_bytes <= tier.capacity_bytes <= device.size
            assert device.is_up or tier.capacity_bytes == 0

    def check_quiet(self) -> None:
        super().check_quiet()
        ledger = self.state._ledger
        assert not ledger.landings
        assert not ledger.devices.twins
        assert not ledger.devices.filling
        assert all(tier.reserved_bytes == 0 for tier in self.state.device_tiers())

    def teardown(self) -> None:
        for device, one in enumerate(getattr(self, "devices", ())):
            if not one.is_up:
                self.start_device(device, one.size)
        super().teardown()


TestDeviceMachine = pytest.mark.timeout(0 if "HYPOTHESIS_PROFILE" in os.environ else 300)(DeviceMachine.TestCase)
TestDeviceMachine.settings = settings(
    settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci")),
    max_examples=60 if "HYPOTHESIS_PROFILE" not in os.environ else 20_000,
)
