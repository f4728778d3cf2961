"""Multi-turn rollouts: tokens stream in, tool calls leave the moment their closing tag is there.

Invariants
- The token buffer of a trajectory is append-only; every sampled token has a log-probability and a weight version.
- A tool call is dispatched in the loop tick that delivered its closing tag, while the turn goes on; its result is
  awaited only when the turn has ended. Each call gets exactly one response; a malformed one is told why. A call that
  the trajectory's end cuts off is recorded as killed.
- A failure of ours (replica, sandbox) makes a typed error, never a response to the model and never a reward.
- Every trajectory ends: token, turn, call and wall-time budgets are checked here. A wait for a place on a replica is
  not the model's time: it ends with a place or with the fleet.
- A trajectory whose turn is superseded by new weights begins again from its prompt, with fresh tools; the tokens that
  it had are counted as discarded.
- A trajectory that a journal holds goes on from the end of its last turn. The calls of a stateful tool are run again
  for its state; if one then answers otherwise, the trajectory begins again.
- A stateful tool is opened once for each trajectory and closed with it, however it ends; a trajectory that moves to
  another replica keeps it.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from engine.errors import first_error
from engine.fleet.fleet import Fleet, Superseded
from engine.ports import ReplicaDied, Sampling, StatefulTool, Tool
from engine.rollout.chat_template import Chat
from engine.rollout.deadline import Deadline
from engine.rollout.python_tool import schema
from engine.rollout.token_buffer import TokenBuffer
from engine.rollout.tool_call_parser import CLOSE, MalformedCall, ToolCall
from engine.rollout.turn import Call, Draft, ToolLost, refusal
from engine.run.journal import Journal, Log
from engine.run.journal_records import Piece, join_pieces
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Prompt, RolloutError, StopReason, ToolUse, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Budgets of one trajectory. max_tokens counts prompt, sampled and tool tokens; deadline_s is from its start to its
    end, but without the waits for a place on a replica, for which the model can do nothing. Another temperature than 1
    is for evaluations: what it samples cannot be trained (`algo.group.batch.make_batch`).
    """

    max_tokens: int = 256
    max_turns: int = 4
    max_calls_per_turn: int = 8
    temperature: float = 1.0
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_turns", "max_calls_per_turn", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature!r}")


def derive_seed(run_seed: int, prompt_id: str, sample: int, turn: int) -> int:
    """63-bit seed of one turn: blake2b of (run seed, prompt, sample, turn)."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{sample}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class Tally:
    """The tokens that a rollout has sampled so far, whatever becomes of it."""

    tokens: int = 0


@dataclass(slots=True)
class _Counts:
    """Over all Rollouts that come from one: the trajectories begun, which number the fleet's keys, and the tokens."""

    trajectories: int = 0
    tokens: int = 0


