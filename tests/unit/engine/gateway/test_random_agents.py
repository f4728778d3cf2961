"""Agents that branch, edit, compact, retry and go away, over all dialects: each token is sampled in one segment.

An agent keeps several conversations in one session, its sub-agents' included, and continues each in any dialect.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections import Counter, defaultdict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.requests import BadRequest
from engine.gateway.session import SessionRules
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.telemetry.timeline import Timeline
from engine.types import Segment, StopReason
from tests.support.dialects import (
    HABITS,
    AnthropicDialect,
    OpenAiDialect,
    Reply,
    ResponsesDialect,
    Result,
    Said,
    as_it_came,
    ask_and_leave,
    thought_in_text,
    without_thought,
)
from tests.support.examples import examples
from tests.support.fakes import Clock, Gate, Replicas, a_prompt, conversation, fleet_of, settle
from tests.support.node import CHAT, END, call
from tests.support.paths import TINY

DIALECTS = OpenAiDialect(CHAT), AnthropicDialect(CHAT), ResponsesDialect(CHAT)
MARK = "#reply#"
ASKED = Said(role="user", text="What is 6 * 7?")


def written(token_ids, sampling):
    """A turn of a model that thinks, speaks and calls, in pieces between which others get a turn."""
    drawn = random.Random(zlib.crc32(repr((token_ids, sampling.seed)).encode()))
    turn = drawn.choice(["", f"<think>\nhm {drawn.randrange(3)}\n</think>\n\n"]) + drawn.choice(
        ["", "I say ", "It is "]
    )
    turn += str(drawn.randrange(4)) * drawn.randrange(2)
    turn += "".join(call(str(drawn.randrange(3))) for _ in range(drawn.choice([0, 0, 1, 2])))
    for piece in (turn[at : at + 9] for at in range(0, len(turn), 9)):
        gate = Gate()
        gate.release()
        yield gate
        yield piece
    yield END


async def at_once(*asked):
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in asked]
    return [task.result() for task in running]


class Agent:
    """conversations: what it would send next in each. replies: all that it got."""

    def __init__(self, session, draw):
        self.session = session
        self.draw = draw
        self.conversations = [[ASKED]]
        self.replies = []
        self.left = self.refused = 0
        self.versions = defaultdict(set)  # of each reply: as it was sampled, and as it was ever sent back

    async def ask(self, items, *, tools=True, habit=None, dialect=None, max_tokens=60):
        """Sends a conversation and returns it with the reply and what the agent says next.

        A refused one begins anew: after an edit, a result may be without its call.
        """
        draw, habit = self.draw, habit or self.draw.choice(HABITS)
        dialect = dialect or draw.choice(DIALECTS)
        sent = [habit(item) if isinstance(item, Reply) else item for item in items]
        if isinstance(dialect, ResponsesDialect):  # it has no other place for a thought
            sent = [thought_in_text(item) if isinstance(item, Reply) else item for item in sent]
        data = dialect.body(sent, tools=tools, max_tokens=max_tokens)
        try:
            reply = await dialect.ask(self.session, data, stream=draw.random() < 0.5)
        except BadRequest:
            self.refused += 1
            return [ASKED]
        self.check_read(sent, reply)
        self.replies.append(reply)
        results = [Result(call=each, text=f"result {draw.randrange(3)}") for each, _, _ in reply.whole_calls]
        draw.shuffle(results)
        return [*items, reply, *results, Said(role="user", text=f"Go on {draw.randrange(3)}.")]

    def check_read(self, sent, reply):
        """The model read the conversation as it was sent, and of its own turns what was sampled or sent before."""
        replies = [item for item in sent if isinstance(item, Reply)]
        for each in replies:
            self.versions[id(each.finished)].add(as_sent(each))
        shown = CHAT.decode(reply.finished.prompt_ids)
        versions = [self.versions[id(each.finished)] | self.without_thought(each) for each in replies]
        assert is_made_of(shown, rendered(sent), versions), "the model read another conversation"
        self.versions[id(reply.finished)].add(as_sampled(reply))

    def without_thought(self, sent):
        """The versions of all replies that look like one that comes back without its thought: it may be any of them."""
        if sent.thought or "</think>" in sent.text:
            return set()
        same = [each for each in self.replies if looks(each) == looks(sent)]
        return {version for each in same for version in self.versions[id(each.finished)]}

    async def leave(self, items):
        dialect = self.draw.choice(DIALECTS)
        with suppress(BadRequest):
            await ask_and_leave(self.session, dialect.request(dialect.body(items, tools=True, max_tokens=60)))
            self.left += 1
        await settle()

    async def act(self, move, number):
        at = number % len(self.conversations)
        items = self.conversations[at]
        if move == "go on":
            self.conversations[at] = await self.ask(items)
        elif move == "retry":  # the first answer does not reach the client
            await self.ask(items)
            self.conversations[at] = await self.ask(items)
        elif move == "leave":
            await self.leave(items)
        elif move == "leave and retry":
            await self.leave(items)
            self.conversations[at] = await self.ask(items)
        elif move == "branch":  # all of them go on
            self.conversations[at : at + 1] = await at_once(*(self.ask(items) for _ in range(2 + number % 2)))
        elif move == "race":  # one of them goes on; another one is left
            _, *others = await at_once(self.leave(items), self.ask(items), self.ask(items))
            self.conversations[at] = others[number % 2]
        elif move == "sub-agent":  # beside a turn of the agent itself
            task = [Said(role="system", text=f"You are helper {number}."), Said(role="user", text="Look.")]
            self.conversations[at], helped = await at_once(self.ask(items), self.ask(task))
            self.conversations.append(helped)
        elif move == "compact":
            self.conversations[at] = [Said(role="user", text=f"So far: {number}. Go on.")]
        elif move == "edit":
            items[number % len(items)] = Said(role="user", text=f"edited {number}")
        elif move == "put words":
            put = [Said(role="assistant", text=f"I said {number}."), Said(role="user", text="You did.")]
            items[number % len(items) : number % len(items)] = [Said(role="user", text="Say it."), *put]
        elif move == "rewind":
            del items[1 + number % len(items) :]
            items.append(Said(role="user", text="Otherwise."))
        elif move == "system":
            items.insert(1 + number % len(items), Said(role="system", text=f"reminder {number}"))
        elif move == "other tools":
            self.conversations[at] = await self.ask(items, tools=False)
        del self.conversations[6:]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["go on"] * 3
            + ["retry", "leave", "leave and retry", "branch", "race", "sub-agent", "compact", "edit", "put words"]
            + ["rewind", "system", "other tools"]
        ),
        st.integers(0, 11),
    ),
    min_size=1,
    max_size=10,
)


@examples(60)
@given(moves=MOVES, seed=st.integers(0, 1 << 16))
def test_each_token_is_sampled_in_one_segment_as_the_model_saw_it(moves, seed):
    asyncio.run(live(moves, seed))


async def live(moves, seed):
    timeline = Timeline(Clock(tick=0.001))
    fleet = fleet_of(Replicas(chat=CHAT, script=written), 2, timeline=timeline)
    async with fleet:
        gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
        session = gateway.open("s", SessionRules(max_tokens=2000, seed=1, prompt_id="p"))
        agent = Agent(session, random.Random(seed))
        for move, number in moves:
            await agent.act(move, number)
        if agent.replies:
            check_exact(session.trajectory(a_prompt(), StopReason.ANSWER), [each.finished for each in agent.replies])
        assert session.turns == len(agent.replies)
        gateway.close("s")
        assert fleet._turns == fleet._homes == {}
        assert (gateway.counts.wasted_tokens > 0) <= (agent.left > 0)


def rendered(items):
    """The conversation as the template shows it, in the pieces around its replies."""
    messages, calls, results = [], [], 0
    for item in [*items, None]:
        if calls and not isinstance(item, Result):  # they come in the order of the calls
            ordered = sorted(messages[len(messages) - results :], key=lambda each: calls.index(each["id"]))
            messages[len(messages) - results :] = ordered
            calls = []
        if isinstance(item, Result):
            messages.append({"role": "tool", "content": item.text, "id": item.call})
            results += 1
        elif isinstance(item, Reply):
            calls, results = [each for each, _, _ in item.calls], 0
            messages.append({"role": "assistant", "content": MARK})
        elif item is not None:
            messages.append({"role": item.role, "content": item.text})
    return CHAT._render(messages, generate=True).split(MARK)


def looks(reply):
    """A turn as the gateway compares it, but for its thought."""
    calls = [(name, json.loads(arguments)) for _, name, arguments in reply.whole_calls]
    return "".join(reply.content.split()), calls


def as_sampled(reply):
    return CHAT.decode(reply.finished.token_ids).removesuffix(END)


def as_sent(reply):
    thought = f"<think>\n{reply.thought}\n</think>\n\n" if reply.thought else ""
    calls = [{"function": {"name": name, "arguments": json.loads(text)}} for _, name, text in reply.whole_calls]
    message = {"role": "assistant", "content": thought + reply.content, "tool_calls": calls}
    whole = CHAT._render([message], generate=False)
    return whole.removeprefix("<|im_start|>assistant\n").removesuffix(f"{END}\n")


def is_made_of(shown, pieces, versions):
    """Whether a text is these pieces with one of the versions between each two."""
    if not versions:
        return shown == pieces[0]
    if not shown.startswith(pieces[0]):
        return False
    rest = shown[len(pieces[0]) :]
    return any(
        rest.startswith(each) and is_made_of(rest[len(each) :], pieces[1:], versions[1:]) for each in versions[0]
    )


def check_exact(trajectory, finished):
    """Each turn of each segment is one that a replica sampled after exactly the ids before it; none is there twice."""
    wanted = Counter((each.prompt_ids, each.token_ids) for each in finished)
    found = Counter()
    for part in trajectory.parts:
        assert isinstance(part, Segment) or part is trajectory
        ids, sampled = part.token_ids_T.tolist(), 0
        for turn in part.turns:
            found[tuple(ids[: turn.start]), tuple(ids[turn.start : turn.end])] += 1
            assert part.sampled_T[turn.start : turn.end].all()
            sampled += turn.end - turn.start
        assert part.sampled_T.sum() == sampled, "a token counts as sampled that is in no turn"
    assert found == wanted


@pytest.mark.parametrize("first", DIALECTS)
@pytest.mark.parametrize("second", DIALECTS)
@pytest.mark.parametrize("habit", [*HABITS, None])
def test_a_conversation_stays_one_lineage_whatever_clients_do_to_its_turns(first, second, habit):
    async def talk():
        timeline = Timeline(Clock(tick=0.001))
        async with fleet_of(Replicas(chat=CHAT, script=written), timeline=timeline) as fleet:
            for key in range(3):
                gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
                session = gateway.open(f"s{key}", SessionRules(max_tokens=3000, seed=key, prompt_id="p"))
                agent, items = Agent(session, random.Random(key)), [ASKED]
                for turn in range(5):
                    dialect = (first, second)[turn % 2]
                    items = await agent.ask(items, habit=habit, dialect=dialect, max_tokens=200)
                trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
                assert (trajectory.segments, agent.refused) == ((), 0)
                check_exact(trajectory, [each.finished for each in agent.replies])
                gateway.closing()

    asyncio.run(talk())


THINKS_LAST = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
    "{% set seen = namespace(users=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and seen.users < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_where_a_template_takes_off_earlier_thoughts_the_calls_have_their_results_all_the_same():
    chat = ChatTemplate.load(TINY, ChatConfig(template=THINKS_LAST))
    timeline = Timeline(Clock(tick=0.001))
    script = conversation(CHAT, ["<think>\nhm\n</think>\n\n" + call("1") + END], ["done" + END])
    async with fleet_of(Replicas(chat=CHAT, script=script), timeline=timeline) as fleet:
        gateway = Gateway(fleet, chat, timeline, GatewayConfig())
        session = gateway.open("s", SessionRules(max_tokens=3000))
        dialect = OpenAiDialect(chat)
        reply = await dialect.ask(session, dialect.body([ASKED], tools=True), stream=False)
        results = [Result(call=each, text="42") for each, _, _ in reply.calls]
        await dialect.ask(session, dialect.body([ASKED, reply, *results, ASKED], tools=True), stream=False)
        trajectory = session.trajectory(a_prompt(), StopReason.ANSWER)
        assert len(trajectory.parts) == 2, "the model does not read the thought any more"
        [segment] = trajectory.segments
        assert [use.outcome for turn in segment.turns for use in turn.tool_uses] == ["ok"] * len(results)
        gateway.closing()


async def test_branches_whose_texts_are_equal_go_on_as_the_client_sends_them():
    """Two turns with the same text and calls: the thought, or else the calls' ids, tell which one goes on."""
    timeline = Timeline(Clock(tick=0.001))

    def script(token_ids, sampling):
        gate = Gate()
        gate.release()
        yield gate
        thought = "" if b"Go on" in CHAT.decode(token_ids).encode() else f"<think>\nhm {sampling.seed % 1000}\n</think>"
        yield thought + call("1") + END

    async with fleet_of(Replicas(chat=CHAT, script=script), timeline=timeline) as fleet:
        for habit in (as_it_came, without_thought):
            gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
            session = gateway.open(habit.__name__, SessionRules(max_tokens=3000, seed=1, prompt_id="p"))
            agent = Agent(session, random.Random(1))
            branches = await at_once(*(agent.ask([ASKED], habit=habit) for _ in range(3)))
            for branch in reversed(branches):
                await agent.ask(branch, habit=habit)
                [first] = [item for item in branch if isinstance(item, Reply)]
                last = agent.replies[-1].finished
                assert last.prompt_ids[: len(first.finished.prompt_ids) + len(first.finished.token_ids)] == (
                    *first.finished.prompt_ids,
                    *first.finished.token_ids,
                ), "it goes on from another branch"
            assert len(session.trajectory(a_prompt(), StopReason.ANSWER).parts) == 3
            gateway.closing()


async def test_branches_that_differ_in_an_earlier_thought_go_on_as_the_client_sends_them():
    timeline = Timeline(Clock(tick=0.001))
    firsts = iter(["<think>\nhm\n</think>\n\nIt is ", "It is "])

    def script(token_ids, sampling):
        yield ("<think>\nso\n</think>\n\nI say " if b"Go on" in CHAT.decode(token_ids).encode() else next(firsts)) + END

    async with fleet_of(Replicas(chat=CHAT, script=script), timeline=timeline) as fleet:
        gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
        session, dialect = gateway.open("s", SessionRules(max_tokens=3000)), OpenAiDialect(CHAT)

        async def ask(*items):
            return await dialect.ask(session, dialect.body(items, tools=False, max_tokens=200), stream=False)

        more = Said(role="user", text="Go on.")
        firsts_said = [await ask(ASKED), await ask(ASKED)]
        seconds = [await ask(ASKED, first, more) for first in firsts_said]
        for first, second in reversed([*zip(firsts_said, seconds, strict=True)]):
            last = await ask(ASKED, first, more, second, more)
            read = (*second.finished.prompt_ids, *second.finished.token_ids)
            assert last.finished.prompt_ids[: len(read)] == read, "it goes on from another branch"
        gateway.closing()
