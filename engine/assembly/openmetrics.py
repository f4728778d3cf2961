"""Serves a run's metrics to Prometheus and the like: `GET /metrics`, OpenMetrics text, on loopback.

    curl -H 'Accept: application/openmetrics-text' http://127.0.0.1:PORT/metrics

Invariants
- A scrape reads counts that are there anyway, in the event loop and without waiting, and renders them.
- `rocstar_run_*` are as of the scrape. `rocstar_step_*` are the rows of metrics.jsonl: of the newest step, and of the
  newest evaluation. What they did not measure is missing, never 0.
- While it listens, scrape.json in the run's folder says where, in the form of Prometheus's `file_sd_configs`: with
  `files: [runs/*/scrape.json]` it finds all runs of a machine by itself.
- Labels have few values, and none that a model chooses.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine import metric_names as metric
from engine.console.recorder import RunRecorder
from engine.fleet.fleet import Fleet
from engine.pipeline.pipeline import StageStats
from engine.run.run_folder import RunFolder
from engine.telemetry.in_flight import STATES
from engine.telemetry.meanings import meaning_of
from engine.telemetry.timeline import Timeline
from sandbox.http.incoming import Refused, bodies_end, check_local
from sandbox.http.listener import Address, listening

SCRAPE = "scrape.json"
OWN = "rocstar_step_own"
_UNITS = (("_per_s", "_per_second"), ("_ms", "_milliseconds"), ("_s", "_seconds"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSources:
    """Where the metrics of a run come from. steps: how many it is to have. begun: when its training began, by the
    timeline's clock. tokens: those sampled so far by this process.
    """

    run: RunFolder
    steps: int
    begun: float
    timeline: Timeline
    fleet: Fleet
    recorder: RunRecorder
    stats: Callable[[], Sequence[StageStats]]
    tokens: Callable[[], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scraped:
    """The metrics as they are served. url: their address."""

    url: str
    _registry: CollectorRegistry

    def follow(self, sources: RunSources) -> None:
        """Serves the metrics of this run from now on; there are none before."""
        self._registry.register(RunCollector(sources))


@asynccontextmanager
async def scraped(run: RunFolder, port: int) -> AsyncIterator[Scraped]:
    """Serves while the block lasts. port: 0 for any free one. Raises `sandbox.http.listener.CannotListen`."""
    registry = CollectorRegistry()

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app = web.Application(middlewares=[bodies_end, _local])
    app.add_routes([web.get("/metrics", metrics)])
    async with listening(app, Address(port=port)) as url:
        target = {"targets": [urlsplit(url).netloc], "labels": {"run": run.path.name}}
        run.json(SCRAPE, [target])
        try:
            yield Scraped(url=f"{url}/metrics", _registry=registry)
        finally:
            with suppress(OSError):
                (run.path / SCRAPE).unlink()


@web.middleware
async def _local(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_local(request)
    except Refused as refused:
        return web.Response(status=refused.status, text=str(refused))
    return await handler(request)


class RunCollector(Collector):
    """Collects the metrics of a run."""

    def __init__(self, sources: RunSources) -> None:
        self._sources = sources

    def describe(self) -> list[Metric]:
        """Returns nothing: the registry would else collect once to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._run()
        yield from self._replicas()
        yield from self._stages()
        yield from self._rollouts()
        yield from row_metrics(self._rows())

    def _rows(self) -> dict[str, float]:
        """Returns the newest step's metrics, and the newest evaluation's."""
        progress = self._sources.recorder.progress
        step = progress.steps[-1] if progress.steps else {}
        evaluated = progress.evaluations[-1] if progress.evaluations else {}
        evaluation = {name: value for name, value in evaluated.items() if name.startswith("eval/")}
        return {name: value for name, value in {**step, **evaluation}.items() if name != "step"}

    def _run(self) -> Iterator[Metric]:
        sources = self._sources
        progress, now = sources.recorder.progress, sources.timeline.now()
        yield InfoMetricFamily("rocstar_run", "The run", value={"folder": str(sources.run.path)})
        trained = progress.steps[-1]["step"] if progress.steps else 0
        yield GaugeMetricFamily("rocstar_run_step", "Steps that are trained", value=trained)
        yield GaugeMetricFamily("rocstar_run_steps", "Steps that the run is to have", value=sources.steps)
        since = max(sources.begun, sources.recorder.last_step_at or 0.0)
        yield GaugeMetricFamily(
            "rocstar_run_step_age",
            "Seconds since the last step was trained, or since training began if none is",
            value=max(0.0, now - since),
            unit="seconds",
        )
        yield CounterMetricFamily("rocstar_run_tokens", "Tokens that this process has sampled", value=sources.tokens())

    def _replicas(self) -> Iterator[Metric]:
        fleet, idle = self._sources.fleet, self._sources.timeline.idle
        seconds = CounterMetricFamily(
            "rocstar_run_replica",
            "Seconds with a running request (busy), and without one by cause, since this process began",
            labels=["replica", "cause"],
            unit="seconds",
        )
        for replica, causes in sorted(idle.seconds(self._sources.timeline.now()).items()):
            for cause, value in sorted(causes.items()):
                seconds.add_metric([str(replica), cause], value)
        yield seconds
        used = GaugeMetricFamily(
            "rocstar_run_kv_used",
            "Share of KV blocks in use when the engine made its last step",
            labels=["replica"],
            unit="ratio",
        )
        for replica, share in sorted(fleet.kv_used.items()):
            used.add_metric([str(replica)], share)
        yield used
        requests = GaugeMetricFamily("rocstar_run_requests", "Requests on a replica", labels=["replica"])
        for replica, count in sorted(fleet.requests.items()):
            requests.add_metric([str(replica)], count)
        yield requests
        yield GaugeMetricFamily("rocstar_run_replicas", "Replicas that serve", value=len(fleet.live))
        yield CounterMetricFamily("rocstar_run_replica_deaths", "Replicas that died", value=fleet.deaths)
        yield CounterMetricFamily(
            "rocstar_run_preemptions", "Requests that lost their KV blocks", value=fleet.preemptions
        )
        yield GaugeMetricFamily("rocstar_run_weight_version", "Version of the weights that sample", value=fleet.version)

    def _stages(self) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            "rocstar_run_stage",
            "Seconds in which a stage worked (busy), waited for an item (blocked_in) and for room behind it "
            "(blocked_out), summed over its workers",
            labels=["stage", "state"],
            unit="seconds",
        )
        items = CounterMetricFamily("rocstar_run_stage_items", "Items of a stage", labels=["stage"])
        queue = GaugeMetricFamily("rocstar_run_stage_queue", "Items that wait for a stage", labels=["stage"])
        workers = GaugeMetricFamily("rocstar_run_stage_workers", "Workers of a stage", labels=["stage"])
        for row in self._sources.stats():
            for state, value in (
                ("busy", row.busy_s),
                ("blocked_in", row.blocked_in_s),
                ("blocked_out", row.blocked_out_s),
            ):
                seconds.add_metric([row.name, state], value)
            items.add_metric([row.name], row.items)
            queue.add_metric([row.name], row.queue)
            workers.add_metric([row.name], row.workers)
        yield from (seconds, items, queue, workers)

    def _rollouts(self) -> Iterator[Metric]:
        in_flight = self._sources.timeline.in_flight
        rollouts = GaugeMetricFamily("rocstar_run_rollouts", "Rollouts under way here, by state", labels=["state"])
        for state in STATES:
            rollouts.add_metric([state], in_flight.counts[state])
        yield rollouts
        ended = CounterMetricFamily("rocstar_run_rollouts_ended", "Rollouts that ended, by why", labels=["stop"])
        for stop, count in sorted(in_flight.stops.items()):
            ended.add_metric([stop], count)
        yield ended
        calls = CounterMetricFamily(
            "rocstar_run_tool_calls",
            'Tool calls that ended; those that were refused have the tool ""',
            labels=["tool", "outcome"],
        )
        for (tool, outcome), count in sorted(in_flight.calls.items()):
            calls.add_metric([tool, outcome], count)
        yield calls


