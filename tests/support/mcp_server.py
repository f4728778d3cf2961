"""A small MCP server: `python mcp_server.py` over its standard streams, `python mcp_server.py PORT` over HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("demo", log_level="CRITICAL")
counts: dict[str, int] = {}


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def echo(text: str) -> str:
    """Says the same."""
    return text


@server.tool()
def step(context: Context) -> str:
    """Counts the calls."""
    key = (context.headers or {}).get("mcp-session-id", "")
    counts[key] = counts.get(key, 0) + 1
    return str(counts[key])


@server.tool()
def total() -> str:
    """Says what was counted."""
    return str(sum(counts.values()))


@server.tool()
def fail() -> str:
    """Fails."""
    raise LookupError("no such thing")


@server.tool()
def who() -> str:
    """Its process."""
    return str(os.getpid())


@server.tool()
def secret() -> str:
    """What it sees of the environment."""
    return f"{os.environ.get('OPENAI_API_KEY')} {os.environ.get('GIVEN')}"


@server.tool()
async def hang() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
