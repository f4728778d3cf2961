"""Import tiers: which warmed interpreter a call runs in.

Invariants
- `choose` is a hint for speed; code runs the same in every tier, since all have the same environment.
- `choose` takes any text, Python or not, and takes milliseconds for it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

STDLIB = (
    "bisect collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys textwrap time traceback typing"
)
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^\n;#]+))", re.MULTILINE)
MODULE = re.compile(r"(?:^|,)[ \t]*(\w+)")  # the first name of each module that one import statement lists
# Characters; imports that come later cost a call some time, but a longer search would cost the node
LOOKED_AT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One warmed interpreter of a host."""

    name: str
    """Its name in messages."""
    preload: tuple[str, ...]
    """Modules that are imported once for all calls of this tier. A host without one of them does not start."""
    optional: tuple[str, ...] = ()
    """Modules that are preloaded too, unless a host's Python lacks them."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"Tier.name must be an identifier, got {self.name!r}")
        for field in ("preload", "optional"):
            names = getattr(self, field)
            if isinstance(names, str) or not all(name.replace(".", "").isidentifier() for name in names):
                raise ValueError(f"Tier.{field} must be a tuple of module names, got {names!r}")

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that it preloads if everything is installed."""
        return self.preload + self.optional


BARE = Tier(name="bare", preload=tuple(STDLIB.split()))
MATH = Tier(name="math", preload=BARE.preload, optional=("numpy", "sympy", "mpmath"))
# Pandas is missing here, since it would double what a fork costs: calls that use it import it.
FULL = Tier(name="full", preload=BARE.preload, optional=(*MATH.optional, "scipy", "networkx"))
TIERS = (BARE, MATH, FULL)


def choose(code: str, tiers: tuple[Tier, ...]) -> str:
    """Returns the first tier that preloads all that the code's import statements name, else the last.

    >>> choose("import math", TIERS), choose("from numpy import array", TIERS)
    ('bare', 'math')
    """
    needed = set()
    for start, names in IMPORT.findall(code[:LOOKED_AT]):
        needed.update([start] if start else MODULE.findall(names))
    needed -= sys.stdlib_module_names | {"__main__"}
    for tier in tiers:
        if needed <= {name.partition(".")[0] for name in tier.modules}:
            return tier.name
    return tiers[-1].name


def write_tier(tier: Tier) -> str:
    """Returns a tier as an argument of a command, which `read_tier` reads.

    >>> write_tier(Tier(name="math", preload=("json",), optional=("numpy",)))
    'math=json,numpy?'
    """
    return f"{tier.name}={','.join((*tier.preload, *(f'{name}?' for name in tier.optional)))}"


def read_tier(text: str) -> Tier:
    name, _, given = text.partition("=")
    modules = [module for module in given.split(",") if module]
    return Tier(
        name=name,
        preload=tuple(module for module in modules if not module.endswith("?")),
        optional=tuple(module[:-1] for module in modules if module.endswith("?")),
    )
