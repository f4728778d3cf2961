"""What is won by sending a tool call when its closing tag is generated, instead of at the end of its turn?

    rocstar bench streaming [rounds=5] [tool=sleep|sandbox] [styles=terse,talkative]

Scripted models of several styles on two real vLLM replicas with room for all (one core each), the ordinary rollouts,
and the same turns and tools in interleaved runs:

streaming   ours
barrier     calls leave together when their turn ends, and no turn starts before all trajectories have their answers
mixed       every other trajectory streams and the rest sends its calls at its turns' ends, and a second time with the
            parts exchanged: the difference is smaller than that of two runs on a shared machine, while within a mixed
            run both parts see the same steps

A bound is analytic: what the times of the streaming run say if nothing else changed. A call that waits for its turn's
end costs, per turn, max(tool) - max(0, max(closed + tool) - end); a barrier costs the sum over turns of the slowest
trajectory instead of the slowest sum.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import uvloop

from bench.benches.fleet.engines import write_model
from bench.benches.streaming.lockstep import Lockstep
from bench.benches.streaming.script import MOST_S, STYLES, Script, ScriptedTool, SpeakingEngines, Style
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import Kind, seconds, share
from bench.measuring.terminal import say
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
from recipes.tiny.task import SHIPPED
from sandbox import Limits, Sandbox, SandboxConfig
from sandbox.require import at_least, require_fields

StyleName = Literal["terse", "talkative", "terse-3-calls", "talkative-3-calls"]
# Trajectories whose key modulo 2 is among these send their calls at the turn's end.
WAYS: dict[str, tuple[int, ...]] = {"streaming": (), "barrier": (0, 1), "mixed 0": (0,), "mixed 1": (1,)}


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "scripts of each style"] = 5
    styles: Annotated[tuple[StyleName, ...], "how the model calls tools"] = get_args(StyleName)
    trajectories: Annotated[int, "trajectories at once"] = 32
    turns: Annotated[int, "turns of a trajectory; all but the last call tools"] = 3
    tool: Annotated[Literal["sleep", "sandbox"], "where a call's seconds pass"] = "sleep"

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds")
        require_fields(self, at_least(2), "trajectories", "turns")


METRICS = {
    "saved_vs_turn_end": share(
        "saved, turn end", "share of the trajectories' summed time, from the mixed runs", kind=Kind.RATIO
    ),
    "bound_vs_turn_end": share("its bound", "for saved, turn end", kind=Kind.TIME),
    "hidden_per_call": share("hidden", "share of the tools' time that passed while their turn went on", kind=Kind.TIME),
    "saved_vs_barrier": share(
        "saved, barrier", "share of the batch's time, streaming against barrier", kind=Kind.RATIO
    ),
    "bound_vs_barrier": share("bound, barrier", "for saved, barrier", kind=Kind.TIME),
    "trajectory_s": seconds("trajectory", "time of a trajectory that streams"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One way through a script; the trajectories start at once."""

    way: str
    trajectories: Sequence[Trajectory]

    @property
    def makespan_s(self) -> float:
        began = min(trajectory.started_at for trajectory in self.trajectories)
        return max(trajectory.finished_at for trajectory in self.trajectories) - began

    def trajectory_s(self, *, at_turn_end: bool) -> float:
        """Returns the sum over the trajectories that send their calls at a turn's end, or over the others."""
        late = WAYS[self.way]
        rows = [row for key, row in enumerate(self.trajectories) if (key % 2 in late) == at_turn_end]
        return sum(row.finished_at - row.started_at for row in rows)


def tool_s(turn: Turn) -> float:
    """Returns the seconds of the slowest call of a turn; 0 without calls."""
    return max((use.finished_at - use.dispatched_at for use in turn.tool_uses), default=0.0)


def waited_s(turn: Turn) -> float:
    """Returns the seconds from the turn's end to the last answer."""
    return max([0.0, *(use.finished_at - turn.finished_at for use in turn.tool_uses)])


def bound_vs_turn_end(trajectories: Iterable[Trajectory]) -> float:
    """Returns the share of the trajectories' time that would be spent on dispatching at the turn's end."""
    rows = list(trajectories)
    saved = sum(tool_s(turn) - waited_s(turn) for row in rows for turn in row.turns)
    return saved / (saved + sum(row.finished_at - row.started_at for row in rows))


