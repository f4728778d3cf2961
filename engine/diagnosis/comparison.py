"""Compares the pace of two runs and says where the difference comes from. Pure: rows of metrics.jsonl go in.

The seconds of a step are split into parts that add up to it (`engine.diagnosis.step_seconds`), so the differences of
the parts add up to the difference of the runs. Sampling is split once more: for tokens T and sampling seconds S of a
mean step,

    S_B - S_A = (T_B - T_A) (S_A / T_A + S_B / T_B) / 2  +  (S_B / T_B - S_A / T_A) (T_A + T_B) / 2
                more tokens                                 more time for a token

Intervals come from a bootstrap over the steps that both runs have: a draw takes the same steps of both, since runs of
one seed train on the same prompts. It takes them in blocks of neighbours (Kuensch, Annals of Statistics 1989), which
are the longer, the more neighbours resemble each other (Carlstein, Annals of Statistics 1986). An interval is 2 t
standard deviations of the draws wide, with the t of as many degrees of freedom as there are blocks, less one: quantiles
of few draws are too narrow.
"""

from __future__ import annotations

import math
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
SAME = 0.0005  # of a step: a smaller difference, with its interval, is none
LEAST_SHARE = 0.005  # of a step: a smaller part is not named in the sentence
REST = "the rest"
NAMED = 4  # parts in the sentence
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

    steps: those that both have, without the first, which warms up, where there are others, and without those of a
    resumed run; basis says it. a_s, b_s: mean seconds of a step.
    total: the difference; parts: what it consists of, the largest first. tokens: of a step of B / of A; None if they
    were not counted. unlike: why the two should not be compared. differs: other options in which they differ.
    """

    steps: int
    basis: str
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
    B takes 25 % longer for a step: 0.30 s more (+0.30 s for waiting for the last rollouts).
    """
    timed_a, timed_b = _timed(a), _timed(b)
    common = sorted(timed_a.keys() & timed_b.keys())
    if not common:
        raise ValueError("the runs have no step in common that both have timed. Fix: let both train some steps")
    later = [step for step in common if step > 1]  # the first step warms up
    basis = _basis(common, later)
    common = later or common
    rows = [timed_a[step] for step in common], [timed_b[step] for step in common]
    labels = sorted(
        {name for side in rows for row in side for name in parts_of(row)}, key=lambda name: name != SAMPLING
    )
    seconds_2NP = np.asarray([[[parts_of(row).get(name, 0.0) for name in labels] for row in side] for side in rows])
    tokens_2N = np.asarray([[row.get(metric.TOKENS_GENERATED, 0.0) for row in side] for side in rows], np.float64)
    splits = bool((tokens_2N > 0).all()) and SAMPLING in labels
    even_1N = np.full((1, len(common)), 1 / len(common))
    point, draws = _differences(seconds_2NP, tokens_2N, even_1N, splits)[0], None
    width = 0.0
    if len(common) >= FEWEST:
        step_s_2N = seconds_2NP.sum(2)
        length = _block_length(step_s_2N[1] - step_s_2N[0])
        draws = _differences(seconds_2NP, tokens_2N, _block_weights(len(common), length), splits)
        blocks = len(common) / length
        width = _t(blocks - 1) * math.sqrt(blocks / (blocks - 1))  # in standard deviations of the draws
    named = [MORE_TOKENS, SLOWER, *labels[1:]] if splits else labels
    a_s, b_s = (float(np.mean([row[metric.TIME_STEP_S] for row in side])) for side in rows)

    def part(name: str, places: Sequence[int]) -> Part:
        seconds = float(point[places].sum())
        if draws is None:
            return Part(name=name, seconds=seconds)
        either = width * float(draws[:, places].sum(1).std())
        return Part(name=name, seconds=seconds, low=seconds - either, high=seconds + either)

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
        basis=basis,
        a_s=a_s,
        b_s=b_s,
        total=total,
        parts=ordered,
        tokens=tokens,
        unlike=tuple(unlike),
        differs=tuple(differs),
        sentence=_sentence(names, (a_s, b_s), len(common), total, ordered, tokens, unlike),
    )


def _timed(rows: Sequence[Row]) -> dict[int, Row]:
    """Returns the rows of whole steps by step; the last one counts where a step was trained again."""
    return {
        int(row["step"]): row
        for row in rows
        if row.get(metric.TIME_STEP_S, 0.0) > 0 and metric.ROLLOUT_TRAJECTORIES_RESUMED not in row
    }


def _differences(
    seconds_2NP: NDArray[np.float64], tokens_2N: NDArray[np.float64], weights_DN: NDArray[np.float64], splits: bool
) -> NDArray[np.float64]:
    """Returns by how much B's mean step is longer, by part, [D, P]; with `splits` the first part is split into two.

    weights_DN: of the steps, in each of D draws.
    """
    means_2DP = weights_DN @ seconds_2NP
    differences_DP = means_2DP[1] - means_2DP[0]
    if not splits:
        return differences_DP
    tokens_2D = tokens_2N @ weights_DN.T
    rates_2D = means_2DP[:, :, 0] / tokens_2D
    more_D = (tokens_2D[1] - tokens_2D[0]) * rates_2D.mean(0)
    return np.column_stack([more_D, differences_DP[:, 0] - more_D, differences_DP[:, 1:]])


