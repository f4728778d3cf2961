"""Answers one agent's requests on the fleet, and keeps the exact trajectory that they make.

Invariants
- A turn that was sampled to its end is in one lineage. An unfinished one leaves nothing there and counts as waste.
- A turn of a request with a constraint obeys its grammar; the tokens that the grammar decided about are not trained.
- A client can send a turn back as it got it, and the next request is recognised.
- Closing a generator early aborts its request, which frees its KV blocks.
- With `SessionRules.fixed`, the n-th turn of the first lineage is sampled like the n-th turn of one of our rollouts.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from engine.fleet.fleet import Fleet, Superseded
from engine.gateway.grammar import grammar_of
from engine.gateway.kept_responses import IN_SESSION, KeptResponses
from engine.gateway.lineage import Chats, Lineage, Lineages, Opened, SampledTurn
from engine.gateway.reader import TurnReader
from engine.gateway.requests import (
    BadRequest,
    Begun,
    ChatRequest,
    Constraint,
    Event,
    Finished,
    FinishReason,
    OverBudget,
    SamplingOverrides,
    TextRequest,
    TooLong,
)
from engine.replica.port import Delta, GrammarRefused, ReplicaDied, Sampling
from engine.rollout.chat_template import TemplateError
from engine.rollout.rollout import derive_seed
from engine.telemetry.in_flight import Watched, unwatched
from engine.telemetry.timeline import Timeline
from engine.types import Prompt, RolloutError, StopReason, Trajectory

# How many tokens are delivered together, since each bundle costs the node as much as several tokens. A streamed answer
# gets few at a time, and the first token of a turn alone.
STREAMED, WHOLE = 8, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRules:
    """What the requests of a session may ask for.

    group: sessions of one group begin with the same prompt and are placed beside each other. seed, prompt_id, sample:
    determine the seeds of turns; seed None: turns have the client's seed, or none. max_tokens: the length of a lineage
    with its prompt; max_response_tokens: its length without the prompt. max_turns: the turns of the session. fixed:
    temperature, top_p and seed are those of the rules whatever the client asks for, as training requires.
    """

    max_tokens: int
    group: int = 0
    seed: int | None = None
    prompt_id: str = ""
    sample: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int | None = None
    max_turns: int | None = None
    fixed: bool = False

    def longest(self, prompt_tokens: int) -> int:
        """Returns how many tokens a lineage with this prompt may have in all."""
        if self.max_response_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, prompt_tokens + self.max_response_tokens)


@dataclass(kw_only=True, slots=True)
class Counts:
    """The counts of a session, or of a whole gateway.

    reused_tokens: prompt tokens that were not rendered again. cached_tokens: prompt tokens in a replica's cache.
    wasted_tokens: tokens sampled in turns that were cut off.
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    wasted_tokens: int = 0
    overruled: int = 0
    """Requests with a field that changes sampling and that the rules did not follow."""
    overruled_fields: Counter[str] = field(default_factory=Counter)
    """The same by field; a request may have several."""
    renamed: int = 0
    """Requests for another model, which the session's model answered."""
    constrained: int = 0
    """Requests whose turn had to be a call, or JSON."""
    forced_tokens: int = 0
    """Sampled tokens that a grammar decided about, which are not trained."""
    refused: int = 0
    """Requests that were answered with a client error (a status of 400 to 499), except those beyond a budget."""


