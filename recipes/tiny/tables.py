"""The ablations of rStar2-Agent's report that need no large model, as arms on the quick start's task.

Each table has the arms that it compares, the runs that they begin with, and what the report says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from engine import metric_names as metric
from recipes.tiny.arms import Arm
from recipes.tiny.curves import FIGURES, Figure, Rows

UNSOLVED = Path(__file__).resolve().with_name("unsolved.py")
SHORT, LONG = 96, 144  # tokens of a trajectory, one to one and a half, as 8 K to 12 K
STAGE, STEPS, EVERY = 16, 24, 8  # steps before a later stage, of a whole run, and between evaluations
CLIP_STEPS = 16
# On busy cores a call or a rollout may take longer than the quick start allows, and would then count as wrong.
SHARED = {
    "algorithm": "roc",
    "eval_every": EVERY,
    "eval_problems": 512,
    "tool_wall_s": 20.0,
    "rollout.deadline_s": 600.0,
    "record.max_mb": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A comparison and what it is about.

    question: its heading. report: what the report of rStar2-Agent says. setting: what is compared here. arms: all runs
    that are made, those that others begin with first. compared: the arms that the table shows; the first is compared
    with each other one.
    """

    question: str
    report: str
    setting: str
    arms: Mapping[str, Arm]
    compared: tuple[str, ...]
    figures: tuple[Figure, ...]


def mean_of(name: str, steps: range) -> Figure:
    """Returns the mean of a metric over steps, those without it left out."""

    def of(rows: Rows) -> float:
        return fmean(row[name] for row in rows if name in row and row["step"] in steps)

    return Figure(title=f"`{name}`, mean of steps {steps[0]} to {steps[-1]}", of=of, form=".4f")


def at_the_end(name: str) -> Figure:
    def of(rows: Rows) -> float:
        return next(row[name] for row in reversed(rows) if name in row)

    return Figure(title=f"`{name}`, at the end", of=of)


def share_of(name: str, of_name: str, title: str, steps: range) -> Figure:
    """Returns the sum of a metric over steps divided by that of another."""

    def of(rows: Rows) -> float:
        within = [row for row in rows if row["step"] in steps and of_name in row]
        return sum(row.get(name, 0.0) for row in within) / sum(row[of_name] for row in within)

    return Figure(title=f"{title}, steps {steps[0]} to {steps[-1]}", of=of)


def truncated(steps: range) -> Figure:
    return share_of(metric.member(metric.STOP, "length"), metric.ROLLOUT_TRAJECTORIES, "truncated rollouts", steps)


def arm(title: str, options: Mapping[str, Any], *, after: str | None = None, seed_offset: int = 0) -> Arm:
    """Returns an arm of the quick start."""
    return Arm(title=title, options={"steps": STEPS, **SHARED, **options}, after=after, seed_offset=seed_offset)


