"""What does a sandboxed call cost, and what does it survive? Ours, floors and peers in one interleaved run.

    python -m bench sandbox [--quick] [--only calls,latency,sessions,burst,memory,attacks]
                            [--peer-url judge=http://127.0.0.1:8000 --peer-pid judge=PID,PID ...]

calls     CPU ms per call of ALL server processes, and wall time over calls, for (a) print(1+1), (b) a numpy
          determinant, (c) a sympy solve: ours; ours without a jail per call (plain fork); fork + exit of the image of a
          tier, bare as ours forks, and with the hooks of os.fork; exec in a process; fresh nsjail and python per call;
          plain python; HTTP peers. One client at full load. isolation_overhead_<program>: ours over plain fork, CPU of
          our host process left out; isolation_overhead_with_host_<program>: counted in
latency   of print(N), 1, 64 and 1,000 submitted at once; peers too
sessions  ten cells of a rollout, state alive, against a replay of all cells so far
burst     45,000 calls of print(N) submitted at once: lost or wrong ones, wall, memory
memory    of a running call and of an idle session: mapped pages and page tables, without the kernel's own objects
attacks   time until the next honest call is right, in the only slot, after each kind of attack

Machines are noisy: quote ratios, which are taken within a round. Run it with -m; as a script, this folder would hide
the package `sandbox`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.exit("run it as `python -m bench sandbox`, from the root of the repository")


from bench.benches.sandbox import attacks as sandbox_attacks
from bench.benches.sandbox import calls as sandbox_calls
from bench.benches.sandbox import load
from bench.benches.sandbox.contenders import (
    CASES,
    Box,
    Contender,
    Server,
    fresh_nsjail,
    open_box,
    open_image,
    plain_python,
)
from bench.benches.sandbox.peer import PeerAddress, open_peer
from bench.measuring.report import at_least, drawn, environment, fill, finish, interruptible, names, number, say, table
from sandbox import TIERS, SandboxConfig

PARTS = ("calls", "latency", "sessions", "burst", "memory", "attacks")
OURS = "rocstar"
PLOT = Path("runs/bench/sandbox.png")


@dataclass(kw_only=True, slots=True)
class Run:
    """The state of one run: what is open, what was found."""

    options: argparse.Namespace
    stack: AsyncExitStack
    metrics: dict[str, Any]
    boxes: dict[str, Box] = field(default_factory=dict)
    peers: list[Server] = field(default_factory=list)

    async def box(self, name: str = OURS, **changes: Any) -> Box:
        if name not in self.boxes:
            say(f"opening {name}")
            self.boxes[name] = await self.stack.enter_async_context(open_box(SandboxConfig(**changes)))
        return self.boxes[name]


async def calls(run: Run) -> None:
    options, enter = run.options, run.stack.enter_async_context
    ours = await run.box()
    meter, many = ours.meter, options.concurrency
    server = Server(name=OURS, run=ours.run, cpu_s=meter.cpu_s, concurrency=many, host_cpu_s=ours.host_cpu_s)
    contenders: list[Contender] = [server, *run.peers]
    contenders += [fresh_nsjail(), plain_python()]
    forks = [await enter(open_image("fork", tier)) for tier in TIERS]
    contenders += [*forks, await enter(open_image("os.fork", CASES[0].tier))]
    for what in ("program", "exec"):
        contenders += [await enter(open_image(what, tier)) for tier in dict.fromkeys(case.tier for case in CASES)]
    seconds = options.seconds
    measured = await sandbox_calls.measure(contenders, options.rounds, options.calls, seconds)
    run.metrics |= sandbox_calls.metrics(measured, OURS, [peer.name for peer in run.peers])
    run.metrics["fork_floor_image"] = forks[0].kind
    run.metrics["cpu_source"] = meter.source
    title = "ms per call: " + ", ".join(f"({case.key}) {case.title}" for case in CASES)
    header = [part for case in CASES for part in (f"({case.key}) CPU", "/ ours", "wall")]
    table(title, ["", *header, "wrong"], sandbox_calls.rows(measured, OURS))


async def latency(run: Run) -> None:
    ours = await run.box()
    rows = []
    found: dict[str, Any] = {}
    for name, call in [(OURS, ours.run), *((peer.name, peer.run) for peer in run.peers)]:
        for queued, repeats in ((1, 100), (64, 3), (1000, 1)):
            if name != OURS and run.options.quick and queued > 64:
                continue
            say(f"latency: {name}, {queued} at once")
            burst = await load.burst(call, queued, repeats)
            found[f"{name}/{queued}"] = asdict(burst)
            rows.append([name, f"{queued:,}", *_burst_columns(burst)])
    run.metrics["latency"] = found
    table("Latency of print(N)", ["service", "at once", "p50 ms", "p99 ms", "calls/s", "lost"], rows)


async def burst(run: Run) -> None:
    ours, count = await run.box(), run.options.burst
    say(f"burst: {count:,} at once")
    idle, cpu = ours.meter.memory_bytes(), time.process_time()
    found = await load.burst(ours.run, count)
    own, cpu = load.own_peak_bytes(), time.process_time() - cpu
    run.metrics |= {"burst_calls": found.calls, "burst_lost": found.lost, "burst_wall_s": found.wall_s}
    run.metrics |= {"burst_p50_ms": found.p50_ms, "burst_p99_ms": found.p99_ms, "burst_calls_per_s": found.rate}
    run.metrics["burst_client_cpu_us_per_call"] = 1e6 * cpu / count
    run.metrics |= {"burst_client_peak_bytes": own, "burst_server_growth_bytes": ours.meter.memory_bytes() - idle}
    header = ["at once", "p50 ms", "p99 ms", "calls/s", "lost", "wall s", "client's peak MiB"]
    table(
        "Burst of print(N)",
        header,
        [[f"{count:,}", *_burst_columns(found), f"{found.wall_s:.1f}", f"{own / 2**20:.0f}"]],
    )


def _burst_columns(burst: load.Burst) -> list[str]:
    return [f"{burst.p50_ms:.1f}", f"{burst.p99_ms:.1f}", f"{burst.rate:.0f}", str(burst.lost)]


async def sessions(run: Run) -> None:
    ours = await run.box()
    found = []
    for round_ in range(run.options.rounds + 1):
        say(f"sessions, round {round_}/{run.options.rounds}")
        found.append(await load.turns(ours, 4))
    wrong, found = sum(turns.wrong for turns in found), found[1:]  # the first one is the warm-up
    columns = ("alive_cpu_ms", "replay_cpu_ms", "alive_wall_ms", "replay_wall_ms")
    ms = {
        name: [
            sandbox_calls.median(column) or 0.0
            for column in zip(*(getattr(turns, name) for turns in found), strict=True)
        ]
        for name in columns
    }
    unit = "cpu_ms" if ours.meter.source == "cpuacct" else "wall_ms"  # clock ticks are too coarse for single turns
    pairs = [(getattr(turns, f"replay_{unit}"), getattr(turns, f"alive_{unit}")) for turns in found]
    last = sandbox_calls.median(replay[-1] / alive[-1] for replay, alive in pairs)
    total = sandbox_calls.median(sum(replay) / sum(alive) for replay, alive in pairs)
    run.metrics |= {"session_turn10_replay_ratio": last, "session_total_replay_ratio": total}
    run.metrics |= {"session_ratios_of": unit, "session_wrong": wrong, "session_turns": ms}
    rows = [[name, *(f"{value:.1f}" for value in ms[name]), f"{sum(ms[name]):.0f}"] for name in columns]
    table("Sessions, ms per turn", ["", *map(str, range(1, 11)), "sum"], rows)


async def memory(run: Run) -> None:
    ours = await run.box()
    say("memory")
    quick = run.options.quick
    await sandbox_attacks.session_bytes(ours, 1, 1)  # the jails that sessions use are up
    await sandbox_attacks.child_bytes(ours, 8, 0.2)  # every slot has run a call
    child = await sandbox_attacks.child_bytes(ours, 8, 1.5)
    found = {"child_bytes": child}
    for name, cells in (("idle_session_turn1_bytes", 1), ("idle_session_bytes", len(load.CELLS))):
        found[name] = await sandbox_attacks.session_bytes(ours, 8 if quick else 32, cells)
    run.metrics |= found
    table("Memory", ["", "MiB"], [[name, f"{value / 2**20:.2f}"] for name, value in found.items()])


async def attacks(run: Run) -> None:
    box = await run.box("one slot", slots=1)
    found = await sandbox_attacks.attack(box.sandbox, 0.4 if run.options.quick else 1.0)
    slowest = max((one.recovery_s for one in found if one.recovery_s is not None), default=None)
    run.metrics["attacks"] = {one.attack: asdict(one) for one in found}
    run.metrics |= {"attack_recovery_max_s": slowest, "attack_wrong": sum(one.wrong for one in found)}
    rows = []
    for one in found:
        shown = f"{1e3 * one.recovery_s:.0f}" if one.recovery_s is not None else "never"
        rows.append([one.attack, one.verdict, f"{one.verdict_s:.2f}", shown, str(one.wrong or "")])
    table("Attacks", ["attack", "verdict", "after s", "next honest call right, ms", "wrong before"], rows)


ACTIONS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "calls": calls,
    "latency": latency,
    "sessions": sessions,
    "burst": burst,
    "memory": memory,
    "attacks": attacks,
}


def plot(metrics: dict[str, Any], path: Path) -> None:
    """CPU per call by contender and program, and the turns of a session, of which one was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cpu, turns = metrics.get("cpu_ms", {}), metrics.get("session_turns", {})
    panels = [bool(cpu), bool(turns)].count(True)
    figure = Figure(figsize=(7 * panels, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)
    if cpu:
        shown_names = list(dict.fromkeys(key.rpartition("/")[0] for key in cpu))[::-1]
        for index, case in enumerate(CASES):
            bars = [(row, cpu.get(f"{name}/{case.key}")) for row, name in enumerate(shown_names)]
            shown = [(row + 0.27 * (1 - index), value) for row, value in bars if value is not None]
            axes[0][0].barh(*zip(*shown, strict=True), height=0.25, log=True, label=f"({case.key}) {case.title}")
        axes[0][0].set_yticks(range(len(shown_names)), shown_names)
        axes[0][0].set_xlabel("CPU ms per call, all server processes")
        axes[0][0].legend()
    if turns:
        for name, values in turns.items():
            axes[0][-1].plot(range(1, len(values) + 1), values, marker="o", label=name)
        axes[0][-1].set_xlabel("turn of a session")
        axes[0][-1].set_ylabel("ms per call")
        axes[0][-1].set_yscale("log")
        axes[0][-1].legend()
    figure.savefig(path, dpi=120)


async def measure(options: argparse.Namespace, metrics: dict[str, Any]) -> None:
    """Adds those of whole parts."""
    async with AsyncExitStack() as stack:
        run = Run(options=options, stack=stack, metrics=metrics)
        for address in peers(options):
            run.peers.append(await stack.enter_async_context(open_peer(address, options.concurrency)))
        for part in options.only:
            started = time.perf_counter()
            await ACTIONS[part](run)
            metrics[f"{part}_part_s"] = time.perf_counter() - started


def peers(options: argparse.Namespace) -> list[PeerAddress]:
    """Raises ValueError for an address that is none."""
    return [PeerAddress.parse(text, options.peer_pid) for text in options.peer_url]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench sandbox", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="everything, small, in less than a minute")
    parser.add_argument("--only", type=names(PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--peer-url", action="append", default=[], help="judge=http://... or fusion=http://...")
    parser.add_argument("--peer-pid", action="append", default=[], help="judge=PID,PID: further roots of its processes")
    parser.add_argument("--rounds", type=at_least(1), help="of calls and of sessions")
    parser.add_argument("--calls", type=at_least(1), help="per sample, at most")
    parser.add_argument("--seconds", type=number(0.01), help="per sample, about, at most")
    parser.add_argument("--burst", type=at_least(1), help="calls at once in part burst")
    parser.add_argument(
        "--concurrency", type=at_least(1), default=4 * (os.cpu_count() or 1), help="calls at a time, ours and peers"
    )
    options = parser.parse_args(given)
    fill(options, rounds=(2, 5), calls=(100, 400), seconds=(0.2, 2.0), burst=(2000, 45_000))
    try:
        peers(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def show(options: argparse.Namespace, machine: dict[str, Any], metrics: dict[str, Any]) -> None:
    shown = {"cpu_ms", "session_turns"} & metrics.keys()
    title = f"Sandbox (plot: {drawn(PLOT, partial(plot, metrics)) if shown else 'none'})"
    rows = [[name, f"{value:.3g}"] for name, value in metrics.items() if isinstance(value, int | float)]
    finish("sandbox", title, ("metric", "value"), rows, config=vars(options), metrics=metrics, environment=machine)


def main() -> None:
    options, machine = arguments(), environment()
    metrics: dict[str, Any] = {}
    interruptible(lambda: asyncio.run(measure(options, metrics)), lambda: show(options, machine, metrics), metrics)
