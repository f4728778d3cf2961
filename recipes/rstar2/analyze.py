"""Computes where a model is uncertain when it reasons with a tool, and draws a run's curves.

    python recipes/rstar2/analyze.py run=runs/quickstart
    python recipes/rstar2/analyze.py run=runs/NAME model=DIR steps=8,16 rollouts=64

The trajectories in the run's record go through one forward pass of its checkpoint, token by token as they were sampled.
Writes into RUN/analysis/:

    analysis.json   all figures, and the definitions that they rest on
    entropy.png     high-entropy tokens by kind, by position, after a tool's reply and over training
    curves.png      tool errors, lengths, truncation and accuracy of the run, beside the report's figures

Entropies are those of one model for all steps, by default the run's last weights, at temperature 1; the mean entropy
of the policy while it was trained is the learner's own metric and is drawn beside them. What counts as high, forking
and reflection is defined in `engine/diagnosis/token_kinds.py`; the page of a run marks such tokens in its trajectories.

A step whose entropies are computed is not computed again (RUN/analysis/entropies/): an interrupted analysis goes on by
the same command.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from engine import metric_names as metric
from engine.atomic_files import CannotWrite, write_whole
from engine.console.options import parse
from engine.console.progress import Bar
from engine.diagnosis.token_kinds import AFTER_REPLY, FORKING_PHRASES, HIGH_SHARE
from engine.recording.files import check_files
from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, rollouts_of
from engine.telemetry.watchdog import exit_process
from engine.types import Trajectory
from recipes.rstar2.parts.analysis import report_curves
from recipes.rstar2.parts.analysis.token_entropy import Scored, shares
from sandbox.printable import printable
from sandbox.require import at_least, require, require_fields, within

# A model's own samples have its entropy as mean negative log-likelihood; with this much more, another one sampled them.
FOREIGN_NLL = 0.5
STEPS = 8  # steps that are analysed unless others are asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run: Annotated[Path, "folder of the run"] = Path("runs/quickstart")
    model: Annotated[Path | None, "Hugging Face folder; none: the run's own checkpoint/"] = None
    output: Annotated[Path | None, "folder to write to; none: analysis/ in the run's"] = None
    steps: Annotated[tuple[int, ...], f"recorded steps to analyse; none: {STEPS} of them, evenly spread"] = ()
    rollouts: Annotated[int, "rollouts of each step at most, evenly spread over its groups"] = 256
    batch_tokens: Annotated[int, "tokens of one forward pass; a longer trajectory goes alone"] = 8192
    high_share: Annotated[float, "share of the sampled tokens whose entropy counts as high"] = HIGH_SHARE
    after_reply: Annotated[int, "sampled tokens after a tool's reply that may be reflection tokens"] = AFTER_REPLY
    device: Annotated[Literal["cpu", "cuda"], "where the forward pass runs"] = "cpu"
    threads: Annotated[int, "CPU threads"] = 2

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rollouts", "batch_tokens", "after_reply", "threads")
        require("high_share", self.high_share, within("(0, 1)"))
        self.chosen_steps  # noqa: B018  before anything is loaded
        if self.model is None and not (self.run / "checkpoint" / "config.json").is_file():
            raise ValueError(f"{self.run} has no checkpoint/ yet: it has not ended. Fix: model=DIR, or let it end")

    @property
    def chosen_steps(self) -> list[int]:
        """The steps to analyse. Raises ValueError for a run or a step that is not recorded."""
        check_files(self.run)
        record = RecordedRun(self.run)
        record.find()
        return sorted({record.find(step) for step in self.steps}) or spread(record.steps, STEPS)

    @property
    def checkpoint(self) -> Path:
        return self.model or self.run / "checkpoint"

    @property
    def folder(self) -> Path:
        return self.output or self.run / "analysis"


Item = TypeVar("Item")
Entropies = list[tuple[NDArray[np.float32], NDArray[np.float32]]]  # (entropy_T, logprob_T) of each rollout


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """Returns at most `most` of the items, evenly spread, the last one among them.

    >>> spread([1, 2, 3, 4, 5, 6], 3), spread([1, 2], 3)
    ([2, 4, 6], [1, 2])
    """
    count = min(most, len(items))
    return [items[(at + 1) * len(items) // count - 1] for at in range(count)]


def trajectories_of(config: Config, step: int) -> list[Trajectory]:
    """Returns the trajectories of a step to analyse. Raises ValueError where none has a sampled token."""
    record = RecordedRun(config.run)
    rollouts = rollouts_of(record, step, load_tokenizer(record.tokenizer))
    trajectories = [each.trajectory for each in rollouts if each.trajectory.sampled_T.any()]
    if not trajectories:
        raise ValueError(f"step {step} of {record.folder} holds no trajectory with a sampled token. Fix: other steps=")
    return spread(trajectories, config.rollouts)


def fingerprint(checkpoint: Path, trajectories: Sequence[Trajectory]) -> str:
    """Returns what entropies depend on: the checkpoint's files, and which trajectories."""
    files = sorted(checkpoint.glob("*.safetensors"))
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    of = [(each.prompt.id, each.sample, len(each.token_ids_T)) for each in trajectories]
    return json.dumps([str(checkpoint.resolve()), weights, of])


