"""The data that flows through the pipeline: prompts, turns, trajectories, groups, batches, weights.

Invariants
- A trajectory's token ids are append-only and never tokenised again: the learner trains on what the model saw.
- Every sampled token carries its log-probability and the weight version that sampled it.
- Nothing here refers to an engine: any replica can continue a trajectory from its ids.

Shape legend: T tokens of a trajectory, G trajectories of a group, B trajectories of a batch, N = sum of T over a batch,
K tokens that a teacher thinks likeliest at a position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWER = "answer"  # a turn ended without a tool call
    LENGTH = "length"  # the token budget of the trajectory was used up
    TURNS = "turns"  # the last allowed turn still asked for a tool
    DEADLINE = "deadline"  # the wall time of the trajectory was used up
    ERROR = "error"  # see Trajectory.error


class Boundary(StrEnum):
    """The boundary whose failure ended a trajectory; such a trajectory is never trained."""

    REPLICA = "replica"
    AGENT = "agent"
    SANDBOX = "sandbox"
    REWARD = "reward"
    ENDPOINT = "endpoint"  # a model server that is not one of our replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutError:
    """A failure that is not the model's, and the boundary at which it happened."""

    boundary: Boundary
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLimits:
    """Budgets of one prompt's trajectories, as in `engine.rollout.rollout.RolloutConfig`; None: the run's.

    >>> PromptLimits(max_tokens=2048, max_turns=4).max_calls_per_turn is None
    True
    """

    max_tokens: int | None = None
    max_response_tokens: int | None = None
    max_turns: int | None = None
    max_calls_per_turn: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_response_tokens", "max_turns", "max_calls_per_turn"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"limits.{name} must be a positive whole number or None, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem: chat messages for the model, a reference answer for the reward.

    id: decides the seeds of sampling and selection. A prompt that comes again, in another epoch, needs another id;
    otherwise it is rolled out with the same random numbers.
    tools: names of the tools that the model may call; None: all that the rollouts have. reward: the way it is graded,
    for a reward that has several. source: the data set under which metrics are reported; "": none are.
    metadata: further values that the reward needs, as JSON has them (no tuples, integers of 64 bits). limits: budgets
    that differ from the run's.

    >>> Prompt(id="train-7", messages=({"role": "user", "content": "What is 6 * 7?"},), answer="42").id
    'train-7'
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    answer: str
    tools: tuple[str, ...] | None = None
    reward: str = ""
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    limits: PromptLimits | None = None

    def __post_init__(self) -> None:  # Check early: the journal would take other types, but no resume could read them.
        is_sequence = isinstance(self.messages, Sequence) and not isinstance(self.messages, str)
        if not is_sequence or not all(isinstance(each, Mapping) for each in self.messages):
            raise ValueError(
                f"messages must be a tuple of messages such as {{'role': 'user', 'content': 'What is 6 * 7?'}}, got "
                f"{self.messages!r:.100}"
            )
        texts = [text for message in self.messages for part in message.items() for text in part]
        try:
            "".join([self.id, self.answer, *texts]).encode()
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"id, answer and all in messages must be text, got {self!r}: {error}") from error
        if self.tools is not None and not isinstance(self.tools, tuple):
            raise ValueError(f"tools must be a tuple of names or None, got {self.tools!r}")
        for name in self.tools or ():
            _check_text(name, "tools")
        _check_text(self.reward, "reward")
        _check_text(self.source, "source")
        if type(self.metadata) is not dict:
            raise ValueError(f"metadata must be a dict, got {self.metadata!r}")
        _check_json(self.metadata, "metadata")
        if self.limits is not None and not isinstance(self.limits, PromptLimits):
            raise ValueError(f"limits must be PromptLimits or None, got {self.limits!r}")


def _check_text(value: Any, name: str) -> None:
    """Raises ValueError unless the value is a plain str that UTF-8 can encode; half a surrogate pair cannot be."""
    if type(value) is not str:
        raise ValueError(f"{name} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text, got {value!r}: {error}") from error


def _check_json(value: Any, name: str) -> None:
    """Raises ValueError unless a journal gives the same value back. name: where the value stands, for the message."""
    kind = type(value)
    if value is None or kind in (bool, float) or (kind is int and -(2**63) <= value < 2**64):
        return
    if kind is str:
        _check_text(value, name)
    elif kind is list:
        for index, part in enumerate(value):
            _check_json(part, f"{name}[{index}]")
    elif kind is dict:
        for key, part in value.items():
            _check_text(key, f"a name in {name}")
            _check_json(part, f"{name}[{key!r}]")
    else:
        raise ValueError(f"{name} must be as JSON has it (dict, list, text, 64-bit number), got {value!r}")


