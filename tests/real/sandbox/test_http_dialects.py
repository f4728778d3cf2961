"""Requests as clients of Code Judge (rStar2-Agent) and SandboxFusion (verl) send them, and what they read."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from sandbox import Limits, ToolResult
from sandbox.http.code_judge import Submission, limits_of, make_ran
from sandbox.http.sandbox_fusion import RunCode, make_result, patience_s
from tests.support.sandbox_gateway import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
RAN = {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with serving("slots=4", "wall_s=1") as running_server:
        yield running_server


def python(solution: str, **fields: str | None) -> dict[str, Any]:
    return {"type": "python", "solution": solution, **fields}


def verl(code: str, *, stdin: str | None = None, timeout: int = 10, memory_mb: int = 1024) -> dict[str, Any]:
    """The body that verl's reward and its tool send."""
    return {
        "compile_timeout": timeout,
        "run_timeout": timeout,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": memory_mb,
        "language": "python",
        "files": {},
        "fetch_files": [],
    }


@pytest.mark.parametrize(
    ("submission", "run_success", "success", "stdout"),
    [
        (python("print(input())", input="a", expected_output="a"), True, True, "a\n"),
        (python("print(input())", input="a", expected_output=" a\n\n"), True, True, "a\n"),
        (python("print(input())", input="a", expected_output="b"), True, False, "a\n"),
        (python("print('a b')", expected_output="a  b"), True, False, "a b\n"),
        (python("print(1)"), True, True, "1\n"),
        (python("print(1)", input=None, expected_output=None, sub_id=None), True, True, "1\n"),
        (python("print(1); raise SystemExit(3)", expected_output="1"), False, False, "1\n"),
        (python("pass", expected_output=""), True, True, ""),
        (python("print(input())", input=""), False, False, ""),
    ],
)
async def test_judge_of_one(
    server: Server, submission: dict[str, Any], run_success: bool, success: bool, stdout: str
) -> None:
    status, ran = await server.post("/run", submission)
    assert (status, set(ran)) == (200, RAN)
    assert (ran["run_success"], ran["success"], ran["stdout"], ran["reason"]) == (run_success, success, stdout, "")
    assert 0 < ran["cost"] < 1
    status, judged = await server.post("/judge", submission)
    assert (status, set(judged)) == (200, RAN - {"stdout", "stderr"})
    assert (judged["run_success"], judged["success"], judged["reason"]) == (run_success, success, "")


async def test_judge_of_a_timeout(server: Server) -> None:
    status, ran = await server.post("/run", python("print('a', flush=True)\nwhile True: pass", expected_output="a"))
    assert (status, ran["reason"], ran["run_success"], ran["success"]) == (200, "worker_timeout", False, False)
    assert ran["stdout"] == "a\n"
    assert ran["cost"] >= 0.99  # CPU seconds have the same limit, which may come a little early


@pytest.mark.parametrize("kind", ["batch", "long-batch"])
async def test_judge_of_a_batch_keeps_the_order(server: Server, kind: str) -> None:
    programs = [python("print(input())", input=str(i), expected_output="1") for i in range(50)]
    programs[7] = python("import time; time.sleep(9)", sub_id="slow")
    status, answer = await server.post(f"/run/{kind}", {"type": "batch", "submissions": programs})
    assert (status, set(answer)) == (200, {"sub_id", "results"})
    results = answer["results"]
    assert all(set(result) == RAN for result in results)
    assert (results[7]["sub_id"], results[7]["reason"]) == ("slow", "worker_timeout")
    assert [r["stdout"] for i, r in enumerate(results) if i != 7] == [f"{i}\n" for i in range(50) if i != 7]
    assert [i for i, result in enumerate(results) if result["success"]] == [1]
    assert len({result["sub_id"] for result in results}) == 50
    status, answer = await server.post(f"/judge/{kind}", {"submissions": programs[:3], "sub_id": "mine"})
    assert (answer["sub_id"], [r["success"] for r in answer["results"]]) == ("mine", [False, True, False])
    assert all(set(result) == RAN - {"stdout", "stderr"} for result in answer["results"])


