"""Asks the simulator what other placement policies would have made of a recorded step, for the page "Placement".

The simulator is a program of its own (bench/ is not part of the engine, and it computes for seconds): a command that
takes a run and a step, and whose last line is a JSON object

    {"sentence": "round robin would have taken 1.28x", "lever": "...", "rows": [{"policy", "makespan_s", "ratio", ...}]}
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.view.answers.trajectories import NotThere

COMMAND = (sys.executable, "-m", "bench", "rivals")
DEADLINE_S = 300.0
REPOSITORY = Path(__file__).parents[2]


async def rivals(run: Path, step: int, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """What the simulator says. Raises NotThere with its last line where it fails, or says nothing for DEADLINE_S.

    Its process ends with this call, also where that is cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *_words(command, run, step), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=REPOSITORY
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise NotThere(f"the simulator gave no answer within {DEADLINE_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip().splitlines() or ["it says nothing"]
        raise NotThere(f"the simulator ended with status {process.returncode}: {said[-1]}")
    try:
        return msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise NotThere(f"the simulator's last line is no JSON object: {error}") from error


def _words(command: Sequence[str], run: Path, step: int) -> list[str]:
    """It runs in the repository, which need not be where the run's path was given."""
    return [*command, str(run.resolve()), "--step", str(step)]
