"""Where learner and replicas run, and how they take turns on what they share."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from algo.learner.config import LearnerConfig
from engine.assembly.config import TrainingConfig
from engine.assembly.devices import DevicePlan
from engine.fleet.canary import tolerance_of
from engine.learner.messages import Trained
from engine.learner.process import LearnerProcessConfig
from engine.pipeline.leases import Leases
from engine.replica.config import ReplicaConfig
from engine.stages.train import TrainStage
from engine.telemetry.timeline import Timeline
from engine.types import Batch, Group, PublishedWeights
from tests.support.fakes import Clock, Gate, Replicas, a_prompt, a_trajectory, fleet_of, settle
from tests.unit.engine.assembly.test_wiring import OPTIONS
from tests.unit.engine.fleet.test_fleet import expected, play, sampling, weights

ONE, EIGHT = (0,), tuple(range(8))


@pytest.mark.parametrize(
    ("options", "transfer", "learner", "replicas", "sleeps"),
    [
        ({}, "shm", (), (), False),
        ({"max_staleness": 2, "learner_ranks": 2}, "shm", (), (), False),
        ({"devices": ONE, "replicas": 1}, "shm", ONE, ONE, True),
        ({"devices": (0, 1), "replicas": 1, "max_staleness": 1}, "nccl", (0,), (1,), False),
        ({"devices": EIGHT, "learner_ranks": 8, "replicas": 8}, "shm", EIGHT, EIGHT, True),
        ({"devices": EIGHT, "learner_ranks": 8, "replicas": 4, "tensor_parallel": 2}, "shm", EIGHT, EIGHT, True),
        ({"devices": EIGHT, "learner_ranks": 2, "replicas": 6, "max_staleness": 1}, "nccl", (0, 1), EIGHT[2:], False),
        ({"devices": (4, 6, 7), "learner_ranks": 1, "tensor_parallel": 1}, "nccl", (4,), (6, 7), False),
    ],
)
def test_a_placement_decides_the_settings_of_the_parts(options, transfer, learner, replicas, sleeps):
    placement = DevicePlan(**options)
    replica = placement.replica(ReplicaConfig(checkpoint="x"))
    assert (replica.weight_transfer, replica.devices, replica.sleeps) == (transfer, replicas, sleeps)
    assert (replica.tensor_parallel, placement.shared) == (placement.tensor_parallel, sleeps)
    process = placement.learner(LearnerProcessConfig(module="x"))
    assert (process.ranks, process.devices) == (placement.learner_ranks, learner)
    assert placement.rests == (placement.max_staleness == 0)
    if replicas:
        arguments = [replica.arguments(index) for index in range(placement.replicas)]
        assert [device for each in arguments for device in each["device_ids"]] == list(replicas)
        assert {each["enable_sleep_mode"] for each in arguments} == {sleeps}
    told = LearnerConfig(**placement.learner_fields)
    assert told.weight_transfer == replica.weight_transfer
    assert told.weights_dtype == replica.dtype == ("bfloat16" if replicas else "float32")
    assert (told.device, told.dtype) == (("cuda", "bfloat16") if learner else ("cpu", "float32"))
    assert told.offload_optimizer == replica.sleeps
    assert (told.mismatch_bound, told.mismatch_tolerance) == (0.1 if learner else 3e-5, "auto")
    for given in (0.2, None):
        assert replace(LearnerConfig(mismatch_tolerance=given), **placement.learner_fields).mismatch_bound == given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learner_ranks": -1}, "learner_ranks must be at least 0, got -1"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"devices": (1, 1)}, r"devices must differ, got \(1, 1\)"),
        ({"devices": ONE}, "devices must be 3 .* learner_ranks=1, .* got 1"),
        ({"devices": EIGHT, "learner_ranks": 4, "replicas": 2}, "devices must be 6 .* got 8"),
        ({"devices": EIGHT, "learner_ranks": 8, "replicas": 2}, "devices must be 10 .* got 8"),
        ({"devices": ONE, "replicas": 1, "max_staleness": 1}, "max_staleness must be 0 where .* share .* got 1"),
        (
            {"devices": ONE, "replicas": 1, "max_staleness": 1, "sleep": False},
            "max_staleness must be 0 where .* share .* got 1",
        ),
        ({"sleep": False}, "sleep must be True unless learner and replicas share GPUs, got False"),
        ({"devices": (0, 1), "replicas": 1, "sleep": False}, "sleep must be True unless .* got False"),
        ({"eager": True}, "eager must be False on the CPU, .* got True"),
        ({"dtype": "float16"}, "dtype must be None or one of 'float32', 'bfloat16', got 'float16'"),
        (
            {"devices": ONE, "replicas": 1, "dtype": "float32"},
            "dtype must be None or 'bfloat16' on GPUs, got 'float32'",
        ),
    ],
)
def test_an_impossible_placement_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DevicePlan(**options).replica(ReplicaConfig(checkpoint="x"))


@pytest.mark.parametrize(("given", "share"), [(None, 0.3), (0.1, 0.1)])
def test_replicas_beside_the_learner_on_one_gpu_keep_their_memory_and_rest_by_pausing(given, share):
    plan = DevicePlan(devices=ONE, replicas=1, sleep=False)
    assert (plan.shared, plan.sleeps, plan.rests, plan.weight_transfer) == (True, False, True, "shm")
    replica = plan.replica(ReplicaConfig(checkpoint="x", devices=ONE, memory_share=given))
    arguments = replica.arguments(0)
    assert (replica.sleeps, arguments["enable_sleep_mode"], arguments["gpu_memory_utilization"]) == (
        False,
        False,
        share,
    )
    assert not LearnerConfig(**plan.learner_fields).offload_optimizer
    assert DevicePlan(devices=ONE, replicas=1, sleep=False, adapters=True).weight_transfer == "adapter"
    assert not plan.without_learner.sleeps, "nothing of a rollout node's own is shared"


@pytest.mark.parametrize("asked", ["plan", "config", None])
def test_replicas_compile_on_gpus_unless_the_plan_or_their_configuration_says_eager(asked):
    plan = DevicePlan(devices=ONE, replicas=1, eager=asked == "plan")
    replica = plan.replica(ReplicaConfig(checkpoint="x", devices=ONE, eager=asked == "config"))
    assert replica.arguments(0)["enforce_eager"] == (asked is not None)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ONE, "replicas": 2},
        {"devices": EIGHT, "learner_ranks": 4, "replicas": 2},
        {"devices": ONE, "learner_ranks": 4, "replicas": 1, "tensor_parallel": 2},
        {"devices": ONE, "learner_ranks": 1, "replicas": 1, "tensor_parallel": 2},
    ],
)
def test_a_wrong_number_of_gpus_is_answered_with_two_plans_that_hold(options):
    with pytest.raises(ValueError, match="devices must be") as refused:
        DevicePlan(**options)
    _, _, fix = str(refused.value).partition("Fix: ")
    apart, _, shared = fix.partition(" or ")
    assert [plan_in(options, part).shared for part in (apart, shared)] == [False, True]


def plan_in(options, words):
    """The plan with the options that a text like `devices=0,1 replicas=2 (...)` names."""
    named = dict(part.split("=") for part in words.partition(" (")[0].split())
    devices = tuple(map(int, named.pop("devices").split(",")))
    return DevicePlan(**{**options, "devices": devices, **{name: int(number) for name, number in named.items()}})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_the_cpu_computes_and_publishes_in_one_dtype_as_on_gpus(dtype):
    plan = DevicePlan(dtype=dtype)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    assert plan.replica(ReplicaConfig(checkpoint="x", dtype=other)).dtype == dtype
    told = replace(LearnerConfig(dtype=other, weights_dtype=other), **plan.learner_fields)
    assert (told.dtype, told.weights_dtype, told.device) == (dtype, dtype, "cpu")
    assert told.mismatch_bound == {"float32": 3e-5, "bfloat16": 0.1}[dtype]
    config = TrainingConfig(**OPTIONS | {"devices": plan, "learner": LearnerConfig()})
    assert config.canary_bound == tolerance_of(config.checkpoint, dtype)


def test_without_a_dtype_the_configurations_decide_on_the_cpu():
    plan = DevicePlan()
    assert plan.replica(ReplicaConfig(checkpoint="x", dtype="bfloat16")).dtype == "bfloat16"
    assert replace(LearnerConfig(dtype="bfloat16"), **plan.learner_fields).dtype == "bfloat16"


def test_a_gpu_for_each_rank_or_none():
    with pytest.raises(ValueError, match=r"devices must be one for each of the 2 ranks, got \(0,\)"):
        LearnerProcessConfig(module="x", ranks=2, devices=(0,))


def learn_stage(fleet, rests, log, groups, stepped):
    """The learn stage and its groups, one to a step. log: what the learner did."""

    class Learner:
        async def train(self, batch, version):
            log.append("train")
            await settle()
            log.append("trained")
            return Trained(step=version, version=version, weights="", metrics={}), np.zeros(3, np.float32)

    leases = Leases(1, groups - 1)
    members = (a_trajectory(reward=1.0),)
    learn = TrainStage(
        learner=Learner(),
        fleet=fleet,
        leases=leases,
        make_batch=lambda step, groups: Batch.of(step, [], np.zeros(0, np.float32)),
        on_trained=stepped,
        stats=lambda: (),
        timeline=Timeline(Clock(tick=0.001)),
        replicas_rest=rests,
    )
    return learn, [Group(prompt=a_prompt(), trajectories=members, lease=leases.take()) for _ in range(groups)]


async def one_step(fleet, rests, log):
    learn, [group] = learn_stage(fleet, rests, log, 1, None)
    await learn._step(1, [group], 0.0)


@pytest.mark.parametrize("rests", [True, False])
async def test_replicas_that_rest_give_way_to_the_learner_and_take_their_parts_back_in_order(rests):
    """Weights before the update, the KV cache after it, and only then the canary and the next turn."""
    log = []
    replicas = Replicas(lambda replica: setattr(replica, "events", log))
    async with fleet_of(replicas, canary=[[1, 2, 3, 4]]) as fleet:
        log.clear()
        await one_step(fleet, rests, log)
        assert log == (
            ["sleep", "train", "trained", "wake weights", "update 1", "wake kv_cache"]
            if rests
            else ["train", "trained"]
        )
        assert fleet.version == 1
        assert [token for _, token in await play(fleet)] == expected(), "and it serves"


async def test_the_kv_peak_of_a_step_is_not_that_of_an_evaluation_before_it():
    replicas, peaks = Replicas(blocks=100), []

    async def stepped(step, metrics):
        peaks.append(metrics.get("kv_peak/replica0"))
        replicas.made[0].step(10)

    async with fleet_of(replicas) as fleet:
        learn, groups = learn_stage(fleet, False, [], 2, stepped)

        async def inbox():
            for group in groups:
                replicas.made[0].step(60)
                yield [group]

        replicas.made[0].step(10)
        await learn(inbox(), asyncio.Queue())
    assert peaks == [0.4, 0.4]


async def test_what_happens_between_two_steps_is_in_the_row_of_neither():
    """Preemptions, waits for KV blocks, and stalls of the event loop, in an evaluation say."""
    replicas, rows, host = Replicas(blocks=100), [], Counter()

    async def stepped(step, metrics):
        rows.append(metrics)
        replicas.made[0].step(10, preempted=7)
        host["host/loop_blocked_s"] += 7.0

    def read():
        found = dict(host)
        host.clear()
        return found

    async with fleet_of(replicas) as fleet:
        learn, groups = learn_stage(fleet, False, [], 2, stepped)
        learn.host = read

        async def inbox():
            for group in groups:
                replicas.made[0].step(60, preempted=1)
                host["host/loop_blocked_s"] += 0.5
                yield [group]

        await learn(inbox(), asyncio.Queue())
    assert [row["kv/preemptions"] for row in rows] == [1, 1]
    assert [row["host/loop_blocked_s"] for row in rows] == [0.5, 0.5]
    assert [row["replicas/live"] for row in rows] == [1, 1]
    assert [row["replicas/deaths"] for row in rows] == [0, 0]


async def test_a_fleet_rests_only_when_no_trajectory_is_under_way():
    async with fleet_of(Replicas()) as fleet:
        turn = fleet.turn(1, 0, [2, 3], sampling())
        await anext(turn)
        with pytest.raises(ValueError, match="a fleet can rest only when no trajectory is under way, and 1 are"):
            fleet.rest()
        async for _ in turn:
            pass
        fleet.turn_finished(1, 9)
        with pytest.raises(ValueError, match="under way, and 1 are"):
            fleet.rest()
        fleet.trajectory_ended(1, 9, finished=True)
        async with fleet.rest():
            pass


async def test_what_arrives_meanwhile_waits_for_the_next_weights():
    async with fleet_of(Replicas()) as fleet, asyncio.TaskGroup() as group:
        async with fleet.rest():
            waiting = group.create_task(play(fleet))
            await settle()
        await settle()
        assert not waiting.done()
        await fleet.update_weights(weights(1))
        assert [token for _, token in await waiting] == expected()


async def test_a_replica_that_dies_at_rest_is_replaced_when_the_learner_has_left_the_devices():
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "sleep_gate", gate if replica.index else None))
    async with fleet_of(replicas, 2) as fleet, asyncio.TaskGroup() as group:
        resting = asyncio.Event()

        async def rest():
            async with fleet.rest():
                replicas.made[0].die()
                await settle()
                assert len(replicas.made) == 3, "made"
                assert replicas.made[2].events == [], "but not started"
                resting.set()

        group.create_task(rest(), name="rest")
        await gate.started.wait()
        gate.release()
        await resting.wait()
        await settle()
        assert replicas.made[2].events == ["start"]
        await fleet.update_weights(PublishedWeights("", 1, np.zeros(3, np.float32)))
        assert fleet.live == [0, 1]


async def test_the_learner_waits_for_a_replica_that_has_begun_to_come_up():
    """Else both would hold the devices."""
    gate = Gate()
    replicas = Replicas(lambda replica: setattr(replica, "start_gate", gate if len(replicas.made) > 2 else None))
    async with fleet_of(replicas, 2) as fleet, asyncio.TaskGroup() as group:
        log = []

        async def rest():
            async with fleet.rest():
                log.append(replicas.made[2].asleep)

        replicas.made[0].die()
        await gate.started.wait()
        group.create_task(rest(), name="rest")
        await settle()
        assert log == []
        gate.release()
        await settle()
        assert log == [True], "it was admitted, and put to sleep with the others"
        await fleet.update_weights(weights(1))
        assert fleet.live == [0, 1]


async def test_a_replica_that_does_not_fall_asleep_is_replaced():
    replicas = Replicas()
    async with fleet_of(replicas, 2) as fleet:
        replicas.made[0].died.set()  # not noticed yet: `sleep` says so
        async with fleet.rest():
            pass
        await settle()
        await fleet.update_weights(weights(1))
        assert fleet.live == [0, 1]
        assert fleet.deaths == 1


def test_adapters_go_by_a_way_of_their_own_wherever_the_parts_are():
    for devices in ((), (0, 1)):
        plan = DevicePlan(devices=devices, replicas=1, adapters=True)
        assert plan.weight_transfer == plan.learner_fields["weight_transfer"] == "adapter"
    with pytest.raises(ValueError, match="adapters must be False where replicas share the learner's devices"):
        DevicePlan(devices=(0,), replicas=1, adapters=True)
