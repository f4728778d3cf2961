"""A researcher's questions: the commands that answer them, and the answers that are kept for bench/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench import ROOT

ANSWERS = ROOT / "bench" / "ask"
MOST_S = 600  # an answer comes within so many seconds on two cores


HEAD = """A researcher's questions, each answered by commands that take less than ten minutes on two cores.
`rocstar bench ask` runs them all and keeps what they print, which `rocstar bench page` shows here."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """commands: for a shell at the checkout. keep: which of the printed lines are shown, a regular expression. picture:
    what the commands draw. reading: how to read the answer. after: what cleans up, also after a failure.
    """

    text: str
    commands: tuple[str, ...]
    keep: str
    picture: str
    reading: str
    after: str = ""


QUESTIONS = {
    "limit": Question(
        text="Is it the tools, the KV cache, the engines or the event loop that limits my run?",
        commands=("rocstar run recipes/quickstart.py steps=8 name=ask fresh=true",),
        keep=r"^(\d+ steps in|Healthy|.* limit(s|ed)? this run|  alarm|  advice|Nothing|Sampling)",
        picture="engine/view/page.png",
        reading="Every run ends with this sentence; `rocstar view runs/ask` says it while the run goes on, and shows "
        "each replica's idle time by its cause. The picture is a step on its page.",
    ),
    "staleness": Question(
        text="What does staleness buy?",
        commands=("rocstar bench sweep recipes/quickstart.py over=max_staleness:0,1,2 steps=24 eval_every=2",),
        keep=r"",
        picture="runs/bench/sweep.png",
        reading="Any recipe and any of its options can be swept; `rounds=3` repeats each point with other seeds. "
        "`rocstar bench step` takes the same steps apart: the sides of a step, and the CPU of each process.",
    ),
    "placement": Question(
        text="Which placement policy suits my trace?",
        commands=("rocstar bench rivals runs/ask step=8",),
        keep=r"^[^{]",
        picture="runs/bench/rivals.png",
        reading="The step is the recorded one, the engines are simulated with costs fitted to the run. What lies "
        "within the simulator's error is no difference. `policy=mine.py:Mine` adds a policy of yours.",
    ),
    "stage": Question(
        text="What does my stage cost?",
        commands=("rocstar bench stage bench/ask/my_stage.py:skip_easy feed=runs/ask",),
        keep=r"",
        picture="runs/bench/stage.png",
        reading="The stage gets the run's recorded groups at full speed, without engines. What counts for a run is the "
        "share of the event loop at the run's own pace, and whether the stage takes more groups per second than that.",
    ),
    "scale": Question(
        text="How does it scale?",
        commands=(
            "rocstar bench sweep rollout over=concurrent:32,128,256 only=load trajectories=512 rounds=3 "
            "checkpoint=recipes/tiny/agent",
        ),
        keep=r"(concurrent|tokens_per_s|of_bare|token_s|━|plot)",
        picture="runs/bench/sweep.png",
        reading="Rollouts in flight on the same two engines, beside those engines alone; "
        "`rocstar bench sweep sim_fleet over=replicas:8,64,512` does the same with simulated replicas.",
    ),
    "commit": Question(
        text="Did my commit cost 3 %?",
        commands=(
            "git worktree add --force --detach runs/before HEAD~1",
            "rocstar bench compare learner other=runs/before quick=true",
        ),
        after="git worktree remove --force runs/before",
        keep=r"^[^H]",
        picture="runs/bench/compare.png",
        reading="Rounds of both checkouts are run in turns. The column `shows` says how small a change so many rounds "
        "would have shown; `rounds=15` shows a smaller one.",
    ),
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the commands of a question printed. wall_s: all of them. others: as in `Environment`."""

    commands: tuple[str, ...]
    printed: str
    wall_s: float
    date: str
    commit: str
    machine: str
    others: float

    @classmethod
    def read(cls, path: Path) -> Answer:
        """Raises ValueError naming a file that holds no answer."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is no answer: {error}") from None

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def load(folder: Path) -> dict[str, Answer]:
    """Returns the answers of a folder by question. Raises ValueError naming a file that is no answer."""
    return {name: Answer.read(folder / f"{name}.json") for name in QUESTIONS if (folder / f"{name}.json").is_file()}


def section(answers: Mapping[str, Answer]) -> str:
    """Returns the part of bench/README.md with the questions that have an answer."""
    lines = ["## Ask", "", HEAD, ""]
    for name, answer in answers.items():
        question = QUESTIONS[name]
        picture = f"ask/{name}.png" if question.picture.startswith("runs/") else f"../{question.picture}"
        beside = f"; other processes used {100 * answer.others:.0f} % of it meanwhile" if answer.others > 0.1 else ""
        lines += [f"### {question.text}", "", "```", *answer.commands, "```", ""]
        lines += [f"It took {answer.wall_s:.0f} s on {answer.machine}{beside} ({answer.date}, commit {answer.commit}):"]
        lines += ["", "```", answer.printed, "```", "", question.reading, ""]
        lines += [f"![{question.text}]({picture})", ""]
    return "\n".join(lines)
