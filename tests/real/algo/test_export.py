"""An exported checkpoint stands alone: others load its weights, render its template and end where its turns end."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from algo.learner.model.scorer import Scorer
from algo.learner.state.export import export
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.tools.python_tool import PythonTool, schema
from tests.support.paths import TINY

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
END, OWN_END = 2, 0  # of the tiny tokenizer: <|im_end|>, and <|pad|> that stands for a base model's own end token
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
}
TEMPLATE = (
    "{%- for tool in tools or [] -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + ' é\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant é\\n' -}}{%- endif -%}"
)
MESSAGES = [
    {"role": "user", "content": "What is 6 * 7?"},
    {"role": "assistant", "content": "<reason>I use python.</reason>"},
    {"role": "tool", "content": "42"},
]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def source_of(kind, folder, *, ends=None):
    """A random model with the tiny agent's tokenizer. ends: what its generation_config says; None: it has none."""
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_k": 20}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def exported(source, target, chat):
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01
    export(Scorer(model), source, target, chat_template=chat.template, end_of_turn=chat.end_of_turn)
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["its own template", "the run's template"])
def test_an_export_loads_in_transformers_and_renders_what_was_trained(kind, template, tmp_path):
    source = source_of(kind, tmp_path / "source")
    chat = ChatTemplate.load(source, ChatConfig(template=template))
    trained = exported(source, tmp_path / "export", chat)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    ids = torch.tensor([chat.prompt_ids(MESSAGES)])
    assert torch.equal(loaded(ids).logits, trained(ids).logits)
    assert type(loaded) is type(trained)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert rendered == chat.prompt_ids(MESSAGES)
    assert ("é" in tokenizer.decode(rendered)) == (template is not None)


def test_the_template_of_an_export_shows_tools_as_the_run_did(tmp_path):
    source = source_of("qwen3", tmp_path / "source")
    tools = [schema(PythonTool(runner=None))]
    chat = ChatTemplate.load(source, ChatConfig(template=TEMPLATE)).with_tools(tools)
    exported(source, tmp_path / "export", chat)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    rendered = tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, return_dict=False)
    assert rendered == chat.prompt_ids(MESSAGES)
    assert "parameters" in tokenizer.decode(rendered)


def test_no_other_template_of_the_source_is_left_beside_the_runs(tmp_path):
    source = source_of("qwen3", tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }} of a file")
    (source / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }} of another"}')
    chat = ChatTemplate.load(source, ChatConfig(template=TEMPLATE))
    exported(source, tmp_path / "export", chat)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == TEMPLATE
    assert {file.name for file in (tmp_path / "export").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize(
    ("ends", "kept"), [(None, END), (OWN_END, [END, OWN_END]), ([OWN_END, END], [OWN_END, END]), (END, END)]
)
def test_generation_ends_where_the_templates_turn_ends(ends, kept, tmp_path):
    source = source_of("llama", tmp_path / "source", ends=ends)
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": None}
    (source / "config.json").write_text(json.dumps(config))
    chat = ChatTemplate.load(source)
    assert chat.end_of_turn == END
    exported(source, tmp_path / "export", chat)
    found = GenerationConfig.from_pretrained(tmp_path / "export")
    assert found.eos_token_id == kept
    assert found.top_k == (None if ends is None else 20)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():  # whatever it reads, it says the end token
        for weight in model.parameters():
            weight.zero_()
        model.lm_head.weight[END] = 1.0
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.fill_(1.0)
    prompt = torch.tensor([chat.prompt_ids(MESSAGES)])
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert said[0, prompt.shape[1] :].tolist() == [END]


def test_a_source_whose_config_alone_names_an_end_token_keeps_it(tmp_path):
    """As checkpoints of base models do that have no generation_config.json."""
    source = source_of("qwen3", tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": OWN_END}
    (source / "config.json").write_text(json.dumps(config))
    exported(source, tmp_path / "export", ChatTemplate.load(source))
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [END, OWN_END]


def test_without_a_chat_the_files_are_those_of_the_source(tmp_path):
    source = source_of("qwen3", tmp_path / "source", ends=OWN_END)
    export(Scorer(AutoModelForCausalLM.from_pretrained(source)), source, tmp_path / "export")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
