"""What the supervisor tells the worker of the disk tier when it starts it.

python -m tierkv.workers.disk CONFIG     one argument: a DiskWorkerConfig as JSON; the descriptors are inherited
"""

from __future__ import annotations

from tierkv.workers.tier_config import TierWorkerConfig


class DiskWorkerConfig(TierWorkerConfig, frozen=True, kw_only=True):
    """`disk_dir` may be shared with other nodes. The files of `data_dir` are what Demote copies, and the index of the
    disk tier lies in it.

    `rescan_seconds`: how often files that other nodes put there or removed are looked for.
    """

    disk_dir: str
    rescan_seconds: float = 300.0
