"""What the scripts of this folder share. Each has a few cases of one framework, written as its users write them.

A script prints what its cases returned, as JSON. It finds the gateway as any program does, in OPENAI_BASE_URL,
OPENAI_API_KEY, OPENAI_MODEL and their like for Anthropic. Each case has a session, which its key names.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from dataclasses import dataclass

MODEL = os.environ["OPENAI_MODEL"]
CASES, AGENTS = {}, []
AT_ONCE = 3


@dataclass(frozen=True)
class Endpoint:
    """What an agent gets of `engine.gateway.agent.Endpoint`."""

    openai_url: str
    anthropic_url: str
    key: str
    model: str = MODEL


def case(function):
    """Adds a case: a function, which may be a coroutine, of the question that it has to ask."""
    CASES[function.__name__] = function
    return function


def agent(function):
    """Adds an agent, a coroutine as `job.agents` takes it, which runs three times at once in this process."""
    AGENTS.append(function)
    return function


def python(code: str) -> str:
    """Runs Python.

    Args:
        code: The expression to run.
    """
    return str(eval(code))


def main():
    """Runs the cases one after the other, and then the agents. The answer of one that fails is its traceback."""
    output, sys.stdout = sys.stdout, sys.stderr  # some frameworks print
    answers = {}
    with asyncio.Runner() as runner:
        for name, function in CASES.items():
            os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = f"session-{name}"
            try:
                answer = function(f"case:{name}. What is 6 * 7?")
                answers[name] = runner.run(answer) if inspect.iscoroutine(answer) else answer
            except Exception:
                answers[name] = traceback.format_exc()
        urls = os.environ.pop("OPENAI_BASE_URL"), os.environ.pop("ANTHROPIC_BASE_URL")
        del os.environ["OPENAI_API_KEY"], os.environ["ANTHROPIC_API_KEY"]
        answers |= runner.run(_at_once(*urls))
    print(json.dumps(answers), file=output)


async def _at_once(openai_url, anthropic_url):
    async def run(function, name):
        try:
            return await function(
                f"case:{name}. What is 6 * 7?", Endpoint(openai_url, anthropic_url, f"session-{name}")
            )
        except Exception:
            return traceback.format_exc()

    running = {f"{each.__name__}_{number}": each for each in AGENTS for number in range(AT_ONCE)}
    return dict(zip(running, await asyncio.gather(*(run(each, name) for name, each in running.items())), strict=True))
