"""Puts a real run of a recipe under a sampling profiler: where the time of each process and of each stage goes.

    rocstar bench profile recipes/quickstart.py [steps=5] [rate=50] [torch=true] [field=value of the recipe ...]

py-spy looks at every process of the run: node, replicas, learner, sandbox. runs/bench/profile.svg is a flame graph for
a browser, runs/bench/profile.txt the same as text (a stack a line, with its samples). The tables say what each stage of
the pipeline, yours too, did with its time; the lines at which the node's event loop was blocked; and those that took
most of each process. With torch=true PyTorch's own profiler traces the learner's second batch too, operator by operator
(runs/bench/learner_trace.json for ui.perfetto.dev, learner_operators.txt). Sampling costs time: compare profiles with
profiles.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

from bench.measuring.terminal import say, table
from engine import metric_names as metric
from engine.console.options import Positional, Rest, parse
from sandbox.require import at_least, require_fields

FOLDER = Path("runs/bench")
LINES = 5  # lines shown of each process
STOP_S = 60.0
ROLES = {  # a process has the role of the first text that its command line holds
    "EngineCore": "replica",
    "engine.learner.launch": "launcher",
    "algo.learner": "learner",
    "sandbox": "sandbox",
    "import sys, types": "sandbox",
}
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


def hottest(stacks: Iterable[str]) -> dict[str, list[tuple[str, float]]]:
    """Returns the LINES that took most of each role's samples, with their share.

    stacks: py-spy's raw lines, "process PID:command;process PID:command;function (file:line);... samples", outermost
    first. A sample counts for its innermost line that is no library's, else for its innermost line. A replica's always
    counts for the latter, as it was forked from the node's own code.
    """
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for line in stacks:
        frames, _, samples = line.strip().rpartition(" ")
        stack = frames.split(";")
        calls = [frame for frame in stack if not frame.startswith("process ")]
        if not calls or not samples.isdigit():
            continue
        process = next(frame for frame in reversed(stack) if frame.startswith("process "))  # each below its parent
        role = _role(process)
        own = [call for call in calls if not any(mark in call for mark in _LIBRARY)] if role != "replica" else []
        counted[role][(own or calls)[-1]] += int(samples)
    return {
        role: [(line, count / counts.total()) for line, count in counts.most_common(LINES)]
        for role, counts in sorted(counted.items(), key=lambda item: -item[1].total())
    }


def _role(process: str) -> str:
    return next((role for mark, role in ROLES.items() if mark in process), "node")


def profiled(recipe: Path, fields: Sequence[str], *, steps: int, rate: int, folder: Path) -> Path:
    """Runs the recipe and returns the run's folder. Raises subprocess.CalledProcessError."""
    spy = Path(sysconfig.get_path("scripts")) / "py-spy"
    raw = folder / "profile.txt"
    command = [str(spy), "record", "--subprocesses", "--full-filenames", "--format", "raw", "--rate", str(rate)]
    run = [sys.executable, str(recipe), f"steps={steps}", f"runs={folder}", "name=run", "fresh=true", *fields]
    with subprocess.Popen(run) as going:
        spying = subprocess.Popen([*command, "--output", str(raw), "--pid", str(going.pid)], stderr=subprocess.DEVNULL)
        try:
            code = going.wait()
        finally:
            going.terminate()
            spying.send_signal(signal.SIGINT)  # it writes what it has, and does not always end by itself
            spying.wait(STOP_S)
    if code:
        raise subprocess.CalledProcessError(code, run)
    return folder / "run"


def flame_graph(raw: Path, svg: Path) -> None:
    """Draws py-spy's text: a rectangle for each function, as wide as its samples, with its callers below.

    py-spy itself draws only what it samples for a drawing.
    """
    root: dict[str, Any] = {}
    for line in raw.read_text().splitlines():
        frames, _, samples = line.rpartition(" ")
        place = root
        for frame in frames.split(";") if samples.isdigit() else ():
            box = place.setdefault(frame, [0, {}])
            box[0] += int(samples)
            place = box[1]
    svg.write_text("".join(_drawn(root)))


WIDTH, HEIGHT = 1600, 17


def _drawn(root: Mapping[str, Any]) -> Iterable[str]:
    total = sum(count for count, _ in root.values()) or 1
    depth = _depth(root)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * depth}" font-family="sans-serif">'
    yield "<style>text{font-size:11px}g:hover rect{stroke:black}</style>"
    yield from _boxes(root, 0.0, HEIGHT * (depth - 1), WIDTH / total)
    yield "</svg>"


def _depth(place: Mapping[str, Any]) -> int:
    return 1 + max((_depth(below) for _, below in place.values()), default=-1)


def _boxes(place: Mapping[str, Any], x: float, y: float, scale: float) -> Iterable[str]:
    for frame, (count, below) in place.items():
        width = count * scale
        if width >= 1:
            name = escape(frame)
            shown = escape(frame[: int(width / 7)]) if width > 30 else ""
            hue = sum(map(ord, frame)) % 50
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 1}" fill="hsl({hue},80%,70%)"'
            yield f"<g><title>{name}: {count}</title><rect {box}/>"
            yield f'<text x="{x + 3:.1f}" y="{y + 12}">{shown}</text></g>'
            yield from _boxes(below, x, y - HEIGHT, scale)
        x += width


def show(run: Path, raw: Path) -> None:
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
    with raw.open() as stacks:
        lines = [
            [role if number == 0 else "", line, f"{100 * share:.0f} %"]
            for role, most in hottest(stacks).items()
            for number, (line, share) in enumerate(most)
        ]
    table("lines that took most, of each process's samples", ["process", "line", "share"], lines)


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
        show(run, folder / "profile.txt")
        FOLDER.mkdir(parents=True, exist_ok=True)
        flame_graph(folder / "profile.txt", FOLDER / "profile.svg")
        shutil.copy(folder / "profile.txt", FOLDER / "profile.txt")
    say(f"{FOLDER / 'profile.svg'}: a flame graph for a browser; {FOLDER / 'profile.txt'}: the same as text")
    return 0
