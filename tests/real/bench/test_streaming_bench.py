"""The bench of streaming dispatch: what is scripted is said, and what is called saved."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bench.benches.streaming.script import Script, ScriptedTool
from bench.benches.streaming.streaming import (
    METRICS,
    STYLES,
    WAYS,
    Run,
    bound_vs_barrier,
    bound_vs_turn_end,
    figures,
    hidden_per_call,
)
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser
from engine.types import Prompt, StopReason, ToolUse, Trajectory, Turn
from recipes.tiny.task import SHIPPED
from tests.support.fakes import settle
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate.load(SHIPPED)


def script_of(chat: ChatTemplate, style: int, trajectories: int = 3, turns: int = 2) -> Script:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    return Script(
        chat, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, STYLES[style], trajectories, turns, 0
    )


@pytest.mark.parametrize("style", range(len(STYLES)))
def test_every_turn_but_the_last_makes_the_calls_of_its_style(chat: ChatTemplate, style: int) -> None:
    script = script_of(chat, style)
    for key, turns in enumerate(script.turns):
        for number, ids in enumerate(turns):
            assert ids[-1] == chat.end_of_turn
            assert chat.end_of_turn not in ids[:-1]
            parser = ToolCallParser()
            text = chat.decode(ids[:-1])
            calls = parser.feed(text) + parser.finish()
            assert len(calls) == (STYLES[style].calls if number == 0 else 0)
            for call in calls:
                assert isinstance(call, ToolCall)
                assert (call.arguments["key"], call.arguments["turn"]) == (key, number)
                assert 0.02 <= call.arguments["s"] <= 4.0
            if calls and not STYLES[style].after:
                assert text.endswith("</tool_call>")


def test_a_request_continues_where_the_trajectory_is(chat: ChatTemplate) -> None:
    script = script_of(chat, 0)
    prompt = chat.prompt_ids(script.prompt(1).messages)
    first, last = script.turns[1]
    progress, left = script.begin(prompt)
    assert (progress.turn, left) == (0, first)
    progress.engine_ids += [9] * 6  # the engine sampled six tokens, of which five were delivered when it died
    progress, left = script.begin(prompt + first[:5])
    assert left == first[5:]
    assert progress.engine_ids == prompt + [9] * 5
    progress.engine_ids += [9] * (len(first) - 5)
    progress, left = script.begin(prompt + first + [7, 7])
    assert (progress.turn, left) == (1, last)
    assert progress.engine_ids == prompt + [9] * len(first) + [7, 7]


async def test_a_late_call_waits_for_its_turns_end(chat: ChatTemplate) -> None:
    script = script_of(chat, 0)
    progress, _ = script.begin(chat.prompt_ids(script.prompt(1).messages))
    call = {"key": 1, "turn": 0, "s": 0.0}
    async with asyncio.TaskGroup() as group:
        late = group.create_task(ScriptedTool(script, at_turn_end=(1,))(call))
        soon = group.create_task(ScriptedTool(script, at_turn_end=(0,))(call))
        await settle()
        assert (late.done(), soon.done()) == (False, True)
        progress.ended[0].set()
    assert late.result().outcome == soon.result().outcome == "ok"


def use(closed: float, finished: float, turn_end: float) -> ToolUse:
    return ToolUse(
        name="python",
        arguments="{}",
        outcome="ok",
        response="",
        closed_at=closed,
        dispatched_at=closed,
        finished_at=finished,
        overlap_s=max(0.0, min(finished, turn_end) - closed),
        executed=True,
        jailed=False,
    )


def trajectory(*turns: tuple[float, float, tuple[tuple[float, float], ...]], end: float | None = None) -> Trajectory:
    """Turns: (begin, end, calls as (closed, finished))."""
    built = tuple(
        Turn(
            start=0,
            end=1,
            tool_uses=tuple(use(closed, finished, stop) for closed, finished in calls),
            replica=0,
            cached_tokens=0,
            queued_at=begin,
            started_at=begin,
            finished_at=stop,
            truncated=False,
        )
        for begin, stop, calls in turns
    )
    return Trajectory(
        prompt=Prompt(id="0", messages=(), answer=""),
        sample=0,
        seed=0,
        temperature=1.0,
        token_ids_T=np.zeros(1, np.int32),
        sampled_T=np.zeros(1, np.bool_),
        logprobs_T=np.zeros(1, np.float32),
        versions_T=np.zeros(1, np.int32),
        turns=built,
        text="",
        stop=StopReason.ANSWER,
        started_at=turns[0][0],
        finished_at=turns[-1][1] if end is None else end,
        error=None,
    )


# Ends at 6; the calls run 1 s and 3 s, of which the second, which closes 2 s before the turn's end, is waited for 1 s.
LONE = trajectory((0.0, 4.0, ((0.5, 1.5), (2.0, 5.0))), (5.0, 6.0, ()))


def test_the_bound_against_the_turns_end() -> None:
    assert bound_vs_turn_end([LONE]) == pytest.approx((3 - 1) / (6 + 2))
    assert hidden_per_call([LONE]) == pytest.approx((1 + 2) / 4)
    assert bound_vs_turn_end([trajectory((0.0, 1.0, ()))]) == hidden_per_call([trajectory((0.0, 1.0, ()))]) == 0


def test_the_bound_against_the_barrier() -> None:
    quick = trajectory((0.0, 1.0, ((1.0, 1.5),)), (1.5, 5.5, ()))
    slow = trajectory((0.0, 4.0, ((4.0, 5.0),)), (5.0, 6.0, ()))
    lockstep = (4 + 1) + 4  # the slow one's first turn and tool, then the quick one's second turn
    assert bound_vs_barrier([quick, slow]) == pytest.approx(1 - 6 / lockstep)
    assert bound_vs_barrier([quick]) == 0


def runs(streamed_s: float, late_s: float, barrier_s: float) -> dict[str, Run]:
    def rows(*seconds: float) -> list[Trajectory]:
        return [trajectory((0.0, 1.0, ()), end=value) for value in seconds]

    found = [
        Run("streaming", rows(streamed_s, streamed_s)),
        Run("barrier", rows(barrier_s, barrier_s)),
        Run("mixed 0", rows(late_s, streamed_s)),
        Run("mixed 1", rows(streamed_s, late_s)),
    ]
    return {run.way: run for run in found}


def test_what_is_called_saved() -> None:
    row = figures(runs(3.0, 4.0, 6.0))
    assert row["saved_vs_turn_end"] == pytest.approx(1 / 4)
    assert row["saved_vs_barrier"] == pytest.approx(1 / 2)
    assert row["trajectory_s"] == pytest.approx(3.0)
    assert row.keys() == METRICS.keys()
    assert list(WAYS) == list(runs(1.0, 1.0, 1.0))


@pytest.mark.campaign  # `make bench` runs it too
def test_the_bench_on_real_engines(tmp_path: Path) -> None:
    options = "quick=true styles=talkative trajectories=2 turns=2"
    folder = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "streaming", *options.split()],
        capture_output=True,
        text=True,
        timeout=200,
        **folder,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])["figures"]["talkative"]
    assert 0 < row["hidden_per_call"] <= 1
    assert 0 <= row["bound_vs_turn_end"] < 1
