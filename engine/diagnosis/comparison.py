"""Compares the pace of two runs and says where the difference comes from. Pure: rows of metrics.jsonl go in.

The seconds of a step are split into parts that add up to it (`engine.diagnosis.step_seconds`), so the differences of
the parts add up to the difference of the runs. Sampling is split once more: for tokens T and sampling seconds S of a
mean step,

    S_B - S_A = (T_B - T_A) (S_A / T_A + S_B / T_B) / 2  +  (S_B / T_B - S_A / T_A) (T_A + T_B) / 2
                more tokens                                 more time for a token

Intervals are those of a bootstrap over the steps that both runs have: a draw takes the same steps of both, since runs
of one seed train on the same prompts, and takes them in blocks of neighbours, since neighbours resemble each other
(Kuensch, Annals of Statistics 1989; blocks of n^(1/3) steps).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import metric_names as metric
from engine.diagnosis.step_seconds import GERUNDS, SAMPLING, parts_of

Row = Mapping[str, Any]

FEWEST = 6  # common steps, below which there are no intervals
DRAWS = 2000
MORE_TOKENS, SLOWER = "more tokens", "more time for a token"
LEAST_PART = 0.001  # of a step: smaller parts are put together
LEAST_SHARE = 0.005  # of a step: a smaller part is not named in the sentence
REST = "the rest"
LEAST_WORK = 0.03  # by so much must the tokens of a step differ to be mentioned

# Options that decide how much work a step is, or what does it. Runs in which they differ are not two tries of one run.
WORK = (
    *("model", "checkpoint", "prompts_per_step", "group_size", "oversample", "extra_samples", "recipe", "devices"),
    *("rollout.max_tokens", "rollout.max_response_tokens", "rollout.max_turns", "eval_replicas"),
)
FREE = frozenset({"name", "runs", "fresh", "argv", "directory", "options", "versions", "steps", "seed"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """By how many seconds a step of B is longer in one part, with a 95 % interval; None where there are few steps."""

    name: str
    seconds: float
    low: float | None = None
    high: float | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Run B beside run A.

    steps: those that both have, without the first and without those of a resumed run. a_s, b_s: mean seconds of a step.
    total: the difference; parts: what it consists of, the largest first. tokens: of a step of B / of A; None if they
    were not counted. unlike: why the two should not be compared. differs: other options in which they differ.
    """

    steps: int
    a_s: float
    b_s: float
    total: Part
    parts: tuple[Part, ...]
    tokens: float | None
    unlike: tuple[str, ...]
    differs: tuple[str, ...]
    sentence: str


def compare(
    a: Sequence[Row],
    b: Sequence[Row],
    a_config: Mapping[str, Any],
    b_config: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("A", "B"),
) -> Comparison:
    """Returns the comparison. Raises ValueError if the runs have no step in common that both have timed.

    a, b: rows of metrics.jsonl. a_config, b_config: those of config.json. names: of the runs, for the sentence.

    >>> slow, quick = ([{"step": n, "time/step_s": s, "replicas/busy_s": 1.0, "idle/long_tail_s": s - 1.0}
    ...                 for n in range(1, 9)] for s in (1.5, 1.2))
    >>> print(compare(quick, slow, {}, {}).sentence)
    B takes 25 % longer for a step: 0.30 s more, of them 0.30 s for waiting for the last rollouts.
    """
    timed_a, timed_b = _timed(a), _timed(b)
    common = sorted(timed_a.keys() & timed_b.keys())
    if not common:
        raise ValueError("the runs have no step in common that both have timed. Fix: let both train some steps")
    if len(common) > FEWEST:
        common = [step for step in common if step > 1]  # the first step warms up
    rows = [timed_a[step] for step in common], [timed_b[step] for step in common]
    labels = sorted(
        {name for side in rows for row in side for name in parts_of(row)}, key=lambda name: name != SAMPLING
    )
    seconds_2NP = np.asarray([[[parts_of(row).get(name, 0.0) for name in labels] for row in side] for side in rows])
    tokens_2N = np.asarray([[row.get(metric.TOKENS_GENERATED, 0.0) for row in side] for side in rows], np.float64)
    splits = bool((tokens_2N > 0).all()) and SAMPLING in labels
    point, draws = _differences(seconds_2NP, tokens_2N, splits), None
    if len(common) >= FEWEST:
        drawn = (_differences(seconds_2NP[:, at], tokens_2N[:, at], splits) for at in _blocks(len(common)))
        draws = np.stack(list(drawn))
    named = [MORE_TOKENS, SLOWER, *labels[1:]] if splits else labels
    a_s, b_s = (float(np.mean([row[metric.TIME_STEP_S] for row in side])) for side in rows)

    def part(name: str, places: Sequence[int]) -> Part:
        drawn = None if draws is None else draws[:, places].sum(1)
        return _part(name, float(point[places].sum()), drawn)

    large = [at for at in range(len(named)) if abs(point[at]) >= LEAST_PART * a_s]
    parts = [part(named[at], [at]) for at in large]
    if len(large) < len(named):
        parts.append(part(REST, [at for at in range(len(named)) if at not in large]))
    total = part("a step", range(len(named)))
    tokens = float(tokens_2N[1].mean() / tokens_2N[0].mean()) if (tokens_2N > 0).all() else None
    ordered = tuple(sorted(parts, key=lambda part: -abs(part.seconds)))
    unlike, differs = _unlike(a_config, b_config)
    return Comparison(
        steps=len(common),
        a_s=a_s,
        b_s=b_s,
        total=total,
        parts=ordered,
        tokens=tokens,
        unlike=tuple(unlike),
        differs=tuple(differs),
        sentence=_sentence(names, a_s, b_s, total, ordered, tokens, unlike),
    )


