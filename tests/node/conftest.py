"""A service with an NVMe tier, or with a disk tier below it, for whoever needs one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.kit import Kit


@pytest.fixture
def durable() -> Iterator[Kit]:
    kit = Kit(nvme_bytes=2**20)
    kit.start_worker()
    kit.open()
    kit.instructions()
    yield kit
    kit.close()


@pytest.fixture
def two_tiers() -> Iterator[Kit]:
    kit = Kit(nvme_bytes=2**20, disk_bytes=2**22)
    kit.open()
    kit.start_worker()
    kit.start_disk_worker()
    kit.instructions()
    kit.disk_instructions()
    yield kit
    kit.close()
