"""What a session leaves is what the replicas sampled, whatever the agent does to its history."""

import asyncio
import json
from contextlib import aclosing, contextmanager
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig, TooManySessions
from engine.gateway.requests import (
    BadRequest,
    Call,
    ChatRequest,
    Finished,
    SamplingOverrides,
    Text,
    TextRequest,
    TooLong,
)
from engine.gateway.session import SessionRules
from engine.replica.port import ReplicaDied
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool, schema
from engine.types import Batch, Segment, StopReason
from tests.support.examples import examples
from tests.support.fakes import Clock, Gate, Replicas, ScriptedRunner, a_prompt, fleet_of, settle
from tests.support.node import CHAT, END, Setup, call

TOOLS = (schema(PythonTool(ScriptedRunner())),)
RULES = SessionRules(max_tokens=400, seed=3, prompt_id="p", fixed=True)
QUESTION = {"role": "user", "content": "What is 6 * 7?"}


def gateway_of(node, **config):
    return Gateway(node.fleet, CHAT, node.timeline, GatewayConfig(**config))


def asked(*messages, tools=TOOLS, **overrides):
    return ChatRequest(messages=messages, tools=tools, overrides=SamplingOverrides(**overrides))


async def answered(session, request, **options):
    """The events of a turn; the last one is Finished."""
    async with aclosing(session.chat(request, **options)) as events:
        return [event async for event in events]


async def say(session, *messages, **options):
    return (await answered(session, asked(*messages, **options)))[-1]


def tool(text, finished, at=0):
    return {"role": "tool", "content": text, "tool_call_id": finished.message["tool_calls"][at]["id"]}


async def talk(session, runner):
    """An agent as simple as the built-in loop, with a tool of its own."""
    messages = [QUESTION]
    while True:
        finished = await say(session, *messages)
        messages.append(finished.message)
        if "tool_calls" not in finished.message:
            return messages
        for each in finished.message["tool_calls"]:
            result = await runner.run(json.loads(each["function"]["arguments"])["code"])
            messages.append({"role": "tool", "content": result.stdout, "tool_call_id": each["id"]})


def told(turn):
    return [(use.name, use.arguments, use.outcome, use.response) for use in turn.tool_uses]


TURNS = (["I compute. " + call("1") + END], [call("2") + " and " + call("3") + END], [f"<answer>42</answer>{END}"])


async def test_an_agent_leaves_the_trajectory_of_the_built_in_loop():
    prompt = a_prompt(text=QUESTION["content"])
    async with Setup(*TURNS) as node:
        wanted = await node.rollouts.run(prompt, 2, 0)
        requests = [(ids, sampling.seed) for ids, sampling, _ in node.replicas.made[0].requests]
    async with Setup(*TURNS) as node:
        gateway = gateway_of(node)
        rules = SessionRules(max_tokens=400, seed=3, prompt_id=prompt.id, sample=2, fixed=True)
        session = gateway.open("s", rules)
        await talk(session, node.runner)
        found = session.trajectory(prompt, StopReason.ANSWER)
        gateway.close("s")
        assert [(ids, sampling.seed) for ids, sampling, _ in node.replicas.made[0].requests] == requests
    for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert (found.text, found.stop, found.seed, found.segments) == (wanted.text, wanted.stop, wanted.seed, ())
    for one, other in zip(found.turns, wanted.turns, strict=True):
        assert (one.start, one.end, one.truncated) == (other.start, other.end, other.truncated)
        uses = [
            [(use.name, use.arguments, use.outcome, use.response) for use in each.tool_uses] for each in (one, other)
        ]
        assert uses[0] == uses[1]


