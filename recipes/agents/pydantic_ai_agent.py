"""Is an agent of pydantic-ai as a program, as one writes it for a model anywhere: `program.py` trains it.

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the model, the task is JSON on standard input, and the last line
that is printed is the answer.
"""

import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

from recipes.environments import calculator


def python(code: str) -> str:
    """Runs lines such as `x=2*21` and `print(x)`, and answers with what they print."""
    try:
        return calculator.printed(code)
    except calculator.Wrong as error:
        return str(error)


if __name__ == "__main__":
    [message] = json.load(sys.stdin)["messages"]
    agent = Agent(OpenAIChatModel(os.environ["OPENAI_MODEL"]), tools=[python], retries=3)
    print(agent.run_sync(message["content"]).output)
