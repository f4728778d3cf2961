"""Where a run's metrics go besides its folder, which has them as JSON lines and for TensorBoard in any case.

async with training(config, run, sinks=[WeightsAndBiases(run, project="agents")]) as job: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engine.run.run_folder import RunFolder


class MetricSink(Protocol):
    """Takes the metrics of each step as they are written down, and those before it when a run is resumed.

    class Print:
        def step(self, step, metrics):
            print(step, metrics.get("reward"))

        def close(self):
            pass
    """

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called in the event loop: what takes long belongs into a thread. Steps ascend; one may come twice."""
        ...

    def close(self) -> None:
        """The run ends, however it does."""
        ...


class SinkUnavailable(RuntimeError):
    """Metrics cannot go where they should; the message says what to do."""


class WeightsAndBiases:
    """Weights & Biases through its own client (`pip install wandb`).

    mode: "offline" writes below the run's folder, and `wandb sync` sends it later; "online" sends as it goes. A run
    that is resumed goes on under the same id. Raises SinkUnavailable where the client is not installed.
    """

    def __init__(self, run: RunFolder, *, project: str = "rocstar", mode: str = "offline", **settings: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SinkUnavailable("wandb is not installed. Fix: pip install wandb") from error
        self._run = wandb.init(
            project=project,
            name=run.path.name,
            id=run.identity,
            dir=run.path,
            mode=mode,
            resume="allow",
            **settings,
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