NO_PROMPT = Prompt(id="", messages=(), answer="")  # stands in for a prompt that is stored beside its trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """One tool call of a turn and its reply. Times are those of `engine.clock`.

    arguments: as JSON text, which holds integers of any size; "{}" of a malformed call.
    outcome: a `sandbox.wire.Outcome`, or "malformed" for a call that could not be decoded.
    closed_at: when the token that closes the call was received; dispatched_at: when it left for the tool;
    overlap_s: how much of the tool's time passed while the turn was still being generated.
    executed: whether a tool ran; malformed calls and unknown tools are answered without one. jailed: whether it ran in
    isolation.
    queue_s: the part from dispatched_at to finished_at in which it did not run yet, such as the wait for a slot of the
    sandbox; None if the tool does not measure it.
    """

    name: str
    arguments: str
    outcome: str
    response: str
    closed_at: float
    dispatched_at: float
    finished_at: float
    overlap_s: float
    executed: bool
    jailed: bool
    queue_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether RoC counts the call as an error (p_err of rStar2-Agent): malformed, raised, timed out or killed."""
        return self.outcome != "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A decision of the balancer: the replica on which a turn is generated, and the rule that chose it.

    headroom_blocks: the blocks that the policy expects the replica to have left. stay_s, go_s: estimated seconds to the
    trajectory's end where it was and where it goes; 0 unless it was moved for speed. free_blocks: the last known free
    blocks of each replica's KV cache.
    """

    at: float
    replica: int
    rule: str
    headroom_blocks: float
    stay_s: float = 0.0
    go_s: float = 0.0
    free_blocks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One assistant turn: the sampled span [start, end) of the trajectory's tokens.

    A token of it that is not in sampled_T was decided by a grammar (`engine.replica.grammar_mass`), and is not trained.
    placed: the decision that placed it, followed by those that moved it.
    """

    start: int
    end: int
    tool_uses: tuple[ToolUse, ...]
    replica: int
    cached_tokens: int
    queued_at: float
    started_at: float
    finished_at: float
    truncated: bool = False
    placed: tuple[Placement, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """The log-probabilities that a model gives the tokens of a sequence, such as a teacher those of its student.

    logprobs_T: of each token that was scored; NaN of the others. top: K, how many of the model's own likeliest tokens
    are there for each position, 0 or more. top_ids, top_logprobs: these tokens, the likeliest first, as one row of
    T x K numbers, which `top_TK` unfolds; -1 and NaN where the token was not scored.
    """

    logprobs_T: Floats
    top: int = 0
    top_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    top_logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def __post_init__(self) -> None:
        if not len(self.top_ids) == len(self.top_logprobs) == self.top * len(self.logprobs_T):
            sizes = f"{len(self.top_ids)} ids and {len(self.top_logprobs)} log-probabilities"
            raise ValueError(f"top={self.top} of {len(self.logprobs_T)} tokens cannot have {sizes}")
        for array in (self.logprobs_T, self.top_ids, self.top_logprobs):
            array.setflags(write=False)

    @classmethod
    def none(cls, tokens: int, top: int) -> TokenScores:
        """Returns the scores of a sequence of which no token was scored."""
        return cls(
            logprobs_T=np.full(tokens, np.nan, np.float32),
            top=top,
            top_ids=np.full(tokens * top, -1, np.int32),
            top_logprobs=np.full(tokens * top, np.nan, np.float32),
        )

    @property
    def top_TK(self) -> tuple[Ids, Floats]:
        """The likeliest tokens and their log-probabilities, both [T, K]."""
        shape = len(self.logprobs_T), self.top
        return self.top_ids.reshape(shape), self.top_logprobs.reshape(shape)

    def placed(self, part: TokenScores, start: int) -> TokenScores:
        """Returns these scores with those of the tokens from `start` on replaced by `part`."""
        end = start + len(part.logprobs_T)
        logprobs_T, top_ids, top_logprobs = self.logprobs_T.copy(), self.top_ids.copy(), self.top_logprobs.copy()
        logprobs_T[start:end] = part.logprobs_T
        top_ids[start * self.top : end * self.top] = part.top_ids
        top_logprobs[start * self.top : end * self.top] = part.top_logprobs
        return TokenScores(logprobs_T=logprobs_T, top=self.top, top_ids=top_ids, top_logprobs=top_logprobs)


def _set_read_only(part: Trajectory | Segment) -> None:
    """Makes the arrays read-only, so that a reward or a stage that would change them in place raises."""
    for array_T in (part.token_ids_T, part.sampled_T, part.logprobs_T, part.versions_T):
        array_T.setflags(write=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A token sequence of a rollout beside its main one, and the turns that were sampled in it.

    A user's agent that edits, compacts or branches its history leaves several. Each is what the model saw. A token is
    marked as sampled in one of them only; in a branch, the tokens that it took over count as given. teacher: as in
    `Trajectory`.
    """

    token_ids_T: Ids
    sampled_T: Bools
    logprobs_T: Floats
    versions_T: Ids
    turns: tuple[Turn, ...] = ()
    teacher: TokenScores | None = None

    def __post_init__(self) -> None:
        _set_read_only(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One finished rollout of a prompt.

    token_ids_T starts with the rendered prompt; sampled_T is True where the policy sampled the token;
    logprobs_T is 0 and versions_T is -1 where it did not. text is the sampled text only: the assistant's turns one
    after another, without prompt and tool responses. reward is None until graded. discarded_tokens: tokens sampled
    before new weights made it begin again. segments: further token sequences, if an agent did not only append to its
    history. answer: the answer that a user's agent returned. scores: by name, the scores that make up the reward, and
    others that are only reported; None: it could not be computed. end_of_turn: the text of the token that ends a turn
    in the chat template; "" if it is not known. states: by the name of a world (`engine.ports.World`), its state when
    the trajectory ended; the journal keeps it for the reward, the record does not. teacher: what a teacher gives the
    tokens of its turns, if there is one.
    """

    prompt: Prompt
    sample: int
    seed: int
    temperature: float
    token_ids_T: Ids
    sampled_T: Bools
    logprobs_T: Floats
    versions_T: Ids
    turns: tuple[Turn, ...]
    text: str
    stop: StopReason
    started_at: float
    finished_at: float
    error: RolloutError | None = None
    reward: float | None = None
    discarded_tokens: int = 0
    scores: Mapping[str, float | None] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    answer: str | None = None
    end_of_turn: str = ""
    states: Mapping[str, bytes] = field(default_factory=dict)
    teacher: TokenScores | None = None

    def __post_init__(self) -> None:
        _set_read_only(self)

    @property
    def turn_texts(self) -> list[str]:
        """The text of each turn of the main sequence, without the token that ends it; at least one."""
        texts = self.text.split(self.end_of_turn) if self.end_of_turn else [self.text]
        return texts[:-1] if len(texts) > 1 and not texts[-1].strip() else texts

    @property
    def final_text(self) -> str:
        """The text that a reward grades: the agent's answer if there is one, else what the model wrote."""
        return self.text if self.answer is None else self.answer

    @property
    def parts(self) -> list[Trajectory | Segment]:
        """All token sequences, the main one first."""
        return [self, *self.segments]

    @property
    def tool_uses(self) -> list[ToolUse]:
        return [use for turn in self.all_turns for use in turn.tool_uses]

    @property
    def sampled_tokens(self) -> int:
        return sum(int(part.sampled_T.sum()) for part in self.parts)

    @property
    def forced_tokens(self) -> int:
        """How many tokens of turns a grammar decided about."""
        return sum(int((~part.sampled_T[turn.start : turn.end]).sum()) for part in self.parts for turn in part.turns)

    @property
    def all_turns(self) -> list[Turn]:
        return [turn for part in self.parts for turn in part.turns]

    @property
    def sampled_versions(self) -> Ids:
        """The weight version of each sampled token."""
        return np.concatenate([part.versions_T[part.sampled_T] for part in self.parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All trajectories of one prompt for one step, and after selection which of them are trained and how.

    lease is released once the group was trained or dropped. kept: indices into trajectories; advantages_K: one per
    kept trajectory. drop: why nothing of the group is trained ("flat", "error"); None if something is.
    waste: sampled tokens that are in none of the trajectories, by reason ("surplus": rollouts beyond those needed;
    "flat", "error": groups given up; "superseded": sampled anew; "forced": of the groups given up, the tokens that a
    grammar decided about). refills: prompts given up before this one.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    lease: int
    kept: tuple[int, ...] = ()
    advantages_K: NDArray[np.float64] | None = None
    drop: str | None = None
    waste: Mapping[str, int] = field(default_factory=dict)
    refills: int = 0

    @property
    def rewards_G(self) -> NDArray[np.float64]:
        """The rewards of the graded trajectories, float64; those that our infrastructure failed have none."""
        rewards = [trajectory.reward for trajectory in self.trajectories if trajectory.reward is not None]
        return np.asarray(rewards, dtype=np.float64)

    def advantage(self, index: int) -> float | None:
        """Returns a trajectory's advantage by its index; None if it is not trained, or got its own with the batch."""
        if self.advantages_K is None or index not in self.kept:
            return None
        return float(self.advantages_K[self.kept.index(index)])


class Row(NamedTuple):
    """Names a row of a batch: a token sequence of a trajectory. part: its index in `Trajectory.parts`."""

    prompt_id: str
    sample: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The trajectories of one optimizer step, as flat ragged arrays (no padding crosses a process boundary).

    lengths_B says how the N axis splits into token sequences; advantages_B is one number per sequence. A trajectory is
    one sequence, and one more for each of its segments, all with its advantage. rows names the B sequences; it is empty
    for a batch that was not made from trajectories.

    token_advantages_N is added to the advantage of the token's sequence; None: nothing is. teacher_ids_NK and
    teacher_logprobs_NK are a teacher's likeliest tokens at each position, for a loss that compares distributions.
    Numbers at tokens that were not sampled are not used.
    """

    step: int
    token_ids_N: Ids
    sampled_N: Bools
    logprobs_N: Floats
    versions_N: Ids
    lengths_B: Ids
    advantages_B: Floats
    token_advantages_N: Floats | None = None
    teacher_ids_NK: Ids | None = None
    teacher_logprobs_NK: Floats | None = None
    rows: tuple[Row, ...] = ()

    @classmethod
    def of(cls, step: int, trajectories: Sequence[Trajectory], advantages_B: Floats) -> Batch:
        """Concatenates trajectories in the given order; advantages_B has one number for each of them.

        A mean over tokens counts each sampled token of a rollout once, however many segments it has; a loss that is a
        mean over sequences counts each segment as one. Raises ValueError on a length mismatch.
        """
        if len(trajectories) != len(advantages_B):
            raise ValueError(f"{len(trajectories)} trajectories but {len(advantages_B)} advantages")
        parts = [part for trajectory in trajectories for part in trajectory.parts]
        advantages_B = np.repeat(advantages_B, [len(trajectory.parts) for trajectory in trajectories])

        def join(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
            return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)

        return cls(
            step=step,
            token_ids_N=join([t.token_ids_T for t in parts], np.int32),
            sampled_N=join([t.sampled_T for t in parts], np.bool_),
            logprobs_N=join([t.logprobs_T for t in parts], np.float32),
            versions_N=join([t.versions_T for t in parts], np.int32),
            lengths_B=np.asarray([len(t.token_ids_T) for t in parts], np.int32),
            advantages_B=np.asarray(advantages_B, np.float32),
            rows=tuple(
                Row(trajectory.prompt.id, trajectory.sample, part)
                for trajectory in trajectories
                for part in range(len(trajectory.parts))
            ),
        )

    @classmethod
    def of_arrays(cls, step: int, arrays: Mapping[str, Any]) -> Batch:
        """Returns the batch whose `arrays` these are; its rows have no names."""
        return cls(step=step, **arrays)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays by field name, for the wire, without those that are None."""
        names = [field.name for field in fields(self) if field.name not in ("step", "rows")]
        return {name: array for name in names if (array := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerNumbers:
    """What the learner computes for each token of a row in the forward pass that the row's update is made of.

    logprob_gradient_T: minus the derivative of the loss by the token's log-probability, times the minibatch's tokens:
    above 0 the token is made likelier. All are NaN where a token was not sampled. A trained token whose advantage is
    not 0 and whose gradient is 0 was clipped.

    minibatch: the number of the row's minibatch in the step: in 0 the weights are those before the step, later the
    policy has moved already. None if no token of the row was trained.
    """

    logprobs_T: Floats
    entropy_T: Floats
    logprob_gradient_T: Floats
    minibatch: int | None = None


UNCOMPARED = math.inf
"""Stands in the canary for the log-probability of a token that is not compared."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights that the learner has published, and its log-probabilities of the canary sequences under them.

    path: where they are: a file (shm) or an address (gloo, nccl). canary: UNCOMPARED for a token that rounding may send
    to another expert of a mixture. further: sequences that the learner added to the fixed ones and scored after them.
    """

    path: str
    version: int
    canary: Floats
    further: Sequence[Sequence[int]] = ()
