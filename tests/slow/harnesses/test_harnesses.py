"""Evaluation harnesses from their packages, unmodified, against a served checkpoint: a few problems each.

The model is the tiny agent with a longer context, which answers nonsense: what is looked at is that each request was
answered, read and scored. Data that harnesses load from a hub is not here; what is used ships with them or is ours.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.packages import environment_with
from tests.support.paths import ROCSTAR, ROOT, TINY

BFCL = ("bfcl-eval==2026.3.23", "soundfile==0.13.1")
LM_EVAL = ("lm-eval[ifeval,api]==0.4.13",)
IFEVAL_ROWS = (
    ("Describe the sea without using any commas.", "punctuation:no_comma", {}),
    ("Write one sentence in lowercase letters only.", "change_case:english_lowercase", {}),
    ("Answer with at least three words.", "length_constraints:number_words", {"relation": "at least", "num_words": 3}),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny agent, allowed to read 2,048 tokens."""
    folder = tmp_path_factory.mktemp("model") / "agent"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="module")
def gateway(checkpoint):
    """Its address."""
    log = checkpoint.parent / "gateway.log"
    command = [*ROCSTAR, "gateway", str(checkpoint), "port=0", f"served_name={checkpoint}", "max_tokens=2016"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        for _ in range(600):
            text = log.read_text()
            if " at http://" in text:
                yield text.partition(" at ")[2].split("/v1")[0]
                break
            assert process.poll() is None, text
            time.sleep(0.2)
        else:
            pytest.fail(f"the gateway did not start: {log.read_text()}")
    finally:
        process.terminate()
        assert process.wait(30) == 0, log.read_text()


def run(command, folder, **variables):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return ended


@pytest.mark.timeout(1200)
def test_bfcl_generates_and_scores(checkpoint, gateway, tmp_path):
    """Its own template, over /v1/completions."""
    bfcl = environment_with("bfcl", *BFCL) / "bin" / "bfcl"
    names = {"simple_python": ["simple_python_0", "simple_python_1", "simple_python_2"]}
    (tmp_path / "test_case_ids_to_generate.json").write_text(json.dumps(names))
    model = ["--model", "Qwen/Qwen3-0.6B-FC"]
    options = ["--run-ids", "--skip-server-setup", "--local-model-path", str(checkpoint), "--num-threads", "3"]
    variables = {"BFCL_PROJECT_ROOT": str(tmp_path), "REMOTE_OPENAI_BASE_URL": f"{gateway}/v1"}
    run([bfcl, "generate", *model, *options], tmp_path, **variables)
    [results] = (tmp_path / "result").rglob("*simple_python*.json")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == names["simple_python"]
    assert not [row for row in rows if "Error" in str(row["result"])], rows
    run([bfcl, "evaluate", *model, "--test-category", "simple_python", "--partial-eval"], tmp_path, **variables)
    scores = [path for path in (tmp_path / "score").rglob("*.json") if "simple_python" in path.name]
    assert json.loads(scores[0].read_text().splitlines()[0])["total_count"] == 3


@pytest.mark.timeout(1200)
def test_lm_eval_scores_ifeval(checkpoint, gateway, tmp_path):
    """Its own scorers of IFEval over /v1/chat/completions; the rows are ours, since Google's are on a hub."""
    environment = environment_with("lm-eval", *LM_EVAL)
    [task] = environment.rglob("lm_eval/tasks/ifeval/ifeval.yaml")
    rows = [
        {"key": key, "prompt": prompt, "instruction_id_list": [instruction], "kwargs": [arguments]}
        for key, (prompt, instruction, arguments) in enumerate(IFEVAL_ROWS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"include: {task}", "task: ifeval_ours", "dataset_path: json", "dataset_name: null", "dataset_kwargs:"]
    lines += ["  data_files:", f"    train: {tmp_path / 'rows.jsonl'}"]
    (tmp_path / "ours.yaml").write_text("\n".join(lines) + "\n")
    model = f"model={checkpoint},base_url={gateway}/v1/chat/completions,num_concurrent=3,max_retries=1"
    command = [environment / "bin" / "lm_eval", "--model", "local-chat-completions", "--model_args", model]
    command += ["--tasks", "ifeval_ours", "--include_path", tmp_path, "--apply_chat_template"]
    run([*command, "--gen_kwargs", "max_gen_toks=50", "--output_path", tmp_path / "out"], tmp_path)
    [results] = Path(tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["n-samples"]["ifeval_ours"]["effective"] == 3
    assert 0 <= found["results"]["ifeval_ours"]["inst_level_loose_acc,none"] <= 1
