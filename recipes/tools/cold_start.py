"""Makes a tiny model that knows the tools of sql.py or files.py but mostly guesses: where their training can begin.

    python recipes/tools/cold_start.py                  # writes runs/sql_agent; minutes on two cores
    python recipes/tools/sql.py model=runs/sql_agent schema=false ...
    python recipes/tools/cold_start.py recipe=files     # writes runs/files_agent
    python recipes/tools/files.py model=runs/files_agent ...

It is the tiny agent's Qwen3 of 0.5 M parameters with a tokenizer of its own. As there (recipes/tiny/cold_start.py), it
learns from demonstrations in two phases: first the craft, which is to look at a table or a file and to use what it
says; then bad manners, which are mostly to guess that. The result is a Hugging Face checkpoint in bfloat16.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM

from algo.loss.policy_losses import CrossEntropy
from engine.learner.process import LearnerDied
from engine.programs.job import run_job
from engine.rollout.chat_template import ChatTemplate
from engine.run.workspace import workspace
from engine.telemetry.watchdog import exit_process
from recipes.tiny.cold_start import Phase, check_output, learner, new_model, train
from recipes.tiny.task import Message, Mix
from recipes.tiny.tokenizer import train_tokenizer
from recipes.tools import file_demonstrations, sql_demonstrations
from sandbox.require import at_least, require_fields

CONVERSATIONS = 3000  # from which the tokenizer learns its merges
VOCABULARY = 768  # half as many tokens as with 512, since what SQL and tools' names repeat is one token


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """tokens: those learnt of a typical demonstration, by which the second phase divides its loss."""

    demonstrations: Callable[[Mix, int], Iterator[list[Message]]]
    tokens: int


LESSONS = {
    "sql": Lesson(demonstrations=sql_demonstrations.demonstrations, tokens=50),
    "files": Lesson(demonstrations=file_demonstrations.demonstrations, tokens=30),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    recipe: Annotated[Literal["sql", "files"], "the recipe whose tools it knows"] = "sql"
    output: Annotated[Path | None, "folder to write the checkpoint to; none: runs/sql_agent, runs/files_agent"] = None
    seed: Annotated[int, "seed of the weights and of the demonstrations"] = 1
    craft_steps: Annotated[int, "first phase: steps of 16 demonstrations at learning rate 3e-3"] = 1200
    manners_steps: Annotated[int, "second phase: steps of 32 demonstrations at learning rate 1e-3"] = 60
    threads: Annotated[int, "CPU threads of the learner"] = 1

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "craft_steps", "manners_steps", "threads")
        require_fields(self, at_least(0), "seed")
        check_output(self.folder)

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"{self.recipe}_agent"


def phases(config: Config) -> Iterator[Phase]:
    """Yields the two phases. The second divides its loss by a constant, so that short guesses do not win over calls."""
    lesson = LESSONS[config.recipe]
    yield Phase(
        title="A: craft",
        conversations=lesson.demonstrations(Mix(head=0.05, clean=0.75, err=0.2), config.seed),
        batch_size=16,
        learner=learner(config.threads, steps=config.craft_steps, lr=3e-3, warmup_steps=50, loss=CrossEntropy()),
    )
    yield Phase(
        title="B: manners",
        conversations=lesson.demonstrations(Mix(head=0.75, clean=0.1, err=0.15), config.seed + 1),
        batch_size=32,
        learner=learner(
            config.threads,
            steps=config.manners_steps,
            lr=1e-3,
            warmup_steps=10,
            loss=CrossEntropy(aggregate=lesson.tokens),
        ),
    )


async def make(config: Config) -> None:
    """Writes the checkpoint. Raises OSError or LearnerDied."""
    transformers.utils.logging.disable_progress_bar()
    config.folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=config.folder).close()  # a folder that takes no file is told now, not after minutes
    everything = Mix(head=0.3, clean=0.4, err=0.3)
    seen = list(islice(LESSONS[config.recipe].demonstrations(everything, 0), CONVERSATIONS))
    tokenizer = train_tokenizer(seen, VOCABULARY)
    chat = ChatTemplate(tokenizer)
    with workspace() as folder:
        source = folder / "start"
        new_model(config.seed, tokenizer).save_pretrained(source)
        for number, phase in enumerate(phases(config)):
            target = folder / str(number)
            losses = await train(phase, config.seed, chat, source, target)
            print(f"{phase.title}: mean loss of a token in each tenth of the steps {losses}")
            source = target
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, dtype=torch.float32).bfloat16()
        tokenizer.save_pretrained(config.folder, save_jinja_files=False)
        model.save_pretrained(config.folder)
    print(f"checkpoint: {config.folder}")


if __name__ == "__main__":
    exit_process(run_job(Config, make, expected=(LearnerDied, OSError), resumes=False))
