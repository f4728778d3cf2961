"""Says what other placement policies would have made of a recorded step.

    rocstar bench rivals runs/quickstart step=12

The step's trajectories, with the lengths and tool times that they had, go through the simulator under each policy, on
engines whose costs are fitted to the run's own engine steps. A ratio is a policy's simulated makespan over that of the
run's own policy, above 1 where it is slower. `fidelity` is the simulated over the measured makespan of the run's own
policy: the further it is from 1, the less the ratios say. `levers` are simulations under the run's own policy with one
thing changed, the one that helps most first: a replica more, twice the KV cache, no tool call slower than nine in ten.
The last line is one JSON object.

Trajectories are taken to arrive at once, which holds where staleness is 0. Tools begin when their turn ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from bench.measuring.rivals_plot import draw
from bench.measuring.terminal import say, written
from bench.placement.policies import OURS, POLICIES, Setting
from bench.placement.workload import Traced, Turn
from bench.simulator.fit import Values, fitted
from bench.simulator.fleet import Result, Simulation
from bench.simulator.machine import Machine
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.balancing.step_cost import StepCost
from engine.console.options import Positional, parse
from engine.recording.reader import RecordedRun
from engine.recording.records import RecordedGroup, Segment
from recipes.quickstart import KV_BLOCKS

MADE: dict[str, Callable[[Setting], Balancer]] = {
    **POLICIES,
    OURS: lambda setting: KvAware(setting.longest_tokens, moves=0),  # as `engine.assembly.training` makes it
}
PLOT = Path("runs/bench/rivals.png")
BLOCK = 32  # tokens of a KV block, as `engine.assembly.training` has it
FEWEST = 100  # engine steps of which a fit is made: those of the step, and of the ones before as needed
POLL_S, BUFFER_TOKENS, USUAL_TOKENS = (
    5.0,
    512,
    3700,
)  # ThunderAgent's settings, and the length of the trajectories they suit


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of a recorded run")]
    step: Annotated[int, "a step of the run, from 1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the simulator needs of a step. machine: with costs fitted to the run."""

    trace: list[Traced]
    machine: Machine
    replicas: int
    makespan_s: float


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench rivals", description=__doc__)
    answer = compare(recorded(options.run, options.step))
    print(answer["sentence"])
    print(answer["lever"])
    ratios = {row["policy"]: row["ratio"] for row in answer["rows"]}
    levers = {lever["lever"]: lever["ratio"] for lever in answer["levers"]}
    drawn = partial(draw, ratios=ratios, levers=levers, fidelity=answer["fidelity"])
    print(f"plot: {written(PLOT, drawn)}")
    print(json.dumps(answer))
    return 0


