"""The gateway's numbers for Prometheus, read from its counts when the page is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.gateway.gateway import Gateway

COUNTERS = {
    "requests": "Requests for a turn",
    "prompt_tokens": "Tokens that turns began with",
    "reused_tokens": "Tokens of these that were not rendered anew",
    "cached_tokens": "Tokens of these that a replica's cache had",
    "sampled_tokens": "Tokens sampled in turns that ended",
    "wasted_tokens": "Tokens sampled in turns that were cut off",
    "overruled": "Requests whose sampling the session's rules did not follow",
    "renamed": "Requests for a model of another name, which the session's model answered",
    "refused": "Requests that were answered with an error of the client's",
}


class Metrics:
    """`page` is what GET /metrics answers."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Counts(gateway))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _Counts(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        counts = self._gateway.counts
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"rocstar_gateway_{name}", text, value=getattr(counts, name))
        yield GaugeMetricFamily("rocstar_gateway_sessions", "Sessions that are open", value=len(self._gateway))
        fleet = self._gateway.fleet
        yield GaugeMetricFamily("rocstar_gateway_replicas", "Replicas that serve", value=len(fleet.live))
        yield GaugeMetricFamily("rocstar_gateway_weight_version", "Of the weights that are served", value=fleet.version)
