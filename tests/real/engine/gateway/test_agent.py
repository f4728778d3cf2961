"""Agents as a source of rollouts: what they ask for is their trajectory, and nothing of them is left when it is out."""

import asyncio
import json
import os
import shlex
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI

from engine.fleet.fleet import Superseded
from engine.gateway.agent import AgentFailed, AgentRollouts, Endpoint
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.program import Command
from engine.replica.port import ReplicaDied
from engine.rollout.rollout import RolloutConfig, Tally
from engine.telemetry.in_flight import unwatched
from engine.types import Boundary, StopReason
from sandbox.http.listener import Address
from tests.support.fakes import Gate, a_prompt
from tests.support.node import CHAT, END, Setup, call

ANSWER = f"<answer>42</answer>{END}"


@asynccontextmanager
async def agents(agent, *turns, deadline_s=60.0, token="", at_once=None, stop_s=10.0, **budget):
    async with Setup(*turns) as node:
        node.notes = []
        gateway = Gateway(node.fleet, CHAT, node.timeline, GatewayConfig(), node.notes.append)
        async with serve(gateway, ServerConfig(model="tiny", address=Address(token=token))) as address:
            config = RolloutConfig(max_tokens=400, deadline_s=deadline_s, **budget)
            node.rollouts = AgentRollouts(
                agent,
                config,
                gateway,
                address=address,
                model="tiny",
                seed=3,
                token=token,
                at_once=at_once,
                stop_s=stop_s,
            )
            node.gateway = gateway
            yield node
            assert len(gateway) == 0, "a session is left"


async def ask(prompt, endpoint, times=1, **options):
    """An agent that asks so many times."""
    messages = [*prompt.messages]
    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
        for _ in range(times):
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages, **options)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return answer.choices[0].message.content


async def test_what_an_agent_asks_for_is_its_trajectory():
    async with agents(ask, [ANSWER]) as node:
        tally = Tally(watched=(watched := unwatched()))
        trajectory = await node.rollouts.run(a_prompt(text="What is 6 * 7?"), 0, 0, tally=tally)
        assert (trajectory.stop, trajectory.error) == (StopReason.ANSWER, None)
        assert trajectory.answer == trajectory.final_text == "<answer>42</answer>"
        assert trajectory.sampled_tokens == tally.tokens == node.rollouts.tokens_sampled > 0
        assert (watched.state, watched.turn, watched.tokens, watched.replica) == ("agent", 1, tally.tokens, 0)


async def test_sub_agents_at_once_are_segments_of_one_trajectory():
    async def agent(prompt, endpoint):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(ask(prompt, endpoint))

    async with agents(agent, [ANSWER]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert len(trajectory.parts) == 3
        assert trajectory.sampled_tokens == 3 * len(CHAT._encode(ANSWER))


async def test_an_agent_that_raises_is_an_error_of_its_own_boundary(caplog):
    async def agent(prompt, endpoint):
        await ask(prompt, endpoint)
        raise KeyError("the agent's own bug")

    async with agents(agent, [ANSWER]) as node:
        for _ in range(2):
            trajectory = await node.rollouts.run(a_prompt(), 0, 0)
            assert (trajectory.stop, trajectory.error.boundary) == (StopReason.ERROR, Boundary.AGENT)
            assert "own bug" in trajectory.error.message
    assert sum("an agent failed" in record.message for record in caplog.records) == 1, "the first traceback only"


async def test_an_agent_that_never_asks_is_an_error():
    async def agent(prompt, endpoint):
        return "42"

    async with agents(agent) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.error.boundary) == (StopReason.ERROR, Boundary.AGENT)


def failed_for(trajectory, *words):
    assert (trajectory.stop, trajectory.error.boundary) == (StopReason.ERROR, Boundary.AGENT)
    assert trajectory.reward is None
    for word in words:
        assert word in trajectory.error.message
    return True


@pytest.mark.parametrize("caught", [False, True])
async def test_an_agent_whose_first_request_does_not_fit_has_failed_and_says_so(caught):
    async def agent(prompt, endpoint):
        with suppress(*[Exception] * caught):
            await ask(a_prompt(text="long " * 900), endpoint)

    async with agents(agent) as node:
        assert failed_for(await node.rollouts.run(a_prompt(), 0, 0), "maximum context length is 400")


