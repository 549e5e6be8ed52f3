"""A connector whose loads fail while a file lies there: what --kv-transfer-config names instead of tierkv's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.integrations.connector.plan import Pages
from tierkv.integrations.vllm.connector import TierkvConnector

VARIABLE = "TIERKV_TEST_FAIL_LOADS"
"""Names the file."""


class FailingLoads(TierkvConnector):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        pages = self._working._pages
        assert pages is not None
        write_pages = pages.write_pages

        def write_or_fail(rows: np.ndarray, wanted: Pages) -> None:
            write_pages(np.full_like(rows, 0x3F) if Path(os.environ[VARIABLE]).exists() else rows, wanted)
            if Path(os.environ[VARIABLE]).exists():
                raise OSError("planted: this load fails, and has left numbers that are none of its own")

        pages.write_pages = write_or_fail  # type: ignore[method-assign]
