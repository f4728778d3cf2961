"""A training step against its slower side: the quick start, strictly on-policy and with steps that overlap.

    python -m bench step [--quick] [--steps 12] [--rounds 3] [--staleness 0,1] [field=value ...]

The run is the ordinary one (recipes/quickstart.py), in a process of its own; rounds are interleaved. Of each run the
steps after the second count, evaluations excluded.

rollout, learn: how long either side was busy per step, from the timeline: the union of the times in which anything was
generated (not while weights were loaded, when requests stall) or a tool ran, and in which the learner trained or
weights were loaded. step_over_max = step / max(rollout, learn): 1 is a slower side that never waits. With steps that
overlap the sides share the cores and rollouts are always under way, so that it is near 1 almost by construction;
step_over_strict_max is the step over the sides of the strict run of the same round, each of which had the cores for
itself. Overlap cannot give more than the cores have: cpu_floor is the step's CPU seconds over the cores, and step /
cpu_floor says what waits. engines_at_learn: CPU seconds of the engine processes per CPU second of the learner, where
that had most of the CPU; about 0 is rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

from bench import ROOT
from bench.measuring.processes import child, cpu_seconds
from bench.measuring.report import at_least, drawn, environment, fill, finish, interruptible, say, several

PLOT = Path("runs/bench/step.png")
SKIP = 2  # first steps, in which caches and the allocator warm up
SAMPLE_S = 0.02
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Seconds per step. rewards: (seconds of training, reward). idle: seconds of both replicas by cause, whole run."""

    staleness: int
    step_s: float
    rollout_s: float
    learn_s: float
    cpu_s: dict[str, float]
    engines_at_learn: float
    goodput: float
    staleness_mean: float
    rewards: list[Span]
    idle: Counter[str]

    @property
    def slower_side_s(self) -> float:
        return max(self.rollout_s, self.learn_s)


Round = dict[int, Run]  # by bound of the staleness


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, ascending.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    pairs = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [pair for pair in pairs if pair[0] < pair[1]]


def seconds(spans: Iterable[Span]) -> float:
    """Of their union."""
    return sum(end - begin for begin, end in union(spans))


def tracks(timeline: Path) -> dict[str, list[tuple[str, float, float]]]:
    """{track: [(name, begin, end) in seconds]}."""
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            found[names[event["pid"]]].append((event["name"], begin, begin + event["dur"] / 1e6))
    return found


def busy(folder: Path, steps: int) -> tuple[float, float, float]:
    """(step, rollout, learn) seconds per step, of the steps after the first SKIP."""
    found = tracks(folder / "timeline.json")
    live = {name: end for name, _, end in found["weights"]}
    window = live[f"version {SKIP}"], live[f"version {steps}"]
    generate, tools, learn, load = (
        clipped([span for _, *span in found[track]], window)
        for track in ("trajectories", "tool calls", "learner", "weights")
    )
    loads_alone_s = seconds(load + tools) - seconds(tools)
    rollout_s = seconds(generate + tools + load) - loads_alone_s
    count = steps - SKIP
    return (window[1] - window[0]) / count, rollout_s / count, seconds(learn + load) / count


def rows_of(path: Path) -> list[dict]:
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row for row in rows if "reward" in row]


def watched(command: Sequence[str], metrics: Path) -> tuple[dict[int, Counter[str]], list[tuple[float, Counter[str]]]]:
    """Runs it. CPU seconds so far when so many steps were done, and at every sample."""
    at_step: dict[int, Counter[str]] = {}
    samples: list[tuple[float, Counter[str]]] = []
    with child(command) as process:
        while process.poll() is None:
            spent = cpu_seconds(process.pid)
            samples.append((time.monotonic(), spent))
            at_step.setdefault(len(rows_of(metrics)), spent)
            time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"the run ended with exit code {process.returncode}")
    return at_step, samples


def at_rest(samples: Sequence[tuple[float, Counter[str]]]) -> float:
    """CPU seconds of the engines per CPU second of the learner, in the samples where the learner had most of the CPU.

    Told by the learner's own CPU, since the run's clock is not ours: it used at least half a core between two samples.
    """
    engines = learner = 0.0
    for (before, early), (after, late) in zip(samples, samples[5:], strict=False):
        used = late["learner"] - early["learner"]
        if used >= 0.5 * (after - before):
            learner += used
            engines += late["replicas"] - early["replicas"]
    return engines / learner if learner else 0.0


