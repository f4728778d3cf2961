"""Runs a recorded program again, in a jail, for the page "Sandbox"."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types import ToolUse
from engine.view.answers.trajectories import NotThere, plain
from sandbox import Limits, Sandbox, SandboxConfig

WALL_S = 10.0


async def run_again(call: ToolUse) -> dict[str, Any]:
    """Runs the program of a call again and returns the result beside the recorded call. The program starts without
    variables, even if the run's calls shared a session. Raises NotThere for a call without a program, and
    SandboxUnavailable if there is no jail.

    The sandbox is opened for this call only. That takes half a second, but no processes are kept for a button.
    """
    code, stdin = _program(call)
    async with Sandbox(SandboxConfig(slots=1, limits=Limits(wall_s=WALL_S, cpu_s=WALL_S))) as box:
        result = await box.run(code, stdin=stdin, display=True)
    return {
        "code": code,
        "outcome": result.outcome,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "display": result.display,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        "recorded": plain(call),
    }


def _program(call: ToolUse) -> tuple[str, str]:
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
        return str(arguments["code"]), str(arguments.get("input", ""))
    except (msgspec.DecodeError, KeyError) as error:
        raise NotThere(f"this call of {call.name} has no program: its arguments are no JSON with a code") from error
