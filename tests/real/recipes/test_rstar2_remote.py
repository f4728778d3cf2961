"""Rollouts by a server's model: what is counted, which budgets hold, and what is no answer."""

import asyncio
import json
import signal
import sys

import pytest

from engine.ports import ToolReply
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, StopReason
from recipes.rstar2.parts.sampling.endpoint import EndpointFailed, OnEndpoint, connect
from recipes.rstar2.parts.sampling.remote import RemoteRollouts, schemas
from recipes.rstar2.parts.sampling.rows import RowFile
from tests.support.fakes import a_prompt
from tests.support.openai_server import USAGE, Server, call, raw_call
from tests.support.paths import ROOT

PROGRAM = [sys.executable, str(ROOT / "recipes/rstar2/evaluate.py")]
ANSWER = [{"content": "<answer>\\boxed{42}</answer>"}, "stop"]
OPTIONS = ["protocol=none", "samples=1", "sandbox.slots=1", "in_flight=1"]


class Tool:
    name = "python"

    def __init__(self, outcome="ok"):
        self.outcome, self.codes = outcome, []

    async def __call__(self, arguments):
        self.codes.append(arguments["code"])
        return ToolReply(outcome=self.outcome, text=f"reply {len(self.codes)}")


async def rolled(server, *, tool=None, samples=1, max_tokens=1000, **budget):
    """The trajectories of that many samples, one after the other. Without a tool the server has them."""
    budget = RolloutConfig(**{"max_tokens": max_tokens, "max_turns": 3, "temperature": 0.5, **budget})
    async with server.running(), connect(server.url) as client:

        def speaker(seed):
            return OnEndpoint(
                client=client.with_options(max_retries=0),
                model="served",
                tools=schemas(tool),
                temperature=budget.temperature,
                max_tokens=max_tokens,
                stream=False,
                seed=seed,
            )

        rollouts = RemoteRollouts(speaker, tool, budget, Timeline(), seed=1)
        return [await rollouts.run(a_prompt(), sample, 0) for sample in range(samples)]


async def test_calls_are_run_here_and_counted_as_those_of_a_rollout():
    server = Server([{"content": "I compute.\n"}, *call("1"), *call("2", at=1), "tool_calls"], ANSWER)
    tool = Tool()
    [trajectory] = await rolled(server, tool=tool)
    assert trajectory.stop is StopReason.ANSWER
    assert tool.codes == ["1", "2"]
    assert [len(turn.tool_uses) for turn in trajectory.turns] == [2, 0]
    assert [(use.outcome, use.response) for use in trajectory.tool_uses] == [("ok", "reply 1"), ("ok", "reply 2")]
    assert trajectory.sampled_tokens == 2 * USAGE["completion_tokens"]
    assert trajectory.text.endswith("\\boxed{42}</answer>")
    replies = [message["content"] for message in server.requests[1]["messages"] if message["role"] == "tool"]
    assert replies == ["reply 1", "reply 2"]
    assert [request["stream"] for request in server.requests] == [False, False]


async def test_samples_and_turns_have_seeds_of_their_own_and_the_same_ones_again():
    def a_server():
        return Server([*call("1"), "tool_calls"], ANSWER, [*call("1"), "tool_calls"], ANSWER)

    first, again = a_server(), a_server()
    for server in (first, again):
        await rolled(server, tool=Tool(), samples=2)
    seeds = [request["seed"] for request in first.requests]
    assert len(set(seeds)) == 4
    assert [request["seed"] for request in again.requests] == seeds


async def test_the_last_allowed_turn_that_calls_is_out_of_turns():
    [trajectory] = await rolled(Server(*[[*call("1"), "tool_calls"]] * 2), tool=Tool(), max_turns=2)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.TURNS, 2)


async def test_the_budget_of_tokens_ends_it():
    server = Server([*call("1"), "tool_calls"], [{"content": "la"}, "length"])
    [trajectory] = await rolled(server, tool=Tool(), max_tokens=150)
    assert [request["max_tokens"] for request in server.requests] == [150, 50]
    assert trajectory.stop is StopReason.LENGTH
    server = Server([*call("1"), "tool_calls"])
    [trajectory] = await rolled(server, tool=Tool(), max_tokens=100)
    assert trajectory.stop is StopReason.LENGTH
    assert len(trajectory.turns) == 1


async def test_a_server_that_is_too_slow_is_the_deadlines():
    [trajectory] = await rolled(Server([Server.HANG]), tool=Tool(), deadline_s=0.05)
    assert (trajectory.stop, trajectory.turns, trajectory.error) == (StopReason.DEADLINE, (), None)


async def test_surplus_calls_are_dropped_or_refused():
    turn = [*call("1"), *call("2", at=1), "tool_calls"]
    for surplus, outcomes in (("drop", ["ok"]), ("refuse", ["ok", "error"])):
        tool = Tool()
        server = Server(turn, ANSWER)
        [trajectory] = await rolled(server, tool=tool, max_calls_per_turn=1, surplus_calls=surplus)
        assert tool.codes == ["1"]
        assert [use.outcome for use in trajectory.tool_uses] == outcomes
        assert sum(message["role"] == "tool" for message in server.requests[1]["messages"]) == len(outcomes)


