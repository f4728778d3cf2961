"""The protocol of whatever makes trajectories of prompts: our own loop, or an agent of the user's."""

from __future__ import annotations

from typing import Protocol

from engine.rollout.rollout import Tally
from engine.run.journal import Log
from engine.types import Prompt, Trajectory


class RolloutSource(Protocol):
    """Makes trajectories of prompts: `engine.rollout.rollout.Rollouts`, `engine.gateway.agent.AgentRollouts`.

    class Recorded:  # replays what was rolled out before
        config = RolloutConfig()
        tokens_sampled = 0
        async def run(self, prompt, sample, group, *, tally=None, log=None):
            return self.trajectories[prompt.id][sample]
    """

    @property
    def tokens_sampled(self) -> int:
        """Tokens sampled so far, whatever became of them."""
        ...

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """Returns a trajectory. Never raises for what the model, a tool or a replica did, which the trajectory's error
        tells. Leaves nothing behind when it is cancelled.

        group: shared by the trajectories that begin with the same prompt. tally: counts sampled tokens as they come.
        log: what a journal holds of the trajectory.
        """
        ...
