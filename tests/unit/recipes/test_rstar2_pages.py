"""The pages of rStar2-Agent: their commands have options that the programs take, and the 14B gets the right ones."""

import json
import re
import shlex
from pathlib import Path

import pytest

from engine.commands import doctor, gateway
from engine.console.options import parse_all
from engine.programs.invocation import Invocation, Machines
from recipes.rstar2 import analyze, chat, compare, data, evaluate, filter, fit, get_model, rl, sft, template
from recipes.rstar2.parts.memory.memory import replica_share
from recipes.rstar2.parts.memory.model import PUBLIC
from recipes.rstar2.parts.sampling.protocol import REPORT
from tests.support.paths import ROOT

PAGES = {name: (ROOT / "recipes/rstar2" / name).read_text() for name in ("README.md", "eight_gpus.md", "real_model.md")}


def commands(page):
    blocks = re.findall(r"^```\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(("python recipes/", "rocstar "))]


OPTIONS = {
    "get_model": [get_model.Config],
    "analyze": [analyze.Config],
    "template": [template.Config],
    "fit": [fit.Config],
    "data": [data.Config],
    "filter": [filter.Config],
    "sft": [Invocation, sft.Config, Machines],
    "rl": [rl.ChainInvocation, rl.Config, Machines],
    "evaluate": [evaluate.Config],
    "chat": [chat.Config],
    "compare": [compare.Config],
    "gateway": [gateway.Options],
    "doctor": [doctor.Options],
}
EIGHT_GPUS = commands("eight_gpus.md")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder in which each file is there that some command of the pages reads, with the model's configuration."""
    monkeypatch.chdir(tmp_path)
    text = "".join(PAGES.values())
    for name in set(re.findall(r"(?:data|runs)/[\w/-]+\.(?:parquet|jsonl)", text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in set(re.findall(r"(?:models/[\w.-]+|runs/[\w/-]+/checkpoint|runs/[\w-]+/stage-\d)", text)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(PUBLIC["Qwen3-14B"]))
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
        (tmp_path / name / "tool.json").write_text(json.dumps(REPORT.schema(stateful=False)))


@pytest.mark.parametrize("command", [*commands("README.md"), *EIGHT_GPUS, *commands("real_model.md")])
def test_the_options_of_a_command_are_those_of_its_program(command, machine):
    _, program, *words = shlex.split(command)
    parse_all(OPTIONS[Path(program).stem], words)  # ends the program for a wrong option


def test_stages_two_and_three_follow_from_the_report(machine):
    [all_at_once] = [line for line in EIGHT_GPUS if "stage=all" in line]
    _, config, _ = parse_all(OPTIONS["rl"], shlex.split(all_at_once)[2:])
    settings = [config.training(number) for number in config.numbers]
    assert [(each.steps, each.rollout.max_response_tokens, each.rollout.max_turns) for each in settings] == [
        (300, 8192, 10),
        (85, 12288, 10),
        (125, 12288, 15),
    ]
    alone = [parse_all(OPTIONS["rl"], shlex.split(line)[2:])[1] for line in EIGHT_GPUS if re.search(r"stage=\d", line)]
    assert [each.training(each.numbers[0]) for each in alone] == settings


def test_the_options_are_those_that_fit_finds(machine):
    [found] = [line for line in EIGHT_GPUS if "fit.py" in line]
    plan = fit.fitting(parse_all(OPTIONS["fit"], shlex.split(found)[2:])[0].plan())
    [all_at_once] = [line for line in EIGHT_GPUS if "stage=all" in line]
    _, config, _ = parse_all(OPTIONS["rl"], shlex.split(all_at_once)[2:])
    assert config.training(3).devices == plan.devices
    assert config.replica.memory_share == replica_share(plan)
    assert max(config.rollout_of(number).max_tokens for number in config.numbers) == plan.max_tokens
    assert config.learner.micro_batch_tokens == plan.learner.micro_batch_tokens == plan.max_tokens
    assert config.learner.activation_checkpointing == plan.learner.activation_checkpointing
