"""What is won by sending a tool call when its closing tag is generated, instead of at the end of its turn?

    python -m bench streaming [--quick] [--tool sleep|sandbox] [--rounds 5]

Scripted models of several styles on two real vLLM replicas with room for all (one core each), the ordinary rollouts,
and the same turns and tools in interleaved runs: *streaming* (ours); *barrier* (calls leave together when their turn
ends, and no turn starts before all trajectories have their tools' answers); *mixed*, where every other trajectory
streams and the rest sends its calls at its turns' ends, and a second time with the parts exchanged. The difference in
question is smaller than that of two runs on a shared machine: within a mixed run both parts see the same steps.

`saved_vs_turn_end`: share of the trajectories' summed wall time, from the mixed runs; `saved_vs_barrier`:
share of the batch's wall time, streaming against barrier. Medians over rounds, means over styles. `hidden_per_call`:
share of the tools' time that passed while their turn went on. The bound beside them is analytic: what the times of the
streaming run say if nothing else changed. A call that waits for its turn's end costs, per turn, max(tool) - max(0,
max(closed + tool) - end); a barrier costs the sum over turns of the slowest trajectory instead of the slowest sum.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import ROOT
from bench.benches.fleet.engines import write_model
from bench.benches.streaming.script import MOST_S, STYLES, Script, ScriptedTool, SpeakingEngines, Style
from bench.measuring.report import at_least, environment, fill, finish, interruptible, names, say
from bench.placement.policies import StaticSplit
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.run.workspace import workspace
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from engine.types import StopReason, Trajectory, Turn
from sandbox import Limits, Sandbox, SandboxConfig

NAMES = [style.name for style in STYLES]
QUICK = [NAMES[0], NAMES[-1]]
TOKENIZER = ROOT / "recipes" / "tiny" / "agent"
# By name: the trajectories that send their calls at a turn's end, those whose key is one of these modulo 2.
WAYS: dict[str, tuple[int, ...]] = {"streaming": (), "barrier": (0, 1), "mixed 0": (0,), "mixed 1": (1,)}


@dataclass(frozen=True, slots=True)
class Run:
    """One way through a script; the trajectories start at once."""

    style: str
    way: str
    round: int
    trajectories: Sequence[Trajectory]

    @property
    def makespan_s(self) -> float:
        began = min(trajectory.started_at for trajectory in self.trajectories)
        return max(trajectory.finished_at for trajectory in self.trajectories) - began

    def trajectory_s(self, *, at_turn_end: bool) -> float:
        """Sum over the trajectories that send their calls at a turn's end, or over the others."""
        late = WAYS[self.way]
        rows = [row for key, row in enumerate(self.trajectories) if (key % 2 in late) == at_turn_end]
        return sum(row.finished_at - row.started_at for row in rows)


def tool_s(turn: Turn) -> float:
    """Seconds of the slowest call of a turn; 0 without calls."""
    return max((use.finished_at - use.dispatched_at for use in turn.tool_uses), default=0.0)


def waited_s(turn: Turn) -> float:
    """Seconds from the turn's end to the last answer."""
    return max([0.0, *(use.finished_at - turn.finished_at for use in turn.tool_uses)])


def bound_vs_turn_end(trajectories: Iterable[Trajectory]) -> float:
    """Share of the trajectories' time that dispatch at the turn's end would add, over what it would then be."""
    rows = list(trajectories)
    saved = sum(tool_s(turn) - waited_s(turn) for row in rows for turn in row.turns)
    return saved / (saved + sum(row.finished_at - row.started_at for row in rows))


def bound_vs_barrier(trajectories: Iterable[Trajectory]) -> float:
    """Share of the batch's time that is left when turn n + 1 waits for the slowest turn n and its tools."""
    rows = list(trajectories)
    began = min(row.started_at for row in rows)
    ours = max(row.finished_at for row in rows) - began
    lockstep = itertools.zip_longest(*([_turns_s(row) for row in rows]), fillvalue=0.0)
    return 1 - ours / max(ours, sum(max(turns) for turns in lockstep))


def _turns_s(row: Trajectory) -> list[float]:
    """Seconds of each turn, its tools run after it."""
    starts = [row.started_at, *(turn.queued_at for turn in row.turns[1:])]
    return [turn.finished_at - start + tool_s(turn) for start, turn in zip(starts, row.turns, strict=True)]


def hidden_per_call(trajectories: Iterable[Trajectory]) -> float:
    """Share of the tool calls' time during which their turn was still generated."""
    uses = [use for row in trajectories for use in row.tool_uses]
    ran = sum(use.finished_at - use.dispatched_at for use in uses)
    return sum(use.overlap_s for use in uses) / ran if ran else 0.0


def hidden_s(trajectories: Iterable[Trajectory]) -> float:
    """Seconds of a tool call, on average, during which its turn was still generated."""
    overlaps = [use.overlap_s for row in trajectories for use in row.tool_uses]
    return statistics.fmean(overlaps) if overlaps else 0.0


