"""Conversations with a scripted model and tool: what the model reads, what is shown, and what ends them."""

import io

import pytest
from rich.console import Console

from engine.errors import BadInput
from engine.ports import ToolReply
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate
from recipes.conversation import OnReplica, converse, opened, weights_folder
from recipes.tiny.task import MAX_TOKENS, SHIPPED, tool_call
from sandbox import SandboxUnavailable
from sandbox.printable import printable

CHAT = ChatTemplate.load(SHIPPED)
ANSWER = "<reason>The result is 13.</reason>\n<answer>\\boxed{13}</answer>"


class Script:
    """Plays the model: each request gets the next turn, token by token. end: its own end token."""

    def __init__(self, *turns, end=CHAT.end_of_turn_text):
        self.turns = list(turns)
        self.prompts = []
        self.end = end

    async def generate(self, token_ids, sampling, request_id):
        self.prompts.append(CHAT.decode(token_ids))
        text = self.turns.pop(0) + self.end
        ids = CHAT._encode(text)[: sampling.max_tokens]
        for at, token in enumerate(ids):
            last = at == len(ids) - 1
            finish = None if not last else "stop" if CHAT.decode([token]) == self.end else "length"
            yield Delta([token], [0.0], finish)


class Tool:
    name = "python"

    def __init__(self, outcome="ok"):
        self.outcome = outcome
        self.codes = []

    async def __call__(self, arguments):
        self.codes.append(arguments["code"])
        return ToolReply(outcome=self.outcome, text="13")


class Talk:
    """A conversation: what the speaker holds, what is shown, and what ended each question."""

    def __init__(self, script, tool, **limits):
        self.console = Console(file=io.StringIO(), width=1000)
        self.speaker = OnReplica(CHAT, script, max_tokens=MAX_TOKENS, temperature=1.0)
        self.tools = {tool.name: tool}
        self.limits = {"max_turns": 4, **limits}

    async def ask(self, question="Q?"):
        return await converse(question, self.speaker, self.tools, **self.limits, console=self.console)

    @property
    def text(self):
        return CHAT.decode(self.speaker.token_ids)

    @property
    def shown(self):
        return self.console.file.getvalue()


async def test_a_call_is_run_and_its_reply_read():
    script, tool = Script(tool_call("print(13)"), ANSWER), Tool()
    talk = Talk(script, tool)
    assert await talk.ask() == "answer"
    assert tool.codes == ["print(13)"]
    assert script.prompts[1].endswith("<tool_response>\n13\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert talk.text == script.prompts[1] + ANSWER + "<|im_end|>"
    assert "python says: 13" in talk.shown
    assert "\\boxed{13}" in talk.shown
    assert "<|im_end|>" not in talk.shown


async def test_what_model_and_tool_say_is_no_order_to_the_terminal():
    orders = "\x1b[2J\x9b2J\u202e"

    class Evil(Tool):
        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text=orders)

    script = Script(f"{orders}{tool_call('1')}", f"{orders}{ANSWER}")
    talk = Talk(script, Evil())
    await talk.ask()
    assert orders in script.prompts[1]
    assert talk.shown.count(printable(orders)) == 3
    assert printable(talk.shown) == talk.shown


async def test_a_second_question_is_read_after_what_was_said_before():
    script = Script(tool_call("print(13)"), ANSWER, "And now 14.")
    talk = Talk(script, Tool())
    await talk.ask("First?")
    before = talk.text
    await talk.ask("Second?")
    assert script.prompts[2] == f"{before}\n<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_turn_that_ends_at_another_end_token_of_the_model_is_ended_by_ours():
    script = Script(tool_call("print(13)"), ANSWER, end="<|pad|>")
    await Talk(script, Tool()).ask()
    assert "</tool_call><|pad|><|im_end|>\n<|im_start|>user\n<tool_response>" in script.prompts[1]


async def test_a_malformed_call_and_an_unknown_tool_are_explained_to_the_model():
    malformed = tool_call("print(13)").replace('"}}', '"}')
    script, tool = Script(malformed + tool_call("1").replace("python", "wolfram"), ANSWER), Tool()
    await Talk(script, tool).ask()
    assert tool.codes == []
    assert "FormatError: Expecting ',' delimiter" in script.prompts[1]
    assert "NameError: no tool 'wolfram' (there is: python)" in script.prompts[1]


async def test_calls_beyond_the_limit_of_a_turn_get_no_reply():
    script, tool = Script(tool_call("1") + tool_call("2"), ANSWER), Tool()
    await Talk(script, tool, max_calls_per_turn=1).ask()
    assert tool.codes == ["1"]
    assert script.prompts[1].count("<tool_response>") == 1


async def test_turns_and_tokens_are_bounded():
    talk = Talk(Script(*[tool_call("1")] * 9), Tool(), max_turns=2)
    assert await talk.ask() == "turns"
    talk = Talk(Script("la " * 500), Tool())
    assert await talk.ask() == "tokens"
    assert len(talk.speaker.token_ids) <= MAX_TOKENS
    assert await talk.ask() == "tokens", "no room for a second question: the model is not asked"


async def test_a_lost_call_is_never_shown_to_the_model():
    with pytest.raises(SandboxUnavailable, match="lost a call"):
        await Talk(Script(tool_call("print(13)")), Tool(outcome="lost")).ask()


async def test_a_world_is_refused_as_a_conversation_has_no_prompt_to_open_it_for():
    world = type("Lamps", (), {"name": "lamp", "tools": (), "open": lambda self, prompt: ...})()
    with pytest.raises(BadInput, match="lamp"):
        async with opened(world):
            pass


async def test_a_stateful_tool_is_opened_for_a_conversation_and_closed_after_it():
    events = []

    class Sessions:
        name = "python"

        def open(self):
            return self

        async def __aenter__(self):
            events.append("opened")
            return Tool()

        async def __aexit__(self, *_):
            events.append("closed")

    async with opened(Sessions()) as tools:
        assert isinstance(tools["python"], Tool)
        assert events == ["opened"]
    assert events == ["opened", "closed"]


def test_a_checkpoint_is_found_in_a_run_folder_and_a_wrong_path_is_named(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ValueError, match=f"checkpoint: .*{tmp_path}"):
        weights_folder(tmp_path)
    (tmp_path / "checkpoint" / "tokenizer_config.json").touch()
    assert weights_folder(tmp_path) == tmp_path / "checkpoint"
    assert weights_folder(tmp_path / "checkpoint") == tmp_path / "checkpoint"
