"""Every bench by one command.

    python -m bench list                                  what there is, and the question that each answers
    python -m bench page                                  writes bench/README.md from bench/results/*.json
    python -m bench NAME [options]                        one bench; --help lists its options
    python -m bench NAME --json F                         also keeps its figures in F
    python -m bench NAME --baseline F --gate 5% --metric M    ends with code 1 where M is worse than in F by more
    python -m bench sweep NAME --over a=1,2,4 --over b=x,y [options]    a table, and a plot of two figures
    python -m bench compare A.json B.json [--metric M]    two runs: intervals and a verdict for each figure
    python -m bench compare NAME --other DIR --rounds 7 [options]       two checkouts, round by round in turns
    python -m bench profile RECIPE [options] --steps 5    a recipe's run: a flame graph, and each stage's time
    python -m bench rivals RUN --step N                   a recorded step simulated: other policies, what would help
    python -m bench stage FILE.py:NAME --feed RUN         recorded groups through a stage of yours, without engines

What each prints has the machine, its load, the rounds and the commit; ratios only of a run that nobody disturbed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from bench.commands import compare, profile, rivals, stage, sweep
from bench.measuring import figures
from bench.measuring.figures import QUESTIONS
from bench.measuring.report import RUN, Gate, own_options

BENCHES = {  # the module of each; its `main` measures, shows, and calls `bench.measuring.report.finish`
    "fleet": "bench.benches.fleet.fleet",
    "gateway": "bench.benches.gateway.gateway",
    "gpu": "bench.benches.gpu.gpu",
    "learner": "bench.benches.learner.learner",
    "mismatch": "bench.benches.mismatch",
    "nodes": "bench.benches.nodes.nodes",
    "recording": "bench.benches.recording",
    "rollout": "bench.benches.rollout.rollout",
    "sandbox": "bench.benches.sandbox.sandbox",
    "sim_fleet": "bench.benches.sim_fleet.sim_fleet",
    "sim_nodes": "bench.benches.sim_nodes.sim_nodes",
    "step": "bench.benches.step",
    "streaming": "bench.benches.streaming.streaming",
    "weights": "bench.benches.weights",
}
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "compare": compare.main,
    "profile": profile.main,
    "rivals": rivals.main,
    "stage": stage.main,
    "sweep": sweep.main,
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    name, *words = argv
    if name == "page":
        figures.main()
        return 0
    if name == "list":
        for bench in BENCHES:
            print(f"{bench:12}{QUESTIONS[bench]}")
        return 0
    if name in COMMANDS:
        return COMMANDS[name](words)
    if name not in BENCHES:
        print(
            f"error: there is no bench {name!r}. Fix: one of {', '.join([*BENCHES, *COMMANDS, 'list'])}",
            file=sys.stderr,
        )
        return 2
    return run(name, words)


def run(name: str, words: Sequence[str]) -> int:
    """A bench in this process. Returns its exit code."""
    try:
        own, further = own_options(words)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    RUN.begin(name, further, json=own.json)
    sys.argv = [f"python -m bench {name}", *further]
    importlib.import_module(BENCHES[name]).main()
    return judged(own) if own.baseline is not None else 0


def judged(gate: Gate) -> int:
    """1 where the metric is worse than the baseline's by more than the gate, and surely so."""
    assert gate.baseline is not None
    assert RUN.result is not None, "a bench that returns has finished"
    return compare.gate(compare.load(gate.baseline), RUN.result, metric=gate.metric, most=gate.most)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
