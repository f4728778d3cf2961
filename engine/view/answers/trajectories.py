"""Groups and trajectories of a step in one form, from the recording or, where there is none, from rollouts/*.jsonl.

What only the recording has (times, RoC's choice, placement, log-probabilities) is None, or missing, in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from engine.diagnosis.token_kinds import AFTER_REPLY, HIGH_SHARE, mark
from engine.recording.records import Call, GroupRecord, SequenceTokens, TrajectoryRecord, TurnRecord
from engine.stages.write_rollouts import Rollout, path_of, read_rollouts
from engine.view.answers.tokens import pieces, tokenizer_of
from engine.view.run_files import RunFiles


class NotThere(ValueError):
    """What was asked for is not in the run's files. One line says what, and why."""


def groups_of(run: RunFiles, step: int) -> dict[str, Any]:
    """The groups of a step without texts and tokens. Raises NotThere, and ValueError for a damaged row."""
    if recorded := run.recorded.groups(step):
        start = min((member.started_at for group in recorded for member in group.trajectories), default=0.0)
        return {
            "step": step,
            "source": "recording",
            "started_at": start,
            "groups": [_recorded_group(group, start) for group in recorded],
        }
    if step in run.rollout_steps:
        return {"step": step, "source": "rollouts", "started_at": None, "groups": _written_groups(run.path, step)}
    raise NotThere(_missing(run, step))


def trajectory_of(run: RunFiles, step: int, group: int, sample: int) -> dict[str, Any]:
    """One trajectory with its texts, calls and tokens. Raises NotThere, and ValueError for a damaged row."""
    recorded = run.recorded.groups(step)
    if group < len(recorded):
        for number, member in enumerate(recorded[group].trajectories):
            if member.sample == sample:
                return _recorded_trajectory(run, recorded[group], number)
    elif not recorded and step in run.rollout_steps:
        written = _written(run.path, step)
        if group < len(written):
            for row in written[group]:
                if row.sample == sample:
                    return _written_trajectory(run, row, group)
    if not recorded and step not in run.rollout_steps:
        raise NotThere(_missing(run, step))
    raise NotThere(f"step {step} has no trajectory {sample} in a group {group}")


def _missing(run: RunFiles, step: int) -> str:
    kept = sorted({*run.recorded.steps, *run.rollout_steps})
    if not kept:
        return "this run has neither a recording (record/) nor rollouts (rollouts/*.jsonl)"
    return f"the trajectories of step {step} are not kept; those of {_listed(kept)} are"


def _listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", *shown[-4:]])


def _recorded_group(group: GroupRecord, start: float) -> dict[str, Any]:
    return {
        "group": group.group,
        "prompt_id": group.prompt_id,
        "question": group.messages[-1]["content"] if group.messages else "",
        "answer": group.answer,
        "source": group.source,
        "drop": group.drop,
        "waste": group.waste,
        "refills": group.refills,
        "node": group.node,
        "whole": group.whole,
        "trajectories": [_recorded_row(member, start) for member in group.trajectories],
    }


def _recorded_row(member: TrajectoryRecord, start: float) -> dict[str, Any]:
    turns = [turn for sequence in member.sequences for turn in sequence]
    return {
        "sample": member.sample,
        "reward": member.reward,
        "kept": member.kept,
        "advantage": member.advantage,
        "reasons": member.reasons,
        "stop": member.stop,
        "error": member.error,
        "tokens": member.sampled_tokens,
        "turns": [_bar(turn, start) for turn in turns],
    }


def _bar(turn: TurnRecord, start: float) -> dict[str, Any]:
    return {
        "tokens": turn.end - turn.start,
        "replica": turn.replica,
        "queued_s": _round(turn.queued_at - start),
        "started_s": _round(turn.started_at - start),
        "finished_s": _round(turn.finished_at - start),
        "calls": [
            [call.outcome, _round(call.dispatched_at - start), _round(call.finished_at - start)] for call in turn.calls
        ],
    }


def _round(seconds: float) -> float:
    return round(seconds, 5)


def _recorded_trajectory(run: RunFiles, group: GroupRecord, number: int) -> dict[str, Any]:
    member = group.trajectories[number]
    start = member.started_at
    held = run.recorded.tokens(group.step, group.group)
    tokens = held.trajectories[number] if held is not None else ()
    tokenizer = tokenizer_of(run)
    sequences = []
    for index, turns in enumerate(member.sequences):
        ids = tokens[index].token_ids if index < len(tokens) else None
        text = pieces(tokenizer, ids.tolist()) if ids is not None else None
        sequences.append(
            {
                "turns": [_recorded_turn(turn, start, text) for turn in turns],
                "tokens": _token_columns(tokens[index], text, turns) if index < len(tokens) else None,
            }
        )
    return {
        "source": "recording",
        "step": group.step,
        "group": group.group,
        "prompt_id": group.prompt_id,
        "messages": group.messages,
        "expected": group.answer,
        "drop": group.drop,
        "whole": group.whole,
        "started_at": start,
        "wall_s": member.finished_at - start,
        "seed": str(member.seed),  # a number of JavaScript has 53 bits
        **{
            name: getattr(member, name)
            for name in ("sample", "temperature", "stop", "error", "reward", "scores", "kept", "advantage")
        },
        **{name: getattr(member, name) for name in ("answer", "reasons", "prompt_tokens", "sampled_tokens")},
        "sequences": sequences,
    }


