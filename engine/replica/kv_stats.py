"""Hands on the reports of an engine's state (`engine.replica.scheduler`). Adapts an interface that may change.

It imports vLLM, so only code that builds an engine imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from engine.replica.port import KvSample
from engine.replica.step_reports import PREEMPTED


def kv_stats_logger(stepped: Callable[[KvSample], None]) -> Any:
    """Returns a class for `AsyncLLM`'s stat_loggers. stepped: called in the event loop with each report."""

    class Tap(PrometheusStatLogger):  # replaces vLLM's own, whose counters take time of the loop and have no reader
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            self._cache = vllm_config.cache_config  # its number of blocks is set later

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is None:
                return
            usable_blocks = self._cache.num_gpu_blocks - 1  # one is vLLM's own
            stepped(
                KvSample(
                    free_blocks=round((1 - scheduler_stats.kv_cache_usage) * usable_blocks),
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs,
                    preempted=scheduler_stats.kv_connector_stats[PREEMPTED],
                    prefilled=_prefilled(scheduler_stats),
                    steps=scheduler_stats.step_counter,
                ),
            )

        def log_engine_initialized(self) -> None: ...

        def record_sleep_state(self, *_: Any, **__: Any) -> None: ...

        def record_admission_rejection(self, *_: Any, **__: Any) -> None: ...

    return Tap


def _prefilled(stats: Any) -> int:
    """Returns the tokens that requests admitted since the last report find neither in the prefix cache nor among
    offloaded blocks.

    stats: vllm.v1.metrics.stats.SchedulerStats.
    """
    caches = (stats.prefix_cache_stats, stats.connector_prefix_cache_stats)
    hits = sum(cache.hits + cache.preempted_hits for cache in caches if cache is not None)
    return stats.prefix_cache_stats.queries + stats.prefix_cache_stats.preempted_queries - hits
