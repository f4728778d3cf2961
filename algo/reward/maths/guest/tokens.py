r"""Splits LaTeX into tokens, and finds brackets, separators and names among them."""

from __future__ import annotations

import re

from algo.reward.maths.guest.meaning import Unreadable

TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d*)?|\.\d+|\S", re.DOTALL)
OPENING = {"(", "[", "{", r"\{", r"\lfloor", r"\lceil", r"\langle", r"\begin"}
CLOSING = {")", "]", "}", r"\}", r"\rfloor", r"\rceil", r"\rangle", r"\end"}
UNKNOWN_RELATIONS = {r"\approx", r"\sim", r"\simeq", r"\cong", r"\notin", r"\to", r"\Rightarrow", r"\implies"}
LETTERS = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell"""
GREEK = frozenset(rf"\{name}" for name in LETTERS.split())


def is_number(token: str) -> bool:
    return token[:1].isdigit() or (token[:1] == "." and token[1:2].isdigit())


def closing(tokens: list[str], start: int) -> int:
    """Returns the position of the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += (tokens[position] in OPENING) - (tokens[position] in CLOSING)
        if depth == 0:
            return position
    raise Unreadable("a bracket is never closed")


def bracketed_whole(tokens: list[str]) -> bool:
    """Returns whether one pair of brackets encloses all tokens."""
    return len(tokens) > 1 and tokens[0] in OPENING and closing(tokens, 0) == len(tokens) - 1


def split(tokens: list[str], separators: dict[str, str]) -> tuple[list[str], list[list[str]]]:
    """Returns the separators outside of all brackets, and the parts between them."""
    if UNKNOWN_RELATIONS & set(tokens):
        raise Unreadable("a relation that is neither equality nor order")
    separating: list[str] = []
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in OPENING) - (token in CLOSING)
        if depth == 0 and token in separators:
            separating.append(token)
            parts.append([])
        else:
            parts[-1].append(token)
    if depth != 0 or not all(parts):
        raise Unreadable("a bracket without its partner, or nothing between two separators")
    return separating, parts


NAME = re.compile(r"(?:\\[A-Za-z]+|[A-Za-z]|_\{?\w+\}?|\([-\d.A-Za-z,|_]*\)|[-+/|'{}(),])+")


def name_of(tokens: list[str]) -> str | None:
    """Returns the text of tokens that only name something, such as `x`, `f(2)`, `a+b` or `(x,y)`; None for others."""
    letters = [token for token in tokens if token in GREEK or (token.isalpha() and token not in ("e", "i"))]
    text = "".join(tokens)
    return text if letters and NAME.fullmatch(text) else None


def simple(tokens: list[str], *, ordered: bool) -> bool:
    """Returns whether a name is also a formula of its letters. ordered: it is beside < or >, where |x| is no name."""
    others = {"'", r"\angle", r"\triangle", ","} | (set() if ordered else {"|"})
    return not any(token in others or is_number(token) for token in tokens)
