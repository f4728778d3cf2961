"""Lead and nodes with GPUs, of which there are none here: nodes pull files, and nobody has another's GPU."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.assembly.devices import DevicePlan
from engine.commands.node import node_options
from engine.console.options import flat, overrides, parse
from engine.errors import BadInput
from engine.nodes.messages import Job
from engine.programs import roles
from engine.programs.roles import check_devices, check_gpus, lead_training
from engine.replica.config import ReplicaConfig
from recipes.quickstart import Config
from tests.unit.engine.nodes.test_nodes_protocol import JOB

EIGHT = tuple(range(8))


def test_weights_are_files_where_nodes_may_join_whoever_has_which_gpu():
    apart = DevicePlan(devices=EIGHT, learner_ranks=4, replicas=4, max_staleness=1)
    assert apart.weight_transfer == "nccl"
    lead = replace(apart, files=True)
    assert lead.weight_transfer == lead.learner_fields["weight_transfer"] == "shm"
    assert lead.replica(ReplicaConfig(checkpoint="x")).weight_transfer == "shm"
    check_devices(SimpleNamespace(learner=None), lead)


def test_adapters_are_refused():
    with pytest.raises(BadInput, match="adapters"):
        check_devices(SimpleNamespace(learner=None), DevicePlan(adapters=True))


def test_a_learner_over_hosts_has_no_gpus_yet():
    with pytest.raises(BadInput, match="learner_hosts must be 1 with devices"):
        check_devices(SimpleNamespace(learner=object()), DevicePlan(devices=(0,), replicas=1))


async def test_the_ranks_of_all_hosts_of_a_learner_must_suit_its_options():
    config = parse(Config, ["learner.context_parallel=2"]).training()
    with pytest.raises(BadInput, match="context_parallel must divide the learner's 3 ranks"):
        async with lead_training(SimpleNamespace(learner=SimpleNamespace(hosts=3)), config, None):
            pass


BY_TURNS = ["devices=0,1,2,3", "learner_ranks=4", "replicas=4"]
APART = ["devices=0,1,2,3", "learner_ranks=2", "replicas=2", "max_staleness=1"]


@pytest.mark.parametrize(
    ("lead", "given", "devices", "per_replica"),
    [
        (BY_TURNS, ["devices=4,5,6,7"], (4, 5, 6, 7), 1),
        (BY_TURNS, ["devices=4,5", "replicas=2"], (4, 5), 1),
        (BY_TURNS, ["devices=4,5,6,7", "replicas=2", "tensor_parallel=2"], (4, 5, 6, 7), 2),
        (BY_TURNS, [], (0, 1, 2, 3), 1),  # on a machine of its own
        (APART, ["devices=4,5,6,7", "replicas=4"], (4, 5, 6, 7), 1),
        (["learner_ranks=2"], ["devices=0,1"], (0, 1), 1),  # a lead on the CPU
        (BY_TURNS, ["devices=", "replicas=1"], (), 1),  # a node on the CPU
    ],
)
def test_all_gpus_of_a_node_are_its_replicas(lead, given, devices, per_replica):
    plan = node_config(lead, given).training().devices.without_learner
    assert (plan.learner_ranks, plan.shared, plan.weight_transfer) == (0, False, "shm")
    replica = plan.replica(ReplicaConfig(checkpoint="x"))
    assert (replica.devices, replica.tensor_parallel, replica.sleeps) == (devices, per_replica, False)
    for index in range(plan.replicas if devices else 0):
        assert replica.arguments(index)["device_ids"] == list(devices[index * per_replica :][:per_replica])
        assert replica.arguments(index)["gpu_memory_utilization"] == 0.92, "no learner is beside it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["devices=4,5,6"],
            r"devices must be 4 GPUs for .*learner_ranks=0.* got 3. Fix: devices=0,1,2,3 \(repl[^)]*\)$",
        ),
        (["devices=4,4,5,6"], "devices must differ"),
    ],
)
def test_a_plan_that_a_node_cannot_have_is_refused_with_one_that_it_can(given, message, capsys):
    with pytest.raises(SystemExit):
        node_config(BY_TURNS, given)
    assert re.search(message, capsys.readouterr().err.strip())


def node_config(lead, given):
    told = overrides(Config, flat(parse(Config, lead)))
    folder = Path("/nowhere")
    model = parse(Config, []).model
    return parse(Config, [o for o in node_options(Config, told, given, checkpoint=model, folder=folder) if is_own(o)])


def is_own(option):
    return option.partition("=")[0] not in ("runs", "name")


async def test_a_node_with_gpus_of_the_lead_ends_before_it_starts_engines(monkeypatch):
    monkeypatch.setattr(roles, "BEAT_S", 0.0)
    asked = []

    async def ask(*_):
        asked.append(1)
        return Job(**{name: getattr(JOB, name) for name in JOB.__struct_fields__} | {"taken": {"GPU-a": "the lead"}})

    monkeypatch.setattr(roles, "ask", ask)
    await check_gpus(None, None, ["GPU-b"])
    assert len(asked) == 1
    with pytest.raises(BadInput, match=r"the lead uses GPU-a already\. Fix: devices="):
        await check_gpus(None, None, ["GPU-b", "GPU-a"])
    assert len(asked) == 7, "a predecessor that is dead is noticed meanwhile"
    await check_gpus(None, None, [])
    assert len(asked) == 7
