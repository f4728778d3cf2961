"""A bench is a value: its options, its metrics, and a function that measures rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bench.measuring.metric import Metric
from bench.measuring.result import Figures

Options = TypeVar("Options")
Keep = Callable[[Figures], None]


class BenchFailed(RuntimeError):
    """A bench cannot go on, or what it measured is not what it promises. The rounds that it has kept are shown."""


@dataclass(frozen=True, kw_only=True)
class Bench(Generic[Options]):
    """What `rocstar bench NAME` runs.

    measure: gets the options and a function that keeps the figures of a round; a round is whole, or it is not kept. It
    raises BenchFailed. headline: the metrics that answer the bench's question, the first one in every result. quick:
    options of the short form, as they are written on the command line. simulated: no figure depends on what else the
    machine does.
    """

    options: type[Options]
    metrics: Mapping[str, Metric]
    measure: Callable[[Options, Keep], None]
    headline: Sequence[str]
    quick: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
