"""Runs ranks of the learner on a host other than the lead's. The launcher is tied to this process, and is started again
whenever the lead starts its learner again.

The ranks of all hosts meet at `LearnerHosts.at` and talk over the process group. Neither has keys, and ranks send each
other pickles: whoever reaches their ports can run code in them. Nobody else may be on the network between the learner's
hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from engine.nodes.config import NodeConfig, launcher
from engine.nodes.messages import Ask, Job, LearnerHosts
from engine.nodes.node import NodeRefused, ask, pull_checkpoint
from sandbox.keys import HostKeys

_ROOT = Path(__file__).resolve().parents[2]
_NAME = secrets.token_hex(8)  # names this host among the learner's hosts
AGAIN_S = 1.0  # seconds between two starts


def command(learner: LearnerHosts, checkpoint: Path, folder: Path) -> list[str]:
    """Returns the command that runs the ranks of this host."""
    launch = [*launcher(learner, host=_NAME), f"--ranks={learner.ranks}", f"--folder={folder}"]
    return [*launch, learner.module, "--connect", "none", "--checkpoint", str(checkpoint)]


async def serve(config: NodeConfig, keys: HostKeys | None, job: Job, folder: Path, note: Callable[[str], None]) -> None:
    """Runs the ranks until the run has ended. Raises NodeRefused, LeadGone or PullFailed."""
    while True:
        learner = job.learner
        if learner is None:
            raise NodeRefused("the lead's learner runs on its own machine alone. Fix: learner_hosts=2 on the lead")
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        # Rank 0 reads the weights, and sends each rank its own.
        described = [info for info in job.files if not info.name.endswith(".safetensors")]
        await pull_checkpoint(config, keys, structs.replace(job, files=described), checkpoint)
        note(f"{learner.ranks} ranks of the learner meet the others at {learner.at}")
        code = await _run(command(learner, checkpoint, folder), folder)
        if code == 0:
            return
        note(f"the learner's ranks here ended with exit code {code}; they begin again with the lead's")
        await asyncio.sleep(AGAIN_S)
        answer = await ask(config, keys, Ask())
        if not isinstance(answer, Job):
            raise NodeRefused(f"the lead answers {type(answer).__name__}")
        job = answer


async def _run(launch: list[str], folder: Path) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment.setdefault("GOMP_SPINCOUNT", "3000")  # as on the lead; by default it spins for long
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environment.get("PYTHONPATH"))))
    environment["TMPDIR"] = str(folder)
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-S", "-m", "engine.process.tied", str(os.getpid())],  # killed with this process
        *launch,
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C is this process's to handle
    )
    try:
        return await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