def recorded(path: Path, step: int) -> Recorded:
    """Raises ValueError for a run or a step that cannot be simulated."""
    run = RecordedRun(path)
    groups = run.groups(run.find(step))
    if not groups:
        raise ValueError(f"step {step} of {run.folder} is damaged. Fix: step= takes another one of {run.steps}")
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes())
        blocks, replicas = int(config["kv_blocks"] or KV_BLOCKS), int(config["replicas"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path / 'config.json'} does not say kv_blocks and replicas: {error}") from error
    members = [member for recorded in groups for member in recorded.group.trajectories]
    return Recorded(
        trace=list(traced(groups)),
        machine=Machine(blocks=blocks, block_size=BLOCK, cost=step_cost(run, step)),
        replicas=replicas,
        makespan_s=max(member.finished_at for member in members) - min(member.started_at for member in members),
    )


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


def _features(segments: Sequence[Segment]) -> tuple[Values, Values]:
    """Returns the means of its stretch for each engine step, (1, n, S, P), and the seconds in which it had work."""
    rows, seconds, counts = [], [], []
    for replica in sorted({steps.replica for segment in segments for steps in segment.engine_steps}):
        busy = [
            (idle.start, idle.end)
            for segment in segments
            for idle in segment.idle
            if idle.replica == replica and idle.cause == "busy"
        ]
        before_at = -np.inf
        for steps in (each for segment in segments for each in segment.engine_steps if each.replica == replica):
            for index, at in enumerate(steps.at.tolist()):
                n = int(steps.steps[index])
                worked_s = sum(max(0.0, min(end, at) - max(start, before_at)) for start, end in busy)
                if before_at > -np.inf and worked_s > 0:
                    prompts = steps.prefilled[index] / n
                    rows.append((1.0, float(steps.running[index]), float(steps.used_blocks[index] * BLOCK), prompts))
                    seconds.append(worked_s / n)
                    counts.append(n)
                before_at = at
    features_M4 = np.asarray(rows, np.float64).reshape(-1, 4)
    return np.repeat(features_M4, counts, axis=0), np.repeat(np.asarray(seconds, np.float64), counts)


def compare(step: Recorded) -> dict[str, Any]:
    """Returns a row for each policy, the run's own first, and the levers, the best first."""
    results = {}
    for name in MADE:
        say(f"simulating the policy {name}")
        results[name] = simulated(step, name)
    ours_s = results[OURS].makespan_s
    rows = [
        {
            "policy": name,
            "makespan_s": result.makespan_s,
            "ratio": result.makespan_s / ours_s,
            "preemptions": result.preemptions,
            "recomputed_tokens": result.recomputed_tokens,
        }
        for name, result in results.items()
    ]
    ratios: dict[str, float] = {}
    for name, changed in changes(step).items():
        say(f"simulating the lever: {name}")
        ratios[name] = simulated(changed).makespan_s / ours_s
    levers = [{"lever": name, "ratio": ratios[name]} for name in sorted(ratios, key=ratios.__getitem__)]
    fidelity = ours_s / step.makespan_s
    others = ", ".join(f"{name} {result.makespan_s / ours_s:.2f}x" for name, result in results.items() if name != OURS)
    sentence = (
        f"Under other policies this step would have taken: {others}. (The simulator gives the run's own policy "
        f"{fidelity:.2f} of the {step.makespan_s:.1f} s that it took.)"
    )
    best = min(ratios, key=ratios.__getitem__)
    return {
        "sentence": sentence,
        "lever": f"Next lever: {best}, {100 * (ratios[best] - 1):+.0f} % of the step (simulated).",
        "fidelity": fidelity,
        "measured_s": step.makespan_s,
        "rows": rows,
        "levers": levers,
    }


def simulated(step: Recorded, policy: str = OURS) -> Result:
    mean_tokens = sum(row.total_tokens for row in step.trace) / len(step.trace)
    setting = Setting.of(
        step.trace,
        step.machine.kv_tokens,
        poll_s=min(POLL_S, step.makespan_s / 20),  # a short step is polled twenty times
        buffer_tokens=round(BUFFER_TOKENS * min(1.0, mean_tokens / USUAL_TOKENS)),
    )
    return Simulation(MADE[policy](setting), step.trace, step.machine, step.replicas, longest_segment=1).run()


def changes(step: Recorded) -> dict[str, Recorded]:
    """Returns the step with one thing changed, by the name of the change."""
    waits = [turn.tool_latency_s for row in step.trace for turn in row.turns if turn.tool_latency_s > 0]
    usual_s = float(np.quantile(waits, 0.9)) if waits else 0.0
    quick = [
        replace(row, turns=tuple(replace(turn, tool_latency_s=min(usual_s, turn.tool_latency_s)) for turn in row.turns))
        for row in step.trace
    ]
    return {
        "one replica more": replace(step, replicas=step.replicas + 1),
        "twice the KV cache": replace(step, machine=replace(step.machine, blocks=2 * step.machine.blocks)),
        f"no tool call over {usual_s:.2g} s": replace(step, trace=quick),
    }