async def test_an_agent_whose_deadline_ends_before_its_first_turn_has_failed():
    async with agents(ask, ["one", Gate(), ANSWER], deadline_s=0.2) as node:
        assert failed_for(await node.rollouts.run(a_prompt(), 0, 0), "deadline of 0.2 s")
        assert node.replicas.made[0].in_flight == 0


async def cancels_inside(prompt, endpoint):
    await ask(prompt, endpoint)
    part = asyncio.ensure_future(asyncio.sleep(60))
    part.cancel()
    await part


async def exits(prompt, endpoint):
    sys.exit(3)


async def cancels_itself(prompt, endpoint):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def exits_in_a_group(prompt, endpoint):
    raise BaseExceptionGroup("parts", [SystemExit(3)])


async def awaits_a_task_that_exits(prompt, endpoint):
    await asyncio.create_task(exits(prompt, endpoint))


async def gathers_one_that_exits(prompt, endpoint):
    await asyncio.gather(ask(prompt, endpoint, times=9), exits(prompt, endpoint))


async def groups_one_that_exits(prompt, endpoint):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(prompt, endpoint, times=9))
        tasks.create_task(awaits_a_task_that_exits(prompt, endpoint))


EXIT = [exits, exits_in_a_group, awaits_a_task_that_exits, gathers_one_that_exits, groups_one_that_exits]


@pytest.mark.parametrize("agent", [cancels_inside, cancels_itself, *EXIT])
async def test_what_ends_an_agent_ends_no_run(agent):
    async with agents(agent, [ANSWER]) as node:
        word = "cancelled" if "cancel" in agent.__name__ else "SystemExit: 3"
        assert failed_for(await node.rollouts.run(a_prompt(), 0, 0), word)


async def test_an_agent_that_keeps_its_stop_to_itself_is_stopped_all_the_same():
    started = asyncio.Event()

    async def agent(prompt, endpoint):
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return "42"

    async with agents(agent) as node, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(node.rollouts.run(a_prompt(), 0, 0))
        await started.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()


