"""Multi-turn rollouts: tokens stream in, and a tool call is dispatched the moment its closing tag is there.

Invariants
- The token buffer of a trajectory is append-only; every sampled token has a log-probability and a weight version.
- A tool call is dispatched in the loop tick that delivered its closing tag, while the turn goes on; its result is
  awaited only when the turn has ended. Each call gets exactly one response; a malformed one is told why. A call that
  the trajectory's end cuts off is recorded as killed. The only exception is `surplus_calls="drop"`.
- A failure of ours (replica, sandbox) makes a typed error, never a response to the model and never a reward.
- Every trajectory ends: token, turn, call and wall-time budgets are checked here. A wait for a place on a replica does
  not count as wall time; it ends with a place or with the fleet.
- A trajectory whose turn is superseded by new weights begins again from its prompt, with fresh tools; its tokens so far
  are counted as discarded.
- A trajectory that a journal holds continues after its last recorded turn. The calls of a stateful tool are run again
  to rebuild its state; if one then answers differently, the trajectory begins again.
- A stateful tool is opened once for each trajectory and closed with it, however it ends; a trajectory that moves to
  another replica keeps it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from engine import user_parts as parts
from engine.errors import first_error
from engine.fleet.fleet import Fleet, Superseded
from engine.ports import StatefulTool, Tool, World
from engine.replica.port import ReplicaDied, Sampling
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.deadline import TrajectoryDeadline
from engine.rollout.open_tools import OfferedTool, OpenTools, WorldTool, offered
from engine.rollout.token_buffer import TokenBuffer
from engine.rollout.tool_call_parser import CLOSE, MalformedCall, ToolCall
from engine.rollout.turn import PendingToolCall, ToolLost, TurnInProgress
from engine.run.journal import Journal, Log
from engine.run.journal_records import Piece, join_pieces
from engine.telemetry.in_flight import Watched, unwatched
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import schema
from engine.types import Boundary, Prompt, RolloutError, StopReason, ToolUse, Trajectory, Turn
from sandbox.require import at_least, none_or, one_of, positive, require, require_fields, within

SurplusCalls = Literal["refuse", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Budgets of one trajectory."""

    max_tokens: int = 256
    """Prompt, sampled and tool tokens together."""
    max_response_tokens: int | None = None
    """Sampled and tool tokens together, as papers count a response. None: what the prompt leaves of `max_tokens`."""
    max_turns: int = 4
    max_calls_per_turn: int | None = 8
    """None: as many as the model writes."""
    surplus_calls: SurplusCalls = "refuse"
    """What happens to calls beyond `max_calls_per_turn`, none of which is run. "refuse": each is answered with an
    error. "drop": they are ignored, both in what the model reads and in what is counted.
    """
    temperature: float = 1.0
    """Other values are for evaluations: what they sample cannot be trained (`algo.group.batch.make_batch`)."""
    top_p: float = 1.0
    """Other values are for evaluations and for serving."""
    deadline_s: float = 120.0
    """Seconds that a trajectory may take, not counting its waits for a place on a replica."""

    def __post_init__(self) -> None:
        require_fields(self, positive, "max_tokens", "max_turns", "deadline_s")
        require_fields(self, none_or(positive), "max_response_tokens", "max_calls_per_turn")
        require("surplus_calls", self.surplus_calls, one_of(*get_args(SurplusCalls)))
        require("temperature", self.temperature, at_least(0))
        require("top_p", self.top_p, within("(0, 1]"))

    def limited_for(self, prompt: Prompt) -> RolloutConfig:
        """Returns this configuration with the limits of the prompt.

        Raises ValueError if they allow more tokens than the run has room for.

        >>> from engine.types import PromptLimits
        >>> prompt = Prompt(id="p", messages=(), answer="", limits=PromptLimits(max_turns=2))
        >>> RolloutConfig(max_tokens=100).limited_for(prompt).max_turns
        2
        """
        if prompt.limits is None:
            return self
        given = {field.name: getattr(prompt.limits, field.name) for field in fields(prompt.limits)}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("max_tokens", 0) > self.max_tokens:
            room = f"must be at most the run's {self.max_tokens}"
            raise ValueError(f"prompt {prompt.id}: limits.max_tokens {room}, got {given['max_tokens']}")
        return replace(self, **given)

    def longest(self, prompt_tokens: int) -> int:
        """Returns how many tokens a trajectory with this prompt may have in all.

        >>> RolloutConfig(max_tokens=100, max_response_tokens=60).longest(30)
        90
        """
        if self.max_response_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, prompt_tokens + self.max_response_tokens)


