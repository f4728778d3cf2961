"""Results of a made-up bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.measuring.metric import Metric, seconds
from bench.measuring.result import Environment, Result, summarised


def a_result(
    *,
    metrics: Mapping[str, Metric] | None = None,
    config: Mapping[str, Any] | None = None,
    disturbed: str | None = None,
    cpu: str = "of a test",
    others: float = 0.01,
    **samples: Sequence[float],
) -> Result:
    """Makes a result of bench "step" with one case; metrics are seconds unless they are given."""
    known = {name: seconds(name, f"the doc of {name}") for name in samples} if metrics is None else dict(metrics)
    by_case = {"": {name: list(values) for name, values in samples.items()}}
    return Result(
        bench="step",
        command="rocstar bench step",
        date="2026-01-02",
        commit="abc1234",
        environment=Environment(
            cores=2, cpu=cpu, python="3.11", kernel="6", load_before=0.1, load_after=0.2, others=others
        ),
        config=dict(config or {}),
        rounds=min((len(values) for values in samples.values()), default=0),
        disturbed=disturbed,
        metrics=known,
        figures=summarised(by_case, known),
        samples=by_case,
    )
