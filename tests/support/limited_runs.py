"""The quick start with one fault each: a program for tests/slow/test_diagnosis.py, and for trying by hand.

    python tests/support/limited_runs.py FAULT [field=value ...]      runs/FAULT
    python tests/support/limited_runs.py --record FOLDER RUN ...      the rows that tests/unit keeps of such runs

Replicas, jails, learner and weight transfer are the real ones; what is slow or scarce is named by the fault.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from algo.group.batch import make_batch, select_and_score
from algo.reward.math_reward import MathReward
from engine.assembly import training as opened
from engine.assembly.training import Training
from engine.pipeline.pipeline import Inbox, Outbox, Stage
from engine.ports import Tool, ToolReply
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.replica.replica import Replica
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import PythonTool
from recipes.quickstart import Config
from recipes.tiny.task import prompts

SMALL = {"steps": 4, "prompts_per_step": 8, "group_size": 4}

# What each fault takes of the options.
OPTIONS: dict[str, dict[str, Any]] = {
    "healthy": {"prompts_per_step": 16, "oversample": 8, "learner.minibatches": 1},  # the learner gets little to do
    "tool": {},
    "kv": {"kv_blocks": 20},
    "tail": {"prompts_per_step": 4, "rollout.max_tokens": 900},
    "learner": {
        "prompts_per_step": 16,
        "group_size": 8,
        "algorithm": "grpo",
        "learner.micro_batch_tokens": 1,
        "learner.minibatches": 128,
    },
    "sync": {},
    "staleness": {"prompts_per_step": 4, "rollout.max_tokens": 900, "max_staleness": 1},
    "host": {},
    "stage": {},
    "dead": {},
}
TOOL_S = 4.0  # longer than all else of a rollout, on a machine that others use too
TRANSFER_S = 8.0
BLOCKED_S = 0.8  # of each group
JUDGED_S = 1.5  # the same
LONG_EVERY = 32  # trajectories, of which one does not end by itself


class SlowTool:
    """Python in the jail, of which each call waits first."""

    def __init__(self, inner: PythonTool) -> None:
        self.inner, self.name = inner, inner.name

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        await asyncio.sleep(TOOL_S)
        return await self.inner(arguments)


class SlowTransfer(Replica):
    """A replica to which weights travel over a slow line."""

    async def update_weights(self, path: str, version: int) -> None:
        await asyncio.sleep(TRANSFER_S)
        await super().update_weights(path, version)


async def blocks_the_loop(inbox: Inbox, outbox: Outbox) -> None:
    """A stage of a user's that computes where it should await."""
    async for group in inbox:
        time.sleep(BLOCKED_S)  # noqa: ASYNC251  this is the fault
        await outbox.put(group)


async def judges(inbox: Inbox, outbox: Outbox) -> None:
    """A stage of a user's that awaits somebody's answer for each group."""
    async for group in inbox:
        await asyncio.sleep(JUDGED_S)
        await outbox.put(group)


OWN_STAGES = {"host": blocks_the_loop, "stage": judges}


def some_never_end(job: Training) -> None:
    """One trajectory in LONG_EVERY is sampled to the end of its budget."""
    turn = job.fleet.turn

    def longer(key: int, group: int, token_ids: Any, sampling: Any, *rest: Any, **others: Any) -> Any:
        if key % LONG_EVERY == 0:
            sampling = replace(sampling, ignore_eos=True, stop_token_ids=())
        return turn(key, group, token_ids, sampling, *rest, **others)

    job.fleet.turn = longer  # type: ignore[method-assign]


async def kill_replica() -> None:
    """Kills the second engine, and each that is to replace it, until it is given up."""
    node = psutil.Process()
    old = {child.pid for child in node.children() if "EngineCor" in child.name()}
    psutil.Process(max(old)).kill()
    while True:
        for child in node.children():
            if "EngineCor" in child.name() and child.pid not in old:
                child.kill()
        await asyncio.sleep(0.1)


@asynccontextmanager
async def with_fault(fault: str, job: Training) -> AsyncIterator[None]:
    if fault in ("tail", "staleness"):
        some_never_end(job)
    if fault != "dead":
        yield
        return
    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill_replica(), name="kill")
        yield
        killing.cancel()


def train_with(fault: str) -> Any:
    async def train(config: Config, run: Run) -> None:
        if fault == "sync":
            opened.Replica = SlowTransfer  # type: ignore[misc]
        async with opened.training(config.training(), run) as job, with_fault(fault, job):
            tool: Tool = PythonTool(job.sandbox)
            rollouts = job.rollouts([SlowTool(tool) if fault == "tool" else tool])
            own = [Stage(name="mine", run=OWN_STAGES[fault])] if fault in OWN_STAGES else []
            await job.run(
                [
                    job.admit(prompts("train", config.seed)),
                    job.group(rollouts, MathReward(integers_only=True), select_and_score(config.selector, config.seed)),
                    *own,
                    job.batch(),
                    job.train(make_batch),
                ]
            )

    return train


def record(folder: Path, runs: list[Path]) -> None:
    """Keeps of each run its rows, with four digits of each number, and its options: a row of the file each."""
    for run in runs:
        config = json.loads((run / "config.json").read_text())
        for name in ("argv", "directory", "recipe", "options", "versions", "model", "runs"):
            del config[name]
        rows = [
            {name: float(f"{value:.4g}") for name, value in row.items() if name != "crc32"}
            for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        ]
        lines = map(json.dumps, [config, *rows])
        (folder / f"{run.name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    fault, *words = sys.argv[1:]
    if fault == "--record":
        record(Path(words[0]), [Path(word) for word in words[1:]])
        sys.exit(0)
    options = [f"{name}={value}" for name, value in {"name": fault, **SMALL, **OPTIONS[fault]}.items()]
    given = {word.partition("=")[0] for word in words}
    words += [option for option in options if option.partition("=")[0] not in given]
    exit_process(main(Recipe(config=Config, train=train_with(fault)), words))
