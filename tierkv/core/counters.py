"""What the core has counted since it began. Only ever grows; metrics and `status` read it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    asked_tokens: int = 0  # of acquires
    asked_prefill_seconds: float = 0.0  # what computing all of these would cost an engine
    missed_prefill_seconds: float = 0.0  # and those that were not granted
    hit_tokens: Counter[str] = field(default_factory=Counter)  # by the tier they came from
    stored_tokens: int = 0  # became visible
    duplicate_blocks: int = 0
    leases: int = 0
    tickets: int = 0
    aborted_tickets: Counter[str] = field(default_factory=Counter)
    revoked_leases: int = 0
    refused_blocks: Counter[str] = field(default_factory=Counter)  # not granted a slot, by reason
    shortened_leases: Counter[str] = field(default_factory=Counter)
    regretted_tokens: Counter[str] = field(default_factory=Counter)  # asked for after they were evicted, by why
    regretted_seconds: float = 0.0  # of prefill, to compute these again
    evicted_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (tier, reason)
    evicted_blocks: Counter[tuple[str, str]] = field(default_factory=Counter)
    dropped_unwritten_bytes: Counter[str] = field(default_factory=Counter)  # left host memory and was nowhere else
    dropped_writes: Counter[str] = field(default_factory=Counter)
    flushed_extents: int = 0
    nvme_written_bytes: int = 0
    nvme_write_seconds: float = 0.0
    nvme_read_bytes: int = 0
    nvme_read_seconds: float = 0.0
    demoted_extents: int = 0  # copied to the disk tier
    dropped_demotions: Counter[str] = field(default_factory=Counter)  # left NVMe without a copy there, by reason
    disk_written_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0
    promoted_blocks: int = 0
    failed_reads: Counter[str] = field(default_factory=Counter)
    damaged_extents: Counter[str] = field(default_factory=Counter)
    drift_bytes: int = 0  # of files that somebody else removed, noticed by looking and not by reading
    stale_staged_blocks: int = 0
    worker_deaths: int = 0
    disk_worker_deaths: int = 0
    device_worker_deaths: int = 0
    landed_blocks: int = 0  # stored on a device, and copied into host memory
    dropped_landings: Counter[str] = field(default_factory=Counter)  # blocks that did not get there, by reason
    uploaded_blocks: int = 0  # copied from host memory to a device
    fetched_blocks: int = 0  # copied from a device to host memory, because they were wanted there or left the device
    lost_blocks: Counter[str] = field(default_factory=Counter)  # that only a device had, by why it has them no more
    failed_copies: Counter[str] = field(default_factory=Counter)  # between host memory and a device, by reason
    purges: int = 0
    purged_blocks: int = 0
    wiped_bytes: int = 0  # of host memory and devices, zeroed because of purges
