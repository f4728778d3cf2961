"""A rollout's session in the real sandbox."""

import asyncio
import re

from engine import contracts
from engine.tools.python_tool import PythonSessions
from sandbox import Limits, Sandbox, SandboxConfig
from sandbox.tiers import BARE
from tests.support.node import ANSWER, CHAT, END, Setup, call


async def test_a_notebook_in_the_real_sandbox():
    """The variables of a trajectory live on through errors, a limit, and the end of their interpreter."""
    turns = [
        [call("x = 6") + call("x * 7") + END],
        [call("x += 1\nx.y") + call("import os\nx = 0\nos._exit(3)") + call("print(x)\n'x'") + END],
        [call("while True: pass") + call("x") + END],
        [ANSWER],
    ]
    async with Sandbox(SandboxConfig(slots=2, tiers=(BARE,))) as box:
        await contracts.check_session_runner(box)
        await contracts.check_stateful_tool(PythonSessions(box), {"code": "1"})
        tools = [PythonSessions(box, limits=Limits(wall_s=0.5))]
        async with Setup(*turns, tools=tools, max_tokens=2000) as node, asyncio.TaskGroup() as group:
            running = [group.create_task(node.run()) for _ in range(2)]
        assert box.stats.sessions_lost == 0
    rebuilt = "\nNote: variables were rebuilt from earlier calls."
    for task in running:
        responses = [use.response for use in task.result().tool_uses]
        limit = re.compile(r"TimeoutError: stopped after [\d.]+ s")  # later than 0.5 s where the machine is busy
        assert limit.fullmatch(responses[5])
        assert [*responses[:5], responses[6]] == [
            "",
            "42",
            "Traceback (most recent call last):\n"
            '  File "<cell 3>", line 2, in <module>\n'
            "AttributeError: 'int' object has no attribute 'y'",
            f"Error: exit code 3{rebuilt}",
            "7\n'x'",
            "7",
        ]
        assert all(use.jailed for use in task.result().tool_uses)
    assert CHAT.decode(running[0].result().token_ids_T).count("Note: variables") == 1
