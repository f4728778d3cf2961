"""The comparison of algorithms, on canned runs: what it reads, what it says, and what it makes again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.console.options import parse
from recipes import quickstart
from recipes.tiny.arms import QUICKSTART, Arm, Runs
from recipes.tiny.compare import Config, main
from recipes.tiny.curves import as_json, compare, difference, from_json, markdown, plot
from tests.support.runs import Run

RECIPE = QUICKSTART.parent / "tiny" / "compare.py"


def canned(arm: Arm, folder: Path, options: Mapping[str, Any], steps: tuple[int, ...] = (0, 8, 16)) -> None:
    """A finished run: accuracy 0.3 + 0.01 seed at first; the tool errors tell the algorithms apart."""
    folder.mkdir(parents=True, exist_ok=True)
    level = {"roc": 0.02, "grpo": 0.10, "random": 0.12}[options["algorithm"]]
    rows = [{"step": step, "tokens/generated": 100.0, "time/step_s": 2.0} for step in range(1, 17) if step not in steps]
    for step in steps:
        accuracy = 0.3 + 0.01 * options["seed"] + step / 40
        rows.append({"step": step, "eval/accuracy": accuracy, "eval/tool_error_share_correct": level / (1 + step)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"accuracy_final": 0.7, "tool_error_share_final": level, "total_wall_s": 90.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({**options, "versions": {"torch": "2"}}))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(seeds=3, steps=16, eval_problems=512, folder=tmp_path / "runs")


def test_a_comparison_is_made_and_continued(config: Config) -> None:
    made: list[str] = []
    said: list[str] = []

    def launch(arm: Arm, folder: Path, options: Mapping[str, Any]) -> None:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(folder.name)
        assert folder.exists() == (folder.name == "roc-2"), "only what can be resumed is left as it was"
        canned(arm, folder, options)

    with pytest.raises(KeyboardInterrupt):
        config.runs.make(launch, said.append)
    assert made == ["roc-0", "grpo-0", "roc-1"]
    half, checkpointed = config.folder / "grpo-1" / "log", config.folder / "roc-2" / "checkpoints"
    half.mkdir(parents=True)
    checkpointed.mkdir(parents=True)
    made.clear()
    config.runs.make(launch, said.append)
    assert made == ["grpo-1", "roc-2", "grpo-2"]
    assert said[-6] == "[4/6] GRPO, seed 1: running"
    assert said[-1] == "[6/6] GRPO, seed 2: 0 s, accuracy 0.700, tool errors 0.100"
    assert sum("finished before" in line for line in said) == 3
    with pytest.raises(ValueError, match=r"roc-0 differs in steps \(16 there, 40 now\)"):
        replace(config, steps=40).runs.make(launch, said.append)


def test_a_run_that_another_process_writes_is_left_alone(config: Config) -> None:
    """A comparison that was killed leaves a quick start behind, which writes on."""
    code = (
        "import sys; from pathlib import Path; from engine.run.run_folder import RunFolder\n"
        "with RunFolder.open(Path(sys.argv[1]), 'roc-0'): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(config.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=QUICKSTART.parents[1]) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with pytest.raises(ValueError, match="roc-0 is written by another process"):
            config.runs.make(canned, lambda _: None)
        assert (config.folder / "roc-0" / "metrics.jsonl").exists()
        writer.communicate()
    config.runs.make(canned, lambda _: None)


def test_a_run_that_ends_without_a_result_is_refused(config: Config) -> None:
    with pytest.raises(ValueError, match=r"roc-0 has no summary.json after its run"):
        config.runs.make(lambda arm, folder, options: None, lambda _: None)


def test_what_it_says(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    runs = config.runs
    for seed in range(3):
        for name in ("grpo", "roc"):
            canned(runs.arms[name], runs.path(name, seed), runs.options(name, seed))
    main(config)
    printed = capsys.readouterr().out
    text = (config.folder / "compare.md").read_text()
    assert text in printed
    assert "| step | GRPO-RoC | GRPO | GRPO-RoC - GRPO |\n|---|---|---|---|\n" in text
    # sd 0.01, t(2) = 4.303: 4.303 * 0.01 / sqrt(3) = 0.025
    assert "| 8 | 0.510 [0.485, 0.535] | 0.510 [0.485, 0.535] | +0.000 [+0.000, +0.000] |" in text
    assert "| 0 | 0.020 [0.020, 0.020] | 0.100 [0.100, 0.100] | -0.080 [-0.080, -0.080] |" in text
    assert "Mean over 3 seeds" in text
    content = json.loads((config.folder / "compare.json").read_text())
    assert list(content["intervals"]["by_step"]["eval/accuracy"]) == ["0", "8", "16"]
    assert content["values"]["curves"]["eval/accuracy"]["roc"]["0"] == [0.3, 0.31, 0.32]
    assert (config.folder / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_is_compared_with_each_other_one(config: Config) -> None:
    config = replace(config, algorithms=("roc", "grpo", "random"))
    config.runs.make(canned, lambda _: None)
    result = compare(config.runs, config.algorithms)
    assert "| GRPO-RoC - GRPO | GRPO-RoC - GRPO, random subset |" in markdown(result)
    assert as_json(result)["intervals"]["by_step"]["eval/accuracy"]["0"]["roc - random"]["mean"] == 0
    assert from_json(json.loads(json.dumps(as_json(result)))) == result
    plot(config.folder / "compare.png", result)


def test_pairing_by_seed_leaves_out_what_the_seeds_share() -> None:
    found = difference([0.1, 0.5, 0.9], [0.2, 0.6, 1.0])
    assert (found.mean, found.low, found.high) == pytest.approx((-0.1, -0.1, -0.1))


def test_runs_with_other_evaluations_are_not_compared(config: Config) -> None:
    config.runs.make(canned, lambda _: None)
    (config.folder / "roc-1" / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 1}\n')
    with pytest.raises(ValueError, match="do not have the same evaluations"):
        compare(config.runs, config.algorithms)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds must be at least 2"):
        Config(seeds=1)
    with pytest.raises(ValueError, match="algorithms must be two or more different ones, got 'roc,roc'"):
        Config(algorithms=("roc", "roc"))


def test_the_quick_start_takes_these_options(config: Config) -> None:
    words = [f"{name}={value}" for name, value in config.runs.options("grpo", 4).items()]
    made = parse(quickstart.Config, words)
    assert (made.algorithm, made.seed, made.steps, made.eval_problems) == ("grpo", 4, 16, 512)


def test_a_run_that_fails_names_its_log(tmp_path: Path) -> None:
    """The real quick start refuses the option at once."""
    command = [sys.executable, str(RECIPE), "eval_problems=0", f"folder={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "roc-0 failed (exit code 2): error: eval_problems must be at least 1, got 0" in done.stderr
    assert f"{tmp_path}/roc-0.log" in done.stderr


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(RECIPE), f"folder={tmp_path}/file/runs"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"tiny_compare: .*{tmp_path}/file.*\n", done.stderr), done.stderr


def test_ctrl_c_ends_it_with_one_line(started: list[Run], tmp_path: Path) -> None:
    run = Run([sys.executable, "-u", str(RECIPE), f"folder={tmp_path}"])
    started.append(run)
    run.until("running")
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: the quick start below gets it too
    assert run.end() == 130, run.text()
    assert run.text().splitlines()[-1] == "tiny_compare: interrupted; the same command goes on where it was"
    assert "Traceback" not in run.text()


def test_an_arm_names_the_folder_of_an_arm_before_it(tmp_path: Path) -> None:
    first = Arm(title="first", options={"steps": 8})
    second = Arm(title="second", options={"model": "{first}/checkpoint"}, after="first")
    runs = Runs(folder=tmp_path, arms={"first": first, "second": second}, seeds=(3,))
    assert runs.options("second", 3) == {"model": f"{tmp_path}/first-3/checkpoint", "seed": 3}
    with pytest.raises(ValueError, match="first"):
        replace(runs, arms={"second": second, "first": first}).options("second", 3)


def test_a_run_that_goes_on_from_another_counts_both(tmp_path: Path) -> None:
    arms = {
        "short": Arm(title="short", options={"algorithm": "roc"}),
        "on": Arm(title="short, then long", options={"algorithm": "grpo"}, after="short"),
        "long": Arm(title="long", options={"algorithm": "roc"}),
    }
    runs = Runs(folder=tmp_path, arms=arms, seeds=(0, 1))
    for seed in runs.seeds:
        canned(arms["short"], runs.path("short", seed), runs.options("short", seed), (0, 8, 16))
        canned(arms["on"], runs.path("on", seed), runs.options("on", seed), (0, 8))
        canned(arms["long"], runs.path("long", seed), runs.options("long", seed), (0, 8, 16, 24))
    result = compare(runs, ("on", "long"))
    accuracy = result.curves["eval/accuracy"]
    assert list(accuracy["on"]) == list(accuracy["long"]) == [16, 24]
    assert accuracy["on"][16] == [0.3, 0.31], "where the second run begins, its own evaluation counts"
    assert result.figures["sampled tokens"] == {"on": [2900.0, 2900.0], "long": [1400.0, 1400.0]}