class _Exported(NamedTuple):
    """How a metric of a row is exported. label: the name of its label, None if it has none."""

    name: str
    unit: str
    label: str | None
    value: str
    text: str


def row_metrics(row: Mapping[str, float]) -> Iterator[Metric]:
    """Yields a gauge for each documented metric of a row, with its meaning, and one for all that are the user's own.

    A family has the part that stands for `*` as a label. "_s" is written out.

    >>> [family] = row_metrics({"idle/tool_wait_s": 2.0})
    >>> family.name, family.samples[0].labels
    ('rocstar_step_idle_seconds', {'part': 'tool_wait'})
    """
    families: dict[str, GaugeMetricFamily] = {}
    for name, value in row.items():
        exported = _exported(name)
        if (family := families.get(exported.name)) is None:
            labels = [exported.label] if exported.label else []
            family = GaugeMetricFamily(exported.name, exported.text, labels=labels, unit=exported.unit)
            families[exported.name] = family
        family.add_metric([exported.value] if exported.label else [], value)
    yield from families.values()


@lru_cache(4096)
def _exported(name: str) -> _Exported:
    meaning = meaning_of(name)
    if meaning is None:
        return _Exported(OWN, "", "metric", name, "A metric of the recipe's own, as of the newest step")
    family, unit = meaning.family.replace("*", "").replace("/", "_"), ""
    for short, long in _UNITS:
        if family.endswith(short):
            family, unit = family.removesuffix(short) + long, long.removeprefix("_")
            break
    plain = re.sub("_+", "_", re.sub(r"\W", "_", family)).strip("_")
    by_source = metric.of_source("", "*")
    if meaning.family.endswith(by_source) and meaning.family.removesuffix(by_source) in metric.BY_SOURCE:
        return _Exported(f"rocstar_step_{plain}_by_source", "", "source", meaning.part or "", meaning.text)
    unit = "" if unit == "per_second" else unit
    label = None if meaning.part is None else "part"
    return _Exported(f"rocstar_step_{plain}", unit, label, meaning.part or "", meaning.text)
