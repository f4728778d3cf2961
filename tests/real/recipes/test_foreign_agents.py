"""Agents of others' packages train five steps on the tokens, rewards and losses of the built-in loop.

What each client was given is read from the wire and compared with what was trained. By GRPO, for which it is no matter
that these packages cannot tell the gateway that a call failed.
"""

import asyncio
import json
import os
import sys
from collections import Counter

import pytest

from engine.recording.reader import RecordedRun
from engine.recording.rollouts import load_tokenizer, rollouts_of
from tests.support.packages import environment_with
from tests.support.paths import ROOT
from tests.support.runs import metrics
from tests.support.wire import wire

PACKAGES = ("openai-agents==0.24.0",)
STEPS = 5
SMALL = (f"steps={STEPS}", "prompts_per_step=2", "group_size=2", "algorithm=grpo", "seed=2")
SMALL += ("eval_every=100", "eval_problems=1")


async def trained(python, recipe, folder, **variables):
    command = [str(python), str(ROOT / recipe), *SMALL, f"runs={folder}", "name=run"]
    environment = {**os.environ, "NO_PROXY": "", "no_proxy": "", **variables}
    pipe = asyncio.subprocess.PIPE
    ended = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await ended.communicate()
    assert ended.returncode == 0, output.decode()[-5000:]
    return folder / "run"


def recorded(run):
    record = RecordedRun(run)
    tokenizer = load_tokenizer(record.tokenizer)
    return [row for step in range(1, STEPS + 1) for row in rollouts_of(record, step, tokenizer)]


def shown(rollout):
    """What the built-in loop and an agent must agree in."""
    trajectory = rollout.trajectory
    spans = [(turn.start, turn.end) for turn in trajectory.turns]
    ids, logprobs = trajectory.token_ids_T.tolist(), trajectory.logprobs_T.tolist()
    return ids, logprobs, spans, trajectory.reward, trajectory.stop, rollout.kept, rollout.advantage


def turns_of(trajectory):
    ids = trajectory.token_ids_T.tolist()
    for part in trajectory.parts:
        assert part is trajectory, "a segment: the conversation was not recognised"
    return [(tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])) for turn in trajectory.turns]


@pytest.fixture(scope="module")
def packages():
    return environment_with("with-openai-agents", *PACKAGES) / "bin" / "python"


@pytest.fixture(scope="module")
def built_in(tmp_path_factory):
    return asyncio.run(trained(sys.executable, "recipes/quickstart.py", tmp_path_factory.mktemp("built-in")))


def differs_in_a_reply(one, other):
    """Two rollouts have the same ids up to the reply to a call that could not be read, which each says in its words."""
    ids, others = (each.trajectory.token_ids_T.tolist() for each in (one, other))
    at = next(at for at, (first, second) in enumerate(zip(ids, others, strict=False)) if first != second)
    before = [turn for turn in one.trajectory.turns if turn.end <= at][-1]
    malformed = any(use.outcome == "malformed" for use in before.tool_uses)
    return malformed and not one.trajectory.sampled_T[at] and not other.trajectory.sampled_T[at]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        ("recipes/agents/openai_agents.py", "/v1/responses"),
        ("recipes/agents/program.py", "/v1/chat/completions"),
    ],
)
async def test_five_steps_of_an_agent_are_those_of_the_built_in_loop(recipe, path, packages, built_in, tmp_path):
    async with wire() as noted:
        run = await trained(packages, recipe, tmp_path, HTTP_PROXY=noted.address)
    of_agent = recorded(run)
    assert len(of_agent) == STEPS * 2 * 2
    assert {given.path for given in noted.turns} == {path}
    rollouts = Counter(turn for row in of_agent for turn in turns_of(row.trajectory))
    given = Counter((each.prompt_ids, each.token_ids) for each in noted.turns)
    assert rollouts <= given, "a trajectory has a turn that no client was given"
    evaluated = sum(len(tokens) * number for (_, tokens), number in (given - rollouts).items())
    assert evaluated == sum(row["eval/tokens"] for row in metrics(run) if "eval/tokens" in row)
    rows = rows_of(run)
    for row in rows:
        kept = [each for each in of_agent if each.kept and each.step == row["step"]]
        assert row["tokens/trained"] == sum(int(each.trajectory.sampled_T.sum()) for each in kept)
    assert len({row["reward"] for row in rows}) > 1
    assert json.loads((run / "summary.json").read_text())["requests_refused"] == 0
    assert same_steps(built_in, run) >= 2, "nothing was compared"


def same_steps(built_in, run):
    """Compares the steps until a rollout reads something else, after which the weights differ. Returns their number."""
    of_loop, of_agent = recorded(built_in), recorded(run)
    for step, one, other in zip(range(1, STEPS + 1), *(rows_of(each) for each in (built_in, run)), strict=True):
        pairs = [pair for pair in zip(of_loop, of_agent, strict=True) if pair[0].step == step]
        apart = [pair for pair in pairs if shown(pair[0]) != shown(pair[1])]
        assert abs(one["reward"] - other["reward"]) <= len(apart) / len(pairs)
        if apart:
            assert all(differs_in_a_reply(*pair) for pair in apart)
            return step
        losses = [row.get("learner/loss") for row in (one, other)]  # None where all groups were flat
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    return STEPS


def rows_of(run):
    return [row for row in metrics(run) if "reward" in row]
