"""Replicas without a learner: what is asked of the machine is checked before anything starts."""

import json

import pytest

from engine.assembly.config import ServingConfig
from engine.assembly.parts import Parts
from engine.replica.config import ReplicaConfig
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Replicas, fleet_of
from tests.support.node import CHAT
from tests.support.paths import TINY

BUDGET = RolloutConfig(max_tokens=200)


def config(**fields):
    return ServingConfig(**{"checkpoint": TINY, "rollout": BUDGET, **fields})


def test_replicas_have_room_for_the_budget_and_compute_in_float32_on_the_cpu():
    replica = config().replicas_config
    assert replica.checkpoint == str(TINY)
    assert replica.max_model_len > 200
    assert replica.dtype == "float32"


def test_the_cpu_computes_in_the_dtype_that_is_asked_for():
    replica = ReplicaConfig(checkpoint=str(TINY), dtype="bfloat16")
    assert config(replica=replica).replicas_config.dtype == "bfloat16"


def test_each_replica_has_its_gpus():
    replica = config(replicas=2, devices=(0, 1, 2, 3), tensor_parallel=2).replicas_config
    assert (replica.devices_of(0), replica.devices_of(1)) == ((0, 1), (2, 3))
    assert replica.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "devices": (0,)}, "devices=0,1"),
        ({"replicas": 1, "devices": (0,), "tensor_parallel": 2}, "devices=0,1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        config(**fields)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        config(checkpoint=tmp_path)


def test_a_sandbox_that_was_not_configured_is_told():
    parts = {"rollout": BUDGET, "seed": 0, "chat": CHAT, "fleet": fleet_of(Replicas()), "timeline": Timeline()}
    served = Parts(**parts, sandbox_if_any=None)
    with pytest.raises(ValueError, match="sandbox"):
        served.sandbox  # noqa: B018


def test_a_tied_head_that_vllm_would_leave_unfilled_is_refused(tmp_path):
    """Nothing compares what is only served with a learner, so it would sample nonsense in silence."""
    fields = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "glm4_moe"}))
    with pytest.raises(ValueError, match="checkpoint: tie_word_embeddings must be false for 'glm4_moe'"):
        config(checkpoint=tmp_path)