def _recorded_turn(turn: TurnRecord, start: float, text: list[str] | None) -> dict[str, Any]:
    return {
        "start": turn.start,
        "end": turn.end,
        "text": "".join(text[turn.start : turn.end]) if text is not None else None,
        "replica": turn.replica,
        "cached_tokens": turn.cached_tokens,
        "queued_s": turn.queued_at - start,
        "started_s": turn.started_at - start,
        "finished_s": turn.finished_at - start,
        "truncated": turn.truncated,
        "calls": [_recorded_call(call, start) for call in turn.calls],
        "placed": [
            {
                "at_s": placed.at - start,
                "replica": placed.replica,
                "rule": placed.rule,
                "headroom_blocks": placed.headroom_blocks,
                "stay_s": placed.stay_s,
                "go_s": placed.go_s,
                "free_blocks": {str(replica): free for replica, free in placed.free_blocks.items()},
            }
            for placed in turn.placed
        ],
    }


def _recorded_call(call: Call, start: float) -> dict[str, Any]:
    return {
        "name": call.name,
        "arguments": call.arguments,
        "outcome": call.outcome,
        "reply": call.reply,
        "closed_s": call.closed_at - start,
        "dispatched_s": call.dispatched_at - start,
        "finished_s": call.finished_at - start,
        "overlap_s": call.overlap_s,
        "executed": call.executed,
        "jailed": call.jailed,
    }


def _token_columns(tokens: SequenceTokens, text: list[str] | None, turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """Columns of T values, None where nothing was recorded. ratio: learner's to sampler's probability."""
    ratio = None
    if tokens.learner_logprobs is not None and tokens.logprobs is not None:
        ratio = np.exp(tokens.learner_logprobs - tokens.logprobs)
    return {
        "ids": tokens.token_ids.tolist(),
        "text": text,
        "sampled": tokens.sampled.astype(int).tolist(),
        "logprob": _values(tokens.logprobs),
        "learner_logprob": _values(tokens.learner_logprobs),
        "ratio": _values(ratio),
        "entropy": _values(tokens.entropy),
        "push": _values(tokens.push),
        "version": None if tokens.versions is None else tokens.versions.tolist(),
        **_uncertain(tokens, text, turns),
    }


def _uncertain(tokens: SequenceTokens, text: list[str] | None, turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """The forking and the reflection tokens among those of high entropy in this sequence, as 1 and 0; nothing where
    no entropy was recorded.
    """
    if tokens.entropy is None or text is None or not (known_T := tokens.sampled & ~np.isnan(tokens.entropy)).any():
        return {}
    marks = mark(text, [(turn.start, turn.end) for turn in turns])
    high_T = known_T & (tokens.entropy > np.quantile(tokens.entropy[known_T], 1 - HIGH_SHARE))
    reflection_T = high_T & (marks.after_reply_T > 0) & (marks.after_reply_T <= AFTER_REPLY)
    kinds = {"forking": high_T & marks.forking_T, "reflection": reflection_T}
    return {name: kind_T.astype(int).tolist() for name, kind_T in kinds.items()}


def _values(values_T: Any) -> list[float | None] | None:
    if values_T is None:
        return None
    return [None if value != value else round(value, 5) for value in values_T.tolist()]


@lru_cache(maxsize=4)
def _written(run: Path, step: int) -> list[list[Rollout]]:
    """The rows by group. A group's rows follow each other."""
    rows = read_rollouts(path_of(run, step))
    return [list(members) for _, members in groupby(rows, key=lambda row: row.prompt_id)]


def _written_groups(run: Path, step: int) -> list[dict[str, Any]]:
    return [
        {
            "group": number,
            "prompt_id": rows[0].prompt_id,
            "question": rows[0].question,
            "answer": rows[0].answer,
            "source": "",
            "drop": rows[0].drop,
            "waste": {},
            "refills": 0,
            "node": "",
            "whole": False,
            "trajectories": [
                {
                    "sample": row.sample,
                    "reward": row.reward,
                    "kept": row.kept,
                    "advantage": row.advantage,
                    "reasons": {},
                    "stop": row.stop,
                    "error": row.error,
                    "tokens": row.tokens,
                    "turns": [_written_bar(row, turn, span) for turn, span in enumerate(row.turns)],
                }
                for row in rows
            ],
        }
        for number, rows in enumerate(_written(run, step))
    ]


def _written_bar(row: Rollout, turn: int, span: tuple[int, int]) -> dict[str, Any]:
    return {
        "tokens": span[1] - span[0],
        "replica": None,
        "queued_s": None,
        "started_s": None,
        "finished_s": None,
        "calls": [[call.outcome, None, None] for call in row.calls if call.turn == turn],
    }


def _written_trajectory(run: RunFiles, row: Rollout, group: int) -> dict[str, Any]:
    ids = row.ids.tolist()
    text = pieces(tokenizer_of(run), ids)
    sampled = np.zeros(len(ids), int)
    for start, end in row.turns:
        sampled[start:end] = 1
    turns = [
        {
            "start": start,
            "end": end,
            "text": "".join(text[start:end]) if text is not None else None,
            "calls": [
                {"name": call.name, "arguments": call.arguments, "outcome": call.outcome, "reply": call.reply}
                for call in row.calls
                if call.turn == number
            ],
            "placed": [],
        }
        for number, (start, end) in enumerate(row.turns)
    ]
    columns = {"ids": ids, "text": text, "sampled": sampled.tolist()}
    return {
        "source": "rollouts",
        "step": row.step,
        "group": group,
        "prompt_id": row.prompt_id,
        "messages": [{"role": "user", "content": row.question}],
        "expected": row.answer,
        "drop": row.drop,
        "whole": False,
        "sample": row.sample,
        "stop": row.stop,
        "error": row.error,
        "reward": row.reward,
        "scores": row.scores,
        "kept": row.kept,
        "advantage": row.advantage,
        "reasons": {},
        "sampled_tokens": row.tokens,
        "text": row.text,
        "sequences": [{"turns": turns, "tokens": columns if ids else None}],
    }
