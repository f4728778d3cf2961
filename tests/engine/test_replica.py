"""The end of an engine's process is seen whenever it comes; what else a replica does is tested on real engines."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from engine.ports import ReplicaDied
from engine.replica import Replica, ReplicaConfig
from engine.replica_config import ENVIRONMENT

TINY = str(Path(__file__).parents[2] / "recipes/tiny")
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


async def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    replica = Replica(ReplicaConfig(checkpoint=str(tmp_path)), 3, None, lambda *_: None)
    with pytest.raises(ReplicaDied, match=f"replica 3 did not start: no config.json in '{tmp_path}'"):
        await replica.start()


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
