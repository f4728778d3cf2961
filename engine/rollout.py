"""Multi-turn rollouts: tokens stream in, tool calls leave the moment their closing tag is there.

Invariants
- The token buffer of a trajectory is append-only; every sampled token has a log-probability and a weight version.
- A tool call is dispatched in the loop tick that delivered its closing tag, while the turn goes on; its result is
  awaited only when the turn has ended. Each call gets exactly one response; a malformed one is told why. A call that
  the trajectory's end cuts off is recorded as killed.
- A failure of ours (replica, sandbox) makes a typed error, never a response to the model and never a reward.
- Every trajectory ends: token, turn, call and wall-time budgets are checked here.
- A trajectory whose turn is superseded by new weights begins again from its prompt, with fresh tools; the tokens that
  it had are counted as discarded.
- A stateful tool is opened once for each trajectory and closed with it, however it ends; a trajectory that moves to
  another replica keeps it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from engine.buffer import TokenBuffer
from engine.chat import Chat, TextStream
from engine.errors import first_error
from engine.fleet import Fleet, Superseded
from engine.parse import CLOSE, MalformedCall, ToolCall, ToolCallParser
from engine.ports import ReplicaDied, Sampling, StatefulTool, Tool, ToolReply
from engine.trace import Timeline
from engine.types import Boundary, Prompt, RolloutError, StopReason, ToolUse, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Budgets of one trajectory. max_tokens counts prompt, sampled and tool tokens."""

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
class _Call:
    """A call under way: when it closed, and its reply once there is one."""

    name: str
    arguments: Mapping[str, object]
    closed_at: float
    lane: int
    dispatched_at: float = 0.0
    finished_at: float = 0.0
    reply: ToolReply | None = None


@dataclass(slots=True)
class _Draft:
    """A turn under way."""

    start: int
    read: int  # up to where the parser has read
    queued_at: float
    stream: TextStream
    started_at: float = 0.0
    finished_at: float | None = None  # None: cut short while it was generated
    replica: int = -1
    cached_tokens: int = 0
    finish: str | None = None
    calls: list[_Call] = field(default_factory=list)
    parser: ToolCallParser = field(default_factory=ToolCallParser)


class Rollouts:
    """Rolls prompts out on a fleet with tools; one instance serves any number of concurrent trajectories."""

    def __init__(
        self,
        config: RolloutConfig,
        chat: Chat,
        fleet: Fleet,
        tools: Sequence[Tool | StatefulTool],
        timeline: Timeline,
        seed: int,
    ) -> None:
        self.config = config
        self.chat = chat
        self.seed = seed
        self.closers = chat.closers(CLOSE)
        self.tokens_sampled = 0
        self._fleet = fleet
        self._tools = tools
        self._timeline = timeline
        self._keys = 0

    async def run(self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None) -> Trajectory:
        """One trajectory of prompt. Never raises for what the model, the tool's code or a replica did.

        tally: counts its sampled tokens; the only trace of them when it is cancelled.
        """
        started_at, discarded = self._timeline.now(), 0
        ends_at = asyncio.get_running_loop().time() + self.config.deadline_s
        while True:
            self._keys += 1
            rollout = _Rollout(self, prompt, sample, group, self._keys, tally or Tally())
            async with AsyncExitStack() as opened:
                try:
                    return await rollout.run(opened, ends_at, started_at, discarded)
                except Superseded:
                    discarded += sum(turn.end - turn.start for turn in rollout.turns)


