"""Sends a run's metrics elsewhere, beside its folder, which always has them as JSON lines and for TensorBoard.

async with training(config, run, sinks=[WeightsAndBiases(run, project="agents")]) as job: ...

A sink that fails ends neither the run nor the other sinks: `Sinks` notes its first failure and counts them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.run.run_folder import RunFolder


class MetricSink(Protocol):
    """Takes the metrics of each step as they are written, and the earlier ones again when a run is resumed.

    class Print:
        def step(self, step, metrics):
            print(step, metrics.get("reward"))

        def close(self):
            pass
    """

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one row. It is called in the event loop, so slow work belongs in a thread.

        Steps ascend, except that an evaluation that runs beside training ends late. A step may come twice.
        """
        ...

    def close(self) -> None:
        """Is called when the run ends, also by an error."""
        ...


class Sinks:
    """Combines all sinks of a run into one that never raises.

    failures: how often each sink raised, by its class. note: takes a line for the user.
    """

    def __init__(self, sinks: Sequence[MetricSink], note: Callable[[str], None]) -> None:
        self.failures: Counter[str] = Counter()
        self._sinks = sinks
        self._note = note

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            try:
                sink.step(step, metrics)
            except Exception as error:
                self._failed(sink, f"at step {step}", error)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._failed(sink, "while closing", error)

    def _failed(self, sink: MetricSink, when: str, error: Exception) -> None:
        name = type(sink).__name__
        self.failures[name] += 1
        if self.failures[name] == 1:
            self._note(
                f"the sink {name} failed {when}: {type(error).__name__}: {error}. The run goes on and still calls it; "
                "metrics.jsonl has every row"
            )


class SinkUnavailable(RuntimeError):
    """A sink cannot be opened. The message says what to do."""


class WeightsAndBiases:
    """Sends metrics to Weights & Biases through its own client (`pip install wandb`).

    mode: "offline" writes below the run's folder, and `wandb sync` sends it later; "online" sends each row at once. A
    resumed run keeps its id. The axis of charts is the training step ("step"): wandb's own step can only ascend, and
    evaluations that run beside training report late. Raises SinkUnavailable if the client is not installed.
    """

    def __init__(self, run: RunFolder, *, project: str = "rocstar", mode: str = "offline", **settings: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SinkUnavailable("wandb is not installed. Fix: pip install wandb") from error
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            id=run.id,
            dir=run.path,
            mode=mode,
            resume="allow",
            **settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()