async def test_half_a_surrogate_pair_fails_its_own_program_only(server: Server) -> None:
    """As Python's json reads it in what a model wrote, and writes it."""
    programs = [python("print(1)"), python("print('\ud800')"), python("print(input())", input="\udfff.")]
    status, answer = await server.post("/run/long-batch", {"submissions": programs})
    assert status == 200
    assert [result["run_success"] for result in answer["results"]] == [True, False, True]
    assert "SyntaxError" in answer["results"][1]["stderr"]
    status, answer = await server.post("/run_code", verl("print(len('\ude00'))"))
    assert (status, answer["run_result"]["return_code"]) == (200, 1)


async def test_judge_of_rstars_tool_call(server: Server) -> None:
    """Its tools send a preamble that runs base64 of the model's code by exec and leaves by os._exit(1) on an error."""
    preamble = (
        "import base64, os, sys, traceback\ndef go(text):\n    try:\n"
        "        exec(compile(base64.b64decode(text).decode(), '<string>', 'exec'), {'__name__': '__main__'})\n"
        "    except Exception:\n        traceback.print_exc(file=sys.stderr)\n        os._exit(1)\n"
    )

    def call(code: str) -> str:
        return f"{preamble}\ngo({base64.b64encode(code.encode()).decode()!r})\n"

    programs = [
        {"type": "python", "solution": call("print(6 * 7)"), "input": None},
        {"type": "python", "solution": call("print('before', flush=True); 1/0"), "input": None},
        {"type": "python", "solution": call("print(int(input()) + 1)"), "input": "41"},
    ]
    status, answer = await server.post("/run/long-batch", {"type": "batch", "submissions": programs})
    first, second, third = answer["results"]
    assert (status, first["run_success"] and first["success"], first["stdout"]) == (200, True, "42\n")
    assert (second["run_success"], second["reason"], second["stdout"]) == (False, "", "before\n")
    assert "ZeroDivisionError" in second["stderr"]
    assert f"{third['cost']:.2f}" >= "0.00"
    assert third["stdout"] == "42\n"


async def test_judge_shows_a_thousand_characters_and_compares_all(server: Server) -> None:
    program = python("print('x' * 70_000 + 'y')", expected_output="x" * 70_000 + "y")
    _, ran = await server.post("/run", program)
    assert (ran["success"], ran["stdout"]) == (True, "x" * 1000)
    _, ran = await server.post("/run", python("print('a' + ' ' * 200_000 + 'b')", expected_output="a"))
    assert (ran["run_success"], ran["success"]) == (True, False)


async def test_status_and_ping(server: Server) -> None:
    assert await server.get("/status") == (200, {"queue": 0, "num_workers": 4})
    assert await server.get("/ping") == await server.get("/v1/ping") == (200, "pong")


@pytest.mark.parametrize(
    ("body", "status", "run_status", "return_code", "stdout"),
    [
        (verl("print(input())", stdin="9"), "Success", "Finished", 0, "9\n"),
        (verl("import sys; print(repr(sys.stdin.read()))"), "Success", "Finished", 0, "''\n"),
        (verl("print(1); raise ValueError"), "Failed", "Finished", 1, "1\n"),
        (verl("print(1); import sys; sys.exit(3)"), "Failed", "Finished", 3, "1\n"),
        (verl("int a = 1"), "Failed", "Finished", 1, ""),
        (
            verl("print(1, flush=True); import time; time.sleep(9)", timeout=1),
            "Failed",
            "TimeLimitExceeded",
            None,
            "1\n",
        ),
        (verl("import os; os.kill(os.getpid(), 9)"), "Failed", "Finished", -9, ""),
        ({"code": "print(1)"}, "Success", "Finished", 0, "1\n"),  # verl's tutorial
        ({"code": "print(1)", "language": "python", "files": {"a": None}}, "Success", "Finished", 0, "1\n"),
    ],
)
async def test_fusion(
    server: Server, body: dict[str, Any], status: str, run_status: str, return_code: int | None, stdout: str
) -> None:
    got, answer = await server.post("/run_code", body)
    assert (got, answer["status"], answer["message"], answer["compile_result"]) == (200, status, "", None)
    assert (answer["files"], answer["executor_pod_name"]) == ({}, None)
    run = answer["run_result"]
    assert set(run) == {"status", "execution_time", "return_code", "stdout", "stderr"}
    assert (run["status"], run["return_code"], run["stdout"]) == (run_status, return_code, stdout)
    assert run["execution_time"] > 0


