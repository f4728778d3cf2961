"""RoC as the public code of rStar2-Agent does it, for comparison with the paper's rule in `algo.group.roc`.

It differs from the paper: positives and failures are not drawn but taken in order, a tool response failed when it says
"error", the first turn is no turn, and a target that the rounding misses is an error.
Source: microsoft/rStar, rstar2_agent/down_sample/roc.py at ecbfb943e, by its behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.types import Trajectory

TURN_START, END_OF_TURN = "<|im_start|>assistant", "<|im_end|>"
_ANSWER = re.compile(r"<answer>.*?</answer>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TURN = re.compile(re.escape(TURN_START) + ".*?" + re.escape(END_OF_TURN), re.DOTALL)


def response_text(trajectory: Trajectory) -> str:
    """The trajectory after its prompt as the released code reads it: tool responses between the assistant's turns."""
    said = trajectory.text.split(END_OF_TURN)
    parts = [said[0]]
    for turn, following in zip(trajectory.turns, said[1:], strict=False):
        responses = "\n".join(f"<tool_response>\n{use.response}\n</tool_response>" for use in turn.tool_uses)
        answered = f"\n<|im_start|>user\n{responses}{END_OF_TURN}\n{TURN_START}\n" if responses else ""
        parts += [END_OF_TURN, answered, following]
    return "".join(parts)


def error_penalty(text: str) -> float:
    """p_err: share of the tool responses that say "error" in any case; 0.5 without one."""
    # Up to the last end only: openings after it would each be searched to the end of the text.
    responses = _RESPONSE.findall("".join(text.rpartition("</tool_response>")[:2]))
    return sum("error" in response.lower() for response in responses) / len(responses) if responses else 0.5


def format_penalty(text: str) -> float:
    """p_format: min(1, (answers - 1) / turns), over closed turns after the first.

    It is 1 without such a turn, without an answer, and where the tags do not pair up one opening to one closing, as
    they do not when answers are nested.
    """
    openings, closings = text.count("<answer>"), text.count("</answer>")
    pairs = len(_ANSWER.findall("".join(text.rpartition("</answer>")[:2])))
    turns = len(_TURN.findall("".join(text.rpartition(END_OF_TURN)[:2])))
    if not pairs or not openings == closings == pairs or not turns:
        return 1.0
    return min(1.0, (pairs - 1) / turns)


def quota(
    positives: int, negatives: int, keep: int, least_positives: int = 2, least_negatives: int = 2
) -> tuple[int, int]:
    """How many of each are kept of a group larger than `keep`.

    Both shares are rounded half to even. Where both are below their minimum the whole group is kept. Else a share that
    is at most its minimum (or what there is of it) becomes that, first of the negatives, then of the positives, and
    the other one takes the rest. Raises ValueError where the released code's assertion fails: the rounding misses
    `keep` and no minimum applies.
    """
    count = positives + negatives
    kept_positives = round(positives * keep / count)
    kept_negatives = round(negatives * keep / count)
    if kept_positives < least_positives and kept_negatives < least_negatives:
        return positives, negatives
    fewest_negatives = min(least_negatives, negatives)
    if kept_negatives <= fewest_negatives:
        kept_negatives = fewest_negatives
        kept_positives = keep - kept_negatives
    fewest_positives = min(least_positives, positives)
    if kept_positives <= fewest_positives:
        kept_positives = fewest_positives
        kept_negatives = keep - kept_positives
    if kept_positives + kept_negatives != keep or kept_positives > positives or kept_negatives > negatives:
        raise ValueError(f"the released rule cannot keep {keep} of {positives} positives and {negatives} negatives")
    return kept_positives, kept_negatives


def select(
    penalties: Sequence[float], rewards: Sequence[float], keep: int, least_positives: int = 2, least_negatives: int = 2
) -> list[int]:
    """Indices to keep, ascending: the positives of least penalty, then of least index, and the first negatives.

    Nothing of a group smaller than `keep`. Raises ValueError as `quota`, and where the minima exceed `keep`.
    """
    if least_positives + least_negatives > keep:
        raise ValueError(
            f"keep={keep} is below the minima of the released rule, {least_positives} positives and {least_negatives} "
            f"negatives. Fix: keep at least {least_positives + least_negatives}."
        )
    if len(rewards) <= keep:
        return list(range(len(rewards))) if len(rewards) == keep else []
    positives = [index for index, reward in enumerate(rewards) if reward > 0]
    negatives = [index for index, reward in enumerate(rewards) if reward <= 0]
    kept = quota(len(positives), len(negatives), keep, least_positives, least_negatives)
    return sorted(sorted(positives, key=penalties.__getitem__)[: kept[0]] + negatives[: kept[1]])


def select_of(trajectories: Sequence[Trajectory], keep: int) -> list[int]:
    """`select` by the texts and rewards of a group."""
    texts = [response_text(trajectory) for trajectory in trajectories]
    penalties = [error_penalty(text) + format_penalty(text) for text in texts]
    return select(penalties, [trajectory.reward or 0.0 for trajectory in trajectories], keep)
