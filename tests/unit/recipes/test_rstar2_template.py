"""rStar2-Agent's chat: append-only with and without tools and reasons, and a base model that gets it."""

import json

import pytest
from transformers import AutoTokenizer

from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser
from recipes.rstar2.parts.sampling.protocol import (
    RELEASE,
    REPORT,
)
from recipes.rstar2.template import TURN_END, install, main
from sandbox.wire import ToolResult
from tests.support.fakes import ScriptedRunner, ScriptedSessions
from tests.support.paths import TINY

QUESTION = {"role": "user", "content": "What is 6 * 7?"}
CODE = {"code": "print('é' * 7)", "input": ""}


def chat(protocol, *, reason=True, stateful=False):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return ChatTemplate(tokenizer, protocol.chat(reason=reason)).with_tools([protocol.schema(stateful=stateful)])


def calling(protocol):
    """A whole conversation with a call as data."""
    call = {"type": "function", "function": {"name": protocol.tool_name, "arguments": json.dumps(CODE)}}
    return [
        QUESTION,
        {"role": "assistant", "content": "<reason>I compute.</reason>", "tool_calls": [call, call]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "43"},
        {"role": "assistant", "content": "<reason>So.</reason>\n<answer>\\boxed{42}</answer>"},
    ]


@pytest.fixture
def base(tmp_path):
    """A base model: no chat template of its own, and an end of text that is not that of a turn."""
    folder = tmp_path / "base"
    folder.mkdir()
    for path in TINY.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.eos_token, tokenizer.chat_template = "<|pad|>", None
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6, "top_k": 20}))
    return folder


@pytest.mark.parametrize("protocol", [REPORT, RELEASE], ids=["report", "release"])
def test_a_problem_is_asked_with_system_text_prefix_and_an_open_reason(protocol):
    shown = chat(protocol)
    text = shown.decode(shown.prompt_ids([QUESTION]))
    system, user, assistant = text.split("<|im_start|>")[1:]
    assert system.startswith(f"system\n{protocol.system}\n\n# Tools\n")
    assert user == f"user\n{protocol.user_prefix}What is 6 * 7?<|im_end|>\n"
    assert assistant == "assistant\n<reason>"
    assert shown.prefill == "<reason>"


