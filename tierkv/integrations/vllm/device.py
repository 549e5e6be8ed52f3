"""Which pool of the node an engine's pages are copied from and to: that of the GPU on which they lie."""

from __future__ import annotations

import logging

from tierkv.integrations.connector.worker import PagesOnDevice
from tierkv.integrations.vllm.pages import EnginePages

AUTO, NONE = "auto", "none"

log = logging.getLogger(__name__)


def uses_pools(wanted: str, device_type: str) -> bool:
    """Whether workers may have mapped a pool. One that has not gets slots in host memory all the same."""
    return wanted != NONE and (wanted != AUTO or device_type == "cuda")


def pages_on_device(pages: EnginePages, wanted: str) -> PagesOnDevice | None:
    """None where blocks are to go by way of host memory. A pool of another device than the pages' can't be copied from
    on the device, so that it is not used: the log says so."""
    if not uses_pools(wanted, pages.device.type):
        return None
    here = "cpu" if pages.device.type == "cpu" else f"{pages.device.type}:{pages.device.index or 0}"
    if wanted == AUTO:
        wanted = here
    elif wanted != here and not (here == "cpu" and wanted.startswith("cpu:")):
        log.warning(
            "device %s is asked for, but the engine's KV lies on %s: blocks go by way of host memory", wanted, here
        )
        return None
    return PagesOnDevice(wanted, pages.layouts(), pages.computed_event)
