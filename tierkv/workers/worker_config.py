"""What the supervisor tells a storage worker when it starts it.

python -m tierkv.workers.storage CONFIG     one argument: a WorkerConfig as JSON; the descriptors are inherited
"""

from __future__ import annotations

from tierkv.workers.tier_config import TierWorkerConfig


class WorkerConfig(TierWorkerConfig, frozen=True, kw_only=True):
    """`lock_fd` is the data directory's lock, held by being open.

    `reconcile_seconds`: how often files that others removed are looked for.

    `journal_bytes` and `journal_seconds` bound the journal.
    """

    lock_fd: int
    reconcile_seconds: float = 300.0
    journal_bytes: int = 64 * 2**20
    journal_seconds: float = 30 * 86_400.0
