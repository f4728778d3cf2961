"""Stacks that py-spy sampled, by process, without those that wait; and as a file for speedscope."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = {  # a process has the role of the first text that its command line holds
    "EngineCore": "replica",
    "engine.learner.launch": "launcher",
    "algo.learner": "learner",
    "sandbox": "sandbox",
    "import sys, types": "sandbox",
}
# Functions in which a thread waits, with their files: py-spy leaves out threads that sleep, but counts many of these.
_WAITS = re.compile(
    r"^(?:[\w.<>]+\.)?(wait|_wait_for_tstate_lock|_try_wait|_worker|join|select|poll|_poll|get|accept|_?recv|recv_into|"
    r"read) "
    r"\((?:.*/)?(threading|selectors|queue|socket|subprocess|connection|popen_fork|thread|poll)\.py:\d+\)$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """process: as py-spy names it, each below its parent. calls: "function (file:line)", outermost first."""

    process: tuple[str, ...]
    calls: tuple[str, ...]
    samples: int

    @property
    def role(self) -> str:
        return next((role for mark, role in ROLES.items() if mark in self.process[-1]), "node")

    @property
    def waits(self) -> bool:
        return _WAITS.match(self.calls[-1]) is not None


def read(raw: Path) -> list[Stack]:
    """Reads py-spy's raw lines, "process PID:command;process PID:command;function (file:line);... samples".

    A line that is torn is left out; a file that is not there has none.
    """
    stacks = []
    for line in raw.read_text().splitlines() if raw.is_file() else ():
        text, _, samples = line.strip().rpartition(" ")
        frames = text.split(";")
        process = tuple(frame for frame in frames if frame.startswith("process "))
        calls = tuple(frame for frame in frames if frame and not frame.startswith("process "))
        if process and calls and samples.isdigit():
            stacks.append(Stack(process=process, calls=calls, samples=int(samples)))
    return stacks


def working(stacks: Iterable[Stack]) -> tuple[list[Stack], float]:
    """Returns the stacks that do not wait, and the share of samples that do."""
    every = list(stacks)
    kept = [stack for stack in every if not stack.waits]
    total = sum(stack.samples for stack in every)
    return kept, 1 - sum(stack.samples for stack in kept) / total if total else 0.0


def write_text(stacks: Iterable[Stack], path: Path) -> None:
    lines = [f"{';'.join((*stack.process, *stack.calls))} {stack.samples}\n" for stack in stacks]
    path.write_text("".join(lines))


def speedscope(stacks: Sequence[Stack], path: Path) -> None:
    """Writes a profile for each process. Source: speedscope's file format, `sampled` profiles."""
    frames: dict[str, int] = {}
    profiles: dict[str, dict[str, Any]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.calls):  # equal ones side by side, as there is no order in time
        name = f"{stack.role}, {stack.process[-1]}"
        profile = profiles.setdefault(
            name,
            {
                "type": "sampled",
                "name": name,
                "unit": "none",
                "startValue": 0,
                "endValue": 0,
                "samples": [],
                "weights": [],
            },
        )
        profile["samples"].append([frames.setdefault(call, len(frames)) for call in stack.calls])
        profile["weights"].append(stack.samples)
        profile["endValue"] += stack.samples
    written = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [{"name": call} for call in frames]},
        "profiles": sorted(profiles.values(), key=lambda profile: -profile["endValue"]),
    }
    path.write_text(json.dumps(written))
