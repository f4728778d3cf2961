"""A checkpoint may be somebody else's: no code that lies in its folder is run, and nobody is asked whether it may."""

import ast
import json
import shutil

import pytest

from algo.learner.model.loading import read
from engine.replica.config import ReplicaConfig
from engine.rollout.chat_template import ChatTemplate, TemplateError
from tests.support.paths import ROOT, TINY

CODE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()
"""


@pytest.fixture
def checkpoint(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "checkpoint")
    (folder / "own.py").write_text(CODE)
    return folder


def change(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_tokenizer_of_the_checkpoints_own_code_is_refused(checkpoint):
    change(checkpoint / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    change(checkpoint / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    with pytest.raises(TemplateError, match="custom code"):
        ChatTemplate.load(checkpoint)
    assert not (checkpoint / "ran").exists()


def test_a_model_of_the_checkpoints_own_code_is_refused(checkpoint):
    change(
        checkpoint / "config.json",
        model_type="own",
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    )
    with pytest.raises(ValueError, match="custom code"):
        read(checkpoint, "eager")
    assert not (checkpoint / "ran").exists()


def test_weights_are_read_from_safetensors_only(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        read(checkpoint, "eager")


def test_replicas_take_neither_code_nor_pickles():
    arguments = ReplicaConfig(checkpoint="model").arguments(0)
    assert arguments["trust_remote_code"] is False
    assert arguments["load_format"] == "safetensors"


def test_every_call_that_loads_a_checkpoint_says_so():
    """Without a word transformers asks on the terminal, and takes a "y" that was meant for something else."""
    silent, calls = [], 0
    for package in ("algo", "engine", "recipes", "sandbox"):
        for path in (ROOT / package).rglob("*.py"):
            for call in _loads(ast.parse(path.read_text())):
                calls += 1
                said = {word.arg: ast.unparse(word.value) for word in call.keywords}
                if said.get("trust_remote_code") != "False":
                    silent.append(f"{path}:{call.lineno}")
    assert calls
    assert silent == []


def _loads(tree):
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called.startswith("Auto") and called.endswith(".from_pretrained"):
            yield node
