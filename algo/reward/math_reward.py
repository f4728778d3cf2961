r"""The reward for mathematics: 1 when the boxed answer equals the reference, else 0.

Invariants
- Only the boxed answer counts, and it must give one answer: `12 or 13` is wrong for 13, and so is an answer that takes
  itself back. Numbers are compared exactly, without a tolerance.
- A text is read as a person reads it: `algo.reward.maths.reading` drops what makes no difference, and
  `algo.reward.maths.compare` decides which units, bases and words agree.
- Model output is never evaluated here. What needs mathematics is decided in the sandbox; numbers, words and equal texts
  are not sent there.
- A truncated rollout gets 0, and so does one without an answer. One that could not be graded gets no reward but raises
  GraderUnavailable (`algo.reward.maths.grader` lists the causes).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from algo.reward.answers import boxed_answer, final_turn
from algo.reward.maths.compare import Question, compare
from algo.reward.maths.grader import GRADER_LIMITS, LONGEST_ANSWER, MAIN, Judge, MathGrader
from algo.reward.maths.number import number_of
from algo.reward.maths.reading import read
from engine.ports import ToolRunner
from engine.types import StopReason, Trajectory
from sandbox.require import one_of, require
from sandbox.wire import Limits

log = logging.getLogger(__name__)

# After so many first trajectories without an answer, the recipe is suspected: it may not ask for tags.
SUSPICIOUS = 16


class MathReward:
    r"""Grades a trajectory against `prompt.answer`.

    The answer is what the last turn has as `<answer>\boxed{...}</answer>`. The system message or the question has to
    ask for that form; if the first SUSPICIOUS trajectories have no answer, that is logged.

    integers_only: the answer must be written as an integer, as the reference is (`13.0` is wrong for 13).
    percent_is_optional: a percent sign that only one of answer and reference has may have been left out by the other:
    25 is right for 25 %, and the reverse (MATH's references have the sign at random). By default 5 % is 0.05, not 5.
    runner: a sandbox with GRADER_MODULES, where answers other than numbers are compared as mathematics. Without one
    such an answer is right only if it is the same text, apart from its look.
    judge: "math-verify" lets Math-Verify alone decide, in the sandbox, for figures that are comparable with others'. It
    accepts more wrong answers (algo/README.md has a table).
    grader: the part that uses the runner; its `counts` tell how the gradings in the sandbox ended.
    """

    def __init__(
        self,
        *,
        integers_only: bool = False,
        percent_is_optional: bool = False,
        runner: ToolRunner | None = None,
        limits: Limits = GRADER_LIMITS,
        judge: Judge = "strict",
    ) -> None:
        require("MathReward.judge", judge, one_of(*MAIN))
        if judge == "math-verify" and runner is None:
            raise ValueError("MathReward with judge 'math-verify' needs a runner. Fix: give it the sandbox")
        if judge == "math-verify" and percent_is_optional:
            raise ValueError("MathReward.percent_is_optional must be False with judge 'math-verify', got True")
        if integers_only and runner is not None:
            raise ValueError("MathReward with integers_only compares texts: it takes no runner")
        if integers_only and percent_is_optional:
            raise ValueError("MathReward with integers_only knows no percentages: percent_is_optional must be False")
        self.integers_only = integers_only
        self.percent_is_optional = percent_is_optional
        self.judge = judge
        self._unanswered: int | None = 0  # None: an answer was seen, or the warning was given
        self.grader = None if runner is None else MathGrader(runner, limits, judge)

    async def __call__(self, trajectory: Trajectory) -> float:
        """Returns 1.0 or 0.0. Raises GraderUnavailable."""
        self._look_for_answers(trajectory)
        if trajectory.stop is not StopReason.ANSWER or any(turn.truncated for turn in trajectory.turns):
            return 0.0
        answer, reference = boxed_answer(final_turn(trajectory)), trajectory.prompt.answer
        if answer is None:
            return 0.0
        for verdict in self._verdicts(answer, reference):
            if isinstance(verdict, Question):
                verdict = self.grader is not None and await self.grader.equal(verdict.answer, verdict.reference)
            if verdict:
                return 1.0
        return 0.0

    def _look_for_answers(self, trajectory: Trajectory) -> None:
        """Warns once if no trajectory has an answer."""
        if self._unanswered is None:
            return
        answered = boxed_answer(final_turn(trajectory)) is not None
        self._unanswered = None if answered else self._unanswered + 1
        if self._unanswered == SUSPICIOUS:
            self._unanswered = None
            log.warning(
                "none of the first %d trajectories has an answer, so each has reward 0: MathReward reads the "
                r"<answer>\boxed{...}</answer> of the last turn. Fix: ask for it in the system message or the "
                "question, unless max_tokens or max_turns cut them off",
                SUSPICIOUS,
            )

    def equal(self, answer: str, reference: str) -> bool | None:
        """Returns whether the content of a box equals the reference, as far as the texts tell; None: ask the grader."""
        verdicts = list(self._verdicts(answer, reference))
        if True in verdicts:
            return True
        return None if self.grader and any(isinstance(verdict, Question) for verdict in verdicts) else False

    def _verdicts(self, answer: str, reference: str) -> Iterator[bool | Question]:
        """Yields verdicts of which one has to be right."""
        if self.judge == "math-verify":
            yield Question(answer=answer, reference=reference)
        elif len(answer) > LONGEST_ANSWER:
            yield same_digits(answer, reference)
        elif self.integers_only and not (is_integer(answer) and is_integer(reference)):
            yield False
        else:
            yield compare(answer, reference)
            if self.percent_is_optional:
                yield compare(answer, reference, ignoring_percent=True)


def same_digits(answer: str, reference: str) -> bool:
    """Returns whether two texts are the same plain number. Nothing else is compared of a text that is too long."""
    number, expected = number_of(answer), number_of(reference)
    return number is not None and expected is not None and number.equals(expected)


def is_integer(text: str) -> bool:
    """Returns whether a text writes an integer with its digits, in base ten."""
    reading = read(text)
    return reading.base is None and reading.number is not None and reading.number.integer
