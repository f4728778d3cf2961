"""The options that recipes share, and the advice that names them."""

import sys
from dataclasses import replace

import pytest

from engine.console.options import flat, parse
from engine.diagnosis.limit import diagnose
from engine.programs.invocation import Machines
from engine.programs.machines import lead_of
from engine.recipe import Recipe, load_recipe
from engine.types import Group
from recipes import quickstart
from tests.support.algo_fakes import trajectory
from tests.support.fakes import a_trajectory
from tests.support.paths import ROOT, TINY

RECIPES = ["quickstart", "train_on_file", "agents/openai_agent", "environments/mixture", "environments/train_verifiers"]
RECIPES += ["rstar2/rl", "agents/program", "distill"]
STEP = {"step": 1, "time/step_s": 10.0, "time/rollout_s": 9.0, "time/learn_s": 1.0, "replicas/busy_s": 4.0}
ROWS = [
    {"idle/tool_wait_s": 14.0, "tools/calls_jailed": 9},
    {"kv/blocked_s": 9.0, "kv/preemptions": 3, "kv_peak/replica0": 1.0},
    {"rollout/tail_s": 9.0},
    {"idle/reward_s": 14.0},
    {"idle/staleness_gate_s": 14.0, "learner/tokens": 90_000, "learner/trajectories": 3},
    {"idle/weight_sync_s": 14.0},
    {"replicas/deaths": 1},
    {"groups/all": 8, "groups/flat": 8, "rollout/trajectories": 9, "stop/length": 9, "stop/deadline": 9},
]


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Loading a recipe puts its folder on sys.path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def options_of(recipe, tmp_path):
    """The configuration of a recipe, as small as the tiny agent needs it."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "6 * 7?", "answer": "42"}\n')
    given = {
        "train_on_file": [f"data={data}", f"held_out={data}"],
        "distill": [f"teacher={TINY}"],
        "rstar2/rl": [
            f"model={TINY}",
            f"data={data}",
            "protocol=none",
            "rollout.max_tokens=230",
            "eval_max_tokens=230",
        ],
    }
    loaded = load_recipe(ROOT / "recipes" / f"{recipe}.py")
    return loaded, parse(loaded.config, given.get(recipe, []))


@pytest.mark.parametrize("recipe", RECIPES)
def test_advice_names_options_of_the_recipe_alone(recipe, tmp_path):
    _, config = options_of(recipe, tmp_path)
    options = flat(config)
    found = [diagnose([STEP | row], options) for row in ROWS]
    named = {finding.option for each in found for finding in (*each.advice, *each.alarms)} - {""}
    assert len(named) > 5
    assert named <= options.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_nodes_can_be_given_the_checkpoint_of_every_recipe(recipe, tmp_path):
    loaded, config = options_of(recipe, tmp_path)
    assert lead_of(Machines(nodes="tcp://127.0.0.1:5700"), loaded, config) is not None


def test_nodes_of_a_recipe_without_the_option_are_refused_by_name(capsys):
    loaded = Recipe(config=Machines, train=options_of)
    with pytest.raises(SystemExit) as ended:
        lead_of(Machines(nodes="tcp://127.0.0.1:5700"), loaded, Machines())
    assert ended.value.code == 2
    assert "`model`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["group_size=1"], "group_size must be at least 2, got 1"),
        (["oversample=0"], "oversample must be at least 1, got 0"),
        (["minibatches=17", "prompts_per_step=4", "group_size=4"], "minibatches=17 exceeds"),
        (["eval_samples=0"], "eval_samples must be at least 1, got 0"),
        (["eval_problems=100000", "eval_samples=2"], "eval_problems x eval_samples must be at most"),
        (["devices=0", "replicas=1", "eval_replicas=1"], "eval_replicas must be at least 0, and 0 on GPUs, got 1"),
        (["slots=-1"], "slots"),
        (["rollout.temperature=0.7"], "rollout.temperature must be 1, got 0.7"),
        (["rollout.top_p=0.9"], "rollout.top_p must be 1, got 0.9"),
        (["clip_high=0.2", "loss=sapo"], "clip_high must be none for loss=sapo, got 0.2"),
        (["learner_state=nowhere"], "learner_state must be a folder, got 'nowhere'"),
        (["tool_error_penalty=-1"], "tool_error_penalty must be at least 0, got -1"),
        (["data=nowhere.jsonl"], "nowhere.jsonl"),
        (["devices=0,1", "replicas=3"], "learner_ranks=1"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(quickstart.Config, words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["roc", "grpo", "random"])
def test_the_advantage_reaches_selection_and_batch(algorithm):
    config = quickstart.Config(algorithm=algorithm, advantage="reinforce++", group_size=2)
    members = tuple(replace(a_trajectory(reward=reward), sample=at) for at, reward in enumerate((1.0, 0.0)))
    group = config.select(Group(prompt=members[0].prompt, trajectories=members, lease=0))
    other = replace(config, advantage="rloo").make_batch
    assert config.make_batch(1, [group]).advantages_B.shape == (2,)
    with pytest.raises(ValueError, match="advantage"):
        other(1, [group])


@pytest.mark.parametrize(("loss", "low"), [("ppo", 0.2), ("gspo", 3e-4), ("cispo", 1.0)])
def test_the_upper_bound_of_the_clip_is_an_option(loss, low):
    made = quickstart.Config(loss=loss, clip_high=0.5).training().learner.loss
    assert (made["clip_low"], made["clip_high"]) == (low, 0.5)


def test_a_run_begins_with_the_optimizer_that_is_given(tmp_path):
    assert quickstart.Config(learner_state=tmp_path).training().learner_state == tmp_path


async def test_a_penalty_is_trained_on():
    failed = trajectory(text="<answer>\\boxed{2}</answer>", outcomes=("error", "ok"))
    assert await quickstart.Config().reward(failed) == 0.0
    assert await quickstart.Config(tool_error_penalty=0.5).reward(failed) == -0.25


def test_a_file_takes_the_place_of_fresh_problems(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "6 * 7?", "answer": "42"}\n')
    stream = quickstart.Config(data=tmp_path / "mine.jsonl").prompts()
    assert [next(stream).answer for _ in range(3)] == ["42"] * 3
    assert next(quickstart.Config(seed=5).prompts()).id == "train-5-0"
