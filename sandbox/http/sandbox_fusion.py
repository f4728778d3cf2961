"""SandboxFusion's HTTP API (github.com/bytedance/SandboxFusion) for Python, which verl's tools and rewards use.

Invariants
- `status` is "Success" for exit code 0, and "Failed" for any other end of the program. `run_result.status` is
  "TimeLimitExceeded", with no return code, after a time limit, else "Finished".
- A call that was lost is answered 504 with status "SandboxError": verl sends a request again after 504 only, and
  SandboxFusion's own client after any status but 200.
- A request that names both timeouts comes from a client that waits as long as verl does. If its answer would come too
  late (all slots are taken), it is answered 504 just before, so that it is sent again.
- A request for something that is not supported (other languages, files) is refused with 422; nothing of it runs.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from aiohttp import web

from sandbox.http.gateway import MAX_WALL_S, Gateway, check_language, ended_by, json_response, pong, wall_s_of
from sandbox.http.incoming import Refused
from sandbox.wire import Limits, ToolResult, encode_code

OUTPUT_BYTES = 1 << 20  # how much SandboxFusion reads of stdout and of stderr
VERL_WAITS_S = 8.0  # in addition to both timeouts; verl itself waits 10 s
KILLED = -9  # the return code that subprocess would give; the sandbox does not tell which signal it was


class RunCode(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run.

    >>> {"code": "print(input())", "stdin": "9", "language": "python", "run_timeout": 5, "memory_limit_MB": 1024}

    Python has no compile step, so a `compile_timeout` only tells how long the client waits.
    """

    code: str
    stdin: str | None = None
    language: str = "python"
    run_timeout: float | None = None
    compile_timeout: float | None = None
    memory_limit_mb: float = msgspec.field(name="memory_limit_MB", default=-1)
    files: dict[str, str | None] = msgspec.field(default_factory=dict)
    fetch_files: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        check_language("language", self.language)
        encode_code(self.code)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["Finished", "TimeLimitExceeded"]
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


class CodeResult(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: None = None
    run_result: RunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = msgspec.field(default_factory=dict)


def limits_of(request: RunCode, limits: Limits) -> Limits:
    """Returns the limits of a request, or `limits`. Raises Refused for limits and other things that it cannot have."""
    if any(content is not None for content in request.files.values()):
        raise Refused(422, f"files must be empty (not supported), got {sorted(request.files)[:5]}")
    if request.fetch_files:
        raise Refused(422, f"fetch_files must be empty (not supported), got {request.fetch_files[:5]}")
    wall_s = wall_s_of("run_timeout", request.run_timeout, limits.wall_s)
    memory_bytes = limits.memory_bytes if request.memory_limit_mb <= 0 else request.memory_limit_mb * (1 << 20)
    if not 1 <= memory_bytes <= limits.memory_bytes:
        most = f"{limits.memory_bytes >> 20} (start the server with a larger memory_mb)"
        raise Refused(422, f"memory_limit_MB must be at most {most}, got {request.memory_limit_mb:g}")
    return msgspec.structs.replace(
        limits, wall_s=wall_s, cpu_s=wall_s, memory_bytes=int(memory_bytes), output_bytes=OUTPUT_BYTES
    )


def patience_s(request: RunCode) -> float | None:
    """Returns how long the client waits for an answer; None if its request does not tell."""
    if request.run_timeout is None or request.compile_timeout is None:
        return None
    return request.run_timeout + min(max(request.compile_timeout, 0.0), MAX_WALL_S) + VERL_WAITS_S


def make_result(result: ToolResult, limits: Limits) -> CodeResult:
    """Returns the answer to a request whose program ended with `result`."""
    if result.outcome == "lost":
        return CodeResult(status="SandboxError", message="the call was lost twice by the sandbox; send it again")
    timeout, ok = result.outcome == "timeout", result.outcome == "ok"
    return CodeResult(
        status="Success" if ok else "Failed",
        message=f"output cut at {limits.output_bytes} bytes" if result.truncated else "",
        run_result=RunResult(
            status="TimeLimitExceeded" if timeout else "Finished",
            execution_time=result.wall_s,
            return_code=None if timeout else 0 if ok else result.exit_code or KILLED,
            stdout=result.stdout,
            stderr=result.stderr + ended_by(result, limits),
        ),
    )


class Fusion:
    """SandboxFusion's routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[web.RouteDef]:
        return [self._gateway.post("/run_code", RunCode, self._run_code), web.get("/v1/ping", pong)]

    async def _run_code(self, request: RunCode) -> web.Response:
        limits = limits_of(request, self._gateway.limits)
        try:
            async with asyncio.timeout(patience_s(request)):
                result = await self._gateway.call("fusion", request.code, request.stdin or "", limits)
            answer = make_result(result, limits)
        except TimeoutError:
            answer = CodeResult(status="SandboxError", message="all slots are taken: send it again, or use more slots")
        return json_response(answer, 504 if answer.status == "SandboxError" else 200)