def run_once(staleness: int, steps: int, fields: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory() as runs:
        options = [f"runs={runs}", f"steps={steps}", f"eval_every={steps}", "eval_problems=16"]
        command = [sys.executable, str(ROOT / "recipes" / "quickstart.py"), f"max_staleness={staleness}"]
        folder = Path(runs) / "quickstart"
        at_step, samples = watched([*command, *options, *fields], folder / "metrics.jsonl")
        step_s, rollout_s, learn_s = busy(folder, steps)
        rows = rows_of(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text())
    first, last = min(n for n in at_step if n >= SKIP), max(n for n in at_step if n < steps)
    spent = at_step[last] - at_step[first]
    idle: Counter[str] = Counter()
    for causes in summary["idle_attribution_s"].values():
        idle.update(causes)
    return Run(
        staleness=staleness,
        step_s=step_s,
        rollout_s=rollout_s,
        learn_s=learn_s,
        cpu_s={role: used / (last - first) for role, used in spent.most_common()},
        engines_at_learn=at_rest(samples),
        goodput=summary["goodput"],
        staleness_mean=mean(row["rollout/staleness_mean"] for row in rows[SKIP:]),
        rewards=[(row["time/train_total_s"], row["reward"]) for row in rows],
        idle=idle,
    )


def plot(rounds: Sequence[Round], path: Path) -> None:
    """Rewards over the seconds of training, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, found in enumerate(rounds):
        for colour, (bound, run) in enumerate(found.items()):
            at, rewards = zip(*run.rewards, strict=True)
            label = None if number else f"staleness at most {bound}"
            axes.plot(at, rewards, color=f"C{colour}", alpha=0.7, marker=".", label=label)
    axes.set(xlabel="seconds of training", ylabel="reward of the rollouts", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def middle(rounds: Sequence[Round], bound: int, cores: int) -> dict[str, float]:
    """Of the runs with that bound: medians over the rounds."""
    chosen = [found[bound] for found in rounds]
    floors = [sum(run.cpu_s.values()) / cores for run in chosen]
    idle = sum((run.idle for run in chosen), Counter())
    strict = [found[bound].step_s / found[0].slower_side_s for found in rounds if 0 in found]
    return {
        **{name: median(getattr(run, name) for run in chosen) for name in ("step_s", "rollout_s", "learn_s")},
        "step_over_max": median(run.step_s / run.slower_side_s for run in chosen),
        **({"step_over_strict_max": median(strict)} if strict else {}),
        "cpu_floor_s": median(floors),
        "step_over_cpu_floor": median(run.step_s / floor for run, floor in zip(chosen, floors, strict=True)),
        "goodput": median(run.goodput for run in chosen),
        "staleness_mean": median(run.staleness_mean for run in chosen),
        "engines_at_learn": median(run.engines_at_learn for run in chosen),
        **{f"cpu {role}": median(run.cpu_s.get(role, 0.0) for run in chosen) for role in chosen[0].cpu_s},
        **{f"replicas {cause}": spent / sum(idle.values()) for cause, spent in idle.most_common()},
    }


def measure(options: argparse.Namespace, rounds: list[Round]) -> None:
    for number in range(options.rounds):
        found: Round = {}
        for bound in options.staleness:
            say(f"round {number + 1} of {options.rounds}: {options.steps} steps, staleness at most {bound}")
            found[bound] = run_once(bound, options.steps, options.fields)
        rounds.append(found)


def show(options: argparse.Namespace, machine: dict, rounds: Sequence[Round]) -> None:
    found = {bound: middle(rounds, bound, machine["cores"]) for bound in options.staleness}
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    rows = [[name, *(f"{each.get(name, 0.0):.3f}" for each in found.values())] for name in names]
    metrics = {
        f"{name.replace(' ', '_')}_s{bound}": value for bound, each in found.items() for name, value in each.items()
    }
    metrics["goodput"] = median(run.goodput for each in rounds for run in each.values())
    header = ("per step, median of the rounds", *(f"staleness {bound}" for bound in found))
    title = f"Where a step goes (rewards over time: {drawn(PLOT, partial(plot, rounds))})"
    finish("step", title, header, rows, config=vars(options), metrics=metrics, environment=machine)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench step", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of 8 steps")
    parser.add_argument("--steps", type=at_least(SKIP + 3))
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--staleness", type=several(at_least(0)), default=[0, 1], help="bounds, comma-separated")
    parser.add_argument("fields", nargs="*", metavar="field=value", help="of the quick start")
    options = parser.parse_intermixed_args(given)
    fill(options, steps=(8, 12), rounds=(1, 3))
    return options


def main() -> None:
    options, machine = arguments(), environment()
    rounds: list[Round] = []
    interruptible(lambda: measure(options, rounds), lambda: show(options, machine, rounds), rounds)
