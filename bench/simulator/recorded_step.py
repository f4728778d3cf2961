"""Reads a recorded step as the simulator needs it: its trajectories, and engines with the costs that they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.placement.workload import Traced, Turn
from bench.simulator.fit import Values, fitted
from bench.simulator.machine import Machine
from engine.balancing.step_cost import StepCost
from engine.diagnosis.step_window import StepWindow
from engine.metric_names import HOST_MACHINE_CPU_SHARE, TIME_STEP_S
from engine.recording.damage import readable
from engine.recording.reader import RecordedRun
from engine.recording.records import RecordedGroup, Segment
from engine.view.run_files import RunFiles
from recipes.quickstart import KV_BLOCKS

BLOCK = 32  # tokens of a KV block, as `engine.assembly.training` has it
CPU_BLOCKS = 1024  # KV blocks of a replica on the CPU where a recipe does not set them
FEWEST = 100  # engine steps of which a fit is made: those of the step, and of the ones before as needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the simulator needs of a step.

    machine: with costs fitted to the run. has_room: whether a replica more would have a GPU or cores of its own.
    """

    trace: Sequence[Traced]
    machine: Machine
    replicas: int
    makespan_s: float
    has_room: bool = True

    @property
    def fleet(self) -> str:
        count = self.replicas
        return f"{count} replica{'s' * (count > 1)} of {self.machine.blocks:,} KV blocks"


def recorded(
    path: Path, step: int, *, fitted_to: int | None = None, replicas: int | None = None, kv_blocks: int | None = None
) -> Recorded:
    """Returns a step.

    fitted_to: the last step to whose engine steps the costs are fitted, while of the step itself only the speed is
    taken; None: they are fitted to the step itself. replicas, kv_blocks: another fleet than the run's. Raises
    ValueError for a run or a step that cannot be simulated.
    """
    run = RecordedRun(path)
    groups = run.groups(run.find(step))
    if not (reading := readable(run, step, len(groups))).is_whole:  # a part of a step takes less time than all of it
        whole = [each for each in run.steps if readable(run, each, len(run.outlines(each))).is_whole]
        fix = f"step= takes one of {whole}" if whole else "name another run, since no step of this one is whole"
        raise ValueError(f"{reading.sentence} It cannot be compared with the time that all took. Fix: {fix}")
    blocks, count = _fleet(path, replicas, kv_blocks)
    members = [member for recorded in groups for member in recorded.group.trajectories]
    trace = list(traced(groups))
    if not trace:
        raise ValueError(
            f"no trajectory of step {step} has sampled anything. Fix: step= takes another one of {run.steps}"
        )
    cost = step_cost(run, step) if fitted_to is None else _as_fast_as(run, step, step_cost(run, fitted_to))
    machine = Machine(blocks=blocks, block_size=BLOCK, cost=cost)
    return Recorded(
        trace=trace,
        machine=machine,
        replicas=count,
        makespan_s=max(member.finished_at for member in members) - min(member.started_at for member in members),
        has_room=_has_room(path, step),
    )


def _fleet(path: Path, replicas: int | None, blocks: int | None) -> tuple[int, int]:
    """Returns the KV blocks of a replica, and how many replicas there are: the run's where none are given. Raises
    ValueError if config.json does not say it.
    """
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
        if blocks is None:
            names = [name for name in config if name == "kv_blocks" or name.endswith(".kv_blocks")]
            blocks = config[names[0] if names else "kv_blocks"]
        if blocks is None and config.get("devices"):
            raise ValueError("on GPUs a replica takes what is left of the memory")
        default = KV_BLOCKS if str(config.get("recipe", "")).endswith("quickstart.py") else CPU_BLOCKS
        return int(blocks or default), int(replicas or config["replicas"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path / 'config.json'} does not say kv_blocks and replicas ({error!r}). Fix: give both as options"
        ) from error


def _has_room(path: Path, step: int) -> bool:
    """Returns whether a replica more would have what it needs. Where it was not measured it would."""
    files = RunFiles(path)
    if files.config.get("devices"):
        return True
    rows = [row for row in files.rows if row["step"] == step and TIME_STEP_S in row]
    window = StepWindow(rows, files.config)
    return window.has_free_cores if any(HOST_MACHINE_CPU_SHARE in row for row in rows) else True


