"""The built-in loop in a process of its own: `python -m bench.benches.gateway.builtin JSON`.

JSON: checkpoint and max_tokens of a conversation. When it is up it prints "{}". Each line of standard input is a load,
{"count": ..., "seed": ..., "sessions": ...}, and is answered with a line; sessions: conversations at once. cpu_s is
that of this process, without the engine's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.benches.gateway.script import KV_BLOCKS, MAX_TURNS, Counted, Scripted, conversations
from engine.assembly.config import ServingConfig
from engine.assembly.serving import serving
from engine.replica.config import ReplicaConfig
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.tools.python_tool import PythonTool
from engine.types import Trajectory


async def serve(checkpoint: Path, max_tokens: int) -> None:
    config = ServingConfig(
        checkpoint=checkpoint,
        rollout=RolloutConfig(max_tokens=max_tokens, max_turns=MAX_TURNS),
        replica=ReplicaConfig(checkpoint=str(checkpoint), max_model_len=max_tokens + 32, kv_blocks=KV_BLOCKS),
        replicas=1,
    )
    async with serving(config) as served:
        rollouts = served.rollouts([PythonTool(Scripted())])
        gc.freeze()
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _load(rollouts, **json.loads(line))), flush=True)


async def _load(rollouts: Rollouts, *, count: int, seed: int, sessions: int) -> dict[str, Any]:
    trajectories: list[Trajectory] = []
    pending = enumerate(conversations(count, seed))

    async def work() -> None:
        for sample, prompt in pending:
            trajectories.append(await rollouts.run(prompt, sample, seed * count + sample // 16))

    before_s = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for number in range(sessions):
            tasks.create_task(work(), name=f"rollout-{number}")
    cpu_s = time.process_time() - before_s
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    counted = Counted(
        conversations=count,
        turns=len(turns),
        sampled_tokens=sum(turn.end - turn.start for turn in turns),
        prompt_tokens=sum(turn.start for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
    )
    return {**counted.json(), "cpu_s": cpu_s}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    uvloop.run(serve(Path(given["checkpoint"]), given["max_tokens"]))
