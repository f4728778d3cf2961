"""A small MCP server: one tool, `python`, that works out lines of integer arithmetic and runs nothing else.

python recipes/environments/mcp_calculator.py
"""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from recipes.environments.calculator import Wrong, printed

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def python(code: str) -> str:
    """Runs lines such as `x=2*21` and `print(x)`, and answers with what they print."""
    try:
        return printed(code)
    except Wrong as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    server.run("stdio")
