"""Reads recorded trajectories with their tokens, as the engine had them: to show, analyse and replay them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from engine.errors import BadInput
from engine.recording.reader import RecordedRun
from engine.recording.records import GroupTokens, PartTokens, RecordedGroup
from engine.types import Group, Prompt, TokenScores, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A recorded trajectory and what became of it.

    step, group: where it is, counted as in the record. kept: it was chosen for training, with `advantage`. drop: why
    its group was not trained, if so. reasons, node: as in `engine.recording.records.RecordedGroup`.
    """

    step: int
    group: int
    kept: bool
    advantage: float | None
    drop: str | None
    reasons: Mapping[str, float]
    node: str
    trajectory: Trajectory


def rollouts_of(run: RecordedRun, step: int, tokenizer: Tokenizer | None) -> Iterator[Rollout]:
    """Yields the trajectories of a step in order; it leaves out a group whose tokens cannot be read.

    tokenizer: decodes their text. Log-probabilities are NaN and versions -1 where the record holds none
    (`RecordedGroup.whole`).
    """
    for recorded in run.groups(step):
        tokens = run.tokens(step, recorded.number)
        if tokens is None:
            continue
        group = with_tokens(recorded, tokens, tokenizer)
        for index, (member, reasons) in enumerate(zip(group.trajectories, recorded.reasons, strict=True)):
            yield Rollout(
                step=step,
                group=recorded.number,
                kept=index in group.kept,
                advantage=group.advantage(index),
                drop=group.drop,
                reasons=reasons,
                node=recorded.node,
                trajectory=member,
            )


def load_tokenizer(path: Path | None) -> Tokenizer | None:
    """Loads the tokenizer of a record (`RecordedRun.tokenizer`). Raises BadInput for a file that is none."""
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # it raises nothing narrower for a file that is none of its own
        raise BadInput(
            f"{path} is no tokenizer: {error}. Fix: copy tokenizer.json of the run's checkpoint there"
        ) from error


def as_json(rollout: Rollout) -> bytes:
    """Returns one line of JSON with the field names of `Rollout` and `engine.types`; arrays are lists."""
    return msgspec.json.encode(rollout, enc_hook=np.ndarray.tolist)


def with_tokens(recorded: RecordedGroup, tokens: GroupTokens, tokenizer: Tokenizer | None) -> Group:
    """Returns the group as it was put out; without a tokenizer its trajectories have no text."""
    group = recorded.group
    return replace(
        group,
        trajectories=tuple(
            _trajectory(group.prompt, member, parts, tokenizer)
            for member, parts in zip(group.trajectories, tokens.trajectories, strict=True)
        ),
    )


def _trajectory(
    prompt: Prompt, member: Trajectory, parts: Sequence[PartTokens], tokenizer: Tokenizer | None
) -> Trajectory:
    main, *others = parts
    return replace(
        member,
        prompt=prompt,
        text="" if tokenizer is None else _text(main, member, tokenizer),
        segments=tuple(
            replace(segment, **_arrays(part)) for segment, part in zip(member.segments, others, strict=True)
        ),
        **_arrays(main),
    )


def _arrays(part: PartTokens) -> dict[str, Any]:
    count = len(part.token_ids_T)
    return {
        "token_ids_T": part.token_ids_T,
        "sampled_T": part.sampled_T,
        "logprobs_T": np.full(count, np.nan, np.float32) if part.logprobs_T is None else part.logprobs_T,
        "versions_T": np.full(count, -1, np.int32) if part.versions_T is None else part.versions_T,
        "teacher": None if part.teacher_logprobs_T is None else TokenScores(logprobs_T=part.teacher_logprobs_T),
    }


def _text(main: PartTokens, member: Trajectory, tokenizer: Tokenizer) -> str:
    spans = (main.token_ids_T[turn.start : turn.end].tolist() for turn in member.turns)
    return "".join(tokenizer.decode(ids, skip_special_tokens=False) for ids in spans)