async def test_text_and_calls_come_as_they_are_sampled_without_tags_and_the_end_token():
    gate = Gate()
    first = ["I compute. \n" + call("1"), gate, " done " + END]
    async with Setup(first) as node:
        session = gateway_of(node).open("s", RULES)
        events = []

        async def read():
            async for event in session.chat(asked(QUESTION), stream=True):
                events.append(event)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await gate.started.wait()
            await settle()
            assert "".join(event.text for event in events if isinstance(event, Text)) == "I compute."
            [found] = [event for event in events if isinstance(event, Call)]
            assert (found.name, json.loads(found.arguments)) == ("python", {"code": "1"})
            gate.release()
        finished = events[-1]
        assert (finished.reason, finished.message["content"]) == ("tool_calls", "I compute.")
        ids = [token for event in events if isinstance(event, Text) for token in event.token_ids]
        assert tuple(ids) == finished.token_ids
        session.close()


@pytest.mark.parametrize(
    ("turn", "name", "arguments"),
    [
        ('<tool_call>{"name": "python", "arguments": {"code": }}</tool_call>', "python", '{"code": }'),
        ('<tool_call>{"name": "python", "arguments": 7}</tool_call>', "python", "7"),
        (
            '<tool_call>{"name": "python", "arguments": {"code": "\\ud800"}}</tool_call>',
            "python",
            '{"code": "\\ud800"}',
        ),
        ("<tool_call>what</tool_call>", None, None),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"', "python", '{"code": "1"'),
    ],
)
async def test_a_malformed_call_is_given_raw_where_it_has_a_name_and_as_text_where_not(turn, name, arguments):
    async with Setup(["I try. " + turn + END]) as node:
        session = gateway_of(node).open("s", RULES)
        finished = await say(session, QUESTION)
        if name is None:
            assert (finished.reason, finished.message) == ("stop", {"role": "assistant", "content": "I try. " + turn})
        else:
            [found] = finished.message["tool_calls"]
            assert found["function"] == {"name": name, "arguments": arguments}
        [use] = session.trajectory(a_prompt(), StopReason.ANSWER).tool_uses
        assert (use.outcome, use.failed, use.executed) == ("malformed", True, False)
        session.close()


