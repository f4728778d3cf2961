"""Random agents over the Responses API: whatever they go on from, and however they say it, no token is read anew.

They ask in rounds. The requests of a round run at once: branches of one response, sub-agents with instructions of their
own, conversations that were compacted, and some that are left before they end.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.responses_api import parse
from engine.gateway.http.responses_reply import Reply
from engine.gateway.requests import Finished
from engine.gateway.session import SessionRules
from engine.types import StopReason
from tests.support.dialects import ask_and_leave
from tests.support.examples import examples
from tests.support.fakes import Gate, a_prompt
from tests.support.node import CHAT, END, Setup, call, check

RULES = SessionRules(max_tokens=3000, seed=3, prompt_id="p", fixed=True)
TOOLS = [{"type": "function", "name": "python"}, {"type": "custom", "name": "patch"}]
PATCH = '<tool_call>{"name": "patch", "arguments": {"input": "*** a\\nb"}}</tool_call>'
MALFORMED = '<tool_call>{"name": "python", "arguments": {"code": }}</tool_call>'
SAYS = ["It is 42.", "", call("1"), "I try.\n" + call("1") + PATCH, PATCH, MALFORMED, "no" + MALFORMED + call("2")]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an agent does next. base: from which answer it goes on, counted from the last one; None: from none.

    by_id: whether it names that answer instead of sending the conversation. backwards: whether results come in the
    other order. thinks: whether it puts another model's thoughts between the items. helper: whether it is a sub-agent,
    which begins with other instructions. leaves: whether the agent goes away after the first event.
    """

    base: int | None
    by_id: bool
    backwards: bool
    thinks: bool
    stream: bool
    helper: bool
    leaves: bool


STEPS = st.builds(
    Step,
    base=st.none() | st.integers(0, 3),
    by_id=st.booleans(),
    backwards=st.booleans(),
    thinks=st.booleans(),
    stream=st.booleans(),
    helper=st.booleans(),
    leaves=st.sampled_from([False, False, False, True]),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that an agent got. items: the conversation so far as its items. read: the ids up to its end."""

    id: str
    instructions: str | None
    items: list
    output: list
    read: tuple[int, ...]


def new_items(base, step, text):
    """What the agent adds: the results of the calls, if there are some, or a question."""
    called = [item for item in base.output if item["type"].endswith("_call")] if base else []
    results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": text} for item in called]
    return results[:: -1 if step.backwards else 1] or [{"role": "user", "content": text}]


async def answered(session, body, stream):
    parsed = parse(json.dumps(body).encode())
    request = parsed.request(session.responses)
    reply = Reply("tiny", parsed, request, session.responses)
    async with aclosing(session.chat(request, stream=stream)) as events:
        data = b""
        async for event in events:
            data += reply.event(event) if stream else b""
            finished = event
    assert isinstance(finished, Finished)
    if not stream:
        return json.loads(bytes(reply.whole(finished))), finished
    last = json.loads(data.decode().rstrip().splitlines()[-1].removeprefix("data: "))
    return last["response"], finished


def script(token_ids, sampling):
    """A turn in pieces, between which others get a turn."""
    for piece in (*random.Random(repr((token_ids, sampling.seed))).choice(SAYS).partition("call"), END):
        gate = Gate()
        gate.release()
        yield gate
        if piece:
            yield piece


class Agent:
    def __init__(self, session):
        self.session = session
        self.answers: list[Answer] = []
        self.finished: list[Finished] = []

    async def take(self, step, base, text):
        """Asks, and returns the answer; None if the agent has left."""
        new = new_items(base, step, text)
        items = [*(base.items if base else []), *new]
        sent = [{"type": "reasoning", "summary": []}, *items] if step.thinks else items
        instructions = base.instructions if base else "You help." if step.helper else None
        body = {"input": sent, "tools": TOOLS, "instructions": instructions}
        if base is not None and step.by_id:
            body |= {"input": new, "previous_response_id": base.id}
        if step.leaves:
            await ask_and_leave(self.session, parse(json.dumps(body).encode()).request(self.session.responses))
            return None
        response, finished = await answered(self.session, body, step.stream)
        self.finished.append(finished)
        read = finished.prompt_ids + finished.token_ids
        if base is not None:
            assert finished.prompt_ids[: len(base.read)] == base.read, "what was sampled is read as it was sampled"
        output = response["output"]
        return Answer(id=response["id"], instructions=instructions, items=[*items, *output], output=output, read=read)

    async def round(self, steps, number):
        bases = [self.base(step) for step in steps]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.take(step, base, f"text {number} {at % 2}"))
                for at, (step, base) in enumerate(zip(steps, bases, strict=True))
            ]
        self.answers += [answer for task in running if (answer := task.result()) is not None]

    def base(self, step):
        return None if step.base is None or step.base >= len(self.answers) else self.answers[-1 - step.base]


async def work(rounds):
    async with Setup(prepare=lambda replica: setattr(replica, "_script", script)) as node:
        gateway = Gateway(node.fleet, CHAT, node.timeline, GatewayConfig())
        session = gateway.open("mine", RULES)
        agent = Agent(session)
        for number, steps in enumerate(rounds):
            await agent.round(steps, number)
        assert len(session.responses) == session.turns == len(agent.answers), "one that was left is kept"
        if agent.answers:
            check_parts(session.trajectory(a_prompt(), StopReason.ANSWER), agent.finished)
        gateway.close("mine")


def check_parts(trajectory, finished):
    """Each turn is in one segment, after exactly the ids that the model read."""
    check(trajectory)
    found = Counter()
    for part in trajectory.parts:
        ids = tuple(part.token_ids_T.tolist())
        found.update((ids[: turn.start], ids[turn.start : turn.end]) for turn in part.turns)
        assert part.sampled_T.sum() == sum(turn.end - turn.start for turn in part.turns), "a token is trained twice"
    assert found == Counter((each.prompt_ids, each.token_ids) for each in finished)


@examples(40)
@given(rounds=st.lists(st.lists(STEPS, min_size=1, max_size=3), min_size=1, max_size=5))
def test_what_was_sampled_is_never_read_anew_and_trained_once(rounds):
    asyncio.run(work(rounds))
