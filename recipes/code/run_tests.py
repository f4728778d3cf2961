"""A tool with which a model runs the public tests of a problem while it thinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from algo.reward.code.code_reward import CodeGrader
from algo.reward.code.problem import FunctionTests, Problem
from engine.ports import GraderUnavailable, ToolReply, ToolRunner
from engine.tools.python_tool import clip
from sandbox import Limits

OUTPUT_CHARS = 1000


class RunTests:
    """Runs a program on the public tests of a problem, whose name the question says, and tells which of them fail."""

    name = "run_tests"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "problem": {"type": "string", "description": "The name of the problem."},
            "code": {"type": "string", "description": "The whole program."},
        },
        "required": ["problem", "code"],
    }

    def __init__(self, problems: Mapping[str, Problem], runner: ToolRunner, limits: Limits) -> None:
        """problems: by name; hidden tests of theirs are never run here."""
        self._tests = {name: problem.public for name, problem in problems.items() if problem.public is not None}
        self._grader = CodeGrader(runner, limits=limits)

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        name, code = arguments.get("problem"), arguments.get("code")
        if not isinstance(name, str) or not isinstance(code, str):
            return ToolReply(outcome="error", text="TypeError: 'problem' and 'code' must be strings", executed=False)
        tests = self._tests.get(name)
        if tests is None:
            return ToolReply(outcome="error", text=f"KeyError: no public tests of {name[:80]!r}", executed=False)
        try:
            graded = await self._grader.grade(code, tests)
        except (GraderUnavailable, ValueError) as error:
            return ToolReply(outcome="lost", text=f"The tests could not be run: {error}")
        shown = tests.tests if isinstance(tests, FunctionTests) else [f"input {case.stdin!r}" for case in tests.cases]
        lines = [
            f"{test.strip()}: {'passed' if passed else f'failed: {detail}'}"
            for test, passed, detail in zip(shown, graded.passed, graded.details, strict=True)
        ]
        outcome = "ok" if all(graded.passed) else "error"
        return ToolReply(outcome=outcome, text=clip("\n".join(lines), OUTPUT_CHARS), jailed=True)