def _block_length(differences_N: NDArray[np.float64]) -> int:
    """Returns how many neighbours a block has: 1 if steps do not resemble each other, at most a third of the steps.

    The lag-one autocorrelation r of n steps is too small by about (1 + 3 phi) / n.
    """
    count = len(differences_N)
    centred_N = differences_N - differences_N.mean()
    power = float(centred_N @ centred_N)
    r = float(centred_N[1:] @ centred_N[:-1]) / power if power else 0.0
    phi = min(0.9, max(0.0, (count * r + 1) / (count - 3)))
    length = (2 * phi / (1 - phi**2)) ** (2 / 3) * count ** (1 / 3)
    return max(1, min(round(length), count // 3))


def _block_weights(count: int, length: int) -> NDArray[np.float64]:
    """Returns the weights of the steps in DRAWS bootstrap samples made of blocks of neighbours on a circle, [D, N]."""
    starts = np.random.default_rng(0).integers(0, count, (DRAWS, -(-count // length)))
    drawn_DN = ((starts[:, :, None] + np.arange(length)) % count).reshape(DRAWS, -1)[:, :count]
    weights_DN = np.zeros((DRAWS, count))
    np.add.at(weights_DN, (np.arange(DRAWS)[:, None], drawn_DN), 1 / count)
    return weights_DN


def _t(freedom: float) -> float:
    """Returns the 97.5 % quantile of Student's t, to 1 % from 2 degrees of freedom on (Cornish-Fisher)."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


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
        if there != here and None not in (there, here):  # what one of them did not record is not known to differ
            (unlike if name == "processor" else differs).append(f"{name} ({_shown(there)}, {_shown(here)})")
    return unlike, differs


def _last(path: Any) -> str:
    return posixpath.basename(str(path).rstrip("/"))


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value!s:.60}"


def _sentence(
    names: tuple[str, str],
    means_s: tuple[float, float],
    steps: int,
    total: Part,
    parts: Sequence[Part],
    tokens: float | None,
    unlike: Sequence[str],
) -> str:
    a_s, b_s = means_s
    share = total.seconds / a_s
    if max(abs(total.seconds), abs(total.low or 0.0), abs(total.high or 0.0)) < SAME * a_s:
        told = f"{names[1]} takes as long for a step as {names[0]}: {_seconds(b_s)}"
    elif total.low is not None and not total.is_sure:
        told = f"No sure difference: a step of {names[1]} takes {_percent(share)} "
        told += f"({_percent(total.low / a_s)} to {_percent((total.high or 0) / a_s)})"
    else:
        took = f"{_percent(abs(share)).lstrip('+')} {'longer' if share > 0 else 'less'}"
        if total.low is None:
            told = (
                f"In {_count(steps)} {names[1]} took {took}, which may be chance, as an interval needs {FEWEST} steps"
            )
        else:
            told = f"{names[1]} takes {took} for a step"
        told += f": {_seconds(abs(total.seconds))} {'more' if share > 0 else 'less'}"
        sure = [part for part in parts if part.is_sure or part.low is None]
        named = [part for part in sure if abs(part.seconds) >= LEAST_SHARE * a_s][:NAMED]
        if named:
            told += f" ({', '.join(f'{_signed(part.seconds)} {_clause(part)}' for part in named)})"
    told += "."
    if tokens is not None and abs(tokens - 1) >= LEAST_WORK:
        told += f" A step of {names[1]} samples {100 * (tokens - 1):+.0f} % tokens, which is work, not speed."
    if unlike:
        told = f"These runs should not be compared, since they differ in {', '.join(unlike)}. {told}"
    return told


def _basis(common: Sequence[int], later: Sequence[int]) -> str:
    if not later:
        return "the first step alone, which warms up: both runs have no other in common"
    without = ", without the first, which warms up" if len(later) < len(common) else ""
    return f"{_count(len(later))} that both runs have{without}"


def _count(steps: int) -> str:
    return f"{steps} step{'s' * (steps > 1)}"


def _percent(share: float) -> str:
    """Returns "+12 %", or "+0.3 %" for what would round to nothing."""
    percent = 100 * share
    text = f"{percent:+.0f}" if abs(percent) >= 1 or abs(percent) < 0.05 else f"{percent:+.1f}"
    return f"{'0' if text in ('+0', '-0') else text} %"


def _clause(part: Part) -> str:
    if part.name == MORE_TOKENS:
        return f"for {'more' if part.seconds > 0 else 'fewer'} tokens"
    if part.name == SLOWER:
        return f"for {'slower' if part.seconds > 0 else 'faster'} sampling"
    return f"for {GERUNDS.get(part.name, part.name)}"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else '-'}{_seconds(abs(value))}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"