@pytest.mark.parametrize("arguments", ["", "  "])
async def test_a_call_without_arguments_in_a_history_is_an_empty_object_to_the_model(arguments):
    async with Setup(["the client says it"], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        called = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": arguments}}
        history = [{"role": "assistant", "content": "", "tool_calls": [called]}]
        history.append({"role": "tool", "tool_call_id": "c1", "content": "12"})
        finished = await say(session, QUESTION, *history)
        shown = CHAT.decode(finished.prompt_ids)
        parser = ToolCallParser()
        assert parser.feed(shown) == [ToolCall(name="python", arguments={})]
        session.close()


def results(finished, order, ids=None):
    """Results of the calls of a turn, which come in this order."""
    ids = ids or [each["id"] for each in finished.message["tool_calls"]]
    return [{"role": "tool", "tool_call_id": ids[at], "content": f"result {at}"} for at in order]


@pytest.mark.parametrize("order", [*permutations(range(3)), (2, 0), (2,)])
async def test_the_model_reads_results_in_the_order_of_its_calls(order):
    turn = call("a") + call("b") + call("c") + END
    async with Setup([turn], ["done" + END], ["more" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        history = [QUESTION, first.message, *results(first, order)]
        second = await say(session, *history)
        in_order = [QUESTION, {"role": "assistant", "content": turn.removesuffix(END)}]
        in_order += [{"role": "tool", "content": f"result {at}"} for at in sorted(order)]
        assert CHAT.decode(second.prompt_ids) == CHAT._render(in_order, generate=True)
        again = [*history[:2], *reversed(history[2:]), second.message, QUESTION]
        await say(session, *again)
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        assert trajectory.segments == (), "a history whose results come in another order is the same"
        told = [(use.response, use.outcome) for use in trajectory.tool_uses]
        assert told == [(f"result {at}", "ok") if at in order else ("", "killed") for at in range(3)]
        session.close()


async def test_results_are_of_the_calls_as_the_client_names_them():
    async with Setup([call("a") + call("b") + END], ["done" + END], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        mine = [{**each, "id": f"mine{number}"} for number, each in enumerate(first.message["tool_calls"])]
        renamed = {**first.message, "tool_calls": mine}
        for order in ((0, 1), (1, 0)):
            await say(session, QUESTION, renamed, *results(first, order, ["mine0", "mine1"]))
        one, other = session.trajectory(a_prompt(), StopReason.ANSWER).parts
        assert one.token_ids_T[: one.turns[0].start].tolist() == other.token_ids_T[: other.turns[-1].start].tolist()
        session.close()


@pytest.mark.parametrize(
    "ids", [["call_of_nobody", None], ["first", "first"], [3, None], [["a"], None], [None, None, None]]
)
async def test_a_result_of_no_call_and_a_second_one_are_refused(ids):
    async with Setup([call("a") + call("b") + END]) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        given = [first.message["tool_calls"][0]["id"] if each == "first" else each for each in ids]
        replies = [{"role": "tool", "content": "x", "tool_call_id": each} for each in given]
        with pytest.raises(BadRequest, match=r"message \d"):
            await say(session, QUESTION, first.message, *replies)
        session.close()


@pytest.mark.parametrize(
    "sent",
    [
        "<think>\n\nhmm\n\n</think>\n\n\n\nI add.",
        "<think>hmm</think>I add.",
        "\n<think>\nhmm\n</think>\n\nI add.\n",
    ],
)
async def test_thoughts_that_a_client_puts_together_anew_are_the_same_turn(sent):
    async with Setup(["<think>\nhmm\n</think>\n\nI add." + END], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        await say(session, QUESTION)
        second = await say(session, QUESTION, {"role": "assistant", "content": sent}, QUESTION)
        assert "<think>\nhmm\n</think>\n\nI add." in CHAT.decode(second.prompt_ids), "as it was sampled"
        assert session.trajectory(a_prompt(), StopReason.ANSWER).segments == ()
        session.close()


async def test_another_thought_is_another_turn():
    async with Setup(["<think>\nhmm\n</think>\n\nI add." + END], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        await say(session, QUESTION)
        await say(session, QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nI add."}, QUESTION)
        assert len(session.trajectory(a_prompt(), StopReason.ANSWER).parts) == 2
        session.close()


async def test_calls_of_requests_without_a_session_have_ids_of_their_own():
    """Clients take a call whose id has come before for answered."""
    async with Setup([call("6 * 7") + END], [call("6 * 7") + END]) as node:
        gateway = gateway_of(node, rules=SessionRules(max_tokens=400))
        sessions = [gateway.alone() for _ in range(2)]
        found = [await say(session, QUESTION) for session in sessions]
        ids = [finished.message["tool_calls"][0]["id"] for finished in found]
        assert len(set(ids)) == 2
        for session in sessions:
            session.close()


async def test_a_wait_for_a_place_is_told_to_the_owner_of_the_session():
    waits = []

    @contextmanager
    def waiting():
        waits.append("begins")
        yield
        waits.append("ends")

    async with Setup(["a" + END]) as node:
        session = gateway_of(node).open("s", RULES, waiting=waiting)
        await say(session, QUESTION)
        assert waits == ["begins", "ends"]
        session.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_replies_belong_to_their_calls_in_any_order_and_past_a_call_without_a_name(order):
    turn = "<tool_call>what</tool_call>" + call("1") + call("2")
    async with Setup([turn + END], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        ids = [each["id"] for each in first.message["tool_calls"]]
        replies = [
            {"role": "tool", "tool_call_id": ids[at], "content": f"reply {at}", "is_error": at == 1} for at in order
        ]
        await say(session, QUESTION, first.message, *replies)
        uses = session.trajectory(a_prompt(), StopReason.ANSWER).tool_uses
        assert [(use.outcome, use.response) for use in uses[1:]] == [("ok", "reply 0"), ("error", "reply 1")]
        assert uses[0].outcome == "malformed"
        session.close()


async def test_a_stop_text_ends_the_turn_and_only_the_trajectory_has_it():
    async with Setup(["one two STOP three" + END], ["more" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        events = await answered(session, asked(QUESTION, stop=("STOP", "never")))
        finished = events[-1]
        assert "".join(event.text for event in events if isinstance(event, Text)) == "one two "
        assert (finished.stop, finished.reason, finished.message["content"]) == ("STOP", "stop", "one two ")
        follow_up = await say(session, QUESTION, finished.message, {"role": "user", "content": "go on"})
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        assert trajectory.segments == ()
        assert CHAT.decode(follow_up.prompt_ids).endswith(
            f"one two STOP{END}\n<|im_start|>user\ngo on{END}\n<|im_start|>assistant\n"
        )
        session.close()


async def test_an_edited_history_begins_a_segment_and_a_rewound_one_branches_off():
    async with Setup(*([[f"turn {n}" + END] for n in range(5)])) as node:
        gateway = gateway_of(node)
        session = gateway.open("s", RULES)
        again = {"role": "user", "content": "again"}
        first = await say(session, QUESTION)
        second = await say(session, QUESTION, first.message, again)
        rewound = await say(session, QUESTION, first.message, {"role": "user", "content": "otherwise"})
        edited = await say(session, QUESTION, {"role": "assistant", "content": "turn 9"}, again)
        for each, text in ((rewound, "turn 0"), (edited, "turn 9")):
            last = "again" if each is edited else "otherwise"
            read = [QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": last}]
            assert CHAT.decode(each.prompt_ids) == CHAT._render(read, generate=True)
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        gateway.close("s")
    ends = [[*each.prompt_ids, *each.token_ids] for each in (edited, second, rewound)]
    assert [part.token_ids_T.tolist() for part in trajectory.parts] == ends, "the one that was used last comes first"
    sampled = [int(part.sampled_T.sum()) for part in trajectory.parts]
    lengths = [len(each.token_ids) for each in (edited, second, rewound, first)]
    assert sampled == [lengths[0], lengths[1] + lengths[3], lengths[2]], "what was taken over is sampled in one of them"
    assert trajectory.text == "turn 1" + END, "of the turns that are in the main sequence"
    assert sum(turn.end - turn.start for turn in trajectory.all_turns) == trajectory.sampled_tokens
    batch = Batch.of(0, [trajectory], np.full(1, 2, np.float32))
    assert batch.lengths_B.tolist() == [len(ids) for ids in ends]
    assert batch.advantages_B.tolist() == [2, 2, 2]


async def test_other_tools_are_another_conversation():
    async with Setup(["a" + END], ["b" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        await say(session, QUESTION, first.message, QUESTION, tools=())
        assert len(session.trajectory(a_prompt(), StopReason.ANSWER).parts) == 2
        session.close()


async def test_requests_at_once_have_a_lineage_each():
    async with Setup(*([["same" + END]] * 4)) as node:
        session = gateway_of(node).open("s", RULES)
        first = await say(session, QUESTION)
        more = (QUESTION, first.message, {"role": "user", "content": "and?"})
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(say(session, *more)) for _ in range(3)]
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        assert len(trajectory.parts) == 3
        assert trajectory.sampled_tokens == sum(len(task.result().token_ids) for task in running) + len(first.token_ids)
        seeds = [sampling.seed for _, sampling, _ in node.replicas.made[0].requests]
        assert len(set(seeds)) == 4
        session.close()


async def test_a_request_that_is_given_up_leaves_nothing_and_frees_its_place():
    gate = Gate()
    async with Setup(["half", gate, " more" + END]) as node:
        gateway = gateway_of(node)
        session = gateway.open("s", RULES)
        events = session.chat(asked(QUESTION), stream=True)
        async for _ in events:
            break
        await events.aclose()
        await settle()
        assert node.replicas.made[0].in_flight == 0
        assert gateway.counts.wasted_tokens == 1
        with pytest.raises(ValueError, match="no turn"):
            session.trajectory(a_prompt(), StopReason.ANSWER)
        gateway.close("s")


async def test_budgets_refuse_a_turn_and_say_which_it_was():
    async with Setup(["a" + END], ["b" + END]) as node:
        gateway = gateway_of(node)
        prompt = len(CHAT.prompt_ids([QUESTION]))
        tight = gateway.open("tight", SessionRules(max_tokens=prompt + 3, seed=0))
        first = await say(tight, QUESTION, tools=())
        with pytest.raises(TooLong):
            await say(tight, QUESTION, first.message, QUESTION, tools=())
        once = gateway.open("once", SessionRules(max_tokens=400, max_turns=1, seed=0))
        first = await say(once, QUESTION)
        with pytest.raises(BadRequest, match="1 turns"):
            await say(once, QUESTION, first.message, QUESTION)
        assert (tight.stop, once.stop) == (StopReason.LENGTH, StopReason.TURNS)
        gateway.closing()


async def test_a_turn_is_cut_at_the_tokens_that_the_client_allows():
    async with Setup(["one two three four" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        finished = (await answered(session, asked(QUESTION, max_tokens=2)))[-1]
        assert (finished.reason, len(finished.token_ids)) == ("length", 2)
        assert session.ended_by is StopReason.LENGTH
        session.close()


async def test_fixed_rules_overrule_the_client_and_count_it():
    async with Setup(["a" + END], ["b" + END]) as node:
        gateway = gateway_of(node)
        session = gateway.open("s", RULES)
        await answered(session, asked(QUESTION, temperature=0.1, top_p=0.5, seed=9))
        free = gateway.open("free", SessionRules(max_tokens=400))
        await answered(free, asked(QUESTION, temperature=0.1, top_p=0.5, seed=9))
        (_, fixed, _), (_, loose, _) = node.replicas.made[0].requests
        assert (fixed.temperature, fixed.top_p) == (1.0, 1.0)
        assert (loose.temperature, loose.top_p, loose.seed) == (0.1, 0.5, 9)
        assert gateway.counts.overruled == 1
        gateway.closing()


async def test_plain_tokens_are_completed_without_a_conversation():
    async with Setup([" world" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        request = TextRequest(prompt_ids=tuple(CHAT.prompt_ids([QUESTION])))
        events = [event async for event in session.complete(request)]
        assert "".join(event.text for event in events if isinstance(event, Text)) == " world"
        assert isinstance(events[-1], Finished)
        session.close()


async def test_a_thought_is_told_apart_in_a_chat_and_is_text_in_a_completion():
    async with Setup(["<think>hmm</think>I add." + END]) as node:
        session = gateway_of(node).open("s", RULES)
        request = TextRequest(prompt_ids=tuple(CHAT.prompt_ids([QUESTION])))
        completed = [event async for event in session.complete(request)]
        assert "".join(event.text for event in completed if isinstance(event, Text)) == "<think>hmm</think>I add."
        finished = await say(session, QUESTION)
        assert (finished.message["content"], finished.message["reasoning_content"]) == ("I add.", "hmm")
        session.close()


async def test_the_model_reads_a_thought_that_was_not_sampled_here_in_the_text():
    async with Setup(["the client says it"], ["done" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        sent = {"role": "assistant", "content": "I add.", "reasoning_content": "hmm"}
        finished = await say(session, QUESTION, sent, QUESTION)
        assert "<think>\nhmm\n</think>\n\nI add." in CHAT.decode(finished.prompt_ids)
        session.close()


async def test_sessions_are_bounded_and_idle_ones_of_clients_end():
    async with Setup() as node:
        gateway = gateway_of(node, max_sessions=2, idle_s=1e-9, rules=RULES)
        owned = gateway.open("mine", RULES)
        assert gateway.session("theirs") is gateway.session("theirs")
        assert gateway.session("another") is not None  # the idle one has made room
        assert gateway.session("mine") is owned
        gateway.open("second", RULES)
        with pytest.raises(TooManySessions):
            gateway.open("third", RULES)
        gateway.closing()
        assert len(gateway) == 0


async def test_a_session_knows_what_it_has_taken():
    async with Setup(["a" + END], ["b" + END]) as node:
        gateway = gateway_of(node)
        session = gateway.open("s", RULES)
        first = await say(session, QUESTION)
        second = await say(session, QUESTION, first.message, QUESTION)
        cost = session.cost
        assert (cost["requests"], cost["turns"], cost["lineages"]) == (2, 2, 1)
        assert cost["sampled_tokens"] == len(first.token_ids) + len(second.token_ids) == gateway.counts.sampled_tokens
        assert cost["reused_tokens"] == len(first.prompt_ids) + len(first.token_ids)
        gateway.closing()


async def test_the_death_of_all_replicas_reaches_the_client():
    async with Setup(["a" + END]) as node:
        session = gateway_of(node).open("s", RULES)
        node.fleet.on_none_left(ReplicaDied("gone"))
        with pytest.raises(ReplicaDied):
            await say(session, QUESTION)
        session.close()


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["go on", "edit", "rewind", "repeat", "drop", "tools", "cancel", "both", "new"]),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=14,
)


@examples(60)
@given(moves=MOVES)
def test_whatever_an_agent_does_each_segment_is_what_the_model_saw(moves):
    asyncio.run(random_agent(moves))


def as_read(messages, finished):
    """What the model reads of a conversation: its own turns as it sampled them, the others as the client sent them."""
    said = {each.message["content"]: CHAT.decode(each.token_ids).removesuffix(END) for each in finished}
    raw = [
        {**message, "content": said.get(message["content"], message["content"])}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]
    return CHAT._render([{"role": each["role"], "content": each["content"]} for each in raw], generate=True)


async def random_agent(moves):
    replicas = Replicas(chat=CHAT)
    timeline = Timeline(Clock(tick=0.001))
    fleet = fleet_of(replicas, 2, timeline=timeline)
    async with fleet:
        gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
        session = gateway.open("s", SessionRules(max_tokens=2000, seed=1, prompt_id="p"))
        history, finished, tools = [QUESTION], [], TOOLS

        async def ask(messages):
            found = await say(session, *messages, tools=tools, max_tokens=12)
            assert CHAT.decode(found.prompt_ids) == as_read(messages, finished), "the model read another conversation"
            finished.append(found)
            return found.message

        for move, number in moves:
            if move == "edit":
                history[number % len(history)] = {"role": "user", "content": f"edited {number}"}
            elif move == "rewind":
                del history[1 + number % len(history) :]
            elif move == "drop" and len(history) > 2:
                del history[1 + number % (len(history) - 1)]
            elif move == "tools":
                tools = () if tools else TOOLS
            elif move == "new":
                history = [{"role": "user", "content": f"new {number}"}]
            if move == "cancel":
                events = session.chat(asked(*history, tools=tools, max_tokens=12), stream=True)
                async for _ in events:
                    break
                await events.aclose()
                await settle()
            elif move == "both":
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(ask([*history])) for _ in range(2)]
                history = [*history, running[number % 2].result(), {"role": "user", "content": f"m{number}"}]
            elif move == "repeat":
                await ask(history)
            else:
                history = [*history, await ask(history)]
                for each in history[-1].get("tool_calls", ()):
                    history.append({"role": "tool", "content": f"r{number}", "tool_call_id": each["id"]})
                history.append({"role": "user", "content": f"m{number}"})
        if finished:
            check_exact(session.trajectory(a_prompt(), StopReason.ANSWER), finished)
        gateway.close("s")
        assert fleet._turns == fleet._homes == {}
        assert gateway.counts.wasted_tokens <= sum(move == "cancel" for move, _ in moves) * 12


def check_exact(trajectory, finished):
    """Each turn of each segment is one that a replica sampled after exactly the ids before it; none is there twice."""
    sampled = {}
    for each in finished:
        sampled.setdefault((each.prompt_ids, each.token_ids), []).append(each)
    seen = 0
    for part in trajectory.parts:
        assert isinstance(part, Segment) or part is trajectory
        spans = np.zeros(len(part.token_ids_T), bool)
        for turn in part.turns:
            spans[turn.start : turn.end] = True
            ids = part.token_ids_T.tolist()
            key = tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])
            assert sampled.get(key), "no replica sampled this turn after these tokens"
            one = sampled[key].pop()
            np.testing.assert_allclose(part.logprobs_T[turn.start : turn.end], one.logprobs, rtol=1e-6)
            seen += 1
        np.testing.assert_array_equal(spans, part.sampled_T)
    assert seen == len(finished), "each turn is in exactly one segment"
