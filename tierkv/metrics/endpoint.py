"""The HTTP endpoint, metrics for Prometheus and health: off unless a port is given, on the loopback address unless told
otherwise."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tierkv.errors import ConfigError
from tierkv.metrics import health
from tierkv.metrics.snapshot import LATENCY_BOUNDS, Latency, Snapshot
from tierkv.metrics.table import METRICS, PREFIX, Declared, Kind

POLL_SECONDS = 0.5
"""How late `close` may be noticed."""

RESTART_SECONDS = 1.0

log = logging.getLogger(__name__)


class SnapshotCollector(Collector):
    """Turns the snapshot that `read` gives into metric families at each scrape."""

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        snapshot = self._read()
        for declared in METRICS:
            yield _family(declared, snapshot)


_FAMILIES: dict[Kind, Callable[..., Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(declared: Declared, snapshot: Snapshot) -> Any:  # the library's families share no typed `add_metric`
    family = _FAMILIES[declared.kind](PREFIX + declared.name, declared.meaning, labels=declared.labels)
    for labels, value in declared.read(snapshot).items():
        if isinstance(value, Latency):
            family.add_metric(labels, _cumulative(value), value.total_seconds)
        else:
            family.add_metric(labels, value)
    return family


def _cumulative(latency: Latency) -> list[tuple[str, float]]:
    """Prometheus buckets: of each upper bound, how many were not above it."""
    bounds = [*map(str, LATENCY_BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(map(float, latency.counts)), strict=True))


def registry(read: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry with the table's metrics and nothing else; the process-wide default one is left alone."""
    own = CollectorRegistry()
    own.register(SnapshotCollector(read))
    return own


def _application(read: Callable[[], Snapshot], silence: Callable[[], float]) -> Any:
    """The health pages, and metrics under every other path."""
    metrics = make_wsgi_app(registry(read))

    def application(environ: Any, start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if path not in health.PAGES:
            return metrics(environ, start_response)
        snapshot = read()
        status, body = health.page(path, snapshot, silence())
        line = f"{status} {HTTPStatus(status).phrase}"
        start_response(line, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return application


class _RequestHandler(WSGIRequestHandler):
    timeout = 5.0  # seconds a connection may keep its thread without sending or taking a byte

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # WSGIServer would ask the name service for this machine's name, which can take seconds and is never used.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a dead front linger there
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class MetricsEndpoint:
    """HTTP endpoint for Prometheus in a thread of its own, until `close`. Also a context manager.

    `read` is called in that thread; `silence` says for how long whoever makes snapshots has not answered. Port 0 takes
    a free one, see `port`. Raises ConfigError when the address can't be had.
    """

    def __init__(
        self, host: str, port: int, read: Callable[[], Snapshot], *, silence: Callable[[], float] = lambda: 0.0
    ) -> None:
        server_type = _ServerV6 if ":" in host else _Server
        try:
            self._server = server_type((host, port), _RequestHandler)
        except OSError as error:
            problem = f"can't listen on {host} port {port}: {error.strerror}; write another port or metrics_host"
            raise ConfigError("metrics_port", problem) from error
        self._server.set_app(_application(read, silence))
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Until `close`. Whatever ends the server's loop, it is begun again: nobody would notice that it is gone."""
        while not self._is_closing.is_set():
            try:
                self._server.serve_forever(poll_interval=POLL_SECONDS)
            except BaseException:  # of any kind: what matters is that the loop goes on
                log.exception("thread metrics; it is started again")
                self._is_closing.wait(RESTART_SECONDS)

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
