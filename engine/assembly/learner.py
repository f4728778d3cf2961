"""Starts the learner of a run, and brings replicas and learner to the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from engine.assembly.config import TrainingConfig
from engine.fleet.fleet import Fleet
from engine.learner.messages import Configure
from engine.learner.process import LearnerProcess, LearnerProcessConfig
from engine.rollout.chat_template import ChatTemplate
from engine.run.resume import RunState
from engine.types import PublishedWeights

# Replicas and learner must agree on the log-probabilities of these after each weight update; any text does.
CANARY = (
    "What is 12 times 34?",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "Write a program that prints the first ten primes.",
    "Tom has 81 coins, spends half of them and finds 38. How many has he now?",
)


def canary_of(chat: ChatTemplate, max_tokens: int) -> list[list[int]]:
    """Returns the token ids of the canary's prompts, each cut to the budget of a trajectory."""
    return [chat.prompt_ids(({"role": "user", "content": text},))[:max_tokens] for text in CANARY]


def process_of(config: TrainingConfig) -> LearnerProcessConfig:
    """Returns how the learner's ranks are started on this machine."""
    process = LearnerProcessConfig(module=config.learner_module, step_deadline_s=config.step_deadline_s)
    if config.start_deadline_s is not None:
        process = dataclasses.replace(process, start_deadline_s=config.start_deadline_s)
    return config.devices.learner(process)


async def agree_on_first_weights(
    learner: LearnerProcess,
    fleet: Fleet,
    config: TrainingConfig,
    state: RunState,
    *,
    canary: Sequence[Sequence[int]],
    weights_dir: Path,
) -> str:
    """Restores the learner and loads its weights into the replicas, before anything is sampled.

    Returns what the canary cannot see of the model; empty if it covers all of it.
    """
    fields = config.devices.learner_fields
    if config.replicas_config.quantization is not None and config.learner.mismatch_tolerance == "auto":
        fields["mismatch_tolerance"] = None  # the sampler is another model, which the loss corrects for
    message = Configure(
        checkpoint=str(config.checkpoint.resolve()),
        learner=dataclasses.asdict(dataclasses.replace(config.learner, **fields)),
        canary=[list(ids) for ids in canary],
        weights_dir=str(weights_dir),
        seed=config.seed,
        resume=state.checkpoint,
        begin_from=None if config.learner_state is None else str(config.learner_state.resolve()),
    )
    async with fleet.rest():  # the learner may need their devices
        ready, logprobs = await learner.configure(message)
    await fleet.update_weights(PublishedWeights(ready.weights, ready.version, logprobs, ready.canary_further))
    return ready.canary_gaps
