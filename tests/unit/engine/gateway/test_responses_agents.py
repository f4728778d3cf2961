"""Random agents over the Responses API: whatever they go on from, and however they say it, no token is read anew."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.responses_api import parse
from engine.gateway.http.responses_reply import Reply
from engine.gateway.requests import Finished
from engine.gateway.session import SessionRules
from engine.types import StopReason
from tests.support.examples import examples
from tests.support.fakes import a_prompt
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
    other order. thinks: whether it puts another model's thoughts between the items.
    """

    base: int | None
    by_id: bool
    backwards: bool
    thinks: bool
    stream: bool


STEPS = st.builds(
    Step,
    base=st.none() | st.integers(0, 3),
    by_id=st.booleans(),
    backwards=st.booleans(),
    thinks=st.booleans(),
    stream=st.booleans(),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer that an agent got. items: the conversation so far as its items. read: the ids up to its end."""

    id: str
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


async def work(steps):
    said = iter(SAYS * len(steps))

    def prepare(replica):
        replica._script = lambda token_ids, sampling: [next(said) + END]

    async with Setup(prepare=prepare) as node:
        gateway = Gateway(node.fleet, CHAT, node.timeline, GatewayConfig())
        session = gateway.open("mine", RULES)
        answers: list[Answer] = []
        for number, step in enumerate(steps):
            base = None if step.base is None or step.base >= len(answers) else answers[-1 - step.base]
            new = new_items(base, step, f"text {number}")
            items = [*(base.items if base else []), *new]
            sent = [{"type": "reasoning", "summary": []}, *items] if step.thinks else items
            body = {"input": sent, "tools": TOOLS}
            if base is not None and step.by_id:
                body |= {"input": new, "previous_response_id": base.id}
            response, finished = await answered(session, body, step.stream)
            read = finished.prompt_ids + finished.token_ids
            if base is not None:
                assert finished.prompt_ids[: len(base.read)] == base.read, "what was sampled is read as it was sampled"
            output = response["output"]
            answers.append(Answer(id=response["id"], items=[*items, *output], output=output, read=read))
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        gateway.close("mine")
        check(trajectory)
        masks = [trajectory.sampled_T, *[segment.sampled_T for segment in trajectory.segments]]
        assert np.concatenate(masks).sum() == session.counts.sampled_tokens, "each token is trained once"
        continued = [step.base is not None and step.base < number for number, step in enumerate(steps)]
        assert (session.counts.reused_tokens > 0) == any(continued)


@examples(25)
@given(steps=st.lists(STEPS, min_size=1, max_size=6))
def test_what_was_sampled_is_never_read_anew(steps):
    asyncio.run(work(steps))
