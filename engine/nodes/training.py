"""A recipe's run on several machines: what `engine.training.training` opens on the lead, and on a rollout node.

The recipe is the same file with the same options on all of them, since its tools and rewards are Python code. On the
lead its groups are made by whoever has the room; on a node its rollouts and its reward make the groups that the lead
grants, and its other stages are never run.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from msgspec import structs
from rich.console import Console

from engine.balancing.balancer import Balancer
from engine.devices import DevicePlan
from engine.errors import BadInput
from engine.learner.process import LearnerProcessConfig
from engine.nodes.config import LeadConfig, NodeConfig, launcher
from engine.nodes.door import Door
from engine.nodes.lead import Lead
from engine.nodes.messages import Build
from engine.nodes.node import RolloutNode
from engine.pipeline.pipeline import Inbox, Outbox, Stage
from engine.ports import GroupReward, Reward
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.source import RolloutSource
from engine.run.run_folder import RunFolder
from engine.run.workspace import workspace
from engine.stages.group import MakesGroups, groups
from engine.telemetry.sinks import MetricSink
from engine.training import ScheduledEvaluation, Training, TrainingConfig, opened, say
from engine.types import Batch, Group
from sandbox import Sandbox
from sandbox.keys import HostKeys


class RunEnded(Exception):
    """Ends the recipe on a node: the lead has said that the run has ended."""


class LeadTraining(Training):
    """A run whose groups are made by rollout nodes, and by the replicas here."""

    lead: Lead
    lead_config: LeadConfig

    def group(self, rollouts: RolloutSource, reward: Reward | GroupReward, select: Callable[[Group], Group]) -> Stage:
        self._check_group(rollouts, reward, select)
        self.lead.makes_here = _makes(self, rollouts, reward)
        run = groups(
            rollouts,
            reward,
            select,
            self._refills(),
            self.config.group,
            self.timeline,
            self.journal,
            attempt=self.lead.attempt,
        )
        return Stage(name="groups", run=run, workers=self.leases.capacity)

    def train(self, make_batch: Callable[[int, Sequence[Group]], Batch], **options: Any) -> Stage:
        stage = super().train(make_batch, **options)
        assert self._train is not None
        self._train.published = self.lead.publish
        return stage

    async def run(self, stages: Sequence[Stage]) -> dict[str, Any]:
        summary = await super().run(stages)
        await self.lead.bye()
        return summary

    def note(self, line: str) -> None:
        self.timeline.instant("fleet", line)
        self.run_folder.note(line)
        say(self.console, line)

    def _learner_process(self) -> LearnerProcessConfig:
        made = super()._learner_process()
        learner = self.lead_config.learner
        if learner is None:
            return made
        others = learner.hosts - 1
        say(self.console, f"waiting for the learner's ranks of {others} other host{'s' * (others > 1)}")
        return replace(made, launcher=launcher(learner))

    def open_lead(self, door: Door) -> Lead:
        oldest = self.leases.max_staleness
        return Lead(
            self.lead_config,
            door,
            folder=self._workspace,
            journal=self.journal,
            group_tokens=self.config.group.started * self.config.rollout.max_tokens,
            min_version=lambda lease: max(0, self.leases.step_of(lease) - oldest),
            kv_tokens=lambda: self.fleet.kv_tokens,
            version=lambda: self.fleet.version,
            rolling=oldest > 0,
            timeline=self.timeline,
            note=self.note,
        )

    async def _on_trained(self, step: int, metrics: dict[str, float]) -> None:
        self.lead.beat_here()  # its weights are live
        await super()._on_trained(step, metrics | self.lead.metrics())

    def _tokens_sampled(self) -> int:
        return super()._tokens_sampled() + self.lead.protocol.tokens


def check_devices(lead: LeadConfig, devices: DevicePlan) -> None:
    """Raises BadInput for weights that nodes, or the learner's other hosts, cannot have."""
    if devices.weight_transfer == "nccl":
        raise BadInput(
            "nodes cannot be used where weights go from GPU to GPU: nodes pull files. Fix: devices by turns "
            "(learner_ranks and replicas as many as devices, max_staleness=0), or no nodes"
        )
    if devices.adapters:
        raise BadInput("nodes cannot be used with adapters yet. Fix: adapters=false, and nodes_deltas=true")
    if lead.learner is not None and devices.devices:
        raise BadInput("learner_hosts must be 1 with devices: weights of GPUs are not gathered over hosts yet")


