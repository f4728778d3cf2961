"""Makes the tools of an MCP server tools of a rollout. The server is started here and speaks over its standard streams,
or it is one at a URL (streamable HTTP).

    async with mcp_tools(command=["python", "server.py"]) as tools:
        rollouts = job.rollouts(tools)

Invariants
- Each call has exactly one reply, within its deadline. What the server calls an error is one for the model; a call that
  takes too long is a timeout; one that the server's end cuts off is lost, which ends the trajectory as a failure of
  ours.
- A server that all trajectories share is started again when it ends, after waits that grow. One that a trajectory has
  for itself is not, since its state is gone: the trajectory's calls are then lost.
- When the context is left, no process that it started is there any more.
- A server runs on this machine with this user's rights, in no jail, and sees of the environment what it is given.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engine.errors import BadInput, first_error
from engine.ports import StatefulTool, Tool, ToolReply
from engine.tools.python_tool import clip
from sandbox.require import at_least, positive, require, require_fields

LONGEST_WAIT_S = 30.0  # between two starts of a server
PAGES = 100  # bounds a list of tools; a server that never ends its list is refused

# JSON-RPC codes that say the connection or the session is gone; any other is an answer.
CONNECTION_CLOSED, INVALID_REQUEST = -32000, -32600


@dataclass(frozen=True, kw_only=True, slots=True)
class McpServer:
    """How a server is reached, and how long that may take. The fields are the arguments of `mcp_tools`."""

    command: Sequence[str] = ()
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    log: Path | None = None
    call_s: float = 30.0
    start_s: float = 30.0
    backoff_s: float = 0.5
    output_chars: int = 1000

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError(f"give command or url, and one of them, got {self.command!r} and {self.url!r}")
        if isinstance(self.command, str):
            raise ValueError(f"command must be a list of words, got {self.command!r}")
        require_fields(self, positive, "call_s", "start_s", "backoff_s")
        require("output_chars", self.output_chars, at_least(20))

    def __str__(self) -> str:
        return self.url or shlex.join(self.command)


@asynccontextmanager
async def mcp_tools(
    *,
    command: Sequence[str] = (),
    url: str = "",
    per_trajectory: bool = False,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    log: Path | None = None,
    call_s: float = 30.0,
    start_s: float = 30.0,
    backoff_s: float = 0.5,
    output_chars: int = 1000,
) -> AsyncIterator[list[Tool | StatefulTool]]:
    """Yields the tools that a server offers, as it describes them.

    command: starts it, in `folder`, with PATH, HOME and the like of this environment and what `environment` adds; what
    it writes to standard error goes to `log`, or nowhere. per_trajectory: each trajectory has a session of its own (and
    with a command a process of its own), which begins with its first call. call_s: bounds a call. start_s: bounds a
    start, and the wait for a server that is started again. output_chars: how much of a result the model reads.

    Raises BadInput when the server cannot be reached at first, or the package `mcp` is not installed.
    """
    server = McpServer(
        command=command,
        url=url,
        environment=environment or {},
        folder=folder,
        log=log,
        call_s=call_s,
        start_s=start_s,
        backoff_s=backoff_s,
        output_chars=output_chars,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            async with _kept(server, tasks, again=not per_trajectory) as session:
                described = await session.described()
                if not per_trajectory:
                    yield [McpTool.of(each, session) for each in described]
                    return
            sessions = _Sessions(server, tasks)
            yield [McpSessionTool(each, sessions) for each in described]
    except BaseExceptionGroup as failures:
        raise first_error(failures) from failures


@dataclass(slots=True)
class McpTool:
    """A tool of a server's session. parameters: the server's JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    session: McpSession

    @classmethod
    def of(cls, described: Any, session: McpSession) -> Self:
        return cls(described.name, described.description or "", _parameters(described), session)

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        return await self.session.call(self.name, arguments)


class McpSessionTool:
    """A StatefulTool: the tools of one server that a trajectory opens share a session of its own."""

    def __init__(self, described: Any, sessions: _Sessions) -> None:
        self.name: str = described.name
        self.description: str = described.description or ""
        self.parameters = _parameters(described)
        self._described, self._sessions = described, sessions

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Tool]:
        async with self._sessions.of_this_task(self.name) as session:
            yield McpTool.of(self._described, session)


