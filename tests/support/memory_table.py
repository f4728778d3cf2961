"""What the real learner allocates and executes on fake GPUs, beside what recipes/rstar2/fit.py computes.

    python -m tests.support.memory_table            # makes the table of recipes/rstar2/eight_gpus.md
    python -m tests.support.memory_table measure    # measures anew before (half an hour on two cores, 8 GB of memory)

The measurements are in tests/golden/learner_memory.jsonl, one line a cell (`tests.support.fake_learner`).
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from algo.learner.config import LearnerConfig
from algo.loss.policy_losses import CrossEntropy
from recipes.rstar2.fit import Config
from recipes.rstar2.parts.memory.learner import learner_moments
from recipes.rstar2.parts.memory.model import ATTENTION
from recipes.rstar2.parts.memory.operations import operations
from recipes.rstar2.parts.memory.plan import GIB
from tests.support.fake_learner import Cell
from tests.support.paths import ROOT

MEASURED = ROOT / "tests" / "golden" / "learner_memory.jsonl"
PAGE = ROOT / "recipes" / "rstar2" / "eight_gpus.md"
BEGIN = "<!-- made from tests/golden/learner_memory.jsonl by tests.support.memory_table -->\n"
END = "<!-- until here -->\n"

MODELS = ("Qwen3-1.7B", "Qwen2.5-7B-Instruct", "Qwen3-14B", "Qwen3-32B")
TOKENS = 14336


def _cell(model, ranks, checkpointing="full", tokens=TOKENS, sampled=0.8, **learner):
    learner = {"activation_checkpointing": checkpointing, **learner}
    return Cell(model=model, ranks=ranks, tokens=tokens, sampled=sampled, learner=learner)


CELLS = [_cell(model, ranks, **lora) for model in MODELS for ranks in (1, 8, 16) for lora in ({}, {"lora_rank": 32})]
CELLS += [
    _cell("Qwen3-14B", 8, "attention"),
    _cell("Qwen3-14B", 8, "selective"),
    _cell("Qwen3-14B", 8, activation_offload=True),
    _cell("Qwen3-14B", 8, tokens=16384, loss=LearnerConfig(loss=CrossEntropy()).loss),
    _cell("Qwen2.5-7B-Instruct", 8, "selective"),
    _cell("Qwen3-1.7B", 1, "selective", lora_rank=32),
    # All tokens are targets, since ranks that share a row otherwise have more or fewer of them than others.
    _cell("Qwen3-14B", 8, "attention", tokens=32768, sampled=1.0, context_parallel=4),
    _cell("Qwen3-14B", 8, "selective", tokens=32768, sampled=1.0, context_parallel=8),
]
# Of mixtures, attention gets adapters.
ADAPTERS = {"lora_rank": 32, "lora_targets": list(ATTENTION)}
CELLS += [
    _cell("Qwen3-30B-A3B", 8),
    _cell("Qwen3-30B-A3B", 8, tokens=12288),
    _cell("Qwen3-30B-A3B", 8, **ADAPTERS),
    _cell("Qwen3-30B-A3B", 8, tokens=32768, sampled=1.0, context_parallel=2),
    _cell("Qwen3-30B-A3B", 8, "attention", tokens=32768, sampled=1.0, context_parallel=8),
    _cell("gpt-oss-20b", 8, tokens=12288),
    _cell("gpt-oss-20b", 8, tokens=12288, **ADAPTERS),
]


def measure(cells, timeout_s):
    """Returns what a process of its own measures of these cells. It takes some 10 s to start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        path.write_text(json.dumps([asdict(cell) for cell in cells]))
        command = [sys.executable, "-m", "tests.support.fake_learner", path]
        done = subprocess.run(command, cwd=ROOT, timeout=timeout_s, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def measured():
    """Returns the committed measurements."""
    return [json.loads(line) for line in MEASURED.read_text().splitlines()]


def fitted(cell):
    """Returns what fit.py computes for a cell: bytes while it loads and trains, and operations."""
    with tempfile.TemporaryDirectory() as folder:
        learner = LearnerConfig(**cell.learner)
        source = str(cell.write(Path(folder)))
        plan = Config(model=source, devices=cell.ranks, max_tokens=cell.tokens, learner=learner).plan()
    moments = {name: sum(parts.values()) for name, parts in learner_moments(plan).items()}
    loading, publishing = moments.pop("loading"), moments.pop("publishing")
    counted = operations(plan, tokens=cell.tokens, targets=round(cell.sampled * cell.tokens))
    memory = {"load": loading, "train": max(moments.values()), "publish": publishing}
    needed, executed = (count / learner.context_parallel for count in (counted.needed, counted.executed))
    return memory | {"needed": needed, "executed": executed}


def compared(row):
    """Returns (measured, fitted) of a row, each with load, train, publish, needed and executed."""
    actual = {name: row["phases"][name]["peak"] for name in ("load", "train", "publish")}
    actual |= {name: row[name] for name in ("needed", "executed")}
    return actual, fitted(Cell(**row["cell"]))


def table():
    lines = [
        "",
        "| model, ranks | trained | checkpointing | loading | training | executed / needed |",
        "|---|---|---|---|---|---|",
    ]
    for row in measured():
        cell = Cell(**row["cell"])
        actual, computed = compared(row)
        trained = f"adapters of {cell.learner['lora_rank']}" if cell.learner.get("lora_rank") else "all"
        trained += ", on examples" if "loss" in cell.learner else ""
        kind = cell.learner["activation_checkpointing"] + (
            ", offload" if cell.learner.get("activation_offload") else ""
        )
        if sharing := cell.learner.get("context_parallel"):
            kind += f", rows shared by {sharing}"
        pairs = [f"{actual[name] / GIB:.1f}, {computed[name] / GIB:.1f}" for name in ("load", "train")]
        shares = [f"{each['executed'] / each['needed']:.3f}" for each in (actual, computed)]
        tokens = "" if cell.tokens == TOKENS else f", rows of {cell.tokens:,}"
        columns = (f"{cell.model}, {cell.ranks}{tokens}", trained, kind, *pairs, ", ".join(shares))
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n\n"


def page():
    """Returns the page with its table made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        rows = measure(CELLS, timeout_s=7200)
        MEASURED.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PAGE.write_text(page())