def _timed(rows: Sequence[Row]) -> dict[int, Row]:
    """Returns the rows of whole steps by step; the last one counts where a step was trained again."""
    return {
        int(row["step"]): row
        for row in rows
        if row.get(metric.TIME_STEP_S, 0.0) > 0 and metric.ROLLOUT_TRAJECTORIES_RESUMED not in row
    }


def _differences(seconds_2NP: NDArray[np.float64], tokens_2N: NDArray[np.float64], splits: bool) -> NDArray[np.float64]:
    """Returns by how much B's mean step is longer, by part; with `splits` the first part is split into two."""
    means_2P = seconds_2NP.mean(1)
    differences_P = means_2P[1] - means_2P[0]
    if not splits:
        return differences_P
    tokens_2 = tokens_2N.mean(1)
    rates_2 = means_2P[:, 0] / tokens_2
    more = (tokens_2[1] - tokens_2[0]) * rates_2.mean()
    return np.concatenate([[more, differences_P[0] - more], differences_P[1:]])


def _blocks(count: int) -> NDArray[np.int64]:
    """Returns DRAWS bootstrap samples of the indices below count, made of blocks of neighbours on a circle."""
    length = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(0).integers(0, count, (DRAWS, -(-count // length)))
    return ((starts[:, :, None] + np.arange(length)) % count).reshape(DRAWS, -1)[:, :count]


def _part(name: str, seconds: float, draws: NDArray[np.float64] | None) -> Part:
    if draws is None:
        return Part(name=name, seconds=float(seconds))
    low, high = np.quantile(draws, [0.025, 0.975])
    return Part(name=name, seconds=float(seconds), low=float(low), high=float(high))


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns a clause for each option that makes the runs unlike, and for each other one in which they differ."""
    unlike: list[str] = []
    differs: list[str] = []
    for name in sorted(a.keys() | b.keys()):
        there, here = a.get(name), b.get(name)
        if name in FREE or there == here:
            continue
        shown = f"{name} ({_shown(there)}, {_shown(here)})"
        is_known = name in a and name in b  # an older version has fewer options
        is_same_file = name in ("model", "checkpoint", "recipe") and _last(there) == _last(here)
        (unlike if name in WORK and is_known and not is_same_file else differs).append(shown)
    versions = a.get("versions") or {}, b.get("versions") or {}
    for name in sorted(versions[0].keys() | versions[1].keys()):
        there, here = (each.get(name) for each in versions)
        if there != here:
            is_machine = name == "processor" and None not in (there, here)
            (unlike if is_machine else differs).append(f"{name} ({_shown(there)}, {_shown(here)})")
    return unlike, differs


def _last(path: Any) -> str:
    return posixpath.basename(str(path).rstrip("/"))


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value!s:.60}"


def _sentence(
    names: tuple[str, str],
    a_s: float,
    b_s: float,
    total: Part,
    parts: Sequence[Part],
    tokens: float | None,
    unlike: Sequence[str],
) -> str:
    share = total.seconds / a_s
    if total.low is not None and not total.is_sure:
        told = f"{names[1]} is as fast as {names[0]} within the scatter of the steps"
        told += f" ({100 * share:+.0f} %, from {100 * total.low / a_s:+.0f} to {100 * (total.high or 0) / a_s:+.0f} %)"
    else:
        told = f"{names[1]} takes {abs(100 * share):.0f} % {'longer' if share > 0 else 'less'} for a step"
        told += f": {_seconds(abs(total.seconds))} {'more' if share > 0 else 'less'}"
        same = [part for part in parts if part.seconds * total.seconds > 0 and abs(part.seconds) >= LEAST_SHARE * a_s]
        sure = [part for part in same if part.is_sure or part.low is None]
        if sure:
            listed = ", ".join(f"{_seconds(abs(part.seconds))} {_clause(part)}" for part in sure[:3])
            told += f", of them {listed}"
    told += "."
    if tokens is not None and abs(tokens - 1) >= LEAST_WORK:
        told += f" A step of {names[1]} samples {100 * (tokens - 1):+.0f} % tokens, so part of this is work, not speed."
    if unlike:
        told = f"These runs should not be compared, since they differ in {', '.join(unlike)}. {told}"
    return told


def _clause(part: Part) -> str:
    if part.name == MORE_TOKENS:
        return f"for {'more' if part.seconds > 0 else 'fewer'} tokens"
    if part.name == SLOWER:
        return f"for {'slower' if part.seconds > 0 else 'faster'} sampling"
    return f"for {GERUNDS.get(part.name, part.name)}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"
