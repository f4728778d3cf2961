"""What a recorded run is made of: steps with their groups, and segments of the timeline.

Invariants
- All times are seconds since 1970 (UTC), so that segments of several processes and machines share one axis, as far as
  their clocks agree.
- Steps are counted from 1, as in metrics.jsonl; groups and trajectories of a step from 0.
- An array holds one number per token of a sequence, T of them, the prompt included. NaN: there is none for this token.

Files, below `record/` of a run's folder (`engine.recording.files` says how they look as bytes)

    index.json                  Index: what is kept, and by which policy
    tokenizer.json              of the `tokenizers` package, for the token ids
    rows.log                    a StepRow for each step, also of those that are not kept whole; appended
    steps/step-000012.rec       a step that is kept whole: StepRow, GroupRecord of each group, GroupTokens of each
    timeline/step-000012.seg    the Segments of a step, each of some seconds; appended while it is under way
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.types import Bools, Floats, Ids

Doubles = NDArray[np.float64]

FORMAT = 1  # of all of these


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, as `engine.types.ToolUse`. reply: what the model read."""

    name: str
    arguments: str
    outcome: str
    reply: str
    closed_at: float
    dispatched_at: float
    finished_at: float
    overlap_s: float
    executed: bool
    jailed: bool


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the balancer about a turn: where it was to be generated, and by which rule.

    headroom_blocks: what the replica would have left. stay_s, go_s: estimated seconds to the trajectory's end where it
    was and where it went; 0 unless it was moved for speed. free_blocks: of each replica's KV cache at that time.
    """

    at: float
    replica: int
    rule: str
    headroom_blocks: float
    stay_s: float = 0.0
    go_s: float = 0.0
    free_blocks: dict[int, int] = {}


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A turn: the sampled span [start, end) of its sequence's tokens.

    cached_tokens: of its input, found in the replica's prefix cache. placed: the first decision, then moves.
    """

    start: int
    end: int
    replica: int
    cached_tokens: int
    queued_at: float
    started_at: float
    finished_at: float
    truncated: bool
    calls: tuple[Call, ...]
    placed: tuple[Placed, ...] = ()


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory without its tokens.

    stop: an `engine.types.StopReason`; error: (boundary, message) of a failure of ours. kept: it was trained, with
    `advantage`. reasons: what the selector says of its choice, of RoC `p_err`, `p_format`, and `probability`, with
    which a trajectory like it is kept; empty where the selector says nothing. sequences: the turns of each token
    sequence, the main one first (`GroupTokens` has their tokens in the same order).
    """

    sample: int
    seed: int
    temperature: float
    stop: str
    error: tuple[str, str] | None
    reward: float | None
    scores: dict[str, float | None]
    answer: str | None
    kept: bool
    advantage: float | None
    reasons: dict[str, float]
    prompt_tokens: int
    sampled_tokens: int
    total_tokens: int
    discarded_tokens: int
    started_at: float
    finished_at: float
    sequences: tuple[tuple[TurnRecord, ...], ...]


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A group of a step. group: its number there. drop: why nothing of it is trained ("flat", "error"), if so.

    answer, source: of the prompt. waste: sampled tokens that are in none of the trajectories, by reason. refills:
    prompts given up before this one. node: the machine that made it, "" where it is not known. whole: its tokens have
    the numbers of the sampler and, where they were trained, of the learner.
    """

    step: int
    group: int
    lease: int
    prompt_id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    source: str
    drop: str | None
    waste: dict[str, int]
    refills: int
    node: str
    whole: bool
    trajectories: tuple[TrajectoryRecord, ...]


class SequenceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one sequence, [T]. Only token_ids and sampled are there where the group is not whole.

    sampled: by the policy (not: given). logprobs: the sampler's, 0 where not sampled. versions: of the weights that
    sampled it, -1 where not sampled. learner_logprobs, entropy: the learner's, in its forward pass of the step, just
    before the update; their ratio is exp(learner_logprobs - logprobs). push: minus the derivative of the loss by the
    token's log-probability, times the minibatch's tokens: above 0 it is made likelier. These three are None where the
    trajectory was not trained, and NaN where a token was not sampled; a trained token whose advantage is not 0 and
    whose push is 0 was clipped.
    """

    token_ids: Ids
    sampled: Bools
    logprobs: Floats | None = None
    versions: Ids | None = None
    learner_logprobs: Floats | None = None
    entropy: Floats | None = None
    push: Floats | None = None


class GroupTokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens of a group: of each trajectory its sequences, the main one first."""

    group: int
    trajectories: tuple[tuple[SequenceTokens, ...], ...]


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


class Span(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Something that took time. track: one of `engine.telemetry.timeline.TRACKS`; spans of one lane of a track do not
    overlap. args: `key` is the trajectory's (within a process), others as the track has them.
    """

    track: str
    lane: int
    name: str
    start: float
    end: float
    args: dict[str, Any]


class Instant(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Something that happened."""

    track: str
    at: float
    name: str
    args: dict[str, Any]


class Idle(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A replica did nothing else from start to end: cause is "busy", or one of `engine.telemetry.idle_clock.CAUSES`."""

    replica: int
    cause: str
    start: float
    end: float


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


class Lag(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How late the event loop served a timer."""

    at: float
    lag_s: float


class Segment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was noted from start to end. step: the one that was under way when it was closed. node: the machine,
    "" is the one that leads the run. A span is in the segment in which it ended, so that it may have begun
    before its start.
    """

    step: int
    node: str
    start: float
    end: float
    spans: tuple[Span, ...] = ()
    instants: tuple[Instant, ...] = ()
    idle: tuple[Idle, ...] = ()
    engine_steps: tuple[EngineSteps, ...] = ()
    lags: tuple[Lag, ...] = ()


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


Record = StepRow | GroupRecord | GroupTokens | Segment


def encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record, enc_hook=_plain)


def decode(payload: bytes) -> Record:
    """Raises msgspec.DecodeError for a record of another version."""
    return _decoder.decode(payload)


def _plain(value: Any) -> Any:
    """Arrays are their bytes, little-endian; numpy's numbers (in a policy's own reasons) are numbers."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return float(value)


def _to_array(kind: Any, data: bytes) -> Any:
    """kind: one of the array types, NDArray[scalar]."""
    return np.frombuffer(data, kind.__args__[1].__args__[0])


_decoder = msgspec.msgpack.Decoder(Record, dec_hook=_to_array)
