"""A made-up run's recording, with one of everything that there can be."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np

from engine.recording import files
from engine.recording.records import (
    FORMAT,
    Call,
    EngineSteps,
    GroupRecord,
    GroupRow,
    GroupTokens,
    Idle,
    Index,
    Instant,
    Lag,
    Placed,
    Segment,
    SequenceTokens,
    Span,
    StepRow,
    TrajectoryRecord,
    TurnRecord,
)
from tests.support.paths import ROOT

START = 1_790_000_000.0  # a time of the day
STEP_S = 2.0
TOKENIZER = ROOT / "recipes" / "tiny" / "agent" / "tokenizer.json"


def write_recorded_run(run: Path, *, steps: int = 3, groups: int = 4, samples: int = 4) -> None:
    """A run of so many steps in this folder, all whole. Of each step the first group is flat, the others are trained;
    the last one has no numbers of tokens. The first trajectory called Python, whose first call failed.
    """
    folder = files.folder_of(run)
    for name in ("steps", "timeline"):
        (folder / name).mkdir(parents=True)
    shutil.copy(TOKENIZER, files.tokenizer_path(folder))
    for step in range(1, steps + 1):
        write_step(folder, step, groups=groups, samples=samples)
        files.append_to(files.timeline_path(folder, step), made_segment(step, samples))
    total = sum(files.steps_in(folder).values()) + sum(files.timeline_in(folder).values())
    index = Index(
        format=FORMAT,
        newest=50,
        every=20,
        max_mb=1024,
        last=steps,
        whole=tuple(range(1, steps + 1)),
        total_bytes=total,
    )
    files.index_path(folder).write_bytes(msgspec.json.encode(index))


def write_step(folder: Path, step: int, *, groups: int = 4, samples: int = 4) -> None:
    """The file of a step, and its row."""
    made = [made_group(step, group, samples, whole=group < groups - 1) for group in range(groups)]
    tokens = [made_tokens(record) for record in made]
    row = made_row(step, made)
    files.write(files.step_path(folder, step), [files.packed(record) for record in (row, *made, *tokens)])
    files.append_to(files.rows_path(folder), row)


def made_row(step: int, groups: list[GroupRecord]) -> StepRow:
    rows = [
        GroupRow(
            prompt_id=group.prompt_id,
            source=group.source,
            drop=group.drop,
            rewards=tuple(member.reward for member in group.trajectories),
            sampled_tokens=tuple(member.sampled_tokens for member in group.trajectories),
            kept=tuple(number for number, member in enumerate(group.trajectories) if member.kept),
            refills=group.refills,
        )
        for group in groups
    ]
    start = START + STEP_S * step
    return StepRow(step=step, started_at=start, finished_at=start + STEP_S, groups=tuple(rows))


def made_group(step: int, group: int, samples: int, *, whole: bool = True) -> GroupRecord:
    flat = group == 0
    return GroupRecord(
        step=step,
        group=group,
        lease=(step - 1) * 16 + group,
        prompt_id=f"train-{step}-{group}",
        messages=({"role": "user", "content": f"What is {step} * {group}?"},),
        answer=str(step * group),
        source="arithmetic",
        drop="flat" if flat else None,
        waste={"surplus": 12} if flat else {},
        refills=0,
        node="",
        whole=whole,
        trajectories=tuple(_trajectory(step, sample, flat=flat) for sample in range(samples)),
    )


def _trajectory(step: int, sample: int, *, flat: bool) -> TrajectoryRecord:
    """Two turns of 20 tokens after a prompt of 10, with a reply of 10 between, where a tool was called."""
    start = START + STEP_S * step + 0.01 * sample
    calls = _calls(start) if sample == 0 else ()
    spans = [(10, 30), (40, 60)] if calls else [(10, 30)]
    turns = tuple(
        TurnRecord(
            start=begin,
            end=end,
            replica=sample % 2,
            cached_tokens=0 if number == 0 else 30,
            queued_at=start + 0.5 * number,
            started_at=start + 0.5 * number + 0.01,
            finished_at=start + 0.5 * number + 0.21,
            truncated=False,
            calls=calls if number == 0 else (),
            placed=(
                Placed(
                    at=start + 0.5 * number,
                    replica=sample % 2,
                    rule="fresh" if number == 0 else "home",
                    headroom_blocks=120.5,
                    free_blocks={0: 150, 1: 140},
                ),
            ),
        )
        for number, (begin, end) in enumerate(spans)
    )
    correct = sample % 2 == 0
    kept = not flat
    return TrajectoryRecord(
        sample=sample,
        seed=1000 * step + sample,
        temperature=1.0,
        stop="answer",
        error=None,
        reward=0.0 if flat else float(correct),
        scores={"length": 0.5},
        answer=None,
        kept=kept,
        advantage=(1.0 if correct else -1.0) if kept else None,
        reasons={"p_err": 0.5, "p_format": 0.0, "probability": 0.75},
        prompt_tokens=10,
        sampled_tokens=20 * len(spans),
        total_tokens=spans[-1][1],
        discarded_tokens=0,
        started_at=start,
        finished_at=turns[-1].finished_at,
        sequences=(turns,),
    )


def _calls(start: float) -> tuple[Call, ...]:
    return tuple(
        Call(
            name="python",
            arguments='{"code": "print(6 * 7)"}',
            outcome=outcome,
            reply=reply,
            closed_at=start + 0.1 + 0.05 * number,
            dispatched_at=start + 0.1 + 0.05 * number,
            finished_at=start + 0.3 + 0.05 * number,
            overlap_s=0.11 - 0.05 * number,
            executed=True,
            jailed=True,
        )
        for number, (outcome, reply) in enumerate([("error", "NameError: x"), ("ok", "42\n")])
    )


def made_tokens(group: GroupRecord) -> GroupTokens:
    return GroupTokens(
        group=group.group,
        trajectories=tuple(
            tuple(_tokens(member, turns, whole=group.whole) for turns in member.sequences)
            for member in group.trajectories
        ),
    )


def _tokens(member: TrajectoryRecord, turns: tuple[TurnRecord, ...], *, whole: bool) -> SequenceTokens:
    rng = np.random.default_rng(member.seed)
    count = turns[-1].end
    token_ids_T = rng.integers(5, 200, count, dtype=np.int32)
    sampled_T = np.zeros(count, np.bool_)
    for turn in turns:
        sampled_T[turn.start : turn.end] = True
    if not whole:
        return SequenceTokens(token_ids=token_ids_T, sampled=sampled_T)
    logprobs_T = np.where(sampled_T, -rng.exponential(0.5, count), 0).astype(np.float32)
    versions_T = np.where(sampled_T, 1, -1).astype(np.int32)
    tokens = SequenceTokens(token_ids=token_ids_T, sampled=sampled_T, logprobs=logprobs_T, versions=versions_T)
    if not member.kept:
        return tokens
    learner_T = np.where(sampled_T, logprobs_T + rng.normal(0, 0.1, count), np.nan).astype(np.float32)
    clipped_T = np.abs(learner_T - logprobs_T) > 0.2
    push_T = np.where(clipped_T, 0, np.exp(learner_T - logprobs_T) * (member.advantage or 0))
    return msgspec.structs.replace(
        tokens,
        learner_logprobs=learner_T,
        entropy=np.where(sampled_T, rng.exponential(0.5, count), np.nan).astype(np.float32),
        push=np.where(sampled_T, push_T, np.nan).astype(np.float32),
    )


def made_segment(step: int, samples: int = 4) -> Segment:
    """Two replicas that generate, wait for a tool, and rest while the learner has its turn."""
    start = START + STEP_S * step
    spans = [
        Span(
            track="trajectories",
            lane=sample,
            name="generate",
            start=start + 0.01 * sample,
            end=start + 0.01 * sample + 0.2,
            args={"replica": sample % 2, "key": step * 100 + sample},
        )
        for sample in range(samples)
    ]
    key = {"key": step * 100, "turn_end_ms": 110.0}
    spans += [
        Span(track="tool calls", lane=0, name="error", start=start + 0.1, end=start + 0.3, args=key),
        Span(track="reward", lane=0, name="train-1", start=start + 0.8, end=start + 0.85, args={"sample": 0}),
        Span(track="learner", lane=0, name=f"step {step}", start=start + 1.0, end=start + 1.6, args={"loss": 0.1}),
        Span(track="weights", lane=0, name=f"version {step}", start=start + 1.6, end=start + 1.8, args={}),
        Span(track="replicas", lane=0, name=f"load version {step}", start=start + 1.6, end=start + 1.7, args={}),
        Span(track="replicas", lane=0, name="canary", start=start + 1.7, end=start + 1.75, args={}),
    ]
    idle = [
        Idle(replica=replica, cause=cause, start=start + begin, end=start + end)
        for replica in range(2)
        for cause, begin, end in [
            ("busy", 0.0, 0.3),
            ("tool_wait", 0.3, 0.5),
            ("busy", 0.5, 0.8),
            ("reward", 0.8, 1.0),
            ("staleness_gate", 1.0, 1.6),
            ("weight_sync", 1.6, 1.8),
            ("host", 1.8, 2.0),
        ]
    ]
    return Segment(
        step=step,
        node="",
        start=start,
        end=start + STEP_S,
        spans=tuple(spans),
        instants=(
            Instant(track="fleet", at=start, name="fresh", args={"key": 100, "replica": 0, "headroom_blocks": 120.5}),
        ),
        idle=tuple(idle),
        engine_steps=tuple(_engine_steps(replica, start) for replica in range(2)),
        lags=tuple(Lag(at=start + 0.25 * tick, lag_s=0.001 * tick) for tick in range(8)),
    )


def _engine_steps(replica: int, start: float) -> EngineSteps:
    at = start + np.arange(0.05, 0.8, 0.05)
    used = np.linspace(2, 60, len(at)).astype(np.int32)
    ones = np.ones(len(at), np.int32)
    return EngineSteps(
        replica=replica,
        at=at,
        used_blocks=used,
        running=2 * ones,
        waiting=0 * ones,
        preempted=0 * ones,
        prefilled=10 * ones,
        steps=5 * ones,
    )
