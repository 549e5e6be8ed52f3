"""A service with an NVMe tier, for whoever needs one."""

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
