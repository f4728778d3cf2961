"""Puts a real run of a recipe under a sampling profiler: where the time of each process and of each stage goes.

    rocstar bench profile recipes/quickstart.py [steps=5] [rate=50] [torch=true] [field=value of the recipe ...]

py-spy looks at every process of the run: node, replicas, learner, sandbox. It begins with the first row of the run's
metrics (the evaluation before step 1, if there is one), so that what starting takes is left out; so are the samples
of threads that wait for a lock, a socket or a process. runs/bench/profile.svg is a flame graph for a browser,
profile.speedscope.json the same for speedscope, which zooms and searches, profile.txt the same as text (a stack a
line, with its samples). The tables say what each stage of the pipeline, yours too, did with its time; the lines at
which the node's event loop was blocked; and those that took most of each process. With torch=true PyTorch's own
profiler traces the learner's second batch too, operator by operator (runs/bench/learner_trace.json for
ui.perfetto.dev, learner_operators.txt). Sampling costs time: compare profiles with profiles.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil

from bench.drawing.flame_graph import flame_graph
from bench.measuring.stacks import Stack, read, speedscope, working, write_text
from bench.measuring.terminal import say, table
from engine import metric_names as metric
from engine.console.options import Positional, Rest, parse
from sandbox.require import at_least, require_fields

FOLDER = Path("runs/bench")
LINES = 5  # lines shown of each process
STOP_S = 60.0
LOOK_S = 0.1
HELD_S = 2.0  # a sample holds a process for some milliseconds
OWN = {"runs", "name", "fresh"}  # options that `profiled` gives the run
_LIBRARY = ("site-packages/", "lib/python", "<")


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: Annotated[Path, Positional("the recipe's file")]
    steps: Annotated[int, "steps of the run"] = 5
    rate: Annotated[int, "samples a second, of each process"] = 50
    torch: Annotated[bool, "PyTorch's own profiler in the learner, too"] = False
    fields: Annotated[tuple[str, ...], Rest("options of the recipe")] = ()

    def __post_init__(self) -> None:
        if not self.recipe.is_file():
            raise ValueError(f"recipe must be a file, recipes/quickstart.py say, got {str(self.recipe)!r}")
        require_fields(self, at_least(1), "steps", "rate")
        if own := OWN & {each.partition("=")[0] for each in self.fields}:
            raise ValueError(
                f"{min(own)} cannot be given: the profiled run has a folder of its own, which goes with the command. "
                "Fix: leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """A stage over the whole run. Seconds are summed over its workers."""

    name: str
    items: float
    busy_s: float
    blocked_in_s: float
    blocked_out_s: float
    queue: float

    def row(self, seconds: float) -> list[str]:
        parts = (self.busy_s, self.blocked_in_s, self.blocked_out_s)
        whole = sum(parts) or 1.0
        shares = [f"{100 * part / whole:.0f} %" for part in parts]
        return [self.name, f"{self.items / seconds:.2f}", *shares, f"{self.queue:.0f}"]


def stages(rows: Sequence[Mapping[str, float]]) -> list[StageTime]:
    """Returns the stages from the rows of metrics.jsonl, whose figures are of one step each."""

    def total(family: str, name: str) -> float:
        return sum(row.get(metric.member(family, name), 0.0) for row in rows)

    names = dict.fromkeys(name for row in rows for name in map(_stage_of, row) if name is not None)
    return [
        StageTime(
            name=name,
            items=total(metric.STAGE_ITEMS, name),
            busy_s=total(metric.STAGE_BUSY_S, name),
            blocked_in_s=total(metric.STAGE_BLOCKED_IN_S, name),
            blocked_out_s=total(metric.STAGE_BLOCKED_OUT_S, name),
            queue=max(row.get(metric.member(metric.STAGE_QUEUE, name), 0) for row in rows),
        )
        for name in names
    ]


def _stage_of(name: str) -> str | None:
    return metric.part_of(metric.STAGE_BUSY_S, name)


def hottest(stacks: Iterable[Stack]) -> dict[str, list[tuple[str, float]]]:
    """Returns the LINES that took most of each role's samples, with their share.

    A sample counts for its innermost line that is no library's, else for its innermost line. A replica's always counts
    for the latter, as it was forked from the node's own code.
    """
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for stack in stacks:
        own = [call for call in stack.calls if not any(mark in call for mark in _LIBRARY)]
        line = own[-1] if own and stack.role != "replica" else stack.calls[-1]
        counted[stack.role][line] += stack.samples
    return {
        role: [(line, count / counts.total()) for line, count in counts.most_common(LINES)]
        for role, counts in sorted(counted.items(), key=lambda item: -item[1].total())
    }


def profiled(recipe: Path, fields: Sequence[str], *, steps: int, rate: int, folder: Path) -> Path:
    """Runs the recipe and returns the run's folder. Raises subprocess.CalledProcessError."""
    spy = Path(sysconfig.get_path("scripts")) / "py-spy"
    raw = folder / "profile.txt"
    command = [str(spy), "record", "--subprocesses", "--full-filenames", "--format", "raw", "--rate", str(rate)]
    run = [sys.executable, str(recipe), f"steps={steps}", f"runs={folder}", "name=run", "fresh=true", *fields]
    with subprocess.Popen(run) as going:
        spying = None
        try:
            if has_begun(folder / "run" / "metrics.jsonl", going):
                spying = subprocess.Popen(
                    [*command, "--output", str(raw), "--pid", str(going.pid)], stderr=subprocess.DEVNULL
                )
                release(going, spying)
            code = going.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                going.wait(STOP_S)  # Ctrl-C reached it too, and it writes to the folder until it has ended
            raise
        finally:
            going.terminate()
            if spying is not None:
                _stop(spying)
    if code:
        raise subprocess.CalledProcessError(code, run)
    return folder / "run"


