"""Mixes several sources of prompts into one stream, by weights that may follow what the policy has learnt.

    prompts = mixture({read_prompts("a.jsonl"): 3, read_prompts("b.parquet"): 1})

Invariants
- In any stretch of the stream the shares follow the weights; nothing is random.
- The weights determine which source gives the n-th prompt. With a curriculum, the weights of each step are written
  down, so a resumed run draws the same prompts. Only a source that failed or was late shifts the ones after it.
- A source that ends, fails or is late is reported once and does not stop the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from typing import Any, Protocol, Self

import numpy as np

from engine import metric_names as metric
from engine.run.prompt_stream import skip
from engine.run.step_history import Rows, StepHistory
from engine.types import Prompt

RETRY = 32  # prompts of other sources before a failed one is tried again
log = logging.getLogger(__name__)


class Curriculum(Protocol):
    """Changes the weights of a mixture by what the policy has learnt.

    class Forget:  # drops a solved source
        def weights(self, given, steps):
            last = steps[-1] if steps else {}
            return {name: 0.0 if last.get(f"reward/{name}") == 1.0 else weight for name, weight in given.items()}
    """

    def weights(self, given: Mapping[str, float], steps: Rows) -> Mapping[str, float]:
        """Returns weights by name of source. Pure. If all are zero, the given weights are used."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRateBand:
    """Draws less from sources that the policy nearly always or nearly never solves, since neither teaches anything.

    The pass rate of a source is its mean reward over the last `steps` steps that had it. A source without such a step
    keeps its weight. outside: the factor for the weight of a source whose pass rate is outside of the band.

    >>> band = PassRateBand(low=0.1, high=0.9, outside=0.25)
    >>> band.weights({"easy": 1.0, "fit": 1.0, "new": 1.0}, [{"reward/easy": 0.97, "reward/fit": 0.5}])
    {'easy': 0.25, 'fit': 1.0, 'new': 1.0}
    """

    low: float = 0.1
    high: float = 0.9
    outside: float = 0.25
    steps: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"low and high must be between 0 and 1 and ascend, got {self.low} and {self.high}")
        if not 0 <= self.outside <= 1 or self.steps < 1:
            raise ValueError(f"outside must be between 0 and 1 and steps positive, got {self.outside}, {self.steps}")

    def weights(self, given: Mapping[str, float], steps: Rows) -> Mapping[str, float]:
        return {name: weight * self._share(name, steps) for name, weight in given.items()}

    def _share(self, source: str, steps: Rows) -> float:
        pass_rate = metric.of_source(metric.REWARD, source)
        rates = [row[pass_rate] for row in steps if pass_rate in row][-self.steps :]
        if not rates or self.low <= float(np.mean(rates)) <= self.high:
            return 1.0
        return self.outside


def mixture(
    weights: Mapping[Iterator[Prompt], float],
    *,
    curriculum: Curriculum | None = None,
    steps: StepHistory | None = None,
) -> Mixture:
    """Returns several streams as one. A stream may have a `name`; otherwise its type's name is used.

    curriculum: changes the weights from step to step, by the metrics in `steps`. steps: `job.steps`, which a curriculum
    needs; a resumed run draws the prompts of a step by the same weights again. Raises ValueError for a weight that is
    not positive, two streams with one name, or a curriculum without `job.steps`.
    """
    return Mixture(weights, curriculum, steps)


