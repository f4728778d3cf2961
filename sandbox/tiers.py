"""Import tiers: which warmed interpreter a call runs in.

Invariant: `choose` is a hint for speed; code runs the same in every tier that can import what it needs.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec

STDLIB = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys textwrap time traceback typing"
)
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^\n;#]+))", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """name: as in messages. preload: modules imported once, which each call of this tier finds imported."""

    name: str
    preload: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"Tier.name must be an identifier, got {self.name!r}")
        if isinstance(self.preload, str) or not all(name.replace(".", "").isidentifier() for name in self.preload):
            raise ValueError(f"Tier.preload must be a tuple of module names, got {self.preload!r}")


def _installed(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if find_spec(name) is not None)


BARE = Tier(name="bare", preload=tuple(STDLIB.split()))
MATH = Tier(name="math", preload=BARE.preload + _installed("numpy", "sympy", "mpmath"))
FULL = Tier(name="full", preload=MATH.preload + _installed("scipy", "networkx", "pandas"))
TIERS = (BARE, MATH, FULL)


def choose(code: str, tiers: tuple[Tier, ...]) -> str:
    """The first tier that preloads all that the code's import statements name, else the last.

    >>> choose("import math", TIERS), choose("from numpy import array", TIERS)
    ('bare', 'math')
    """
    needed = set()
    for start, names in IMPORT.findall(code):
        needed |= {start} if start else {name.split(".")[0].split()[0] for name in names.split(",") if name.strip()}
    needed -= sys.stdlib_module_names | {"__main__"}
    for tier in tiers:
        if needed <= {name.partition(".")[0] for name in tier.preload}:
            return tier.name
    return tiers[-1].name
