"""Starts replicas and a sandbox without a learner, to evaluate a checkpoint or to filter data with it.

async with serving(config) as served:
    rollouts = served.rollouts([PythonTool(served.sandbox)])
    trajectory = await rollouts.run(prompt, sample=0, group=0)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from engine.assembly.config import ServingConfig
from engine.assembly.parts import Parts, started
from engine.balancing.kv_aware import KvAware
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.telemetry.timeline import Timeline


@asynccontextmanager
async def serving(config: ServingConfig, *, chat: ChatTemplate | None = None) -> AsyncIterator[Parts]:
    """Starts the sandbox and all replicas. chat: replaces that of the checkpoint, which then needs no tokenizer.

    Raises TemplateError, SandboxUnavailable or ReplicaDied when a part cannot start.
    """
    timeline, settings = Timeline(), config.replicas_config
    fleet = Fleet(
        FleetConfig(replicas=config.replicas, block_size=settings.block_size),
        partial(Replica, settings),
        KvAware(config.rollout.max_tokens, moves=0),
        timeline,
    )
    async with started(
        rollout=config.rollout,
        seed=config.seed,
        chat=chat or ChatTemplate.load(config.checkpoint, config.chat),
        fleet=fleet,
        timeline=timeline,
        sandbox=config.sandbox,
    ) as parts:
        yield parts
