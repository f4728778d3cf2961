"""What is trained is byte for byte what the model saw, and a call leaves with the token that closes it."""

import json
from contextlib import aclosing
from itertools import chain, cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import RolloutConfig, Rollouts
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser
from engine.telemetry.timeline import Timeline
from engine.tools.python_tool import PythonTool
from engine.types import StopReason
from sandbox.wire import ToolResult
from tests.support.examples import examples
from tests.support.fakes import Clock, ScriptedReplica, ScriptedRunner, a_prompt, conversation, fleet_of
from tests.unit.engine.rollout.test_chat_template import tokenizer

END = "<|im_end|>"
CHATS = {"tags are tokens": ChatTemplate(tokenizer()), "tags are spelled": ChatTemplate(tokenizer(tags=()))}


class Chunked(ScriptedReplica):
    """Hands out as many tokens at a time as `sizes` say; `calls_of` is asked after each delta was taken in."""

    def __init__(self, index, on_step, *, sizes, watch, runner, **options):
        super().__init__(index, on_step, **options)
        self.sizes, self.watch, self.runner = sizes, watch, runner

    async def generate(self, token_ids, sampling, request_id):
        held, sent, size = [], [], next(self.sizes)
        async with aclosing(super().generate(token_ids, sampling, request_id)) as deltas:
            async for delta in deltas:
                held.append(delta)
                if len(held) < size and not delta.finish:
                    continue
                sent += [token for part in held for token in part.token_ids]
                logprobs = [logprob for part in held for logprob in part.logprobs]
                tokens = [token for part in held for token in part.token_ids]
                if delta.finish:
                    self.runner.release()
                yield Delta(tokens, logprobs, delta.finish, delta.cached_tokens, delta.version, delta.spans)
                if not delta.finish:
                    self.watch(sent)
                held, size = [], next(self.sizes)


def dispatched(chat, tokens):
    """How many calls have closed in these tokens, read one by one."""
    parser, stream = ToolCallParser(), chat.stream()
    calls = chain.from_iterable(parser.feed(stream.step([token])) for token in tokens)
    return sum(isinstance(call, ToolCall) for call in calls)


async def roll(chat, turns, sizes, answer):
    timeline, runner = Timeline(Clock(tick=0.001)), ScriptedRunner(answer, hold=True)
    made = []

    def watch(sent):
        lanes = timeline.lanes["tool calls"]
        assert lanes._next - len(lanes._free) == dispatched(chat, sent), chat.decode(sent)

    def make(index, core, on_step):
        script = conversation(chat, *([turn + END] for turn in turns))
        made.append(Chunked(index, on_step, sizes=cycle(sizes), watch=watch, runner=runner, chat=chat, script=script))
        return made[-1]

    async with fleet_of(make, timeline=timeline) as fleet:
        budget = RolloutConfig(max_tokens=100_000, max_turns=len(turns), max_calls_per_turn=100)
        rollouts = Rollouts(budget, chat, fleet, [PythonTool(runner)], timeline, seed=0)
        trajectory = await rollouts.run(a_prompt(), 0, 0)
    return trajectory, made[0].requests, runner


def a_call(code, *, ascii_only):
    content = {"name": "python", "arguments": {"code": code}}
    return f"<tool_call>{json.dumps(content, ensure_ascii=ascii_only)}</tool_call>"


codes = st.lists(st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", "é𝄞", "x > 1", "\n", "}"]), max_size=5)
calls = st.builds(lambda parts, ascii_only: a_call("".join(parts), ascii_only=ascii_only), codes, st.booleans())
words = st.sampled_from(["I think", "é𝄞", " ", "\n", "<", ">", "</", "<tool", "</tool_call>", "{", '"', "🙂"])
texts = st.lists(st.one_of(words, calls), max_size=6).map("".join)
answers = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from([END, "</tool_response>"])


@pytest.mark.parametrize("chat", CHATS.values(), ids=list(CHATS))
@examples(30)
@given(
    turns=st.lists(st.tuples(texts, calls), max_size=3),
    last=texts,
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    answer=answers,
)
async def test_the_trained_tokens_are_those_that_the_model_saw(chat, turns, last, sizes, answer):
    texts = [*("".join(turn) for turn in turns), last]
    trajectory, requests, runner = await roll(chat, texts, sizes, lambda code: ToolResult(outcome="ok", stdout=answer))
    ids = trajectory.token_ids_T.tolist()
    assert [seen for seen, _, _ in requests] == [ids[: turn.start] for turn in trajectory.turns]
    messages = [{"role": "user", "content": a_prompt().messages[0]["content"]}]
    for text, turn in zip(texts, trajectory.turns, strict=False):
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": use.response} for use in turn.tool_uses]
        assert chat.decode(ids[turn.start : turn.end]) == text + END
    ended = trajectory.stop is StopReason.ANSWER
    messages = messages if ended else messages[: -len(trajectory.turns[-1].tool_uses)]
    whole = chat._tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole.startswith(chat.decode(ids))
    assert len(whole) - len(chat.decode(ids)) <= 1, "the newline after the end of the last turn"
    pieces = chat.conversation(messages)
    assert [token for piece, _ in pieces for token in piece] == ids, "the same conversation as an example to learn"
    assert [said for piece, said in pieces for _ in piece] == trajectory.sampled_T.tolist()
    assert trajectory.text == "".join(text + END for text in texts[: len(trajectory.turns)])
    parsed = [call for text in texts[: len(trajectory.turns)] for call in _parse(text + END)]
    assert [code for code, _, _ in runner.calls] == [
        call.arguments["code"] for call in parsed if isinstance(call, ToolCall)
    ]
    assert len(trajectory.tool_uses) == len(parsed)


def _parse(text):
    parser = ToolCallParser()
    return [*parser.feed(text), *parser.finish()]
