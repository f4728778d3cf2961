"""What the options of recipes/distill.py say to the learner and the teacher, and the table of what it saves."""

import json

import msgspec
import pytest

from algo.learner.serialize import from_plain
from algo.loss.distillation import TopK
from algo.loss.policy_losses import Gspo, PpoClip
from engine.console.options import parse
from engine.programs.main import identity_of
from recipes.distill import Config
from recipes.tiny import distilled
from tests.support.paths import ROOT, TINY

TEACHER = f"teacher={TINY}"


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ([], PpoClip()),
        (["loss=gspo"], Gspo()),
        (["top_k=4"], TopK()),
        (["top_k=4", "direction=forward", "loss=gspo"], TopK(direction="forward", policy=Gspo())),
        (["clip_high=0.3"], PpoClip(clip_high=0.3)),
        (["top_k=4", "clip_high=0.3"], TopK(policy=PpoClip(clip_high=0.3))),
    ],
)
def test_the_likeliest_tokens_make_the_loss_and_nothing_else_does(words, loss):
    config = parse(Config, [TEACHER, *words])
    assert from_plain(config.training().learner.loss) == loss
    assert config.of_teacher.top == config.top_k


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "teacher must be a checkpoint's folder"),
        ([TEACHER, "top_k=21"], "top_k must be in [0, 20], got 21"),
        ([TEACHER, "kl_clip=0"], "kl_clip"),
        ([TEACHER, "reward_weight=-1"], "reward_weight"),
        ([TEACHER, "direction=both"], "direction"),
        ([TEACHER, "direction=forward"], "top_k"),
        ([TEACHER, "stop_flat_after=2"], "stop_flat_after"),
        ([TEACHER, "group_size=0"], "group_size"),
        ([TEACHER, "group_size=1", "reward_weight=0.5"], "group_size"),
        (["teacher=http://x/v1", "teacher_devices=0"], "devices of a teacher"),
    ],
)
def test_a_wrong_option_is_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Config, words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_run_that_waited_too_long_for_its_teacher_is_resumed_with_a_longer_deadline():
    before, patient = (parse(Config, [TEACHER, word]) for word in ("seed=0", "teacher_deadline_s=900"))
    assert identity_of(before) == identity_of(patient)


def test_one_rollout_of_a_prompt_is_enough_where_rewards_are_only_shown():
    assert parse(Config, [TEACHER, "group_size=1"]).training().group.samples == 1


def canned(folder, accuracies, tokens):
    """A finished run that is evaluated before it and after each step."""
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "eval/accuracy": accuracy, "time/train_total_s": 2.0 * step}
        | ({"tokens/generated": tokens} if step else {})
        for step, accuracy in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"versions": {"torch": "2"}}))


def test_the_table_says_what_each_method_needed(tmp_path):
    config = distilled.Config(seeds=2, folder=tmp_path)
    for seed in range(2):
        canned(tmp_path / f"roc-{seed}", [0.3, 0.5, 0.96, 1.0], 1000 * (1 + seed))
        canned(tmp_path / f"distill-{seed}", [0.3, 0.97], 100)
    pairs = [distilled.pair(config, seed) for seed in range(2)]
    assert pairs[1].reached == {
        "roc": distilled.Reached(step=2, tokens=4000, seconds=4.0),
        "distill": distilled.Reached(step=1, tokens=100, seconds=2.0),
    }
    text = distilled.markdown(config, pairs)
    assert "30.0 times as many" in text
    assert distilled.as_json(config, pairs)["median"]["roc"]["tokens"] == 3000
    distilled.plot(config, tmp_path / "plot.png", pairs)
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_run_that_never_reached_it_has_no_figure_and_no_ratio(tmp_path):
    config = distilled.Config(seeds=1, folder=tmp_path)
    canned(tmp_path / "roc-0", [0.3, 1.0], 1000)
    canned(tmp_path / "distill-0", [0.3, 0.9], 100)
    pairs = [distilled.pair(config, 0)]
    assert pairs[0].reached["distill"] is None
    assert "not reached" in distilled.markdown(config, pairs)
    assert distilled.as_json(config, pairs)["median"]["distill"] == {"step": None, "tokens": None, "seconds": None}


def test_a_student_has_the_teacher_of_its_seed_and_the_same_problems(tmp_path):
    config = distilled.Config(folder=tmp_path)
    teacher, student = config.runs.options("roc", 3), config.runs.options("distill", 3)
    assert student["teacher"] == str(tmp_path / "roc-3" / "checkpoint")
    assert teacher["seed"] == student["seed"] == 3


def test_the_table_of_the_page_is_that_of_the_committed_figures():
    kept = json.loads((ROOT / "recipes" / "gallery" / "distilled.json").read_text())
    config = distilled.Config(**kept["config"])
    table = distilled.markdown(config, msgspec.convert(kept["pairs"], list[distilled.Pair]))
    assert table in (ROOT / "recipes" / "distill.md").read_text()
    ratio = kept["median"]["roc"]["tokens"] / kept["median"]["distill"]["tokens"]
    assert f"sampled {ratio:.1f} times as many tokens" in (ROOT / "recipes" / "README.md").read_text()
