"""The errors that end a run with one line for the user."""

from __future__ import annotations

from engine.atomic_files import CannotWrite
from engine.fleet.canary import CanaryFailed
from engine.learner.process import LearnerDied
from engine.pipeline.whereabouts import GroupVanished
from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import TemplateError
from engine.run.checkpoints import Unresumable
from engine.stages.empty_batches import NothingToTrain
from engine.stages.evaluate import NothingGraded
from engine.teacher.teacher import TeacherLost
from engine.telemetry.sinks import SinkUnavailable
from engine.telemetry.watchdog import NoProgress
from engine.user_parts import WrongPart
from sandbox import SandboxUnavailable


class BudgetTooSmall(ValueError):
    """No prompt leaves room for an answer."""


# Every other error is a bug, perhaps in a stage or a reward of the recipe's: `engine.console.failure` shows the user's
# own lines of it.
EXPECTED = (
    BudgetTooSmall,
    CanaryFailed,
    CannotWrite,
    GroupVanished,
    LearnerDied,
    NothingGraded,
    NothingToTrain,
    ReplicaDied,
    SandboxUnavailable,
    SinkUnavailable,
    NoProgress,
    TeacherLost,
    TemplateError,
    Unresumable,
    WrongPart,
)
