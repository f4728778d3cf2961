"""The MCP server of the example recipe works out arithmetic, tells errors as Python does, and runs nothing else."""

import subprocess
import sys

import pytest

from engine.tools.mcp_tools import mcp_tools
from tests.support.paths import ROOT
from tests.support.replay import one_of_several_turns, replayed

pytest.importorskip("mcp", reason="an extra: pip install mcp")

from recipes.environments.mcp_agent import CALCULATOR


async def test_the_calculator_works_out_arithmetic_and_runs_nothing_else():
    async with mcp_tools(command=CALCULATOR) as [python]:
        assert python.name == "python"
        for code, wanted in (
            ("x=63+43\nx=x//8\nprint(x)", "13"),
            ("print(-7/2)", "-3.5"),
            ("x=1\nprint(y)", "NameError: name 'y' is not defined"),
            ("print(1", "SyntaxError"),
            ("print(1//0)", "ZeroDivisionError"),
            ("print(9**9**9)", "SyntaxError"),
            ("x=9999999999\n" + "x=x*x\n" * 9, "OverflowError"),
            ("import os", "SyntaxError"),
            ("print(open('/etc/passwd'))", "SyntaxError"),
            ("x=1\n" * 500, "ValueError"),
        ):
            reply = await python({"code": code})
            outcome = "error" if "Error" in wanted else "ok"
            assert (reply.outcome, wanted in reply.text) == (outcome, True), (code, reply.text)


@pytest.mark.timeout(300)
def test_a_replay_asks_the_server_as_the_run_did(tmp_path):
    small = ["steps=1", "prompts_per_step=4", "group_size=4", "eval_problems=4", f"runs={tmp_path}", "name=mcp"]
    command = [sys.executable, str(ROOT / "recipes/environments/mcp_agent.py"), *small]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "mcp"
    again = replayed(run, *one_of_several_turns(run), "turn=0", "start=true")
    assert again["first_difference"] is None
    assert again["again"] == again["recorded"]
