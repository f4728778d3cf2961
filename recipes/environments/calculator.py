"""Works out lines of integer arithmetic as Python does, and runs nothing else.

Write what a model sends into no `eval`: this runs beside the training, in no jail.
"""

from __future__ import annotations

import ast
import operator

LONGEST, DIGITS = 500, 40  # characters of a program; of a number
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


class Wrong(Exception):
    """The lines cannot be worked out. The message is the one that Python would end with."""


def printed(code: str) -> str:
    """Returns what lines such as `x=2*21` and `print(x)` print. Raises Wrong."""
    try:
        return _printed(code)
    except (ArithmeticError, NameError, SyntaxError, TypeError, ValueError) as error:
        message = error.msg if isinstance(error, SyntaxError) else error
        raise Wrong(f"{type(error).__name__}: {message}") from error


def _printed(code: str) -> str:
    if len(code) > LONGEST:
        raise ValueError(f"a program has at most {LONGEST} characters")
    values: dict[str, float] = {}
    lines = []
    for line in ast.parse(code).body:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _worked_out(value, values)
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[value], keywords=[])):
                lines.append(str(_worked_out(value, values)))
            case _:
                raise SyntaxError(f"no assignment and no print: {ast.unparse(line)}")
    return "\n".join(lines)


def _worked_out(node: ast.expr, values: dict[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.Name(id=name):
            raise NameError(f"name '{name}' is not defined")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_worked_out(inner, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_worked_out(left, values), _worked_out(right, values))
            if abs(result) > 10**DIGITS:
                raise OverflowError(f"numbers have at most {DIGITS} digits")
            return result
    raise SyntaxError(f"no arithmetic: {ast.unparse(node)}")