def derive_seed(run_seed: int, prompt_id: str, sample: int | str, turn: int) -> int:
    """Returns the 63-bit seed of one turn: blake2b of (run seed, prompt, sample, turn)."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{sample}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class Tally:
    """Counts the tokens that a rollout has sampled so far, whatever becomes of it. watched: is told what it does.

    turn_ended: is called as soon as a turn is whole, before its tools have answered, with the ids so far and the turn's
    start. The rollout may still begin again.
    """

    tokens: int = 0
    watched: Watched = field(default_factory=unwatched)
    turn_ended: Callable[[Sequence[int], int], None] = lambda ids, start: None


@dataclass(slots=True)
class _Counts:
    """Counts the tokens sampled by all Rollouts that derive from one."""

    tokens: int = 0


class Rollouts:
    """Rolls prompts out on a fleet with tools; one instance serves any number of concurrent trajectories.

    The chat template shows the model the tools if it can, unless the chat's configuration says otherwise. A prompt that
    names tools is offered only those.
    """

    def __init__(
        self,
        config: RolloutConfig,
        chat: ChatTemplate,
        fleet: Fleet,
        tools: Sequence[Tool | StatefulTool | World | Callable[..., Any]],
        timeline: Timeline,
        seed: int,
    ) -> None:
        """tools: a plain function becomes a FunctionTool, and a world gives all of its tools.

        Raises BadInput for two tools of one name, TemplateError if the template is unusable with the tools.
        """
        self._given, self._tools = tools, offered(tools)
        self.config = config
        self.seed = seed
        self.call_closing_tokens = chat.tokens_completing(CLOSE)
        self._chat = chat
        self._fleet = fleet
        self._timeline = timeline
        self._counts = _Counts()
        self._offers: dict[tuple[str, ...] | None, _Offer] = {}
        self.chat = self._offer(None).chat

    @property
    def tokens_sampled(self) -> int:
        """Tokens sampled so far, including those of Rollouts that `with_config` made from this one."""
        return self._counts.tokens

    def with_config(self, config: RolloutConfig) -> Rollouts:
        """Returns a copy with other budgets or another temperature, for an evaluation, say. Both can be used at once.

        The replicas' `max_model_len` and the balancer's `max_tokens` must allow the larger of the two budgets.
        """
        other = copy.copy(self)
        other.config = config
        return other

    def on(self, fleet: Fleet, timeline: Timeline) -> Rollouts:
        """Returns a copy for another fleet, which nobody else may use."""
        return Rollouts(self.config, self._chat, fleet, self._given, timeline, self.seed)

    def _offer(self, names: tuple[str, ...] | None, prompt_id: str = "") -> _Offer:
        """Returns what a prompt that names these tools is offered. Raises ValueError for an unknown tool."""
        if names not in self._offers:
            known = {tool.name: tool for tool in self._tools}
            unknown = [name for name in names or () if name not in known]
            if unknown:
                raise ValueError(f"prompt {prompt_id}: no tool {unknown[0]!r}. Fix: name one of {', '.join(known)}")
            tools = self._tools if names is None else [known[name] for name in dict.fromkeys(names)]
            shown = self._chat.with_tools(
                [schema(tool.spec if isinstance(tool, WorldTool) else tool) for tool in tools]
            )
            self._offers[names] = _Offer(tools=tools, chat=shown)
        return self._offers[names]

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """Returns one trajectory of a prompt. Never raises for what the model, a tool's code or a replica did.

        tally: counts its sampled tokens; the only trace of them if it is cancelled. log: the journal of the trajectory,
        which continues after the turns recorded there and records its own.
        """
        started_at = self._timeline.now()
        tally = tally or Tally()
        log = log or _NO_JOURNAL.log(0, 0, sample)
        deadline = TrajectoryDeadline(self.config.deadline_s)
        while True:
            rollout = _Rollout(self, prompt, sample, group, self._fleet.new_key(), tally, log)
            async with AsyncExitStack() as opened:
                try:
                    return await rollout.run(opened, deadline, started_at)
                except Superseded:
                    log.begin(log.discarded + sum(turn.end - turn.start for turn in rollout.turns), tally.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """The tools that a model may call, and the chat that shows them."""

    tools: Sequence[OfferedTool]
    chat: ChatTemplate


class _Rollout:
    """One attempt at a trajectory."""

    def __init__(
        self, owner: Rollouts, prompt: Prompt, sample: int, group: int, key: int, tally: Tally, log: Log
    ) -> None:
        self.owner = owner
        self.prompt = prompt
        self.sample = sample
        self.group = group
        self.key = key
        self.tally = tally
        self.log = log
        self.config = owner.config.limited_for(prompt)
        self.fleet = owner._fleet
        self.offer = owner._offer(prompt.tools, prompt.id)
        self.chat = self.offer.chat
        self.timeline = owner._timeline
        self.buffer = TokenBuffer(self.chat.prompt_ids(prompt.messages))
        self.prompt_tokens = len(self.buffer)
        self.longest = self.config.longest(self.prompt_tokens)
        self.turns: list[Turn] = []
        self.text: list[str] = []
        self.tools = OpenTools()
        if log.pieces:
            so_far = join_pieces(log.pieces)
            self.buffer = TokenBuffer.of(
                so_far.token_ids_T, so_far.sampled_T, so_far.logprobs_T, so_far.versions_T, so_far.routes
            )
            self.turns = [*so_far.turns]
            self.text = [so_far.text]

    async def run(self, opened: AsyncExitStack, deadline: TrajectoryDeadline, started_at: float) -> Trajectory:
        """Returns the trajectory. Raises Superseded if it has to begin again."""
        self.paused = lambda: self.tally.watched.waits_for_place(deadline.paused())
        lane = self.timeline.lanes["trajectories"].take()
        error, stop, ready = None, None, False
        try:
            async with deadline.timeout() as budget:
                await self.tools.open(self.offer.tools, self.prompt, opened)
                await self._rebuild()
                ready = True
                stop = await self._turns(lane)
        except TimeoutError:
            if not budget.expired():
                raise  # a bug of a tool, not our deadline
            stop = StopReason.DEADLINE
            if not ready and any(isinstance(tool, WorldTool) for tool in self.offer.tools):
                # The reward reads states, which are not there yet, or not yet rebuilt after a resume.
                message = "the deadline came before the world was open and had its state again"
                stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.SANDBOX, message=message)
        except ReplicaDied as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(failure))
        except ToolLost as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.SANDBOX, message=str(failure))
        finally:
            self.fleet.trajectory_ended(self.key, len(self.buffer), finished=stop in _ENDED_BY_ITSELF)
            self.timeline.lanes["trajectories"].give(lane)
        return Trajectory(
            prompt=self.prompt,
            sample=self.sample,
            seed=derive_seed(self.owner.seed, self.prompt.id, self.sample, 0),
            temperature=self.config.temperature,
            **self.buffer.arrays(),
            turns=tuple(self.turns),
            text="".join(self.text),
            stop=stop,
            started_at=min([started_at, *(turn.queued_at for turn in self.turns)]),  # turns may be of the journal
            finished_at=self.timeline.now(),
            error=error,
            discarded_tokens=self.log.discarded,
            end_of_turn=self.chat.end_of_turn_text,
            states=self.tools.states(),
            routes=self.buffer.routes,
        )

    async def _rebuild(self) -> None:
        """Runs the recorded calls of stateful tools again, to rebuild their state.

        Raises Superseded if a call answers differently, or if the weights no longer let the recorded turns continue.
        """
        if self.turns and self.fleet.config.on_update == "restart" and self.buffer.version != self.fleet.version:
            raise Superseded(f"trajectory {self.key} began under version {self.buffer.version}")
        stateful = {tool.name for tool in self.offer.tools if not callable(tool)}
        for use in [use for turn in self.turns for use in turn.tool_uses if use.executed and use.name in stateful]:
            reply = await parts.call("tool", self.tools.by_name[use.name], json.loads(use.arguments))
            if (reply.outcome, reply.text) != (use.outcome, use.response):
                raise Superseded(f"trajectory {self.key}: a call that was run again now answers {reply.text!r}")

    async def _turns(self, lane: int) -> StopReason:
        while (stop := self._stop_or_respond()) is None:
            await self._turn(lane)
            if self.log.on:
                whole = Piece(
                    **self.buffer.arrays(),
                    turns=tuple(self.turns),
                    text="".join(self.text),
                    routes=self.buffer.routes,
                )
                self.log.grow(whole, self.tally.tokens)
        return stop

    def _stop_or_respond(self) -> StopReason | None:
        """Returns why the trajectory ends after its turns so far, or else appends the tools' responses to it."""
        if not self.turns:
            return StopReason.LENGTH if len(self.buffer) >= self.longest else None
        turn = self.turns[-1]
        if turn.truncated:
            return StopReason.LENGTH
        if not turn.tool_uses:
            return StopReason.ANSWER
        if len(self.turns) == self.config.max_turns:
            return StopReason.TURNS
        given = self.chat.tool_ids([use.response for use in turn.tool_uses])
        if self.buffer.ids[-1] != self.chat.end_of_turn:  # the model has other end tokens too (generation_config.json)
            given = [self.chat.end_of_turn, *given]
        if len(self.buffer) + len(given) >= self.longest:
            return StopReason.LENGTH
        self.buffer.append_given(given)
        return None

    async def _turn(self, lane: int) -> None:
        """Generates one turn. Each of its calls runs in a task, which ends before this returns.

        A turn that is cut short (deadline, failure) is recorded with the tokens and calls that it has.
        """
        start = len(self.buffer)
        self.tally.watched.begins_turn(len(self.turns) + 1)
        turn = TurnInProgress(start=start, read=start, queued_at=self.timeline.now(), stream=self.chat.stream())
        try:
            async with asyncio.TaskGroup() as tools:
                await self._generate(turn, tools)
                self.tally.turn_ended(self.buffer.ids, turn.start)
                if turn.calls:
                    self.tally.watched.moves("tool call")
                    self.fleet.turn_finished(self.key, len(self.buffer))
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        finally:
            if len(self.buffer) > turn.start:
                self.turns.append(self._close(turn, lane))

    async def _generate(self, turn: TurnInProgress, tools: asyncio.TaskGroup) -> None:
        """Streams the turn's tokens into the buffer; each call is dispatched as it closes.

        Only a token that can complete the closing tag can complete a call, so nothing is decoded before one comes.
        """
        buffer = self.buffer
        start = turn.start
        closing = self.owner.call_closing_tokens
        sampling = Sampling(
            max_tokens=self.longest - start,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            seed=derive_seed(self.owner.seed, self.prompt.id, self.sample, len(self.turns)),
            stop_token_ids=(self.chat.end_of_turn,),
            deliver_at=closing,
            version=self.fleet.version,  # which a trajectory that stays with another one does not take
            routes_from=buffer.routed,
        )
        stream = self.fleet.turn(
            self.key, self.group, buffer.ids, sampling, self.prompt_tokens, self.paused, turn.placed
        )
        async with aclosing(stream) as deltas:
            async for turn.replica, delta in deltas:
                if len(buffer.ids) == start:
                    turn.started_at = self.timeline.now() if delta.began is None else delta.began
                    turn.cached_tokens = delta.cached_tokens
                buffer.append_sampled(delta)
                self.owner._counts.tokens += len(delta.token_ids)
                self.tally.watched.samples(len(delta.token_ids), turn.replica)
                if not closing.isdisjoint(delta.token_ids):
                    # Read up to that token only: an incomplete character after it would hold its text back.
                    after = next(at for at, token in enumerate(reversed(delta.token_ids)) if token in closing)
                    self._read(turn, tools, len(buffer) - after)
        for version, begin, end in delta.spans:
            buffer.label(version, start + begin, start + end)
        turn.finish = delta.finish
        turn.finished_at = self.timeline.now()
        if turn.finish == "stop":
            turn.text = self.chat.decode(buffer.ids[start:])
            for call in (*turn.parser.feed(turn.text[turn.read_chars :]), *turn.parser.finish()):
                self._dispatch(call, turn, tools)

    def _read(self, turn: TurnInProgress, tools: asyncio.TaskGroup, end: int) -> None:
        """Lets the parser read the tokens up to `end`, and dispatches the calls that they complete."""
        text = turn.stream.step(self.buffer.ids[turn.read : end])
        turn.read = end
        turn.read_chars += len(text)
        for call in turn.parser.feed(text):
            self._dispatch(call, turn, tools)

    def _close(self, turn: TurnInProgress, lane: int) -> Turn:
        now = self.timeline.now()
        end = len(self.buffer)
        finished_at = now if turn.finished_at is None else turn.finished_at
        self.tally.tokens += end - turn.start
        self.text.append(turn.text or self.chat.decode(self.buffer.ids[turn.start :]))
        self.timeline.span(
            "trajectories", "generate", turn.started_at, finished_at, lane, replica=turn.replica, key=self.key
        )
        if turn.calls:
            self.timeline.span("trajectories", "tools", finished_at, now, lane, calls=len(turn.calls))
        return Turn(
            start=turn.start,
            end=end,
            tool_uses=tuple(self._record(call, finished_at) for call in turn.calls),
            replica=turn.replica,
            cached_tokens=turn.cached_tokens,
            queued_at=turn.queued_at,
            started_at=turn.started_at,
            finished_at=finished_at,
            truncated=turn.finish != "stop",
            placed=tuple(turn.placed),
        )

    def _record(self, call: PendingToolCall, turn_finished_at: float) -> ToolUse:
        """Returns the record of a call. Adds its span to the timeline if it was run."""
        use = call.use(turn_finished_at)
        self.timeline.in_flight.calls[use.name if use.executed else "", use.outcome] += 1
        if call.lane is not None:
            after_ms = round((turn_finished_at - call.dispatched_at) * 1e3, 3)
            queued = {} if use.queue_s is None else {"queue_ms": round(use.queue_s * 1e3, 3)}
            self.timeline.span(
                "tool calls",
                use.outcome,
                call.dispatched_at,
                call.finished_at,
                call.lane,
                key=self.key,
                turn_end_ms=after_ms,
                **queued,
            )
        return use

    def _dispatch(self, call: ToolCall | MalformedCall, turn: TurnInProgress, tools: asyncio.TaskGroup) -> None:
        """Starts a call, or answers it at once if it may not run. Ignores a surplus call that is to be dropped."""
        if self._is_surplus(turn) and self.config.surplus_calls == "drop":
            return
        now = self.timeline.now()
        if isinstance(call, MalformedCall):
            turn.calls.append(PendingToolCall.malformed(reason=call.reason, now=now))
            return
        arguments = json.dumps(call.arguments)
        refusal = self._refusal(call, turn)
        if refusal is not None:
            turn.calls.append(PendingToolCall.refused(name=call.name, arguments=arguments, reason=refusal, now=now))
            return
        lanes = self.timeline.lanes["tool calls"]
        lane = lanes.take()
        pending = PendingToolCall.closed(name=call.name, arguments=arguments, now=now, lane=lane)
        turn.calls.append(pending)
        running = pending.run(self.tools.by_name[call.name], call.arguments, self.timeline)
        task = tools.create_task(running, name=f"tool-{self.key}-{len(turn.calls)}")
        task.add_done_callback(lambda _: lanes.give(lane))

    def _refusal(self, call: ToolCall, turn: TurnInProgress) -> str | None:
        """Returns why a call may not run, for the model to read, or None."""
        if call.name not in self.tools.by_name:
            return f"NameError: no tool {call.name!r} (there is: {', '.join(self.tools.by_name)})"
        if self._is_surplus(turn):
            return f"LimitError: at most {self.config.max_calls_per_turn} calls"
        return None

    def _is_surplus(self, turn: TurnInProgress) -> bool:
        """Returns whether a further call exceeds the limit of the turn."""
        limit = self.config.max_calls_per_turn
        return limit is not None and len(turn.calls) >= limit


_NO_JOURNAL = Journal()
_ENDED_BY_ITSELF = (StopReason.ANSWER, StopReason.TURNS, StopReason.LENGTH)