def style_metrics(runs: Sequence[Run]) -> dict[str, float]:
    """Of the runs of one style; shares saved are medians over rounds."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in runs:
        rounds.setdefault(run.round, {})[run.way] = run
    figures = [round_figures(found) for found in rounds.values()]
    return {name: statistics.median(row[name] for row in figures) for name in figures[0]}


def round_figures(found: Mapping[str, Run]) -> dict[str, float]:
    """Of one round's runs by way."""
    streaming, barrier, *mixed = (found[way] for way in WAYS)
    streamed, late = (sum(run.trajectory_s(at_turn_end=end) for run in mixed) for end in (False, True))
    return {
        "saved_vs_turn_end": 1 - streamed / late,
        "bound_vs_turn_end": bound_vs_turn_end(streaming.trajectories),
        "saved_vs_barrier": 1 - streaming.makespan_s / barrier.makespan_s,
        "bound_vs_barrier": bound_vs_barrier(streaming.trajectories),
        "hidden_per_call": hidden_per_call(streaming.trajectories),
        "saved_per_call_s": hidden_s(streaming.trajectories),
        "trajectory_s": streaming.trajectory_s(at_turn_end=False) / len(streaming.trajectories),
        "makespan_s": streaming.makespan_s,
        "barrier_makespan_s": barrier.makespan_s,
    }


async def run_once(
    engines: SpeakingEngines, chat: ChatTemplate, script: Script, way: str, sandbox: Sandbox | None
) -> list[Trajectory]:
    """Raises RuntimeError for a trajectory that did not go as scripted."""
    engines.play(script)
    python = PythonTool(sandbox, limits=Limits(wall_s=2 * MOST_S)) if sandbox else None
    tool = ScriptedTool(script, at_turn_end=WAYS[way], python=python)
    timeline = Timeline()
    config = RolloutConfig(max_tokens=2000, max_turns=20, temperature=1.0, deadline_s=120.0)
    async with Fleet(FleetConfig(), engines.make, StaticSplit(barrier=way == "barrier"), timeline) as fleet:
        await engines.forget()
        rollouts = Rollouts(config, chat, fleet, [tool], timeline, seed=0)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rollouts.run(script.prompt(key), 0, key), name=f"trajectory-{key}")
                for key in range(len(script.turns))
            ]
    found = [task.result() for task in tasks]
    for key, trajectory in enumerate(found):
        uses = {use.outcome for use in trajectory.tool_uses}
        if trajectory.stop != StopReason.ANSWER or len(trajectory.turns) != len(script.turns[key]) or uses - {"ok"}:
            raise RuntimeError(f"trajectory {key} ended with {trajectory.stop}, tools {uses}, {trajectory.error}")
    return found


async def measure(options: argparse.Namespace, folder: Path, runs: list[Run]) -> None:
    """Adds the runs of whole rounds."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    chat = ChatTemplate.load(TOKENIZER)
    write_model(folder)
    config = ReplicaConfig(checkpoint=str(folder), max_model_len=2048, max_num_seqs=64, kv_blocks=2048)
    shuffled = random.Random(0)
    cases = list(itertools.product(options.styles, WAYS))

    def script(style: Style, seed: int, trajectories: int, turns: int) -> Script:
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        return Script(chat, encode, style, trajectories, turns, seed)

    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(SpeakingEngines(config, 1))
        sandbox = None
        if options.tool == "sandbox":
            sandbox = await stack.enter_async_context(Sandbox(SandboxConfig(slots=options.trajectories)))
        say("engines start")
        await run_once(engines, chat, script(STYLES[0], 0, 4, 2), "streaming", sandbox)
        gc.freeze()  # else a collection in the middle of a run walks all that vLLM and torch have allocated
        for number in range(options.rounds):
            found = []
            for style, way in shuffled.sample(cases, len(cases)):
                say(f"round {number + 1} of {options.rounds}: {style.name}, {way}")
                played = script(style, number, options.trajectories, options.turns)
                found.append(Run(style.name, way, number, await run_once(engines, chat, played, way, sandbox)))
            runs += found


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench streaming", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two styles, one round, 8 trajectories")
    parser.add_argument("--tool", choices=("sleep", "sandbox"), default="sleep", help="where a call's seconds pass")
    parser.add_argument("--styles", type=names(NAMES), help=",".join(NAMES))
    parser.add_argument("--rounds", type=at_least(1))
    parser.add_argument("--trajectories", type=at_least(2))
    parser.add_argument("--turns", type=at_least(2), default=3, help="of each trajectory; all but the last call tools")
    options = parser.parse_args(given)
    fill(options, styles=(QUICK, NAMES), rounds=(1, 5), trajectories=(8, 32))
    options.styles = [style for style in STYLES if style.name in options.styles]
    return options


def show(options: argparse.Namespace, machine: dict[str, Any], runs: Sequence[Run]) -> None:
    by_style = {style.name: style_metrics([run for run in runs if run.style == style.name]) for style in options.styles}
    percent = ("saved_vs_turn_end", "bound_vs_turn_end", "hidden_per_call", "saved_vs_barrier", "bound_vs_barrier")
    rows = [
        [name, *(f"{100 * row[column]:.1f} %" for column in percent), f"{row['trajectory_s']:.2f}"]
        for name, row in by_style.items()
    ]
    metrics: dict[str, Any] = {name: statistics.fmean(row[name] for row in by_style.values()) for name in percent}
    metrics["styles"] = by_style
    header = ("style", "saved, turn end", "bound", "hidden per call", "saved, barrier", "bound", "trajectory s")
    config = vars(options) | {"styles": list(by_style)}
    title = "Wall time saved by dispatch at the closing tag"
    finish("streaming", title, header, rows, config=config, metrics=metrics, environment=machine)


def main() -> None:
    prepare_environment()
    options, machine = arguments(), environment()
    runs: list[Run] = []

    def run() -> None:
        with workspace() as folder:
            uvloop.run(measure(options, folder, runs))

    interruptible(run, lambda: show(options, machine, runs), runs)
