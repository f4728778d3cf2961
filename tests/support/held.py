"""Stands for `Rollouts`: every rollout samples, ends and fails when the test says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine.rollout.rollout import Tally
from engine.run.journal import Log
from engine.types import Boundary, Prompt, RolloutError, Trajectory
from tests.support.fakes import a_trajectory


class Held:
    """A rollout under way. `end` gives it the reward that `reward` will find."""

    def __init__(self, prompt: Prompt, sample: int, group: int, tally: Tally, version: int) -> None:
        self.prompt, self.sample, self.group, self.tally, self.version = prompt, sample, group, tally, version
        self.lost = 0  # of the tally's tokens, those that were sampled anew
        self.future: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()

    def say(self, tokens: int) -> None:
        self.tally.tokens += tokens

    def lose(self) -> None:
        """All tokens so far are discarded, and the rollout begins again."""
        self.lost = self.tally.tokens

    def end(self, reward: float | None = 1.0) -> None:
        """reward None: it fails."""
        error = None if reward is not None else RolloutError(boundary=Boundary.SANDBOX, message="lost")
        sampled = self.tally.tokens - self.lost
        found = a_trajectory(self.sample, prompt=self.prompt, sampled=sampled, version=self.version, error=error)
        turns = found.turns if sampled else ()
        self.future.set_result(replace(found, turns=turns, text=str(reward)))


class HeldRollouts:
    """held: the rollouts under way, in the order of their starts."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.started: list[Held] = []
        self.cancelled: list[Held] = []
        self.version = 0

    async def run(self, prompt: Prompt, sample: int, group: int, *, tally: Tally, log: Log) -> Trajectory:
        rollout = Held(prompt, sample, group, tally, self.version)
        self.started.append(rollout)
        self.held.append(rollout)
        try:
            return await rollout.future
        except asyncio.CancelledError:
            self.cancelled.append(rollout)
            raise
        finally:
            self.held.remove(rollout)

    @property
    def tokens_sampled(self) -> int:
        return sum(rollout.tally.tokens for rollout in self.started)


async def reward(trajectory: Trajectory) -> float:
    """What the test gave `Held.end`."""
    return float(trajectory.text)