class _Sessions:
    """The sessions of the trajectories under way. A trajectory opens all its tools in one task."""

    def __init__(self, server: McpServer, tasks: asyncio.TaskGroup) -> None:
        self._server, self._tasks = server, tasks
        self._open: dict[asyncio.Task[Any] | None, list[tuple[McpSession, set[str]]]] = {}

    @asynccontextmanager
    async def of_this_task(self, name: str) -> AsyncIterator[McpSession]:
        """Yields the session that this task has open if it has not taken this tool from it yet, otherwise a new one."""
        task = asyncio.current_task()
        opened = self._open.setdefault(task, [])
        for session, names in opened:
            if name not in names:
                names.add(name)
                yield session  # whoever opened it first closes it last
                return
        async with _kept(self._server, self._tasks, again=False) as session:
            opened.append((session, {name}))
            try:
                yield session
            finally:
                opened[:] = [each for each in opened if each[0] is not session]
                if not opened:
                    self._open.pop(task, None)


@asynccontextmanager
async def _kept(server: McpServer, tasks: asyncio.TaskGroup, *, again: bool) -> AsyncIterator[McpSession]:
    """Yields a session, which a task of its own keeps open. On leaving, its process has ended."""
    session = McpSession(server, again=again)
    keeper = tasks.create_task(session.keep(), name=f"mcp-{server}")
    try:
        yield session
    finally:
        session.close()
        await asyncio.wait({keeper})  # each of its waits is bounded: the streams' end, then SIGTERM, then SIGKILL


