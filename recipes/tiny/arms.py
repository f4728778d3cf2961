"""Makes the runs of a comparison: some arms, each a program with options, all with the same seeds.

Promises
- Runs are made seed by seed, so that an early end leaves pairs.
- A finished run is used again and an unfinished one is resumed, so the same command continues a comparison that was
  interrupted. A run that was made with other options, or that another process still writes, is refused.

    arms = {
        "first": Arm(title="8 steps", options={"steps": 8}),
        "second": Arm(title="8 more", options={"steps": 8, "model": "{first}/checkpoint"}, after="first"),
    }
    Runs(folder=Path("runs/mine"), arms=arms, seeds=range(5)).make(in_a_process, print)
"""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.run.identity import Identity, describe

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart.py"
STOP_S = 30.0  # a run that is told to end stops its processes and writes its files first


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A program with its options, of which one run is made for each seed.

    title: its name for people. options: those beside `runs`, `name` and `seed`, by their whole names. `{other}` in a
    text stands for the folder of the run that the arm `other`, which comes before this one, made with the same seed.
    after: the arm whose runs these go on from; the steps, tokens and seconds of both count. seed_offset: is added to
    the seed, so that a run that goes on from another draws new problems. program: takes these options and writes
    config.json and, when it ends, summary.json into the folder runs/name, or into the folder `within` it.
    """

    title: str
    options: Mapping[str, Any]
    after: str | None = None
    seed_offset: int = 0
    program: Path = QUICKSTART
    within: str = ""


Launch = Callable[[Arm, Path, Mapping[str, Any]], None]
"""Makes one run: launch(arm, folder, options)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The runs of all arms with all seeds, in one folder: NAME-SEED for each."""

    folder: Path
    arms: Mapping[str, Arm]
    seeds: Sequence[int]

    def path(self, name: str, seed: int) -> Path:
        return self.folder / f"{name}-{seed}" / self.arms[name].within

    def options(self, name: str, seed: int) -> dict[str, Any]:
        """Returns the options of a run. Raises ValueError where one names an arm that is not before this one."""
        before = takewhile(lambda other: other != name, self.arms)
        folders = {other: self.path(other, seed) for other in before}
        try:
            filled = {
                option: value.format_map(folders) if isinstance(value, str) else value
                for option, value in self.arms[name].options.items()
            }
        except KeyError as error:
            raise ValueError(f"no arm {error} is before {name!r}, whose options name it. Fix: add it there") from None
        return {**filled, "seed": seed + self.arms[name].seed_offset}

    def make(self, launch: Launch, say: Callable[[str], None]) -> None:
        """Makes the runs that are missing. Raises ValueError for a folder that holds anything else."""
        todo = [(name, seed) for seed in self.seeds for name in self.arms]
        seconds: list[float] = []
        for number, (name, seed) in enumerate(todo, 1):
            arm, path, options = self.arms[name], self.path(name, seed), self.options(name, seed)
            head = f"[{number}/{len(todo)}] {arm.title}, seed {seed}:"
            if finished(path, options):
                say(f"{head} finished before{_end(path)}")
                continue
            if _under_way(path):  # by another comparison, or one that was killed
                raise ValueError(f"{path} is written by another process. Fix: wait for its end, or end it")
            if not (path / "checkpoints").is_dir():  # nothing to resume
                shutil.rmtree(path, ignore_errors=True)
            remaining = f", about {fmean(seconds) * (len(todo) - number + 1) / 60:.0f} min to go" if seconds else ""
            say(f"{head} running{remaining}")
            started = time.monotonic()
            launch(arm, path, options)
            if not finished(path, options):
                raise ValueError(f"{path} has no summary.json after its run; remove it to begin it again")
            seconds.append(time.monotonic() - started)
            say(f"{head} {seconds[-1]:.0f} s{_end(path)}")


def finished(path: Path, options: Mapping[str, Any]) -> bool:
    """Returns whether the folder holds the whole run. Raises ValueError when it holds another one."""
    if (path / "config.json").is_file():
        made = json.loads((path / "config.json").read_text())
        if differences := Identity(options).differences(made):
            raise ValueError(f"{path} differs in {describe(differences)}. Fix: give another folder=")
    return (path / "summary.json").is_file()


def _under_way(path: Path) -> bool:
    """Returns whether a run holds its folder's lock."""
    try:
        with (path / "lock").open("r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _end(path: Path) -> str:
    summary = json.loads((path / "summary.json").read_text())
    if "accuracy_final" not in summary:
        return ""
    return f", accuracy {summary['accuracy_final']:.3f}, tool errors {summary['tool_error_share_final']:.3f}"


def in_a_process(arm: Arm, path: Path, options: Mapping[str, Any]) -> None:
    """Makes one run in a process of its own, which prints to NAME-SEED.log. Ends this program when it fails."""
    folder = path.parent if arm.within else path
    arguments = [f"{name}={as_word(value)}" for name, value in options.items()]
    command = [sys.executable, str(arm.program), f"runs={folder.parent}", f"name={folder.name}", *arguments]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")  # not with_suffix: a name may have a dot
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            code = process.wait()
        finally:  # also on Ctrl-C, which the run gets too, and on SIGTERM, which it does not
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if code:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        sys.exit(f"{path} failed (exit code {code}): {last}\nThe whole output: {log}. The same command goes on here.")


def as_word(value: Any) -> str:
    """Returns the value of an option as it is written on a command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_as_program(main: Callable[[], None], name: str) -> None:
    """Runs a comparison as a program: errors are one line, and Ctrl-C and SIGTERM end the run under way too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