class _Rollout:
    """One attempt at a trajectory."""

    def __init__(self, owner: Rollouts, prompt: Prompt, sample: int, group: int, key: int, tally: Tally) -> None:
        self.owner, self.prompt, self.sample, self.group, self.key = owner, prompt, sample, group, key
        self.tally = tally
        self.config, self.chat, self.fleet = owner.config, owner.chat, owner._fleet
        self.timeline = owner._timeline
        self.buffer = TokenBuffer(self.chat.prompt_ids(prompt.messages))
        self.turns: list[Turn] = []
        self.text: list[str] = []
        self.tools: dict[str, Tool] = {}

    async def run(self, opened: AsyncExitStack, ends_at: float, started_at: float, discarded: int) -> Trajectory:
        """ends_at: on the loop's clock. Raises Superseded when it has to begin again."""
        lane = self.timeline.lanes["trajectories"].take()
        error, stop = None, None
        try:
            async with asyncio.timeout_at(ends_at) as budget:
                for tool in self.owner._tools:
                    own = tool if callable(tool) else await opened.enter_async_context(tool.open())
                    self.tools[tool.name] = own
                stop = await self._turns(lane)
        except TimeoutError:
            if not budget.expired():
                raise  # a tool's bug, not our deadline
            stop = StopReason.DEADLINE
        except ReplicaDied as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.REPLICA, message=str(failure))
        except _ToolLost as failure:
            stop, error = StopReason.ERROR, RolloutError(boundary=Boundary.SANDBOX, message=str(failure))
        finally:
            self.fleet.leave(self.key, len(self.buffer), finished=stop in _BY_ITSELF)
            self.timeline.lanes["trajectories"].give(lane)
        token_ids_T, sampled_T, logprobs_T, versions_T = self.buffer.arrays()
        return Trajectory(
            prompt=self.prompt,
            sample=self.sample,
            seed=derive_seed(self.owner.seed, self.prompt.id, self.sample, 0),
            temperature=self.config.temperature,
            token_ids_T=token_ids_T,
            sampled_T=sampled_T,
            logprobs_T=logprobs_T,
            versions_T=versions_T,
            turns=tuple(self.turns),
            text="".join(self.text),
            stop=stop,
            started_at=started_at,
            finished_at=self.timeline.now(),
            error=error,
            discarded_tokens=discarded,
        )

    async def _turns(self, lane: int) -> StopReason:
        if len(self.buffer) >= self.config.max_tokens:
            return StopReason.LENGTH
        while True:
            turn = await self._turn(lane)
            if turn.truncated:
                return StopReason.LENGTH
            if not turn.tool_uses:
                return StopReason.ANSWER
            if len(self.turns) == self.config.max_turns:
                return StopReason.TURNS
            given = self.chat.tool_ids([use.response for use in turn.tool_uses])
            if len(self.buffer) + len(given) >= self.config.max_tokens:
                return StopReason.LENGTH
            self.buffer.append_given(given)

    async def _turn(self, lane: int) -> Turn:
        """Generates one turn; its calls run in a task each and end before the turn is returned.

        A turn that is cut short (deadline, failure) is recorded with the tokens and the calls that it has.
        """
        start = len(self.buffer)
        draft = _Draft(start, start, self.timeline.now(), self.chat.stream())
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
        return self.turns[-1]

    async def _generate(self, draft: _Draft, tools: asyncio.TaskGroup) -> None:
        """Streams the turn's tokens into the buffer; each call is dispatched as it closes.

        Only a token that can complete the closing tag can complete a call, so nothing is decoded before one comes.
        """
        buffer, start, closers = self.buffer, draft.start, self.owner.closers
        sampling = Sampling(
            max_tokens=self.config.max_tokens - start,
            temperature=self.config.temperature,
            seed=derive_seed(self.owner.seed, self.prompt.id, self.sample, len(self.turns)),
            stop_token_ids=(self.chat.end_of_turn,),
        )
        async with aclosing(self.fleet.turn(self.key, self.group, buffer.ids, sampling)) as deltas:
            async for draft.replica, delta in deltas:
                if len(buffer.ids) == start:
                    draft.started_at, draft.cached_tokens = self.timeline.now(), delta.cached_tokens
                buffer.append_sampled(delta)
                if not closers.isdisjoint(delta.token_ids):
                    # Up to that token only: a character that is not whole yet would hold back the text before it.
                    after = next(at for at, token in enumerate(reversed(delta.token_ids)) if token in closers)
                    self._read(draft, tools, len(buffer) - after)
        for version, begin, end in delta.spans:
            buffer.label(version, start + begin, start + end)
        draft.finish, draft.finished_at = delta.finish, self.timeline.now()
        if draft.finish == "stop":
            self._read(draft, tools, len(buffer))
            for call in draft.parser.finish():
                self._dispatch(call, draft.calls, tools)

    def _read(self, draft: _Draft, tools: asyncio.TaskGroup, end: int) -> None:
        """The parser reads what was sampled since it last did, up to `end`."""
        text = draft.stream.step(self.buffer.ids[draft.read : end])
        draft.read = end
        for call in draft.parser.feed(text):
            self._dispatch(call, draft.calls, tools)

    def _close(self, draft: _Draft, lane: int) -> Turn:
        now, end = self.timeline.now(), len(self.buffer)
        finished_at = now if draft.finished_at is None else draft.finished_at
        self.owner.tokens_sampled += end - draft.start
        self.tally.tokens += end - draft.start
        self.text.append(self.chat.decode(self.buffer.ids[draft.start :]))
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

    def _dispatch(self, call: ToolCall | MalformedCall, calls: list[_Call], tools: asyncio.TaskGroup) -> None:
        now = self.timeline.now()
        refusal = None
        if isinstance(call, MalformedCall):
            refusal = _refusal("malformed", f"FormatError: {call.reason}")
            record = _Call("", {}, now, -1, now, now, refusal)
        else:
            if call.name not in self.tools:
                names = ", ".join(self.tools)
                refusal = _refusal("error", f"NameError: no tool {call.name!r} (there is: {names})")
            elif len(calls) >= self.config.max_calls_per_turn:
                refusal = _refusal("error", f"LimitError: at most {self.config.max_calls_per_turn} calls")
            record = _Call(call.name, call.arguments, now, -1, now, now, refusal)
        calls.append(record)
        if refusal is None:
            record.lane = lane = self.timeline.lanes["tool calls"].take()
            task = tools.create_task(self._run_tool(record), name=f"tool-{self.key}-{len(calls)}")
            task.add_done_callback(lambda _: self.timeline.lanes["tool calls"].give(lane))

    async def _run_tool(self, call: _Call) -> None:
        try:
            reply = await self.tools[call.name](call.arguments)
        finally:
            call.finished_at = self.timeline.now()
        call.reply = reply
        if reply.outcome == "lost":
            raise _ToolLost(reply.text or "the sandbox lost the call")

    def _use(self, call: _Call, turn_finished_at: float) -> ToolUse:
        reply = call.reply or _UNANSWERED
        overlap = max(0.0, min(call.finished_at, turn_finished_at) - call.dispatched_at)
        if call.lane >= 0:
            self.timeline.span(
                "tool calls",
                reply.outcome,
                call.dispatched_at,
                call.finished_at,
                call.lane,
                key=self.key,
                turn_end_ms=round((turn_finished_at - call.dispatched_at) * 1e3, 3),
            )
        return ToolUse(
            name=call.name,
            arguments=call.arguments,
            outcome=reply.outcome,
            response=reply.text,
            closed_at=call.closed_at,
            dispatched_at=call.dispatched_at,
            finished_at=call.finished_at,
            overlap_s=overlap,
            executed=reply.executed,
            jailed=reply.jailed,
        )


_BY_ITSELF = (StopReason.ANSWER, StopReason.TURNS, StopReason.LENGTH)
_UNANSWERED = ToolReply(outcome="killed", text="")  # the trajectory ended before the call did


def _refusal(outcome: str, text: str) -> ToolReply:
    return ToolReply(outcome=outcome, text=text, executed=False)


class _ToolLost(RuntimeError):
    """The tool's infrastructure failed: the trajectory is not the model's fault and is not trained."""
