"""Says what other placement policies would have made of a recorded step, with the error of the simulation.

    rocstar bench rivals runs/quickstart step=12
    rocstar bench rivals runs/quickstart step=12 policy=mine.py:Mine replicas=4 kv_blocks=512

The step's trajectories, with the lengths and tool times that they had, go through the simulator under each policy, on
engines whose costs are fitted to the run's own engine steps. A ratio is a policy's simulated makespan over that of the
run as it was, above 1 where it is slower. `policy` adds one of yours: a class that is made without arguments, or a
function that gets the `bench.placement.policies.Setting`. It is simulated first; its exceptions, wrong answers, and a
call that does not return within 60 s are one line. `replicas` and `kv_blocks` simulate all policies on another fleet
than the run's; the levers are then of that fleet under the run's own policy.

The error is measured: the makespan of each recorded step is predicted with costs that are fitted to the engine steps
before it, and compared with the one that was measured. Of the step itself only the speed of the machine is taken, which
both parts of a ratio share: other processes may have changed it. A ratio within 1.96 times the scatter of these is
called no difference. Where fewer than three steps can be predicted the error is not known, and that is said.

A step of more than 2,048 trajectories is sampled (`bench.simulator.sample`). `levers` are simulations under the run's
own policy with one thing changed, the one that helps most first: a replica more, twice the KV cache, no tool call
slower than nine in ten. On CPUs a replica more is none where the cores are busy: replicas share them, which the
simulator does not know. The last line is one JSON object.

Trajectories are taken to arrive at once, which holds where staleness is 0. Tools begin when their turn ends.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bench.drawing.rivals_plot import draw
from bench.measuring.terminal import say, written
from bench.measuring.user_file import attribute_of
from bench.measuring.user_policy import UserPolicy
from bench.placement.policies import OURS, POLICIES, Setting
from bench.placement.workload import Traced
from bench.simulator.fleet import Result, Simulation
from bench.simulator.machine import Machine
from bench.simulator.recorded_step import Recorded, recorded
from bench.simulator.sample import MOST, sampled
from engine.balancing.balancer import Balancer
from engine.balancing.kv_aware import KvAware
from engine.console.options import Positional, parse
from engine.recording.reader import RecordedRun
from sandbox.require import at_least, require

MakePolicy = Callable[[Setting], Balancer]

MADE: dict[str, MakePolicy] = {
    **POLICIES,
    OURS: lambda setting: KvAware(setting.longest_tokens, moves=0),  # as `engine.assembly.training` makes it
}
PLOT = Path("runs/bench/rivals.png")
POLL_S, BUFFER_TOKENS, USUAL_TOKENS = (
    5.0,
    512,
    3700,
)  # ThunderAgent's settings, and the length of the trajectories they suit
EXACT = 512  # up to so many trajectories each engine step is simulated by itself
PREDICTED = 6  # newest steps of which the error is measured
KNOWN_BY = 3  # predictions without which no error is known
LEAST_LEVER = 0.98  # a change that saves less of the step is no lever
SIGMAS = 1.96  # of a normal distribution, 95 % are within


@dataclass(frozen=True, kw_only=True)
class Options:
    run: Annotated[Path, Positional("folder of a recorded run")]
    step: Annotated[int, "a step of the run, from 1"]
    policy: Annotated[str | None, "a policy of yours beside the others, FILE.py:NAME"] = None
    replicas: Annotated[int | None, "replicas of the simulated fleet; none: the run's"] = None
    kv_blocks: Annotated[int | None, "KV blocks of 32 tokens per simulated replica; none: the run's"] = None

    def __post_init__(self) -> None:
        for name in ("replicas", "kv_blocks"):
            if (value := getattr(self, name)) is not None:
                require(name, value, at_least(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The makespan of a step, predicted from what came before it."""

    step: int
    predicted_s: float
    measured_s: float


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench rivals", description=__doc__)
    policies = {} if options.policy is None else load(options.policy)
    fleet = recorded(options.run, options.step, replicas=options.replicas, kv_blocks=options.kv_blocks)
    step = recorded(options.run, options.step)
    users = of_users(fleet, policies)  # first: the user waits for it
    answer = compare(step, fleet, users, predictions(options.run, options.step))
    print(answer["sentence"])
    print(answer["lever"])
    ratios = {row["policy"]: row["ratio"] for row in answer["rows"]}
    as_it_ran_s = answer["fidelity"] * answer["measured_s"]
    levers = {lever["lever"]: lever["makespan_s"] / as_it_ran_s for lever in answer["levers"]}
    drawn = partial(draw, ratios=ratios, levers=levers, error=answer["error_log"])
    print(f"plot: {written(PLOT, drawn)}")
    print(json.dumps(answer))
    return 0