@asynccontextmanager
async def lead_training(
    lead: LeadConfig,
    config: TrainingConfig,
    run: RunFolder,
    *,
    make_balancer: Callable[[], Balancer] | None,
    sinks: Sequence[MetricSink],
    console: Console,
) -> AsyncIterator[Training]:
    """On the lead. Raises ListenFailed, KeysUnusable, and what `training` raises."""
    check_devices(lead, config.devices)
    job = LeadTraining(config, run, make_balancer=make_balancer, sinks=sinks, console=console)
    job.lead_config = with_learner(lead, config, run)
    door = Door(job.lead_config, checkpoint=config.checkpoint, note=job.note)
    async with door, opened(job), job.open_lead(door) as job.lead:
        job.lead.recording = job.recording
        assert job.fleet.weights is not None
        job.lead.publish(job.fleet.weights)
        job.lead.beat_here()
        say(console, f"rollout nodes may join at {lead.listen}")
        yield job


def with_learner(lead: LeadConfig, config: TrainingConfig, run: RunFolder) -> LeadConfig:
    """What the run knows of the learner's hosts beside the command line."""
    if lead.learner is None:
        return lead
    ranks, module = config.devices.ranks, config.learner_module
    return replace(lead, learner=structs.replace(lead.learner, ranks=ranks, module=module, run=run.identity))


class NodeTraining(Training):
    """The same recipe on a rollout node: replicas, sandbox, rollouts and reward, without a learner."""

    node: NodeConfig
    keys: HostKeys | None
    build: Build
    _makes: MakesGroups | None = None

    async def evaluation(self, *arguments: Any, **options: Any) -> ScheduledEvaluation:
        """It is the lead that evaluates."""
        return await super().evaluation(*arguments, **{**options, "replicas": 0})

    def group(self, rollouts: RolloutSource, reward: Reward | GroupReward, select: Callable[[Group], Group]) -> Stage:
        self._makes = _makes(self, rollouts, reward)
        return Stage(name="groups", run=_never)

    def train(self, make_batch: Callable[[int, Sequence[Group]], Batch], **options: Any) -> Stage:
        return Stage(name="learn", run=_never)

    async def run(self, stages: Sequence[Stage]) -> dict[str, Any]:
        """Makes what the lead grants. Raises RunEnded when it is over, NodeRefused, or LeadGone."""
        if self._makes is None:
            raise BadInput("a recipe without a stage that makes groups has nothing to do on a rollout node")
        node = RolloutNode(
            self.node,
            self.keys,
            build=self.build,
            fleet=self.fleet,
            makes=self._makes,
            folder=self._workspace,
            tokens_sampled=self._tokens_sampled,
            note=lambda line: say(self.console, line),
            timeline=self.timeline if self.config.record.on else None,
        )
        await node.run()
        raise RunEnded

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        config = self.config
        async with AsyncExitStack() as self._stack:
            self._workspace = self._stack.enter_context(workspace())
            if config.sandbox is not None:
                self._sandbox = await self._stack.enter_async_context(Sandbox(config.sandbox))
            self.chat = ChatTemplate.load(config.checkpoint, config.chat)
            self._canary = self._canary_ids()
            fleet = self._fleet(config.devices.replicas, self.timeline, pinned=True)
            self.fleet = await self._stack.enter_async_context(fleet)
            gc.freeze()
            yield


@asynccontextmanager
async def node_training(
    node: NodeConfig,
    keys: HostKeys | None,
    build: Build,
    config: TrainingConfig,
    run: RunFolder,
    *,
    make_balancer: Callable[[], Balancer] | None,
    sinks: Sequence[MetricSink],
    console: Console,
) -> AsyncIterator[Training]:
    """On a rollout node."""
    job = NodeTraining(config, run, make_balancer=make_balancer, sinks=(), console=console)
    job.node, job.keys, job.build = node, keys, build
    async with opened(job):
        yield job


def _makes(job: Training, rollouts: RolloutSource, reward: Reward | GroupReward) -> MakesGroups:
    return MakesGroups(rollouts=rollouts, reward=reward, config=job.config.group, timeline=job.timeline)


async def _never(inbox: Inbox, outbox: Outbox) -> None:
    raise AssertionError("this stage runs on the lead")
