"""Workloads of multi-turn rollouts: what each trajectory generates, what its tools answer, and how long they take.

A trace is one JSON line per trajectory, gzipped where the name ends in `.gz`:

    {"traj", "group", "turns": [{"prompt_new_tokens", "gen_tokens", "tool_latency_s", "n_calls", "calls"}]}

Turn 0's prompt is shared by its group; a later turn's prompt is the tools' answer. `calls` holds (tokens generated in
the turn when the call's closing tag is complete, seconds it runs); `tool_latency_s` is their maximum. `generate` draws
new traces of five kinds. Their distributions are assumed, not measured; they are anchored in the rStar2-Agent report
(arXiv 2508.20722): responses of 8K and 12K tokens, at most 10 turns, about 2.75 calls a rollout that take 0.3 s on
average and 4 s at most.

| kind | what it is |
|---|---|
| math8k, math12k | long thoughts, short tool answers; a group's difficulty is shared |
| agentic | many turns, long tool answers, slow tools: a context is five times what was generated |
| uniform | equal lengths, one turn: nothing to gain |
| bimodal | 15 % of the groups are 20 times longer than the rest |
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sandbox.require import at_least, one_of, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A turn: prompt_new_tokens come in, gen_tokens come out, then the calls run beside each other."""

    prompt_new_tokens: int
    gen_tokens: int
    tool_latency_s: float = 0.0
    calls: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        require("prompt_new_tokens", self.prompt_new_tokens, at_least(0))
        require("gen_tokens", self.gen_tokens, at_least(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """One trajectory of a trace."""

    traj: int
    group: int
    turns: tuple[Turn, ...]

    @property
    def gen_tokens(self) -> int:
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Returns the length at the end: prompt, answers of tools and generated tokens."""
        return sum(turn.prompt_new_tokens + turn.gen_tokens for turn in self.turns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A workload of groups x samples trajectories."""

    groups: int
    samples: int


Kind = Literal["math8k", "math12k", "agentic", "uniform", "bimodal"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FULL: dict[str, Size] = {kind: Size(groups=128, samples=32) for kind in KINDS}
FULL["agentic"] = Size(groups=64, samples=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """How a kind is made smaller for tiny replicas of 100 blocks x 32 tokens: factors of lengths and tool seconds."""

    size: Size
    tokens: float
    seconds: float


# Demand for KV over the KV of two tiny replicas is as on eight H200s (3 to 6 times). For agentic three more ratios are
# kept, at 131 us per prompt token and 6.7 ms a step: generated over context tokens (0.21), tool over generation seconds
# of a turn (0.6), and seconds to refill the cache over seconds of a trajectory (0.25; on an H200 0.13, but that would
# leave two trajectories in a cache).
SMALL = {
    "math8k": Small(size=Size(groups=12, samples=8), tokens=1 / 14, seconds=0.15),
    "math12k": Small(size=Size(groups=12, samples=8), tokens=1 / 20, seconds=0.15),
    "agentic": Small(size=Size(groups=8, samples=6), tokens=1 / 36, seconds=1 / 120),
    "uniform": Small(size=Size(groups=12, samples=8), tokens=1 / 4, seconds=0.15),
    "bimodal": Small(size=Size(groups=12, samples=8), tokens=1 / 14, seconds=0.15),
}


def generate(kind: str, seed: int, size: Size | None = None) -> list[Traced]:
    """Returns a new trace of a kind. Raises ValueError for an unknown kind."""
    require("kind", kind, one_of(*_DRAW))
    size = size or FULL[kind]
    rng = np.random.default_rng([seed, list(_DRAW).index(kind)])
    rows = [
        (group, turns) for group in range(size.groups) for turns in _DRAW[kind](rng, size.samples)
    ]  # a group's trajectories are neighbours
    return [Traced(traj=traj, group=group, turns=tuple(turns)) for traj, (group, turns) in enumerate(rows)]


def small(kind: str, seed: int) -> list[Traced]:
    """Returns a new trace of a kind for tiny replicas."""
    require("kind", kind, one_of(*SMALL))
    shape = SMALL[kind]
    return scaled(generate(kind, seed, shape.size), shape.tokens, shape.seconds)


def scaled(trace: Iterable[Traced], tokens: float, seconds: float) -> list[Traced]:
    """Multiplies all lengths by `tokens` (to at least 1) and all tool latencies by `seconds`."""
    return [
        Traced(traj=row.traj, group=row.group, turns=tuple(_scaled(turn, tokens, seconds) for turn in row.turns))
        for row in trace
    ]


def _scaled(turn: Turn, tokens: float, seconds: float) -> Turn:
    gen_tokens = max(1, round(turn.gen_tokens * tokens))
    return Turn(
        prompt_new_tokens=max(1, round(turn.prompt_new_tokens * tokens)),
        gen_tokens=gen_tokens,
        tool_latency_s=round(turn.tool_latency_s * seconds, 4),
        calls=tuple(
            (min(gen_tokens, max(1, round(end * tokens))), round(latency_s * seconds, 4))
            for end, latency_s in turn.calls
        ),
    )


def load(path: str | Path) -> list[Traced]:
    """Reads a trace. Raises ValueError naming file and line for a line that is not one."""
    data = Path(path).read_bytes()
    text = (gzip.decompress(data) if Path(path).suffix == ".gz" else data).decode()
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            turns = tuple(_turn(turn) for turn in row["turns"])
            rows.append(Traced(traj=int(row["traj"]), group=int(row["group"]), turns=turns))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a trajectory: {error!r}") from error
    return rows


def _turn(turn: dict[str, Any]) -> Turn:
    names = ("prompt_new_tokens", "gen_tokens", "tool_latency_s")
    return Turn(**{name: turn[name] for name in names}, calls=tuple((end, wait_s) for end, wait_s in turn["calls"]))


def save(path: str | Path, trace: Iterable[Traced]) -> None:
    """Writes a trace; the same trace gives the same bytes."""
    lines = []
    for row in trace:
        turns = [
            {
                "prompt_new_tokens": turn.prompt_new_tokens,
                "gen_tokens": turn.gen_tokens,
                "tool_latency_s": turn.tool_latency_s,
                "n_calls": len(turn.calls),
                "calls": turn.calls,
            }
            for turn in row.turns
        ]
        lines.append(json.dumps({"traj": row.traj, "group": row.group, "turns": turns}, separators=(",", ":")) + "\n")
    data = "".join(lines).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def _clipped_lognormal(
    rng: np.random.Generator, median: float, sigma: float, low: float, high: float, count: int
) -> NDArray[np.float64]:
    return np.clip(median * np.exp(sigma * rng.standard_normal(count)), low, high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Draws the calls of a turn, where they end in it, and how long they take.

    extra: probabilities of a second and of a third call. terse: probability that a turn ends 2 tokens after its last
    call instead of talking on. late: share of calls that take as long as they may.
    """

    extra: tuple[float, float]
    terse: float
    gap_tokens: float
    median_s: float
    sigma: float
    least_s: float
    most_s: float
    late: float = 0.0

    def draw(self, rng: np.random.Generator, gen_tokens: int) -> tuple[tuple[int, float], ...]:
        dice = rng.random()
        count = 1 + (dice < sum(self.extra)) + (dice < self.extra[1])
        trail = 2 if rng.random() < self.terse else round(40 * float(np.exp(0.8 * rng.standard_normal())))
        ends = [max(1, gen_tokens - trail)]
        for gap in _clipped_lognormal(rng, self.gap_tokens, 0.6, 1, 1e9, count - 1):
            ends.insert(0, max(1, ends[0] - round(gap)))
        waits_s = _clipped_lognormal(rng, self.median_s, self.sigma, self.least_s, self.most_s, count)
        waits_s[rng.random(count) < self.late] = self.most_s
        return tuple((end, round(float(wait_s), 4)) for end, wait_s in zip(ends, waits_s, strict=True))


PYTHON = Tools(
    extra=(0.10, 0.02), terse=0.85, gap_tokens=165, median_s=0.145, sigma=0.92, least_s=0.02, most_s=4.0, late=0.016
)
SERVICES = Tools(extra=(0.17, 0.08), terse=0.75, gap_tokens=105, median_s=1.6, sigma=1.5, least_s=0.1, most_s=60.0)


def _turns(
    rng: np.random.Generator, prompts: Sequence[int], gens: Sequence[int], tools: Tools, budget: int
) -> list[Turn]:
    """Returns turns until `budget` tokens (the first prompt aside) are used up; the last one calls no tool."""
    turns: list[Turn] = []
    remaining = budget
    for number, (prompt, wanted) in enumerate(zip(prompts, gens, strict=True)):
        remaining -= prompt if number else 0
        if remaining < 1:
            break
        gen = min(max(1, wanted), remaining)
        remaining -= gen
        calls = tools.draw(rng, gen)
        turns.append(
            Turn(
                prompt_new_tokens=prompt, gen_tokens=gen, tool_latency_s=max(wait_s for _, wait_s in calls), calls=calls
            )
        )
    last = turns[-1]
    return [*turns[:-1], Turn(prompt_new_tokens=last.prompt_new_tokens, gen_tokens=last.gen_tokens)]


def _math(rng: np.random.Generator, samples: int, median: float, budget: int) -> list[list[Turn]]:
    """Draws a group, whose difficulty multiplies each rollout's luck; longer ones take more turns of uneven shares."""
    prompt = round(float(_clipped_lognormal(rng, 325, 0.35, 150, 1000, 1)[0]))
    totals = median * np.exp(0.55 * rng.standard_normal() + 0.60 * rng.standard_normal(samples))
    rows = []
    for total in totals:
        count = min(10, 1 + int(rng.poisson(2.65 * (total / median) ** 0.45)))
        gens = np.round(total * rng.dirichlet([2.0] * count)).astype(int)
        answers = np.round(_clipped_lognormal(rng, 70, 0.8, 11, 351, count - 1)).astype(int)
        rows.append(_turns(rng, [prompt, *answers.tolist()], gens.tolist(), PYTHON, budget))
    return rows


def _math8k(rng: np.random.Generator, samples: int) -> list[list[Turn]]:
    return _math(rng, samples, 2450, 8192)


def _math12k(rng: np.random.Generator, samples: int) -> list[list[Turn]]:
    return _math(rng, samples, 4800, 12288)


def _agentic(rng: np.random.Generator, samples: int) -> list[list[Turn]]:
    prompt = round(float(_clipped_lognormal(rng, 3300, 0.4, 1500, 9000, 1)[0]))
    counts = 12 * np.exp(0.35 * rng.standard_normal() + 0.5 * rng.standard_normal(samples))
    rows = []
    for count in np.clip(np.round(counts), 2, 30).astype(int):
        talk = 285 * float(np.exp(0.2 * rng.standard_normal()))
        gens = np.round(_clipped_lognormal(rng, talk, 0.75, 20, 8192, count)).astype(int)
        answers = np.round(_clipped_lognormal(rng, 740, 1.1, 20, 9001, count - 1)).astype(int)
        rows.append(_turns(rng, [prompt, *answers.tolist()], gens.tolist(), SERVICES, 65536 - prompt))
    return rows


def _uniform(rng: np.random.Generator, samples: int) -> list[list[Turn]]:
    return [[Turn(prompt_new_tokens=256, gen_tokens=int(gen))] for gen in rng.integers(460, 564, samples)]


def _bimodal(rng: np.random.Generator, samples: int) -> list[list[Turn]]:
    low, high, count = (6000, 8192, 3) if rng.random() < 0.15 else (250, 600, 2)
    rows = []
    for total in rng.uniform(low, high, samples):
        gens = np.round(total * rng.dirichlet([24.0] * count)).astype(int)
        rows.append(_turns(rng, [256] + [65] * (count - 1), gens.tolist(), PYTHON, 8192))
    return rows


_DRAW: dict[str, Callable[[np.random.Generator, int], list[list[Turn]]]] = {
    "math8k": _math8k,
    "math12k": _math12k,
    "agentic": _agentic,
    "uniform": _uniform,
    "bimodal": _bimodal,
}