def load(name: str) -> dict[str, MakePolicy]:
    """Loads a policy by FILE.py:NAME. Raises ValueError where there is none."""
    made, path = attribute_of(name, "policy")
    attribute = name.rpartition(":")[2]
    parameters = inspect.signature(made).parameters.values()
    takes_setting = any(each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in parameters)

    return {attribute: lambda setting: UserPolicy(attribute, lambda: made(setting) if takes_setting else made(), path)}


def of_users(fleet: Recorded, policies: Mapping[str, MakePolicy]) -> dict[str, Result]:
    """Simulates policies of the user's. All are made before the first is simulated. Raises ValueError if one fails."""
    _, setting = _work(fleet)
    for make in policies.values():
        make(setting)
    results = {}
    for name, make in policies.items():
        say(f"simulating your policy {name}")
        try:
            results[name] = simulated(fleet, make)
        except (AssertionError, RuntimeError) as error:  # what the simulator says of its decisions
            raise ValueError(f"the policy {name} failed: {error}. Fix: correct what its decide returns") from error
    return results


def predictions(path: Path, step: int) -> list[Prediction]:
    """Predicts the newest steps up to this one, each on engines whose costs are those of the steps before it. Those of
    which the record has too little are left out.
    """
    run, made = RecordedRun(path), []
    earlier = [each for each in run.steps if each <= step][-PREDICTED:]
    for at, each in enumerate(earlier):
        say(f"predicting step {each}, {at + 1} of {len(earlier)}")
        try:
            one = recorded(path, each, fitted_to=each - 1)
        except ValueError as error:  # the first steps have none before them, and others may be damaged
            say(f"step {each} is not predicted: {error}")
            continue
        made.append(Prediction(step=each, predicted_s=simulated(one).makespan_s, measured_s=one.makespan_s))
    return made


def error_of(made: Sequence[Prediction]) -> float | None:
    """Returns the relative error of a ratio: SIGMAS standard deviations of predicted / measured, of its logarithm.

    What all predictions have in common is in both parts of a ratio. None if there are fewer than KNOWN_BY.
    """
    if len(made) < KNOWN_BY:
        return None
    return SIGMAS * float(np.std([math.log(each.predicted_s / each.measured_s) for each in made], ddof=1))


def compare(
    step: Recorded,
    fleet: Recorded | None = None,
    users: Mapping[str, Result] | None = None,
    made: Sequence[Prediction] = (),
) -> dict[str, Any]:
    """Returns a row for each policy, those of the user's first and then the run's own, and the levers, the best first.

    fleet: the step on the fleet that the policies are simulated on; None: on the run's own. users: from `of_users`.
    made: the predictions that the error is computed from. A lever's ratio is that of the fleet under the run's policy.
    error_log: of the logarithm of a ratio, 95 %; error_percent: of the ratio, upwards; None where it is not known.
    """
    fleet = fleet or step
    results = dict(users or {})
    count = min(MOST, len(step.trace))
    say(f"simulating {count:,} of {len(step.trace):,} trajectories as they ran")
    as_it_ran_s = simulated(step).makespan_s
    error = error_of(made)
    same_fleet = fleet == step
    rows = []
    for at, (name, make) in enumerate(MADE.items()):
        say(f"simulating the policy {name}, {at + 1} of {len(MADE)}")
        results[name] = simulated(fleet, make)
    for name, result in results.items():
        ratio = result.makespan_s / as_it_ran_s
        rows.append(
            {
                "policy": name,
                "makespan_s": result.makespan_s,
                "ratio": ratio,
                "verdict": "as it ran" if name == OURS and same_fleet else verdict(ratio, error),
                "preemptions": result.preemptions,
                "recomputed_tokens": result.recomputed_tokens,
            }
        )
    levers = []
    for name, changed in changes(fleet).items():
        say(f"simulating the lever: {name}")
        makespan_s = simulated(changed).makespan_s
        ratio = makespan_s / results[OURS].makespan_s
        levers.append({"lever": name, "makespan_s": makespan_s, "ratio": ratio, "verdict": verdict(ratio, error)})
    levers.sort(key=lambda lever: float(str(lever["ratio"])))
    return {
        "sentence": _sentence(step, fleet, rows, as_it_ran_s, error, len(made)),
        "lever": _lever(fleet, levers, error, "the step" if same_fleet else f"the step with {fleet.fleet}"),
        "fidelity": as_it_ran_s / step.makespan_s,
        "measured_s": step.makespan_s,
        "error_log": error,
        "error_percent": None if error is None else 100 * math.expm1(error),
        "predictions": [
            {"step": each.step, "predicted_s": each.predicted_s, "measured_s": each.measured_s} for each in made
        ],
        "trajectories": len(step.trace),
        "simulated": count,
        "rows": rows,
        "levers": levers,
    }


