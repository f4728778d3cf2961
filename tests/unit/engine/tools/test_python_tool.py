"""What the model reads of a tool and of its calls."""

import re
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadInput
from engine.ports import ToolReply
from engine.tools.python_feedback import Told
from engine.tools.python_tool import NOTES, PythonSessions, PythonTool, clip, clip_outside, schema
from sandbox.wire import MAX_CODE_BYTES, Limits, ToolResult
from tests.support.fakes import ScriptedRunner, ScriptedSessions


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(outcome="ok", stdout="42\n", stderr="a warning"), "42"),
        (ToolResult(outcome="ok", stdout=""), ""),
        (ToolResult(outcome="ok", display="[1, 2]"), "[1, 2]"),
        (ToolResult(outcome="ok", stdout="42\n", display="'x'", session_state="kept"), "42\n'x'"),
        (ToolResult(outcome="ok", stdout="42\n", session_state="restored"), f"42\n{NOTES['restored']}"),
        (ToolResult(outcome="ok", session_state="restored"), NOTES["restored"]),
        (ToolResult(outcome="error", display="'x'", stderr="NameError: name 'x'\n"), "NameError: name 'x'"),
        (ToolResult(outcome="error", stdout="half", stderr="", exit_code=3), "half\nError: exit code 3"),
        (ToolResult(outcome="timeout", stdout="half\n", wall_s=2.04), "half\nTimeoutError: stopped after 2.0 s"),
        (ToolResult(outcome="memory", stderr="noise"), "MemoryError: out of memory"),
        (
            ToolResult(outcome="memory", session_state="lost"),
            "MemoryError: out of memory\nNote: all variables are gone.",
        ),
        (ToolResult(outcome="output", stdout="x" * 99), f"{'x' * 99}\nOutputError: too much output"),
        (ToolResult(outcome="killed", stderr="a warning\n"), "a warning\nError: killed by a signal"),
    ],
)
async def test_the_model_reads_what_was_printed_and_what_ended_the_call(result, text):
    result = msgspec.structs.replace(result, queue_s=0.25)
    reply = await PythonTool(ScriptedRunner(lambda code: result))({"code": "x"})
    assert reply == ToolReply(outcome=result.outcome, text=text, executed=True, jailed=False, queue_s=0.25)


@pytest.mark.parametrize(
    ("outcome", "text"), [("success", "42"), (True, "42"), ("ok", None), ("ok", 42), ("ok", b"42")]
)
def test_an_answer_of_another_form_is_refused(outcome, text):
    with pytest.raises(ValueError, match=re.escape(f"got {outcome!r} and {text!r}")):
        ToolReply(outcome=outcome, text=text)


async def test_code_input_and_limits_reach_the_sandbox():
    runner, limits = ScriptedRunner(), Limits(wall_s=1)
    tool = PythonTool(runner, name="run", limits=limits)
    reply = await tool({"code": "print(1)", "input": "7"})
    assert tool.name == "run"
    assert runner.calls == [("print(1)", "7", limits)]
    assert reply.jailed


@pytest.mark.parametrize("display", [False, True])
async def test_a_display_is_asked_for(display):
    runner = ScriptedRunner()
    await PythonTool(runner, display=display)({"code": "6 * 7"})
    assert runner.displayed == [display]


async def test_code_input_and_limits_reach_the_session():
    sessions, limits = ScriptedSessions(), Limits(wall_s=1)
    async with PythonSessions(sessions, name="run", limits=limits).open() as tool:
        reply = await tool({"code": "print(1)", "input": "7"})
        refused = await tool({"code": 3})
    assert tool.name == "run"
    assert [session.calls for session in sessions.made] == [[("print(1)", "7", limits)]]
    assert (reply.text, reply.jailed) == ("print(1)", True)
    assert (refused.outcome, refused.executed) == ("error", False)


@pytest.mark.parametrize("stateful", [False, True])
async def test_the_feedback_is_that_of_the_tool_and_only_its_note_is_not_cut(stateful):
    def told(code, result):
        return Told(output=f"{code}: {result.stdout * 20}", note="A note of the tool.")

    result = ToolResult(outcome="ok", stdout="7 ", session_state="lost" if stateful else None)
    if stateful:
        tool = PythonSessions(ScriptedSessions(lambda code: result), output_chars=30, feedback=told)
        async with tool.open() as opened:
            reply = await opened({"code": "x"})
    else:
        reply = await PythonTool(ScriptedRunner(lambda code: result), output_chars=30, feedback=told)({"code": "x"})
    output, *notes = reply.text.split("\n")
    assert output == clip("x: " + "7 " * 20, 30)
    assert notes == ["A note of the tool.", *([NOTES["lost"]] if stateful else [])]


async def test_code_that_no_sandbox_takes_is_answered():
    runner = ScriptedRunner()
    reply = await PythonTool(runner)({"code": "#" * (MAX_CODE_BYTES + 1)})
    assert (reply.outcome, reply.executed, runner.calls) == ("error", False, [])


