"""Grades programs from a file by the hidden tests of a data set, and estimates pass@k.

    python recipes/code/grade.py samples.jsonl data=HumanEval.jsonl.gz
    python recipes/code/grade.py data=problems.jsonl                    (checks the problems themselves)

A sample is a line with `task_id` and one of `completion` (continues the problem's prompt, as HumanEval has it),
`program` (whole), or `text` (an answer, whose last ```python block is the program). Results go to
samples.jsonl_results.jsonl: the line with `passed` and `result`. pass@k is the unbiased estimator of Codex
(arXiv 2107.03374), over the problems that have at least k samples.

What could not be graded is a gap, not a failure: it is named, left out of pass@k, and the exit status is 1.

Without samples the problems are checked: each reference solution has to pass, and a program that does nothing has to
fail. Problems for which that is not so are named, and the exit status is 1.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from algo.eval_stats import pass_at_k
from algo.reward.code.code_reward import TEST_LIMITS, CodeGrader
from algo.reward.code.extract import last_block
from algo.reward.code.problem import ProgramTests, Tests
from engine.console.options import Positional, parse
from engine.data.tables import open_table
from engine.ports import GraderUnavailable
from recipes.code.formats import Task, task_of
from sandbox import Limits, Sandbox, SandboxUnavailable
from sandbox.require import at_least, positive, require, require_fields

IN_FLIGHT = 32  # samples that are graded at once


@dataclass(frozen=True, kw_only=True)
class Config:
    samples: Annotated[Path | None, Positional("JSON lines of samples; none: the reference solutions")] = None
    data: Annotated[Path, "the problems: JSONL, parquet, a datasets folder, the hub's ID/CONFIG:SPLIT"] = Path(
        "HumanEval.jsonl.gz"
    )
    k: Annotated[tuple[int, ...], "of pass@k"] = (1, 10, 100)
    test_cpu_s: Annotated[float, "limit of CPU time of a test; of time on the clock it has three times that"] = (
        TEST_LIMITS.cpu_s
    )
    test_memory_mb: Annotated[int, "limit of memory of a test"] = TEST_LIMITS.memory_bytes >> 20
    output: Annotated[Path | None, "file of results; none: SAMPLES_results.jsonl, and no file for references"] = None

    def __post_init__(self) -> None:
        require_fields(self, positive, "test_cpu_s", "test_memory_mb")
        for each in self.k:
            require("k", each, at_least(1))
        if self.output is not None and (self.output.is_dir() or not self.output.parent.is_dir()):
            raise ValueError(f"output must be a file in a folder that exists, got {str(self.output)!r}")
        open_table(self.data)
        if self.samples is not None:
            open_table(self.samples)

    @property
    def limits(self) -> Limits:
        """The limits of a test."""
        return msgspec.structs.replace(
            TEST_LIMITS,
            cpu_s=self.test_cpu_s,
            wall_s=3 * self.test_cpu_s,
            memory_bytes=self.test_memory_mb << 20,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A program for a task. row: the line of the samples, for the results."""

    task: Task
    program: str
    row: Mapping[str, Any]


def tasks(data: Path) -> tuple[dict[str, Task], list[str]]:
    """Returns the tasks by name, and why rows were refused."""
    table = open_table(data)
    read: dict[str, Task] = {}
    refused = []
    for number in range(len(table)):
        try:
            task = task_of(table.row(number))
        except ValueError as error:
            refused.append(f"{table.where(number)}: {error}")
            continue
        name = task.problem.name
        if name in read:
            refused.append(
                f"{table.where(number)}: another row is called {name!r} too. Fix: give each a task_id of its own"
            )
            continue
        read[name] = task
    return read, refused


def samples_of(config: Config, known: Mapping[str, Task], refused: list[str]) -> Iterator[Sample]:
    """Yields the samples of the file; without one, references and programs that do nothing.

    Raises ValueError naming line and field.

    refused: why rows were refused; where there are some, a sample whose task is unknown becomes one more.
    """
    if config.samples is None:
        for name, task in known.items():
            if task.problem.hidden.reference:
                yield Sample(task=task, program=task.problem.hidden.reference, row={"task_id": name})
            yield Sample(task=task, program=idle(task.problem.hidden), row={"task_id": name, "idle": True})
        return
    table = open_table(config.samples)
    for number in range(len(table)):
        row = table.row(number)
        name = str(row.get("task_id"))
        if name not in known:
            reason = f"{table.where(number)}: task_id {name!r} is not in {config.data}, or was refused there"
            if not refused:
                raise ValueError(reason)
            refused.append(reason)
            continue
        yield Sample(task=known[name], program=_program(row, known[name], table.where(number)), row=row)