async def test_fusion_limits_are_the_requests_own(server: Server) -> None:
    _, answer = await server.post("/run_code", verl("import time; time.sleep(1.2); print(1)", timeout=5))
    assert answer["run_result"]["stdout"] == "1\n"  # the server's own limit is 1 s
    _, answer = await server.post("/run_code", verl("x = bytes(300 << 20)", memory_mb=128))
    run = answer["run_result"]
    assert (answer["status"], run["status"], run["return_code"] == 0) == ("Failed", "Finished", False)
    assert "limit is 128 MiB" in run["stderr"]


async def test_fusion_returns_a_megabyte_and_says_when_it_cut(server: Server) -> None:
    _, answer = await server.post("/run_code", verl("print('x' * 500_000)"))
    assert (answer["message"], len(answer["run_result"]["stdout"])) == ("", 500_001)
    _, answer = await server.post("/run_code", verl("print('x' * 3_000_000)"))
    assert (answer["message"], len(answer["run_result"]["stdout"])) == ("output cut at 1048576 bytes", 1 << 20)


async def test_unicode_goes_through(server: Server) -> None:
    _, answer = await server.post("/run_code", verl("print(input() + '\u00e9\U0001f600')", stdin="\u4e2d"))
    assert answer["run_result"]["stdout"] == "\u4e2d\u00e9\U0001f600\n"


async def test_a_lost_call_is_no_verdict() -> None:
    lost, limits = ToolResult(outcome="lost"), Limits()
    ran = make_ran(Submission(type="python", solution="", expected_output=""), lost, limits, 10)
    assert (ran.reason, ran.success, ran.run_success, ran.stdout) == ("queue_timeout", False, False, None)
    answer = make_result(lost, limits)
    assert (answer.status, answer.run_result) == ("SandboxError", None)


async def test_an_output_that_was_cut_is_not_the_expected_one() -> None:
    submission = Submission(type="python", solution="", expected_output="a")
    limits = limits_of(submission, Limits(output_bytes=8))
    assert limits.output_bytes > 1 << 16
    limits = Limits(output_bytes=8)
    cut = ToolResult(outcome="ok", stdout="a       ", truncated=True)
    assert not make_ran(submission, cut, limits, 10).success
    other = ToolResult(outcome="ok", stdout="a\n", stderr="eeeeeeee", truncated=True)  # stderr was
    assert make_ran(submission, other, limits, 10).success


async def test_fusion_answers_before_verl_gives_up() -> None:
    """All slots taken: a request is answered within the time that verl waits, in the one way that it sends again."""
    async with serving("slots=1") as busy, asyncio.TaskGroup() as group:
        long = group.create_task(
            busy.post("/run_code", {"code": "import time; time.sleep(60)", "run_timeout": 60}), name="long"
        )
        await busy.until_metric("calls_in_flight", 1)
        waits = verl("print(1)", timeout=1)
        status, answer = await busy.post("/run_code", waits, timeout=aiohttp.ClientTimeout(total=1 + 1 + 10))
        assert (status, answer["status"], answer["run_result"]) == (504, "SandboxError", None)
        assert not long.done()
        long.cancel()


async def test_how_long_a_fusion_client_waits() -> None:
    assert patience_s(RunCode(code="")) is None
    assert patience_s(RunCode(code="", run_timeout=30)) is None  # its client may wait for ever
    assert patience_s(RunCode(code="", run_timeout=30, compile_timeout=30)) == 68
    assert patience_s(RunCode(code="", run_timeout=1, compile_timeout=-1)) == 9
    assert patience_s(RunCode(code="", run_timeout=1, compile_timeout=1e300)) == 609
