"""What other placement policies would have made of a recorded step: `python -m bench rivals runs/quickstart --step 12`.

The step's trajectories, with the lengths and tool times that they had, go through `bench sim_fleet` under each policy,
on engines whose costs are fitted to the run's own engine steps. A ratio is a policy's simulated makespan over that of
the run's own policy, above 1 where it is slower. `fidelity` is the simulated over the measured makespan of the run's
own policy: the further it is from 1, the less the ratios say. `levers` are the same with one thing changed under the
run's own policy, the one that helps most first: a replica more, twice the KV cache, no tool call slower than nine in
ten are. The last line is one JSON object.

Trajectories of the step are taken to arrive at once, which holds where staleness is 0. Tools begin when their turn
ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from bench.benches.sim_fleet.sim_fleet import MakePolicy
from bench.measuring.report import say
from bench.placement.policies import StaticSplit, ThunderLike
from bench.placement.workload import Traced, Turn
from bench.simulator.costs import Costs, Machine, Values, fit
from bench.simulator.fleet import Result, Simulation
from engine.balancing.kv_aware import KvAware
from engine.balancing.round_robin import RoundRobin
from engine.errors import BadInput
from engine.recording.reader import RecordedRun
from engine.recording.records import RecordedGroup, Segment
from recipes.quickstart import KV_BLOCKS

OURS = "kv_aware"
POLICIES: dict[str, MakePolicy] = {
    OURS: partial(KvAware, moves=0),  # as `engine.assembly.training` makes it
    "kv_aware with moves": KvAware,
    "round robin": lambda most: RoundRobin(),
    "static split": lambda most: StaticSplit(),
    "thunder": lambda most: ThunderLike(),
}
BLOCK = 32  # tokens of a KV block, as `engine.assembly.training` has it
FEWEST = 100  # engine steps of which a fit is made: those of the step, and of the ones before as needed


class Unusable(ValueError):
    """A run or a step that cannot be simulated, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What of a step the simulator needs. machine: with costs fitted to the run."""

    trace: list[Traced]
    machine: Machine
    replicas: int
    makespan_s: float


def recorded(path: Path, step: int) -> Recorded:
    """Raises Unusable, and BadInput where the step is not recorded."""
    run = RecordedRun(path)
    groups = run.groups(run.find(step))
    if not groups:
        raise Unusable(f"step {step} of {run.folder} is damaged. Fix: --step takes another one of {run.steps}")
    try:
        config = msgspec.json.decode((path / "config.json").read_bytes())
        blocks, replicas = int(config["kv_blocks"] or KV_BLOCKS), int(config["replicas"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise Unusable(f"{path / 'config.json'} does not say kv_blocks and replicas: {error}") from error
    members = [member for recorded in groups for member in recorded.group.trajectories]
    return Recorded(
        trace=list(traced(groups)),
        machine=Machine(blocks=blocks, block_size=BLOCK, costs=costs(run, step)),
        replicas=replicas,
        makespan_s=max(member.finished_at for member in members) - min(member.started_at for member in members),
    )


def traced(groups: Sequence[RecordedGroup]) -> Iterator[Traced]:
    """The trajectories with what they waited between their turns. Those that sampled nothing are left out."""
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


def costs(run: RecordedRun, step: int) -> Costs:
    """Fitted to the engine steps of the step, and of those before it as needed: a machine that others use
    too is slower at one time than at another. Raises Unusable where there are too few.
    """
    found: list[Segment] = []
    for earlier in reversed([one for one in run.timeline_steps if one <= step]):
        found = [*run.timeline(earlier, earlier), *found]
        rows, seconds = _features(found)
        if len(rows) >= FEWEST:
            return fit(rows, seconds).costs
    raise Unusable(f"a fit needs {FEWEST} engine steps, and the timeline up to step {step} has fewer")


def _features(segments: Sequence[Segment]) -> tuple[Values, Values]:
    """Per engine step the means of its stretch: (1, n, S, P), and the seconds in which its replica had work."""
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
    features = np.asarray(rows, np.float64).reshape(-1, 4)
    return np.repeat(features, counts, axis=0), np.repeat(np.asarray(seconds, np.float64), counts)


def compare(step: Recorded) -> dict[str, object]:
    """A row for each policy, the run's own first."""
    results = {}
    for name in POLICIES:
        say(f"simulating the policy {name}")
        results[name] = simulated(step, name)
    ours = results[OURS]
    rows = [
        {
            "policy": name,
            "makespan_s": result.makespan_s,
            "ratio": result.makespan_s / ours.makespan_s,
            "preemptions": result.preemptions,
            "recomputed_tokens": result.recomputed_tokens,
        }
        for name, result in results.items()
    ]
    levers = []
    for name, changed in changes(step).items():
        say(f"simulating the lever: {name}")
        levers.append({"lever": name, "ratio": simulated(changed).makespan_s / ours.makespan_s})
    levers.sort(key=lambda lever: lever["ratio"])
    fidelity = ours.makespan_s / step.makespan_s
    others = ", ".join(f"{row['policy']} {row['ratio']:.2f}x" for row in rows[1:])
    sentence = (
        f"Under other policies this step would have taken: {others}. (The simulator gives the run's own policy "
        f"{fidelity:.2f} of the {step.makespan_s:.1f} s that it took.)"
    )
    first = levers[0]
    lever = f"Next lever: {first['lever']}, {100 * (first['ratio'] - 1):+.0f} % of the step (simulated)."
    return {
        "sentence": sentence,
        "lever": lever,
        "fidelity": fidelity,
        "measured_s": step.makespan_s,
        "rows": rows,
        "levers": levers,
    }


def simulated(step: Recorded, policy: str = OURS) -> Result:
    most = max(row.total_tokens for row in step.trace)
    return Simulation(POLICIES[policy](most), step.trace, step.machine, step.replicas, longest_segment=1).run()


def changes(step: Recorded) -> dict[str, Recorded]:
    """The step with one thing changed."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench rivals", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("run", type=Path, help="folder of a recorded run")
    parser.add_argument("--step", type=int, required=True, help="of the run, from 1")
    options = parser.parse_args(arguments)
    try:
        found = compare(recorded(options.run, options.step))
    except (Unusable, BadInput) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found["sentence"])
    print(found["lever"])
    print(json.dumps(found))
    return 0
