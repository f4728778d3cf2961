"""Recorded groups and trajectories as the engine has them: what is read of a run can be run on.

Of a trajectory with several token sequences only the main one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from engine.recording.records import Call, GroupRecord, GroupTokens, SequenceTokens, TrajectoryRecord, TurnRecord
from engine.types import Boundary, Group, Prompt, RolloutError, StopReason, ToolUse, Trajectory, Turn


def group_of(record: GroupRecord, tokens: GroupTokens, tokenizer: Tokenizer | None = None) -> Group:
    """The group as it was put out, its selection included."""
    prompt = prompt_of(record)
    members = tuple(
        trajectory_of(prompt, member, sequences, tokenizer)
        for member, sequences in zip(record.trajectories, tokens.trajectories, strict=True)
    )
    kept = tuple(number for number, member in enumerate(record.trajectories) if member.kept)
    advantages = [record.trajectories[number].advantage or 0.0 for number in kept]
    return Group(
        prompt=prompt,
        trajectories=members,
        lease=record.lease,
        kept=kept,
        advantages_K=np.asarray(advantages) if kept else None,
        drop=record.drop,
        waste=record.waste,
        refills=record.refills,
    )


def prompt_of(record: GroupRecord) -> Prompt:
    return Prompt(id=record.prompt_id, messages=record.messages, answer=record.answer, source=record.source)


def trajectory_of(
    prompt: Prompt, member: TrajectoryRecord, sequences: Sequence[SequenceTokens], tokenizer: Tokenizer | None
) -> Trajectory:
    """Of its sequences the main one."""
    main = sequences[0]
    assert main.logprobs is not None, "the group is whole"
    assert main.versions is not None, "the group is whole"
    return Trajectory(
        prompt=prompt,
        sample=member.sample,
        seed=member.seed,
        temperature=member.temperature,
        token_ids_T=main.token_ids,
        sampled_T=main.sampled,
        logprobs_T=main.logprobs,
        versions_T=main.versions,
        turns=tuple(map(_turn, member.sequences[0])),
        text="" if tokenizer is None else _text(main, member, tokenizer),
        stop=StopReason(member.stop),
        started_at=member.started_at,
        finished_at=member.finished_at,
        error=None if member.error is None else _error(*member.error),
        reward=member.reward,
        discarded_tokens=member.discarded_tokens,
        scores=member.scores,
        answer=member.answer,
    )


def _error(boundary: str, message: str) -> RolloutError:
    return RolloutError(boundary=Boundary(boundary), message=message)


def _text(main: SequenceTokens, member: TrajectoryRecord, tokenizer: Tokenizer) -> str:
    spans = (main.token_ids[turn.start : turn.end].tolist() for turn in member.sequences[0])
    return "".join(tokenizer.decode(ids, skip_special_tokens=False) for ids in spans)


def _turn(turn: TurnRecord) -> Turn:
    return Turn(
        start=turn.start,
        end=turn.end,
        tool_uses=tuple(map(_use, turn.calls)),
        replica=turn.replica,
        cached_tokens=turn.cached_tokens,
        queued_at=turn.queued_at,
        started_at=turn.started_at,
        finished_at=turn.finished_at,
        truncated=turn.truncated,
    )


def _use(call: Call) -> ToolUse:
    values = {name: getattr(call, name) for name in call.__struct_fields__}
    return ToolUse(response=values.pop("reply"), **values)
