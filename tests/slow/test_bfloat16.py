"""The quick start in the dtypes of GPUs, on the CPU: replicas, passes and published weights in bfloat16, masters in
float32.

`make campaigns` trains three seeds in both dtypes to the end (six runs of two minutes).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen2Config

from engine.fleet.canary import tolerance_of
from tests.support.paths import ROOT, TINY
from tests.support.runs import SMALL, Run, command, metrics, numbers

BF16 = "dtype=bfloat16"
LORA = ("adapters=true", "learner.lora_rank=4", "learner.lora_alpha=32")
OTHERS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {  # than the quick start's Qwen3
    "llama": (
        LlamaConfig,
        {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 6, "tie_word_embeddings": False},
    ),
    "qwen2": (
        Qwen2Config,
        {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True},
    ),
}
KILLED = [*SMALL, BF16, "steps=4", "eval_every=2", "checkpoint_every=2"]


def run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def trained(runs: Path, *words: str) -> Path:
    run(command(runs, *words))
    return runs / "quickstart"


def written(folder: Path, architecture: str) -> Path:
    """Writes a model of random weights, whose logits are as large as those of a trained one, and returns its folder."""
    kind, sizes = OTHERS[architecture]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = kind(
        **sizes,
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        intermediate_size=160,
        max_position_embeddings=1024,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def check_judged(folder: Path, model: Path = TINY) -> None:
    """Canary and mismatch are those of bfloat16, within what is allowed on GPUs, with room."""
    rows = [row for row in metrics(folder) if "reward" in row]
    means = [row["canary/mean_abs"] for row in rows]
    assert 1e-3 < min(means) <= max(means) < tolerance_of(model, "bfloat16") / 2
    mismatches = [row["learner/mismatch_fresh_mean"] for row in rows if "learner/mismatch_fresh_mean" in row]
    assert 1e-5 < max(mismatches) < 0.02, "a fifth of what is allowed"


@pytest.mark.timeout(500)
def test_canary_and_mismatch_are_those_of_bfloat16(tmp_path: Path) -> None:
    check_judged(trained(tmp_path, BF16, "steps=3", "eval_every=10", "eval_problems=8"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "extra"), [("llama", ()), ("llama", LORA), ("qwen2", ())], ids=["llama", "llama-lora", "qwen2"]
)
def test_other_architectures_learn_a_little(architecture: str, extra: tuple[str, ...], tmp_path: Path) -> None:
    """Random weights learn to sample tokens with even numbers, by a recipe with a reward of the user's own."""
    model, rows = written(tmp_path / "model", architecture), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 3", "answer": str(n + 3)}) + "\n" for n in range(64)))
    words = [f"model={model}", f"data={rows}", f"held_out={rows}", f"runs={tmp_path}", BF16, *extra]
    words += [f"reward={ROOT / 'bench' / 'benches' / 'gpu' / 'even.py'}:even", "tools=", "system=", "replicas=1"]
    words += ["rollout.max_tokens=160", "rollout.max_turns=1", "steps=6", "prompts_per_step=8", "algorithm=grpo"]
    words += ["eval_problems=8", "eval_every=6", "lr=0.01"]
    run([sys.executable, "-u", str(ROOT / "recipes" / "train_on_file.py"), *words])
    folder = tmp_path / "train_on_file"
    rewards = [row["reward"] for row in metrics(folder) if "reward" in row]
    assert rewards[-1] - rewards[0] >= 0.05, rewards
    check_judged(folder, model)


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_and_resumed_repeats_every_decision(started: list[Run], tmp_path: Path) -> None:
    wanted = numbers(trained(tmp_path / "whole", *KILLED))
    killed = Run(command(tmp_path / "killed", *KILLED))
    started.append(killed)
    killed.until("step   3")
    killed.process.kill()
    killed.end()
    assert numbers(trained(tmp_path / "killed", *KILLED)) == wanted


@pytest.mark.campaign
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_as_in_float32(seed: int, tmp_path: Path) -> None:
    accuracy = {}
    for dtype in ("float32", "bfloat16"):
        folder = trained(tmp_path / dtype, f"dtype={dtype}", f"seed={seed}")
        accuracy[dtype] = json.loads((folder / "summary.json").read_text())["accuracy_final"]
    check_judged(folder)
    print(f"seed {seed}: {accuracy}", flush=True)
    assert accuracy["bfloat16"] >= 0.95 * accuracy["float32"]
