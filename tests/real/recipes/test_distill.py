"""On-policy distillation as a user starts it: teachers of another size, behind a server, killed, and refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.support.paths import ROCSTAR, ROOT, TINY
from tests.support.runs import Run, metrics, numbers

DISTILL = [sys.executable, "-u", str(ROOT / "recipes" / "distill.py")]
SMALL = ["eval_problems=8", "prompts_per_step=4", "eval_every=2", "replicas=1"]
DISTILLED = {"distill/kl", "distill/tokens", "distill/teacher_s", "distill/overlap"}


def made(folder: Path, rows: int) -> Path:
    """A random teacher of twice the width, whose embedding has so many rows."""
    shared = json.loads((TINY / "config.json").read_text())
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": rows}
    Qwen3ForCausalLM(Qwen3Config(**{**shared, **sizes, "dtype": "float32"})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows that only pad."""
    return made(tmp_path_factory.mktemp("teacher") / "larger", 576)


def run(folder: Path, *fields: str, timeout: float = 200) -> str:
    done = subprocess.run(
        [*DISTILL, f"runs={folder}", *SMALL, *fields], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(folder: Path) -> list[dict[str, float]]:
    return [row for row in metrics(folder / "distill") if "reward" in row]


@pytest.mark.timeout(300)
def test_a_larger_teacher_scores_every_token_that_is_trained(larger: Path, tmp_path: Path) -> None:
    run(tmp_path, f"teacher={larger}", "steps=2", "max_staleness=1")
    rows = steps(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row.keys() >= DISTILLED | {"distill/clipped"}
        assert row["distill/tokens"] == row["tokens/trained"] == row["learner/tokens"]
        assert row["distill/kl"] > 1, "a random teacher thinks little of what the student writes"
        assert row["distill/teacher_s"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_likeliest_tokens_of_a_teacher_reach_the_loss(tmp_path: Path, direction: str) -> None:
    run(
        tmp_path,
        f"teacher={made(tmp_path / 'teacher', 512)}",
        "steps=2",
        "top_k=4",
        f"direction={direction}",
        "reward_weight=0.1",
    )
    rows = steps(tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert row.keys() >= DISTILLED
        assert row["learner/teacher_kl"] > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_teacher_like_the_student_teaches_nothing(tmp_path: Path, top_k: int) -> None:
    """Teacher, sampler and learner agree to the last digits, whether by the sampled tokens or by the likeliest ones."""
    run(tmp_path, f"teacher={TINY}", "steps=1", "learner.minibatches=1", "group_size=1", f"top_k={top_k}")
    [row] = steps(tmp_path)
    assert abs(row["distill/kl"]) < 1e-5
    assert row.get("distill/clipped", 0) == 0
    assert row.get("learner/teacher_kl", 0) < 1e-5


@pytest.mark.timeout(400)
def test_a_teacher_behind_our_gateway_teaches_as_one_in_a_folder_does(
    started: list[Run], larger: Path, tmp_path: Path
) -> None:
    command = [*ROCSTAR, "gateway", str(larger), "port=0", "max_tokens=300"]
    server = Run(command)
    started.append(server)
    server.until("http://")
    line = next(line for line in server.output if "http://" in line)
    url = "http://" + line.split("http://")[1].split()[0].strip(".,;/")
    run(tmp_path / "url", f"teacher={url if url.endswith('/v1') else f'{url}/v1'}", "steps=2")
    run(tmp_path / "folder", f"teacher={larger}", "steps=2")
    assert numbers(tmp_path / "url" / "distill") == numbers(tmp_path / "folder" / "distill")


@pytest.mark.timeout(400)
def test_a_killed_run_ends_as_if_nothing_had_happened(started: list[Run], larger: Path, tmp_path: Path) -> None:
    fields = [f"teacher={larger}", "steps=3", "checkpoint_every=2", *SMALL]
    run(tmp_path / "whole", *fields)
    killed = Run([*DISTILL, f"runs={tmp_path / 'killed'}", *fields])
    started.append(killed)
    killed.until("step   1")
    killed.process.kill()
    killed.process.wait()
    run(tmp_path / "killed", *fields)
    assert numbers(tmp_path / "killed" / "distill") == numbers(tmp_path / "whole" / "distill")


def test_a_teacher_of_another_vocabulary_is_refused_before_anything_starts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    form = json.loads((other / "tokenizer.json").read_text())
    form["added_tokens"][-1]["content"] = "<|other|>"
    (other / "tokenizer.json").write_text(json.dumps(form))
    for teacher, said in ((str(other), "another vocabulary"), ("", "teacher must be"), ("/nowhere", "no config.json")):
        words = [*DISTILL, f"runs={tmp_path}", f"teacher={teacher}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
