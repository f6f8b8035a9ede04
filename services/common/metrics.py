"""`/metrics`, `/livez` and `/readyz` of one process, on their own port.

The server runs in a thread, so that a scrape never delays the event loop. `/livez` makes the event loop run a callback,
so that Kubernetes restarts a stuck process; it depends on nothing outside the process.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common.loop_lag import LoopLag
from services.common.telemetry_names import NamingRegistry, Scheme

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LIVENESS_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


def new_registry(service: str, schemes: Collection[Scheme] = ()) -> CollectorRegistry:
    """A registry with metrics of the process: its build, CPU time, memory, file descriptors, start, frozen objects.

    It also exports its series under the names of the `schemes`.
    """
    # A `_created` series for every counter and histogram, which nothing reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = NamingRegistry(schemes)
    ProcessCollector(registry=registry)
    about = "Objects that live as long as the process, which garbage collections therefore skip"
    Gauge("ryzanstein_process_frozen_objects", about, registry=registry).set_function(gc.get_freeze_count)
    build = Gauge(
        "ryzanstein_build_info",
        "1; labels have the version that the process runs, and the commit of its image",
        ["service", "version", "commit", "python"],
        registry=registry,
    )
    build.labels(service, _version(), os.environ.get("RYZANSTEIN_COMMIT", ""), platform.python_version()).set(1)
    return registry


def _version() -> str:
    try:
        return version("ryzanstein")
    except PackageNotFoundError:  # run from a folder that is not installed
        return ""


@dataclass(frozen=True, slots=True)
class NewMetrics:
    """Makes metrics in a registry; their names begin with `prefix`."""

    registry: CollectorRegistry
    prefix: str

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter."""
        return Counter(self.prefix + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """A gauge."""
        return Gauge(self.prefix + name, text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        """A histogram."""
        return Histogram(self.prefix + name, text, labels, buckets=buckets, registry=self.registry)


class Totals(Collector):
    """A counter whose totals are kept elsewhere: `read` returns them by the value of the label.

    The registry calls `read` from another thread, so it must not change anything.
    """

    def __init__(
        self, name: str, help_text: str, label: str, read: Callable[[], Mapping[str, int]], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._help = help_text
        self._label = label
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        family = CounterMetricFamily(self._name, self._help, labels=[self._label])
        for value, total in self._read().items():
            family.add_metric([value], total)
        yield family


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Log nothing: probes and scrapes come every few seconds."""


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the event loop runs a callback in time."""
    ran = threading.Event()
    try:
        loop.call_soon_threadsafe(ran.set)
    except RuntimeError:  # the loop is closed: the process is ending
        return False
    return ran.wait(LIVENESS_TIMEOUT_S)


@contextmanager
def serve_metrics(host: str, port: int, registry: CollectorRegistry, waits_for: Callable[[], str]) -> Iterator[None]:
    """Serve while the block runs; enter it on the event loop. Port 0 serves nothing.

    `waits_for` returns why the process is not ready, empty if it is. It is called from another thread, so it must not
    change anything. Raises OSError if the port is taken.
    """
    lag = LoopLag(registry)
    try:
        with lag.watched():
            if port == 0:
                yield
                return
            with _serving(host, port, registry, waits_for):
                yield
    finally:
        registry.unregister(lag)


@contextmanager
def _serving(host: str, port: int, registry: CollectorRegistry, waits_for: Callable[[], str]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    metrics: WSGIApplication = make_wsgi_app(registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def answer(trouble: str) -> Iterable[bytes]:
            status = "503 Service Unavailable" if trouble else "200 OK"
            body = f"{trouble or 'ok'}\n".encode()
            start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
            return [body]

        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start_response)
            case "/livez":
                return answer("" if _answers(loop) else "the event loop does not answer")
            case "/readyz":
                return answer(waits_for())
        start_response("404 Not Found", [("Content-Length", "0")])
        return []

    server = make_server(host, port, app, _Server6 if ":" in host else _Server, _QuietHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