class Rollouts:
    """Rolls prompts out on a fleet with tools; one instance serves any number of concurrent trajectories.

    The model is shown the tools where the chat template shows tools, unless the chat's configuration says otherwise. A
    prompt that names tools is offered only those.
    """

    def __init__(
        self,
        config: RolloutConfig,
        chat: Chat,
        fleet: Fleet,
        tools: Sequence[Tool | StatefulTool],
        timeline: Timeline,
        seed: int,
    ) -> None:
        """Raises ValueError for two tools of one name, TemplateError where the template is unusable with the tools."""
        if len({tool.name for tool in tools}) < len(tools):
            raise ValueError(f"tools must have different names, got {[tool.name for tool in tools]}")
        self.config = config
        self.seed = seed
        self.closers = chat.closers(CLOSE)
        self._chat = chat
        self._fleet = fleet
        self._tools = tools
        self._timeline = timeline
        self._counts = _Counts()
        self._offers: dict[tuple[str, ...] | None, _Offer] = {}
        self.chat = self._offer(None).chat

    @property
    def tokens_sampled(self) -> int:
        """With those of Rollouts that `with_config` made of it."""
        return self._counts.tokens

    def with_config(self, config: RolloutConfig) -> Rollouts:
        """The same with other budgets or another temperature, for an evaluation, say. Both can be used at once.

        The replicas' `max_model_len` and the balancer's `max_tokens` must allow the larger of the two budgets.
        """
        other = copy.copy(self)
        other.config = config
        return other

    def _offer(self, names: tuple[str, ...] | None, prompt_id: str = "") -> _Offer:
        """What a prompt that names these tools is offered. Raises ValueError for a tool that is not there."""
        if names not in self._offers:
            known = {tool.name: tool for tool in self._tools}
            if unknown := [name for name in names or () if name not in known]:
                raise ValueError(f"prompt {prompt_id}: no tool {unknown[0]!r} (there is: {', '.join(known)})")
            tools = self._tools if names is None else [known[name] for name in dict.fromkeys(names)]
            shown = self._chat.with_tools([schema(tool) for tool in tools])
            self._offers[names] = _Offer(tools=tools, chat=shown)
        return self._offers[names]

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """One trajectory of prompt. Never raises for what the model, the tool's code or a replica did.

        tally: counts its sampled tokens; the only trace of them when it is cancelled. log: what a journal holds of it,
        from which it goes on, and where its turns are written down.
        """
        started_at, tally, log = self._timeline.now(), tally or Tally(), log or _NO_JOURNAL.log(0, 0, sample)
        deadline = Deadline(self.config.deadline_s)
        while True:
            self._counts.trajectories += 1
            rollout = _Rollout(self, prompt, sample, group, self._counts.trajectories, tally, log)
            async with AsyncExitStack() as opened:
                try:
                    return await rollout.run(opened, deadline, started_at)
                except Superseded:
                    log.begin(log.discarded + sum(turn.end - turn.start for turn in rollout.turns), tally.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """The tools that a model may call, and the chat that shows them."""

    tools: Sequence[Tool | StatefulTool]
    chat: Chat


class _Rollout:
    """One attempt at a trajectory."""

    def __init__(
        self, owner: Rollouts, prompt: Prompt, sample: int, group: int, key: int, tally: Tally, log: Log
    ) -> None:
        self.owner, self.prompt, self.sample, self.group, self.key = owner, prompt, sample, group, key
        self.tally, self.log = tally, log
        self.config, self.fleet = owner.config, owner._fleet
        self.offer = owner._offer(prompt.tools, prompt.id)
        self.chat = self.offer.chat
        self.timeline = owner._timeline
        self.buffer = TokenBuffer(self.chat.prompt_ids(prompt.messages))
        self.prompt_tokens = len(self.buffer)
        self.turns: list[Turn] = []
        self.text: list[str] = []
        self.tools: dict[str, Tool] = {}
        if log.pieces:
            so_far = join_pieces(log.pieces)
            self.buffer = TokenBuffer.of(so_far.token_ids_T, so_far.sampled_T, so_far.logprobs_T, so_far.versions_T)
            self.turns, self.text = [*so_far.turns], [so_far.text]

    async def run(self, opened: AsyncExitStack, deadline: Deadline, started_at: float) -> Trajectory:
        """Raises Superseded when it has to begin again."""
        self.waiting = deadline.waiting
        lane = self.timeline.lanes["trajectories"].take()
        error, stop = None, None
        try:
            async with deadline.timeout() as budget:
                for tool in self.offer.tools:
                    self.tools[tool.name] = tool if callable(tool) else await opened.enter_async_context(tool.open())
                await self._rebuild()
                stop = await self._turns(lane)
        except TimeoutError:
            if not budget.expired():
                raise  # a tool's bug, not our deadline
            stop = StopReason.DEADLINE
        except ReplicaDied as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(failure))
        except ToolLost as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.SANDBOX, message=str(failure))
        finally:
            self.fleet.leave(self.key, len(self.buffer), finished=stop in _BY_ITSELF)
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
            started_at=started_at,
            finished_at=self.timeline.now(),
            error=error,
            discarded_tokens=self.log.discarded,
        )

    async def _rebuild(self) -> None:
        """Runs the calls of turns that the journal holds again, for tools that keep state.

        Raises Superseded when they answer otherwise than they did, or the turns may not be gone on with.
        """
        if self.turns and self.fleet.config.on_update == "restart" and self.buffer.version != self.fleet.version:
            raise Superseded(f"trajectory {self.key} began under version {self.buffer.version}")
        stateful = {tool.name for tool in self.offer.tools if not callable(tool)}
        for use in [use for turn in self.turns for use in turn.tool_uses if use.executed and use.name in stateful]:
            reply = await self.tools[use.name](json.loads(use.arguments))
            if (reply.outcome, reply.text) != (use.outcome, use.response):
                raise Superseded(f"trajectory {self.key}: a call that was run again answers {reply.text!r}")

    async def _turns(self, lane: int) -> StopReason:
        while (stop := self._follow()) is None:
            await self._turn(lane)
            if self.log.on:
                whole = Piece(**self.buffer.arrays(), turns=tuple(self.turns), text="".join(self.text))
                self.log.grow(whole, self.tally.tokens)
        return stop

    def _follow(self) -> StopReason | None:
        """What follows the turns so far: the end, or what the tools answered and another turn."""
        if not self.turns:
            return StopReason.LENGTH if len(self.buffer) >= self.config.max_tokens else None
        turn = self.turns[-1]
        if turn.truncated:
            return StopReason.LENGTH
        if not turn.tool_uses:
            return StopReason.ANSWER
        if len(self.turns) == self.config.max_turns:
            return StopReason.TURNS
        given = self.chat.tool_ids([use.response for use in turn.tool_uses])
        if self.buffer.ids[-1] != self.chat.end_of_turn:  # another end token of the model's, of generation_config.json
            given = [self.chat.end_of_turn, *given]
        if len(self.buffer) + len(given) >= self.config.max_tokens:
            return StopReason.LENGTH
        self.buffer.append_given(given)
        return None

    async def _turn(self, lane: int) -> None:
        """Generates one turn; its calls run in a task each and end before this returns.

        A turn that is cut short (deadline, failure) is recorded with the tokens and the calls that it has.
        """
        start = len(self.buffer)
        draft = Draft(start, start, self.timeline.now(), self.chat.stream())
        try:
            async with asyncio.TaskGroup() as tools:
                await self._generate(draft, tools)
                if draft.calls:
                    self.fleet.turn_done(self.key, len(self.buffer))
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        finally:
            if len(self.buffer) > draft.start:
                self.turns.append(self._close(draft, lane))

    async def _generate(self, draft: Draft, tools: asyncio.TaskGroup) -> None:
        """Streams the turn's tokens into the buffer; each call is dispatched as it closes.

        Only a token that can complete the closing tag can complete a call, so nothing is decoded before one comes.
        """
        buffer, start, closers = self.buffer, draft.start, self.owner.closers
        sampling = Sampling(
            max_tokens=self.config.max_tokens - start,
            temperature=self.config.temperature,
            seed=derive_seed(self.owner.seed, self.prompt.id, self.sample, len(self.turns)),
            stop_token_ids=(self.chat.end_of_turn,),
            deliver_at=closers,
        )
        turn = self.fleet.turn(self.key, self.group, buffer.ids, sampling, self.prompt_tokens, self.waiting)
        async with aclosing(turn) as deltas:
            async for draft.replica, delta in deltas:
                if len(buffer.ids) == start:
                    draft.started_at, draft.cached_tokens = self.timeline.now(), delta.cached_tokens
                buffer.append_sampled(delta)
                self.owner._counts.tokens += len(delta.token_ids)
                if not closers.isdisjoint(delta.token_ids):
                    # Up to that token only: a character that is not whole yet would hold back the text before it.
                    after = next(at for at, token in enumerate(reversed(delta.token_ids)) if token in closers)
                    self._read(draft, tools, len(buffer) - after)
        for version, begin, end in delta.spans:
            buffer.label(version, start + begin, start + end)
        draft.finish, draft.finished_at = delta.finish, self.timeline.now()
        if draft.finish == "stop":
            draft.text = self.chat.decode(buffer.ids[start:])
            for call in (*draft.parser.feed(draft.text[draft.read_chars :]), *draft.parser.finish()):
                self._dispatch(call, draft.calls, tools)

    def _read(self, draft: Draft, tools: asyncio.TaskGroup, end: int) -> None:
        """The parser reads what was sampled since it last did, up to `end`."""
        text = draft.stream.step(self.buffer.ids[draft.read : end])
        draft.read, draft.read_chars = end, draft.read_chars + len(text)
        for call in draft.parser.feed(text):
            self._dispatch(call, draft.calls, tools)

    def _close(self, draft: Draft, lane: int) -> Turn:
        now, end = self.timeline.now(), len(self.buffer)
        finished_at = now if draft.finished_at is None else draft.finished_at
        self.tally.tokens += end - draft.start
        self.text.append(draft.text or self.chat.decode(self.buffer.ids[draft.start :]))
        self.timeline.span(
            "trajectories", "generate", draft.started_at, finished_at, lane, replica=draft.replica, key=self.key
        )
        if draft.calls:
            self.timeline.span("trajectories", "tools", finished_at, now, lane, calls=len(draft.calls))
        return Turn(
            start=draft.start,
            end=end,
            tool_uses=tuple(self._use(call, finished_at) for call in draft.calls),
            replica=draft.replica,
            cached_tokens=draft.cached_tokens,
            queued_at=draft.queued_at,
            started_at=draft.started_at,
            finished_at=finished_at,
            truncated=draft.finish != "stop",
        )

    def _use(self, call: Call, turn_finished_at: float) -> ToolUse:
        use = call.use(turn_finished_at)
        if call.lane >= 0:
            after_ms = round((turn_finished_at - call.dispatched_at) * 1e3, 3)
            times = call.dispatched_at, call.finished_at, call.lane
            self.timeline.span("tool calls", use.outcome, *times, key=self.key, turn_end_ms=after_ms)
        return use

    def _dispatch(self, call: ToolCall | MalformedCall, calls: list[Call], tools: asyncio.TaskGroup) -> None:
        now, refused = self.timeline.now(), None
        if isinstance(call, MalformedCall):
            calls.append(Call("", "{}", now, -1, now, now, refusal("malformed", f"FormatError: {call.reason}")))
            return
        if call.name not in self.tools:
            names = ", ".join(self.tools)
            refused = refusal("error", f"NameError: no tool {call.name!r} (there is: {names})")
        elif len(calls) >= self.config.max_calls_per_turn:
            refused = refusal("error", f"LimitError: at most {self.config.max_calls_per_turn} calls")
        calls.append(record := Call(call.name, json.dumps(call.arguments), now, -1, now, now, refused))
        if refused is None:
            record.lane = lane = self.timeline.lanes["tool calls"].take()
            running = record.run(self.tools[record.name], call.arguments, self.timeline)
            task = tools.create_task(running, name=f"tool-{self.key}-{len(calls)}")
            task.add_done_callback(lambda _: self.timeline.lanes["tool calls"].give(lane))


_NO_JOURNAL = Journal()
_BY_ITSELF = (StopReason.ANSWER, StopReason.TURNS, StopReason.LENGTH)
