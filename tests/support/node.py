"""A node with scripted surroundings, for tests of rollouts."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.session import SessionRules
from engine.gateway.tool_loop import ToolLoop
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from sandbox.http.listener import Address
from tests.support.fakes import Clock, Replicas, ScriptedRunner, a_prompt, conversation, fleet_of, logprob_of
from tests.support.paths import TINY

CHAT = ChatTemplate.load(TINY)
END = "<|im_end|>"
ANSWER = f"<answer>42</answer>{END}"


def call(code, name="python"):
    return "<tool_call>" + json.dumps({"name": name, "arguments": {"code": code}}) + "</tool_call>"


class Setup:
    """A node with scripted surroundings: `async with Setup(turns...) as node`."""

    def __init__(self, *turns, runner=None, tools=None, replicas=1, prepare=lambda replica: None, **budget):
        self.runner = runner or ScriptedRunner()
        self.timeline = Timeline(Clock(tick=0.001))
        self.replicas = Replicas(prepare, chat=CHAT, script=conversation(CHAT, *turns))
        self.fleet = fleet_of(self.replicas, replicas, timeline=self.timeline)
        self.config = RolloutConfig(**{"max_tokens": 400, **budget})
        tools = [PythonTool(self.runner)] if tools is None else tools
        self.rollouts = Rollouts(self.config, CHAT, self.fleet, tools, self.timeline, seed=3)

    async def __aenter__(self):
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.fleet.__aexit__(*error)
        if error[0] is None:
            policy = self.fleet._balancer
            policy.check()
            assert policy.waiting() == policy.reserved_blocks() == 0
            assert self.fleet._turns == self.fleet._homes == {}
            assert self.fleet._tool_waiting == set()
            assert self.runner.running == 0
            for lanes in self.timeline.lanes.values():
                assert len(lanes._free) == lanes._next, "a lane was not given back"

    async def run(self, text="What is 6 * 7?"):
        trajectory = await self.rollouts.run(a_prompt(text=text), 0, 0)
        check(trajectory)
        return trajectory


def check(trajectory):
    """The invariants of every trajectory."""
    ids, mask = trajectory.token_ids_T, trajectory.sampled_T
    lengths = {len(ids), len(mask), len(trajectory.logprobs_T), len(trajectory.versions_T)}
    assert lengths == {len(ids)}
    assert (trajectory.logprobs_T[~mask] == 0).all()
    assert (trajectory.versions_T[~mask] == -1).all()
    assert (trajectory.versions_T[mask] >= 0).all()
    wanted = [logprob_of(token) for token in ids[mask]]
    np.testing.assert_allclose(trajectory.logprobs_T[mask], wanted, rtol=1e-6)
    spans = np.zeros(len(ids), bool)
    for turn in trajectory.turns:
        assert not spans[turn.start : turn.end].any()
        spans[turn.start : turn.end] = True
    assert (spans == mask).all(), "the turns are exactly what was sampled"
    assert trajectory.text == "".join(CHAT.decode(ids[turn.start : turn.end]) for turn in trajectory.turns)


@asynccontextmanager
async def served(
    *turns,
    token="",
    also=(),
    tools=False,
    connections=None,
    rules=SessionRules(max_tokens=400, seed=3),  # noqa: B008  frozen
    **options,
):
    """The gateway before such a node, on a port of its own: `node.address`."""
    async with Setup(*turns, **options) as node:
        gateway = Gateway(node.fleet, CHAT, node.timeline, GatewayConfig(rules=rules))
        config = ServerConfig(model="tiny", also=also, address=Address(token=token))
        loop = ToolLoop(node.rollouts) if tools else None
        async with serve(gateway, config, tool_loop=loop, connections=connections) as address:
            node.gateway, node.address = gateway, address
            yield node
