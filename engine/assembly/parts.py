"""The parts that make trajectories, with a learner or without: replicas, their chat template and a sandbox.

Invariant: all parts end when `started` is left, however it is left, the last one first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from engine.assembly.wiring import check_tools
from engine.fleet.fleet import Fleet
from engine.ports import StatefulTool, Tool, World
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.telemetry.timeline import Timeline
from sandbox import Sandbox, SandboxConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts that `serving` yields, and that a training run is built on."""

    rollout: RolloutConfig
    """The largest budget of a trajectory."""
    seed: int
    """Seed for sampling."""
    chat: ChatTemplate
    fleet: Fleet
    timeline: Timeline
    sandbox_if_any: Sandbox | None

    @property
    def sandbox(self) -> Sandbox:
        """Returns the sandbox. Raises ValueError if the configuration has none."""
        if self.sandbox_if_any is None:
            raise ValueError("sandbox must be set in the configuration to run programs, got None")
        return self.sandbox_if_any

    def rollouts(self, tools: Sequence[Tool | StatefulTool | World | Callable[..., Any]]) -> Rollouts:
        """Returns rollouts on the replicas with these tools; `Rollouts.with_config` gives them another budget.

        A typed function is a tool too: the model is shown its name, docstring and parameters. A world gives all of its
        tools.
        """
        check_tools(tools)
        return Rollouts(self.rollout, self.chat, self.fleet, tools, self.timeline, self.seed)


@asynccontextmanager
async def started(
    *,
    rollout: RolloutConfig,
    seed: int,
    chat: ChatTemplate,
    fleet: Fleet,
    timeline: Timeline,
    sandbox: SandboxConfig | None,
    reached: Callable[[str], None] = lambda part: None,
) -> AsyncIterator[Parts]:
    """Starts the sandbox and all replicas. reached: is called with the name of each part once it is up.

    Raises SandboxUnavailable or ReplicaDied when a part cannot start.
    """
    async with AsyncExitStack() as stack:
        box = None if sandbox is None else await stack.enter_async_context(Sandbox(sandbox))
        reached("sandbox")
        await stack.enter_async_context(fleet)
        reached("engines")
        yield Parts(rollout=rollout, seed=seed, chat=chat, fleet=fleet, timeline=timeline, sandbox_if_any=box)
