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

MODEL = os.environ["OPENAI_MODEL"]
CASES = {}


def case(function):
    """Adds a case: a function, which may be a coroutine, of the question that it has to ask."""
    CASES[function.__name__] = function
    return function


def python(code: str) -> str:
    """Runs Python.

    Args:
        code: The expression to run.
    """
    return str(eval(code))


def main():
    """Runs the cases one after the other. The answer of one that fails is its traceback."""
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
    print(json.dumps(answers), file=output)