async def goes_on():
    """Keeps each cancellation to itself."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


async def goes_on_asking(prompt, endpoint):
    client = clients[0].with_options(base_url=endpoint.openai_url)
    while True:
        with suppress(asyncio.CancelledError, APIError):
            await client.chat.completions.create(model="tiny", messages=[*prompt.messages])


async def goes_on_beside(prompt, endpoint):
    await ask(prompt, endpoint)
    async with asyncio.TaskGroup() as tasks:
        beside.append(tasks.create_task(until_told()))


beside, told, clients = [], [], []


async def until_told():
    while not told:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


async def gathers_one_that_goes_on(prompt, endpoint):
    await ask(prompt, endpoint)
    other = asyncio.ensure_future(until_told())
    beside.append(other)
    await asyncio.gather(other)


async def goes_on_alone(prompt, endpoint):
    await goes_on()


@pytest.mark.parametrize("agent", [goes_on_alone, goes_on_asking, goes_on_beside, gathers_one_that_goes_on])
async def test_an_agent_that_keeps_its_deadline_to_itself_is_dropped_counted_and_said(agent):
    for each in (beside, told, clients):
        each.clear()
    async with (
        AsyncOpenAI(base_url="http://x", api_key="x", max_retries=0) as client,
        agents(agent, *[[ANSWER]] * 9, deadline_s=1.5, stop_s=0.2) as node,
    ):
        clients.append(client)
        try:
            async with asyncio.timeout(20):
                found = await asyncio.gather(*[node.rollouts.run(a_prompt(), sample, 0) for sample in range(2)])
        finally:
            told.append(True)  # else the loop would wait for those that go on
            await asyncio.gather(*beside)
        for trajectory in found:
            if agent is goes_on_alone:
                assert failed_for(trajectory, "deadline of 1.5 s")
            else:
                assert (trajectory.stop, trajectory.error) == (StopReason.DEADLINE, None)
        assert node.replicas.made[0].in_flight == 0
        assert sum("dropped" in note for note in node.notes) == 1, "the first one only"
        assert "2 agents" in node.gateway.dropped_line()


async def test_what_an_agent_says_can_be_written_whatever_it_is():
    class Unspeakable(Exception):
        def __str__(self):
            raise KeyError("no words")

    async def agent(prompt, endpoint):
        await ask(prompt, endpoint)
        if prompt.id == "half":
            return "half of \ud83d"
        raise Unspeakable if prompt.id == "none" else ValueError("half of \ud83d")

    async with agents(agent, [ANSWER]) as node:
        prompt = a_prompt()
        answered = await node.rollouts.run(replace(prompt, id="half"), 0, 0)
        assert answered.answer == "half of ?"
        assert failed_for(await node.rollouts.run(replace(prompt, id="failed"), 0, 0), "half of ?")
        assert failed_for(await node.rollouts.run(replace(prompt, id="none"), 0, 0), "Unspeakable")


@pytest.mark.parametrize("answer", [42, {"a": 1}, b"42"])
async def test_an_answer_that_is_no_text_is_refused_by_name(answer):
    async def agent(prompt, endpoint):
        await ask(prompt, endpoint)
        return answer

    async with agents(agent, [ANSWER]) as node:
        assert failed_for(await node.rollouts.run(a_prompt(), 0, 0), repr(answer))


async def test_waiting_for_a_place_is_not_the_agents_time():
    async with agents(partial(ask, times=2), [ANSWER], [ANSWER], deadline_s=0.5) as node:
        node.fleet.hold(True)
        running = asyncio.ensure_future(node.rollouts.run(a_prompt(), 0, 0))
        done, _ = await asyncio.wait([running], timeout=0.8)
        assert not done
        node.fleet.hold(False)
        trajectory = await running
        assert (trajectory.stop, trajectory.error, len(trajectory.turns)) == (StopReason.ANSWER, None, 2)


async def test_agents_beyond_those_that_may_run_at_once_wait_and_lose_no_time():
    running, most = set(), []

    async def agent(prompt, endpoint):
        running.add(endpoint.key)
        most.append(len(running))
        await asyncio.sleep(0.15)
        answer = await ask(prompt, endpoint)
        running.discard(endpoint.key)
        return answer

    async with agents(agent, [ANSWER], deadline_s=1.0, at_once=2) as node, asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(node.rollouts.run(a_prompt(), sample, 0)) for sample in range(12)]
    assert max(most) == 2
    assert {task.result().stop for task in found} == {StopReason.ANSWER}


async def test_requests_that_were_refused_are_counted_and_the_last_one_is_in_the_error():
    async def agent(prompt, endpoint):
        with suppress(Exception):
            await ask(prompt, endpoint, logit_bias={"5": 1})

    async with agents(agent) as node:
        for _ in range(3):
            assert failed_for(await node.rollouts.run(a_prompt(), 0, 0), "without a finished turn", "logit_bias")
        assert node.gateway.counts.refused == 3
        assert "3 for 'logit_bias'" in node.gateway.refused_line()
    assert sum("refused" in note for note in node.notes) == 1, "the first of a kind only"


async def test_any_name_of_a_model_means_the_one_that_is_trained():
    async def agent(prompt, endpoint):
        return await ask(prompt, replace(endpoint, model="gpt-4o-mini"))

    async with agents(agent, [ANSWER]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, node.gateway.counts.renamed) == (StopReason.ANSWER, 1)


async def test_agents_elsewhere_come_with_a_token():
    async with agents(ask, [ANSWER], token="secret") as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.error) == (StopReason.ANSWER, None)


@pytest.mark.parametrize(
    ("budget", "stop"), [({"max_turns": 1}, StopReason.TURNS), ({"max_turns": 100}, StopReason.LENGTH)]
)
async def test_an_agent_that_is_refused_a_turn_has_used_its_budget_up(budget, stop):
    turns = [["a" * 40 + END]] * 40
    async with agents(partial(ask, times=40), *turns, **budget) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.error) == (stop, None)


async def test_an_agent_that_raises_for_a_turn_that_was_cut_off_has_used_its_budget_up():
    async def agent(prompt, endpoint):
        async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
            response = await client.responses.create(model=endpoint.model, input=[*prompt.messages])
            raise RuntimeError(f"the response is {response.status}")

    async with agents(agent, [ANSWER], max_response_tokens=3) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.error) == (StopReason.LENGTH, None)
        assert trajectory.sampled_tokens == 3


async def test_at_the_deadline_the_request_ends_and_what_there_is_counts():
    gate = Gate()
    async with agents(partial(ask, times=2), [ANSWER], ["one", gate, ANSWER], deadline_s=0.5) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.error) == (StopReason.DEADLINE, None)
        assert trajectory.text == ANSWER
        assert node.replicas.made[0].in_flight == 0


async def test_a_request_that_outlives_its_agent_is_cut_off_with_it():
    gate = Gate()

    async def agent(prompt, endpoint):
        await ask(prompt, endpoint)
        more = asyncio.ensure_future(ask(prompt, endpoint, times=2))
        left.append(more)
        await gate.started.wait()

    left = []
    async with agents(agent, [ANSWER], ["one", gate, ANSWER]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert trajectory.stop is StopReason.ANSWER
        assert node.replicas.made[0].in_flight == 0
        with suppress(Exception):
            await left[0]


async def test_replicas_that_die_are_our_error_and_not_the_agents():
    async with agents(ask, [ANSWER]) as node:
        node.fleet.on_none_left(ReplicaDied("all gone"))
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.error.boundary, trajectory.reward) == (Boundary.REPLICA, None)


async def test_an_agent_whose_weights_were_superseded_begins_again(monkeypatch):
    times = []

    async def agent(prompt, endpoint):
        times.append(endpoint.key)
        return await ask(prompt, endpoint)

    async with agents(agent, [ANSWER]) as node:
        whole = node.fleet.turn

        async def turn(*arguments, **options):
            if len(times) == 1:
                raise Superseded("new weights")
            async for found in whole(*arguments, **options):
                yield found

        monkeypatch.setattr(node.fleet, "turn", turn)
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, len(times)) == (StopReason.ANSWER, 2)
        assert len(set(times)) == 2


PROGRAM = """
import json, os, subprocess, sys, time, urllib.request
task = json.load(sys.stdin)
assert "answer" not in task
if "sleep" in sys.argv:
    subprocess.Popen(["sleep", "1000"])
    print(os.getpgid(0), file=open(sys.argv[2], "w"))
    time.sleep(1000)