def verdict(ratio: float, error: float | None) -> str:
    """Says whether a ratio is beyond the error.

    >>> verdict(1.3, 0.1), verdict(0.95, 0.1), verdict(1.3, None)
    ('slower', 'no difference', 'error not known')
    """
    if error is None:
        return "error not known"
    if abs(math.log(ratio)) <= error:
        return "no difference"
    return "slower" if ratio > 1 else "faster"


def _sentence(
    step: Recorded,
    fleet: Recorded,
    rows: Sequence[Mapping[str, Any]],
    as_it_ran_s: float,
    error: float | None,
    made: int,
) -> str:
    begins = "Under other policies" if fleet == step else f"With {fleet.fleet}"
    judged = [row for row in rows if row["verdict"] != "as it ran"]
    clear = [row for row in judged if row["verdict"] in ("slower", "faster")]
    same = [str(row["policy"]) for row in judged if row["verdict"] == "no difference"]
    if error is None:
        ratios = ", ".join(f"{row['policy']} {row['ratio']:.2f}x" for row in judged)
        told = (
            f"{begins} this step would have taken: {ratios}. The simulator's error is not known, since "
            f"only {made} of the {KNOWN_BY} steps that it takes could be predicted."
        )
    else:
        low, high = math.exp(-error), math.exp(error)
        ratios = ", ".join(
            f"{row['policy']} {row['ratio']:.2f}x ({row['ratio'] * low:.2f} to {row['ratio'] * high:.2f})"
            for row in clear
        )
        told = f"{begins} this step would have taken: {ratios}. " if clear else ""
        told += f"No difference within the simulator's error: {', '.join(same)}. " if same else ""
        told += f"The error is {100 * (high - 1):.0f} %, from {made} steps that were predicted."
    told += f" The simulator gives the run as it was {as_it_ran_s / step.makespan_s:.2f} of the {step.makespan_s:.1f} s"
    told += " that it took."
    if len(step.trace) > MOST:
        told += f" {MOST:,} of its {len(step.trace):,} trajectories were simulated, on a fleet as much smaller."
    return told


def _lever(step: Recorded, levers: Sequence[Mapping[str, Any]], error: float | None, whole: str) -> str:
    without = "" if step.has_room else " A replica more would share the cores, which are all busy."
    best = levers[0]
    if best["ratio"] > LEAST_LEVER or best["verdict"] == "no difference":
        known = "" if error is None else " beyond the error"
        where = "" if whole == "the step" else f" for {whole}"
        return f"Next lever{where}: none{known}.{without}"
    doubt = "" if error is not None else ", of unknown error"
    return f"Next lever: {best['lever']}, {100 * (best['ratio'] - 1):+.0f} % of {whole} (simulated{doubt}).{without}"


def simulated(step: Recorded, make: MakePolicy = MADE[OURS]) -> Result:
    (trace, machine, replicas), setting = _work(step)
    longest = 1 if len(trace) <= EXACT else 32
    return Simulation(make(setting), trace, machine, replicas, longest_segment=longest).run()


def _work(step: Recorded) -> tuple[tuple[Sequence[Traced], Machine, int], Setting]:
    """Returns the trace, the machine and the number of replicas that are simulated, and what a policy may know."""
    trace, machine, replicas = sampled(step.trace, step.machine, step.replicas)
    mean_tokens = sum(row.total_tokens for row in trace) / len(trace)
    return (trace, machine, replicas), Setting.of(
        trace,
        machine.kv_tokens,
        poll_s=min(POLL_S, step.makespan_s / 20),  # a short step is polled twenty times
        buffer_tokens=round(BUFFER_TOKENS * min(1.0, mean_tokens / USUAL_TOKENS)),
    )


def changes(step: Recorded) -> dict[str, Recorded]:
    """Returns the step with one thing changed, by the name of the change; what cannot help is left out."""
    changed = {"twice the KV cache": replace(step, machine=replace(step.machine, blocks=2 * step.machine.blocks))}
    if step.has_room:
        changed["one replica more"] = replace(step, replicas=step.replicas + 1)
    waits = [turn.tool_latency_s for row in step.trace for turn in row.turns if turn.tool_latency_s > 0]
    usual_s = float(np.quantile(waits, 0.9)) if waits else 0.0
    saved_s = max(sum(max(0.0, turn.tool_latency_s - usual_s) for turn in row.turns) for row in step.trace)
    if saved_s > (1 - LEAST_LEVER) * step.makespan_s:  # no trajectory ends earlier by more than it waits less
        quick = [
            replace(
                row,
                turns=tuple(replace(turn, tool_latency_s=min(usual_s, turn.tool_latency_s)) for turn in row.turns),
            )
            for row in step.trace
        ]
        shown = f"{usual_s:.2g} s" if usual_s >= 1 else f"{1e3 * usual_s:.2g} ms"
        changed[f"no tool call slower than nine in ten ({shown})"] = replace(step, trace=quick)
    return changed
