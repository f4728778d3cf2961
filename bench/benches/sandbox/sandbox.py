"""What does a sandboxed call cost, and what does it survive? Ours, floors and peers in interleaved rounds.

    rocstar bench sandbox [rounds=3] [only=calls,latency,sessions,burst,memory,attacks]
                          [peer_urls=judge=http://127.0.0.1:8000 peer_pids=judge:PID,judge:PID]

calls     CPU per call of ALL server processes, for print(1+1), a numpy determinant and a sympy solve: ours;
          the same image forked without a jail; fork + exit of the image of a tier, bare as ours forks, and with the
          hooks of os.fork; exec in a process; fresh nsjail and python per call; plain python; HTTP peers
latency   of print(N), 1, 64 and 1,000 submitted at once; peers too
sessions  ten cells of a rollout, state alive, against a replay of all cells so far
burst     calls of print(N) submitted at once
memory    of a running call and of an idle session: mapped pages and page tables, without the kernel's own objects
attacks   time until the next honest call is right, in the only slot, after each kind of attack
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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
from bench.measuring.bench import Bench, BenchFailed, Keep
from bench.measuring.metric import Kind, count, megabytes, microseconds, milliseconds, rate, ratio, share
from bench.measuring.result import Figures
from bench.measuring.terminal import say
from sandbox import TIERS, SandboxConfig
from sandbox.require import at_least, require_fields

Part = Literal["calls", "latency", "sessions", "burst", "memory", "attacks"]
OURS = "rocstar"
SESSIONS = 4  # sessions that take their turns side by side


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "measurements of each part"] = 3
    only: Annotated[tuple[Part, ...], "parts"] = ("calls", "latency", "sessions", "burst", "memory", "attacks")
    calls: Annotated[int, "calls of a sample, at most"] = 400
    seconds: Annotated[float, "time of a sample, about, at most"] = 2.0
    burst: Annotated[int, "calls at once in part burst"] = 45_000
    concurrency: Annotated[int, "calls at a time, ours and peers"] = 4 * (os.cpu_count() or 1)
    idle_sessions: Annotated[int, "sessions of part memory"] = 32
    attack_s: Annotated[float, "limit of an attack"] = 1.0
    peer_urls: Annotated[tuple[str, ...], "judge=http://... or fusion=http://..."] = ()
    peer_pids: Annotated[tuple[str, ...], "further roots of a peer's processes, judge:PID"] = ()

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "calls", "burst", "concurrency", "idle_sessions")
        require_fields(self, at_least(0.01), "seconds", "attack_s")
        self.peers()

    def peers(self) -> list[PeerAddress]:
        """Raises ValueError for an address that is none."""
        return [PeerAddress.parse(text, self.peer_pids) for text in self.peer_urls]


METRICS = {
    "cpu_s": milliseconds("CPU", "per call, of all server processes", form=".2f", kind=Kind.CPU),
    "over_ours": ratio("/ ours", "CPU over ours in the same round", form=".1f"),
    "jail": share("jail", "CPU over a plain fork of the image, without our host process", kind=Kind.RATIO),
    "jail_and_host": share("jail and host", "CPU over a plain fork of the image", kind=Kind.RATIO),
    "over_fork": ratio("/ bare fork", "CPU over a fork and exit of its image, as ours forks"),
    "over_os_fork": ratio("/ os.fork", "CPU over a fork and exit of its image, with Python's hooks"),
    "wrong": count("wrong", "calls with another output than expected, largest of the rounds", summary="largest"),
    "p50_s": milliseconds("p50", "from the submission of a call to its answer"),
    "p99_s": milliseconds("p99", "from the submission of a call to its answer"),
    "calls_per_s": rate("calls/s", "answered"),
    "calls": count("calls", "submitted at once"),
    "lost": count("lost", "calls not answered, or answered wrongly, largest of the rounds", summary="largest"),
    "client_cpu_s": microseconds("client's CPU", "per call", form=".0f"),
    "turn_10": ratio("tenth cell", "a replay of ten cells over the tenth cell of a session", form=".1f"),
    "all_turns": ratio("ten cells", "replays of all cells so far over ten cells of a session", form=".1f"),
    "child_bytes": megabytes("a call", "memory of a running call beyond its slot"),
    "session_1_bytes": megabytes("a session, one cell", "memory of an idle session"),
    "session_bytes": megabytes("a session, ten cells", "memory of an idle session"),
    "recovery_s": milliseconds("recovery", "from a verdict until an honest call is right, slowest attack", form=".0f"),
    "attacks": count("attacks", "kinds"),
    "wrong_after": count("wrong after", "honest calls that were wrong after an attack, largest", summary="largest"),
}


@dataclass(kw_only=True, slots=True)
class Run:
    """What is open in a run."""

    options: Options
    stack: AsyncExitStack
    boxes: dict[str, Box] = field(default_factory=dict)
    peers: list[Server] = field(default_factory=list)
    contenders: list[Contender] = field(default_factory=list)

    async def box(self, name: str = OURS, **changes: Any) -> Box:
        if name not in self.boxes:
            say(f"opening {name}")
            self.boxes[name] = await self.stack.enter_async_context(open_box(SandboxConfig(**changes)))
        return self.boxes[name]


async def calls(run: Run) -> Figures:
    options = run.options
    if not run.contenders:
        run.contenders = await _contenders(run)
        await sandbox_calls.samples(run.contenders, 2, options.seconds)  # warms up
    return sandbox_calls.figures(await sandbox_calls.samples(run.contenders, options.calls, options.seconds), OURS)


async def _contenders(run: Run) -> list[Contender]:
    ours, enter = await run.box(), run.stack.enter_async_context
    server = Server(
        name=OURS,
        run=ours.run,
        cpu_s=ours.meter.cpu_s,
        concurrency=run.options.concurrency,
        host_cpu_s=ours.host_cpu_s,
    )
    contenders: list[Contender] = [server, *run.peers, fresh_nsjail(), plain_python()]
    contenders += [await enter(open_image("fork", tier)) for tier in TIERS]
    contenders += [await enter(open_image("os.fork", CASES[0].tier))]
    tiers = list(dict.fromkeys(case.tier for case in CASES))
    contenders += [await enter(open_image("program", tier)) for tier in tiers]
    contenders += [await enter(open_image("exec", tier)) for tier in tiers]
    return contenders


async def latency(run: Run) -> Figures:
    ours = await run.box()
    figures = {}
    for name, call in [(OURS, ours.run), *((peer.name, peer.run) for peer in run.peers)]:
        for queued, repeats in ((1, 100), (64, 3), (1000, 1)):
            say(f"latency: {name}, {queued} at once")
            burst = await load.burst(call, queued, repeats)
            figures[f"{name}, {queued:,} at once"] = burst.figures()
    return figures


async def burst(run: Run) -> Figures:
    ours, calls = await run.box(), run.options.burst
    say(f"burst: {calls:,} at once")
    cpu_s = time.process_time()
    result = await load.burst(ours.run, calls)
    cpu_s = time.process_time() - cpu_s
    return {"burst": {**result.figures(), "calls": calls, "client_cpu_s": cpu_s / calls}}


async def sessions(run: Run) -> Figures:
    ours = await run.box()
    say("sessions")
    turns = await load.turns(ours, SESSIONS)
    exact = ours.meter.source == "cpuacct"  # clock ticks are too coarse for single turns
    alive, replay = (turns.alive_cpu_s, turns.replay_cpu_s) if exact else (turns.alive_wall_s, turns.replay_wall_s)
    return {
        "sessions": {
            "turn_10": replay[-1] / alive[-1],
            "all_turns": sum(replay) / sum(alive),
            "wrong": turns.wrong,
        }
    }


async def memory(run: Run) -> Figures:
    ours = await run.box()
    say("memory")
    await sandbox_attacks.session_bytes(ours, 1, 1)  # the jails that sessions use are up then
    await sandbox_attacks.child_bytes(ours, 8, 0.2)  # every slot has run a call then
    return {
        "memory": {
            "child_bytes": await sandbox_attacks.child_bytes(ours, 8, 1.5),
            "session_1_bytes": await sandbox_attacks.session_bytes(ours, run.options.idle_sessions, 1),
            "session_bytes": await sandbox_attacks.session_bytes(ours, run.options.idle_sessions, len(load.CELLS)),
        }
    }


async def attacks(run: Run) -> Figures:
    box = await run.box("one slot", slots=1)
    recoveries = await sandbox_attacks.attack(box.sandbox, run.options.attack_s)
    if never := [each.attack for each in recoveries if each.recovery_s is None]:
        raise BenchFailed(f"no honest call was right after these attacks: {', '.join(never)}")
    return {
        "attacks": {
            "attacks": len(recoveries),
            "recovery_s": max(each.recovery_s or 0.0 for each in recoveries),
            "wrong_after": sum(each.wrong for each in recoveries),
        }
    }


ACTIONS: dict[str, Callable[[Run], Awaitable[Figures]]] = {
    "calls": calls,
    "latency": latency,
    "sessions": sessions,
    "burst": burst,
    "memory": memory,
    "attacks": attacks,
}


def measure(options: Options, keep: Keep) -> None:
    asyncio.run(_measure(options, keep))


async def _measure(options: Options, keep: Keep) -> None:
    async with AsyncExitStack() as stack:
        run = Run(options=options, stack=stack)
        for address in options.peers():
            run.peers.append(await stack.enter_async_context(open_peer(address, options.concurrency)))
        for number in range(options.rounds):
            figures: dict[str, dict[str, float]] = {}
            for part in options.only:
                say(f"round {number + 1} of {options.rounds}: {part}")
                figures |= {case: dict(of) for case, of in (await ACTIONS[part](run)).items()}
            keep(figures)


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("cpu_s", "over_ours", "calls_per_s", "lost"),
    quick={
        "rounds": "1",
        "calls": "100",
        "seconds": "0.2",
        "burst": "2000",
        "idle_sessions": "8",
        "attack_s": "0.4",
    },
)