def idle(tests: Tests) -> str:
    """Returns a program that does nothing.

    >>> from algo.reward.code.problem import FunctionTests
    >>> idle(FunctionTests(functions=("f",), tests=("assert f(1) == 2",)))
    'def f(*_, **__):\\n    return None\\n'
    """
    if isinstance(tests, ProgramTests):
        return ""
    return "".join(f"def {name}(*_, **__):\n    return None\n" for name in tests.functions)


def _program(row: Mapping[str, Any], task: Task, where: str) -> str:
    for field in ("completion", "program", "text"):
        value = row.get(field)
        if isinstance(value, str):
            if field == "text":
                return last_block(value) or ""
            return task.prefix + value if field == "completion" else value
    raise ValueError(f"{where}: a sample needs completion, program or text; it has {', '.join(row)}")


Verdict = tuple[bool | None, str]
"""Whether a program passed, None if it could not be graded, and why."""


async def grade_samples(samples: Sequence[Sample], grader: CodeGrader) -> list[Verdict]:
    """Returns the verdict on each sample; IN_FLIGHT are graded at once."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def grade(sample: Sample) -> Verdict:
        async with slots:
            try:
                result = await grader.grade(sample.program, sample.task.problem.hidden)
            except (GraderUnavailable, ValueError) as error:
                return None, str(error)
        return all(result.passed), result.complaint or "passed"

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(grade(each), name=f"sample-{number}") for number, each in enumerate(samples)]
    return [task.result() for task in tasks]


async def grade_all(config: Config) -> int:
    """Grades, writes and prints. Returns the exit status."""
    known, refused = tasks(config.data)
    samples = list(samples_of(config, known, refused))
    passed: defaultdict[str, list[bool]] = defaultdict(list)
    gaps: dict[str, str] = {}
    lines = []
    broken = 0
    async with Sandbox() as box:
        verdicts = await grade_samples(samples, CodeGrader(box, limits=config.limits, stop=True))
    for sample, (verdict, result) in zip(samples, verdicts, strict=True):
        name, is_idle = sample.task.problem.name, "idle" in sample.row
        if verdict is None:
            gaps[name] = result
        elif config.samples is None and verdict is is_idle:
            broken += 1
            complaint = "a program that does nothing passes" if is_idle else f"the reference fails: {result}"
            print(f"broken: {name}: {complaint}")
        if is_idle:
            continue
        lines.append({**sample.row, "passed": verdict, "result": result})
        if verdict is not None:
            passed[name].append(verdict)
    path = config.output or (config.samples and config.samples.with_name(f"{config.samples.name}_results.jsonl"))
    if path is not None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"results: {path}")
    for reason in [*refused, *(f"{name}: {reason}" for name, reason in gaps.items())]:
        print(f"not graded: {reason}", file=sys.stderr)
    counts = Counter(line["passed"] for line in lines)
    print(f"{counts[True]} of {len(lines)} programs passed, {counts[None]} could not be graded")
    if config.samples is None:
        print(f"{len(known)} problems: {broken} faults found, {len(known) - len(lines)} without a reference")
    print(json.dumps(estimates(passed, config.k)))
    return 1 if gaps or refused or broken else 0


def estimates(passed: Mapping[str, list[bool]], ks: tuple[int, ...]) -> dict[str, float]:
    """Returns pass@k for each k of which some problem has as many samples.

    >>> estimates({"a": [True, False], "b": [False, False]}, (1, 2, 10))
    {'pass@1': 0.25, 'pass@2': 0.5}
    """
    result = {}
    for k in ks:
        values = [pass_at_k(len(each), sum(each), k) for each in passed.values() if len(each) >= k]
        if values:
            result[f"pass@{k}"] = float(np.mean(values))
    return result


def main(config: Config) -> int:
    try:
        return asyncio.run(grade_all(config))
    except (ValueError, SandboxUnavailable) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("grade.py: interrupted; no results were written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(parse(Config, sys.argv[1:], program="python recipes/code/grade.py", description=__doc__)))
