"""Is an agent as a program on the `openai` package, which knows nothing of its training: `program.py` trains it.

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the model, the task is JSON on standard input, and the last line
that is printed is the answer.
"""

import json
import os
import sys
from typing import Any

from openai import OpenAI

from recipes.environments import calculator

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL: Any = {"type": "function", "function": {"name": "python", "parameters": PARAMETERS}}


def run(arguments: str) -> tuple[str, bool]:
    """Returns what a call prints, and whether it failed."""
    try:
        return calculator.printed(str(json.loads(arguments)["code"])), False
    except json.JSONDecodeError as error:
        return f"FormatError: {error.msg}", True
    except (KeyError, calculator.Wrong) as error:
        return str(error), True


def solve(messages: list[Any]) -> str:
    """Asks the model and runs the calls that it makes, until it makes none. Returns what it said last."""
    client = OpenAI()
    while True:
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[TOOL])
        messages.append(answer.choices[0].message)
        if not messages[-1].tool_calls:
            return messages[-1].content or ""
        for call in messages[-1].tool_calls:
            printed, failed = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": printed, "is_error": failed})


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)["messages"]))
