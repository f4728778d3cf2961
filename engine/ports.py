"""The Protocols of a user's parts: tools, worlds, runners, rewards, selectors. Any object of the right shape fits.

The small ones show an implementation of at most 20 lines; `engine.contracts` has a check per Protocol that you can run
on an implementation of your own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from engine.types import Prompt, Trajectory
from sandbox.wire import Limits, Outcome, ToolResult

OUTCOMES = (*get_args(Outcome), "malformed")  # outcomes of a ToolReply


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolReply:
    """The answer of a tool: an outcome (one of OUTCOMES) and the text that the model reads.

    executed: whether something was run; False if the call was refused for its form. jailed: whether it ran in an
    isolated process. queue_s: seconds before it ran, such as the wait for a slot; None if that is not measured.
    """

    outcome: str
    text: str
    executed: bool = True
    jailed: bool = False
    queue_s: float | None = None

    def __post_init__(self) -> None:  # Validate early: an unknown outcome would be scored as the model's error.
        if self.outcome not in OUTCOMES or not isinstance(self.text, str):
            raise ValueError(f"ToolReply: outcome in {OUTCOMES}, text a string; got {self.outcome!r} and {self.text!r}")


class Tool(Protocol):
    """A function that the model can call by name.

    class Clock:
        name = "clock"
        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="12:00")

    It may have a `description` and `parameters`, a JSON schema of the arguments; the chat template shows both to the
    model. `engine.tools.python_tool.schema` says what is shown without them.
    """

    name: str

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Never raises because of its arguments: a wrong one gives the outcome "error" and a text for the model.

        The model gets the whole text, so the tool must keep it short (`engine.tools.python_tool.clip`).
        """
        ...


class StatefulTool(Protocol):
    """A tool with a state, of which each trajectory opens one of its own.

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
        """Returns a context that is entered when a trajectory begins, and left when it has ended or was cancelled.

        A trajectory that moves to another replica does not leave it. One that never calls the tool enters it too, so a
        costly start belongs in the first call. Leaving must end by itself: the trajectory's deadline does not cover it.
        Calls of one turn start in their order and may overlap.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """What the model is shown of a world's tool. parameters: a JSON schema of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class OpenWorld(Protocol):
    """The world of one trajectory."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Runs one of the world's tools. It never raises because of its arguments.

        Calls of one turn start in their order and may overlap. A call that is cancelled leaves the state as it was.
        """
        ...

    def state(self) -> bytes:
        """Returns the state after the last call that ended, which the reward finds in `Trajectory.states`.

        It has at most 64 MiB (`open_tools.MOST_STATE_BYTES`). Keep it to some hundred KiB, as each trajectory of a
        batch has one and the journal keeps them.
        """
        ...


class World(Protocol):
    """Several tools on one state, of which each trajectory opens one of its own, made for its prompt.

    class Counter:  # begins at a number that the prompt names
        name = "counter"
        tools = (ToolSpec(name="add", description="Adds one.", parameters={"type": "object", "properties": {}}),)
        @asynccontextmanager
        async def open(self, prompt):
            yield Count(int(prompt.metadata["start"]))
    class Count:
        def __init__(self, count):
            self.count = count
        async def call(self, tool, arguments):
            self.count += 1
            return ToolReply(outcome="ok", text=str(self.count))
        def state(self):
            return str(self.count).encode()

    `name` is the key of `Trajectory.states`. After a resume the recorded calls are run again, as those of a
    StatefulTool, and have to answer as they did.
    """

    name: str
    tools: Sequence[ToolSpec]

    def open(self, prompt: Prompt) -> AbstractAsyncContextManager[OpenWorld]:
        """Returns a context that is entered when a trajectory begins, and left when it has ended or was cancelled.

        What `StatefulTool.open` promises holds here too.
        """
        ...


class ToolRunner(Protocol):
    """Runs Python in isolation, each call by itself; `sandbox.Sandbox` is one."""

    async def run(
        self, code: str, stdin: str = "", limits: Limits | None = None, *, display: bool = False
    ) -> ToolResult:
        """Runs a program. display: code without output shows its last expression in `ToolResult.display`."""
        ...


class Session(Protocol):
    """Runs Python cells that share their variables, one after the other in the order of the calls."""

    async def run(self, code: str, stdin: str = "", limits: Limits | None = None) -> ToolResult:
        """Runs a cell. `ToolResult.session_state` says whether the variables are still there."""
        ...


class SessionRunner(Protocol):
    """Opens sessions; `sandbox.Sandbox` is one."""

    def session(self) -> AbstractAsyncContextManager[Session]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """A reward and, by name, the scores that it is made of (`Trajectory.scores`); None: a score could not be computed.

    >>> Grade(reward=0.8, scores={"correct": 1.0, "style": -0.2, "words": 120.0}).reward
    0.8
    """

    reward: float
    scores: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: float | Grade) -> Grade:
        """Returns the answer of a reward as a grade; a number becomes one without scores."""
        return answer if isinstance(answer, Grade) else cls(reward=float(answer))


class Reward(Protocol):
    """Grades a finished trajectory.

    class Short:  # prefers short answers
        async def __call__(self, trajectory):
            return 1.0 if trajectory.sampled_tokens < 64 else 0.0

    A function is one too, `async def` or `def`; a long computation belongs in a thread (`asyncio.to_thread`).
    """

    async def __call__(self, trajectory: Trajectory) -> float | Grade:
        """Returns a finite number; above 0 the answer counts as correct, in accuracies and for RoC.

        Raises GraderUnavailable when it could not grade, which must never become a reward of 0.
        """
        ...


@runtime_checkable
class GroupReward(Protocol):
    """Grades the finished trajectories of one prompt together: comparisons, tournaments, judges.

    class Shortest:  # the shortest answer of a group is right
        sees_group = True
        async def __call__(self, trajectories):
            lengths = [member.sampled_tokens for member in trajectories]
            return [float(length == min(lengths)) for length in lengths]

    `sees_group` marks it. It is called once a group is complete, without the trajectories that failed.
    """

    sees_group: Literal[True]

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[float | Grade | None]:
        """Returns for each trajectory, in order, what a Reward returns, or None if it could not be graded.

        Raises GraderUnavailable when none of them could.
        """
        ...


class GraderUnavailable(RuntimeError):
    """The grader could not run, which says nothing about the answer."""


class Selector(Protocol):
    """Chooses which trajectories of a graded group are trained (RoC, all of them, a random subset).

    class First:
        def __call__(self, trajectories, rng):
            return list(range(len(trajectories) // 2))

    It may have an `explain`, which is called with the same trajectories and returns names and numbers for each of
    them: why it was chosen or not, for those who look at the run. `probability` is the probability of being kept.
    """

    def __call__(self, trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[int]:
        """Returns the indices to keep, ascending. It must be pure given rng."""
        ...