if "fail" in sys.argv:
    sys.exit("no luck today")
body = json.dumps({"model": os.environ["ROCSTAR_MODEL"], "messages": task["messages"]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
print("thinking")
print(answer["choices"][0]["message"]["content"])
"""


async def test_a_program_is_an_agent():
    async with agents(Command(argv=(sys.executable, "-c", PROGRAM)), [ANSWER]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWER, "<answer>42</answer>")


async def test_a_program_that_fails_is_named_with_its_last_line():
    async with agents(Command(argv=(sys.executable, "-c", PROGRAM, "fail"))) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert trajectory.error.boundary is Boundary.AGENT
        assert "no luck today" in trajectory.error.message
    async with agents(Command(argv=("/no/such/program",))) as node:
        assert "/no/such/program" in (await node.rollouts.run(a_prompt(), 0, 0)).error.message


@pytest.mark.parametrize("outlives", ["sleep 300 &", "setsid sleep 3 &"])
async def test_a_program_that_leaves_a_process_with_its_output_has_ended(outlives):
    script = f"{shlex.join([sys.executable, '-c', PROGRAM])}; {outlives} echo 42"
    async with agents(Command(argv=("sh", "-c", script)), [ANSWER], deadline_s=30.0) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWER, "42")
        assert trajectory.finished_at - trajectory.started_at < 20


async def test_a_program_is_told_its_task_and_its_model_in_its_arguments():
    show = "import os, sys; print(*sys.argv[1:], os.environ['OPENAI_MODEL'], os.environ['ANTHROPIC_MODEL'])"
    argv = (sys.executable, "-c", show, "-p", "{prompt}", "{model}", "{openai_url}", "{other}")
    prompt = a_prompt(text="what is {model}?")
    endpoint = Endpoint(openai_url="http://x/v1", anthropic_url="http://x", key="k", model="m")
    assert await Command(argv=argv)(prompt, endpoint) == "-p what is {model}? m http://x/v1 {other} m m"


async def test_a_program_with_the_prompt_in_its_arguments_finds_nothing_on_standard_input():
    endpoint = Endpoint(openai_url="", anthropic_url="", key="", model="")
    argv = (sys.executable, "-c", "import sys; print(sys.argv[1:], sys.stdin.read())")
    assert await Command(argv=(*argv, "{prompt}"))(a_prompt(text="add"), endpoint) == "['add']"
    assert '"content": "add"' in await Command(argv=argv)(a_prompt(text="add"), endpoint)


@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": ()},
        {"argv": "true"},
        {"argv": ("true", 5)},
        {"argv": ("true",), "environment": {"A": 5}},
        {"argv": ("true",), "cwd": "/no/such/folder"},
    ],
)
def test_a_command_that_cannot_be_run_is_refused_by_its_field(wrong):
    with pytest.raises(ValueError, match=[*wrong][-1]):
        Command(**wrong)


@pytest.mark.parametrize("argument", ["a\0b", "x" * 3_000_000])
async def test_a_program_that_cannot_start_has_failed(argument):
    endpoint = Endpoint(openai_url="", anthropic_url="", key="", model="")
    with pytest.raises(AgentFailed, match="does not start"):
        await Command(argv=(sys.executable, "-c", "{prompt}"))(a_prompt(text=argument), endpoint)


async def test_a_program_that_prints_without_end_and_reads_nothing_holds_no_memory():
    script = "for i in range(300): print('x' * 100_000)\nprint('end')"
    endpoint = Endpoint(openai_url="", anthropic_url="", key="", model="")
    assert await Command(argv=(sys.executable, "-c", script))(a_prompt(text="y" * 1_000_000), endpoint) == "end"


async def test_a_program_ends_with_its_children_when_its_rollout_is_cancelled(tmp_path):
    file = tmp_path / "group"
    async with agents(Command(argv=(sys.executable, "-c", PROGRAM, "sleep", str(file)))) as node:
        task = asyncio.ensure_future(node.rollouts.run(a_prompt(), 0, 0))
        for _ in range(500):
            if file.exists() and file.read_text().strip():
                break
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        group = int(file.read_text())
        for _ in range(300):
            if not alive(group):
                break
            await asyncio.sleep(0.01)
        assert not alive(group)


def alive(group):
    """Whether a process of the group runs; one that nobody has waited for is dead all the same."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, _, number = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False


async def test_calls_of_an_agent_are_told_by_its_replies():
    async def agent(prompt, endpoint):
        messages = [*prompt.messages]
        tool = {"type": "function", "function": {"name": "python", "parameters": {}}}
        async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
            for failed in (True, False):
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[tool])
                [used] = answer.choices[0].message.tool_calls
                reply = {"role": "tool", "tool_call_id": used.id, "content": "x", "is_error": failed}
                messages += [answer.choices[0].message, reply]
            await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[tool])

    async with agents(agent, [call("1") + END], [call("2") + END], [call("3") + END]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        uses = [(json.loads(use.arguments)["code"], use.outcome) for use in trajectory.tool_uses]
        assert uses == [("1", "error"), ("2", "ok"), ("3", "killed")]
        assert trajectory.stop is StopReason.TURNS, "its last call was not answered"


async def test_an_agent_may_hand_its_answer_in_by_a_call():
    async def agent(prompt, endpoint):
        tool = {"type": "function", "function": {"name": "python", "parameters": {}}}
        async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
            for question in ("for a sub-agent", "for the agent"):
                messages = [{"role": "user", "content": question}]
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[tool])
        return answer.choices[0].message.tool_calls[0].function.arguments

    async with agents(agent, [call("42") + END]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0)
        assert (trajectory.stop, json.loads(trajectory.answer)) == (StopReason.ANSWER, {"code": "42"})
        assert [use.outcome for part in trajectory.parts for turn in part.turns for use in turn.tool_uses] == ["ok"] * 2