async def test_a_note_is_never_cut():
    result = ToolResult(outcome="ok", stdout="7 " * 300, session_state="lost")
    async with PythonSessions(ScriptedSessions(lambda code: result), output_chars=30).open() as tool:
        text = (await tool({"code": "x"})).text
    output, _, note = text.rpartition("\n")
    assert (len(output), note) == (30, NOTES["lost"])


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": None}, {"code": "x", "input": 7}, {"input": "x"}])
async def test_wrong_arguments_are_answered_without_a_call(arguments):
    runner = ScriptedRunner()
    reply = await PythonTool(runner)(arguments)
    assert (reply.outcome, reply.executed) == ("error", False)
    assert runner.calls == []


@given(st.text(max_size=80), st.integers(20, 60))
def test_clip_keeps_both_ends_within_the_limit(text, limit):
    found = clip(text, limit)
    assert len(found) <= limit
    if len(text) <= limit:
        assert found == text
    else:
        head, mark, tail = found.partition(" [...] ") if " [...] " not in text else (found[:1], " [...] ", found[-1:])
        assert mark
        assert text.startswith(head)
        assert text.endswith(tail)


@given(st.text(max_size=80), st.integers(20, 60).map(lambda n: n // 2 * 2))
def test_a_cut_outside_the_limit_keeps_that_many_characters_and_adds_the_mark(text, limit):
    half = limit // 2
    cut = text if len(text) <= limit else f"{text[:half]}...(truncated)...{text[len(text) - half :]}"
    assert clip_outside(text, limit) == cut


@pytest.mark.parametrize("stateful", [False, True])
async def test_output_is_cut_as_the_tool_is_told(stateful):
    result = ToolResult(outcome="ok", stdout="a" * 128 + "b" * 129)
    if stateful:
        tool = PythonSessions(ScriptedSessions(lambda code: result), output_chars=256, cut=clip_outside)
        async with tool.open() as opened:
            reply = await opened({"code": "x"})
    else:
        reply = await PythonTool(ScriptedRunner(lambda code: result), output_chars=256, cut=clip_outside)({"code": "x"})
    assert reply.text == "a" * 128 + "...(truncated)..." + "b" * 128


def test_a_limit_without_room_is_refused():
    for make in (lambda: PythonTool(ScriptedRunner(), output_chars=3), lambda: PythonSessions(None, output_chars=3)):
        with pytest.raises(ValueError, match="output_chars must be at least 20, got 3"):
            make()


# Schemas


class Place(TypedDict):
    city: str
    country: NotRequired[str]


class Forecast(TypedDict):
    place: Place
    days: NotRequired[int]


@dataclass
class Weather:
    name: str = "weather"

    async def __call__(self, arguments: Forecast) -> ToolReply:
        """Says what the weather
        will be.

        Not of yesterday.
        """
        return ToolReply(outcome="ok", text="rain")


def parameters(tool):
    return schema(tool)["function"]["parameters"]


def test_a_schema_is_that_of_the_tool():
    class Lookup:
        """Not what the model is to read."""

        name = "lookup"
        description = "Looks a word up."
        parameters = {"type": "object", "properties": {"word": {"type": "string"}}}  # noqa: RUF012

    function = {"name": "lookup", "description": "Looks a word up.", "parameters": Lookup.parameters}
    assert schema(Lookup()) == {"type": "function", "function": function}


def test_a_world_has_no_schema_as_its_tools_have():
    world = type("Lamps", (), {"name": "lamp", "tools": (), "open": lambda self, prompt: ...})()
    with pytest.raises(BadInput, match=r"lamp.*job\.rollouts"):
        schema(world)


def test_a_schema_comes_from_docstring_and_signature_where_the_tool_has_none():
    found = schema(Weather())["function"]
    assert (found["name"], found["description"]) == ("weather", "Says what the weather will be.")
    assert found["parameters"]["properties"]["days"] == {"type": "integer"}
    assert found["parameters"]["required"] == ["place"]
    reference = found["parameters"]["properties"]["place"]["$ref"]
    assert reference == "#/$defs/Place"
    assert found["parameters"]["$defs"]["Place"]["required"] == ["city"]


def test_a_tool_that_says_nothing_of_itself_has_a_schema():
    class Bare:
        name = "bare"

        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text="")

    wanted = {"name": "bare", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert schema(Bare())["function"] == wanted


@pytest.mark.parametrize("tool", [PythonTool(ScriptedRunner()), PythonSessions(ScriptedSessions(), name="jupyter")])
def test_the_python_tools_say_what_they_take(tool):
    assert parameters(tool)["properties"].keys() == {"code", "input"}
    assert parameters(tool)["required"] == ["code"]
    assert schema(tool)["function"]["description"]
