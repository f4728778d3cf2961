"""The reward for programs with a runner that is none: what is a 0, and what is no grade."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from algo.reward.code.code_reward import SUSPICIOUS, CodeGrader, CodeReward
from algo.reward.code.problem import Case, FunctionTests, Problem, ProgramTests, Tests, encode_problem
from engine.ports import GraderUnavailable
from engine.types import StopReason, Trajectory
from sandbox import SandboxUnavailable, ToolResult
from tests.support.fakes import a_prompt, a_trajectory

ECHO = ProgramTests(cases=(Case(stdin="1", expected=("1",)), Case(stdin="2", expected=("2",))))
CALLS = FunctionTests(functions=("f",), tests=("assert f(1) == 1",))


class Runner:
    """Answers each call by a function of its input."""

    def __init__(self, answer) -> None:  # type: ignore[no-untyped-def]
        self.answer = answer
        self.calls: list[tuple[str, str]] = []

    async def run(self, code, stdin="", limits=None, *, display=False) -> ToolResult:  # type: ignore[no-untyped-def]
        self.calls.append((code, stdin))
        result = self.answer(stdin)
        if isinstance(result, Exception):
            raise result
        return result


def a_solution(tests: Tests, program: str | None = "program\n") -> Trajectory:
    prompt = replace(a_prompt(), answer=encode_problem(Problem(name="p", hidden=tests)))
    return replace(a_trajectory(prompt=prompt), answer="" if program is None else f"```python\n{program}```")


def printed(stdin: str) -> ToolResult:
    return ToolResult(outcome="ok", stdout=stdin)


async def test_the_program_gets_its_input_and_nothing_else() -> None:
    runner = Runner(printed)
    grade = await CodeReward(runner)(a_solution(ECHO))
    assert (grade.reward, grade.scores) == (1.0, {"tests": 1.0})
    assert sorted(runner.calls) == [("program\n", "1"), ("program\n", "2")]


async def test_the_complaint_is_that_of_a_test_which_was_run() -> None:
    async def run(code, stdin="", limits=None, *, display=False) -> ToolResult:  # type: ignore[no-untyped-def]
        if stdin == "1":
            await asyncio.Event().wait()
        return ToolResult(outcome="ok", stdout="7")

    runner = Runner(printed)
    runner.run = run  # type: ignore[method-assign]
    graded = await CodeGrader(runner, stop=True).grade("program", ECHO)
    assert graded.passed == (False, False)
    assert "7" in graded.complaint


@pytest.mark.parametrize(("score", "reward"), [("all", 0.0), ("share", 0.5)])
async def test_all_tests_or_the_share_of_them(score, reward) -> None:
    right_once = Runner(lambda stdin: ToolResult(outcome="ok", stdout="1"))
    assert (await CodeReward(right_once, score=score)(a_solution(ECHO))).reward == reward


@pytest.mark.parametrize(
    "result",
    [
        ToolResult(outcome="timeout", stdout="1"),
        ToolResult(outcome="memory", stdout="1"),
        ToolResult(outcome="output", stdout="1"),
        ToolResult(outcome="killed", stdout="1"),
        ToolResult(outcome="error", stdout="1", exit_code=1),
        ToolResult(outcome="ok", stdout="1", truncated=True),
    ],
)
async def test_a_right_output_does_not_help_a_program_that_did_not_end_well(result) -> None:
    tests = ProgramTests(cases=ECHO.cases[:1])
    assert (await CodeReward(Runner(lambda _: result))(a_solution(tests))).reward == 0.0


@pytest.mark.parametrize("tests", [ECHO, CALLS], ids=["program", "functions"])
@pytest.mark.parametrize("result", [ToolResult(outcome="lost"), SandboxUnavailable("no jail"), RuntimeError("gone")])
async def test_what_we_lost_is_no_grade(tests, result) -> None:
    with pytest.raises(GraderUnavailable):
        await CodeReward(Runner(lambda _: result))(a_solution(tests))


async def test_no_program_or_a_truncated_one_is_a_0_without_a_call() -> None:
    runner = Runner(printed)
    reward = CodeReward(runner)
    stops = [replace(a_solution(ECHO), stop=stop) for stop in StopReason if stop is not StopReason.ANSWER]
    for trajectory in [a_solution(ECHO, None), *stops]:
        assert (await reward(trajectory)).reward == 0.0
    assert runner.calls == []


@pytest.mark.parametrize("program", ["x" * (8 << 20), "'\ud800'"], ids=["long", "surrogate"])
async def test_a_program_that_no_sandbox_takes_fails(program) -> None:
    graded = await CodeGrader(Runner(printed)).grade(program, ECHO)
    assert graded.passed == (False, False)


async def test_a_busy_machine_is_not_the_programs_fault() -> None:
    def answer(stdin: str) -> ToolResult:
        if '"answers"' in stdin:
            return ToolResult(outcome="timeout", cpu_s=0.1, wall_s=12.0)
        return ToolResult(outcome="ok", stdout="loaded\n")

    with pytest.raises(GraderUnavailable, match="CPU"):
        await CodeReward(Runner(answer))(a_solution(CALLS))


async def test_results_that_are_too_much_for_the_tests_fail() -> None:
    def answer(stdin: str) -> ToolResult:
        if '"answers"' in stdin:
            return ToolResult(outcome="timeout", cpu_s=4.0, wall_s=5.0)
        return ToolResult(outcome="ok", stdout="loaded\n")

    assert (await CodeReward(Runner(answer))(a_solution(CALLS))).reward == 0.0


async def test_that_nobody_writes_programs_is_told_once(caplog) -> None:
    reward = CodeReward(Runner(printed))
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * SUSPICIOUS):
            await reward(a_solution(ECHO, None))
    assert len(caplog.records) == 1


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="score"):
        CodeReward(Runner(printed), score="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at_once"):
        CodeReward(Runner(printed), at_once=0)
