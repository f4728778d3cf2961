"""Makes wrong programs of a right one: each mutant has one change in its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

OTHER_OPERATOR = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.Mult}
OTHER_OPERATOR |= {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult}
OTHER_COMPARISON = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq}
OTHER_COMPARISON |= {ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}


def mutants(program: str) -> Iterator[tuple[str, str]]:
    """Yields a name, `kind:line:column`, and the program with one operator, constant, comparison or result changed."""
    tree = ast.parse(program)
    for number, node in enumerate(ast.walk(tree)):
        kind = _kind(node)
        if kind:
            changed = copy.deepcopy(tree)
            _change(next(other for at, other in enumerate(ast.walk(changed)) if at == number))
            yield f"{kind}:{node.lineno}:{node.col_offset}", ast.unparse(changed)  # type: ignore[attr-defined]


def _kind(node: ast.AST) -> str:
    match node:
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OTHER_OPERATOR:
            return "operator"
        case ast.Compare(ops=[operator]) if type(operator) in OTHER_COMPARISON:
            return "comparison"
        case ast.Constant(value=int() | float()):
            return "constant"
        case ast.Return(value=ast.expr()):
            return "return"
    return ""


def _change(node: ast.AST) -> None:
    match node:
        case ast.BinOp() | ast.AugAssign():
            node.op = OTHER_OPERATOR[type(node.op)]()
        case ast.Compare():
            node.ops = [OTHER_COMPARISON[type(node.ops[0])]()]
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1
        case ast.Return():
            node.value = ast.Constant(value=None)
