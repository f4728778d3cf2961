"""Computes which tokens of rollouts are uncertain, and of what kind they are. Pure: arrays in, numbers out.

A token has *high entropy* where its entropy is above the quantile 1 - HIGH_SHARE of all sampled tokens of its step.
`engine.diagnosis.token_kinds` defines forking and reflection tokens. Shape legend: T tokens of a trajectory, N sampled
tokens of a step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.diagnosis.token_kinds import AFTER_REPLY, HIGH_SHARE, Bools, Marks

DECILES = 10
TOP_WORDS = 20
FEW = 20  # a share of fewer tokens than this is left out of `after_reply`: it would be noise

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A trajectory with its entropies in nats. entropy_T and logprob_T: of sampled tokens, 0 elsewhere.

    failed_turns: those whose reply reports a failed call.
    """

    texts_T: Sequence[str]
    marks: Marks
    entropy_T: Floats
    logprob_T: Floats
    failed_turns: frozenset[int] = frozenset()


def threshold(scored: Sequence[Scored], high_share: float = HIGH_SHARE) -> float:
    """Returns the entropy above which a token is one of the most uncertain `high_share`. Raises ValueError for none."""
    entropies_N = np.concatenate([each.entropy_T[each.marks.sampled_T] for each in scored] or [np.zeros(0, np.float32)])
    if not len(entropies_N):
        raise ValueError("no sampled token")
    return float(np.quantile(entropies_N, 1 - high_share))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flat:
    """All sampled tokens of a step side by side."""

    entropy_N: Floats
    logprob_N: Floats
    high_N: Bools
    forking_N: Bools
    reflection_N: Bools
    call_N: Bools
    position_N: NDArray[np.float64]  # in its trajectory's sampled tokens, in [0, 1)
    after_reply_N: NDArray[np.int32]
    after_failure_N: Bools  # the reply before its turn reports a failed call


def _flat(scored: Sequence[Scored], above: float, after_reply: int) -> _Flat:
    parts: dict[str, list[NDArray[Any]]] = defaultdict(list)
    for each in scored:
        sampled_T = each.marks.sampled_T
        count = int(sampled_T.sum())
        after_N = each.marks.after_reply_T[sampled_T]
        parts["entropy_N"].append(each.entropy_T[sampled_T])
        parts["logprob_N"].append(each.logprob_T[sampled_T])
        parts["high_N"].append(each.entropy_T[sampled_T] > above)
        parts["forking_N"].append(each.marks.forking_T[sampled_T])
        parts["reflection_N"].append((after_N > 0) & (after_N <= after_reply))
        parts["call_N"].append(each.marks.call_T[sampled_T])
        parts["position_N"].append(np.arange(count) / max(1, count))
        parts["after_reply_N"].append(after_N)
        parts["after_failure_N"].append(np.isin(each.marks.turn_T[sampled_T] - 1, sorted(each.failed_turns)))
    return _Flat(**{name: np.concatenate(arrays) for name, arrays in parts.items()})


def shares(
    scored: Sequence[Scored], *, high_share: float = HIGH_SHARE, after_reply: int = AFTER_REPLY
) -> dict[str, Any]:
    """Returns the figures of a step, as JSON has them. Raises ValueError where nothing was sampled.

    of_high: shares of the high-entropy tokens by kind (`both` is in forking and reflection too). high_among: share of
    high-entropy tokens among the tokens of a kind; `all` is `high_share` but for ties. by_position: ten parts of each
    trajectory's sampled tokens. after_reply: by the number of the token after a reply, apart for replies of failed
    calls; None where there are few. phrases: the forking phrases found, most frequent first. nll: mean of -log p of
    what was sampled, which the mean entropy should be near to if this model has sampled it at temperature 1.
    """
    above = threshold(scored, high_share)
    flat = _flat(scored, above, after_reply)
    high_N, both_N = flat.high_N, flat.forking_N & flat.reflection_N
    other_N = ~(flat.forking_N | flat.reflection_N)
    kinds = {"forking": flat.forking_N, "reflection": flat.reflection_N, "both": both_N, "other": other_N}
    among = {"all": np.ones_like(high_N), **kinds, "tool call": flat.call_N}
    return {
        "trajectories": len(scored),
        "tokens": len(high_N),
        "tokens_by_kind": {name: int(kind_N.sum()) for name, kind_N in among.items()},
        "threshold": above,
        "entropy": float(flat.entropy_N.mean()),
        "nll": float(-flat.logprob_N.mean()),
        "entropy_by_kind": {name: _mean(flat.entropy_N[kind_N]) for name, kind_N in among.items()},
        "of_high": {name: _mean(kind_N[high_N]) for name, kind_N in kinds.items()},
        "high_among": {name: _mean(high_N[kind_N]) for name, kind_N in among.items()},
        "by_position": list(_by_position(flat)),
        "after_reply": list(_after_reply(flat, 2 * after_reply)),
        "phrases": _phrases(scored, above),
        "words": _words(scored, above),
    }


def _mean(values: NDArray[Any], least: int = 1) -> float | None:
    """Returns the mean, or None of fewer than `least` values."""
    return float(values.mean()) if len(values) >= least else None


def _by_position(flat: _Flat) -> Iterator[dict[str, Any]]:
    part_N = (flat.position_N * DECILES).astype(int)
    for part in range(DECILES):
        here_N = part_N == part
        yield {
            "from": part / DECILES,
            "tokens": int(here_N.sum()),
            "high": _mean(flat.high_N[here_N]),
            "high_forking": _mean((flat.high_N & flat.forking_N)[here_N]),
            "high_reflection": _mean((flat.high_N & flat.reflection_N)[here_N]),
        }


def _after_reply(flat: _Flat, last: int) -> Iterator[dict[str, Any]]:
    for number in range(1, last + 1):
        here_N = flat.after_reply_N == number
        failed_N = here_N & flat.after_failure_N
        yield {
            "token": number,
            "tokens": int(here_N.sum()),
            "high": _mean(flat.high_N[here_N], least=FEW),
            "high_after_failure": _mean(flat.high_N[failed_N], least=FEW),
            "high_after_success": _mean(flat.high_N[here_N & ~failed_N], least=FEW),
        }


def _phrases(scored: Sequence[Scored], above: float) -> list[dict[str, Any]]:
    """Returns the figures of each phrase's first token, with which the model decides to say it."""
    entropies: dict[str, list[float]] = defaultdict(list)
    for each in scored:
        for phrase, entropy in zip(each.marks.phrase_T, each.entropy_T.tolist(), strict=True):
            if phrase:
                entropies[phrase].append(entropy)
    by_count = sorted(entropies.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {
            "phrase": phrase,
            "count": len(values),
            "entropy": float(np.mean(values)),
            "high": float(np.mean(np.asarray(values) > above)),
        }
        for phrase, values in by_count
    ]


def _words(scored: Sequence[Scored], above: float) -> list[dict[str, Any]]:
    """Returns the tokens that are most often above the threshold, without those whose character ends later."""
    high: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for each in scored:
        for at in np.flatnonzero(each.marks.sampled_T).tolist():
            total[each.texts_T[at]] += 1
            high[each.texts_T[at]] += bool(each.entropy_T[at] > above)
    most = sorted(high.items(), key=lambda item: (-item[1], item[0]))[:TOP_WORDS]
    return [{"token": text, "high": count, "count": total[text]} for text, count in most if count and text]
