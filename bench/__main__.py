"""Benches by one command.

    rocstar bench list                            the benches, the question that each answers, and how long it takes
    rocstar bench ask                             a researcher's questions, each answered within ten minutes
    rocstar bench NAME [field=value ...]          one bench; --help lists its options, quick=true is its short form
    rocstar bench NAME json=F                     keeps the result in F too
    rocstar bench NAME baseline=F metric=M gate=5    ends with code 1 where M is surely worse than in F by more than 5 %
    rocstar bench sweep NAME over=a:1,2,4         a bench or a recipe with each value of an option: a table, a plot
    rocstar bench compare A.json B.json           two results: intervals and a verdict for each figure
    rocstar bench compare NAME other=DIR          two checkouts, round by round in turns
    rocstar bench profile RECIPE steps=5          a recipe's run: a flame graph, and each stage's time
    rocstar bench rivals RUN step=N               a recorded step simulated: other policies, what would help
    rocstar bench stage FILE.py:NAME feed=RUN     recorded groups through a stage of yours, without engines
    rocstar bench page                            writes bench/README.md from bench/results

A bench says on which machine, at which commit and beside how much other load it ran, and shows ratios only of a run
that nobody disturbed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.catalogue import CATALOGUE
from bench.commands import ask, compare, listing, profile, rivals, stage, sweep
from bench.measuring import page
from bench.measuring.run import run
from engine.telemetry.watchdog import exit_process

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "ask": ask.main,
    "compare": compare.main,
    "list": listing.main,
    "page": page.main,
    "profile": profile.main,
    "rivals": rivals.main,
    "stage": stage.main,
    "sweep": sweep.main,
}


def main(argv: Sequence[str]) -> int:
    """Runs a bench or a command and returns the exit code: 2 for a mistake of the user's."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    name, *arguments = argv
    try:
        if name in COMMANDS:
            return COMMANDS[name](arguments)
        if name in CATALOGUE:
            module = CATALOGUE[name].load()
            return run(name, module.BENCH, arguments, doc=module.__doc__)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = ", ".join([*CATALOGUE, *COMMANDS])
    print(f"error: there is no bench {name!r}. Fix: one of {known}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
