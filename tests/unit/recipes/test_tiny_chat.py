"""The chat: one episode with a scripted model and tool, and what a wrong checkpoint says."""

import io

import pytest
from rich.console import Console

from engine.ports import ToolReply
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate
from recipes.tiny.chat import Config, episode
from recipes.tiny.task import MAX_TOKENS, SHIPPED, tool_call
from sandbox import SandboxUnavailable

CHAT = ChatTemplate.load(SHIPPED)


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


async def play(script, tool):
    console = Console(file=io.StringIO(), width=1000)
    ids = await episode("Q?", CHAT, script, tool, 1.0, console)
    return CHAT.decode(ids), console.file.getvalue()


ANSWER = "<reason>The result is 13.</reason>\n<answer>\\boxed{13}</answer>"


async def test_a_call_is_run_and_its_reply_read():
    script, tool = Script(tool_call("print(13)"), ANSWER), Tool()
    text, shown = await play(script, tool)
    assert tool.codes == ["print(13)"]
    assert script.prompts[1].endswith("<tool_response>\n13\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert text == script.prompts[1] + ANSWER + "<|im_end|>"
    assert "python says: 13" in shown
    assert "\\boxed{13}" in shown
    assert "<|im_end|>" not in shown


async def test_a_turn_that_ends_at_another_end_token_of_the_model_is_ended_by_ours():
    script = Script(tool_call("print(13)"), ANSWER, end="<|pad|>")
    await play(script, Tool())
    assert "</tool_call><|pad|><|im_end|>\n<|im_start|>user\n<tool_response>" in script.prompts[1]


async def test_a_malformed_call_is_explained_to_the_model():
    script, tool = Script(tool_call("print(13)").replace('"}}', '"}'), ANSWER), Tool()
    await play(script, tool)
    assert tool.codes == []
    assert "FormatError: Expecting ',' delimiter" in script.prompts[1]


async def test_calls_and_tokens_are_bounded():
    _, shown = await play(Script(*[tool_call("1")] * 9), Tool())
    assert "(out of" in shown
    text, shown = await play(Script("la " * 500), Tool())
    assert len(CHAT._encode(text)) <= MAX_TOKENS
    assert "(out of tokens)" in shown


async def test_a_lost_call_is_never_shown_to_the_model():
    with pytest.raises(SandboxUnavailable, match="lost a call"):
        await play(Script(tool_call("print(13)")), Tool(outcome="lost"))


def test_a_checkpoint_is_found_in_a_run_folder_and_a_wrong_path_is_named(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer_config\.json"):
        _ = Config(checkpoint=tmp_path).weights
    (tmp_path / "checkpoint" / "tokenizer_config.json").touch()
    assert Config(checkpoint=tmp_path).weights == tmp_path / "checkpoint"
    assert Config(checkpoint=tmp_path / "checkpoint").weights == tmp_path / "checkpoint"
