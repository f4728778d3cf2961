"""Trains a model on questions and answers from a file, with tools and a reward of yours or those that are here.

    python recipes/train_on_file.py model=models/Qwen3-1.7B data=train.parquet held_out=test.jsonl devices=0 replicas=1
    python recipes/train_on_file.py data=train.jsonl held_out=test.jsonl      (the tiny agent, on the CPU)
    python recipes/train_on_file.py ... question=text answer=label reward=my.py:score tools=my.py:lookup,python

A row needs a question and an answer, in columns that data sets usually have (`engine.data.prompts.read_prompts` lists
them) or in those that `question=` and `answer=` name. By default the tool is Python, whose sessions keep their
variables from call to call, and an answer is graded as mathematics.

    reward=my.py:score      def score(trajectory) -> float: above 0 is right. `trajectory.prompt.answer` is the row's
                            answer, `trajectory.final_text` the last turn. `async def` may wait for others.
    tools=my.py:lookup      def lookup(word: str, limit: int = 3) -> str: the model is shown its docstring and types.
                            An object is a tool, a stateful tool or a world (recipes/parts.md)

What MathReward grades is the `<answer>\\boxed{...}</answer>` of a trajectory's last turn. By default a system message
asks for it; `system=` gives another message, and `system=""` none. The tiny agent answers so without being asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from algo.eval_stats import avg_at_k
from algo.learner.config import LearnerConfig
from algo.reward.answers import ASK_FOR_ANSWER
from algo.reward.math_reward import MathReward
from algo.reward.maths.grader import GRADER_MODULES
from algo.reward.tool_errors import ToolErrorPenalty
from engine.assembly.config import TrainingConfig
from engine.assembly.named_parts import load_reward, load_tool
from engine.assembly.training import training
from engine.data.prompts import Prompts, after_hashes, read_prompts
from engine.pipeline.pipeline import Inbox, Outbox, Stage
from engine.ports import GroupReward
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.watchdog import exit_process
from engine.tools.python_tool import PythonSessions
from recipes.options import EvalOptions, SandboxOptions, require_readable
from recipes.tiny.task import SHIPPED
from sandbox import TIERS, Tier
from sandbox.require import at_least, require, within

GRADER = Tier(name="grader", preload=GRADER_MODULES)
MATHS, PYTHON = "maths", "python"


@dataclass(frozen=True, kw_only=True)
class Config(EvalOptions, SandboxOptions):
    data: Annotated[Path, "what is trained on: JSONL, parquet, a datasets folder, the hub's ID/CONFIG:SPLIT"] = Path(
        "train.jsonl"
    )
    held_out: Annotated[Path, "the same: what is evaluated on"] = Path("test.jsonl")
    question: Annotated[str | None, "column of the question; none: the first that data sets usually have"] = None
    answer: Annotated[str | None, "column of the answer; none: the first that data sets usually have"] = None
    after_hashes: Annotated[bool, "the answer is what follows ####, as in GSM8K"] = False
    reward: Annotated[str, "maths, or a function of yours, FILE.py:NAME"] = MATHS
    tools: Annotated[tuple[str, ...], "python and functions of yours, FILE.py:NAME, by commas; empty: none"] = (PYTHON,)
    system: Annotated[
        str | None, "a system message; none: with reward=maths, one that asks for <answer>\\boxed{...}</answer>"
    ] = None
    tool_error_penalty: Annotated[float, "times the share of failed calls, this is subtracted from the reward"] = 0.0
    skip_above: Annotated[float, "share of right answers above which a group is not trained"] = 1.0
    steps: int = 100
    eval_problems: int = 256
    eval_every: int = 10
    rollout: RolloutConfig = RolloutConfig(max_tokens=512, max_turns=5)  # noqa: RUF009  frozen
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(lr=1e-5))

    def __post_init__(self) -> None:
        if self.answer is not None and self.after_hashes:
            raise ValueError("answer must be none with after_hashes, which reads the column `answer`")
        require_readable(self.prompts, data=self.data, held_out=self.held_out)
        if self.reward != MATHS:
            load_reward(self.reward)
        names = [PYTHON if place == PYTHON else load_tool(place).name for place in self.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"tools must have different names, got {', '.join(names)}")
        require("tool_error_penalty", self.tool_error_penalty, at_least(0))
        if self.tool_error_penalty and self.reward != MATHS and isinstance(load_reward(self.reward), GroupReward):
            raise ValueError(f"tool_error_penalty must be 0 with a reward of groups, got {self.tool_error_penalty}")
        require("skip_above", self.skip_above, within("[0, 1]"))
        super().__post_init__()

    def prompts(self, path: Path, **stream: Any) -> Prompts:
        """Raises ValueError naming file, row and column."""
        answer = after_hashes if self.after_hashes else self.answer
        return read_prompts(path, question=self.question, answer=answer, **stream)

    @property
    def system_message(self) -> str | None:
        """The system message; by default none for the tiny agent, which knows the form, and for a user's reward."""
        if self.system is None:
            return ASK_FOR_ANSWER if self.reward == MATHS and self.model != SHIPPED else None
        return self.system or None

    def training(self) -> TrainingConfig:
        grader = [GRADER] if self.reward == MATHS else []
        jailed = self.reward == MATHS or PYTHON in self.tools
        return replace(
            super().training(),
            chat=ChatConfig(system=self.system_message),
            sandbox=self.sandbox([*TIERS, *grader]) if jailed else None,
        )


def skip_easy(above: float) -> Callable[[Inbox, Outbox], Any]:
    """Returns a stage that drops the groups whose share of right answers is larger."""

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for group in inbox:
            if group.drop is None and (group.rewards_G > 0).mean() > above:
                group = replace(group, kept=(), advantages_K=None, drop="easy")
            await outbox.put(group)

    return stage


async def train(config: Config, run: Run) -> dict[str, Any]:
    held_out = list(islice(config.prompts(config.held_out), config.eval_problems))
    async with training(config.training(), run, sinks=config.sinks(run)) as job:
        tools = [PythonSessions(job.sandbox) if place == PYTHON else load_tool(place) for place in config.tools]
        right = MathReward(runner=job.sandbox) if config.reward == MATHS else load_reward(config.reward)
        penalty = config.tool_error_penalty
        reward = right
        if penalty and not isinstance(right, GroupReward):
            reward = ToolErrorPenalty(reward=right, factor=penalty)
        rollouts = job.rollouts(tools)
        evaluation = await job.evaluation(held_out, right, rollouts=rollouts, estimate=avg_at_k, **config.evaluating)
        return await job.run(
            [
                job.admit(config.prompts(config.data, seed=config.seed, epochs=None)),
                job.group(rollouts, reward, config.select),
                Stage(name="skip_easy", run=skip_easy(config.skip_above)),
                job.batch(),
                job.train(config.make_batch, evaluations=[evaluation]),
            ]
        )


recipe = Recipe(config=Config, train=train)

if __name__ == "__main__":
    exit_process(main(recipe))
