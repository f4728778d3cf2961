"""A real run of a recipe under a sampling profiler: where the time of each process goes, and of each stage.

    python -m bench profile recipes/quickstart.py [field=value ...] [--steps 5] [--rate 50] [--torch]

py-spy looks at every process of the run: node, replicas, learner, sandbox. runs/bench/profile.svg is a flame graph for
a browser, runs/bench/profile.txt the same as text (a stack a line, with its samples). The tables say what each stage of
the pipeline, yours too, did with its time; the lines at which the node's event loop stood still; and those that took
most of each process. With --torch PyTorch's own profiler traces the learner's second batch too, operator by operator
(runs/bench/learner_trace.json for ui.perfetto.dev, learner_operators.txt). Sampling costs time: compare profiles with
profiles.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measuring.report import at_least, say, table

FOLDER = Path("runs/bench")
LINES = 5  # of each process
STOP_S = 60.0
ROLES = {  # by what its command line holds, first match wins
    "EngineCore": "replica",
    "engine.learner.launch": "launcher",
    "algo.learner": "learner",
    "sandbox": "sandbox",
    "import sys, types": "sandbox",
}
_STAGE = re.compile(r"stage/(.+)/busy_s")
_LIBRARY = ("site-packages/", "lib/python", "<")


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Over the whole run; seconds summed over a stage's workers."""

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
    """From the rows of metrics.jsonl: the last one has the sums."""
    last = next((row for row in reversed(rows) if any(map(_STAGE.fullmatch, row))), {})
    names = [found[1] for found in map(_STAGE.fullmatch, last) if found is not None]
    return [
        StageTime(
            name=name,
            items=last[f"stage/{name}/items"],
            busy_s=last[f"stage/{name}/busy_s"],
            blocked_in_s=last[f"stage/{name}/blocked_in_s"],
            blocked_out_s=last[f"stage/{name}/blocked_out_s"],
            queue=max(row.get(f"stage/{name}/queue", 0) for row in rows),
        )
        for name in names
    ]


def hottest(stacks: Iterable[str]) -> dict[str, list[tuple[str, float]]]:
    """{role: (line, share of the role's samples), the first LINES of them}.

    stacks: py-spy's raw lines, "process PID:command;process PID:command;function (file:line);... samples", outermost
    first. A sample counts for its innermost line that is no library's, else for the innermost one; a replica's, which
    was forked from the node's own code, for the innermost one.
    """
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for line in stacks:
        frames, _, samples = line.strip().rpartition(" ")
        found = frames.split(";")
        calls = [frame for frame in found if not frame.startswith("process ")]
        if not calls or not samples.isdigit():
            continue
        process = next(frame for frame in reversed(found) if frame.startswith("process "))  # each below its parent
        role = _role(process)
        own = [call for call in calls if not any(mark in call for mark in _LIBRARY)] if role != "replica" else []
        counted[role][(own or calls)[-1]] += int(samples)
    return {
        role: [(line, count / counts.total()) for line, count in counts.most_common(LINES)]
        for role, counts in sorted(counted.items(), key=lambda item: -item[1].total())
    }


def _role(process: str) -> str:
    return next((role for mark, role in ROLES.items() if mark in process), "node")


def profiled(recipe: Path, words: Sequence[str], *, steps: int, rate: int, folder: Path) -> Path:
    """Runs it; returns the run's folder. Raises subprocess.CalledProcessError."""
    spy = Path(sysconfig.get_path("scripts")) / "py-spy"
    raw = folder / "profile.txt"
    command = [str(spy), "record", "--subprocesses", "--full-filenames", "--format", "raw", "--rate", str(rate)]
    run = [sys.executable, str(recipe), f"steps={steps}", f"runs={folder}", "name=run", "fresh=true", *words]
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
    """py-spy draws only what it samples itself, so this draws its text: a rectangle for each function, as wide as its
    samples, its callers below.
    """
    root: dict[str, Any] = {}
    for line in raw.read_text().splitlines():
        frames, _, samples = line.rpartition(" ")
        place = root
        for frame in frames.split(";") if samples.isdigit() else ():
            found = place.setdefault(frame, [0, {}])
            found[0] += int(samples)
            place = found[1]
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
            name = frame.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            shown = name[: int(width / 7)] if width > 30 else ""
            hue = sum(map(ord, frame)) % 50
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 1}" fill="hsl({hue},80%,70%)"'
            yield f"<g><title>{name}: {count}</title><rect {box}/>"
            yield f'<text x="{x + 3:.1f}" y="{y + 12}">{shown}</text></g>'
            yield from _boxes(below, x, y - HEIGHT, scale)
        x += width


def show(run: Path, raw: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    seconds = max(row.get("time/train_total_s", 0.0) for row in rows) or 1.0
    tokens = sum(row.get("tokens/generated", 0) for row in rows)
    cpu_s = sum(row.get("host/loop_cpu_share", 0.0) * row.get("time/step_s", 0.0) for row in rows)
    header = ["stage", "items/s", "busy", "blocked on input", "blocked on output", "longest queue"]
    title = f"stages; the event loop took {1e6 * cpu_s / max(1, tokens):.0f} us of CPU per sampled token"
    table(title, header, [stage.row(seconds) for stage in stages(rows)])
    blocked = [[place, f"{held_s:.3f} s"] for place, held_s in summary.get("loop_blocked_at", {}).items()]
    if blocked:
        table("where the event loop stood still", ["line", "for"], blocked)
    with raw.open() as stacks:
        lines = [
            [role if number == 0 else "", line, f"{100 * share:.0f} %"]
            for role, found in hottest(stacks).items()
            for number, (line, share) in enumerate(found)
        ]
    table("lines that took most, of each process's samples", ["process", "line", "share"], lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench profile", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=at_least(1), default=5)
    parser.add_argument("--rate", type=at_least(1), default=50, help="samples a second, of each process")
    parser.add_argument("--torch", action="store_true", help="PyTorch's own profiler in the learner, too")
    options, words = parser.parse_known_args(argv)
    words += [f"learner.trace={FOLDER.absolute()}"] if options.torch else []
    if not options.recipe.is_file():
        print(f"error: there is no recipe {options.recipe}. Fix: recipes/quickstart.py, say", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            run = profiled(options.recipe, words, steps=options.steps, rate=options.rate, folder=folder)
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
