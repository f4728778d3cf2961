"""The stages of rStar2-Agent: the report's and the release's values, what an option changes, where a stage begins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from algo.learner.serialize import from_plain
from algo.loss.policy_losses import PpoClip
from engine.console.options import parse
from engine.errors import BadInput
from engine.programs.invocation import Machines
from recipes.rstar2.parts.stages.chain import (
    check_same,
    folder_of,
    has_ended,
    open_stage,
    optimizer_before,
    weights_before,
)
from recipes.rstar2.parts.stages.plateau import Plateau
from recipes.rstar2.parts.stages.values import RELEASE, REPORT
from recipes.rstar2.rl import ChainInvocation, Config, ReleaseConfig, filter_config, identity_of, run_stages
from tests.support.paths import TINY

SMALL = ["rollout.max_tokens=230", "eval_max_tokens=230"]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"problem": "6 * 7?", "answer": "42"}\n')
    return path


def config(data, *words, kind=Config):
    given = [f"model={TINY}", f"data={data}", "protocol=none", *SMALL, *words]
    names = {word.partition("=")[0] for word in words}
    return parse(kind, [word for word in given if word in words or word.partition("=")[0] not in names])


def model_for(tokens, folder):
    """A folder that looks like a model which reads so many tokens."""
    folder.mkdir(exist_ok=True)
    fields = {"max_position_embeddings": tokens, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def report(data, *words, kind=Config):
    """Whole, with no value of its own."""
    model = model_for(1 << 17, data.parent / "model")
    return parse(kind, [f"model={model}", f"data={data}", *words])


def test_the_reports_stages():
    stages = [
        (stage.response_tokens, stage.turns, stage.steps, stage.new_optimizer, stage.unsolved_only)
        for stage in REPORT.stages
    ]
    assert stages == [
        (8192, 10, 300, True, False),
        (12288, 10, 85, False, False),
        (12288, 15, 125, True, True),
    ]
    assert (REPORT.prompts_per_step, REPORT.group_size, REPORT.oversample, REPORT.filter_samples) == (512, 16, 2, 8)
    learner = REPORT.learner
    assert (learner.lr, learner.warmup_steps, learner.schedule) == (1e-6, 20, "constant")
    assert (learner.minibatches, learner.grad_clip, learner.reference_kl_coef) == (1, 1.0, 0.0)
    assert from_plain(learner.loss) == PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=None, aggregate="token")


def test_the_releases_values_where_they_differ():
    [stage] = RELEASE.stages
    assert (stage.response_tokens, stage.turns, stage.steps) == (8192, 5, 200)
    assert (RELEASE.prompts_per_step, RELEASE.group_size, RELEASE.oversample) == (128, 16, 2)
    assert (RELEASE.learner.lr, RELEASE.learner.warmup_steps, RELEASE.learner.weight_decay) == (1e-6, 20, 0.01)
    assert from_plain(RELEASE.learner.loss) == PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0, aggregate="token")


def test_a_stage_is_opened_with_the_reports_values(data):
    second = report(data, "stage=2").training(2)
    assert (second.steps, second.prompts_per_step, second.group.samples) == (85, 512, 32)
    assert (second.rollout.max_response_tokens, second.rollout.max_turns, second.rollout.temperature) == (12288, 10, 1)
    assert second.learner == REPORT.learner
    third = report(data, "stage=3").training(3)
    assert (third.steps, third.rollout.max_response_tokens, third.rollout.max_turns) == (125, 12288, 15)


def test_the_release_is_opened_with_its_own(data):
    made = report(data, "protocol=release", kind=ReleaseConfig)
    opened = made.training(1)
    assert (opened.steps, opened.prompts_per_step, opened.group.samples, opened.rollout.max_turns) == (200, 128, 32, 5)
    assert opened.rollout.max_calls_per_turn == 1
    assert opened.learner.weight_decay == 0.01
    assert (made.evaluated.temperature, made.evaluated.max_turns, made.evaluated.max_response_tokens) == (0, 5, 30720)


def test_the_reports_evaluation(data):
    budget = report(data).evaluated
    assert (budget.temperature, budget.max_turns, budget.max_response_tokens) == (0.6, 30, 30720)


def test_small_runs_override_by_options(data):
    words = ["stage=all", "steps=2,3,4", "prompts_per_step=4", "group_size=2", "rollout.max_turns=4", "learner.lr=1e-4"]
    made = config(data, *words)
    opened = [made.training(number) for number in (1, 2, 3)]
    assert [each.steps for each in opened] == [2, 3, 4]
    assert {each.rollout.max_tokens for each in opened} == {230}
    assert {each.rollout.max_response_tokens for each in opened} == {None}
    assert {each.rollout.max_turns for each in opened} == {4}
    assert {(each.prompts_per_step, each.group.samples, each.learner.lr) for each in opened} == {(4, 4, 1e-4)}
    assert len({each.seed for each in opened}) == 3, "each stage has prompts and samples of its own"


def test_plain_grpo_rolls_out_what_it_trains(data):
    assert config(data, "group_size=4", "algorithm=grpo").training(1).group.samples == 4


def test_replicas_have_room_for_the_longer_of_rollouts_and_evaluations(data):
    made = config(data, f"eval_sets={data}", "rollout.max_tokens=100", "eval_max_tokens=400")
    assert made.training(1).replicas_config.max_model_len > 400
    assert made.longest(1) == 400
    assert config(data, "rollout.max_tokens=100", "eval_max_tokens=400").longest(1) == 100, "nothing is evaluated"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["stage=all", "steps=3"], "steps"),
        (["group_size=1"], "group_size"),
        (["rollout.max_tokens=2000"], "rollout.max_tokens=992"),
        (["eval_sets={data}", "eval_max_tokens=2000"], "eval_max_tokens=992"),
        (["plateau.window=0"], "window"),
        (["model=missing"], "missing"),
    ],
)
def test_what_cannot_be_is_refused_by_name(data, capsys, words, named):
    with pytest.raises(SystemExit) as end:
        config(data, *(word.format(data=data) for word in words))
    assert end.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", ["data", "eval_sets"])
def test_files_that_are_not_there_are_named_before_a_stage_begins(data, tmp_path, name):
    given = replace(config(data), **{name: Path("missing.jsonl") if name == "data" else (Path("missing.jsonl"),)})
    with pytest.raises(BadInput, match=rf"{name}.*missing\.jsonl"):
        run_stages(given, tmp_path / "chain", Machines())
    assert not (tmp_path / "chain").exists()


def test_the_release_has_one_stage(data, capsys):
    with pytest.raises(SystemExit):
        config(data, "stage=2", "protocol=release", kind=ReleaseConfig)
    assert "stage" in capsys.readouterr().err
    assert report(data, "stage=all", "protocol=release", kind=ReleaseConfig).numbers == [1]


PLATEAU = Plateau(window=3, level=0.05, change=0.01)


@pytest.mark.parametrize(
    ("shares", "reached"),
    [
        ([], False),
        ([0.1] * 5, False),  # too few to compare
        ([0.1] * 6, True),
        ([0.0] * 6, False),  # flat, but nothing is cut off
        ([0.3, 0.3, 0.3, 0.1, 0.1, 0.1], False),  # falling
        ([0.06, 0.06, 0.06, 0.1, 0.1, 0.1], False),  # rising
        ([0.3, 0.3, 0.1, 0.1, 0.11, 0.1, 0.1, 0.105], True),  # what was long before does not count
        ([0.05, 0.15, 0.1, 0.15, 0.05, 0.1], True),  # means are compared, not steps
    ],
)
def test_a_stage_is_over_when_the_share_of_truncated_rollouts_stays(shares, reached):
    assert PLATEAU.reached(shares) is reached


def rows(shares):
    return [
        {"step": step, "stop/length": 100 * share, "rollout/trajectories": 100.0}
        for step, share in enumerate(shares, start=1)
    ]


def test_the_rule_reads_the_rows_of_the_steps():
    assert "step 6" in PLATEAU.enough(rows([0.1] * 6))
    assert PLATEAU.enough(rows([0.0] * 6)) is None
    assert PLATEAU.enough([]) is None
    assert PLATEAU.enough([{"step": 1, "stop/length": 0.0, "rollout/trajectories": 0.0}] * 9) is None


def test_the_rule_ends_a_stage_before_the_last_where_it_is_asked_for(data):
    made = config(data, "stage=all", "switch=plateau", "plateau.window=3")
    assert [made.enough(number)(rows([0.1] * 6)) is not None for number in (1, 2, 3)] == [True, True, False]
    assert config(data).enough(1)(rows([0.1] * 60)) is None


def a_stage(chain, number, *, ended, steps=2, states=()):
    """The folder of a stage as a run leaves it."""
    folder = folder_of(chain, number)
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": steps}))
    for step in states:
        (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    if ended:
        (folder / "summary.json").write_text("{}")
    return folder


def test_the_first_stage_and_one_without_a_stage_before_have_no_weights_to_go_on_from(tmp_path):
    assert weights_before(tmp_path, 1) is None
    assert weights_before(tmp_path, 2) is None
    assert optimizer_before(tmp_path, 2) is None


def test_a_stage_goes_on_with_weights_and_optimizer_of_the_one_before(tmp_path):
    before = a_stage(tmp_path, 1, ended=True, states=(1, 2))
    assert weights_before(tmp_path, 2) == before / "checkpoint"
    assert optimizer_before(tmp_path, 2) == before / "checkpoints" / "step-000002"


def test_a_stage_does_not_begin_before_the_one_before_has_ended(tmp_path):
    before = a_stage(tmp_path, 1, ended=False)
    with pytest.raises(BadInput, match=str(before)):
        weights_before(tmp_path, 2)


def test_the_filter_samples_with_the_budgets_of_the_stage_before(data):
    made, chain = report(data, "stage=all"), data.parent / "runs"
    model_for(1 << 17, a_stage(chain, 2, ended=True) / "checkpoint")
    filtered = filter_config(made, 3, chain)
    assert (filtered.keep, filtered.samples, filtered.temperature) == ("unsolved", 8, 1.0)
    assert filtered.budget() == made.rollout_of(2)
    assert (filtered.model, filtered.data) == (chain / "stage-2" / "checkpoint", data)


@pytest.mark.parametrize(("words", "dtype"), [([], "float32"), (["dtype=bfloat16"], "bfloat16")])
def test_the_filter_samples_in_the_dtype_of_the_stages(data, words, dtype):
    made, chain = report(data, "stage=all", *words), data.parent / "runs"
    model_for(1 << 17, a_stage(chain, 2, ended=True) / "checkpoint")
    assert made.training(1).replicas_config.dtype == dtype
    assert filter_config(made, 3, chain).serving().replicas_config.dtype == dtype


def test_the_filter_has_all_gpus_that_make_whole_replicas(data):
    gpus = ["devices=0,1,2", "learner_ranks=1", "replicas=1", "tensor_parallel=2"]
    made, chain = report(data, "stage=all", *gpus), data.parent / "runs"
    model_for(1 << 17, a_stage(chain, 2, ended=True) / "checkpoint")
    filtered = filter_config(made, 3, chain)
    assert (filtered.replicas, filtered.devices) == (1, (0, 1))
    assert filter_config(report(data, "stage=all"), 3, chain).replicas == 2


def test_a_stage_has_ended_when_all_steps_that_are_wanted_are_in_its_summary(tmp_path):
    assert not has_ended(folder_of(tmp_path, 1), 2)
    folder = a_stage(tmp_path, 1, ended=True, steps=2)
    assert has_ended(folder, 2)
    assert not has_ended(folder, 3)


def test_a_run_goes_on_with_other_machines_and_not_with_other_values(data, tmp_path):
    made, path = config(data), folder_of(tmp_path, 1)
    identity = identity_of(made)
    with open_stage(path, identity, 2) as folder:
        folder.json("config.json", {**identity.values, "steps": 2})
    moved = config(data, "replicas=1", "micro_batch_tokens=1000", "kv_blocks=1500", "checkpoint_every=1")
    check_same(path, identity_of(moved))
    with pytest.raises(BadInput, match=r"learner\.lr"):
        check_same(path, identity_of(config(data, "learner.lr=1e-3")))
    with pytest.raises(BadInput, match="stage"):
        check_same(path, identity_of(config(data, "stage=2")))
    data.write_text('{"problem": "6 * 8?", "answer": "48"}\n')
    with pytest.raises(BadInput, match="data_sha256"):
        check_same(path, identity_of(made))


def test_a_stage_that_another_process_writes_is_not_begun_elsewhere(data, tmp_path):
    path, identity = folder_of(tmp_path, 1), identity_of(config(data))
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match=str(path)):
        open_stage(path, identity, 2)
    assert [each.name for each in tmp_path.glob("stage*")] == ["stage-1"]


def test_a_chain_is_not_begun_anew_in_its_folder(capsys):
    with pytest.raises(SystemExit):
        parse(ChainInvocation, ["fresh=true"])
    assert "fresh" in capsys.readouterr().err


def test_a_copy_of_the_model_elsewhere_is_the_same_model(data, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in TINY.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    made = config(data)
    assert identity_of(replace(made, model=copy)) == identity_of(made)
    content = bytearray((TINY / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert identity_of(replace(made, model=copy)) != identity_of(made)


def test_values_are_frozen():
    with pytest.raises(AttributeError):
        REPORT.stages[0].turns = 5
    assert replace(REPORT, prompts_per_step=4).stages is REPORT.stages
