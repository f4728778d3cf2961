"""What does staleness buy? Steps strictly on-policy and with steps that overlap, against their slower side.

    rocstar bench step [rounds=3] [steps=12] [staleness=0,1,2] [field=value of the quick start ...]

The run is the ordinary one (recipes/quickstart.py), in a process of its own; rounds are interleaved. The steps after
the second count, without evaluations; the accuracy is that after the last step, of 256 held-out problems. For whole
learning curves, and the time until an accuracy is reached: rocstar bench sweep recipes/quickstart.py
over=max_staleness:0,1,2.

A side is busy in the union of some spans of the timeline: for rollouts those in which anything was generated or a tool
ran (not while weights were loaded, when requests stall), for the learner those in which it trained or weights were
loaded. With steps that overlap the sides share the cores and rollouts are always under way, so that a step over its own
larger side is near 1 almost by construction; over the larger side of the strict run of the same round, whose sides had
the cores to themselves, it is not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from bench import ROOT
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, Metric, count, rate, ratio, seconds, share
from bench.measuring.processes import ROLES, child, cpu_seconds
from bench.measuring.terminal import say
from engine import metric_names as metric
from engine.console.options import Rest
from sandbox.require import Rule, at_least, require_fields

SKIP = 2  # first steps, in which caches and the allocator warm up
SAMPLE_S = 0.02
PROBLEMS = 256  # of an evaluation
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "runs with each bound"] = 3
    steps: Annotated[int, "steps of a run"] = 12
    staleness: Annotated[tuple[int, ...], "bounds of the staleness; 0 is strict"] = (0, 1, 2)
    fields: Annotated[tuple[str, ...], Rest("options of the quick start")] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds")
        require_fields(self, at_least(SKIP + 3), "steps")
        require_fields(self, Rule("bounds of at least 0", lambda value: value and min(value) >= 0), "staleness")


METRICS = {
    "step_s": seconds("step", "without evaluations"),
    "tokens_per_s": rate("tokens/s", "sampled, per second of a step"),
    "accuracy": count("accuracy", "held out, after the last step", form=".3f"),
    "kl": count("KL", "from sampler to learner, nats per token", form=".1e"),
    "rollout_s": seconds("rollouts", "time in which they were busy, per step"),
    "learn_s": seconds("learner", "time in which it was busy, per step"),
    "over_max": ratio("/ larger side", "a step over the larger of its own sides; 1 is a side that never waits"),
    "over_strict_max": ratio("/ strict side", "a step over the larger side of the strict run of the same round"),
    "over_cpu": ratio("/ CPU", "a step over its CPU seconds divided by the cores"),
    "goodput": share("goodput", "share of the sampled tokens that were trained", form=".0f"),
    "staleness_mean": count("staleness", "versions by which a trained token is behind, mean", form=".2f"),
    "engines_at_learn": ratio("engines at rest", "their CPU per CPU second of the learner while that has most of it"),
} | {
    f"cpu_{role.replace(' ', '_')}_s": Metric(title=f"CPU of {role}", doc="per step", kind=Kind.CPU, unit=" s")
    for role in (*dict.fromkeys(ROLES.values()), "other")
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Seconds per step. cpu_s: by role."""

    step_s: float
    rollout_s: float
    learn_s: float
    cpu_s: Mapping[str, float]
    engines_at_learn: float
    goodput: float
    staleness_mean: float
    tokens_per_s: float
    accuracy: float
    kl: float

    @property
    def slower_side_s(self) -> float:
        return max(self.rollout_s, self.learn_s)


def measure(options: Options, keep: Keep) -> None:
    cores = len(os.sched_getaffinity(0))
    for number in range(options.rounds):
        runs: dict[int, Run] = {}
        for bound in options.staleness:
            say(f"round {number + 1} of {options.rounds}: {options.steps} steps, staleness at most {bound}")
            runs[bound] = run_once(bound, options.steps, options.fields)
        keep({f"staleness {bound}": figures(run, runs.get(0), cores) for bound, run in runs.items()})


def figures(run: Run, strict: Run | None, cores: int) -> dict[str, float]:
    return {
        "step_s": run.step_s,
        "tokens_per_s": run.tokens_per_s,
        "accuracy": run.accuracy,
        "kl": run.kl,
        "rollout_s": run.rollout_s,
        "learn_s": run.learn_s,
        "over_max": run.step_s / run.slower_side_s,
        **({} if strict is None else {"over_strict_max": run.step_s / strict.slower_side_s}),
        "over_cpu": run.step_s / (sum(run.cpu_s.values()) / cores),
        "goodput": run.goodput,
        "staleness_mean": run.staleness_mean,
        "engines_at_learn": run.engines_at_learn,
        **{f"cpu_{role.replace(' ', '_')}_s": used for role, used in run.cpu_s.items()},
    }


