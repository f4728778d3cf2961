"""Runs a recipe on an existing Ray cluster: this program leads, and Ray places its nodes and gives them other machines
when theirs are gone.

    ray job submit --entrypoint-num-gpus 8 -- sh -c \\
        'cd /rocstar && .venv/bin/python recipes/clusters/on_ray.py nodes=4 gpus=8 recipes/quickstart.py steps=40'

The lead runs on the machine of this program; what it writes is in runs/ there, and the same command resumes it. Each
machine has this checkout at the same place. Ray itself runs none of the engine: it starts our processes, and ends them.

Invariants
- A process that fails is started again, at most `restarts` times. One whose machine is gone, or that was drained, is
  started again as often as that happens, wherever Ray has room.
- A wrong option (exit code 2) ends the job. So does a process that has failed too often.
- When the run has ended, nothing of it is left on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from engine.console.options import Positional, Rest
from engine.errors import BadInput, first_error
from engine.programs.job import run_job
from engine.telemetry.watchdog import exit_process
from sandbox import keys
from sandbox.require import at_least, require_fields

ROOT = Path(__file__).resolve().parents[2]
PLACED_S = 20.0  # seconds without a machine after which the job says what a process waits for
AGAIN_S = 3.0  # seconds between the end of a process and its next start
END_S = 30.0  # seconds in which a process ends that is told to
WRONG_OPTION = 2


class ProcessFailed(RuntimeError):
    """A process of the run has failed too often, or for a reason that only the user can mend."""


@dataclass(frozen=True, kw_only=True)
class Config:
    recipe: Annotated[Path, Positional("the recipe that the lead runs, and the nodes with it")]
    options: Annotated[tuple[str, ...], Rest("options of the recipe")] = ()
    nodes: Annotated[int, "rollout nodes"] = 1
    gpus: Annotated[int, "GPUs of each node, all for its replicas"] = 0
    cpus: Annotated[int, "cores of each node, as Ray counts them"] = 1
    node: Annotated[tuple[str, ...], "options that differ on the nodes, replicas=8,slots=64"] = ()
    learners: Annotated[int, "machines that run ranks of the learner beside the lead's"] = 0
    sandboxes: Annotated[int, "machines that run tool calls for the lead"] = 0
    port: Annotated[int, "port of the lead; sandbox hosts take the next one, and the learner the one after it"] = 5700
    restarts: Annotated[int, "how often a process may fail"] = 10

    def __post_init__(self) -> None:
        require_fields(self, at_least(0), "nodes", "gpus", "cpus", "learners", "sandboxes", "restarts")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process of the run on a machine that Ray chooses. Its last argument will be keys=FOLDER, a private folder."""

    line: Sequence[str]
    cpus: int = 1
    gpus: int = 0