def read_entropies(path: Path, key: str) -> Entropies | None:
    """Returns the entropies of an earlier analysis, or None where there are none, or those of something else."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as kept:
            if str(kept["key"]) != key:
                return None
            ends = np.cumsum(kept["lengths"])[:-1]
            return list(zip(np.split(kept["entropy"], ends), np.split(kept["logprob"], ends), strict=True))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def write_entropies(path: Path, key: str, entropies: Entropies) -> None:
    """Keeps the entropies for the next analysis. Raises CannotWrite."""
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        name: np.concatenate([each[at] for each in entropies]) for at, name in enumerate(("entropy", "logprob"))
    }
    np.savez(content, key=np.asarray(key), lengths=np.asarray([len(each[0]) for each in entropies]), **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [content.getvalue()])


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Returns the rows of metrics.jsonl without a last line that is cut off."""
    path, rows = run / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def analyze(config: Config, console: Console) -> dict[str, Any]:
    """Writes the files and returns the figures. Raises ValueError, OSError or CannotWrite."""
    steps = {step: trajectories_of(config, step) for step in config.chosen_steps}
    import torch

    from recipes.rstar2.parts.analysis.scoring import EntropyScorer

    torch.set_num_threads(config.threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: PyTorch finds no GPU here. Fix: device=cpu")
    scorer = EntropyScorer(config.checkpoint, device=config.device)
    for trajectories in steps.values():
        scorer.check(trajectories)
    with _progress(console) as progress:
        total = sum(len(each.token_ids_T) for trajectories in steps.values() for each in trajectories)
        task = progress.add_task("entropies", total=total)
        scored = {
            step: _scored(config, scorer, step, trajectories, lambda tokens: progress.advance(task, tokens))
            for step, trajectories in steps.items()
        }
    figures = [
        {"step": step, **shares(members, high_share=config.high_share, after_reply=config.after_reply)}
        for step, members in scored.items()
    ]
    return _write(config, figures)


def _progress(console: Console) -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    return Bar(*columns, TimeRemainingColumn(), console=console)


def _scored(
    config: Config, scorer: Any, step: int, trajectories: Sequence[Trajectory], advance: Callable[[int], None]
) -> list[Scored]:
    """Returns the trajectories of a step with their entropies, from an earlier analysis if there was one."""
    path = config.folder / "entropies" / f"step-{step:06d}.npz"
    key = fingerprint(config.checkpoint, trajectories)
    entropies = read_entropies(path, key)
    if entropies is None:
        by_index: dict[int, Any] = {}
        for at, entropy_T, logprob_T in scorer.entropies(trajectories, config.batch_tokens):
            by_index[at] = (entropy_T, logprob_T)
            advance(len(entropy_T))
        entropies = [by_index[at] for at in range(len(trajectories))]
        write_entropies(path, key, entropies)
    else:
        advance(sum(len(entropy_T) for entropy_T, _ in entropies))
    return [scorer.scored(each, *values) for each, values in zip(trajectories, entropies, strict=True)]


def _write(config: Config, figures: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = metrics_of(config.run)
    curves, entropy = config.folder / "curves.png", config.folder / "entropy.png"
    notes = report_curves.plot_curves(curves, metrics) if metrics else []
    report_curves.plot_entropies(entropy, figures, report_curves.series(metrics, metric.LEARNER_ENTROPY))
    result = {
        "run": str(config.run),
        "model": str(config.checkpoint),
        "definitions": {
            "temperature": 1.0,
            "unit": "nats",
            "high_share": config.high_share,
            "after_reply": config.after_reply,
            "forking_phrases": FORKING_PHRASES,
        },
        "warnings": _warnings(config, figures),
        "steps": figures,
        "report": {
            "response_tokens": report_curves.RESPONSE_TOKENS,
            "aime24": report_curves.AIME24,
            "aime25": report_curves.AIME25,
            "grpo_tool_errors": report_curves.GRPO_TOOL_ERRORS,
            "truncated_peak": report_curves.TRUNCATED_PEAK,
            "not_drawn": notes,
        },
    }
    write_whole(config.folder / "analysis.json", [json.dumps(result, indent=2).encode(), b"\n"])
    return result


def _warnings(config: Config, figures: Sequence[dict[str, Any]]) -> list[str]:
    """Names the steps whose rollouts another model must have sampled: they are much less likely than this one's own."""
    foreign = [row for row in figures if row["nll"] > row["entropy"] + FOREIGN_NLL]
    return [
        f"step {row['step']}: {config.checkpoint} gives these rollouts {row['nll']:.2f} nats per token, and its own "
        f"entropy there is {row['entropy']:.2f}: another model or temperature has sampled them"
        for row in foreign
    ]


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv, description=__doc__)
    console = Console()
    try:
        result = analyze(config, console)
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())  # a message of transformers may have many lines
        print(printable(f"analyze: {line}"), file=sys.stderr)
        return 2
    except CannotWrite as error:
        print(printable(f"analyze: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("analyze: interrupted; the steps that were done are kept, the same command goes on", file=sys.stderr)
        return 130
    for warning in result["warnings"]:
        console.print(printable(f"warning: {warning}"), style="yellow", markup=False, highlight=False, soft_wrap=True)
    for row in result["steps"]:
        of_high, among = row["of_high"], row["high_among"]
        reflection = "none" if among["reflection"] is None else f"{among['reflection']:.0%}"
        console.print(
            f"step {row['step']}: {row['tokens']:,} tokens, entropy {row['entropy']:.3f}, high above "
            f"{row['threshold']:.3f}; of the high ones {of_high['forking'] or 0:.0%} are forking, "
            f"{of_high['reflection'] or 0:.0%} reflection; of the tokens after replies {reflection} are high",
            highlight=False,
            soft_wrap=True,
        )
    for name in ("entropy.png", "curves.png", "analysis.json"):
        if (config.folder / name).is_file():
            console.print(f"  {config.folder / name}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
