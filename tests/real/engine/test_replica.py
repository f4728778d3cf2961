"""The end of an engine's process is seen whenever it comes; what else a replica does is tested on real engines."""

import asyncio
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import uvloop

from engine.replica.config import ENVIRONMENT, ReplicaConfig
from engine.replica.port import ReplicaDied, ReplicaMisconfigured
from engine.replica.replica import Replica
from tests.support.paths import ROOT
from tests.support.paths import TINY as AGENT

TINY = str(AGENT)
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_the_end_of_a_process_is_seen(factory, when):
    """It ends before it is watched and nobody has waited for it; in the same tick; or while the loop waits."""

    async def watched(process):
        replica = Replica(ReplicaConfig(checkpoint="nowhere"), 0, None, lambda *_: None)
        replica._watch(pidfd := os.pidfd_open(process.pid))
        if when == "after":
            process.kill()
        elif when == "later":
            asyncio.get_running_loop().call_later(0.01, process.kill)
        async with asyncio.timeout(30):
            await replica.died.wait()
        await replica.shutdown()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)

    with subprocess.Popen(SLEEP) as process, asyncio.Runner(loop_factory=factory) as runner:
        if when == "before":
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        runner.run(watched(process))


async def test_a_version_ends_when_what_its_last_step_sampled_was_read():
    """vLLM's front end reads a large step in pieces, and lets others run between them."""
    tokens, queue = [], asyncio.Queue()

    async def read():
        while True:
            for token in await queue.get():
                await asyncio.sleep(0)
                tokens.append(token)

    replica = Replica(ReplicaConfig(checkpoint=TINY), 0, None, lambda *_: None)
    processor = SimpleNamespace(sampled=lambda: {"one": len(tokens)}, delivering=False)
    replica._engine = SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=queue), output_processor=processor)
    replica._ends = {"one": [], "ended": []}
    reader = asyncio.create_task(read())
    queue.put_nowait([5, 6, 7])
    await replica._end_version()
    reader.cancel()
    assert replica._ends == {"one": [(-1, 3)], "ended": [(-1, math.inf)]}


async def test_a_version_ends_when_what_came_of_our_requests_was_delivered():
    queue = asyncio.Queue()
    waiting = asyncio.create_task(queue.get())
    replica = Replica(ReplicaConfig(checkpoint=TINY), 0, None, lambda *_: None)
    streams = SimpleNamespace(sampled=lambda: {"one": 0 if streams.delivering else 3}, delivering=True)
    replica._engine = SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=queue), output_processor=streams)
    replica._ends = {"one": []}
    asyncio.get_running_loop().call_later(0.01, setattr, streams, "delivering", False)
    await replica._end_version()
    waiting.cancel()
    assert replica._ends == {"one": [(-1, 3)]}


async def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    replica = Replica(ReplicaConfig(checkpoint=str(tmp_path)), 3, None, lambda *_: None)
    with pytest.raises(ReplicaMisconfigured, match=f"replica 3 did not start: no config.json in '{tmp_path}'"):
        await replica.start()


async def test_an_engine_without_a_step_within_its_deadline_stalls_and_names_what_to_raise():
    replica = Replica(ReplicaConfig(checkpoint=TINY, step_deadline_s=9.0), 3, None, lambda *_: None)
    assert replica.stalled(10.0) is None, "nothing is in flight"
    replica.in_flight = 2
    assert replica.stalled(9.0) is None
    cause = replica.stalled(9.1)
    assert cause is not None
    for part in ("9 s", "replica_step_deadline_s", "2 requests"):
        assert part in cause


CANNOT_RUN = """
import asyncio, json, sys
from engine.replica.config import ReplicaConfig, prepare_environment
prepare_environment()
from engine.replica.port import ReplicaMisconfigured
from engine.replica.replica import Replica

async def main():
    try:
        config = ReplicaConfig(checkpoint=sys.argv[1], max_model_len=256, **json.loads(sys.argv[2]))
        await Replica(config, 3, None, lambda *_: None).start()
    except ReplicaMisconfigured as error:
        print(error)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"intermediate_size": 512}, r"RuntimeError: .*exceeds"),
        ({"head_dim": 16}, r"head_dim of the model must be one of 32, .*, got 16"),
    ],
    ids=["weights of another size", "heads of another size"],
)
def test_an_engine_that_cannot_run_the_model_says_why_and_is_not_tried_again(tmp_path, changed, why):
    """In a process of its own: vLLM leaves a context of ZeroMQ behind."""
    shutil.copytree(AGENT, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    assert re.match(f"replica 3 did not start: {why}", why_not(tmp_path / "model"))


def why_not(model, **fields):
    command = [sys.executable, "-c", CANNOT_RUN, str(model), json.dumps(fields)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    return done.stdout.splitlines()[-1]  # before it vLLM has its say


def test_adapters_of_a_mixture_of_experts_are_refused_on_the_cpu():
    """vLLM would say so in its first step, by an error of Triton's."""
    fields = {"weight_transfer": "adapter", "lora_rank": 4, "lora_targets": ["q_proj"]}
    said = why_not(AGENT.with_name("agent_moe"), **fields)
    assert re.match("replica 3 did not start: .*adapters of a mixture of experts .*adapters=false", said), said


