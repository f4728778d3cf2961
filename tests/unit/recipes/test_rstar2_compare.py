"""GRPO-RoC against GRPO on a real model: which runs are made, and what is said of those that are there."""

import json
from dataclasses import replace

import pytest

from engine.console.options import parse_all
from engine.programs.invocation import Machines
from recipes.rstar2 import rl
from recipes.rstar2.compare import Config, main, measured, page
from recipes.tiny.arms import finished
from recipes.tiny.curves import from_json
from tests.support.conversations import installed
from tests.support.paths import ROOT

ERRORS = {"roc": 0.1, "grpo16": 0.2, "grpo8": 0.25}


def config(folder, **fields):
    return Config(**{"folder": folder / "runs", "seeds": (0, 1), "steps": 20, "make": False, **fields})


def made(settings, name, seed, steps=20, ends=True):
    """Writes what a run leaves that has made so many steps."""
    path = settings.runs.path(name, seed)
    path.mkdir(parents=True)
    step = {
        "reward": 0.3,
        "rollout/response_tokens": 50,
        "tokens/generated": 200.0,
        "tokens/trained": 100.0,
        "time/step_s": 1.0,
        "groups/all": 8,
        "groups/flat": 2,
        "rollout/trajectories": 128,
        "stop/length": 3,
        "tools/error_share": ERRORS[name],
        "tools/error_share_correct": ERRORS[name],
    }
    rows = [{"step": 0}, *({"step": number, **step} for number in range(1, steps + 1))]
    for row in rows:
        if row["step"] % settings.eval_every == 0:
            row["eval/accuracy"] = 0.2 + 0.01 * seed + row["step"] / 100
            row["eval/tool_error_share_correct"] = ERRORS[name]
            row |= {"eval/n": 400, "eval/tokens": 400 * 60, "eval/turns": 400 * 2}
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    versions = {"processor": "one, 2 cores", "torch": "1", "vllm": "2"}
    (path / "config.json").write_text(json.dumps({**settings.runs.options(name, seed), "versions": versions}))
    if ends:
        (path / "summary.json").write_text("{}")


def test_each_arm_is_a_run_of_rl_with_options_that_it_has(tmp_path):
    (tmp_path / "runs").mkdir()
    settings = config(tmp_path, model=installed(tmp_path / "model"), max_tokens=900)
    rollouts = {}
    for name, arm in settings.runs.arms.items():
        options = settings.runs.options(name, 1)
        words = [f"{key}={','.join(value) if isinstance(value, tuple) else value}" for key, value in options.items()]
        _, made_of, _ = parse_all([rl.ChainInvocation, rl.Config, Machines], words)
        assert made_of.seed == 1
        rollouts[name] = (made_of.training(1).group.samples, made_of.g)
        assert arm.program.name == "rl.py"
    assert rollouts == {"roc": (16, 8), "grpo16": (16, 16), "grpo8": (8, 8)}


def test_the_folder_of_a_run_is_the_one_that_rl_writes(tmp_path):
    settings = config(tmp_path)
    made(settings, "roc", 0)
    assert settings.runs.path("roc", 0) == tmp_path / "runs" / "roc-0" / "stage-1"
    assert finished(settings.runs.path("roc", 0), settings.runs.options("roc", 0))
    with pytest.raises(ValueError, match="steps"):
        finished(settings.runs.path("roc", 0), replace(settings, steps=40).runs.options("roc", 0))


def test_runs_are_compared_up_to_the_last_evaluation_that_all_have(tmp_path):
    settings = config(tmp_path)
    for seed in settings.seeds:
        for name in settings.runs.arms:
            cut = (name, seed) == ("grpo8", 1)
            made(settings, name, seed, steps=15 if cut else 20, ends=not cut)
    result = measured(settings.runs)
    assert list(result.curves["eval/accuracy"]["roc"]) == [0, 10]
    assert result.figures["trained tokens"]["roc"] == [1000.0, 1000.0]
    begun, ended = [values["grpo8"] for title, values in result.figures.items() if "share_correct" in title]
    assert begun == ended == [ERRORS["grpo8"]] * 2
    assert result.curves["eval/turns / eval/n"]["grpo8"][10] == [2.0, 2.0]


def test_the_page_is_made_of_the_results(tmp_path, capsys):
    settings = config(tmp_path, output=tmp_path / "real_model", note="It ran on a Tuesday.")
    for seed in settings.seeds:
        for name in settings.runs.arms:
            made(settings, name, seed)
    main(settings)
    text = (tmp_path / "real_model.md").read_text()
    assert "It ran on a Tuesday." in text
    assert "not told apart" in text  # accuracies
    assert "By tool errors in correct trajectories after step 20, GRPO-RoC 8 of 16 is below GRPO 16" in text
    assert all((tmp_path / "real_model" / name).stat().st_size > 0 for name in ("results.png", "training.png"))
    content = json.loads((tmp_path / "real_model" / "results.json").read_text())
    assert from_json(content).curves == measured(settings.runs).curves
    assert "real_model.md" in capsys.readouterr().out


def test_the_committed_page_is_that_of_its_results():
    folder = ROOT / "recipes" / "rstar2" / "real_model"
    content = json.loads((folder / "results.json").read_text())
    assert folder.with_suffix(".md").read_text() == page(content, folder.name)


def test_a_run_without_an_evaluation_is_named(tmp_path):
    settings = config(tmp_path)
    for seed in settings.seeds:
        for name in settings.runs.arms:
            made(settings, name, seed)
    (settings.runs.path("grpo16", 1) / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="grpo16-1"):
        main(settings)


@pytest.mark.parametrize("fields", [{"seeds": (1,)}, {"seeds": (1, 1)}, {"steps": 0}, {"group_size": 1}])
def test_wrong_options_are_refused(tmp_path, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        config(tmp_path, **fields)