class McpSession:
    """A session with a server, which begins when somebody wants it. again: it begins anew when the server ends.

    What the SDK opens must be closed by the task that opened it, so `keep` has the connection for the others.
    """

    def __init__(self, server: McpServer, *, again: bool) -> None:
        self._server, self._again = server, again
        self._client: Any = None
        self._lost = asyncio.Event()  # set when the present connection ends
        self._changed = asyncio.Event()
        self._wanted = self._closing = self._over = False
        self._ends = 0  # connections that ended in a row without an answer
        self._cause = "it has not started"

    async def described(self) -> list[Any]:
        """Returns the tools of the server. Raises BadInput when it cannot be reached."""
        try:
            async with asyncio.timeout(self._server.start_s):
                client = await self._connected(once=True)
                tools: list[Any] = []
                cursor = None
                for _ in range(PAGES):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        return tools
                raise _Down(f"its list of tools has more than {PAGES} pages")
        except TimeoutError as error:
            cause = f"it did not answer within {self._server.start_s} s"
            raise BadInput(f"MCP server {self._server}: {cause}. Fix: start it by hand, or raise start_s") from error
        except _Down as error:
            raise BadInput(f"MCP server {self._server}: {error}. Fix: start it by hand and see") from error
        except Exception as error:  # the SDK's errors have no base class
            cause = f"{type(error).__name__}: {error}"
            raise BadInput(f"MCP server {self._server} lists no tools: {cause}. Fix: start it by hand") from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolReply:
        """Returns the reply of a call. Never raises because of its arguments or the server."""
        try:
            async with asyncio.timeout(self._server.start_s):
                client = await self._connected()
        except (TimeoutError, _Down):
            return ToolReply(outcome="lost", text=f"MCP server {self._server} is down: {self._cause}", executed=False)
        lost = self._lost
        try:
            async with asyncio.timeout(self._server.call_s):
                result = await client.call_tool(name, _plain(arguments))
        except TimeoutError:
            text = f"TimeoutError: stopped after {self._server.call_s:g} s"
            return ToolReply(outcome="timeout", text=text)
        except Exception as error:
            return self._failed(error, lost)
        self._ends = 0
        text = clip(_text(result), self._server.output_chars)
        return ToolReply(outcome="error" if result.is_error else "ok", text=text)

    def _failed(self, error: Exception, lost: asyncio.Event) -> ToolReply:
        """Returns the reply of a call without a result: the server refused it, or it is gone."""
        code = getattr(error, "code", None)  # an MCPError has one
        if isinstance(code, int) and code not in (CONNECTION_CLOSED, INVALID_REQUEST):
            return ToolReply(outcome="error", text=clip(f"Error: {error}", self._server.output_chars))
        if code is not None:
            lost.set()
        # Any other error of the SDK means that the server broke the protocol, which is not the model's fault.
        return ToolReply(outcome="lost", text=f"MCP server {self._server}: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._closing = True
        self._lost.set()
        self._changed.set()

    async def keep(self) -> None:
        """Opens the session when it is wanted and until it is closed; the owner's task."""
        while not self._wanted and not self._closing:
            await self._change()
        while not self._closing:
            try:
                await self._one_connection()
            except Exception as failure:  # the SDK raises what its transports raise, mostly in groups
                error = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
                self._cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            finally:
                self._client = None
                self._ends += 1
                self._lost.set()
                self._changed.set()
            if not self._again:
                break
            await self._pause(min(self._server.backoff_s * 2 ** (self._ends - 1), LONGEST_WAIT_S))
        self._over = True
        self._changed.set()

    async def _one_connection(self) -> None:
        """Serves one connection, from the server's start to its end, or until this is closed."""
        async with AsyncExitStack() as stack:
            lost = asyncio.Event()
            async with asyncio.timeout(self._server.start_s):
                client = await stack.enter_async_context(_client(self._server, lost))
            self._client, self._lost = client, lost
            self._cause = "it ended"
            self._changed.set()
            if not self._closing:
                await lost.wait()
            self._client = None

    async def _connected(self, *, once: bool = False) -> Any:
        """Waits for a connection. Raises _Down if the session is over or, with `once`, the first attempt failed."""
        self._wanted = True
        self._changed.set()
        while self._client is None or self._lost.is_set():
            if self._over or self._closing or (once and self._ends):
                raise _Down(self._cause)
            await self._change()
        return self._client

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        """Waits, but not beyond `close`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._closing:
                    await self._change()
        except TimeoutError:
            pass


class _Down(RuntimeError):
    """There is no server."""


@asynccontextmanager
async def _client(server: McpServer, lost: asyncio.Event) -> AsyncIterator[Any]:
    """Yields a client of the SDK that is connected. lost: is set when the server has ended."""
    try:
        from mcp import Client
    except ImportError as error:
        raise _Down(f"the package mcp is not installed ({error}). Fix: pip install mcp") from error
    # Over HTTP only the older protocol has sessions, in which a server may keep what belongs to a trajectory.
    mode = "legacy" if server.url else "auto"
    async with Client(_watched(server, lost), cache=None, mode=mode) as client:
        yield client


@asynccontextmanager
async def _watched(server: McpServer, lost: asyncio.Event) -> AsyncIterator[Any]:
    async with _transport(server) as (read, write):
        yield _Watched(read, lost), write


@asynccontextmanager
async def _transport(server: McpServer) -> AsyncIterator[Any]:
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url:
        async with streamable_http_client(server.url) as streams:
            yield streams
        return
    parameters = StdioServerParameters(
        command=server.command[0], args=[*server.command[1:]], env=dict(server.environment), cwd=server.folder
    )
    with open(server.log or os.devnull, "a") as log:  # noqa: ASYNC230  nothing waits for a disk here
        async with stdio_client(parameters, errlog=log) as streams:
            yield streams


class _Watched:
    """The stream of a server's messages, which tells when it ends."""

    def __init__(self, stream: Any, lost: asyncio.Event) -> None:
        self._stream, self._lost = stream, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._lost.set()
            raise


def _parameters(described: Any) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments, with `properties` even if the server names none."""
    schema = dict(described.input_schema)
    return {"type": "object", "properties": {}, **schema}


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments as JSON can carry them: half a surrogate pair would end the connection for everybody."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(arguments), ensure_ascii=False).encode(errors="replace"))
    return plain


def _text(result: Any) -> str:
    """Returns what the model reads of a result: its texts, and the kind of anything else."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)
