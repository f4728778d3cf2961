"""Writes the tiny agent's word problems as programming problems: the program has to print the answer.

python recipes/code/word_problems.py train.jsonl split=train rows=4000
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from algo.reward.code.problem import Case, Problem, ProgramTests
from engine.console.options import Positional, parse
from recipes.tiny.task import problems
from sandbox.require import at_least, require


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Annotated[Path, Positional("the file that is written")]
    split: Annotated[Literal["train", "test"], "no arithmetic occurs in both"] = "train"
    rows: Annotated[int, "problems"] = 2000
    seed: Annotated[int, "of the problems"] = 0

    def __post_init__(self) -> None:
        require("rows", self.rows, at_least(1))


def main(config: Config) -> None:
    with config.output.open("w") as file:
        for number, each in enumerate(islice(problems(config.split, config.seed), config.rows)):
            tests = ProgramTests(cases=(Case(stdin="", expected=(str(each.answer),)),))
            problem = Problem(name=f"{config.split}-{config.seed}-{number}", hidden=tests)
            file.write(json.dumps({"question": each.question, "problem": msgspec.to_builtins(problem)}) + "\n")


if __name__ == "__main__":
    main(parse(Config, sys.argv[1:], program="python recipes/code/word_problems.py", description=__doc__))
