"""Answers the pages "Groups" and "Trajectory" from a recorded step.

Fields have the names and values of `engine.types` and `engine.recording.rollouts.Rollout`; times are those of
`engine.clock`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine.diagnosis.token_kinds import AFTER_REPLY, HIGH_SHARE, mark
from engine.recording.outlines import RecordedOutline, TrajectoryOutline, TurnOutline
from engine.recording.records import PartTokens, RecordedGroup
from engine.types import Segment, Trajectory, Turn
from engine.view.answers.tokens import pieces, tokenizer_of
from engine.view.run_files import RunFiles

QUESTION = 300  # characters of a prompt that its group shows


class NotThere(ValueError):
    """What was asked for is not in the run's files. The message is one line that says what, and why."""


def groups_of(run: RunFiles, step: int) -> dict[str, Any]:
    """Returns the groups of a step with figures of their trajectories, in columns by their index. Raises NotThere.

    groups_written: how many the step had; a torn record holds fewer. longest_tokens, longest_s: of a trajectory, the
    seconds since the step began. first: the trajectory that is worth a look if none is named. wrong, cut, failed: the
    indices of those with a failed tool call, of those that ended without an answer, and of those that an error ended.
    """
    groups = recorded_outlines(run, step)
    members = [member for recorded in groups for member in recorded.group.trajectories]
    started_at = min((member.started_at for member in members), default=0.0)
    shown = [_group(recorded) for recorded in groups]
    return {
        "step": step,
        "started_at": started_at,
        "groups_written": run.recorded.groups_written(step),
        "longest_tokens": max((tokens for group in shown for tokens in group["tokens"]), default=0),
        "longest_s": max((member.finished_at for member in members), default=started_at) - started_at,
        "first": _worth_a_look(groups),
        "groups": shown,
    }


def members_of(run: RunFiles, step: int, group: int) -> dict[str, Any]:
    """Returns the trajectories of a group with their turns, without texts and tokens. Raises NotThere."""
    for recorded in recorded_outlines(run, step):
        if recorded.number == group:
            return {
                "step": step,
                "group": group,
                "trajectories": [_member(recorded, index) for index in range(len(recorded.group.trajectories))],
            }
    raise NotThere(f"step {step} has no group {group}")


def _worth_a_look(groups: Sequence[RecordedOutline]) -> dict[str, int] | None:
    """Returns the first trained trajectory with several turns and recorded log-probabilities, else the first trained
    one, else the first.
    """

    def first_that(fits: Callable[[RecordedOutline, int], bool]) -> dict[str, int] | None:
        for recorded in groups:
            for index, member in enumerate(recorded.group.trajectories):
                if fits(recorded, index):
                    return {"group": recorded.number, "sample": member.sample}
        return None

    return (
        first_that(
            lambda recorded, index: (
                recorded.whole
                and index in recorded.group.kept
                and len(recorded.group.trajectories[index].all_turns) > 1
            )
        )
        or first_that(lambda recorded, index: index in recorded.group.kept)
        or first_that(lambda recorded, index: True)
    )


def recorded_outlines(run: RunFiles, step: int) -> Sequence[RecordedOutline]:
    """Returns the outlines of a step's groups. Raises NotThere if none is recorded."""
    if not (groups := run.recorded.outlines(step)):
        raise NotThere(_why_missing(run, step))
    return groups


def _why_missing(run: RunFiles, step: int) -> str:
    if not run.recorded.steps:
        return run.recorded.fault or "this run has no record (record/): it was started with record.max_mb=0"
    if step in run.recorded.steps:
        return run.recorded.fault or f"the record of step {step} is damaged: none of its groups can be read"
    return f"step {step} is not recorded; these steps are: {_listed(run.recorded.steps)}"


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", *shown[-4:]])


def plain(value: Any) -> Any:
    """Returns a value of `engine.types` as plain JSON values."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=np.ndarray.tolist)


def _fields(value: Any, *names: str) -> dict[str, Any]:
    return {name: plain(getattr(value, name)) for name in names}


def _group(recorded: RecordedOutline) -> dict[str, Any]:
    group, members = recorded.group, recorded.group.trajectories
    return {
        **_fields(recorded, "number", "node", "whole"),
        **_fields(group, "drop", "waste", "refills", "kept"),
        "prompt_id": group.prompt.id,
        "question": group.prompt.question[:QUESTION],
        "samples": [member.sample for member in members],
        "rewards": [member.reward for member in members],
        "tokens": [member.tokens for member in members],
        "wrong": _indices(members, lambda member: any(use.outcome != "ok" for use in member.tool_uses)),
        "cut": _indices(members, lambda member: member.stop != "answer"),
        "failed": _indices(members, lambda member: member.error is not None),
    }


def _indices(members: Sequence[TrajectoryOutline], fits: Callable[[TrajectoryOutline], bool]) -> list[int]:
    return [index for index, member in enumerate(members) if fits(member)]


def _member(recorded: RecordedOutline, index: int) -> dict[str, Any]:
    member = recorded.group.trajectories[index]
    return (
        _selection(recorded, index)
        | _fields(member, "sample", "reward", "stop", "error")
        | {"turns": [_outline(turn) for turn in member.all_turns]}
    )


def _selection(recorded: RecordedGroup | RecordedOutline, index: int) -> dict[str, Any]:
    """Returns whether a trajectory was kept, its advantage, and the selector's reasons."""
    return {
        "kept": index in recorded.group.kept,
        "advantage": recorded.group.advantage(index),
        "reasons": recorded.reasons[index],
    }


