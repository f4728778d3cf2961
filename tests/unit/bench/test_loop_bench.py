"""The bench of the loop: what its engines sample, and what its figures say."""

import json

import pytest

from bench.benches.loop.loop import GROUPS, METRICS, SAMPLES, Measured, _Groups, costs, figures
from bench.benches.loop.script import Script
from bench.measuring.bench import BenchFailed
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_parser import ToolCallParser
from engine.types import Prompt
from recipes.tiny.task import SHIPPED, prompts, tool_call
from tests.support.fakes import a_trajectory


def test_a_script_calls_a_tool_in_each_turn_but_the_last_and_then_answers():
    chat = ChatTemplate.load(SHIPPED)
    prompt_ids = chat.prompt_ids(next(prompts("train", 0)).messages)
    script = Script(
        step_s=0.0,
        tokens=60,
        calls=2,
        filler=chat._encode("I think about it. "),
        call=chat._encode(tool_call("print(1)")),
        answer=chat._encode(r"<answer>\boxed{13}</answer>"),
        end=chat.end_of_turn,
        ends=prompt_ids.count(chat.end_of_turn),
    )
    ids, texts = list(prompt_ids), []
    for seed in (0, 59, 2**62):
        turn = script.turn(ids, seed)
        assert turn == script.turn(ids, seed)
        assert len(turn) == 30 + seed % 60
        ids += [*turn, *chat.tool_ids(["1"])]
        texts.append(chat.decode(turn[:-1]))
    calls = [len(ToolCallParser().feed(text)) for text in texts]
    assert calls == [1, 1, 0]
    assert texts[-1].endswith(r"\boxed{13}</answer>")


def measured(cpu_s, steps, tokens=1000):
    one = Measured(tokens=tokens, turns=4, steps=steps, cpu_s=cpu_s, wall_s=2.0)
    one.lags.wall_s, one.lags.cpu_s = [0.001], [0.0]
    return one


def test_two_shapes_tell_the_cost_of_a_token_from_that_of_a_step():
    """A token takes 4 us and a step 0.5 ms; half as many tokens on bare engines take 1 ms."""
    round_ = {
        "rollouts": measured(0.004 + 0.005, steps=10),
        "sparse": measured(0.004 + 0.05, steps=100),
        "bare": measured(0.001, steps=10, tokens=500),
        "vllm": measured(0.09, steps=10),
    }
    shown = figures(round_)
    assert shown["rollouts"]["token_s"] == pytest.approx(4e-6)
    assert shown["rollouts"]["step_s"] == pytest.approx(5e-4)
    assert shown["rollouts"]["turn_s"] == pytest.approx((0.009 - 0.002) / 4)
    assert shown["rollouts"]["over_bare"] == pytest.approx(4.5)
    assert shown["rollouts"]["of_vllm"] == pytest.approx(0.1)
    assert shown["rollouts"]["full_tokens_per_s"] == pytest.approx(1000 / 0.009)
    assert set().union(*shown.values()) == set(METRICS)


def test_shapes_that_are_alike_tell_nothing():
    with pytest.raises(BenchFailed, match="Fix: more trajectories"):
        costs(measured(0.01, steps=10), measured(0.01, steps=12))


def test_groups_are_recorded_when_they_are_whole():
    recorded = []
    groups = _Groups(
        [Prompt(id=f"p{n}", messages=(), answer="") for n in range(GROUPS)],
        lambda step, whole: recorded.append((step, json.dumps([group.prompt.id for group in whole]))),
    )
    for sample in reversed(range(SAMPLES)):
        for group in range(GROUPS):
            assert not recorded
            groups.add(group, a_trajectory(sample=sample))
    assert recorded == [(1, json.dumps([f"p{n}" for n in range(GROUPS)]))]