def run_once(staleness: int, steps: int, fields: Sequence[str]) -> Run:
    """Runs the quick start. Raises BenchFailed where it fails."""
    with tempfile.TemporaryDirectory() as runs:
        options = [f"runs={runs}", f"steps={steps}", f"eval_every={steps}", f"eval_problems={PROBLEMS}"]
        command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), f"max_staleness={staleness}"]
        folder = Path(runs) / "quickstart"
        at_step, samples = watched([*command, *options, *fields], folder / "metrics.jsonl")
        step_s, rollout_s, learn_s = busy(folder, steps)
        rows = rows_of(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text())
    first, last = min(n for n in at_step if n >= SKIP), max(n for n in at_step if n < steps)
    spent = at_step[last] - at_step[first]
    counted = rows[SKIP:]
    return Run(
        step_s=step_s,
        rollout_s=rollout_s,
        learn_s=learn_s,
        cpu_s={role: used / (last - first) for role, used in spent.most_common()},
        engines_at_learn=at_rest(samples),
        goodput=summary["goodput"],
        staleness_mean=mean(row[metric.ROLLOUT_STALENESS_MEAN] for row in counted),
        tokens_per_s=sum(row[metric.TOKENS_GENERATED] for row in counted)
        / sum(row[metric.TIME_STEP_S] for row in counted),
        accuracy=summary["accuracy_final"],
        kl=mean(row[metric.LEARNER_KL] for row in counted),
    )


def watched(command: Sequence[str], metrics: Path) -> tuple[dict[int, Counter[str]], list[tuple[float, Counter[str]]]]:
    """Runs a program. Returns its CPU seconds so far when so many steps were done, and at every sample."""
    at_step: dict[int, Counter[str]] = {}
    samples: list[tuple[float, Counter[str]]] = []
    with child(command) as process:
        while process.poll() is None:
            spent = cpu_seconds(process.pid)
            samples.append((time.monotonic(), spent))
            at_step.setdefault(len(rows_of(metrics)), spent)
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise BenchFailed(f"the quick start ended with exit code {process.returncode}; see above")
    return at_step, samples


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row for row in rows if metric.REWARD in row]


def busy(folder: Path, steps: int) -> tuple[float, float, float]:
    """Returns (step, rollout, learn) in seconds per step, of the steps after the first SKIP."""
    spans = tracks(folder / "timeline.json")
    live = {name: end for name, _, end in spans["weights"]}
    window = live[f"version {SKIP}"], live[f"version {steps}"]
    generate, tools, learn, load = (
        clipped([(begin, end) for _, begin, end in spans[track]], window)
        for track in ("trajectories", "tool calls", "learner", "weights")
    )
    loads_alone_s = duration(load + tools) - duration(tools)
    rollout_s = duration(generate + tools + load) - loads_alone_s
    steps_counted = steps - SKIP
    step_s = (window[1] - window[0]) / steps_counted
    return step_s, rollout_s / steps_counted, duration(learn + load) / steps_counted


def tracks(timeline: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Returns {track: [(name, begin, end) in seconds]}."""
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            spans[names[event["pid"]]].append((event["name"], begin, begin + event["dur"] / 1e6))
    return spans


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the same time without overlaps, ascending.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    pairs = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [pair for pair in pairs if pair[0] < pair[1]]


def duration(spans: Iterable[Span]) -> float:
    """Returns the seconds of their union."""
    return sum(end - begin for begin, end in union(spans))


def at_rest(samples: Sequence[tuple[float, Counter[str]]]) -> float:
    """Returns the engines' CPU seconds per CPU second of the learner, in samples where it used half a core or more.

    The learner's own CPU tells when that was, since the run's clock is not ours.
    """
    engines = learner = 0.0
    for (before, early), (after, late) in zip(samples, samples[5:], strict=False):
        used = late["learner"] - early["learner"]
        if used >= 0.5 * (after - before):
            learner += used
            engines += late["replicas"] - early["replicas"]
    return engines / learner if learner else 0.0


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("step_s", "tokens_per_s", "accuracy", "staleness_mean", "kl", "over_strict_max"),
    quick={"rounds": "1", "steps": "8"},
)
