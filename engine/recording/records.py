"""What a recorded run is made of: steps with their groups, and segments of the timeline.

Invariants
- Groups are `engine.types.Group`, and events those of `engine.telemetry.timeline`: nothing has a second spelling here.
- Times are those of `engine.clock`, so that segments of several processes and machines share one axis.
- Steps are counted from 1, as in metrics.jsonl; groups and trajectories of a step from 0.
- An array holds one number per token of a sequence, T of them, the prompt included. NaN: there is none for this token.

Files, below `record/` of a run's folder (`engine.recording.files` says how they look as bytes)

    index.json                  Index: what is kept, and by which policy
    tokenizer.json              of the `tokenizers` package, for the token ids
    rows.log                    a StepRow for each step, also of those that are not kept whole; appended
    steps/step-000012.rec       a step that is kept whole: StepRow, RecordedGroup of each group, GroupTokens of each
    timeline/step-000012.seg    the Segments of a step, each of some seconds; appended while it is under way
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.encoding import decoder
from engine.telemetry.idle_clock import Interval
from engine.telemetry.timeline import InstantEvent, LagEvent, SpanEvent
from engine.types import Bools, Floats, Group, Ids

Doubles = NDArray[np.float64]

FORMAT = 2  # the version of all these types


class RecordedGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group of a step without its tokens, so that a reader gets the groups of a step at once. number: its place
    there.

    group: as it was put out, but its trajectories have neither prompt (it is the group's) nor tokens nor text
    (`engine.recording.rollouts.with_tokens` restores them), and no states of worlds. reasons: what the selector says of
    its choice, for each trajectory; of RoC `p_err`, `p_format`, and `probability`, with which a trajectory like it is
    kept; empty where the selector says nothing. node: the machine that made the group, "" for the one that leads the
    run. whole: its tokens have the numbers of the sampler and, where they were trained, of the learner.
    """

    step: int
    number: int
    group: Group
    reasons: tuple[dict[str, float], ...]
    node: str
    whole: bool


class PartTokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tokens of one sequence of a trajectory, [T]: the arrays of `engine.types.Trajectory`, and the learner's
    numbers (`engine.types.LearnerNumbers`).

    Only token_ids_T and sampled_T are there where the group is not whole; the learner's are None where the trajectory
    was not trained. teacher_logprobs_T: the teacher's, if there was one (`engine.types.TokenScores`).
    """

    token_ids_T: Ids
    sampled_T: Bools
    logprobs_T: Floats | None = None
    versions_T: Ids | None = None
    learner_logprobs_T: Floats | None = None
    learner_entropy_T: Floats | None = None
    learner_logprob_gradient_T: Floats | None = None
    minibatch: int | None = None
    teacher_logprobs_T: Floats | None = None


class GroupTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens of a group by its number in the step: for each trajectory those of its `parts`."""

    number: int
    trajectories: tuple[tuple[PartTokens, ...], ...]


class GroupRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What remains of every group. rewards: None of what failed; kept: numbers of those that were trained."""

    prompt_id: str
    source: str
    drop: str | None
    rewards: tuple[float | None, ...]
    sampled_tokens: tuple[int, ...]
    kept: tuple[int, ...]
    refills: int


class StepRow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What remains of every step. started_at: its first trajectory began; finished_at: its weights were live.

    A step that was trained again after a crash has several; the last one counts.
    """

    step: int
    started_at: float
    finished_at: float
    groups: tuple[GroupRow, ...]


class EngineSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The engine steps of one replica, thinned: one row for all that ended within some time (`BUCKET_S`), n of them.

    at: of the last one. used_blocks, running, waiting: the largest. preempted, prefilled, steps: their sums.
    """

    replica: int
    at: Doubles
    used_blocks: Ids
    running: Ids
    waiting: Ids
    preempted: Ids
    prefilled: Ids
    steps: Ids


class Segment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was noted from start to end. step: the one that was under way when it was closed. node: the machine,
    "" for the one that leads the run. A span is in the segment in which it ended, so it may have begun before its
    start.
    """

    step: int
    node: str
    start: float
    end: float
    spans: tuple[SpanEvent, ...] = ()
    instants: tuple[InstantEvent, ...] = ()
    idle: tuple[Interval, ...] = ()
    engine_steps: tuple[EngineSteps, ...] = ()
    lags: tuple[LagEvent, ...] = ()


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """What of a run is kept, and why. whole: the steps whose file is there. newest, every, max_mb: of the policy
    (`engine.recording.policy`). last: the newest step. total_bytes: of all steps and segments that are there.
    problems: what could not be recorded, and why.
    """

    format: int
    newest: int
    every: int
    max_mb: int
    last: int
    whole: tuple[int, ...]
    total_bytes: int
    problems: tuple[str, ...] = ()


Record = StepRow | RecordedGroup | GroupTokens | Segment

_decoder: msgspec.msgpack.Decoder[Record] = decoder(Record)


def decode(payload: bytes) -> Record:
    """Raises msgspec.DecodeError for a record of another version."""
    return _decoder.decode(payload)
