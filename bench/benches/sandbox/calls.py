"""CPU and wall time per call of every contender, interleaved: each round samples each contender with each program once.

Ratios are taken within a round and their median is quoted: what else the machine does hits both sides alike.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bench.benches.sandbox.contenders import CASES, Contender, Sample
from bench.measuring.report import say

Measured = dict[tuple[str, str], list[Sample]]  # (contender, case key) -> one sample per round


async def measure(contenders: Sequence[Contender], rounds: int, calls: int, seconds: float) -> Measured:
    """`rounds` samples of each pair, after a warm-up that is not counted."""
    measured: Measured = defaultdict(list)
    pairs = [(contender, case) for case in CASES for contender in contenders if contender.serves(case)]
    for round_ in range(rounds + 1):
        for contender, case in pairs:
            say(f"calls, round {round_}/{rounds}: {contender.name} ({case.key})")
            if round_ == 0:
                await contender.sample(case, 2, seconds)
            else:
                measured[contender.name, case.key].append(await contender.sample(case, calls, seconds))
    return measured


def median(values: Iterable[float]) -> float | None:
    """None (null in JSON) where nothing was measured."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.median(known) if known else None


def ratio(measured: Measured, upper: tuple[str, str], lower: tuple[str, str]) -> float | None:
    """Median over the rounds of CPU per call of `upper` over that of `lower`."""
    pairs = zip(measured.get(upper, ()), measured.get(lower, ()), strict=False)
    return median(above.cpu_ms / below.cpu_ms for above, below in pairs if below.cpu_ms)


def metrics(measured: Measured, ours: str, peers: Sequence[str]) -> dict[str, object]:
    result: dict[str, object] = {}
    for case in CASES:
        mine = (ours, case.key)
        result[f"cpu_ratio_fresh_nsjail_{case.key}"] = ratio(measured, ("fresh nsjail", case.key), mine)
        result[f"cpu_ratio_plain_python_{case.key}"] = ratio(measured, ("plain python", case.key), mine)
        for peer in peers:
            prefix = "cpu_ratio_peer" if peer == peers[0] else f"cpu_ratio_peer_{peer}"
            result[f"{prefix}_{case.key}"] = ratio(measured, (peer, case.key), mine)
        pairs = list(zip(measured.get(mine, ()), measured.get(("plain fork, same image", case.key), ()), strict=False))
        over = median((own.cpu_ms - own.host_cpu_ms) / plain.cpu_ms - 1 for own, plain in pairs)
        result[f"isolation_overhead_{case.key}"] = over
        over = median(own.cpu_ms / plain.cpu_ms - 1 for own, plain in pairs)
        result[f"isolation_overhead_with_host_{case.key}"] = over
        result[f"host_cpu_ms_{case.key}"] = median(own.host_cpu_ms for own in measured.get(mine, ()))
    floors = {name for name, _ in measured if "fork + exit" in name}
    for prefix, how in (("fork", "fork"), ("os_fork", "os.fork")):
        floor = f"{how} + exit, {CASES[0].tier.name}", "a"
        result[f"{prefix}_floor_ratio_a"] = ratio(measured, (ours, "a"), floor)
    result["fork_floor_ms"] = {name: median(sample.cpu_ms for sample in measured[name, "a"]) for name in sorted(floors)}
    for unit in ("cpu_ms", "wall_ms"):
        result[unit] = {
            f"{name}/{key}": median(getattr(sample, unit) for sample in samples)
            for (name, key), samples in measured.items()
        }
    result["cpu_ms_range"] = {
        f"{name}/{key}": [min(cpu), max(cpu)]
        for (name, key), samples in measured.items()
        if (cpu := [sample.cpu_ms for sample in samples if math.isfinite(sample.cpu_ms)])
    }
    result["wrong_calls"] = {
        f"{name}/{key}": wrong
        for (name, key), samples in measured.items()
        if (wrong := sum(sample.wrong for sample in samples))
    }
    return result


def rows(measured: Measured, ours: str) -> list[list[str]]:
    """Per contender and program: median CPU ms per call, how many times ours that is, wall ms over calls."""
    lines = []
    for name in dict.fromkeys(name for name, _ in measured):
        line = [name]
        for case in CASES:
            samples = measured.get((name, case.key), [])
            line.append(_shown(median(sample.cpu_ms for sample in samples)))
            line.append(_shown(ratio(measured, (name, case.key), (ours, case.key))))
            line.append(_shown(median(sample.wall_ms for sample in samples)))
        wrong = sum(sample.wrong for (other, _), samples in measured.items() if other == name for sample in samples)
        lines.append([*line, str(wrong or "")])
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
