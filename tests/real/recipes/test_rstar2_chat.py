"""The chat program in a process of its own: a scripted server, a real jail, and one line for what goes wrong."""

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from recipes.rstar2.chat import Config
from recipes.rstar2.parts.sampling.protocol import RELEASE, REPORT
from tests.support.openai_server import KEY, Server, call
from tests.support.paths import ROOT, TINY

ANSWER = [{"content": "<answer>done</answer>"}, "stop"]
PROGRAM = [sys.executable, str(ROOT / "recipes/rstar2/chat.py")]


@asynccontextmanager
async def started(*arguments, key=KEY):
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_API_KEY": key},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def talked(*arguments, typed="", key=KEY):
    """Exit code, standard output and error of a chat in which this is typed."""
    async with started(*arguments, key=key) as process:
        out, err = await asyncio.wait_for(process.communicate(typed.encode()), 60)
        return process.returncode, out.decode(), err.decode()


def replies(server):
    """What the model has read of its calls, in each request."""
    return [[each["content"] for each in request["messages"] if each["role"] == "tool"] for request in server.requests]


@pytest.mark.parametrize(
    ("stateful", "protocol", "tool", "texts"),
    [
        (True, REPORT, REPORT.stateful_tool_name, ["42", "43"]),
        (
            False,
            RELEASE,
            RELEASE.tool_name,
            [
                "Tool call success\nstdout: 42\n\nexecution time: S",
                "Tool call failure\nreason: \nstderr: NameError at line 1: name 'x' is not defined\n  print(x + 1)\n\n"
                "execution time: S",
            ],
        ),
    ],
)
async def test_one_question_is_answered_with_calls_in_the_jail(stateful, protocol, tool, texts):
    first = [{"content": "I compute."}, *call("x = 42; print(x)", name=tool), "tool_calls"]
    async with Server(first, [*call("print(x + 1)", name=tool), "tool_calls"], ANSWER, key=KEY).running() as server:
        code, out, err = await talked(
            f"url={server.url}", f"stateful={stateful}", f"protocol={protocol.name}", "prompt=What is 6 * 7?"
        )
    assert (code, err) == (0, "")
    assert [re.sub(r"time: \d+\.\d\ds$", "time: S", text) for text in replies(server)[-1]] == texts
    shown = ("I compute.", "x = 42", *replies(server)[-1], "<answer>done</answer>")
    assert [text for text in shown if text not in out] == []
    request = server.requests[0]
    assert request["messages"] == [{"role": "user", "content": "What is 6 * 7?"}]
    assert [each["function"]["name"] for each in request["tools"]] == [tool]
    assert request["temperature"] == protocol.eval_temperature


async def test_an_empty_line_begins_a_conversation_without_memory_and_variables():
    tool = REPORT.stateful_tool_name
    sets, reads = ([*call(code, name=tool), "tool_calls"] for code in ("x = 1", "print(x)"))
    async with Server(sets, ANSWER, reads, ANSWER, reads, ANSWER).running() as server:
        code, _, err = await talked(f"url={server.url}", typed="First?\nSecond?\n\nThird?\n")
    assert (code, err) == (0, "")
    asked = [[each["content"] for each in request["messages"] if each["role"] == "user"] for request in server.requests]
    assert asked == [["First?"]] * 2 + [["First?", "Second?"]] * 2 + [["Third?"]] * 2
    assert replies(server)[3][1] == "1"
    [forgotten] = replies(server)[5]
    assert forgotten.startswith("Traceback")
    assert forgotten.endswith("\nNameError: name 'x' is not defined")


async def test_ctrl_c_ends_an_answer_that_streams():
    async with (
        Server([{"content": "Let me think"}, Server.HANG]).running() as server,
        started(f"url={server.url}", "prompt=Q?") as process,
    ):
        await asyncio.wait_for(process.stdout.readuntil(b"think"), 60)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, err) == (130, b"")


async def test_what_is_wrong_with_a_server_is_one_line():
    async with Server(key=KEY).running() as server:
        wrong_key = await talked(f"url={server.url}", key="sk-wrong")
        wrong_model = await talked(f"url={server.url}", "model=other")
    gone = await talked(f"url={server.url}")
    for (code, _, err), parts in (
        (wrong_key, ("401", "OPENAI_API_KEY")),
        (wrong_model, ("other", "served")),
        (gone, ()),
    ):
        assert code == 1
        assert len(err.splitlines()) == 1
        assert [part for part in (server.url, *parts) if part not in err] == []


async def test_a_wrong_option_is_one_line_and_exit_code_2(tmp_path):
    code, out, err = await talked(f"checkpoint={tmp_path}/nowhere")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"{tmp_path}/nowhere" in err


@pytest.mark.parametrize(("run", "stateful"), [({"protocol": "report", "stateful": True}, True), ({}, False)])
def test_a_checkpoint_is_talked_to_with_the_tool_of_its_run(run, stateful, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(run))
    (tmp_path / "checkpoint").symlink_to(TINY)
    assert Config(checkpoint=tmp_path).keeps_variables is stateful


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "checkpoint and url"),
        ({"checkpoint": TINY, "url": "http://localhost"}, "checkpoint and url"),
        ({"url": "localhost:8000"}, "localhost:8000"),
        ({"checkpoint": TINY, "temperature": -1.0}, "temperature"),
        ({"checkpoint": TINY, "max_tokens": 0}, "max_tokens"),
        ({"checkpoint": TINY, "turns": 0}, "turns"),
    ],
)
def test_an_option_that_cannot_be_is_named(given, named):
    with pytest.raises(ValueError, match=named):
        Config(**given)
