"""The reward for mathematics: 1 when the boxed answer equals the reference, else 0.

Invariants
- Strict: numbers are compared exactly (no tolerance; 5 % is 0.05, and 5 only with `percent_is_optional`), only the
  boxed answer counts, and it gives one answer: `12 or 13` is wrong for 13, and so is what takes an answer back.
- As a person reads it: `algo.reward.math_text` says what makes no difference, `algo.reward.math_compare` which units,
  bases and words agree.
- Model output is never evaluated here: what needs mathematics is decided in the sandbox; numbers, words and equal texts
  are not sent there.
- A truncated rollout gets 0; a rollout without an answer gets 0; one that could not be graded gets no reward at all but
  GraderUnavailable (`algo.reward.grade_math` says when that is).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from algo.reward.answers import boxed_answer
from algo.reward.grade_math import GRADER_LIMITS, LONGEST_ANSWER, MathGrader
from algo.reward.math_compare import Question, compare
from algo.reward.math_text import number_of, read
from engine.ports import ToolRunner
from engine.types import StopReason, Trajectory
from sandbox.wire import Limits

log = logging.getLogger(__name__)

# Trajectories without an answer, from the first one on, after which the recipe is suspected: it may not ask for tags.
SUSPICIOUS = 16


class MathReward:
    r"""Grades a trajectory against `prompt.answer`. Its answer is what its last turn has as
    `<answer>\boxed{...}</answer>`, which the system message or the question has to ask for; where the first SUSPICIOUS
    trajectories have none, that is logged.

    integers_only: the answer must be written as an integer, as the reference is (`13.0` is wrong for 13).
    percent_is_optional: a percent sign that only one of answer and reference has may have been left out by the other:
    25 is right for 25 %, and the reverse (MATH's references have the sign at random).
    runner: a sandbox with GRADER_MODULES, where answers that are no numbers are compared as mathematics. Without one
    such an answer is right only when it is the same text, look aside.
    grader: what uses the runner; its `counts` say how the gradings in the sandbox ended.
    """

    def __init__(
        self,
        *,
        integers_only: bool = False,
        percent_is_optional: bool = False,
        runner: ToolRunner | None = None,
        limits: Limits = GRADER_LIMITS,
    ) -> None:
        if integers_only and runner is not None:
            raise ValueError("MathReward with integers_only compares texts: it takes no runner")
        if integers_only and percent_is_optional:
            raise ValueError("MathReward with integers_only knows no percentages: percent_is_optional must be False")
        self.integers_only = integers_only
        self.percent_is_optional = percent_is_optional
        self._unanswered: int | None = 0  # None: an answer was seen, or it was said that there is none
        self.grader = None if runner is None else MathGrader(runner, limits)

    async def __call__(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Raises GraderUnavailable."""
        self._look_for_answers(trajectory)
        if trajectory.stop is not StopReason.ANSWER or any(turn.truncated for turn in trajectory.turns):
            return 0.0
        answer, reference = boxed_answer(trajectory.final_text), trajectory.prompt.answer
        if answer is None:
            return 0.0
        for verdict in self._verdicts(answer, reference):
            if isinstance(verdict, Question):
                verdict = self.grader is not None and await self.grader.equal(verdict.answer, verdict.reference)
            if verdict:
                return 1.0
        return 0.0

    def _look_for_answers(self, trajectory: Trajectory) -> None:
        """Says once that no trajectory has an answer."""
        if self._unanswered is None:
            return
        answered = boxed_answer(trajectory.final_text) is not None
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
        """Whether the content of a box equals the reference, as far as the texts tell; None: ask the grader."""
        verdicts = list(self._verdicts(answer, reference))
        if True in verdicts:
            return True
        return None if self.grader and any(isinstance(verdict, Question) for verdict in verdicts) else False

    def _verdicts(self, answer: str, reference: str) -> Iterator[bool | Question]:
        """Of which one has to be right."""
        if len(answer) > LONGEST_ANSWER:
            yield same_digits(answer, reference)
        elif self.integers_only and not (is_integer(answer) and is_integer(reference)):
            yield False
        else:
            yield compare(answer, reference)
            if self.percent_is_optional:
                yield compare(answer, reference, ignoring_percent=True)


def same_digits(answer: str, reference: str) -> bool:
    """Of texts that are too long for more: whether they are the same number, written plainly."""
    number, expected = number_of(answer), number_of(reference)
    return number is not None and expected is not None and number.equals(expected)


def is_integer(text: str) -> bool:
    """Whether a text writes an integer with its digits, in base ten."""
    reading = read(text)
    return reading.base is None and reading.number is not None and reading.number.integer
