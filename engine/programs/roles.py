"""The roles of a machine in a run of several (`engine.assembly.training.Role`): the lead, and a rollout node.

All of them run the same recipe file with the same options, since its tools and rewards are Python code. The lead's
groups are made by whichever machine has room. On a node, the recipe's rollouts and reward make the groups that the lead
grants, and its other stages are never run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs

from engine.assembly.config import TrainingConfig
from engine.assembly.devices import DevicePlan
from engine.assembly.training import Training, opened
from engine.console.notes import Notes, say
from engine.errors import BadInput
from engine.learner.process import LearnerProcessConfig
from engine.nodes.config import LeadConfig, NodeConfig, launcher
from engine.nodes.door import Door
from engine.nodes.lead import Lead
from engine.nodes.lead_protocol import overlap
from engine.nodes.ledger import SILENT_BEATS
from engine.nodes.messages import Ask, Build, Job
from engine.nodes.node import BEAT_S, RolloutNode, ask
from engine.programs.drain import Drain
from engine.run.run_folder import RunFolder
from engine.stages.group import GroupMaker, MakeGroup
from engine.telemetry.gpus import gpu_ids
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights
from sandbox.keys import HostKeys


class RunEnded(Exception):
    """Ends the recipe on a node: the lead has said that the run has ended."""


@dataclass(kw_only=True)
class Leads:
    """The role of the lead: it has the learner, and rollout nodes and its own replicas make the groups."""

    config: LeadConfig
    door: Door
    say: Callable[[str], None]
    lead: Lead = field(init=False)
    """Set while the parts are up."""

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        learner = self.config.learner
        if learner is None:
            return config
        others = learner.hosts - 1
        self.say(f"waiting for the learner's ranks of {others} other host{'s' * (others > 1)}")
        return replace(config, launcher=launcher(learner))

    @asynccontextmanager
    async def beside(self, job: Training) -> AsyncIterator[None]:
        staleness = job.leases.max_staleness
        self.lead = Lead(
            self.config,
            self.door,
            folder=job.workspace,
            journal=job.journal,
            group_tokens=job.config.group.started * job.config.rollout.max_tokens,
            min_version=lambda lease: max(0, job.leases.step_of(lease) - staleness),
            kv_tokens=lambda: job.fleet.kv_tokens,
            version=lambda: job.fleet.version,
            rolling=staleness > 0,
            timeline=job.timeline,
            note=job.note,
            recording=job.recording,
        )
        async with self.lead:
            assert job.fleet.weights is not None
            self.lead.publish(job.fleet.weights)
            self.lead.beat_here()
            self.say(f"rollout nodes may join at {self.config.listen}")
            yield

    def groups(self, here: GroupMaker) -> MakeGroup:
        self.lead.make_here_with(here)
        return self.lead.make_group

    def published(self, weights: PublishedWeights) -> None:
        self.lead.publish(weights)

    def trained(self) -> Mapping[str, float]:
        self.lead.beat_here()  # its weights are live
        return self.lead.metrics()

    def tokens(self) -> int:
        return self.lead.protocol.tokens

    async def ended(self) -> None:
        await self.lead.bye()


def check_devices(lead: LeadConfig, devices: DevicePlan) -> None:
    """Raises BadInput for weights that nodes, or the learner's other hosts, cannot get."""
    if devices.adapters:
        raise BadInput("nodes cannot be used with adapters yet. Fix: adapters=false, and nodes_deltas=true")
    if lead.learner is not None and devices.devices:
        raise BadInput("learner_hosts must be 1 with devices: weights of GPUs are not gathered over hosts yet")


@asynccontextmanager
async def lead_training(
    lead: LeadConfig, config: TrainingConfig, run: RunFolder, **options: Any
) -> AsyncIterator[Training]:
    """Opens a run as its lead (`engine.recipe.Run.opens`).

    Raises BadInput for ranks of the learner's hosts that do not suit its options, ListenFailed, KeysUnusable, and what
    `training` raises.
    """
    check_devices(lead, config.devices)
    config.check_ranks(hosts=1 if lead.learner is None else lead.learner.hosts)
    config = replace(config, devices=replace(config.devices, files=True))
    lead = replace(with_learner(lead, config, run), gpus=tuple(gpu_ids(config.devices.devices)))
    console = options["console"]
    note = Notes(run=run, console=console, timeline=Timeline())
    door = Door(lead, checkpoint=config.checkpoint, note=note)
    role = Leads(config=lead, door=door, say=partial(say, console))
    async with door, opened(config, run, **options, note=note, role=role) as job:
        yield job


def with_learner(lead: LeadConfig, config: TrainingConfig, run: RunFolder) -> LeadConfig:
    """Adds what the run knows of the learner's hosts to what the command line says."""
    if lead.learner is None:
        return lead
    ranks, module = config.devices.learner_ranks, config.learner_module
    return replace(lead, learner=structs.replace(lead.learner, ranks=ranks, module=module, run=run.id))


@asynccontextmanager
async def node_training(
    node: NodeConfig,
    keys: HostKeys | None,
    build: Build,
    drain: Drain,
    config: TrainingConfig,
    run: RunFolder,
    **options: Any,
) -> AsyncIterator[Training]:
    """Opens a run as a rollout node (`engine.recipe.Run.opens`): its replicas make the groups that the lead grants.

    Raises BadInput for GPUs that the lead or another node has, and what `opened` raises.
    """
    config = replace(config, devices=config.devices.without_learner)
    gpus = gpu_ids(config.devices.devices)
    await check_gpus(node, keys, gpus)

    async def work(job: Training) -> dict[str, Any]:
        """Makes groups. Raises RunEnded at the run's end, NodeRefused, or LeadGone."""
        if job.maker is None:
            raise BadInput("a recipe without a stage that makes groups has nothing to do on a rollout node")
        makes_groups = RolloutNode(
            node,
            keys,
            build=build,
            fleet=job.fleet,
            maker=job.maker,
            folder=job.workspace,
            tokens_sampled=job.tokens_sampled,
            note=partial(say, job.console),
            timeline=job.timeline if job.config.record.on else None,
            gpus=gpus,
        )
        drain.node = makes_groups
        await makes_groups.run()
        raise RunEnded

    async with opened(config, run, **{**options, "sinks": ()}, work=work) as job:
        yield job


async def check_gpus(node: NodeConfig, keys: HostKeys | None, gpus: Sequence[str]) -> None:
    """Raises BadInput if the lead says that these GPUs are taken, before engines are started on them.

    One that began again at once waits until the lead has noticed that its predecessor is dead.
    """
    reason: str | None = None
    for _ in range(SILENT_BEATS + 1 if gpus else 0):
        answer = await ask(node, keys, Ask())
        reason = overlap(gpus, answer.taken) if isinstance(answer, Job) else None
        if reason is None:
            return
        await asyncio.sleep(BEAT_S)
    if reason is not None:
        raise BadInput(f"this node cannot take part: {reason}")
