"""A program as an agent: `await job.agents(Command(argv=("python", "agent.py")))`.

Invariants
- When a call returns, the program and all processes of its group are dead.
- A program is over when it has exited. A process that it leaves behind with its output is not waited for.
- At most TAIL bytes of its output are kept.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from engine.gateway.agent import AgentFailed, Endpoint
from engine.types import Prompt

PROGRAMS = 64
"""How many programs of a `Command` run at once by default: each may need 100 MB, and seconds of a core to start."""
TAIL = 1 << 20
READ_S = 1.0  # how long the pipes of a dead group are read; a process outside the group may hold them open
KILL_S = 5.0  # how long a killed process may take to be reported dead
_FIELD = re.compile(r"\{(prompt|model|openai_url|anthropic_url|key)\}")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program that is started once for each rollout. It is not isolated, so run code that you do not trust in a
    container.

    It reads the prompt from standard input, as JSON with `id`, `messages` and `metadata`, but never the reference
    answer. With `{prompt}` in its arguments standard input is empty, because many programs append what they read there
    to their prompt. It finds its model in OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL,
    ANTHROPIC_API_KEY, ANTHROPIC_MODEL and ROCSTAR_MODEL. The last line that it prints is its answer.
    """

    argv: tuple[str, ...]
    """The command. `{prompt}` (the text of its messages), `{model}`, `{openai_url}`, `{anthropic_url}` and `{key}` are
    filled in."""
    cwd: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to ours."""

    def __post_init__(self) -> None:
        if (
            not isinstance(self.argv, tuple | list)
            or not self.argv
            or not all(isinstance(each, str) for each in self.argv)
        ):
            raise ValueError(f'argv must be a tuple of strings, such as ("python", "agent.py"), got {self.argv!r}')
        for name, value in self.environment.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"environment must hold strings only, got {name!r}: {value!r}")
        if self.cwd is not None and not os.path.isdir(self.cwd):
            raise ValueError(f"cwd must be a folder, got {self.cwd!r}")

    async def __call__(self, prompt: Prompt, endpoint: Endpoint) -> str | None:
        """Runs the program on a prompt. Raises AgentFailed if it does not start or exits with a status other than 0."""
        try:
            transport, pipes = await asyncio.get_running_loop().subprocess_exec(
                _Pipes,
                *self._filled_in(prompt, endpoint),
                cwd=self.cwd,
                env={**os.environ, **self.environment, **_variables(endpoint)},
                start_new_session=True,  # its own group, which is killed as a whole
            )
        except (OSError, ValueError) as error:  # ValueError: an argument with a null character
            raise AgentFailed(f"{self.argv[0]} does not start: {getattr(error, 'strerror', None) or error}") from error
        try:
            stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            if not any("{prompt}" in argument for argument in self.argv):
                task = {"id": prompt.id, "messages": prompt.messages, "metadata": prompt.metadata}
                stdin.write(json.dumps(task).encode())
            stdin.close()
            await pipes.exited.wait()
            _end_group(transport.get_pid())
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    await pipes.read.wait()
        finally:
            _end_group(transport.get_pid())
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await pipes.exited.wait()
            transport.close()
        if status := transport.get_returncode():
            raise AgentFailed(f"{self.argv[0]} exited with status {status}: {_last_line(pipes.tails[2])}")
        return _last_line(pipes.tails[1]) or None

    def _filled_in(self, prompt: Prompt, endpoint: Endpoint) -> list[str]:
        values = {
            "prompt": "\n\n".join(str(message.get("content") or "") for message in prompt.messages),
            "model": endpoint.model,
            "openai_url": endpoint.openai_url,
            "anthropic_url": endpoint.anthropic_url,
            "key": endpoint.key,
        }
        return [_FIELD.sub(lambda field: values[field[1]], argument) for argument in self.argv]


class _Pipes(asyncio.SubprocessProtocol):
    """Keeps the end of a program's output. read: is set when both pipes have ended."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.read = asyncio.Event()
        self.tails = {1: bytearray(), 2: bytearray()}
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self.tails[fd]
        tail += data
        del tail[:-TAIL]

    def pipe_connection_lost(self, fd: int, error: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.read.set()

    def process_exited(self) -> None:
        self.exited.set()


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _variables(endpoint: Endpoint) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": endpoint.openai_url,
        "OPENAI_API_KEY": endpoint.key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ROCSTAR_MODEL": endpoint.model,
    }


def _last_line(output: bytearray) -> str:
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
