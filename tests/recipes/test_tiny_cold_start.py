"""The cold start: its recipe writes a loadable checkpoint, and the shipped one is as weak as it should be."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny_cold_start import SHIPPED, Config, _run_call, evaluate, main
from recipes.tiny_task import tool_call


@pytest.fixture(autouse=True)
def one_thread():
    """Two torch threads on a busy core slow each other down by much more than two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_recipe_writes_a_checkpoint_that_loads(tmp_path):
    main(Config(output=tmp_path, craft_steps=3, manners_steps=2, eval_problems=4, threads=1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == AutoTokenizer.from_pretrained(SHIPPED).chat_template
    record = json.loads((tmp_path / "cold_start.json").read_text())
    assert record["config"]["seed"] == 1
    assert record["figures"]["parameters"] == 508_992
    assert "craft_steps=3 manners_steps=2 eval_problems=4 threads=1" in record["command"]


def test_shipped_checkpoint_leaves_room_for_learning():
    """Bounds are four standard errors around the recorded figures (accuracy 0.31, tool rate 0.47) for 160 problems."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    sampled = evaluate(model, tokenizer, 160, temperature=1.0)
    assert 0.17 < sampled["correct"] < 0.46
    assert 0.31 < sampled["tool"] < 0.63
    assert evaluate(model, tokenizer, 160, temperature=0.0)["correct"] < 0.1


@pytest.mark.parametrize(
    ("call", "ok", "reply"),
    [
        (tool_call("x=63+43\nx=x//8\nprint(x)"), True, "13"),
        (tool_call("print(y)"), False, "NameError: name 'y' is not defined"),
        (tool_call("print(1").replace('"}}', '"}'), False, "FormatError: Expecting ',' delimiter"),
        ("<tool_call>[1]</tool_call>", False, 'FormatError: expected {"name", "arguments": {"code"}}'),
        (tool_call("while True: pass"), False, "TimeoutError: 2 s"),
    ],
)
def test_replies_of_the_evaluations_tool(call, ok, reply):
    assert _run_call(call.removeprefix("<tool_call>").removesuffix("</tool_call>")) == (ok, reply)
