"""What the quick start's command line says to the learner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from algo.loss.policy_losses import Correction, PpoClip
from engine.assembly.devices import DevicePlan
from engine.console.options import parse
from engine.errors import BadInput
from engine.fleet.canary import tolerance_of
from engine.programs.main import identity_of
from recipes.options import ADVANTAGES
from recipes.quickstart import Config
from recipes.tiny.task import SHIPPED


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["steps=12", "learner.schedule=cosine", "learner.warmup_steps=2"], ("cosine", 12, 0)),
        (["steps=12", "learner.schedule=linear", "learner.steps=9"], ("linear", 9, 0)),
        (["steps=12", "learner.lora_rank=8"], ("constant", None, 8)),
        (["steps=12", "learner.schedule=cosine", "learner.lora_rank=8"], ("cosine", 12, 8)),
    ],
)
def test_a_schedule_and_adapters_are_options(words: list[str], expected: tuple[str, int | None, int]) -> None:
    learner = parse(Config, words).training().learner
    assert (learner.schedule, learner.steps, learner.lora_rank) == expected


def test_every_advantage_is_an_option() -> None:
    assert [parse(Config, [f"advantage={name}"]).advantage for name in ADVANTAGES] == list(ADVANTAGES)


def test_activation_offload_is_an_option_beside_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["learner.activation_checkpointing=full", "learner.activation_offload=true"]
    assert parse(Config, words).training().learner.activation_offload
    with pytest.raises(SystemExit) as ended:
        parse(Config, words[1:])
    assert ended.value.code == 2
    assert "LearnerConfig.activation_checkpointing" in capsys.readouterr().err


def test_ranks_that_share_rows_must_divide_those_of_all_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    said = "LearnerConfig.context_parallel must divide the learner's 3 ranks"
    parse(Config, ["learner.context_parallel=2", "learner_ranks=4"]).training().check_ranks(hosts=1)
    three = parse(Config, ["learner.context_parallel=2", "learner_ranks=3"]).training()
    three.check_ranks(hosts=2)
    with pytest.raises(BadInput, match=said):
        three.check_ranks(hosts=1)
    with pytest.raises(SystemExit) as ended:  # learners on GPUs have one host
        parse(Config, ["learner.context_parallel=2", "learner_ranks=3", "replicas=3", "devices=0,1,2"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


MIXTURE = f"model={SHIPPED.parent / 'agent_moe'}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.context_parallel=3", "learner_ranks=3"], "context_parallel must divide the 4 query heads"),
        ([MIXTURE, "learner.lora_rank=4"], "lora_targets must not hold gate_proj, up_proj, down_proj for 'qwen3_moe'"),
        (["learner.replay_routing=true"], "replay_routing must be False for 'qwen3'"),
        (["learner.train_router=false"], "train_router must be True for 'qwen3'"),
        (["learner.load_balancing_coef=0.01"], "load_balancing_coef must be 0 for 'qwen3'"),
    ],
)
def test_options_that_do_not_suit_the_model_are_refused_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Config, words)
    assert ended.value.code == 2
    assert f"LearnerConfig.{said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learner.lora_rank=4"], "lora_targets must not hold gate_proj, up_proj, down_proj for 'gpt_oss'"),
        (["learner.attention=sdpa"], "attention must be 'packed' for 'gpt_oss'"),
        (["learner.attention=eager"], "attention must be 'packed' for 'gpt_oss'"),
    ],
)
def test_options_that_do_not_suit_gpt_oss_are_refused_before_anything_starts(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((SHIPPED.parent / "agent_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt_oss"}))
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"model={tmp_path}", *words])
    assert ended.value.code == 2
    assert f"LearnerConfig.{said}" in capsys.readouterr().err


def test_a_mixture_takes_the_options_of_mixtures() -> None:
    words = [MIXTURE, "learner.replay_routing=true", "learner.train_router=false", "learner.load_balancing_coef=0.01"]
    words += ["learner.context_parallel=2", "learner_ranks=2"]
    words += ["learner.lora_rank=4", "learner.lora_targets=q_proj,o_proj"]
    training = parse(Config, words).training()
    assert training.learner.replay_routing
    assert training.learner.context_parallel == 2
    assert training.replicas_config.returns_routes
    measured = parse(Config, [MIXTURE, "learner.replay_routing=measure"]).training()
    assert measured.learner.replay_routing == "measure"
    assert measured.replicas_config.returns_routes


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"moe_intermediate_size": 40}, "moe_intermediate_size"),
        (
            {
                "model_type": "gpt_oss",
                "moe_intermediate_size": None,
                "intermediate_size": 40,
                "tie_word_embeddings": False,
            },
            "intermediate_size",
        ),
    ],
    ids=["Qwen3-MoE", "gpt-oss"],
)
def test_experts_that_replicas_on_the_cpu_would_fill_up_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], name: str
) -> None:
    config = json.loads((SHIPPED.parent / "agent_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"model={tmp_path}"])
    assert ended.value.code == 2
    assert f"checkpoint: {name} must be a multiple of 32" in capsys.readouterr().err


def test_a_tied_head_that_vllm_would_leave_unfilled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((SHIPPED.parent / "agent_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm4_moe"}))
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"model={tmp_path}"])
    assert ended.value.code == 2
    assert "checkpoint: tie_word_embeddings must be false for 'glm4_moe', got true" in capsys.readouterr().err


def test_a_mixture_with_adapters_of_their_own_is_refused_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Config, [MIXTURE, "adapters=true", "learner.lora_rank=4", "learner.lora_targets=q_proj"])
    assert ended.value.code == 2
    assert "adapters must be False for a mixture of experts on the CPU" in capsys.readouterr().err


def test_trajectories_longer_than_the_model_reads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parse(Config, ["rollout.max_tokens=992"])
    with pytest.raises(SystemExit) as ended:
        parse(Config, ["rollout.max_tokens=993"])
    assert ended.value.code == 2
    assert "rollout.max_tokens must be at most 992 for a model of 1024 positions" in capsys.readouterr().err


def test_a_quantised_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((SHIPPED.parent / "agent_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"model={tmp_path}"])
    assert ended.value.code == 2
    assert "quantised ('mxfp4' in config.json)" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"model={tmp_path}"])
    assert ended.value.code == 2
    assert "checkpoint: cannot read" in capsys.readouterr().err


def test_adapters_need_a_rank_and_are_as_many_as_versions_may_be_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Config, ["adapters=true"])
    assert "adapters must be False where lora_rank is 0" in capsys.readouterr().err
    config = parse(Config, ["adapters=true", "lora_rank=16", "max_staleness=2"]).training()
    replica = config.replicas_config
    assert (replica.weight_transfer, replica.lora_rank, replica.adapters) == ("adapter", 16, 3)
    learner = replace(config.learner, **config.devices.learner_fields)
    assert (learner.weight_transfer, learner.lora_rank) == ("adapter", 16)
    with pytest.raises(ValueError, match="lora_targets must not hold 'lm_head'"):
        replace(learner, lora_targets=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match="lora_rank must be positive with weight_transfer 'adapter', got 0"):
        replace(learner, lora_rank=0)


def test_deadlines_and_tolerances_are_options_and_a_run_that_one_has_ended_goes_on_with_another() -> None:
    words = [
        "step_deadline_s=7",
        "start_deadline_s=9",
        "update_deadline_s=11",
        "replica_step_deadline_s=13",
        "canary_tolerance=0.5",
        "mismatch_tolerance=none",
        "wandb=offline",
    ]
    config = parse(Config, words)
    made = config.training()
    assert (made.step_deadline_s, made.start_deadline_s, made.replicas_config.start_deadline_s) == (7, 9, 9)
    assert (made.replicas_config.update_deadline_s, made.replicas_config.step_deadline_s) == (11, 13)
    assert (made.canary_bound, made.learner.mismatch_bound) == (0.5, None)
    assert parse(Config, ["canary_tolerance=none"]).training().canary_bound is None
    assert identity_of(config) == identity_of(parse(Config, []))


def test_on_gpus_tolerances_are_those_of_bfloat16_and_the_kv_cache_is_what_they_hold() -> None:
    on_cpu, on_gpu = (parse(Config, words).training() for words in ([], ["devices=0", "replicas=1"]))
    assert on_gpu.canary_bound == tolerance_of(on_gpu.checkpoint, "bfloat16") > 1e3 * (on_cpu.canary_bound or 1)
    assert parse(Config, ["learner.dtype=bfloat16"]).training().canary_bound == on_gpu.canary_bound
    assert (on_cpu.replicas_config.blocks, on_gpu.replicas_config.blocks) == (2048, None)
    assert parse(Config, ["devices=0", "replicas=1", "kv_blocks=99"]).training().replicas_config.blocks == 99


def test_quantised_replicas_need_a_loss_that_corrects_and_a_tolerance() -> None:
    config = parse(Config, []).training()
    assert config.replica is not None
    replica = replace(config.replica, devices=(0,), quantization="fp8_per_block")
    given = {"replica": replica, "devices": DevicePlan(devices=(0,), replicas=1)}
    with pytest.raises(ValueError, match=r"replica\.quantization='fp8_per_block' needs a loss that corrects"):
        replace(config, **given, canary_tolerance=1.0)
    loss = PpoClip(proximal=True, correction=Correction(level="token", upper=2.0))
    given["learner"] = replace(config.learner, loss=loss)
    with pytest.raises(ValueError, match="needs canary_tolerance, got 'auto'"):
        replace(config, **given)
    assert replace(config, **given, canary_tolerance=1.0).replicas_config.quantization == "fp8_per_block"


def test_sandbox_hosts_may_do_all_of_the_work():
    config = parse(Config, ["sandbox_listen=tcp://127.0.0.1:5555", "slots=0"]).training().sandbox
    assert (config.listen, config.slots, config.keys) == ("tcp://127.0.0.1:5555", 0, None)
    assert Config().training().sandbox.listen is None
