"""Families of reasoning-gym as sources of prompts, graded by their own verifiers.

    pip install reasoning-gym

    prompts = mixture({Family("chain_sum", seed=0): 2, Family("basic_arithmetic", seed=0): 1})
    reward = FamilyReward()

A family makes a problem of its seed and a number, so that a stream has no end and begins anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Self

import msgspec

from algo.reward.answers import answers, boxed_answer, final_turn
from engine.errors import BadInput
from engine.ports import GraderUnavailable
from engine.types import Prompt, Trajectory

REWARD = "reasoning_gym"
ENDLESS = 1 << 31  # a data set must say how many problems it has; each is made when it is asked for


class Family(Iterator[Prompt]):
    """The problems of one family, from number `start` on. options: of the family (`min_terms=2`, say).

    Two streams of one family hold different problems if their seeds differ, or their numbers. suffix: what the question
    ends with, such as how the answer is to be given. Raises BadInput for a family or options that there are not.
    """

    def __init__(self, family: str, *, seed: int = 0, start: int = 0, suffix: str = "", **options: Any) -> None:
        self.name = family
        self._seed = seed
        self._at = start
        self._suffix = suffix
        self._options = options
        self._problems = _problems(family, seed, msgspec.json.encode(options))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        number, self._at = self._at, self._at + 1
        problem = self._problems[number]
        return Prompt(
            id=f"{self.name}-{self._seed}-{number}",
            messages=({"role": "user", "content": problem["question"] + self._suffix},),
            answer=str(problem["answer"]),
            reward=REWARD,
            source=self.name,
            metadata={"family": self.name, "seed": self._seed, "number": number, "options": self._options},
        )

    def skip(self, count: int) -> int:
        """Passes over problems without making them."""
        self._at += count
        return count


class FamilyReward:
    """The family's own score of the answer: from 0 to 1. The answer is what stands in the last box, else between the
    last answer tags.

    deadline_s: verifiers may search; one that takes longer is left to itself, and the trajectory has no grade.
    """

    def __init__(self, *, deadline_s: float = 10.0) -> None:
        self._deadline_s = deadline_s

    async def __call__(self, trajectory: Trajectory) -> float:
        """Raises GraderUnavailable for a verifier that fails, and ValueError for a prompt of no family."""
        about = trajectory.prompt.metadata
        if trajectory.prompt.reward != REWARD or "family" not in about:
            raise ValueError(f"prompt {trajectory.prompt.id} is of no family of reasoning-gym")
        text = trajectory.final_text
        boxed = boxed_answer(final_turn(trajectory))
        tagged = answers(text)
        answer = boxed if boxed is not None else tagged[-1] if tagged else None
        if answer is None:
            return 0.0
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.to_thread(_score, about, answer.strip())
        except TimeoutError as error:
            raise GraderUnavailable(f"{about['family']} gave no score within {self._deadline_s} s") from error


def _score(about: Mapping[str, Any], answer: str) -> float:
    problems = _problems(about["family"], about["seed"], msgspec.json.encode(about["options"]))
    problem = problems[about["number"]]
    try:
        return float(problems.score_answer(answer, problem))
    except Exception as error:
        raise GraderUnavailable(f"{about['family']} #{about['number']}: {type(error).__name__}: {error}") from error


@lru_cache(256)
def _problems(family: str, seed: int, options: bytes) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise BadInput("reasoning-gym is not installed. Fix: pip install reasoning-gym") from error
    try:
        return reasoning_gym.create_dataset(family, size=ENDLESS, seed=seed, **msgspec.json.decode(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise BadInput(f"reasoning-gym: {family!r} with {msgspec.json.decode(options)}: {error}") from error
