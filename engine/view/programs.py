"""Runs a command that computes for seconds, for a button of the page. The last line that it prints is a JSON object.

rivals   runs `rocstar bench rivals`: a recorded step under other placement policies ("Placement")
         {"sentence": "round robin would have taken 1.28x", "lever": "...", "rows": [{"policy", "ratio", ...}]}
reverify runs `rocstar reverify`: a recorded step under another selection ("Groups")
         {"sentence": "Over 1 step: ...", "notes": ["..."], ...}
replay   runs `rocstar replay`: a trajectory from one of its turns on ("Trajectory")

The caller passes the command that starts `rocstar`, since this room may not import programs.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.view.answers.trajectories import NotThere

DEADLINE_S = 300.0
REPOSITORY = Path(__file__).parents[2]


async def rivals(rocstar: Sequence[str], run: Path, step: int) -> dict[str, Any]:
    """Runs a step under other policies. Raises NotThere as `asked` does."""
    return await asked("the simulator", [*rocstar, "bench", "rivals", _path(run), f"step={step}"])


# The other selections that the page offers, by number.
SELECTIONS = (
    "algorithm=grpo",
    "algorithm=random",
    *(f"algorithm=roc {one}" for one in ("penalties=errors", "penalties=format", "smoothing=0.5")),
)


async def reverify(rocstar: Sequence[str], run: Path, step: int, selection: int) -> dict[str, Any]:
    """Selects a step's groups by another one of SELECTIONS. Raises NotThere as `asked` does."""
    if not 0 <= selection < len(SELECTIONS):
        raise NotThere(f"there is no selection {selection}")
    command = [*rocstar, "reverify", _path(run), f"step={step}", *SELECTIONS[selection].split()]
    return await asked("the selection", command)


async def replay(rocstar: Sequence[str], run: Path, values: Mapping[str, int]) -> dict[str, Any]:
    """Samples a trajectory again from a turn on. Raises NotThere as `asked` does, and KeyError for a missing value.

    values: step, group, sample, turn. seed replaces the run's seed; start=1 uses the weights that the run began with.
    """
    options = [f"{name}={values[name]}" for name in ("step", "group", "sample", "turn")]
    options += [f"seed={values['seed']}"] if "seed" in values else []
    options += ["start=true"] if values.get("start") else []
    return await asked("the engine", [*rocstar, "replay", _path(run), *options])


def _path(run: Path) -> str:
    """Makes the path absolute: the program runs in the repository, and the page may run elsewhere."""
    return str(run.absolute())


async def asked(who: str, command: Sequence[str]) -> dict[str, Any]:
    """Runs the program in the repository and returns its answer. Raises NotThere if it fails, with its last line, or if
    it takes longer than DEADLINE_S. The process ends with this call, also if the call is cancelled.
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
        raise NotThere(f"the last line that {who} printed is no JSON object: {error}") from error
