"""The end of an engine's process is seen whenever it comes; what else a replica does is tested on real engines."""

import asyncio
import os
import subprocess
import sys

import pytest
import uvloop

from engine.replica import Replica, ReplicaConfig

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
