"""The real learner of the tiny agent, and its first weights on real replicas. Engines fork before it imports torch."""

import dataclasses

from engine.learner.messages import Configure
from engine.types import PublishedWeights

CHECKPOINT = "recipes/tiny/agent"
CANARY = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def configure(settings, folder, canary=CANARY):
    """Returns the message that begins a learner of these settings (`LearnerConfig`)."""
    learner = dataclasses.asdict(settings)
    return Configure(checkpoint=CHECKPOINT, learner=learner, canary=canary, weights_dir=str(folder), seed=3)


async def load_first(learner, fleet, settings, folder):
    """Begins the learner and loads its first weights on the fleet. Returns their file and the canary's answer."""
    ready, canary = await learner.configure(configure(settings, folder))
    await fleet.update_weights(PublishedWeights(ready.weights, 0, canary))
    return ready.weights, canary
