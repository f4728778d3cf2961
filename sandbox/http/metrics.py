"""The server's Prometheus metrics, in a registry of their own.

Invariants
- Labels take few values, none of which a client chooses.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    def __init__(self, *, hosts: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self.calls = Counter(
            "rocstar_sandbox_calls", "Calls that ended", ["dialect", "outcome"], registry=self._registry
        )
        self.in_flight = Gauge("rocstar_sandbox_calls_in_flight", "Calls running or waiting", registry=self._registry)
        self.wall_s = Histogram(
            "rocstar_sandbox_call_wall_seconds", "Execution of a call", buckets=SECONDS, registry=self._registry
        )
        self.queue_s = Histogram(
            "rocstar_sandbox_call_queue_seconds", "Wait before and after", buckets=SECONDS, registry=self._registry
        )
        started = "Hosts started so far: each but the first replaces one that died"
        Gauge("rocstar_sandbox_hosts", started, registry=self._registry).set_function(hosts)

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
