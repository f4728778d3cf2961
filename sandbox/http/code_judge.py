"""Code Judge's HTTP API (github.com/0xWJ/code-judge) for Python, which rStar2-Agent's tools and rewards use.

Invariants
- The fields of every answer are exactly Code Judge's, since its client fails on others.
- `run_success`: the program ended by itself with exit code 0. `success`: it did, and its stdout is `expected_output`,
  if one was given, apart from white space at both ends. `cost` is the program's wall time.
- A call that was lost is answered with reason "queue_timeout", for which Code Judge's clients send it again.
- Calls do not expire in the queue, so `batch` and `long-batch` are the same.
- A submission that is not a Python program refuses its whole request with 422; nothing of it runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from aiohttp import web
from msgspec import Meta

from sandbox.http.gateway import Gateway, check_language, ended_by, in_order, json_response, pong
from sandbox.wire import Limits, ToolResult, encode_code

SLACK_BYTES = 1 << 16  # white space around the expected output that still compares equal
SUBMISSIONS = 50_000  # bounds one batch, and so its answer


class Submission(msgspec.Struct, frozen=True):
    """A program to run, and the output that is expected of it.

    >>> {"type": "python", "solution": "print(input())", "input": "9", "expected_output": "9"}
    """

    type: str
    solution: str
    input: str | None = None
    expected_output: str | None = None
    sub_id: str | None = None

    def __post_init__(self) -> None:
        check_language("type", self.type)
        encode_code(self.solution)


class Batch(msgspec.Struct, frozen=True):
    submissions: Annotated[list[Submission], Meta(min_length=1, max_length=SUBMISSIONS)]
    sub_id: str | None = None
    type: Literal["batch"] = "batch"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /judge."""

    sub_id: str
    success: bool
    run_success: bool
    cost: float
    reason: Literal["", "worker_timeout", "queue_timeout"]


class Ran(Judgement, frozen=True, kw_only=True):
    """The answer of /run."""

    stdout: str | None
    stderr: str | None


class Answers(msgspec.Struct, frozen=True):
    sub_id: str
    results: list[Judgement]


def limits_of(submission: Submission, limits: Limits) -> Limits:
    """Returns the limits of a submission's call, which keeps enough stdout to compare it with the expected one."""
    expected = (submission.expected_output or "").encode(errors="replace")
    return msgspec.structs.replace(limits, output_bytes=max(limits.output_bytes, len(expected) + SLACK_BYTES))


def make_ran(submission: Submission, result: ToolResult, limits: Limits, output_chars: int) -> Ran:
    """Returns the answer to a submission that ended with `result`."""
    sub_id = submission.sub_id or str(uuid4())
    if result.outcome == "lost":
        return Ran(
            sub_id=sub_id, success=False, run_success=False, cost=0.0, reason="queue_timeout", stdout=None, stderr=None
        )
    run_success = result.outcome == "ok"
    return Ran(
        sub_id=sub_id,
        success=run_success and _as_expected(submission.expected_output, result, limits),
        run_success=run_success,
        cost=result.wall_s,
        reason="worker_timeout" if result.outcome == "timeout" else "",
        stdout=result.stdout[:output_chars],
        stderr=result.stderr[:output_chars] + ended_by(result, limits),
    )


def _as_expected(expected: str | None, result: ToolResult, limits: Limits) -> bool:
    if expected is None:
        return True
    # Nobody knows how a cut stdout continues; the cut may also have dropped its last character.
    cut = result.truncated and len(result.stdout.encode()) > limits.output_bytes - 4
    return not cut and result.stdout.strip() == expected.strip()


class Judge:
    """Code Judge's routes. output_chars: how much of stdout, and of stderr, an answer shows."""

    def __init__(self, gateway: Gateway, *, output_chars: int) -> None:
        self._gateway = gateway
        self._output_chars = output_chars

    def routes(self) -> list[web.RouteDef]:
        both = [*self._routes("/run", self._ran), *self._routes("/judge", self._judged)]
        return [*both, web.get("/ping", pong), web.get("/status", self._status)]

    def _routes(self, path: str, work: Callable[[Submission], Awaitable[Judgement]]) -> list[web.RouteDef]:
        async def one(submission: Submission) -> web.Response:
            return json_response(await work(submission))

        async def many(batch: Batch) -> web.Response:
            results = await in_order(batch.submissions, work)
            return json_response(Answers(batch.sub_id or str(uuid4()), results))

        post = self._gateway.post
        return [post(path, Submission, one), *(post(f"{path}/{kind}", Batch, many) for kind in ("batch", "long-batch"))]

    async def _ran(self, submission: Submission) -> Ran:
        limits = limits_of(submission, self._gateway.limits)
        result = await self._gateway.call("judge", submission.solution, submission.input or "", limits)
        return make_ran(submission, result, limits, self._output_chars)

    async def _judged(self, submission: Submission) -> Judgement:
        ran = await self._ran(submission)
        return Judgement(**{name: getattr(ran, name) for name in Judgement.__struct_fields__})

    async def _status(self, request: web.Request) -> web.Response:
        slots = self._gateway.slots
        return json_response({"queue": max(0, self._gateway.in_flight - slots), "num_workers": slots})
