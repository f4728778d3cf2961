"""CPU per call of every contender: a round samples each contender with each program once.

Ratios are taken within a round, so that other load on the machine concerns both sides alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.benches.sandbox.contenders import CASES, Contender, Sample
from bench.measuring.result import Figures
from bench.measuring.terminal import say

Samples = Mapping[tuple[str, str], Sample]  # (contender, case) -> sample
PLAIN_FORK = "plain fork, same image"


async def samples(contenders: Sequence[Contender], calls: int, seconds: float) -> dict[tuple[str, str], Sample]:
    taken = {}
    for case in CASES:
        for contender in contenders:
            if contender.serves(case):
                say(f"calls: {contender.name} ({case.key})")
                taken[contender.name, case.key] = await contender.sample(case, calls, seconds)
    return taken


def figures(samples: Samples, ours: str) -> Figures:
    """Returns a row for each program and contender; ours says what its jail costs. Unknown CPU is left out."""
    rows: dict[str, dict[str, float]] = {}
    for (name, key), sample in samples.items():
        own, row = samples[ours, key], {"wrong": float(sample.wrong)}
        if math.isfinite(sample.cpu_s):
            row |= {"cpu_s": sample.call_cpu_s, "over_ours": sample.call_cpu_s / own.call_cpu_s}
        plain = samples.get((PLAIN_FORK, key))
        if name == ours and plain is not None:
            row["jail"] = (own.call_cpu_s - own.call_host_cpu_s) / plain.call_cpu_s - 1
            row["jail_and_host"] = own.call_cpu_s / plain.call_cpu_s - 1
        rows[f"{key}/{name}"] = row
    smallest = CASES[0]
    for metric, how in (("over_fork", "fork"), ("over_os_fork", "os.fork")):
        floor = samples.get((f"{how} + exit, {smallest.tier.name}", smallest.key))
        if floor is not None:
            rows[f"{smallest.key}/{ours}"][metric] = samples[ours, smallest.key].call_cpu_s / floor.call_cpu_s
    return rows
