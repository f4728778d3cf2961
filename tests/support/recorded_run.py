"""A made-up run's recording, with one of everything that there can be."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np

from engine.recording import files
from engine.recording.records import (
    FORMAT,
    EngineSteps,
    GroupRow,
    GroupTokens,
    Index,
    PartTokens,
    RecordedGroup,
    Segment,
    StepRow,
)
from engine.telemetry.idle_clock import Interval
from engine.telemetry.timeline import InstantEvent, LagEvent, SpanEvent
from engine.types import NO_PROMPT, Group, Placement, Prompt, StopReason, ToolUse, Trajectory, Turn
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


def damaged(path: Path, how: str) -> None:
    """Damages a file: "cut" leaves its first half, "flipped" changes the byte in its middle."""
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def made_row(step: int, groups: list[RecordedGroup]) -> StepRow:
    rows = [
        GroupRow(
            prompt_id=recorded.group.prompt.id,
            source=recorded.group.prompt.source,
            drop=recorded.group.drop,
            rewards=tuple(member.reward for member in recorded.group.trajectories),
            sampled_tokens=tuple(20 * len(member.turns) for member in recorded.group.trajectories),
            kept=recorded.group.kept,
            refills=recorded.group.refills,
        )
        for recorded in groups
    ]
    start = START + STEP_S * step
    return StepRow(step=step, started_at=start, finished_at=start + STEP_S, groups=tuple(rows))


def made_group(step: int, number: int, samples: int, *, whole: bool = True) -> RecordedGroup:
    flat = number == 0
    prompt = Prompt(
        id=f"train-{step}-{number}",
        messages=({"role": "user", "content": f"What is {step} * {number}?"},),
        answer=str(step * number),
        source="arithmetic",
    )
    group = Group(
        prompt=prompt,
        trajectories=tuple(_trajectory(step, sample, flat=flat) for sample in range(samples)),
        lease=(step - 1) * 16 + number,
        kept=() if flat else tuple(range(samples)),
        advantages_K=None if flat else np.asarray([1.0 if sample % 2 == 0 else -1.0 for sample in range(samples)]),
        drop="flat" if flat else None,
        waste={"surplus": 12} if flat else {},
    )
    reasons = {"p_err": 0.5, "p_format": 0.0, "probability": 0.75}
    return RecordedGroup(step=step, number=number, group=group, reasons=(reasons,) * samples, node="", whole=whole)


def _trajectory(step: int, sample: int, *, flat: bool) -> Trajectory:
    """Two turns of 20 tokens after a prompt of 10, with a reply of 10 between, where a tool was called. Its tokens are
    elsewhere.
    """
    start = START + STEP_S * step + 0.01 * sample
    calls = _calls(start) if sample == 0 else ()
    spans = [(10, 30), (40, 60)] if calls else [(10, 30)]
    turns = tuple(
        Turn(
            start=begin,
            end=end,
            tool_uses=calls if number == 0 else (),
            replica=sample % 2,
            cached_tokens=0 if number == 0 else 30,
            queued_at=start + 0.5 * number,
            started_at=start + 0.5 * number + 0.01,
            finished_at=start + 0.5 * number + 0.21,
            placed=(
                Placement(
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
    no_ids = np.zeros(0, np.int32)
    return Trajectory(
        prompt=NO_PROMPT,
        sample=sample,
        seed=1000 * step + sample,
        temperature=1.0,
        token_ids_T=no_ids,
        sampled_T=np.zeros(0, np.bool_),
        logprobs_T=np.zeros(0, np.float32),
        versions_T=no_ids,
        turns=turns,
        text="",
        stop=StopReason.ANSWER,
        started_at=start,
        finished_at=turns[-1].finished_at,
        reward=0.0 if flat else float(sample % 2 == 0),
        scores={"length": 0.5},
    )


def _calls(start: float) -> tuple[ToolUse, ...]:
    return tuple(
        ToolUse(
            name="python",
            arguments='{"code": "print(6 * 7)"}',
            outcome=outcome,
            response=response,
            closed_at=start + 0.1 + 0.05 * number,
            dispatched_at=start + 0.1 + 0.05 * number,
            finished_at=start + 0.3 + 0.05 * number,
            overlap_s=0.11 - 0.05 * number,
            executed=True,
            jailed=True,
            queue_s=0.04,
        )
        for number, (outcome, response) in enumerate([("error", "NameError: x"), ("ok", "42\n")])
    )


def made_tokens(recorded: RecordedGroup) -> GroupTokens:
    group = recorded.group
    return GroupTokens(
        number=recorded.number,
        trajectories=tuple(
            (_tokens(member, group.advantage(index), whole=recorded.whole),)
            for index, member in enumerate(group.trajectories)
        ),
    )


def _tokens(member: Trajectory, advantage: float | None, *, whole: bool) -> PartTokens:
    rng = np.random.default_rng(member.seed)
    count = member.turns[-1].end
    token_ids_T = rng.integers(5, 200, count, dtype=np.int32)
    sampled_T = np.zeros(count, np.bool_)
    for turn in member.turns:
        sampled_T[turn.start : turn.end] = True
    if not whole:
        return PartTokens(token_ids_T=token_ids_T, sampled_T=sampled_T)
    logprobs_T = np.where(sampled_T, -rng.exponential(0.5, count), 0).astype(np.float32)
    versions_T = np.where(sampled_T, 1, -1).astype(np.int32)
    tokens = PartTokens(token_ids_T=token_ids_T, sampled_T=sampled_T, logprobs_T=logprobs_T, versions_T=versions_T)
    if advantage is None:
        return tokens
    learner_T = np.where(sampled_T, logprobs_T + rng.normal(0, 0.1, count), np.nan).astype(np.float32)
    clipped_T = np.abs(learner_T - logprobs_T) > 0.2
    logprob_gradient_T = np.where(clipped_T, 0, np.exp(learner_T - logprobs_T) * advantage)
    return msgspec.structs.replace(
        tokens,
        learner_logprobs_T=learner_T,
        learner_entropy_T=np.where(sampled_T, rng.exponential(0.5, count), np.nan).astype(np.float32),
        learner_logprob_gradient_T=np.where(sampled_T, logprob_gradient_T, np.nan).astype(np.float32),
        minibatch=0,
    )


def made_segment(step: int, samples: int = 4) -> Segment:
    """Two replicas that generate, wait for a tool, and rest while the learner has its turn."""
    start = START + STEP_S * step
    spans = [
        SpanEvent(
            track="trajectories",
            lane=sample,
            name="generate",
            start=start + 0.01 * sample + 0.01,  # as the first turn in `_trajectory`
            end=start + 0.01 * sample + 0.21,
            args={"replica": sample % 2, "key": step * 100 + sample},
        )
        for sample in range(samples)
    ]
    key = {"key": step * 100, "turn_end_ms": 110.0}
    spans += [
        SpanEvent(track="tool calls", lane=0, name="error", start=start + 0.1, end=start + 0.3, args=key),
        SpanEvent(track="reward", lane=0, name="train-1", start=start + 0.8, end=start + 0.85, args={"sample": 0}),
        SpanEvent(track="learner", lane=0, name=f"step {step}", start=start + 1.0, end=start + 1.6, args={"loss": 0.1}),
        SpanEvent(track="weights", lane=0, name=f"version {step}", start=start + 1.6, end=start + 1.8, args={}),
        SpanEvent(track="replicas", lane=0, name=f"load version {step}", start=start + 1.6, end=start + 1.7, args={}),
        SpanEvent(track="replicas", lane=0, name="canary", start=start + 1.7, end=start + 1.75, args={}),
    ]
    idle = [
        Interval(replica=replica, cause=cause, start=start + begin, end=start + end)
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
            InstantEvent(
                track="fleet", at=start, name="fresh", args={"key": 100, "replica": 0, "headroom_blocks": 120.5}
            ),
        ),
        idle=tuple(idle),
        engine_steps=tuple(_engine_steps(replica, start) for replica in range(2)),
        lags=tuple(LagEvent(at=start + 0.25 * tick, lag_s=0.001 * tick) for tick in range(8)),
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
