"""Made-up runs for the page: metrics, configuration, summary, and a recording."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.recording.in_flight import NAME
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder
from engine.telemetry.in_flight import STATES, InFlight
from tests.support.recorded_run import TOKENIZER, write_recorded_run

CONFIG: dict[str, Any] = {
    "model": str(TOKENIZER.parent),
    "steps": 3,
    "seed": 0,
    "max_staleness": 0,
    "learner.lr": 0.0005,
    "argv": ["recipes/quickstart.py", "lr=0.0005"],
    "versions": {"python": "3.11", "torch": "2.13"},
}


def metrics(step: int) -> dict[str, float]:
    """Of a step, with an evaluation at each second one."""
    evaluation = {
        "eval/accuracy": 0.5 + 0.3 * step / (step + 3),
        "eval/accuracy_low": 0.4 + 0.3 * step / (step + 3),
        "eval/accuracy_high": 0.6 + 0.3 * step / (step + 3),
        "eval/n": 128,
    }
    return {
        "reward": 0.4 + 0.5 * step / (step + 5),
        "rollout/response_tokens": 30.0 + step % 5,
        "rollout/trajectories": 16,
        "rollout/staleness_mean": 0.0,
        "rollout/staleness_max": 0,
        "stop/length": 1,
        "groups/all": 4,
        "groups/flat": 1,
        "tokens/generated": 480,
        "tokens/trained": 320,
        "tokens/goodput": 0.66,
        "tokens/per_s": 240.0,
        "waste/flat_tokens": 100,
        "waste/not_selected_tokens": 60,
        "tools/calls_per_s": 4.0,
        "tools/error_share": 0.2,
        "tools/error_share_correct": 0.1,
        "tools/latency_p50_ms": 8.0,
        "tools/latency_p99_ms": 30.0,
        "tools/queue_p50_ms": 2.0,
        "tools/run_p50_ms": 6.0,
        "host/blocked_at/mine.py:12 clean": 0.25,
        "tools/overlap_saved_ms": 11.0,
        "learner/entropy": 0.2,
        "learner/kl": 0.001,
        "time/step_s": 2.0,
        "time/rollout_s": 1.4,
        "time/learn_s": 0.5,
        "time/sync_s": 0.1,
        "time/train_total_s": 2.0 * step,
        "replicas/busy_s": 2.0,
        "replicas/live": 2,
        "idle/tool_wait_s": 0.6,
        "idle/staleness_gate_s": 1.0,
        "idle/weight_sync_s": 0.2,
        "idle/host_s": 0.2,
        "kv_peak/replica0": 0.3,
        **(evaluation if step % 2 == 0 else {}),
    }


@contextmanager
def run_under_way(path: Path, *, steps: int = 3, **config: Any) -> Iterator[RunFolder]:
    """A run that holds its folder and has so many steps."""
    with RunFolder.open(path.parent, path.name, Identity(CONFIG | config)) as folder:
        folder.json("config.json", CONFIG | config)
        for step in range(1, steps + 1):
            folder.step(step, metrics(step))
        yield folder


def write_in_flight(path: Path, *, rollouts: int = 6) -> None:
    """Which rollouts were under way when the run ended, and one that had ended before."""
    in_flight = InFlight(time.time)
    states = itertools.cycle(STATES)
    opened = [in_flight.rollout(f"p{number}", sample=number % 4, lease=number // 4) for number in range(rollouts)]
    for each, state in zip(opened, states, strict=False):
        watched = each.__enter__()
        watched.begins_turn(1)
        watched.samples(16, replica=0)
        watched.moves(state)
    with in_flight.rollout("p9", sample=0, lease=-1):
        pass
    path.joinpath(NAME).write_bytes(msgspec.json.encode(in_flight.snapshot(groups_per_step=4)))


def write_viewed_run(
    path: Path, *, steps: int = 3, recorded: int = 3, groups: int = 4, samples: int = 4, **config: Any
) -> None:
    """A run that has ended. recorded: steps in its recording, 0 for none."""
    with run_under_way(path, steps=steps, **config) as folder:
        folder.json("summary.json", {"steps": steps, "ended": "all steps are trained", "tool_calls": 96})
    write_in_flight(path)
    if recorded:
        write_recorded_run(path, steps=recorded, groups=groups, samples=samples)
