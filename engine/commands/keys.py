"""Makes a key pair for a node and one for its hosts: `rocstar keys FOLDER`. Copy host.key and node.pub, and nothing
else, to each host.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.console.options import Positional, parse
from sandbox.keys import make
from sandbox.printable import printable


@dataclass(frozen=True, kw_only=True)
class Options:
    folder: Annotated[Path, Positional("where the keys are written; nothing is overwritten")]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if the keys cannot be written."""
    folder = parse(Options, argv, program="rocstar keys", description=__doc__).folder
    try:
        make(folder)
    except OSError as error:
        print(printable(f"rocstar keys: {error}"), file=sys.stderr)
        return 1
    print(printable(f"{folder}: keys made; a host on another machine needs its host.key and node.pub"))
    return 0
