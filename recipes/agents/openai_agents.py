"""Trains an agent of OpenAI's `agents` package, over its default, the Responses API, with a tool of its own.

    pip install openai-agents
    python recipes/agents/openai_agents.py [field=value ...]      (the fields of recipes/quickstart.py)

This package cannot tell that a call failed, so algorithm=roc takes each call that could be read for a good one.
"""

import json
from functools import partial
from itertools import islice
from typing import Any

from openai import AsyncOpenAI

from algo.eval_stats import avg_at_k
from algo.reward.math_reward import MathReward
from engine.assembly.training import training
from engine.errors import BadInput
from engine.gateway.agent import Endpoint
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import PythonTool
from engine.types import Prompt
from recipes.quickstart import Config
from recipes.tiny.task import prompts, python_tool


def package() -> Any:
    """Imports the package. Raises BadInput where it is not installed."""
    try:
        import agents
    except ImportError as error:
        raise BadInput("the package 'agents' is not installed. Fix: pip install openai-agents") from error
    return agents


def tool_of(python: PythonTool) -> Any:
    """Returns the sandbox's Python as a tool of the package."""

    async def run(context: Any, arguments: str) -> str:
        try:
            return (await python(json.loads(arguments))).text
        except json.JSONDecodeError as error:
            return f"FormatError: {error.msg}"

    return package().FunctionTool(
        name=python.name,
        description=python.description,
        params_json_schema=dict(python.parameters),
        on_invoke_tool=run,
        strict_json_schema=False,
    )


async def solve(prompt: Prompt, endpoint: Endpoint, client: AsyncOpenAI, tool: Any) -> str:
    """Is the agent: the package's loop asks the model and runs the calls that it makes, until it makes none."""
    agents = package()
    client = client.with_options(base_url=endpoint.openai_url, api_key=endpoint.key)
    config = agents.RunConfig(model_provider=agents.OpenAIProvider(openai_client=client), tracing_disabled=True)
    agent = agents.Agent(name="solver", model=endpoint.model, tools=[tool])
    result = await agents.Runner.run(agent, [*prompt.messages], run_config=config)
    return str(result.final_output)


async def train(config: Config, run: Run) -> dict[str, Any]:
    package()
    client = AsyncOpenAI(base_url="http://endpoint", api_key="none")  # each rollout has its own; connections are shared
    held_out = list(islice(prompts("test", 0), config.eval_problems))
    async with client, training(config.training(), run, sinks=config.sinks(run)) as job:
        rollouts = await job.agents(partial(solve, client=client, tool=tool_of(python_tool(job.sandbox))))
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
