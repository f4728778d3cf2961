"""What does one GPU do? Parts one after another, in the names of NeMo-RL and xtuner, and a file for each part.

    rocstar bench gpu                       all parts; those that have a result are passed over
    rocstar bench gpu parts=learner,sleep   those whose names begin so
    rocstar bench gpu again=true            also those that have a result
    rocstar bench gpu rehearse=true         every part on the CPU with small sizes: nothing is measured

Each part is a process of its own with a limit, so that one that fails costs its row. No part begins that cannot end
within `minutes`: the same command continues where it stopped. rollout_tgs and training_tgs are xtuner's tokens per GPU
and second, refit is NeMo-RL's word for the weight update, generation and policy training are its phases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench import ROOT
from bench.benches.gpu.parts import METRICS, Part, figures, parts
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.terminal import say
from engine.telemetry.gpus import seen
from sandbox.require import positive, require

REHEARSAL_S = 180.0  # limit of a part on the CPU


@dataclass(frozen=True, kw_only=True)
class Options:
    parts: Annotated[tuple[str, ...], "names of parts, or their beginnings; none: all"] = ()
    again: Annotated[bool, "also parts that have a result"] = False
    rehearse: Annotated[bool, "on the CPU, with small sizes"] = False
    minutes: Annotated[float, "time in which parts begin and end"] = 25.0
    into: Annotated[Path | None, "folder of the results; none: runs/gpu, or runs/gpu-rehearsal"] = None

    def __post_init__(self) -> None:
        require("minutes", self.minutes, positive)
        names = [part.name for part in parts()]
        if unknown := [given for given in self.parts if not any(name.startswith(given) for name in names)]:
            raise ValueError(f"parts must be beginnings of {', '.join(names)}, got {','.join(unknown)!r}")

    @property
    def wanted(self) -> list[Part]:
        return [part for part in parts() if part.name.startswith(self.parts or ("",))]

    @property
    def folder(self) -> Path:
        return (self.into or ROOT / "runs" / ("gpu-rehearsal" if self.rehearse else "gpu")).resolve()


def measure(options: Options, keep: Keep) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    say(f"device: {device()}")
    if failures := run_parts(options, options.wanted, keep):
        raise BenchFailed(f"{len(failures)} parts failed: {'; '.join(failures)}")


def run_parts(options: Options, wanted: Sequence[Part], keep: Keep) -> list[str]:
    """Runs the parts that have no result, and keeps the figures of all that have one. Returns what failed."""
    until = time.monotonic() + 60 * options.minutes
    failures: list[str] = []
    rehearsed = dict[tuple[str, ...], str]()
    for part in wanted:
        file = options.folder / f"{part.name}.json"
        limit_s = REHEARSAL_S if options.rehearse else part.limit_s
        if not options.rehearse and part.gpus > (here := gpus_here()):
            say(f"{part.name}: passed over, it needs {part.gpus} GPUs and {here} are here")
            continue
        if options.rehearse and (like := rehearsed.setdefault(part.rehearsal, part.name)) != part.name:
            say(f"{part.name}: rehearsed as {like}")
            continue
        if not file.exists() or options.again:
            if time.monotonic() + limit_s > until:  # its limit counts, not the time that it will take
                say(f"{part.name}: not begun, {options.minutes:g} minutes are over. Fix: the same command again")
                continue
            say(f"{part.name}: at most {limit_s:.0f} s")
            began = time.monotonic()
            failed = run(part, file, limit_s=limit_s, rehearse=options.rehearse)
            say(f"{part.name}: took {time.monotonic() - began:.0f} s")
            if failed:
                say(f"{part.name} failed: {failed}")
                failures.append(f"{part.name}: {failed}")
                continue
        keep({part.name: figures(part, file)})
    return failures


def run(part: Part, file: Path, *, limit_s: float, rehearse: bool) -> str:
    """Runs a part in a session of its own, which is ended with all that it began. Returns why it failed, else ""."""
    fresh = file.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with file.with_suffix(".log").open("w") as log:
        command = part.command(fresh, rehearse=rehearse)
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            if code := process.wait(limit_s):
                return f"exit code {code}, {_last_line(Path(log.name))}"
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    try:
        figures(part, fresh)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        return f"its result cannot be read: {error!r}"
    fresh.replace(file)
    return ""


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:160]} ({log})" if lines else f"without a message ({log})"


def gpus_here() -> int:
    """Returns how many GPUs this process may see."""
    try:
        return len(seen(None).each)
    except Exception:  # the libraries' own errors are of many kinds; a part that needs one GPU says it best itself
        return 1


def device() -> str:
    """Returns name, memory and driver of the GPU as its driver tells them, or "none"."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("jail", "rollout_tgs", "training_tgs", "e2e_step_s", "of_bare", "mfu"),
    quick={"parts": "doctor,attention", "rehearse": "true"},
)
