"""Grades a program by what it prints for inputs.

Each case is a jailed call of the program, which gets its input on stdin and nothing else. It passes if the program
ended with exit code 0 within the limits, its output was not cut, and the output is right. The comparison is made here,
on text, or by the data set's checker in a jailed call of its own.

A checker that fails (it raises, exits or exceeds a limit) is asked about its case's own expected output. If it fails on
that too, the fault is ours: ValueError. If not, what the program printed has brought it about, and the case has failed.
"""

from __future__ import annotations

import asyncio
import json

from algo.reward.code.compare import same
from algo.reward.code.problem import Case, ProgramTests
from algo.reward.code.programs import with_imports
from algo.reward.code.runs import NOT_RUN, Graded, run
from engine.errors import first_error
from engine.ports import GraderUnavailable, ToolRunner
from sandbox.wire import Limits

CHECKER = """
import json, os, sys
request = json.loads(sys.stdin.buffer.read())
channel = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "checker"}
try:
    exec(compile(request["checker"], "checker.py", "exec", 0, True), space)
    right = any(space["check"](request["stdin"], text, request["printed"]) for text in request["expected"])
    verdict = "right" if right else "wrong"
except BaseException as error:
    verdict = " ".join(f"{type(error).__name__}: {error}".split())[:200]
os.write(channel, verdict.encode("utf-8", "replace"))
"""
CHECKER_FAILED = "the checker fails with "


class _Failed(Exception):
    """A case has failed and the others need not run."""


async def grade_program(
    program: str, tests: ProgramTests, runner: ToolRunner, limits: Limits, *, stop: bool, at_once: int
) -> Graded:
    """Returns how the cases ended. stop: the first failure ends the grading. at_once: the most calls at a time.

    Raises GraderUnavailable, and ValueError naming a case on whose expected output the checker fails.
    """
    verdicts: list[tuple[str, str]] = [("failed", NOT_RUN)] * len(tests.cases)
    slots = asyncio.Semaphore(at_once)

    async def grade(number: int, case: Case) -> None:
        async with slots:
            reason = await _complaint(program, case, tests, runner, limits)
        verdicts[number] = ("failed", reason) if reason else ("passed", "")
        if reason and stop:
            raise _Failed

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, case in enumerate(tests.cases):
                tasks.create_task(grade(number, case), name=f"case-{number}")
    except BaseExceptionGroup as errors:
        _, others = errors.split(_Failed)
        if others is not None:  # also beside a failure: it may be a fault of ours
            raise first_error(others) from errors
    return Graded.of(verdicts, len(tests.cases))


async def _complaint(program: str, case: Case, tests: ProgramTests, runner: ToolRunner, limits: Limits) -> str:
    """Returns why a case has failed, "" if it passed."""
    result = await run(runner, program, case.stdin, limits)
    if result.outcome != "ok" or result.truncated:
        ended = "output" if result.outcome == "ok" else result.outcome
        last = result.stderr.strip().rpartition("\n")[2]
        if not last and result.exit_code:
            last = f"exit code {result.exit_code}"
        return f"{ended}: {last}"[:200] if last else ended
    if tests.checker:
        verdict = await _checked(case, result.stdout, tests.checker, runner, limits)
        if verdict not in VERDICTS:
            own = await _checked(case, case.expected[0], tests.checker, runner, limits)
            if own not in VERDICTS:
                raise ValueError(f"{CHECKER_FAILED}{own} on the expected output of the input {case.stdin!r:.80}")
            return f"{CHECKER_FAILED}{verdict} on {result.stdout[:80]!r}"
        right = verdict == "right"
    else:
        right = await asyncio.to_thread(_any, result.stdout, case, tests)  # an output may have a MiB
    return "" if right else f"printed {result.stdout[:80]!r}, not {case.expected[0][:80]!r}"


def _any(printed: str, case: Case, tests: ProgramTests) -> bool:
    return any(same(printed, expected, tests.rule, tests.tolerance) for expected in case.expected)


VERDICTS = ("right", "wrong")


async def _checked(case: Case, printed: str, checker: str, runner: ToolRunner, limits: Limits) -> str:
    """Returns the checker's verdict, or how it failed."""
    request = {"checker": checker, "stdin": case.stdin, "expected": case.expected, "printed": printed}
    result = await run(runner, with_imports(CHECKER, checker), json.dumps(request), limits)
    if result.outcome == "timeout" and result.cpu_s < limits.cpu_s / 2:
        raise GraderUnavailable(f"the checker got only {result.cpu_s:.1f} s of CPU in {result.wall_s:.1f} s")
    return result.stdout if result.outcome == "ok" and result.stdout else f"outcome {result.outcome!r}"