LATER = range(STAGE + 1, STEPS + 1)
PENALTY = Table(
    question="Reward alone, or a penalty for tool errors?",
    report=(
        "The report rewards the answer alone, lest a richer reward be gamed, and cleans up tool use by choosing what "
        "is trained: GRPO-RoC."
    ),
    setting=(
        "The penalty subtracts half of the share of failed calls from the reward of each trajectory "
        "(`tool_error_penalty=0.5`). RoC has twice the rollouts."
    ),
    arms={
        "penalty-roc": arm("GRPO-RoC", {}),
        "penalty-grpo": arm("GRPO", {"algorithm": "grpo"}),
        "penalty-penalty": arm("GRPO with penalty", {"algorithm": "grpo", "tool_error_penalty": 0.5}),
    },
    compared=("penalty-penalty", "penalty-grpo", "penalty-roc"),
    figures=(at_the_end(metric.EVAL_TOOL_RATE), *FIGURES),
)
CLIPPED = {"learner.minibatches": 16, "steps": CLIP_STEPS, "eval_every": 4}
CLIP = Table(
    question="Clip-higher, or the same bound on both sides?",
    report=(
        "The report lets the ratio of a token rise to 1.28 while it may fall to 0.8 (clip-higher, from DAPO), so that "
        "unlikely tokens can grow and the policy keeps its entropy."
    ),
    setting=(
        "GRPO-RoC with `clip_high=0.28` and `clip_high=0.2`. The quick start's two minibatches a step hardly ever "
        "reach a bound; these runs have 16 (`learner.minibatches=16`), so that the bound acts."
    ),
    arms={f"clip-{high}": arm(f"clip_high {high}", {**CLIPPED, "clip_high": high}) for high in (0.28, 0.2)},
    compared=("clip-0.28", "clip-0.2"),
    figures=(
        mean_of(metric.LEARNER_CLIP_HIGH, range(1, CLIP_STEPS + 1)),
        mean_of(metric.LEARNER_CLIP_LOW, range(1, CLIP_STEPS + 1)),
        mean_of(metric.LEARNER_ENTROPY, range(CLIP_STEPS // 2 + 1, CLIP_STEPS + 1)),
        *FIGURES,
    ),
)
BUDGET = Table(
    question="A short budget first, or the long one from the start?",
    report=(
        "The report trains with 8 K tokens until the share of truncated rollouts settles near 10 %, then with 12 K, "
        "and says that this saves computation."
    ),
    setting=(
        f"GRPO-RoC for {STAGE} steps with `rollout.max_tokens={SHORT}`, which truncates about a tenth of the rollouts "
        f"by then, and {STEPS - STAGE} with {LONG}; beside {STEPS} steps with {LONG}. The second run begins with the "
        "weights and the optimizer of the first, on new problems. From there on both arms are evaluated with "
        f"{LONG} tokens."
    ),
    arms={
        "budget-short": arm(f"{SHORT} tokens", {"rollout.max_tokens": SHORT, "steps": STAGE, "eval_every": 4}),
        "budget-grown": arm(
            f"{SHORT}, then {LONG} tokens",
            {
                "rollout.max_tokens": LONG,
                "steps": STEPS - STAGE,
                "eval_every": 4,
                "model": "{budget-short}/checkpoint",
                "learner_state": f"{{budget-short}}/checkpoints/step-{STAGE:06d}",
            },
            after="budget-short",
            seed_offset=1000,
        ),
        "budget-long": arm(f"{LONG} tokens", {"rollout.max_tokens": LONG, "eval_every": 4}),
    },
    compared=("budget-grown", "budget-long"),
    figures=(truncated(range(STAGE - 3, STAGE + 1)), truncated(LATER), *FIGURES),
)


def third_stage(problems: str) -> dict[str, Any]:
    """Returns the options of the runs that go on with new problems. problems: "unsolved" or "all" of them."""
    return {
        "steps": STEPS - STAGE,
        "eval_every": 4,
        "model": "{filter-before}/checkpoint",
        "data": f"{{filter-problems}}/{problems}.jsonl",
    }


FILTER = Table(
    question="Drop what is always solved before the last stage?",
    report=(
        "Before its third stage the report drops the problems that the policy solves 8 of 8 times, more than half of "
        "them, so that groups have something to teach."
    ),
    setting=(
        f"A policy of {STAGE} steps samples 640 new problems 8 times each (`recipes/tiny/unsolved.py`). Two runs of "
        f"{STEPS - STAGE} steps go on from its weights with a new optimizer: on those that are not solved 8 of 8, and "
        "on all of them."
    ),
    arms={
        "filter-before": arm("before", {"steps": STAGE}),
        "filter-problems": Arm(title="filter", options={"model": "{filter-before}/checkpoint"}, program=UNSOLVED),
        "filter-unsolved": arm("filtered", third_stage("unsolved"), after="filter-before"),
        "filter-all": arm("unfiltered", third_stage("all"), after="filter-before"),
    },
    compared=("filter-unsolved", "filter-all"),
    figures=(share_of(metric.GROUPS_FLAT, metric.GROUPS_ALL, "groups without a difference", LATER), *FIGURES),
)
TABLES = {"penalty": PENALTY, "clip": CLIP, "budget": BUDGET, "filter": FILTER}
