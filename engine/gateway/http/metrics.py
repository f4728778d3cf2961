"""The gateway's metrics for Prometheus, read from its counts at each request."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.gateway.gateway import Gateway

COUNTERS = {
    "requests": "Requests for a turn",
    "prompt_tokens": "Tokens in the prompts of turns",
    "reused_tokens": "Prompt tokens that were not rendered again",
    "cached_tokens": "Prompt tokens in the cache of a replica",
    "sampled_tokens": "Tokens sampled in turns that ended",
    "wasted_tokens": "Tokens sampled in turns that were cut off",
    "overruled": "Requests with a field (temperature, top_k, ...) that the session's own sampling overruled",
    "constrained": "Requests whose turn had to be a call, or JSON",
    "forced_tokens": "Sampled tokens that a grammar decided about, which are not trained",
    "renamed": "Requests for another model, which the session's model answered",
    "refused": "Requests that were answered with a client error",
}


class Metrics:
    """The metrics of a gateway. `page` returns the answer to GET /metrics."""

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
        left_out = self._gateway.left_out.total()
        yield CounterMetricFamily("rocstar_gateway_tools_left_out", "Offered tools that were left out", value=left_out)
        yield GaugeMetricFamily("rocstar_gateway_sessions", "Open sessions", value=len(self._gateway))
        fleet = self._gateway.fleet
        yield GaugeMetricFamily("rocstar_gateway_replicas", "Serving replicas", value=len(fleet.live))
        yield GaugeMetricFamily("rocstar_gateway_weight_version", "Version of the served weights", value=fleet.version)
