"""Trains an agent that knows nothing of rocstar: plain code on the `openai` package, with a tool of its own.

python recipes/agents/openai_agent.py [field=value ...]      (the fields of recipes/quickstart.py)
"""

import json
from functools import partial
from itertools import islice
from typing import Any

from openai import AsyncOpenAI

from algo.eval_stats import avg_at_k
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.gateway.agent import Endpoint
from engine.ports import ToolReply
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import PythonTool, schema
from engine.types import Prompt
from recipes.quickstart import Config
from recipes.tiny.task import prompts, python_tool


async def converse(prompt: Prompt, endpoint: Endpoint, client: AsyncOpenAI, python: PythonTool) -> None:
    """Is the agent: asks the model, runs the calls that it makes and tells it their results, until it makes none."""
    client = client.with_options(base_url=endpoint.openai_url, api_key=endpoint.key)
    messages: list[Any] = [*prompt.messages]
    tools: list[Any] = [schema(python)]
    while True:
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
        messages.append(answer.choices[0].message)
        if not messages[-1].tool_calls:
            return
        for call in messages[-1].tool_calls:
            try:
                reply = await python(json.loads(call.function.arguments))
            except json.JSONDecodeError as error:
                reply = ToolReply(outcome="malformed", text=f"FormatError: {error.msg}")
            failed = reply.outcome != "ok"  # RoC counts failed calls
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply.text, "is_error": failed})


async def train(config: Config, run: Run) -> dict[str, Any]:
    client = AsyncOpenAI(base_url="http://endpoint", api_key="none")  # each rollout has its own; connections are shared
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with client, training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = await job.agents(partial(converse, client=client, python=python_tool(job.sandbox)))
        right = MathReward(integers_only=True)
        evaluation = await job.evaluation(held_out, right, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(config.prompts()),
                job.group(rollouts, config.reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