def test_an_own_system_message_takes_the_place_of_the_system_text():
    shown = chat(REPORT)
    text = shown.decode(shown.prompt_ids([{"role": "system", "content": "Be brief."}, QUESTION]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert REPORT.system not in text


@pytest.mark.parametrize("stateful", [False, True])
def test_the_tools_stand_as_json_one_a_line(stateful):
    shown = chat(REPORT, stateful=stateful)
    text = shown.decode(shown.prompt_ids([QUESTION]))
    [line] = text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    function = json.loads(line)["function"]
    assert function["name"] == (REPORT.stateful_tool_name if stateful else REPORT.tool_name)
    names = ["code"] if stateful else ["code", "input"]
    assert function["parameters"]["required"] == list(function["parameters"]["properties"]) == names


@pytest.mark.parametrize("protocol", [REPORT, RELEASE], ids=["report", "release"])
def test_a_rollouts_parser_finds_the_calls_that_a_conversation_holds(protocol):
    shown, parser = chat(protocol), ToolCallParser()
    _, (asked, _), (given, _), _ = shown.conversation(calling(protocol))
    call = ToolCall(name=protocol.tool_name, arguments=CODE)
    assert [*parser.feed(shown.decode(asked)), *parser.finish()] == [call, call]
    arguments = json.dumps(CODE, ensure_ascii=False)
    written = f'<tool_call>\n{{"name": "{protocol.tool_name}", "arguments": {arguments}}}\n</tool_call>'
    assert shown.decode(asked) == f"I compute.</reason>\n{written}\n{written}<|im_end|>"
    replies = "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>"
    assert shown.decode(given) == f"\n<|im_start|>user\n{replies}<|im_end|>\n<|im_start|>assistant\n<reason>"


def test_the_pieces_of_a_conversation_are_the_whole_of_it():
    shown = chat(REPORT)
    messages = [*calling(REPORT), QUESTION, {"role": "assistant", "content": "<reason>As before.</reason>"}]
    ids = [token for piece, _ in shown.conversation(messages) for token in piece]
    assert shown.decode(ids) + "\n" == shown._render(
        [
            {**message, "tool_calls": [{"function": {"name": REPORT.tool_name, "arguments": CODE}}] * 2}
            if "tool_calls" in message
            else message
            for message in messages
        ],
        generate=False,
    )


def test_without_reasons_a_conversation_is_rendered_as_it_is():
    shown = ChatTemplate(AutoTokenizer.from_pretrained(TINY), REPORT.chat(reason=False))
    pieces = shown.conversation([QUESTION, {"role": "assistant", "content": "42"}])
    asked, answered = (shown.decode(ids) for ids, _ in pieces)
    assert asked == "<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    assert answered == "42<|im_end|>"


def test_an_answer_that_a_server_gave_without_the_opened_reason_gets_it_back():
    shown = chat(REPORT)
    opened, asked = calling(REPORT)[:2]
    cut = {**asked, "content": asked["content"].removeprefix("<reason>"), "tool_calls": None}
    again = [{**asked, "tool_calls": None}, cut]
    with_reason, without = (shown._render([opened, message, QUESTION], generate=True) for message in again)
    assert with_reason == without


@pytest.mark.parametrize("protocol", [REPORT, RELEASE], ids=["report", "release"])
@pytest.mark.parametrize("stateful", [False, True])
async def test_replies_are_cut_as_the_protocol_says(protocol, stateful):
    result = ToolResult(outcome="ok", stdout="a" * 1000 + "b" * 1000)
    if stateful:
        async with protocol.tool(ScriptedSessions(lambda code: result), stateful=True).open() as tool:
            reply = await tool({"code": "1"})
    else:
        runner = ScriptedRunner(lambda code: result)
        reply = await protocol.tool(runner, stateful=False)({"code": "1", "input": ""})
        assert runner.displayed == [True]
    begin, end = "Tool call success\nstdout: ", "\nexecution time: 0.00s"
    released = (begin.ljust(128, "a"), end.rjust(128, "a"))  # its judge has cut 1,000 characters off before
    cut = {"report": "a" * 497 + " [...] " + "b" * 496, "release": "...(truncated)...".join(released)}
    assert reply.text == cut[protocol.name]


def test_the_release_drops_all_calls_of_a_turn_but_the_first():
    report, release = (protocol.budget(response_tokens=100, turns=3) for protocol in (REPORT, RELEASE))
    assert report.max_calls_per_turn is None
    assert (release.max_calls_per_turn, release.surplus_calls, release.max_turns) == (1, "drop", 3)


def test_a_base_model_gets_template_end_of_turn_and_its_own_weights(base, tmp_path):
    output = tmp_path / "made" / "chat"
    install(base, output, REPORT)
    tokenizer = AutoTokenizer.from_pretrained(output)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    assert tokenizer.eos_token_id == end
    assert ChatTemplate.load(output).prefill == "<reason>"
    assert json.loads((output / "config.json").read_text())["eos_token_id"] == end
    generation = json.loads((output / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [end, 0], "pad_token_id": 0}  # no sampling that a server would take over
    assert (output / "model.safetensors").samefile(base / "model.safetensors")
    assert [path.name for path in output.parent.iterdir()] == ["chat"]


def test_a_template_file_of_the_base_model_does_not_hide_the_new_one(base, tmp_path):
    (base / "chat_template.jinja").write_text("{{ messages }}")
    install(base, tmp_path / "chat", REPORT)
    assert not (tmp_path / "chat" / "chat_template.jinja").exists()
    assert ChatTemplate.load(tmp_path / "chat").prefill == "<reason>"


def test_a_folder_of_links_as_a_hubs_cache_has_them_gives_a_folder_of_files(base, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in base.iterdir():
        (linked / path.name).symlink_to(path)
    install(linked, tmp_path / "chat", REPORT)
    assert [path.name for path in (tmp_path / "chat").iterdir() if path.is_symlink()] == []
    assert (tmp_path / "chat" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_a_tokenizer_without_the_tokens_of_chatml_is_refused_and_nothing_is_left(base, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (base / name).read_text()
        (base / name).write_text(text.replace("<|im_start|>", "<|start|>"))
    with pytest.raises(ValueError, match=r"model: .*'<\|im_start\|>'.*Fix: "):
        install(base, tmp_path / "chat", REPORT)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("wrong", ["model=nowhere", "output={there}", "protocol=mine"])
def test_a_wrong_option_is_one_line_and_exit_code_2(wrong, base, tmp_path, monkeypatch, capsys):
    given = {"model": f"model={base}", "output": f"output={tmp_path / 'chat'}"}
    name = wrong.partition("=")[0]
    given[name] = wrong.format(there=base)
    monkeypatch.setattr("sys.argv", ["template.py", *given.values()])
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line
    assert not (tmp_path / "chat").exists()