def _outline(turn: TurnOutline) -> dict[str, Any]:
    names = ("start", "end", "replica", "queued_at", "started_at", "finished_at")
    return _fields(turn, *names) | {
        "tool_uses": [_fields(use, "outcome", "dispatched_at", "finished_at") for use in turn.tool_uses]
    }


def trajectory_of(run: RunFiles, step: int, group: int, sample: int) -> dict[str, Any]:
    """Returns one trajectory with its texts, calls and tokens. Raises NotThere."""
    if step not in run.recorded.steps:
        raise NotThere(_why_missing(run, step))
    recorded = run.recorded.group(step, group)
    for index, member in enumerate(recorded.group.trajectories if recorded is not None else ()):
        if recorded is not None and member.sample == sample:
            return _trajectory(run, recorded, index)
    raise NotThere(f"step {step} has no trajectory {sample} in a group {group}")


def _trajectory(run: RunFiles, recorded: RecordedGroup, index: int) -> dict[str, Any]:
    member = recorded.group.trajectories[index]
    of_group = run.recorded.tokens(recorded.step, recorded.number)
    tokens = (None,) * len(member.parts) if of_group is None else of_group.trajectories[index]
    names = ("sample", "temperature", "stop", "error", "reward", "scores", "answer", "started_at", "finished_at")
    return {
        "step": recorded.step,
        "group": recorded.number,
        **_fields(recorded, "node", "whole"),
        **_fields(recorded.group, "drop", "prompt"),
        **_selection(recorded, index),
        **_fields(member, *names),
        "seed": str(member.seed),  # JavaScript's numbers have 53 bits only
        "parts": [_part(run, part, columns) for part, columns in zip(member.parts, tokens, strict=True)],
    }


def _part(run: RunFiles, part: Trajectory | Segment, tokens: PartTokens | None) -> dict[str, Any]:
    """Returns a token sequence: its turns with their text, and its tokens in columns (None if they cannot be read)."""
    text_T = None if tokens is None else pieces(tokenizer_of(run), tokens.token_ids_T.tolist())
    turns = [
        plain(turn) | {"text": None if text_T is None else "".join(text_T[turn.start : turn.end])}
        for turn in part.turns
    ]
    return {"turns": turns, "tokens": None if tokens is None else _columns(tokens, text_T, part.turns)}


def _columns(tokens: PartTokens, text_T: list[str] | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns columns of T values; None if nothing was recorded. ratio_T: learner's / sampler's probability."""
    ratio_T = None
    if tokens.learner_logprobs_T is not None and tokens.logprobs_T is not None:
        ratio_T = np.exp(tokens.learner_logprobs_T - tokens.logprobs_T)
    return {
        "token_ids_T": tokens.token_ids_T.tolist(),
        "text_T": text_T,
        "sampled_T": tokens.sampled_T.tolist(),
        "versions_T": None if tokens.versions_T is None else tokens.versions_T.tolist(),
        "logprobs_T": _values(tokens.logprobs_T),
        "learner_logprobs_T": _values(tokens.learner_logprobs_T),
        "learner_entropy_T": _values(tokens.learner_entropy_T),
        "learner_logprob_gradient_T": _values(tokens.learner_logprob_gradient_T),
        "ratio_T": _values(ratio_T),
        **_uncertain(tokens, text_T, turns),
    }


def _uncertain(tokens: PartTokens, text_T: list[str] | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns which tokens of high entropy are forking or reflection tokens; {} if no entropy was recorded."""
    entropy_T = tokens.learner_entropy_T
    if entropy_T is None or text_T is None or not (known_T := tokens.sampled_T & ~np.isnan(entropy_T)).any():
        return {}
    marks = mark(text_T, [(turn.start, turn.end) for turn in turns])
    high_T = known_T & (entropy_T > np.quantile(entropy_T[known_T], 1 - HIGH_SHARE))
    reflection_T = high_T & (marks.after_reply_T > 0) & (marks.after_reply_T <= AFTER_REPLY)
    return {"forking_T": (high_T & marks.forking_T).tolist(), "reflection_T": reflection_T.tolist()}


def _values(values_T: Any) -> list[float | None] | None:
    if values_T is None:
        return None
    return [None if value != value else round(value, 5) for value in values_T.tolist()]