async def test_an_engine_that_is_not_up_in_time_may_be_started_again(monkeypatch):
    """What it waits for is left to its thread, which nobody waits for."""
    config, given_up = ReplicaConfig(checkpoint=TINY, start_deadline_s=0.01), threading.Event()
    replica = Replica(config, 3, None, lambda *_: None)
    monkeypatch.setattr(replica, "_build", given_up.wait)
    with pytest.raises(ReplicaDied, match=r"replica 3 did not start: .* 0\.01 s") as failure:
        await replica.start()
    assert not isinstance(failure.value, ReplicaMisconfigured)
    given_up.set()


class Mute:
    """vLLM's front end of an engine that came up and answers nothing more."""

    def __init__(self, process):
        process.join = process.wait
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
        )
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=9))
        self.output_processor = SimpleNamespace(propagate_error=lambda error: None)
        self.output_handler = None
        self.asked = asyncio.Event()

    async def collective_rpc(self, name, args):
        self.asked.set()
        await asyncio.Event().wait()

    def shutdown(self, timeout_s): ...


@pytest.fixture
def process():
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


async def test_an_engine_that_ends_when_it_has_just_come_up_is_not_waited_for(monkeypatch, process):
    """As one that is told to end while it starts: it says that it is up, and then it ends."""
    dead = ModuleType("vllm.v1.engine.exceptions")
    dead.EngineDeadError = RuntimeError
    monkeypatch.setitem(sys.modules, dead.__name__, dead)
    for parent in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    replica, engine = Replica(ReplicaConfig(checkpoint=TINY), 3, None, lambda *_: None), Mute(process)
    monkeypatch.setattr(replica, "_build", lambda: setattr(replica, "_engine", engine))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        start = group.create_task(failed(replica))
        await engine.asked.wait()
        process.kill()
    assert "replica 3 did not start: the engine died" in str(start.result())


async def failed(replica):
    with pytest.raises(ReplicaDied) as failure:
        await replica.start()
    return failure.value


@pytest.mark.parametrize(("devices", "disabled"), [((), "1"), ((0,), None)])
async def test_before_vllm_is_imported_compilation_is_disabled_on_the_cpu_alone(monkeypatch, devices, disabled):
    """On GPUs vLLM compiles the model, and says that it cannot where this is disabled."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "")  # what comes after is undone
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ImportError, match="vllm"):
        Replica(ReplicaConfig(checkpoint=TINY, devices=devices), 0, None, lambda *_: None)._build()
    assert os.environ.get("TORCHDYNAMO_DISABLE") == disabled


ONE_KIND = """
import asyncio, sys
from engine.replica.config import ReplicaConfig, prepare_environment
prepare_environment()
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.run.workspace import workspace

async def main():
    replica = Replica(ReplicaConfig(checkpoint=sys.argv[1], max_model_len=64, kv_blocks=16), 0, None, lambda *_: None)
    await replica.start()

    async def turn(name, ids, tokens, **options):
        shared = dict(temperature=1.0, stop_token_ids=(2,), deliver_at=frozenset(), ignore_eos=True)
        sampling = Sampling(max_tokens=tokens, **{**shared, "seed": 7, **options})
        return [token async for delta in replica.generate(ids, sampling, name) for token in delta.token_ids]

    try:
        first = await turn("a", [1, 5, 6], 12)
        again, short, other, two = await asyncio.gather(
            turn("b", [1, 5, 6], 12),
            turn("c", [1, 5, 6], 5),
            turn("d", [1, 5, 6], 12, seed=8),
            turn("e", [1, 40, 90, 17, 3], 12),
        )
        print(again == first, short == first[:5], other != first, two != first, len(first))
        for ids in ([1] * 64, []):
            try:
                await turn("f", ids, 3)
            except ValueError as error:
                print("refused", str(error)[:40])
        print(await turn("b", [1, 5, 6], 12) == first)  # a name may come again
    finally:
        await replica.shutdown()

with workspace():
    asyncio.run(main())
"""


def test_requests_of_one_kind_share_what_was_checked_and_nothing_else():
    done = subprocess.run([sys.executable, "-c", ONE_KIND, TINY], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [
        "True True True True 12",
        "refused replica 0 refuses the request: The decod",
        "refused replica 0 refuses the request: The decod",
        "True",
    ], done.stdout + done.stderr[-2000:]
