"""Runs a program that computes for seconds, for a button of the page. Its last line is a JSON object.

rivals   runs the simulator: what other placement policies would have made of a recorded step ("Placement")
         {"sentence": "round robin would have taken 1.28x", "lever": "...", "rows": [{"policy", "ratio", ...}]}
replay   runs an engine: a trajectory from one of its turns on ("Trajectory"; `engine.programs.replay`)
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.view.answers.trajectories import NotThere

SIMULATOR = (sys.executable, "-m", "bench", "rivals")  # bench/ is not part of the engine
REPLAY = (sys.executable, "-m", "engine.programs.replay")
DEADLINE_S = 300.0
REPOSITORY = Path(__file__).parents[2]


async def rivals(run: Path, step: int, command: Sequence[str] = SIMULATOR) -> dict[str, Any]:
    """Runs a step under other policies. Raises NotThere as `asked` does."""
    return await asked("the simulator", [*command, _path(run), "--step", str(step)])


async def replay(run: Path, values: Mapping[str, int], command: Sequence[str] = REPLAY) -> dict[str, Any]:
    """Samples a trajectory again from a turn on. Raises NotThere as `asked` does, KeyError for a missing value.

    values: step, group, sample, turn; seed for another seed than the run's; start=1 for the weights that the run began
    with.
    """
    options = [part for name in ("step", "group", "sample", "turn") for part in (f"--{name}", str(values[name]))]
    options += ["--seed", str(values["seed"])] if "seed" in values else []
    options += ["--start"] if values.get("start") else []
    return await asked("the engine", [*command, _path(run), *options])


def _path(run: Path) -> str:
    """Makes the path absolute: the program runs in the repository, and the page may run elsewhere."""
    return str(run.absolute())


async def asked(who: str, command: Sequence[str]) -> dict[str, Any]:
    """Runs the program in the repository and returns its answer. Raises NotThere with its last line if it fails, and
    if it says nothing for DEADLINE_S. The process ends with this call, also if the call is cancelled.
    """
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=REPOSITORY)
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise NotThere(f"{who} gave no answer within {DEADLINE_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise NotThere(f"{who} ended with status {process.returncode}: {lines[-1]}")
    try:
        return msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise NotThere(f"the last line of {who} is no JSON object: {error}") from error
