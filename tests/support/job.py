"""A training run whose parts are scripted: nothing is started."""

import contextlib

from rich.console import Console

from engine.assembly.parts import Parts
from engine.assembly.startup import Startup
from engine.assembly.training import Alone, Training
from engine.console.notes import Notes
from engine.console.recorder import RunRecorder
from engine.run.resume import RunState
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Replicas, fleet_of
from tests.support.node import CHAT


def job_of(config, run, *, fleet=None, learner=None):
    """As `training` makes it, without a sandbox."""
    console, timeline = Console(quiet=True), Timeline()
    state = RunState.open(run, config.prompts_per_step)
    fleet = fleet or fleet_of(Replicas(), 1)
    parts = Parts(rollout=config.rollout, seed=0, chat=CHAT, fleet=fleet, timeline=timeline, sandbox_if_any=None)
    return Training(
        config,
        run,
        state=state,
        recorder=RunRecorder(run, state, timeline),
        note=Notes(run=run, console=console, timeline=timeline),
        console=console,
        parts=parts,
        make_fleet=lambda replicas, timeline, pinned: fleet,
        stack=contextlib.AsyncExitStack(),
        workspace=run.path,
        startup=Startup(),
        learner=learner,
        recording=None,
        role=Alone(),
        work=None,
    )
