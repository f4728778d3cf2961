"""Math-Verify behind a deadline: a process of its own that can be killed, since symbolic mathematics can run for ever.

Invariants
- A comparison that passes its deadline is a wrong answer; the process is killed and the next one gets a fresh one.
- A process that cannot start, or dies while it compares, raises GraderUnavailable.
- Leaving the context ends the process; it never outlives the one that started it.

The process speaks one JSON line per comparison on its standard streams: [answer, reference] -> true or false.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import resource
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from types import TracebackType

from engine.ports import GraderUnavailable

START_S = 60.0  # importing the library takes a second or two, far longer on a busy machine
MEMORY_BYTES = 2 << 30  # a power tower must not take the machine's memory before its deadline
MAX_ANSWER = 4096  # characters; nothing longer is an answer, and parsing time grows with length


class MathVerify:
    """Compares LaTeX answers, one at a time.

    async with MathVerify(deadline_s=5.0) as verifier:
        reward = MathReward(verifier=verifier)
    """

    def __init__(self, *, deadline_s: float = 5.0, python: str = sys.executable) -> None:
        if not deadline_s > 0:
            raise ValueError(f"MathVerify.deadline_s must be positive, got {deadline_s!r}")
        self._deadline_s = deadline_s
        self._python = python
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> MathVerify:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def __call__(self, answer: str, reference: str) -> bool:
        if len(answer) > MAX_ANSWER:
            return False
        async with self._turn:
            try:
                process = self._process or await self._start()
                async with asyncio.timeout(self._deadline_s):
                    return bool(json.loads(await _ask(process, json.dumps([answer, reference]))))
            except TimeoutError:
                await self._end()
                return False
            except (OSError, ValueError) as error:
                await self._end()
                raise GraderUnavailable(f"Math-Verify died on {answer[:80]!r}") from error
            except asyncio.CancelledError:
                await asyncio.shield(self._end())  # the line of the abandoned comparison must not answer the next one
                raise

    async def _start(self) -> Process:
        try:
            process = await asyncio.create_subprocess_exec(
                self._python, "-m", "algo.verify", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
            self._process = process
            async with asyncio.timeout(START_S):
                await _ask(process, json.dumps(["1", "1"]))
        except (OSError, ValueError, TimeoutError) as error:
            await self._end()
            raise GraderUnavailable("Math-Verify did not start") from error
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ask(process: Process, line: str) -> bytes:
    """Raises ValueError when the process closed its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    await process.stdin.drain()
    reply = await process.stdout.readline()
    if not reply:
        raise ValueError("closed")
    return reply


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def sides(text: str) -> list[object]:
        return parse(f"\\boxed{{{text}}}", parsing_timeout=None)

    for line in sys.stdin:
        answer, reference = json.loads(line)
        print(json.dumps(bool(verify(sides(reference), sides(answer), timeout_seconds=None))), flush=True)


if __name__ == "__main__":
    main()
