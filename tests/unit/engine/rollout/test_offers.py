"""What the model is offered: tools by prompt, shown and callable; budgets and temperature of an evaluation."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from algo.eval_stats import avg_at_k
from engine.rollout.chat_template import ChatConfig, ChatTemplate, TemplateError
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.stages.evaluate import Evaluation
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool, schema
from engine.types import StopReason
from tests.support.fakes import Clock, Echo, Gate, Replicas, ScriptedRunner, a_prompt, conversation, fleet_of, settle
from tests.unit.engine.rollout.test_chat_template import HERMES, TOOLS, tokenizer

END = "<|im_end|>"
ECHO = '<tool_call>{"name": "echo", "arguments": {"x": 1}}</tool_call>' + END
ANSWER = f"42{END}"


class Setup:
    """Rollouts with two tools, `python` and `echo`, whose template shows tools."""

    def __init__(self, *turns, chat=None):
        self.chat = chat or ChatTemplate(tokenizer(TOOLS))
        self.timeline = Timeline(Clock(tick=0.001))
        self.replicas = Replicas(chat=self.chat, script=conversation(self.chat, *turns))
        self.fleet = fleet_of(self.replicas, timeline=self.timeline)
        self.tools = [PythonTool(ScriptedRunner()), Echo()]
        budget = RolloutConfig(max_tokens=4000)
        self.rollouts = Rollouts(budget, self.chat, self.fleet, self.tools, self.timeline, seed=3)

    async def __aenter__(self):
        await self.fleet.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.fleet.__aexit__(*error)

    def shown(self, trajectory):
        """The schemas in what the model saw."""
        text = self.chat.decode(trajectory.token_ids_T)
        return json.loads(text[len("<tools>") : text.index("</tools>")]) if text.startswith("<tools>") else []


async def test_the_model_is_shown_the_tools():
    async with Setup([ECHO], [ANSWER]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
    assert node.shown(trajectory) == [schema(tool) for tool in node.tools]
    assert [use.outcome for use in trajectory.tool_uses] == ["ok"]


async def test_a_prompt_is_offered_the_tools_that_it_names_and_no_other():
    async with Setup([ECHO], [ANSWER]) as node:
        some, none = (replace(a_prompt(), tools=names) for names in (("python",), ()))
        few, nothing = await node.rollouts.run(some, 0, 0), await node.rollouts.run(none, 0, 1)
        everything = await node.rollouts.run(a_prompt(), 0, 2)
    assert [len(node.shown(trajectory)) for trajectory in (few, nothing, everything)] == [1, 0, 2]
    assert [trajectory.tool_uses[0].outcome for trajectory in (few, nothing, everything)] == ["error", "error", "ok"]
    [refused] = few.tool_uses
    assert not refused.executed
    assert "python" in refused.response.partition("there is")[2]


async def test_a_tool_that_is_not_there_is_named_with_the_prompt():
    async with Setup([ANSWER]) as node:
        with pytest.raises(ValueError, match=r"p7: .*'search'.*python, echo"):
            await node.rollouts.run(replace(a_prompt(7), tools=("echo", "search")), 0, 0)


async def test_the_configuration_of_the_chat_says_what_is_shown():
    chat = ChatTemplate(tokenizer(TOOLS), ChatConfig(tools=(), system="You have a tool named echo."))
    async with Setup([ECHO], [ANSWER], chat=chat) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
    assert node.shown(trajectory) == []
    assert [use.outcome for use in trajectory.tool_uses] == ["ok"]
    assert "You have a tool named echo." in chat.decode(trajectory.token_ids_T)


def test_a_template_that_breaks_with_the_tools_is_refused_before_anything_is_sampled():
    with pytest.raises(TemplateError, match="not append-only"):
        Setup(chat=ChatTemplate(tokenizer(HERMES + "{% if tools %}{{ messages | length }}{% endif %}")))


# Evaluation


async def test_an_evaluation_has_budgets_temperature_and_samples_of_its_own():
    async with Setup([ECHO], [ANSWER]) as node:
        budget = RolloutConfig(max_tokens=3000, max_turns=1, temperature=0.6)
        evaluation = Evaluation([a_prompt()], 3, node.rollouts.with_config(budget), fixed, avg_at_k, node.timeline)
        metrics, evaluated = await evaluation.run(0)
        trained = await node.rollouts.run(a_prompt(), 0, 0)
    assert metrics["eval/k"] == 3
    assert [(member.temperature, member.stop) for member in evaluated] == [(0.6, StopReason.TURNS)] * 3
    assert (trained.temperature, trained.stop) == (1.0, StopReason.ANSWER)
    asked = [(sampling.temperature, sampling.max_tokens) for _, sampling, _ in node.replicas.made[0].requests]
    prompt = trained.turns[0].start
    assert asked[:3] == [(0.6, 3000 - prompt)] * 3
    assert asked[3] == (1.0, 4000 - prompt)
    assert node.rollouts.tokens_sampled == sum(member.sampled_tokens for member in [*evaluated, trained])


async def test_training_and_evaluation_share_a_fleet_at_once():
    gate = Gate()
    async with Setup([gate, ANSWER]) as node:
        evaluating = node.rollouts.with_config(replace(node.rollouts.config, temperature=0.0))
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(rollouts.run(a_prompt(), sample, group))
                for sample in range(3)
                for group, rollouts in enumerate((node.rollouts, evaluating))
            ]
            await settle()
            gate.release()
    found = [task.result() for task in running]
    assert [(member.stop, member.text) for member in found] == [(StopReason.ANSWER, ANSWER)] * 6
    assert [member.temperature for member in found] == [1.0, 0.0] * 3
    assert len({request for *_, request in node.replicas.made[0].requests}) == 6


async def test_an_evaluation_tells_the_accuracy_of_each_source():
    prompts = [replace(a_prompt(n), source=source) for n, source in enumerate(("gsm8k", "math", "gsm8k", ""))]

    async def graded(trajectory):
        return float(trajectory.prompt.id in ("p0", "p3"))

    async with Setup([ANSWER]) as node:
        metrics, _ = await Evaluation(prompts, 2, node.rollouts, graded, avg_at_k, node.timeline).run(0)
    found = {name: value for name, value in metrics.items() if name.startswith("eval/accuracy/")}
    assert found == {"eval/accuracy/gsm8k": 0.5, "eval/accuracy/math": 0.0}
    assert np.isclose(metrics["eval/accuracy"], 0.5)


async def fixed(trajectory):
    return 1.0
