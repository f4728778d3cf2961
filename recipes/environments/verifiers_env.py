"""Environments of `verifiers` (version 1) as sources of prompts, rollouts and rewards.

    pip install verifiers

    environment = VerifiersEnvironment(load_environment({"taskset": {"id": "my-taskset"}}))
    async with environment.serving():
        rollouts = await job.agents(environment.play)
        groups = job.group(rollouts, EpisodeReward(), select)
        await job.run([job.admit(environment.prompts()), groups, ...])

The environment plays each episode itself, with its own harness and in its own runtime; its model is the endpoint of the
rollout, so that what is trained are the exact tokens. Its own rewards are the reward.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from engine.errors import BadInput
from engine.gateway.agent import AgentFailed, Endpoint
from engine.ports import Grade, GraderUnavailable
from engine.types import Prompt, Trajectory

REWARD = "verifiers"
NO_KEY = "ROCSTAR_VERIFIERS_KEY"  # the URL names the session, and verifiers wants a key to be in some variable


def verifiers() -> Any:
    """Imports the package. Raises BadInput where it is not installed."""
    try:
        import verifiers.v1
    except ImportError as error:
        raise BadInput(f"verifiers version 1 is not installed ({error}). Fix: pip install verifiers") from error
    return verifiers.v1


def load_environment(config: Mapping[str, Any]) -> Any:
    """Loads the environment that a configuration names, such as {"id": "best-of-n", "taskset": {"id": "gsm8k-v1"}}.

    Raises BadInput when there is no such.
    """
    verifiers()
    from verifiers.v1.utils import loaders

    try:
        return loaders.load_environment(loaders.resolve_env_config(dict(config)))
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        raise BadInput(f"verifiers: {' '.join(str(error).split())}") from error


class VerifiersEnvironment:
    """env: a `verifiers.v1.Env`."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.name = env.config.env_id
        self.tasks: Sequence[Any] = list(env.taskset)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Holds what the environment shares among its episodes."""
        os.environ.setdefault(NO_KEY, "none")
        async with self._env.serving():
            yield

    def prompts(self) -> Tasks:
        """Its tasks, epoch after epoch."""
        return Tasks(self.name, self.tasks)

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> str:
        """Is an agent (`engine.gateway.agent`): plays one episode and answers with its reward, for `EpisodeReward`.

        Raises AgentFailed for an episode that failed.
        """
        v1 = verifiers()
        client = v1.EvalClientConfig(base_url=endpoint.openai_url, api_key_var=NO_KEY)
        context = v1.ModelContext(model=endpoint.model, client=client)
        episode = await self._env.run_episode(self.tasks[prompt.metadata["task"]], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise AgentFailed(f"{self.name}: {errors[0].type}: {' '.join(errors[0].message.split())}")
        trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        scores = {
            name: reward.value for trace in trained for name, reward in trace.rewards.items() if reward is not None
        }
        total = sum(trace.reward for trace in trained) / max(1, len(trained))
        return json.dumps({"reward": total, "scores": scores})


class Tasks(Iterator[Prompt]):
    """A stream of prompts, of which the environment makes its own."""

    def __init__(self, name: str, tasks: Sequence[Any]) -> None:
        if not tasks:
            raise BadInput(f"verifiers: {name} has no tasks")
        self.name = name
        self._tasks = tasks
        self._at = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        epoch, task = divmod(self._at, len(self._tasks))
        self._at += 1
        asked = self._tasks[task].data.prompt
        return Prompt(
            id=f"{self.name}-{task}" if epoch == 0 else f"{self.name}-{task}#{epoch + 1}",
            messages=({"role": "user", "content": asked if isinstance(asked, str) else ""},),
            answer="",
            reward=REWARD,
            source=self.name,
            metadata={"task": task},
        )

    def skip(self, count: int) -> int:
        self._at += count
        return count


class EpisodeReward:
    """The reward that the environment gave, with its parts as scores."""

    async def __call__(self, trajectory: Trajectory) -> Grade:
        """Raises GraderUnavailable for an episode that gave none, such as one that ended at its deadline."""
        if trajectory.answer is None:
            raise GraderUnavailable("the episode ended without a reward")
        return Grade(**json.loads(trajectory.answer))