def bound_vs_barrier(trajectories: Iterable[Trajectory]) -> float:
    """Returns the share of the batch's time that waiting for the slowest turn and its tools would take."""
    rows = list(trajectories)
    began = min(row.started_at for row in rows)
    ours = max(row.finished_at for row in rows) - began
    lockstep = itertools.zip_longest(*([_turns_s(row) for row in rows]), fillvalue=0.0)
    return 1 - ours / max(ours, sum(max(turns) for turns in lockstep))


def _turns_s(row: Trajectory) -> list[float]:
    """Returns the seconds of each turn if its tools ran after it."""
    starts = [row.started_at, *(turn.queued_at for turn in row.turns[1:])]
    return [turn.finished_at - start + tool_s(turn) for start, turn in zip(starts, row.turns, strict=True)]


def hidden_per_call(trajectories: Iterable[Trajectory]) -> float:
    """Returns the share of the tool calls' time during which their turn was still generated."""
    uses = [use for row in trajectories for use in row.tool_uses]
    ran = sum(use.finished_at - use.dispatched_at for use in uses)
    return sum(use.overlap_s for use in uses) / ran if ran else 0.0


def figures(runs: Mapping[str, Run]) -> dict[str, float]:
    """Returns the figures of a style in a round. runs: by way."""
    streaming, barrier, *mixed = (runs[way] for way in WAYS)
    streamed, late = (sum(run.trajectory_s(at_turn_end=end) for run in mixed) for end in (False, True))
    return {
        "saved_vs_turn_end": 1 - streamed / late,
        "bound_vs_turn_end": bound_vs_turn_end(streaming.trajectories),
        "hidden_per_call": hidden_per_call(streaming.trajectories),
        "saved_vs_barrier": 1 - streaming.makespan_s / barrier.makespan_s,
        "bound_vs_barrier": bound_vs_barrier(streaming.trajectories),
        "trajectory_s": streaming.trajectory_s(at_turn_end=False) / len(streaming.trajectories),
    }


async def run_once(
    engines: SpeakingEngines, chat: ChatTemplate, script: Script, way: str, sandbox: Sandbox | None
) -> list[Trajectory]:
    """Plays a script one way. Raises RuntimeError for a trajectory that did not go as scripted."""
    engines.play(script)
    python = PythonTool(sandbox, limits=Limits(wall_s=2 * MOST_S)) if sandbox else None
    tool = ScriptedTool(script, at_turn_end=WAYS[way], python=python)
    timeline = Timeline()
    config = RolloutConfig(max_tokens=2000, max_turns=20, temperature=1.0, deadline_s=120.0)
    balancer = Lockstep() if way == "barrier" else StaticSplit()
    async with Fleet(FleetConfig(), engines.make, balancer, timeline) as fleet:
        await engines.forget()
        rollouts = Rollouts(config, chat, fleet, [tool], timeline, seed=0)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(rollouts.run(script.prompt(key), 0, key), name=f"trajectory-{key}")
                for key in range(len(script.turns))
            ]
    trajectories = [task.result() for task in tasks]
    for key, trajectory in enumerate(trajectories):
        uses = {use.outcome for use in trajectory.tool_uses}
        if trajectory.stop != StopReason.ANSWER or len(trajectory.turns) != len(script.turns[key]) or uses - {"ok"}:
            raise RuntimeError(f"trajectory {key} ended with {trajectory.stop}, tools {uses}, {trajectory.error}")
    return trajectories


def measure(options: Options, keep: Keep) -> None:
    prepare_environment()
    with workspace() as folder:
        uvloop.run(_measure(options, folder, keep))


async def _measure(options: Options, folder: Path, keep: Keep) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    chat = ChatTemplate.load(SHIPPED)
    write_model(folder)
    config = ReplicaConfig(checkpoint=str(folder), max_model_len=2048, max_num_seqs=64, kv_blocks=2048)
    shuffled = random.Random(0)
    styles = [style for style in STYLES if style.name in options.styles]
    cases = list(itertools.product(styles, WAYS))

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
        gc.freeze()  # without it, a collection in the middle of a run walks all that vLLM and torch have allocated
        for number in range(options.rounds):
            runs: dict[str, dict[str, Run]] = {style.name: {} for style in styles}
            for style, way in shuffled.sample(cases, len(cases)):
                say(f"round {number + 1} of {options.rounds}: {style.name}, {way}")
                played = script(style, number, options.trajectories, options.turns)
                trajectories = await run_once(engines, chat, played, way, sandbox)
                runs[style.name][way] = Run(way, trajectories)
            keep({name: figures(of) for name, of in runs.items()})


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("saved_vs_turn_end", "saved_vs_barrier", "trajectory_s"),
    quick={"rounds": "1", "trajectories": "8", "styles": "terse,talkative-3-calls"},
)
