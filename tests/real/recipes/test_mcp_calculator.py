"""The MCP server of the example recipe works out arithmetic, tells errors as Python does, and runs nothing else."""

import pytest

from engine.tools.mcp_tools import mcp_tools

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
