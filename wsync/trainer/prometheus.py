"""Prometheus metrics of updates, in the default registry of the package prometheus_client."""

from __future__ import annotations

import functools
import logging
import socket
from types import SimpleNamespace

from wsync import _core
from wsync.report import Report

_log = logging.getLogger("wsync")
_CALLS = ("update", "stage", "commit", "verify")
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Exporter:
    """Records the updates of one connection.  All connections of a process share the metrics.

    port: where this process serves its registry to every host, without a password; True leaves
        that to the program.

    Raises:
        InvalidArgumentError: prometheus_client is missing, or the port is taken.
    """

    def __init__(self, port: int) -> None:
        self._metrics = _collectors()
        for call in _CALLS:  # a counter that appears with its first failure has no increase
            self._metrics.failures.labels(call)
        if port is not True:
            _serve(port)

    def end(self, report: Report) -> None:
        """Records an update that has succeeded."""
        metrics, engines = self._metrics, {*report.paused, *report.lost}
        metrics.seconds.observe(report.seconds)
        metrics.nbytes.inc(report.delivered_nbytes)
        metrics.ended.set_to_current_time()
        if report.version.isdecimal():
            metrics.version.set(int(report.version))
        for engine, seconds in report.paused.items():
            metrics.paused.labels(engine).inc(seconds)
        for engine in engines:
            metrics.lost.labels(engine).set(engine in report.lost)
        for engine in metrics.engines - engines:
            metrics.lost.remove(engine)
        metrics.engines = engines

    def fail(self, call: str) -> None:
        """Records a call that has failed."""
        self._metrics.failures.labels(call).inc()


@functools.cache  # a registry takes each name once
def _collectors() -> SimpleNamespace:
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError as error:
        raise _core.InvalidArgumentError(
            "Options.prometheus: the Python package prometheus_client is not installed: "
            f"pip install prometheus-client ({error})"
        ) from error
    histogram, by_engine = functools.partial(Histogram, buckets=_BUCKETS), ["engine"]
    return SimpleNamespace(
        seconds=histogram("wsync_update_duration_seconds", "Seconds that an update took"),
        nbytes=Counter("wsync_delivered_bytes_total", "Bytes that all engine workers were sent"),
        ended=Gauge("wsync_last_update_timestamp_seconds", "When the last update succeeded"),
        version=Gauge("wsync_weight_version", "Version of the last update, if it is a number"),
        paused=Counter(
            "wsync_engine_paused_seconds_total", "Seconds without generation", by_engine
        ),
        lost=Gauge("wsync_engine_lost", "1 if the last update went without the engine", by_engine),
        failures=Counter("wsync_failures_total", "Calls that raised an error", ["call"]),
        engines=set[str](),  # of the last update, perhaps by an earlier connection
    )


@functools.cache  # a process that connects again goes on serving
def _serve(port: int) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port)
    except OSError as error:
        raise _core.InvalidArgumentError(f"prometheus={port}: cannot listen: {error}") from error
    _log.info("wsync: metrics at http://%s:%d/metrics", socket.gethostname(), port)
