"""The tool and the budgets that a server is given by its command line."""

import json

import pytest

from engine.commands.gateway_tools import ToolOptions
from engine.console.options import parse
from engine.tools.python_tool import schema
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS
from sandbox.wire import ToolResult
from tests.support.fakes import ScriptedRunner


@pytest.mark.parametrize("name", ["report", "release"])
@pytest.mark.parametrize("stateful", [False, True])
async def test_the_protocols_of_a_recipe_can_be_given(tmp_path, name, stateful):
    protocol = PROTOCOLS[name]
    path = tmp_path / "tool.json"
    path.write_text(json.dumps(protocol.schema(stateful=stateful)))
    words = [f"schema={path}", f"stateful={stateful}", "display=true", f"reply_chars={protocol.reply_chars}"]
    words += [f"calls_per_turn={protocol.calls_per_turn or 'none'}", "surplus_calls=drop"]
    words += ["cut=outside", "feedback=judge"] if name == "release" else ["cut=inside"]
    options = parse(ToolOptions, words)
    long = ToolResult(outcome="ok", stdout="a" * 5000 + "b" * 5000)
    runner = ScriptedRunner(lambda code: long)
    assert schema(options.tool(runner)) == protocol.schema(stateful=stateful)
    budget = options.budget(max_tokens=100)
    assert (budget.max_calls_per_turn, budget.surplus_calls) == (protocol.calls_per_turn, "drop")
    if not stateful:
        ours, theirs = options.tool(runner), protocol.tool(runner, stateful=False)
        arguments = {"code": "1", "input": ""}
        assert (await ours(arguments)) == (await theirs(arguments))
        assert runner.displayed == [True, True]


def test_a_tool_is_shown_as_its_file_says(tmp_path):
    shown = {"name": "run", "description": "Runs code.", "parameters": {"type": "object", "properties": {}}}
    path = tmp_path / "tool.json"
    path.write_text(json.dumps({"type": "function", "function": shown}))
    assert schema(ToolOptions(schema=path).tool(None))["function"] == shown
    assert schema(ToolOptions(name="run").tool(None))["function"]["name"] == "run"


@pytest.mark.parametrize("text", [None, "{", "{}", '{"function": {"name": ""}}'])
def test_a_file_that_holds_no_tool_is_named(tmp_path, capsys, text):
    path = tmp_path / "tool.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse(ToolOptions, [f"schema={path}"])
    assert end.value.code == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("word", ["turns=0", "reply_chars=3", "cut=off", "response_tokens=0", "calls_per_turn=0"])
def test_a_value_that_cannot_be_is_refused_by_name(capsys, word):
    with pytest.raises(SystemExit) as end:
        parse(ToolOptions, [word])
    assert end.value.code == 2
    assert {"reply_chars": "output_chars", "turns": "max_turns"}.get(word.split("=")[0], word.split("=")[0]) in (
        capsys.readouterr().err
    )
