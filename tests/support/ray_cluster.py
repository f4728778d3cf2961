"""Runs a job of on_ray.py on a Ray cluster of six machines in processes here and the head's, kills a process, takes
machines away and adds others, and writes what has happened to told.json. The processes of the job are small programs;
FOLDER/NAME.PID is there while one runs.

    python -m tests.support.ray_cluster FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from recipes.clusters import on_ray
from recipes.clusters.on_ray import Command, Job

NODE = """
import os, signal, sys, time
from pathlib import Path
folder, name, keys = sys.argv[1:]
assert Path(keys.removeprefix("keys="), "host.key").read_bytes() == b"secret"
mark = Path(folder, f"{name}.{os.getpid()}")
signal.signal(signal.SIGTERM, lambda *_: (mark.rename(mark.with_suffix(".drained")), os._exit(0)))
mark.touch()
time.sleep(600)
"""
NAMES = [f"node-{number}" for number in range(6)]
LEAD = "import sys, time; from pathlib import Path\nwhile not Path(sys.argv[1], 'done').exists(): time.sleep(0.05)"


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happens():  # noqa: ASYNC110  files of other processes
            await asyncio.sleep(0.05)


def running(folder: Path) -> dict[str, list[int]]:
    marks = [path.name.split(".") for path in folder.iterdir() if path.suffix[1:].isdecimal()]
    alive = [(name, int(pid)) for name, pid in marks if Path("/proc", pid).exists()]
    return {name: [pid for other, pid in alive if other == name] for name, _ in alive}


async def stopped(folder: Path, address: str) -> dict[str, object]:
    """Runs on_ray.py and a node that waits for its lead, and ends the job by SIGTERM. Returns how it ended."""
    lead = folder / "lead.py"
    lead.write_text("import time; time.sleep(600)")
    job = await asyncio.create_subprocess_exec(
        *(sys.executable, on_ray.__file__, "nodes=1", str(lead)),
        env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(on_ray.ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert job.stdout is not None
    async with asyncio.timeout(60):
        while b"node-0 is placed" not in await job.stdout.readline():
            pass
        job.send_signal(signal.SIGTERM)
        said = await job.stdout.read()
        return {"code": await job.wait(), "said": said.decode()}


async def main(folder: Path) -> None:
    on_ray.AGAIN_S, on_ray.PLACED_S = 0.2, 3.0
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    machines = [cluster.add_node(num_cpus=1, wait=False) for _ in NAMES]
    ray.init(address=cluster.address, log_to_driver=False)
    node = [sys.executable, "-c", NODE, str(folder)]
    others = {name: Command(line=[*node, name]) for name in NAMES}
    others["too-large"] = Command(line=node, gpus=1)  # is never placed
    job = Job(ray, restarts=3, key_files={"host.key": b"secret"})
    told: dict[str, object] = {}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(job.run([sys.executable, "-c", LEAD, str(folder)], others))
        await until(lambda: len(running(folder)) == len(NAMES))
        first = running(folder)
        os.kill(first["node-0"][0], signal.SIGKILL)
        await until(lambda: first["node-0"] != running(folder).get("node-0", first["node-0"]))
        told["killed_and_there_again"] = True
        before = running(folder)
        for machine in machines[:2]:
            cluster.remove_node(machine, allow_graceful=False)
        await until(lambda: len(running(folder)) == len(NAMES) - 2)
        told["without_a_machine"] = sorted(set(NAMES) - set(running(folder)))
        for _ in range(2):
            cluster.add_node(num_cpus=1, wait=False)
        await until(lambda: len(running(folder)) == len(NAMES))
        told["moved"] = sorted(name for name, pids in running(folder).items() if pids != before[name])
        (folder / "done").touch()
    await until(lambda: not running(folder))
    told["drained"] = sorted({path.stem for path in folder.glob("*.drained")})  # noqa: ASYNC240
    told["stopped"] = await stopped(folder, cluster.address)
    (folder / "told.json").write_text(json.dumps(told))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