def traced(groups: Sequence[RecordedGroup]) -> Iterator[Traced]:
    """Yields the trajectories with the waits between their turns, without those that sampled nothing."""
    number = 0
    for recorded in groups:
        for member in recorded.group.trajectories:
            turns = [turn for turn in member.turns if turn.end > turn.start]
            if not turns:
                continue
            ends = [0, *(turn.end for turn in turns)]
            waits = [after.queued_at - turn.finished_at for turn, after in pairwise(turns)] + [0.0]
            yield Traced(
                traj=number,
                group=recorded.number,
                turns=tuple(
                    Turn(
                        prompt_new_tokens=turn.start - before,
                        gen_tokens=turn.end - turn.start,
                        tool_latency_s=max(0.0, wait_s),
                    )
                    for turn, before, wait_s in zip(turns, ends, waits, strict=False)
                ),
            )
            number += 1


def step_cost(run: RecordedRun, step: int) -> StepCost:
    """Fits a cost to the engine steps of the step, and of those before it as needed: a machine that others use too is
    slower at one time than at another. Raises ValueError where there are too few.
    """
    segments: list[Segment] = []
    for earlier in reversed([one for one in run.timeline_steps if one <= step]):
        segments = [*run.timeline(earlier, earlier), *segments]
        features_N4, seconds_N = _features(segments)
        if len(features_N4) >= FEWEST:
            return fitted(features_N4, seconds_N).cost
    raise ValueError(f"a fit needs {FEWEST} engine steps, and the timeline up to step {step} has fewer")


def _as_fast_as(run: RecordedRun, step: int, cost: StepCost) -> StepCost:
    """Returns the cost times what makes the engine steps of a step as long as they were. Raises ValueError where it has
    none.
    """
    features_N4, seconds_N = _features(list(run.timeline(step, step)))
    constants = np.asarray([cost.fixed_s, cost.per_request_s, cost.per_kv_token_s, cost.per_token_s])
    predicted_s = float((features_N4 @ constants).sum())
    if not predicted_s > 0:
        raise ValueError(f"the timeline of step {step} has no engine step of a busy replica")
    speed = float(seconds_N.sum()) / predicted_s
    return StepCost(**{name: speed * value for name, value in asdict(cost).items()})


def _features(segments: Sequence[Segment]) -> tuple[Values, Values]:
    """Returns the means of its stretch for each engine step, (1, n, S, P), and the seconds in which it had work."""
    rows, seconds, counts = [], [], []
    for replica in sorted({steps.replica for segment in segments for steps in segment.engine_steps}):
        worked = _worked(segments, replica)
        before_at = -np.inf
        for steps in (each for segment in segments for each in segment.engine_steps if each.replica == replica):
            until_L = worked(steps.at)
            before_s = float(worked(np.asarray([before_at]))[0])
            for index, at in enumerate(steps.at.tolist()):
                n, worked_s = int(steps.steps[index]), float(until_L[index]) - before_s
                if before_at > -np.inf and worked_s > 0:
                    prompts = steps.prefilled[index] / n
                    rows.append((1.0, float(steps.running[index]), float(steps.used_blocks[index] * BLOCK), prompts))
                    seconds.append(worked_s / n)
                    counts.append(n)
                before_at, before_s = at, float(until_L[index])
    features_M4 = np.asarray(rows, np.float64).reshape(-1, 4)
    return np.repeat(features_M4, counts, axis=0), np.repeat(np.asarray(seconds, np.float64), counts)


def _worked(segments: Sequence[Segment], replica: int) -> Callable[[Values], Values]:
    """Returns a function that gives the seconds for which a replica had been busy by some moments."""
    busy = sorted(
        (idle.start, idle.end)
        for segment in segments
        for idle in segment.idle
        if idle.replica == replica and idle.cause == "busy"
    )
    if not busy:
        return lambda at: np.zeros(len(at))
    moments = np.asarray(busy).reshape(-1)
    totals = np.repeat(np.cumsum(moments[1::2] - moments[::2]), 2)
    totals[::2] -= moments[1::2] - moments[::2]
    return lambda at: np.interp(at, moments, totals)
