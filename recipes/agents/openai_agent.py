"""Trains an agent that knows nothing of rocstar: plain code on the `openai` package, with a tool of its own.

python recipes/agents/openai_agent.py [field=value ...]      (the fields of recipes/quickstart.py)
"""

import json
from functools import partial

from openai import AsyncOpenAI

from algo.group.batch import make_batch, select_and_score
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.ports import ToolReply
from engine.programs.main import main
from engine.recipe import Recipe
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import schema
from recipes.quickstart import Config
from recipes.tiny.task import prompts, python_tool


async def converse(prompt, endpoint, client, python):
    """The agent: it asks the model, runs what it calls, and answers it, until it calls no more."""
    client = client.with_options(base_url=endpoint.openai_url, api_key=endpoint.key)
    messages = [*prompt.messages]
    while True:
        answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[schema(python)])
        messages.append(answer.choices[0].message)
        if not messages[-1].tool_calls:
            return
        for call in messages[-1].tool_calls:
            try:
                reply = await python(json.loads(call.function.arguments))
            except json.JSONDecodeError as error:
                reply = ToolReply(outcome="malformed", text=f"FormatError: {error.msg}")
            failed = reply.outcome != "ok"  # what RoC looks at
            messages.append({"role": "tool", "tool_call_id": call.id, "content": reply.text, "is_error": failed})


async def train(config, run):
    client = AsyncOpenAI(base_url="http://endpoint", api_key="none")  # each rollout has its own; connections are shared
    async with client, training(config.training(), run) as job:
        rollouts = await job.agents(partial(converse, client=client, python=python_tool(job.sandbox)))
        groups = job.group(rollouts, MathReward(integers_only=True), select_and_score(config.selector, config.seed))
        stages = [job.admit(prompts("train", config.seed)), groups, job.batch(), job.write_rollouts(every=1)]
        return await job.run([*stages, job.train(make_batch)])


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
