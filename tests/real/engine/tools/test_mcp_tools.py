"""The tools of real MCP servers, over standard streams and over HTTP: results, errors, deadlines, deaths, leftovers."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager

import psutil
import pytest

from engine import contracts
from engine.errors import BadInput
from engine.tools.mcp_tools import McpServer, mcp_tools
from engine.tools.python_tool import schema
from tests.support.paths import ROOT

pytest.importorskip("mcp", reason="an extra: pip install mcp")

SERVER = str(ROOT / "tests" / "support" / "mcp_server.py")
COMMAND = [sys.executable, SERVER]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child for child in left if SERVER in child.cmdline()] == []


async def until(true):
    """What other processes do is not told: it is looked for."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def http_server(port=None):
    """(its URL, the process)."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*COMMAND, str(port), stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: answers(port))
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def opened(kind, **options):
    """The tools by name, of a server of this kind."""
    if kind == "stdio":
        async with mcp_tools(command=COMMAND, **options) as tools:
            yield {tool.name: tool for tool in tools}
    else:
        async with http_server() as (url, _), mcp_tools(url=url, **options) as tools:
            yield {tool.name: tool for tool in tools}


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_the_tools_of_a_server_are_tools_of_ours(kind):
    async with opened(kind, output_chars=40) as tools:
        shown = schema(tools["add"])["function"]
        assert (shown["name"], shown["description"]) == ("add", "Adds two numbers.")
        assert set(shown["parameters"]["properties"]) == {"a", "b"}
        reply = await tools["add"]({"a": 40, "b": 2})
        assert (reply.outcome, reply.text, reply.executed, reply.jailed) == ("ok", "42", True, False)
        for name, arguments in (("add", {"a": "x"}), ("fail", {})):
            reply = await tools[name](arguments)
            assert (reply.outcome, len(reply.text) <= 40) == ("error", True)
        assert len((await tools["echo"]({"text": "x" * 500})).text) == 40
        await contracts.check_tool(tools["echo"], {"text": "x"})


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_a_call_that_takes_too_long_is_a_timeout_and_the_session_goes_on(kind):
    async with opened(kind, call_s=3.0) as tools:
        assert (await tools["hang"]({})).outcome == "timeout"
        assert (await tools["add"]({"a": 1, "b": 2})).text == "3"


async def test_text_that_has_no_encoding_does_not_end_the_session():
    async with opened("stdio") as tools:
        assert (await tools["echo"]({"text": "a\ud800b"})).text == "a?b"
        assert (await tools["echo"]({"text": "x"})).outcome == "ok"


async def test_a_call_that_is_cut_off_by_the_servers_death_is_lost_and_the_server_is_started_again():
    async with opened("stdio", backoff_s=0.05) as tools:
        first = (await tools["who"]({})).text
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(tools["hang"]({})) for _ in range(3)]
            await asyncio.sleep(0)
            assert (await tools["die"]({})).outcome == "lost"
        assert [task.result().outcome for task in running] == ["lost"] * 3
        reply = await tools["who"]({})
        assert reply.outcome == "ok"
        assert reply.text != first


async def test_a_server_that_is_killed_between_calls_costs_no_call():
    async with opened("stdio", backoff_s=0.05) as tools:
        first = int((await tools["who"]({})).text)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(first))
        await asyncio.sleep(0.1)
        reply = await tools["who"]({})
        assert (reply.outcome, int(reply.text) != first) == ("ok", True)


async def test_a_server_behind_a_url_that_dies_is_lost_and_found_again_when_it_is_back():
    async with http_server() as (url, process), mcp_tools(url=url, backoff_s=0.05, start_s=1.0) as tools:
        named = {tool.name: tool for tool in tools}
        async with asyncio.TaskGroup() as tasks:
            hanging = tasks.create_task(named["hang"]({}))
            await asyncio.sleep(0.3)
            process.kill()
            await process.wait()
        assert hanging.result().outcome == "lost"
        assert (await named["add"]({"a": 1, "b": 1})).outcome == "lost"
        port = int(url.rpartition(":")[2].partition("/")[0])
        async with http_server(port):
            replies = [await named["add"]({"a": 1, "b": 1}) for _ in range(5)]
            assert [(reply.outcome, reply.text) for reply in replies[-2:]] == [("ok", "2")] * 2


async def test_a_server_behind_a_url_that_was_restarted_unseen_gets_a_new_session():
    async with http_server() as (url, process), mcp_tools(url=url, backoff_s=0.05) as tools:
        [add] = [tool for tool in tools if tool.name == "add"]
        assert (await add({"a": 1, "b": 1})).outcome == "ok"
        process.kill()
        await process.wait()
        async with http_server(int(url.rpartition(":")[2].partition("/")[0])):
            outcomes = [(await add({"a": 1, "b": 1})).outcome for _ in range(3)]
            assert outcomes[1:] == ["ok", "ok"], "the first one may be lost with its session"


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_each_trajectory_has_a_session_that_its_tools_share(kind):
    async with opened(kind, per_trajectory=True) as tools:

        async def trajectory(steps):
            async with tools["step"].open() as step, tools["echo"].open() as echo, tools["total"].open() as total:
                for _ in range(steps):
                    last = await step({})
                assert (await echo({"text": "x"})).text == "x"
                return last.text, (await total({})).text

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(trajectory(steps)) for steps in (1, 2, 3)]
        assert [task.result()[0] for task in running] == ["1", "2", "3"]
        if kind == "stdio":
            assert [task.result()[1] for task in running] == ["1", "2", "3"]
            await contracts.check_stateful_tool(tools["echo"], {"text": "x"})


async def test_a_trajectory_that_calls_nothing_starts_no_process():
    async with opened("stdio", per_trajectory=True) as tools, tools["step"].open():
        await asyncio.sleep(0.1)
        children = psutil.Process().children(recursive=True)
        assert [child for child in children if SERVER in child.cmdline()] == []


async def test_a_session_whose_state_is_gone_is_lost_for_good():
    async with opened("stdio", per_trajectory=True, backoff_s=0.01) as tools:
        async with tools["step"].open() as step, tools["die"].open() as die:
            assert (await step({})).text == "1"
            assert (await die({})).outcome == "lost"
            assert [(await step({})).outcome for _ in range(2)] == ["lost", "lost"]
        async with tools["step"].open() as step:
            assert (await step({})).text == "1"


async def test_a_trajectory_that_is_cancelled_in_a_call_leaves_no_process():
    async with opened("stdio", per_trajectory=True) as tools:
        called = asyncio.Event()

        async def trajectory():
            async with tools["who"].open() as who, tools["hang"].open() as hang:
                await who({})
                called.set()
                await hang({})

        task = asyncio.create_task(trajectory())
        await called.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        children = psutil.Process().children(recursive=True)
        assert [child for child in children if SERVER in child.cmdline()] == []


async def test_the_server_sees_of_the_environment_what_it_is_given(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    async with opened("stdio", environment={"GIVEN": "this"}) as tools:
        assert (await tools["secret"]({})).text == "None this"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command": ["/nowhere/server"]}, "/nowhere/server"),
        ({"command": ["/bin/false"]}, "/bin/false"),
        ({"command": ["sleep", "60"], "start_s": 0.5}, "0.5 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "http://127.0.0.1:9/mcp"),
    ],
)
async def test_a_server_that_is_not_there_is_named(options, named):
    with pytest.raises(BadInput, match=named):
        async with asyncio.timeout(15), mcp_tools(**options):  # at once, and not after start_s
            raise AssertionError("it is there")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "command or url"),
        ({"command": ["x"], "url": "y"}, "command or url"),
        ({"command": "python server.py"}, "list of words"),
        ({"url": "y", "call_s": 0.0}, "call_s"),
        ({"url": "y", "output_chars": 5}, "output_chars"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        McpServer(**options)


async def test_what_is_raised_inside_comes_out_as_it_is():
    async def inside():
        async with opened("stdio"):
            raise LookupError("a bug")

    with pytest.raises(LookupError, match="a bug"):
        await inside()
