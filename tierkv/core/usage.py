"""What is held, for `du`, `status` and metrics: sums that the books already keep."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.core.cascade import Cascade
from tierkv.core.grants import GroupSpec
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.tier_files import TierFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUsage:
    spec: GroupSpec
    persistent: bool
    reachable: bool
    ranks: int
    extents: int
    tokens: int
    host_bytes: int
    nvme_bytes: int
    last_used: float
    disk_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBytes:
    """`used + reserved + overhead <= capacity`. Reserved: being written or filled, or held for somebody who may be."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    overhead_bytes: int
    is_writable: bool = True
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What is written to NVMe, in bytes: since midnight UTC against what a day may have (0: no limit), and since this
    core began, beside the tokens that leases found in any tier since then. Extents that wait for the budget."""

    today_bytes: int
    day_bytes: int
    written_bytes: int
    reused_tokens: int
    waiting_extents: int


def wear(ledger: Ledger, cascade: Cascade, now: float) -> Wear:
    budget = cascade.admission.budget
    return Wear(
        today_bytes=budget.written_today(now),
        day_bytes=budget.per_day,
        written_bytes=ledger.counts.nvme_written_bytes,
        reused_tokens=sum(ledger.counts.hit_tokens.values()),
        waiting_extents=cascade.admission.num_waiting,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareUse:
    """What one share uses of a tier, and what is its. Together the second come to the tier's capacity."""

    name: str
    tier: str
    used_bytes: int
    own_bytes: int


def share_use(ledger: Ledger) -> list[ShareUse]:
    """Empty where no shares are set."""
    if not ledger.shares.is_set:
        return []
    limits = ledger.limits
    return [
        ShareUse(name=share.name, tier=tier, used_bytes=used, own_bytes=int(share.part * capacity))
        for share in ledger.shares.all
        for tier, used, capacity in (
            ("host", share.host_bytes, limits.host_bytes),
            *([("nvme", share.nvme_bytes, limits.nvme_bytes)] if ledger.has_nvme else []),
            *([("disk", share.disk_bytes, limits.disk_bytes)] if ledger.has_disk else []),
        )
    ]


def group_usage(ledger: Ledger) -> list[GroupUsage]:
    reachable = {group for session in ledger.sessions.values() for group in session.groups}
    return [
        GroupUsage(
            spec=group.spec,
            persistent=group.persistent,
            reachable=key in reachable,
            ranks=group.ranks,
            extents=group.extents,
            tokens=group.blocks * group.block_tokens,
            host_bytes=group.host_slots * group.slot_bytes,
            nvme_bytes=group.nvme_bytes,
            disk_bytes=group.disk_bytes,
            gpu_bytes=group.gpu_slots * group.slot_bytes,
            last_used=group.last_used,
        )
        for key, group in ledger.groups.items()
    ]


def settled_bytes(ledger: Ledger, cascade: Cascade, tier: str) -> dict[bytes, int]:
    """What is in a tier of files of each group of which nothing is being written, read or removed now."""
    moving = {extent.group for extent in cascade.extents_with_moving_files()}
    return {
        key: group.disk_bytes if tier == "disk" else group.nvme_bytes
        for key, group in ledger.groups.items()
        if key not in moving
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillUse:
    """What a model's tokens are reckoned with, at the start of a prompt, where its engines use this layout: measured
    from so many `samples`; 0: it is the setting."""

    fingerprint: str
    model_name: str
    dtype: str
    layout: str
    tokens_per_second: float
    samples: int


def prefill_use(ledger: Ledger) -> list[PrefillUse]:
    """One for each setup of engines, whatever tenants and adapters they serve."""
    by_rate = {id(group.prefill): group for group in ledger.groups.values()}
    return [
        PrefillUse(
            fingerprint=group.spec.identity.weights,
            model_name=group.spec.model_name,
            dtype=group.spec.identity.layout.dtype,
            layout=group.spec.identity.layout.engine,
            tokens_per_second=ledger.prefill_rate(group),
            samples=group.prefill.samples if group.prefill.is_measured else 0,
        )
        for group in by_rate.values()
    ]


def tier_bytes(ledger: Ledger, cascade: Cascade) -> list[TierBytes]:
    resident = sum(group.host_slots * group.slot_bytes for group in ledger.groups.values())
    tiers = [
        TierBytes(
            tier="host",
            capacity_bytes=ledger.limits.host_bytes,
            used_bytes=resident,
            reserved_bytes=ledger.pool.used_bytes - resident,
            overhead_bytes=ledger.limits.host_bytes - ledger.pool.limit_bytes,
        )
    ]
    return [
        *_gpu_tier(ledger),
        *tiers,
        *([_tier_of_files(cascade.nvme)] if ledger.has_nvme else []),
        *([_tier_of_files(cascade.disk)] if ledger.has_disk else []),
    ]


def _gpu_tier(ledger: Ledger) -> list[TierBytes]:
    """All devices together."""
    devices = device_tier_bytes(ledger)
    if not devices:
        return []
    return [
        TierBytes(
            tier="gpu",
            capacity_bytes=sum(one.capacity_bytes for one in devices),
            used_bytes=sum(one.used_bytes for one in devices),
            reserved_bytes=sum(one.reserved_bytes for one in devices),
            overhead_bytes=0,
            is_writable=any(one.is_writable for one in devices),
            reason=None if any(one.is_writable for one in devices) else Reason.DEVICE_DOWN,
        )
    ]


def device_tier_bytes(ledger: Ledger) -> list[TierBytes]:
    return [
        TierBytes(
            tier="gpu",
            capacity_bytes=pool.capacity_bytes,
            used_bytes=pool.resident_bytes,
            reserved_bytes=(pool.slots.used_bytes if pool.slots is not None else 0) - pool.resident_bytes,
            overhead_bytes=0,
            is_writable=pool.is_open,
            reason=None if pool.is_open else Reason.DEVICE_DOWN,
        )
        for pool in ledger.devices.pools
    ]


def _tier_of_files(files: TierFiles) -> TierBytes:
    return TierBytes(
        tier=files.books.tier,
        capacity_bytes=files.books.capacity_bytes,
        used_bytes=files.used_bytes,
        reserved_bytes=files.reserved_bytes,
        overhead_bytes=_overhead(files),
        is_writable=files.is_writable,
        reason=files.why_not_writable,
    )


def _overhead(files: TierFiles) -> int:
    """With as much of the room for growth as is left: when more is wanted of it, extents go first, and until they are
    gone it is not there."""
    there = files.overhead_bytes - files.growth_bytes
    left = files.books.capacity_bytes - files.used_bytes - files.reserved_bytes - there
    return there + max(0, min(left, files.growth_bytes))
