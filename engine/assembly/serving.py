"""Replicas and a sandbox without a learner: to evaluate a checkpoint, or to filter data with it.

    async with serving(config) as served:
        rollouts = served.rollouts([PythonTool(served.sandbox)])
        trajectory = await rollouts.run(prompt, sample=0, group=0)

Invariant: all parts end on the way out, the last one first, however it is left.
"""

from __future__ import annotations

from engine.process import streams

streams.prepare_descriptors()  # before other imports open files

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from engine.replica.config import ReplicaConfig, prepare_environment

prepare_environment()

from engine.assembly.wiring import check_tools
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.ports import StatefulTool, Tool
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.telemetry.timeline import Timeline
from sandbox import Sandbox, SandboxConfig

BLOCK = 32  # tokens beyond a trajectory's budget that a replica has room for


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """What is served, where, and for trajectories of which size."""

    checkpoint: Path
    """Hugging Face folder."""
    rollout: RolloutConfig
    """The largest budget of those that are used."""
    replica: ReplicaConfig | None = None
    """None: of the checkpoint, with room for a trajectory of the budget."""
    replicas: int = 2
    devices: tuple[int, ...] = ()
    """GPUs, `tensor_parallel` for each replica; none for the CPU."""
    tensor_parallel: int = 1
    chat: ChatConfig = field(default_factory=ChatConfig)
    sandbox: SandboxConfig | None = None
    """None: no sandbox."""
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(
                f"checkpoint: no config.json in {str(self.checkpoint)!r}, and nothing is downloaded from a hub. "
                "Fix: give a Hugging Face folder"
            )
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        needed = self.replicas * self.tensor_parallel
        if self.devices and len(self.devices) != needed:
            example = ",".join(map(str, range(needed)))
            raise ValueError(
                f"devices must be {needed} GPUs for replicas={self.replicas} and "
                f"tensor_parallel={self.tensor_parallel}, got {len(self.devices)}. Fix: devices={example}"
            )
        self.replicas_config  # noqa: B018  its own checks, before anything starts

    @property
    def replicas_config(self) -> ReplicaConfig:
        """On GPUs the replicas compute in bfloat16, as they do beside a learner."""
        room = self.rollout.max_tokens + BLOCK
        config = self.replica or ReplicaConfig(checkpoint=str(self.checkpoint), max_model_len=room)
        return replace(
            config,
            devices=self.devices,
            tensor_parallel=self.tensor_parallel,
            dtype="bfloat16" if self.devices else config.dtype,
        )


class Serving:
    """The parts, as plain attributes. Made by `serving`."""

    def __init__(
        self, config: ServingConfig, fleet: Fleet, chat: ChatTemplate, timeline: Timeline, sandbox: Sandbox | None
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.chat = chat
        self.timeline = timeline
        self._sandbox = sandbox

    @property
    def sandbox(self) -> Sandbox:
        """Raises ValueError where the configuration has none."""
        if self._sandbox is None:
            raise ValueError("ServingConfig.sandbox must be set for a sandbox, got None")
        return self._sandbox

    def rollouts(self, tools: Sequence[Tool | StatefulTool]) -> Rollouts:
        """Trajectories on these replicas, with these tools; `Rollouts.with_config` gives them another budget."""
        check_tools(tools)
        return Rollouts(self.config.rollout, self.chat, self.fleet, tools, self.timeline, self.config.seed)


@asynccontextmanager
async def serving(config: ServingConfig, *, chat: ChatTemplate | None = None) -> AsyncIterator[Serving]:
    """Starts the sandbox and all replicas. chat: in place of the checkpoint's, which then needs no tokenizer.

    Raises TemplateError, SandboxUnavailable or ReplicaDied when a part cannot start.
    """
    timeline = Timeline()
    settings = config.replicas_config
    async with AsyncExitStack() as stack:
        chat = chat or ChatTemplate.load(config.checkpoint, config.chat)
        sandbox = None
        if config.sandbox is not None:
            sandbox = await stack.enter_async_context(Sandbox(config.sandbox))
        fleet = Fleet(
            FleetConfig(replicas=config.replicas, block_size=settings.block_size),
            partial(Replica, settings),
            KvAware(config.rollout.max_tokens, moves=0),
            timeline,
        )
        await stack.enter_async_context(fleet)
        yield Serving(config, fleet, chat, timeline, sandbox)