class Mixture(Iterator[Prompt]):
    """The stream that `mixture` returns."""

    def __init__(
        self,
        weights: Mapping[Iterator[Prompt], float],
        curriculum: Curriculum | None,
        steps: StepHistory | None,
    ) -> None:
        if curriculum is not None and not isinstance(steps, StepHistory):
            given = "None" if steps is None else f"a {type(steps).__name__}"
            raise ValueError(f"steps must be the history of the run, got {given}. Fix: mixture(..., steps=job.steps)")
        if not weights:
            raise ValueError("a mixture needs at least one stream of prompts")
        if wrong := [weight for weight in weights.values() if not 0 < weight < np.inf]:
            raise ValueError(f"weights must be positive, got {wrong[0]}")
        names = [name_of(stream) for stream in weights]
        if len(set(names)) < len(names):
            raise ValueError(
                f"streams of a mixture must have different names, got {names}. Fix: give read_prompts name="
            )
        self._sources = [_Source(stream, name_of(stream), weight) for stream, weight in weights.items()]
        self._given = {source.name: source.weight for source in self._sources}
        self._curriculum = curriculum
        self._steps = steps
        self._number = 0 if steps is None else steps.joined()
        self._drawn = 0
        self._step = -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        while (source := self._following()) is not None:
            try:
                prompt = next(source.stream, None)
            except Exception as error:
                self._set_aside(source, error)
                continue
            if prompt is None:
                self._end(source)
                continue
            self._count(source)
            source.named = False
            return prompt
        raise StopIteration

    def skip(self, count: int) -> int:
        """Skips this many prompts, without making them if the sources can do that. Returns how many were skipped."""
        skipped = 0
        while skipped < count and (source := self._following()) is not None:
            if skip(source.stream, 1):
                self._count(source)
                skipped += 1
            else:
                self._end(source)
        return skipped

    def _count(self, source: _Source) -> None:
        source.given += 1 / source.weight
        self._drawn += 1

    def _end(self, source: _Source) -> None:
        self._sources.remove(source)
        log.warning("%s has no more prompts; %s", source.name, self._others())

    def _set_aside(self, source: _Source, error: Exception) -> None:
        """Sets a failed source aside until later. Raises RuntimeError if no other source is ready."""
        source.again_at = self._drawn + RETRY
        if not source.named:
            source.named = True
            log.warning("%s gives no prompt (%s: %s); %s", source.name, type(error).__name__, error, self._others())
        if all(other.again_at > self._drawn for other in self._sources):
            raise RuntimeError("no source of the mixture gives a prompt") from error

    def _others(self) -> str:
        return f"the mixture continues with {', '.join(source.name for source in self._sources)}"

    def _following(self) -> _Source | None:
        """Returns the source that is furthest behind its share, by the method of Sainte-Laguë; in a tie the first."""
        self._reweigh()
        ready = [source for source in self._sources if source.again_at <= self._drawn and source.weight > 0]
        return min(ready, key=lambda source: source.given + 0.5 / source.weight, default=None)

    def _reweigh(self) -> None:
        """Sets new weights at the beginning of a step. Earlier prompts of a source count by the weight it had then."""
        if self._curriculum is None or self._steps is None:
            return
        step = self._drawn // self._steps.prompts_per_step
        if step == self._step:
            return
        self._step = step
        weights = self._steps.weights(self._number, self._drawn, partial(self._curriculum.weights, self._given))
        if not any(weights.get(source.name, 0.0) > 0 for source in self._sources):
            weights = self._given
        behind = min((source.given for source in self._sources if source.weight > 0), default=0.0)
        for source in self._sources:
            if source.weight == 0:  # a paused source does not catch up
                source.given = max(source.given, behind)
            source.weight = weights.get(source.name, 0.0)


@dataclass(slots=True, eq=False)
class _Source:
    """One source. given: how many prompts it gave, each divided by its weight at that time."""

    stream: Iterator[Prompt]
    name: str
    weight: float
    given: float = 0.0
    again_at: int = 0
    named: bool = False


def name_of(stream: Iterator[Prompt]) -> str:
    """Returns the name of a stream in weights and warnings."""
    return getattr(stream, "name", type(stream).__name__)


class Late(TimeoutError):
    """A source had no prompt in time."""


class Prefetched(Iterator[Prompt]):
    """Reads a slow source (over a network, or by a search) ahead in a thread of its own.

    ahead: the most prompts that are read ahead. deadline_s: how long a prompt may block the event loop; then `Late` is
    raised, and the next call returns the prompt as soon as there is one.
    """

    def __init__(self, source: Iterator[Prompt], *, name: str = "", ahead: int = 64, deadline_s: float = 0.2) -> None:
        if ahead < 1 or deadline_s < 0:
            raise ValueError(f"ahead must be positive and deadline_s not negative, got {ahead} and {deadline_s}")
        self.name = name or name_of(source)
        self._source = source
        self._deadline_s = deadline_s
        self._ready: Queue[Any] = Queue(ahead)
        self._late = False
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name=f"prompts-{self.name}", daemon=True)
            self._thread.start()
        try:
            ready = self._ready.get(timeout=0.001 if self._late else self._deadline_s)
        except Empty:
            self._late = True
            raise Late(f"no prompt within {self._deadline_s} s") from None
        self._late = False
        if isinstance(ready, Exception):
            self._thread = None  # the next call starts another one
            raise ready
        if ready is None:
            self._ready.put(None)
            raise StopIteration
        return ready

    def skip(self, count: int) -> int:
        """Skips prompts: without making them before the first one is drawn, as in a resumed run; later by reading."""
        if self._thread is not None:
            return sum(1 for _ in zip(range(count), self, strict=False))
        return skip(self._source, count)

    def _read(self) -> None:
        try:
            for prompt in self._source:
                self._ready.put(prompt)
            self._ready.put(None)
        except Exception as error:
            self._ready.put(error)