class Process:
    """Runs a process of ours on the machine where Ray has placed this actor; it ends with the actor."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, command: Sequence[str], folder: str, key_files: Mapping[str, bytes]) -> int:
        """Returns the exit code. key_files: the content of the private folder that keys=FOLDER names, by file; without
        any there is no such argument.
        """
        with tempfile.TemporaryDirectory() as private:
            self._write(private, key_files)
            keys_option = [f"keys={private}"] if key_files else []
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-S", "-m", "engine.process.tied", str(os.getpid())],  # killed with this actor
                *command,
                *keys_option,
                cwd=folder,
                env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # Ray sets it
            )
            return await self._process.wait()

    def host(self) -> str:
        """Returns the name of the machine."""
        return socket.gethostname()

    async def end(self, within_s: float) -> None:
        """Tells the process to end (SIGTERM) and waits for that. A node drains meanwhile."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                self._process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(within_s):
                    await self._process.wait()

    @staticmethod
    def _write(folder: str, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            file = Path(folder, name)
            file.touch(mode=0o600)
            file.write_bytes(content)


class Job:
    """Keeps the processes of a run up: the lead on this machine, and the others wherever Ray has room."""

    def __init__(self, ray: Any, *, restarts: int, key_files: Mapping[str, bytes]) -> None:
        self._ray, self._restarts, self._key_files = ray, restarts, key_files

    async def run(self, lead: Sequence[str], others: Mapping[str, Command]) -> None:
        """Returns when the lead has ended well. others: by name. Raises ProcessFailed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                kept = [tasks.create_task(self._keep_up(name, command), name=name) for name, command in others.items()]
                await self._lead(lead)
                for task in kept:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures

    async def _lead(self, command: Sequence[str]) -> None:
        failures = 0
        while True:
            lead = Process()
            try:
                code = await lead.run(command, str(ROOT), {})
            except asyncio.CancelledError:
                await asyncio.shield(lead.end(END_S))
                raise
            if code == 0:
                return
            failures += 1
            self._check("the lead", code, failures)
            await asyncio.sleep(AGAIN_S)

    async def _keep_up(self, name: str, command: Command) -> None:
        """Keeps a process running on one machine or another until it is cancelled."""
        failures = 0
        while True:
            options = {"num_cpus": command.cpus, "num_gpus": command.gpus, "scheduling_strategy": "SPREAD"}
            actor, placed = self._ray.remote(Process).options(**options).remote(), False
            waits = f"{name} waits for a machine with room for it: CPUs {command.cpus}, GPUs {command.gpus}"
            still = asyncio.get_running_loop().call_later(PLACED_S, say, waits)
            try:
                host = await actor.host.remote()
                placed = True
                still.cancel()
                say(f"{name} is placed on {host}")
                code = await actor.run.remote(command.line, str(ROOT), self._key_files)
                self._ray.kill(actor)
                if code:
                    failures += 1
                    self._check(name, code, failures)
                await asyncio.sleep(AGAIN_S)  # if the run has ended, this task is cancelled meanwhile
                if code == 0:
                    say(f"{name} was drained, and is placed again")
            except self._ray.exceptions.RayError as error:
                say(f"{name} is lost, and is placed again: {str(error).splitlines()[0]}")
                self._ray.kill(actor)  # it may only be out of reach for now
                await asyncio.sleep(AGAIN_S)
            except asyncio.CancelledError:
                if placed:
                    await asyncio.shield(self._end(actor))
                self._ray.kill(actor)
                raise
            finally:
                still.cancel()

    async def _end(self, actor: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(END_S + 5):
                await actor.end.remote(END_S)

    def _check(self, name: str, code: int, failures: int) -> None:
        """Raises ProcessFailed for a process that is not started again."""
        if code == WRONG_OPTION:
            raise ProcessFailed(f"{name} ended with exit code {code}: see what it says above")
        if failures > self._restarts:
            raise ProcessFailed(f"{name} ended with exit code {code}, and has failed {failures} times")
        say(f"{name} ended with exit code {code}, and is started again ({failures} of {self._restarts} times)")


def processes(config: Config, address: str, lead_keys: Path) -> tuple[list[str], dict[str, Command]]:
    """Returns the command of the lead and those of the others, by name. address: of the lead's machine."""
    rocstar = [sys.executable, "-m", "engine.programs.rocstar"]
    node = [*rocstar, "node", f"lead=tcp://{address}:{config.port}"]
    host = [*rocstar, "sandbox-host", f"connect=tcp://{address}:{config.port + 1}"]
    devices = [f"devices={','.join(map(str, range(config.gpus)))}"] if config.gpus else []
    lead = [sys.executable, str(config.recipe.resolve())]
    lead += [f"nodes=tcp://0.0.0.0:{config.port}", f"nodes_keys={lead_keys}"]
    if config.sandboxes:
        lead += [f"sandbox_listen=tcp://0.0.0.0:{config.port + 1}", f"sandbox_keys={lead_keys}"]
    if config.learners:
        lead += [f"learner_hosts={config.learners + 1}", f"learner_at={address}:{config.port + 2}"]
    others = {}
    for number in range(config.nodes):
        line = [*node, f"name=node-{number}", *devices, *config.node]
        others[f"node-{number}"] = Command(line=line, cpus=config.cpus, gpus=config.gpus)
    for number in range(config.learners):
        others[f"learner-{number}"] = Command(line=[*node, "learner=true"], cpus=config.cpus)
    for number in range(config.sandboxes):
        others[f"sandbox-{number}"] = Command(line=host, cpus=config.cpus)
    return [*lead, *config.options], others


def say(line: str) -> None:
    print(f"on_ray: {line}", flush=True)


async def work(config: Config) -> None:
    try:
        import ray
    except ImportError:
        raise BadInput('Ray is not installed here. Fix: pip install -e ".[ray]"') from None
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError as error:
        raise BadInput(f"there is no Ray cluster: {error}. Fix: `ray start --head`, or `ray job submit`") from None
    except RuntimeError as error:  # Ray or Python here are of other versions than those of the cluster
        raise BadInput(" ".join(str(error).split())) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own, which it has set, ends this program before the nodes
    try:
        with tempfile.TemporaryDirectory() as private:
            folder = Path(private, "keys")
            keys.make(folder)
            files = {name: (folder / name).read_bytes() for name in ("host.key", "node.pub")}
            lead, others = processes(config, ray.util.get_node_ip_address(), folder)
            await Job(ray, restarts=config.restarts, key_files=files).run(lead, others)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    exit_process(run_job(Config, work, expected=(ProcessFailed,)))