@pytest.mark.parametrize("turn", [[*raw_call('{"code": "1'), "tool_calls"], [*call("1", name="bash"), "tool_calls"]])
async def test_a_wrong_call_is_answered_and_counted_and_not_run(turn):
    tool = Tool()
    [trajectory] = await rolled(Server(turn, ANSWER), tool=tool)
    assert tool.codes == []
    [use] = trajectory.tool_uses
    assert use.failed
    assert not use.executed
    assert trajectory.stop is StopReason.ANSWER


async def test_a_call_that_the_server_leaves_in_the_text_counts_as_failed():
    [trajectory] = await rolled(Server([{"content": "<tool_call>{bad</tool_call>"}, "stop"]), tool=Tool())
    assert [use.outcome for use in trajectory.tool_uses] == ["malformed"]
    assert trajectory.stop is StopReason.ANSWER


async def test_a_sandbox_that_loses_a_call_is_no_answer():
    [trajectory] = await rolled(Server([*call("1"), "tool_calls"]), tool=Tool("lost"))
    assert (trajectory.stop, trajectory.error.boundary) == (StopReason.ERROR, Boundary.SANDBOX)


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_a_request_that_is_refused_or_fails_is_no_answer(status):
    [trajectory] = await rolled(Server((status, "the jail is gone")), tool=Tool())
    assert (trajectory.stop, trajectory.error.boundary) == (StopReason.ERROR, Boundary.ENDPOINT)
    assert "the jail is gone" in trajectory.error.message


@pytest.mark.parametrize("turn", [[Server.DIE], (401, "no"), (404, "no such model")])
async def test_a_server_that_is_gone_or_cannot_be_used_ends_the_job(turn):
    with pytest.raises(EndpointFailed, match="url"):
        await rolled(Server(turn), tool=Tool())


TRACE = {
    "stop": "turns",
    "turns": [
        {
            "text": "I compute.",
            "tokens": 7,
            "cached_tokens": 0,
            "calls": [{"name": "python", "arguments": {"code": "1"}, "outcome": "error", "reply": "E", "seconds": 0.1}],
        },
        {"text": "\\boxed{42}", "tokens": 5, "cached_tokens": 32, "calls": []},
    ],
}


async def test_a_server_that_runs_the_calls_is_counted_by_its_trace():
    server = Server([{"content": "\\boxed{42}"}, "length"], trace=TRACE)
    [trajectory] = await rolled(server)
    assert "tools" not in server.requests[0]
    assert trajectory.stop is StopReason.TURNS
    assert [turn.end - turn.start for turn in trajectory.turns] == [7, 5]
    assert [(use.name, use.failed) for use in trajectory.tool_uses] == [("python", True)]
    assert trajectory.text == "I compute.\\boxed{42}"


async def test_a_server_without_tools_is_the_model_alone():
    answered, cut = Server(ANSWER), Server([{"content": "la"}, "length"])
    assert [(await rolled(server))[0].stop for server in (answered, cut)] == [StopReason.ANSWER, StopReason.LENGTH]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"problem": f"6 * {n}?", "answer": "42"}) + "\n" for n in range(3)))
    return path


def arguments_of(url, data, model="served"):
    return [f"url={url}", f"model={model}", f"sets={data}", f"output={data.parent / 'out'}", *OPTIONS]


async def evaluated(url, data, *options, model="served"):
    """Exit code and error output of the program."""
    arguments = [*arguments_of(url, data, model), *options]
    process = await asyncio.create_subprocess_exec(*PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE)
    _, err = await asyncio.wait_for(process.communicate(), 100)
    return process.returncode, err.decode()


async def test_an_evaluation_of_a_server_that_dies_goes_on_by_the_same_command(data):
    rows = data.parent / "out" / "sums.samples.jsonl"
    async with Server(ANSWER, [Server.DIE], [Server.DIE], [Server.DIE]).running() as server:
        code, err = await evaluated(server.url, data)
        assert (code, err.count("\n")) == (1, 1)
        assert server.url in err
        with RowFile(rows) as file:
            assert len(file.done) == 1
        server.turns = [ANSWER, ANSWER]
        code, err = await evaluated(server.url, data)
        assert (code, err) == (0, "")
    figures = json.loads((data.parent / "out" / "evaluation.json").read_text())["sets"]["sums"]
    assert (figures["problems"], figures["accuracy"], figures["tokens_per_rollout"]) == (3, 1.0, 40)
    code, err = await evaluated(server.url, data)  # it is complete, and the server is not there any more
    assert (code, err) == (0, "")
    code, err = await evaluated(server.url, data, model="other")
    assert code == 2
    assert "served_model" in err


async def test_a_model_that_the_server_does_not_have_is_named_in_one_line(data):
    async with Server().running() as server:
        code, err = await evaluated(server.url, data, model="other")
    assert (code, err.count("\n")) == (1, 1)
    assert "'other'" in err
    assert "served" in err


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("localhost:8000", [], "url"),
        ("http://", [], "url"),
        ("", ["server_tools=true"], "server_tools"),
    ],
)
async def test_options_that_cannot_be_are_named(data, url, options, named):
    code, err = await evaluated(url, data, *options)
    assert code == 2
    assert named in err


async def test_ctrl_c_ends_it_cleanly(data):
    async with Server([Server.HANG]).running() as server:
        arguments = arguments_of(server.url, data)
        process = await asyncio.create_subprocess_exec(*PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE)
        while not server.requests:  # noqa: ASYNC110  the program has no other sign of life
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "Traceback" not in err.decode()
