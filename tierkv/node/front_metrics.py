"""The front's HTTP endpoint of metrics and health: off unless a port is given; the library is imported only then."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError
from tierkv.metrics import Snapshot
from tierkv.node.scrape import Scrape

if TYPE_CHECKING:
    from tierkv.metrics.endpoint import MetricsEndpoint

log = logging.getLogger(__name__)


class FrontMetrics:
    """Owns the endpoint. `serve` is called in the loop when a snapshot is `wanted`."""

    def __init__(self, host: str, port: int | None) -> None:
        self._host = host
        self._port = port
        self._scrape: Scrape | None = None
        self._endpoint: MetricsEndpoint | None = None
        self._is_told = False

    def start(self, make: Callable[[], Snapshot]) -> str:
        """Why there is none, in words. Where the address can't be had (the supervisor could have it at its start) the
        node goes on without; call it again later."""
        if self._port is None:
            return ""
        from tierkv.metrics.endpoint import MetricsEndpoint  # noqa: PLC0415 - see above

        if self._scrape is None:
            self._scrape = Scrape(make())
        read, silence = self._scrape.read, self._scrape.silence
        try:
            self._endpoint = MetricsEndpoint(self._host, self._port, read, silence=silence)
        except ConfigError as error:
            if not self._is_told:
                log.error("no metrics: %s", error)
            self._is_told = True
            return str(error)
        self._is_told = False
        return ""

    def filenos(self) -> list[int]:
        return [self._scrape.fileno()] if self._scrape is not None else []

    def wanted(self, ready: Container[int]) -> bool:
        """Whether somebody scrapes, as far as `ready` descriptors tell."""
        return self._scrape is not None and self._scrape.fileno() in ready

    def serve(self, make: Callable[[], Snapshot]) -> None:
        assert self._scrape is not None
        self._scrape.serve(make)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._scrape is not None:
            self._scrape.close()
