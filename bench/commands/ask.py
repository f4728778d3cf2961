"""A researcher's questions: runs the commands that answer them, and keeps what they print, for bench/README.md.

    rocstar bench ask [limit staleness placement stage scale commit]

Each answer goes to bench/ask: NAME.json with what was printed, the seconds that it took and where, and NAME.png, the
picture that the command drew. `limit` makes the run that `placement` and `stage` read. After it: rocstar bench page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bench import ROOT
from bench.measuring.disturbance import Surroundings
from bench.measuring.questions import ANSWERS, QUESTIONS, Answer, Question
from bench.measuring.run import commit, environment
from bench.measuring.terminal import say
from engine.console.options import Positional, parse
from sandbox.require import one_of, require


@dataclass(frozen=True, kw_only=True)
class Options:
    questions: Annotated[tuple[str, ...], Positional(f"{', '.join(QUESTIONS)}; all by default")] = ()

    def __post_init__(self) -> None:
        for name in self.questions:
            require("questions", name, one_of(*QUESTIONS))


def main(argv: Sequence[str]) -> int:
    options = parse(Options, argv, program="rocstar bench ask", description=__doc__)
    for name in options.questions or QUESTIONS:
        question = QUESTIONS[name]
        say(f"== {question.text}")
        try:
            answer = answered(question)
        except subprocess.CalledProcessError as error:
            say(f"error: {error.cmd} ended with exit code {error.returncode}; see above")
            return 1
        answer.write(ANSWERS / f"{name}.json")
        if question.picture.startswith("runs/"):
            shutil.copy(ROOT / question.picture, ANSWERS / f"{name}.png")
        say(f"{name}: {answer.wall_s:.0f} s")
    return 0


def answered(question: Question) -> Answer:
    """Runs the commands. Raises CalledProcessError."""
    scripts = Path(sys.executable).parent
    around = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    printed, began = "", time.monotonic()
    with Surroundings() as surroundings:
        try:
            for command in question.commands:
                say(command)
                done = subprocess.run(
                    command, shell=True, cwd=ROOT, env=around, stdout=subprocess.PIPE, text=True, check=True
                )
                printed += done.stdout
        finally:
            if question.after:
                subprocess.run(question.after, shell=True, cwd=ROOT, env=around, check=False)
        others = surroundings.others()
    here = environment(load_before=0.0, others=others)
    return Answer(
        commands=question.commands,
        printed=shown(printed, question.keep),
        wall_s=round(time.monotonic() - began, 1),
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        machine=here.machine,
        others=here.others,
    )


def shown(printed: str, keep: str) -> str:
    """Returns the lines of what was printed that are kept, without the checkout's own path."""
    lines = [line.rstrip() for line in printed.replace(f"{ROOT}/", "").splitlines()]
    return "\n".join(line for line in lines if line and re.search(keep, line))
