"""What a user brings, as Protocols: tools, runners, rewards, selectors. Anything of the right shape fits; nothing is
inherited.

The small ones show an implementation of at most 20 lines; `tests/contracts/` holds a check per Protocol that a user
can run on an implementation of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from engine.types import Prompt, Trajectory
from sandbox.wire import Limits, Outcome, ToolResult

if TYPE_CHECKING:
    from engine.rollout.rollout import Tally
    from engine.run.journal import Log

OUTCOMES = (*get_args(Outcome), "malformed")  # of a ToolReply


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """What a tool answers: an outcome (one of OUTCOMES) and the text that the model reads.

    executed: something was run for it (not: refused for its form). jailed: in an isolated process.
    """

    outcome: str
    text: str
    executed: bool = True
    jailed: bool = False

    def __post_init__(self) -> None:  # Validate early: an unknown outcome would be scored as the model's error.
        if self.outcome not in OUTCOMES or not isinstance(self.text, str):
            raise ValueError(f"ToolReply: outcome in {OUTCOMES}, text a string; got {self.outcome!r} and {self.text!r}")


class Tool(Protocol):
    """A function that the model can call by name.

    class Clock:
        name = "clock"
        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="12:00")

    It may have a `description` and `parameters`, a JSON schema of the arguments: what the chat template shows the model
    of it. `engine.rollout.python_tool.schema` says what is shown in their absence.
    """

    name: str

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Never raises for what the arguments say: a wrong argument is an outcome "error" with a text for the model.

        The model gets the text whole: it is the tool that keeps it short (`engine.rollout.python_tool.clip`).
        """
        ...


class StatefulTool(Protocol):
    """A tool that gives each trajectory one of its own, with a state of its own.

    class Steps:  # counts the calls of a trajectory
        name = "step"
        @asynccontextmanager
        async def open(self):
            yield Step()
    class Step:
        name, count = "step", 0
        async def __call__(self, arguments):
            self.count += 1
            return ToolReply(outcome="ok", text=str(self.count))

    `description` and `parameters` may stand here as in a `Tool`.
    """

    name: str

    def open(self) -> AbstractAsyncContextManager[Tool]:
        """Entered when a trajectory begins, left when it has ended or was cancelled, not when it changes replicas.

        Trajectories that never call enter it too, so a costly start belongs into the first call. Leaving must end by
        itself: the trajectory's deadline does not cover it. Calls of one turn start in their order and may overlap.
        """
        ...


class ToolRunner(Protocol):
    """Runs Python in isolation, each call by itself; `sandbox.Sandbox` is one."""

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        """display: code without output shows its last expression in `ToolResult.display`."""
        ...


class Session(Protocol):
    """Runs Python cells that share their variables, one after the other in the order of the calls."""

    async def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> ToolResult:
        """`ToolResult.session_state` says whether the variables are there."""
        ...


class SessionRunner(Protocol):
    """Opens sessions; `sandbox.Sandbox` is one."""

    def session(self) -> AbstractAsyncContextManager[Session]: ...


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
        """So far, whatever became of them."""
        ...

    async def run(
        self, prompt: Prompt, sample: int, group: int, *, tally: Tally | None = None, log: Log | None = None
    ) -> Trajectory:
        """One trajectory. Never raises for what the model, a tool or a replica did; its error says it. Cancelled, it
        leaves nothing behind.

        group: that of trajectories which begin with the same prompt. tally: counts sampled tokens as they come. log:
        what a journal holds of it.
        """
        ...


class Reward(Protocol):
    """Grades a finished trajectory.

    class Short:  # prefers short answers
        async def __call__(self, trajectory):
            return 1.0 if trajectory.sampled_tokens < 64 else 0.0
    """

    async def __call__(self, trajectory: Trajectory) -> float:
        """A finite number; above 0 the answer counts as correct (in accuracies, and for RoC). Raises GraderUnavailable
        when it could not grade: that is never a reward of 0.
        """
        ...


class GraderUnavailable(RuntimeError):
    """The grader could not run (not: the answer is wrong)."""


class Selector(Protocol):
    """Chooses which trajectories of a graded group are trained (RoC, all of them, a random subset).

    class First:
        def __call__(self, trajectories, rng):
            return list(range(len(trajectories) // 2))
    """

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        """Indices to keep, ascending. Pure given rng."""
        ...