class Session:
    """A session, which `engine.gateway.gateway.Gateway.open` makes.

    on_tokens: is called with the number of sampled tokens as they come. waiting: is entered while a request waits for a
    place on a replica. watched: is told what the session does.
    """

    def __init__(
        self,
        key: str,
        rules: SessionRules,
        fleet: Fleet,
        chats: Chats,
        timeline: Timeline,
        counts: Counts,
        on_tokens: Callable[[int], None] = lambda tokens: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        watched: Watched | None = None,
    ) -> None:
        self.key = key
        self.rules = rules
        self.counts = Counts()
        self._counts_of_all = counts
        self.turns = 0
        self.stop: StopReason | None = None
        """The budget for which a request was refused, if one was."""
        self.last_refusal: str | None = None
        """The message of the last refused request."""
        self.responses = KeptResponses(IN_SESSION)
        """The latest answers to requests of the Responses API, from which others may go on."""
        self.failure: ReplicaDied | Superseded | None = None
        """The failure of ours for which a turn could not be sampled."""
        self.sampled_tokens = 0
        self.in_flight = 0
        self.users = 0
        """How many requests of clients use the session."""
        self.used_at = timeline.now()
        self._fleet = fleet
        self._chat = chats.plain
        self._timeline = timeline
        self._on_tokens = on_tokens
        self._waiting = waiting
        self._watched = watched or unwatched()
        self.lineages = Lineages(chats, fleet.new_key)
        self._name = rules.prompt_id or key or uuid.uuid4().hex  # makes the ids of its calls its own
        self._last: Lineage | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.started_at = timeline.now()

    def chat(self, request: ChatRequest, *, stream: bool = False) -> AsyncGenerator[Event, None]:
        """Samples the next turn. stream: whether it is streamed. Raises BadRequest, and what `Fleet.turn` raises."""

        def open_chat() -> tuple[Opened, TurnReader]:
            try:
                opened = self.lineages.open(request.messages, request.tools, self._timeline.now())
            except (ValueError, TemplateError) as error:
                raise BadRequest("messages", str(error)) from error
            lineage = opened.lineage
            seed = f"{self._name}/{self.rules.sample}/{lineage.number}/{lineage.turn_number}"
            stops = request.overrides.stop
            return opened, TurnReader(lineage.chat, seed, calls=bool(request.tools), stops=stops)

        return self._turn(open_chat, request.overrides, request.constraint, stream=stream)

    def complete(self, request: TextRequest, *, stream: bool = False) -> AsyncGenerator[Event, None]:
        """Continues the tokens of a request; otherwise like `chat`."""

        def open_text() -> tuple[Opened, TurnReader]:
            if not request.prompt_ids:
                raise BadRequest("prompt", "must have at least one token")
            if strange := [token for token in request.prompt_ids if not 0 <= token < self._chat.vocabulary]:
                known = self._chat.vocabulary
                raise BadRequest("prompt", f"token ids must be from 0 to {known - 1}, got {strange[0]}")
            stops = request.overrides.stop
            reader = TurnReader(self._chat, self.key, calls=False, stops=stops, thoughts=False)
            return self.lineages.open_text(request.prompt_ids), reader

        return self._turn(open_text, request.overrides, None, stream=stream)

    async def _turn(
        self,
        begin: Callable[[], tuple[Opened, TurnReader]],
        overrides: SamplingOverrides,
        constraint: Constraint | None,
        *,
        stream: bool,
    ) -> AsyncGenerator[Event, None]:
        opened, reader = begin()
        lineage, deltas, closed = opened.lineage, list[Delta](), False
        queued_at = self._timeline.now()
        lane: int | None = None
        task = asyncio.current_task()
        assert task is not None
        try:
            sampling = self._sampling(opened, overrides, constraint, stream=stream)
            self._count(opened, overrides)
            self.count_up(constrained=constraint is not None)
            lane = self._timeline.lanes["trajectories"].take()
            self.in_flight += 1
            self._running.add(task)
            turn = _begun(queued_at)
            self._watched.begins_turn(self.turns + 1)
            tokens = self._fleet.turn(
                lineage.key,
                self.rules.group,
                opened.ids,
                sampling,
                lineage.prompt_tokens or None,
                lambda: self._watched.waits_for_place(self._waiting()),
                turn.placed,
            )
            async with aclosing(tokens) as generated:
                async for turn.replica, delta in generated:
                    first = not deltas
                    if first:
                        turn.started_at = self._timeline.now() if delta.began is None else delta.began
                        turn.cached_tokens = delta.cached_tokens
                    self._on_tokens(len(delta.token_ids))
                    self._watched.samples(len(delta.token_ids), turn.replica)
                    self.sampled_tokens += len(delta.token_ids)
                    kept, events = reader.read(delta, self._timeline.now())
                    deltas.append(kept)
                    if first:
                        yield Begun(prompt_tokens=len(opened.ids), cached_tokens=delta.cached_tokens)
                    for event in events:
                        yield event
                    if reader.stop is not None:
                        break
            turn.finished_at = self._timeline.now()
            for event in reader.finish(turn.finished_at):
                yield event
            turn.text, turn.calls = reader.whole, reader.called
            turn.truncated = deltas[-1].finish != "stop"
            reason: FinishReason = "length" if turn.truncated else "tool_calls" if reader.calls else "stop"
            reply = reader.message()
            self.lineages.close(opened, deltas, turn, reply)
            closed = True
            self.turns += 1
            self._last = lineage
            forced = sum(sum(delta.forced) for delta in deltas)
            self.count_up(cached_tokens=turn.cached_tokens, sampled_tokens=turn.end - turn.start, forced_tokens=forced)
            if self._closed:
                self._fleet.trajectory_ended(lineage.key, len(lineage.buffer), finished=True)
            else:
                self._fleet.turn_finished(lineage.key, len(lineage.buffer))
                self._watched.moves("agent")
            yield Finished(
                reason=reason,
                message=reply,
                prompt_ids=tuple(opened.ids),
                token_ids=tuple(token for delta in deltas for token in delta.token_ids),
                logprobs=tuple(value for delta in deltas for value in delta.logprobs),
                cached_tokens=turn.cached_tokens,
                stop=reader.stop,
            )
        except (ReplicaDied, Superseded) as error:
            self.failure = error
            raise
        except GrammarRefused as error:
            assert constraint is not None
            raise BadRequest(constraint.field, f"it cannot be enforced: {error}") from error
        finally:
            if lane is not None:
                self.in_flight -= 1
                self._running.discard(task)
                self.used_at = now = self._timeline.now()
                self._timeline.lanes["trajectories"].give(lane)
                args = {"session": self.key, "key": lineage.key, "lineage": lineage.number}
                self._timeline.span("trajectories", "generate", queued_at, now, lane, **args)
            if not closed:
                self.count_up(wasted_tokens=sum(len(delta.token_ids) for delta in deltas))
                if lane is not None:  # None if the request was refused before it reached the fleet
                    self._fleet.trajectory_ended(lineage.key, len(lineage.buffer), finished=False)
                    lineage.key = self._fleet.new_key()
                lineage.busy = False

    def _sampling(
        self, opened: Opened, overrides: SamplingOverrides, constraint: Constraint | None, *, stream: bool
    ) -> Sampling:
        """Returns how a turn is sampled. Raises BadRequest when a budget is used up, or for an impossible grammar."""
        each = bool(overrides.stop)  # deliver each token: a stop text ends the turn at its last one
        rules, lineage = self.rules, opened.lineage
        if self._closed:
            raise BadRequest("session", f"{self.key!r} has ended")
        if not rules.fixed:
            overrides.check_no_changes()
        if rules.max_turns is not None and self.turns + self.in_flight >= rules.max_turns:
            self.stop = StopReason.TURNS
            raise OverBudget("session", f"it may have at most {rules.max_turns} turns")
        longest = rules.longest(lineage.prompt_tokens)
        room = longest - len(opened.ids)
        if room <= 0:
            self.stop = StopReason.LENGTH
            raise TooLong(len(opened.ids), longest)
        return Sampling(
            max_tokens=room if overrides.max_tokens is None else min(room, overrides.max_tokens),
            temperature=rules.temperature if rules.fixed or overrides.temperature is None else overrides.temperature,
            top_p=rules.top_p if rules.fixed or overrides.top_p is None else overrides.top_p,
            seed=self._seed(lineage, overrides),
            stop_token_ids=(lineage.chat.end_of_turn,),
            deliver_at=None if each else frozenset(),
            bundle=STREAMED if stream else WHOLE,
            grammar=None if constraint is None else grammar_of(constraint, lineage.chat.thoughts),
            routes_from=lineage.buffer.routed,
        )

    def _seed(self, lineage: Lineage, overrides: SamplingOverrides) -> int | None:
        rules = self.rules
        if rules.seed is None or (overrides.seed is not None and not rules.fixed):
            return overrides.seed
        sample = rules.sample if lineage.number == 0 else f"{rules.sample}.{lineage.number}"
        return derive_seed(rules.seed, rules.prompt_id, sample, lineage.turn_number)

    def _count(self, opened: Opened, overrides: SamplingOverrides) -> None:
        self.count_up(requests=1, prompt_tokens=len(opened.ids), reused_tokens=opened.reused)
        if not self.rules.fixed:
            return
        rules = {"temperature": self.rules.temperature, "top_p": self.rules.top_p, "seed": None}
        names = [name for name, value in rules.items() if getattr(overrides, name) not in (None, value)]
        names += overrides.changes
        self.count_up(overruled=bool(names))
        for counts in (self.counts, self._counts_of_all):
            counts.overruled_fields.update(names)

    def count_up(self, **increments: int) -> None:
        """Adds to the counts of the session and to those of the gateway."""
        for counts in (self.counts, self._counts_of_all):
            for name, value in increments.items():
                setattr(counts, name, getattr(counts, name) + value)

    @property
    def cost(self) -> dict[str, Any]:
        """What the session has used so far. seconds: since it was opened."""
        lineages, seconds = len(self.lineages.all), self._timeline.now() - self.started_at
        counts = {each.name: getattr(self.counts, each.name) for each in fields(self.counts)}
        return {**counts, "turns": self.turns, "lineages": lineages, "seconds": round(seconds, 3)}

    def trajectory(self, prompt: Prompt, stop: StopReason, error: RolloutError | None = None) -> Trajectory:
        """Returns what was sampled so far: the lineage with the last turn, and the others as segments.

        Raises ValueError if no turn was sampled and no error is given.
        """
        last = self._last
        if last is None and error is None:
            raise ValueError(f"session {self.key!r} has no turn")
        lineage = last or Lineage.unanswered(self._chat, prompt.messages)
        main = lineage.segment()
        others = [lineage.segment() for lineage in self.lineages.all if lineage is not last]
        return Trajectory(
            prompt=prompt,
            sample=self.rules.sample,
            seed=derive_seed(self.rules.seed or 0, self.rules.prompt_id, self.rules.sample, 0),
            temperature=self.rules.temperature,
            token_ids_T=main.token_ids_T,
            sampled_T=main.sampled_T,
            logprobs_T=main.logprobs_T,
            versions_T=main.versions_T,
            turns=main.turns,
            text=lineage.text,
            stop=stop,
            started_at=self.started_at,
            finished_at=self._timeline.now(),
            error=error,
            segments=tuple(others),
            end_of_turn=lineage.chat.end_of_turn_text,
            routes=main.routes,
        )

    @property
    def ended_by(self) -> StopReason:
        """Why the session would have ended as one of our rollouts, with the calls answered as the agent did."""
        if self.stop is not None:
            return self.stop
        if self._last is None:
            return StopReason.ANSWER
        last = self._last.turns[-1]
        if last.truncated:
            return StopReason.LENGTH
        return StopReason.TURNS if any(call.outcome is None for call in last.calls) else StopReason.ANSWER

    def accept_last_calls(self) -> None:
        """Takes calls without a result that end a conversation as done: with them the agent got what it wanted."""
        for lineage in self.lineages.all:
            for call in lineage.turns[-1].calls if lineage.turns else ():
                call.outcome = call.outcome or "ok"

    def close(self) -> None:
        """Ends the session: refuses further requests, cancels those under way, and frees the KV blocks."""
        if not self._closed:
            self._closed = True
            for task in self._running - {asyncio.current_task()}:
                task.cancel()
            for lineage in self.lineages.all:
                if not lineage.busy:
                    self._fleet.trajectory_ended(lineage.key, len(lineage.buffer), finished=True)

    async def settled(self) -> None:
        """Waits until no request of a closed session is under way."""
        if running := self._running - {asyncio.current_task()}:
            await asyncio.wait(running)


def _begun(queued_at: float) -> SampledTurn:
    return SampledTurn(
        start=0,
        end=0,
        messages=0,
        truncated=False,
        replica=-1,
        cached_tokens=0,
        queued_at=queued_at,
        started_at=queued_at,
        finished_at=queued_at,
        text="",
    )
