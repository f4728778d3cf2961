"""Trains a model to write programs, graded by hidden tests in the sandbox.

    python recipes/code/train.py model=models/Qwen3-1.7B data=apps.parquet held_out=HumanEval.jsonl.gz devices=0
    python recipes/code/train.py ... score=share public_tests=true

Rows of HumanEval, MBPP, APPS, TACO and LiveCodeBench are known by their fields (`recipes.code.formats`); README.md
shows rows of your own. The tool is Python. With public_tests=true the model may also run a problem's public tests while
it thinks. The program is the last ```python block of the last turn; by default a system message asks for it.

The tiny agent writes no such block, but its tool calls are programs. This trains it on two CPU cores in minutes:

    python recipes/code/word_problems.py train.jsonl split=train
    python recipes/code/word_problems.py test.jsonl split=test rows=256
    python recipes/code/train.py data=train.jsonl held_out=test.jsonl program=call
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from algo.eval_stats import avg_at_k
from algo.learner.config import LearnerConfig
from algo.reward.code.code_reward import TEST_LIMITS, CodeReward
from algo.reward.code.extract import ASK_FOR_PROGRAM, program_in_answer, program_in_call
from algo.reward.code.problem import Problem
from engine.assembly.config import TrainingConfig
from engine.assembly.training import training
from engine.data.prompts import Prompts, read_prompts
from engine.data.tables import open_table
from engine.errors import BadInput
from engine.ports import Tool
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.watchdog import exit_process
from engine.tools.python_feedback import message_feedback, traceback_feedback
from engine.tools.python_tool import PythonTool
from recipes.code.formats import answer_of, question_of, task_of
from recipes.code.run_tests import RunTests
from recipes.options import EvalOptions, SandboxOptions, require_readable
from recipes.tiny.task import SHIPPED
from sandbox import Limits
from sandbox.require import positive, require_fields

PROGRAMS = {"answer": program_in_answer, "call": program_in_call}


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    data: Annotated[Path, "what is trained on: JSONL, parquet, a datasets folder, the hub's ID/CONFIG:SPLIT"] = Path(
        "train.jsonl"
    )
    held_out: Annotated[Path, "the same: what is evaluated on"] = Path("test.jsonl")
    score: Annotated[Literal["all", "share"], "reward: 1 if all tests pass, or the share that does"] = "all"
    program: Annotated[
        Literal["answer", "call"], "the program: the last block of the answer, or the code of the last tool call"
    ] = "answer"
    public_tests: Annotated[bool, "the model has a tool that runs the public tests"] = False
    test_cpu_s: Annotated[float, "limit of CPU time of a test; of time on the clock it has three times that"] = (
        TEST_LIMITS.cpu_s
    )
    test_memory_mb: Annotated[int, "limit of memory of a test"] = TEST_LIMITS.memory_bytes >> 20
    system: Annotated[str | None, "a system message; none: one that asks for a program, with program=answer"] = None
    steps: int = 100
    eval_problems: int = 256
    eval_every: int = 10
    rollout: RolloutConfig = RolloutConfig(max_tokens=512, max_turns=5)  # noqa: RUF009  frozen
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        require_fields(self, positive, "test_cpu_s", "test_memory_mb")
        require_readable(self.prompts, data=self.data, held_out=self.held_out)
        super().__post_init__()

    def prompts(self, path: Path, **stream: Any) -> Prompts:
        """Raises ValueError naming file, row and field."""
        question = named_question if self.public_tests else question_of
        return read_prompts(path, question=question, answer=answer_of, **stream)

    def public_problems(self) -> dict[str, Problem]:
        """Returns the problems of both files by name."""
        tables = [open_table(self.data), open_table(self.held_out)]
        problems = [task_of(table.row(number)).problem for table in tables for number in range(len(table))]
        return {problem.name: problem for problem in problems}

    @property
    def limits(self) -> Limits:
        """The limits of a test."""
        memory_bytes = self.test_memory_mb << 20
        return msgspec.structs.replace(
            TEST_LIMITS, cpu_s=self.test_cpu_s, wall_s=3 * self.test_cpu_s, memory_bytes=memory_bytes
        )

    @property
    def system_message(self) -> str | None:
        if self.system is None:
            return ASK_FOR_PROGRAM if self.program == "answer" else None
        return self.system or None

    def training(self) -> TrainingConfig:
        config = super().training()
        return replace(config, chat=ChatConfig(system=self.system_message), sandbox=self.sandbox())


def named_question(row: Mapping[str, Any]) -> str:
    """Returns the question and the name by which `run_tests` knows the problem."""
    task = task_of(row)
    return f"{task.question}\n\nThe name of this problem is {task.problem.name}."


def require_tasks(path: Path) -> None:
    """Reads every row, so that a run does not end late for one. Raises BadInput, which names those that are refused."""
    table, refused = open_table(path), []
    for number in range(len(table)):
        try:
            task_of(table.row(number))
        except ValueError as error:
            refused.append(f"{table.where(number)}: {error}")
    if refused:
        raise BadInput(
            f"{len(refused)} of {len(table)} problems cannot be graded, first {refused[0]}. Fix: leave them out "
            f"(python recipes/code/grade.py data={path} names all)"
        )


async def train(config: Config, run: Run) -> dict[str, Any]:
    for path in (config.data, config.held_out):
        await asyncio.to_thread(require_tasks, path)
    held_out = list(islice(config.prompts(config.held_out), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        feedback = message_feedback if config.model == SHIPPED else traceback_feedback  # the tiny agent reads little
        tools: list[Tool] = [PythonTool(job.sandbox, feedback=feedback)]
        if config.public_tests:
            tools.append(RunTests(config.public_problems(), job.sandbox, config.limits))
        reward = CodeReward(job.sandbox, score=config.score, program=PROGRAMS[config.program], limits=config.limits)
        rollouts = job.rollouts(tools)
        evaluation = await job.evaluation(held_out, reward, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(config.prompts(config.data, seed=config.seed, epochs=None)),
                job.group(rollouts, reward, config.select),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
