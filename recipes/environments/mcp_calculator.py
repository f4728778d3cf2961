"""A small MCP server: one tool, `python`, that works out lines of integer arithmetic and runs nothing else.

    python recipes/environments/mcp_calculator.py

Write what a model sends into no `eval`: this server runs beside the training, in no jail.
"""

from __future__ import annotations

import ast
import operator

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

LONGEST, DIGITS = 500, 40  # characters of a program; of a number
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def python(code: str) -> str:
    """Runs lines such as `x=2*21` and `print(x)`, and answers with what they print."""
    try:
        return printed(code)
    except (ArithmeticError, NameError, SyntaxError, TypeError, ValueError) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error


def printed(code: str) -> str:
    if len(code) > LONGEST:
        raise ValueError(f"a program has at most {LONGEST} characters")
    values: dict[str, float] = {}
    lines = []
    for line in ast.parse(code).body:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = worked_out(value, values)
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[value], keywords=[])):
                lines.append(str(worked_out(value, values)))
            case _:
                raise SyntaxError(f"no assignment and no print: {ast.unparse(line)}")
    return "\n".join(lines)


def worked_out(node: ast.expr, values: dict[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.Name(id=name):
            raise NameError(f"name '{name}' is not defined")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -worked_out(inner, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](worked_out(left, values), worked_out(right, values))
            if abs(result) > 10**DIGITS:
                raise OverflowError(f"numbers have at most {DIGITS} digits")
            return result
    raise SyntaxError(f"no arithmetic: {ast.unparse(node)}")


if __name__ == "__main__":
    server.run("stdio")
