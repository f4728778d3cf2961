"""The reward for programs: hidden tests of the prompt grade the program in the last turn, in the sandbox.

Invariants
- A program can neither read nor forge the tests, see `algo.reward.code.function_tests` and `program_tests`.
- A truncated rollout gets 0, and so does one without a program, or with one that exceeds a limit: a policy cannot
  escape its 0 by programs that hang.
- What could not be graded through no fault of the program raises GraderUnavailable and is never a reward of 0: no
  sandbox, a lost call, a machine too busy for the tests, a test that cannot be graded safely or lacks a module, a
  checker that fails on the expected output. Such a problem is named once in the log.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

from algo.reward.code.extract import program_in_answer
from algo.reward.code.function_tests import MOST_ROUNDS, Call, TooManyCalls, grade_functions
from algo.reward.code.problem import FunctionTests, Problem, ProgramTests, Tests, decode_problem
from algo.reward.code.program_tests import CHECKER_FAILED, grade_program
from algo.reward.code.runs import Graded
from engine.ports import Grade, GraderUnavailable, ToolRunner
from engine.types import StopReason, Trajectory
from sandbox.require import at_least, one_of, require
from sandbox.wire import MAX_CODE_BYTES, Limits

log = logging.getLogger(__name__)

# For each test. wall_s is far above cpu_s, so on a busy machine it ends only programs that sleep.
TEST_LIMITS = Limits(cpu_s=4.0, wall_s=12.0, output_bytes=1 << 20, processes=16)
REMEMBERED = 4096  # problems of which the calls of their tests are kept
SUSPICIOUS = 64  # After so many first trajectories without a program, the recipe is suspected not to ask for one.

Score = Literal["all", "share"]


class CodeGrader:
    """Grades programs by tests, many at once over the slots of a sandbox.

    stop: whether the first test that fails ends a grading; the rest then counts as failed. limits: of each test.
    at_once: the most calls of one program at a time. most_rounds: of a grading, see `grade_functions`.

        grader = CodeGrader(sandbox)
        graded = await grader.grade("def add(a, b): return a + b", tests)
        graded.share, graded.details
    """

    def __init__(
        self,
        runner: ToolRunner,
        *,
        limits: Limits = TEST_LIMITS,
        stop: bool = False,
        at_once: int = 8,
        most_rounds: int = MOST_ROUNDS,
    ) -> None:
        require("CodeGrader.at_once", at_once, at_least(1))
        require("CodeGrader.most_rounds", most_rounds, at_least(1))
        self._most_rounds = most_rounds
        self._runner, self._limits, self._stop, self._at_once = runner, limits, stop, at_once
        self._calls: dict[FunctionTests, list[Call]] = {}

    async def grade(self, program: str, tests: Tests) -> Graded:
        """Raises GraderUnavailable, and ValueError for a test that cannot be graded safely."""
        cases = len(tests.tests if isinstance(tests, FunctionTests) else tests.cases)
        try:
            size = len(program.encode())
        except UnicodeEncodeError:
            return Graded.all_failed(cases, "the program has half a surrogate pair")
        if size > MAX_CODE_BYTES // 2:
            return Graded.all_failed(cases, f"the program has {size} bytes")
        if not isinstance(tests, FunctionTests):
            return await grade_program(
                program, tests, self._runner, self._limits, stop=self._stop, at_once=self._at_once
            )
        try:
            return await self._grade_functions(program, tests)
        except TooManyCalls as error:
            # Where a right program made fewer, it is the results of this one that make the tests ask for ever.
            if tests not in self._calls and tests.reference and program != tests.reference:
                await self._grade_functions(tests.reference, tests)
            if tests not in self._calls:
                raise
            return Graded.all_failed(cases, str(error))

    async def _grade_functions(self, program: str, tests: FunctionTests) -> Graded:
        known = self._calls.get(tests, ())
        graded, calls = await grade_functions(
            program,
            tests,
            self._runner,
            self._limits,
            stop=self._stop,
            known=known,
            most_rounds=self._most_rounds,
        )
        if all(graded.passed) and tests not in self._calls:  # of another program's calls some may be its own idea
            if len(self._calls) >= REMEMBERED:
                del self._calls[next(iter(self._calls))]
            self._calls[tests] = calls
        return graded


class CodeReward:
    """Grades a trajectory by the hidden tests of its prompt, whose `answer` is a Problem (`encode_problem`).

    score: "all" is 1.0 if all tests pass, else 0.0, and stops at the first that fails; "share" is the share of tests
    that pass. The grade has that share as the score `tests`; with "all" it counts up to the first failure. Where there
    is a checker, the score `checker_failed` is 1.0 if what the program printed made it fail.
    program: finds the program, by default in the last ```python block of the last turn. The system message or the
    question has to ask for it; if the first SUSPICIOUS trajectories have none, that is logged.
    """

    def __init__(
        self,
        runner: ToolRunner,
        *,
        score: Score = "all",
        program: Callable[[Trajectory], str | None] = program_in_answer,
        limits: Limits = TEST_LIMITS,
        at_once: int = 8,
    ) -> None:
        require("CodeReward.score", score, one_of("all", "share"))
        self.score = score
        self._program = program
        self.grader = CodeGrader(runner, limits=limits, stop=score == "all", at_once=at_once)
        self._problem = functools.lru_cache(64)(decode_problem)
        self._without: int | None = 0  # None: a program was seen, or the warning was given
        self._warned: set[tuple[str, str]] = set()

    async def __call__(self, trajectory: Trajectory) -> Grade:
        """Raises GraderUnavailable."""
        program = self._program(trajectory)
        self._look_for_programs(program)
        truncated = trajectory.stop is not StopReason.ANSWER or any(turn.truncated for turn in trajectory.turns)
        if program is None or truncated:
            return Grade(reward=0.0, scores={"tests": 0.0})
        problem = self._problem(trajectory.prompt.answer)
        try:
            graded = await self.grader.grade(program, problem.hidden)
        except ValueError as error:
            self._warn_once(problem, "is not trained", str(error))
            raise GraderUnavailable(f"{problem.name}: {error}") from error
        reward = float(all(graded.passed)) if self.score == "all" else graded.share
        scores = {"tests": graded.share}
        if isinstance(problem.hidden, ProgramTests) and problem.hidden.checker:
            failures = [detail for detail in graded.details if detail.startswith(CHECKER_FAILED)]
            scores["checker_failed"] = float(bool(failures))
            if failures:
                self._warn_once(problem, "has answers that count as wrong", failures[0])
        return Grade(reward=reward, scores=scores)

    def _warn_once(self, problem: Problem, what: str, reason: str) -> None:
        if (problem.name, what) not in self._warned:
            self._warned.add((problem.name, what))
            log.warning("%s %s: %s", problem.name, what, reason)

    def _look_for_programs(self, program: str | None) -> None:
        """Warns once if no trajectory has a program."""
        if self._without is None:
            return
        self._without = None if program is not None else self._without + 1
        if self._without == SUSPICIOUS:
            self._without = None
            log.warning(
                "none of the first %d trajectories has a program, so each has reward 0: %s "
                "finds none. Fix: ask for a program in the system message or the question, unless limits cut it off",
                SUSPICIOUS,
                getattr(self._program, "__name__", "program"),
            )
