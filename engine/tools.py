"""Tools that the model can call: Python in the sandbox, and what the model reads of its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.ports import ToolReply, ToolRunner
from sandbox.wire import Limits, ToolResult


class PythonTool:
    """Runs `arguments["code"]` (with `arguments["input"]` on stdin, if given) and answers with what it printed.

    name is what the model calls it; output_chars bounds what the model reads (the middle is cut out).
    """

    def __init__(
        self, runner: ToolRunner, name: str = "python", limits: Limits | None = None, output_chars: int = 1000
    ) -> None:
        if output_chars < 20:
            raise ValueError(f"output_chars must be at least 20, got {output_chars}")
        self.name = name
        self._runner = runner
        self._limits = limits
        self._output_chars = output_chars

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        code, stdin = arguments.get("code"), arguments.get("input", "")
        if not isinstance(code, str) or not isinstance(stdin, str):
            return ToolReply(outcome="error", text="TypeError: 'code' and 'input' must be strings", executed=False)
        result = await self._runner.run(code, stdin, self._limits)
        return ToolReply(outcome=result.outcome, text=clip(feedback(result), self._output_chars), jailed=result.jailed)


def feedback(result: ToolResult) -> str:
    """What the model is told: stdout, or the last line of the error, or the limit that ended the call."""
    if result.outcome == "ok":
        return result.stdout.strip()
    if result.outcome == "timeout":
        return f"TimeoutError: stopped after {result.wall_s:.1f} s"
    if result.outcome == "memory":
        return "MemoryError: out of memory"
    if result.outcome == "output":
        return "OutputError: too much output"
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"Error: exit code {result.exit_code}"


def clip(text: str, limit: int) -> str:
    """At most `limit` characters, the middle replaced by a mark.

    >>> clip("a" * 30 + "b" * 30, 20)
    'aaaaaaa [...] bbbbbb'
    """
    if len(text) <= limit:
        return text
    mark = " [...] "
    head = (limit - len(mark) + 1) // 2
    tail = limit - len(mark) - head
    return text[:head] + mark + text[len(text) - tail :]