def release(run: subprocess.Popen[bytes], spying: subprocess.Popen[bytes]) -> None:
    """Waits for the end of the run, and stops py-spy if it holds one of the run's processes.

    py-spy stops a process for each sample, and does not let one go that is killed meanwhile (its issue 732). The run
    then waits for that process without end.
    """
    held: dict[int, float] = {}  # since when
    while run.poll() is None and spying.poll() is None:
        stopped = _stopped(run.pid)
        now = time.monotonic()
        held = {pid: held.get(pid, now) for pid in stopped}
        if stuck := [pid for pid, since in held.items() if now - since > HELD_S]:
            names = ", ".join(stopped[pid] for pid in stuck)
            say(f"py-spy held {names}: sampling ends here, so that the run can go on")
            _stop(spying)
            for pid in stuck:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)  # a tracer that ends leaves its SIGSTOP behind
            return
        time.sleep(LOOK_S)


def _stopped(root: int) -> dict[int, str]:
    """Returns the run's processes that a tracer has stopped, by process id, as "name (process id)"."""
    names = {}
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(root)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_TRACING_STOP:
                    names[process.pid] = f"{process.name()} ({process.pid})"
    return names


def _stop(spying: subprocess.Popen[bytes]) -> None:
    """Has py-spy write what it sampled, and ends it."""
    spying.send_signal(signal.SIGINT)
    try:
        spying.wait(STOP_S)
    except subprocess.TimeoutExpired:
        spying.kill()
        spying.wait()
        say(f"py-spy did not end within {STOP_S:.0f} s and was killed")


def has_begun(metrics: Path, going: subprocess.Popen[bytes]) -> bool:
    """Waits for the first row of the run's metrics. Returns whether it came before the run ended."""
    while going.poll() is None:
        if metrics.is_file() and metrics.stat().st_size:
            return True
        time.sleep(LOOK_S)
    return False


def show(run: Path, stacks: Sequence[Stack], waited: float) -> None:
    """waited: share of the samples that is left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    seconds = max(row.get(metric.TIME_TRAIN_TOTAL_S, 0.0) for row in rows) or 1.0
    tokens = sum(row.get(metric.TOKENS_GENERATED, 0) for row in rows)
    cpu_s = sum(row.get(metric.HOST_LOOP_CPU_SHARE, 0.0) * row.get(metric.TIME_STEP_S, 0.0) for row in rows)
    header = ["stage", "items/s", "busy", "blocked on input", "blocked on output", "longest queue"]
    title = f"stages; the event loop took {1e6 * cpu_s / max(1, tokens):.0f} us of CPU per sampled token"
    table(title, header, [stage.row(seconds) for stage in stages(rows)])
    blocked = [[place, f"{held_s:.3f} s"] for place, held_s in summary.get("loop_blocked_at", {}).items()]
    if blocked:
        table("where the event loop was blocked", ["line", "for"], blocked)
    lines = [
        [role if number == 0 else "", line, f"{100 * share:.0f} %"]
        for role, most in hottest(stacks).items()
        for number, (line, share) in enumerate(most)
    ]
    title = f"lines that took most, of each process's samples; {100 * waited:.0f} % of all, which waited, are left out"
    table(title, ["process", "line", "share"], lines)


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench profile", description=__doc__)
    fields = [*options.fields, *([f"learner.trace={FOLDER.absolute()}"] if options.torch else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run = profiled(options.recipe, fields, steps=options.steps, rate=options.rate, folder=folder)
        except FileNotFoundError:
            print("error: py-spy is not installed. Fix: pip install py-spy", file=sys.stderr)
            return 2
        except subprocess.CalledProcessError as error:
            print(f"error: the run ended with exit code {error.returncode}; see above", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            say("interrupted: no profile was written")
            return 130
        stacks, waited = working(read(folder / "profile.txt"))
        if not stacks:
            print("error: the run ended before a step could be profiled. Fix: more steps", file=sys.stderr)
            return 1
        show(run, stacks, waited)
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_text(stacks, FOLDER / "profile.txt")
        flame_graph(stacks, FOLDER / "profile.svg")
        speedscope(stacks, FOLDER / "profile.speedscope.json")
    say(f"{FOLDER / 'profile.svg'}: a flame graph for a browser; profile.speedscope.json: the same for speedscope")
    if options.torch:
        say(f"{FOLDER / 'learner_trace.json'}: the learner's second batch for ui.perfetto.dev; learner_operators.txt")
    return 0
