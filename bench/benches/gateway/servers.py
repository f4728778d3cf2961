"""Starts the ways to have conversations with a model: the built-in loop, our gateway and vLLM's own server.

Invariant: CPU is that of the front end alone, the process that a client talks to; the engine's process is not counted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

from bench.benches.gateway.dialects import Api
from bench.benches.gateway.script import KV_BLOCKS, WORKLOADS
from bench.measuring.meter import threads_cpu_s
from engine.programs import rocstar

START_S = 400.0  # on busy cores; else half a minute
STOP_S = 20.0
LOG = Path("runs/bench/gateway/servers.log")
NAME = "bench"  # the model's


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a load took. turns and tokens: as in `Counted`."""

    turns: int
    sampled_tokens: int
    prompt_tokens: int
    cached_tokens: int
    cpu_s: float
    wall_s: float

    @property
    def token_s(self) -> float:
        return self.cpu_s / self.sampled_tokens

    @property
    def turn_s(self) -> float:
        return self.cpu_s / self.turns

    @property
    def prefix_hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Way(Protocol):
    def load(self, count: int, seed: int, *, sessions: int, api: Api, stream: bool) -> Measured:
        """Has `count` conversations, `sessions` of them at once."""
        ...


class BuiltIn:
    """`Rollouts` in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def load(self, count: int, seed: int, *, sessions: int, api: Api, stream: bool) -> Measured:
        """Has conversations. api, stream: no matter here."""
        assert self._process.stdin is not None
        began = time.perf_counter()
        print(json.dumps({"count": count, "seed": seed, "sessions": sessions}), file=self._process.stdin, flush=True)
        return _measured(self._line(), began)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the built-in loop ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server:
    """A chat server, with clients in a process of their own."""

    def __init__(self, pid: int, port: int, workload: str) -> None:
        self._pid = pid
        self._clients = {
            "url": f"http://127.0.0.1:{port}",
            "model": NAME,
            "max_tokens": WORKLOADS[workload],
            "tools": workload == "agent",
        }

    def load(self, count: int, seed: int, *, sessions: int, api: Api, stream: bool) -> Measured:
        asked = {"count": count, "seed": seed, "sessions": sessions, "api": api, "stream": stream}
        given = {**self._clients, **asked}
        command = [sys.executable, "-m", "bench.benches.gateway.clients", json.dumps(given)]
        began, before_s = time.perf_counter(), threads_cpu_s(self._pid)
        counted = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        return _measured({**counted, "cpu_s": threads_cpu_s(self._pid) - before_s}, began)


def _measured(counted: dict[str, Any], began: float) -> Measured:
    names = ("turns", "sampled_tokens", "prompt_tokens", "cached_tokens", "cpu_s")
    return Measured(**{name: counted[name] for name in names}, wall_s=time.perf_counter() - began)


@contextmanager
def built_in(checkpoint: Path, workload: str) -> Iterator[Way]:
    given = {"checkpoint": str(checkpoint), "max_tokens": WORKLOADS[workload]}
    command = [sys.executable, "-m", "bench.benches.gateway.builtin", json.dumps(given)]
    with _started(command, subprocess.PIPE) as process:
        way = BuiltIn(process)
        way._line()
        yield way


@contextmanager
def gateway(checkpoint: Path, workload: str) -> Iterator[Way]:
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        rocstar.__name__,
        "gateway",
        str(checkpoint),
        f"port={port}",
        f"served_name={NAME}",
    ]
    command += [f"max_tokens={WORKLOADS[workload]}", f"kv_blocks={KV_BLOCKS}"]
    with _serving(command, port) as process:
        yield Server(process.pid, port, workload)


@contextmanager
def vllm(program: Path, checkpoint: Path, workload: str) -> Iterator[Way]:
    """Starts vLLM's server without what costs it CPU: no log of requests or statistics, no compilation."""
    port = _free_port()
    command = [str(program), "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", NAME, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command += ["--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-num-seqs", "256"]
    command += ["--max-model-len", str(WORKLOADS[workload] + 32), "--num-gpu-blocks-override", str(KV_BLOCKS)]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--disable-log-stats"]
    with _serving(command, port) as process:
        yield Server(process.pid, port, workload)


@contextmanager
def _serving(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a server and waits until it answers. Raises RuntimeError when it does not in time."""
    with _started(command, None) as process:
        ends = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"it does not serve (exit code {process.poll()}): {' '.join(command)}. See {LOG}")
            time.sleep(0.2)
        yield process


@contextmanager
def _started(command: Sequence[str], pipes: int | None) -> Iterator[subprocess.Popen[str]]:
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with (
        LOG.open("ab") as log,
        subprocess.Popen(
            command, env={**os.environ, **quiet}, stdin=pipes, stdout=pipes or log, stderr=log, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(port: int) -> bool:
    with suppress(OSError, HTTPException), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as health:
        return health.status == 200
    return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
